"""The tensor-core rows against outputs of Microsoft's MMA-Sim, kept by `mma_sim_vectors.py`: every bit equal."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from mma_sim_cases import INSTRUCTIONS, SETS, VECTORS, digest, ours, sample, tiles

from fp4ep.reference import tensor_core
from fp4ep.reference.tensor_core import TensorCore

NAMES = list(INSTRUCTIONS)
CORES = [value for value in vars(tensor_core).values() if isinstance(value, TensorCore) and value.name]


@pytest.fixture(scope="module")
def vectors():
    with np.load(VECTORS) as file:
        return dict(file)


def test_the_vectors_are_of_these_tiles(vectors):
    about = json.loads(str(vectors["about"]))
    assert (about["instructions"], about["sets"]) == (NAMES, list(SETS))
    assert about["mmasim"] == "2.1.1"
    assert VECTORS.stat().st_size < 200_000


@pytest.mark.parametrize("name", NAMES)
def test_every_output_is_mma_sims(name, vectors):
    index = NAMES.index(name)
    for number, tile_set in enumerate(SETS):
        found = ours(INSTRUCTIONS[name], tiles(INSTRUCTIONS[name], tile_set))
        assert sample(found).tolist() == vectors["samples"][index, number].tolist(), tile_set
        assert digest(found) == vectors["digests"][index, number].tobytes(), tile_set


def test_every_row_is_compared():
    compared = {str(instruction.core) for instruction in INSTRUCTIONS.values()}
    assert compared == {str(core) for core in CORES}


def test_enough_tiles():
    """20,000 for each instruction, asked for; and they are not a few values over and over."""
    for instruction in INSTRUCTIONS.values():
        m, n = instruction.shape
        assert m * n * len(SETS) > 100_000
        found = ours(instruction, tiles(instruction, "all finite codes"))
        assert len(found.unique()) > 1000


# --- what the tiles tell apart -----------------------------------------------------------------------------------

OTHERS = {
    "one bit less below the largest": lambda core: replace(core, fraction_bits=core.fraction_bits - 1),
    "one bit more below the largest": lambda core: replace(core, fraction_bits=core.fraction_bits + 1),
    "one bit less in the result": lambda core: replace(core, output_bits=core.output_bits - 1),
    "subnormals of a normalised": lambda core: replace(
        core, min_exponent=core.min_exponent - 1, min_exponent_b=core.min_exponent_b or core.min_exponent
    ),
    "subnormals of b normalised": lambda core: replace(
        core, min_exponent_b=(core.min_exponent if core.min_exponent_b is None else core.min_exponent_b) - 1
    ),
    "a higher floor": lambda core: replace(core, lowest=core.lowest + 3),
    "a lower floor": lambda core: replace(core, lowest=core.lowest - 3),
    "smaller groups": lambda core: replace(core, group=core.group // 2),
}
#: Where the other rule is the same: E stays far above the floor; UE8M0 has no subnormals; groups of one pair.
SAME = {
    "a higher floor": lambda i: i.scale != "ue8m0" and i.a not in ("bf16", "tf32"),
    "a lower floor": lambda i: i.scale != "ue8m0" and i.a not in ("bf16", "tf32"),
    "subnormals of a normalised": lambda i: i.core.group > 1 and i.scale == "ue8m0",
    "subnormals of b normalised": lambda i: i.core.group > 1 and i.scale == "ue8m0",
    "smaller groups": lambda i: i.core.group == 1,
}


@pytest.mark.parametrize(
    ("name", "other"),
    [(n, o) for n, i in INSTRUCTIONS.items() for o in OTHERS if not (o in SAME and SAME[o](i))],
)
def test_another_rule_gives_other_bits(name, other, vectors):
    instruction, index = INSTRUCTIONS[name], NAMES.index(name)
    core = OTHERS[other](instruction.core)
    assert any(
        digest(ours(instruction, tiles(instruction, tile_set), core)) != vectors["digests"][index, number].tobytes()
        for number, tile_set in enumerate(SETS)
    )
