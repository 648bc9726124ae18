"""What two GPUs gave, run again by the CPU engine on two ranks, each a process of its own: every bit.

`fp4ep replay` runs the same cases by the reference, all ranks in one process; without numba it stands in here.
"""

import pytest
import torch

from fp4ep.optimized.engine_cpu import missing_for_engine
from fp4ep.optimized.flashinfer_sm90 import CONFIGS
from fp4ep.parity import Case, Recording, Run, find_side, shipped_recordings
from fp4ep.parity.launch import launch_each
from fp4ep.parity.order_set import reachable
from fp4ep.parity.problem import Layer
from fp4ep.parity.replay import compare_bits
from fp4ep.parity.sides import SIDES, Place
from fp4ep.reference.exchange import exchange_in_process
from fp4ep.reference.scheme import Combine
from fp4ep.reference.schemes import find_scheme

RECORDINGS = {p.stem: Recording(p) for p in shipped_recordings() if p.stem in ("h200_two_ranks", "h200_adapter_2")}
CASES = [(stem, case) for stem, recording in RECORDINGS.items() for case in recording.cases]


def recorded(stem: str, case: Case) -> tuple[Layer, torch.Tensor]:
    """The layer over two ranks, and what the kernel gave for the tokens of both."""
    side = find_side(f"recording:{RECORDINGS[stem].path}#{case.scheme} {case.title} {case.options}")
    assert side.layer is not None
    layer = side.layer(2)
    trace = side.run(layer, Place((0, 1), 2, exchange_in_process), None)
    return layer, torch.cat([stage.tensors["values"] for stage in trace])


def what_decides_bits(stem: str, case: Case) -> str:
    """Launches of one kernel, and knobs that change no bit, share a run."""
    return f"{stem} {case.scheme} {case.options} {case.tensors | {'output': ''}}"


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """By what decides bits; two processes for all."""
    layers: dict[str, Layer] = {}
    for stem, case in CASES:
        if (key := what_decides_bits(stem, case)) not in layers:
            layers[key], _ = recorded(stem, case)
    side = SIDES["reference" if missing_for_engine() else "fast"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_NUM_THREADS", "1")  # each process would take every core
        found = launch_each([side], list(layers.values()), how="spawned", timeout=300)
    return {key: run for key, (run,) in zip(layers, found, strict=True)}


def differing(run: Run, expected: torch.Tensor) -> int:
    """Elements that differ; with sums in order of arrival, those that no order gives."""
    stages = run.stages("combine").values()
    found = torch.cat([stage["values"] for stage in stages])
    if run.scheme.combine is Combine.ON_ARRIVAL:
        terms = torch.cat([stage["terms"] for stage in stages])
        ids = torch.cat([inputs.topk_ids for inputs in run.layer.inputs])
        found = torch.where(reachable(expected, terms, ids), expected, found)
    return compare_bits(found, expected)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("stem", "case"), CASES, ids=lambda x: x.title if isinstance(x, Case) else x)
def test_two_processes_give_what_two_gpus_gave(stem, case, runs):
    run = runs[what_decides_bits(stem, case)]
    assert run.source["ranks"] == "spawned"
    assert [len(inputs.hidden_states) for inputs in run.layer.inputs] == case.tokens_per_rank
    _, expected = recorded(stem, case)
    assert differing(run, expected) == 0
    expected = expected.clone()
    expected.view(torch.int16)[10, 5] ^= 0x40  # far from what another order of addition gives
    assert differing(run, expected) == 1


def test_every_combine_is_among_them():
    schemes = [find_scheme(case.scheme, **case.options) for _, case in CASES]
    assert {scheme.combine for scheme in schemes} >= {Combine.ALL_SLOTS, Combine.GROUPED, Combine.ON_ARRIVAL}
    assert {scheme.wire and scheme.wire.name for scheme in schemes} == {None, "E4M3", "E5M2"}
    assert {scheme.name for scheme in schemes} == {name for name in CONFIGS if "_pull_" in name}
