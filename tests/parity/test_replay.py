"""A case of each arithmetic of the shipped recordings, bit for bit, and how bits are compared.

`fp4ep replay` runs all of them.
"""

from functools import lru_cache
from pathlib import Path

import pytest
import torch

from fp4ep.parity.recording import Case, Recording
from fp4ep.parity.replay import SPECIAL_FUNCTIONS, compare_bits, replay_cases, shipped_recordings
from fp4ep.reference import tensor_core
from fp4ep.reference.scheme import Evidence
from fp4ep.reference.schemes import SCHEMES, find_scheme
from fp4ep.reference.tensor_core import TensorCore

# --- the shipped recordings --------------------------------------------------------------------------------------


def describe(path: Path, index: int, case: Case) -> str:
    scheme = case.scheme.removeprefix("sm90_").removesuffix("_bf16_pull_cutedsl")
    options = ",".join(f"{name}={value}" for name, value in case.options.items())
    return " ".join(filter(None, (f"{path.stem}-{index}", scheme, case.title, options)))


SHIPPED = [(path, index, case) for path in shipped_recordings() for index, case in enumerate(Recording(path).cases)]


def arithmetic(path: Path, index: int, case: Case) -> tuple:
    """What an entry of the sample stands for. Another reads outputs kept as digests, by the CPU engine."""
    scheme = str(find_scheme(case.scheme, **case.options)) if case.kind == "moe" else case.scheme
    return case.kind, scheme, len(case.tokens_per_rank or [0]), any(role.endswith("_rows") for role in case.tensors)


#: The first of each; sizes of real models take long.
SAMPLE = {arithmetic(*entry): entry for entry in reversed(SHIPPED) if "large" not in entry[0].stem}.values()


@lru_cache(maxsize=1)
def opened(path: Path) -> Recording:
    """The cases of a recording share tensors and come one after the other."""
    return Recording(path)


def quiet(case: Case):
    return lambda share: None


@pytest.mark.parametrize(
    ("path", "index"), [pytest.param(path, index, id=describe(path, index, case)) for path, index, case in SAMPLE]
)
def test_shipped_case_replays(path, index):
    recording = opened(path)
    (result,) = replay_cases(recording, recording.cases[index : index + 1], quiet)
    assert result.first is None
    assert result.differing == 0
    assert result.elements > 0
    assert result.evidence is Evidence.VERIFIED


@pytest.mark.parametrize("record", [s for s in SCHEMES if s.evidence is Evidence.VERIFIED], ids=str)
def test_verified_scheme_has_a_recording(record):
    moe = [case for *_, case in SHIPPED if case.kind == "moe"]
    assert str(record) in {str(find_scheme(case.scheme, **case.options)) for case in moe}


CORES = [value for value in vars(tensor_core).values() if isinstance(value, TensorCore)]


@pytest.mark.parametrize("core", [core for core in CORES if core.verified], ids=str)
def test_verified_tensor_core_has_a_recording(core):
    assert core.name in {case.scheme for *_, case in SHIPPED if case.kind == "tensor_core"}


@pytest.mark.parametrize("name", SPECIAL_FUNCTIONS)
def test_special_function_has_a_recording(name):
    assert name in {case.scheme for *_, case in SHIPPED if case.kind == "special_function"}


# --- replay ------------------------------------------------------------------------------------------------------


def test_results_of_a_small_recording(tmp_path, writer):
    path = tmp_path / "small.safetensors"
    writer.write(path)
    recording, shares = Recording(path), []
    results = list(replay_cases(recording, recording.cases, lambda case: shares.append))
    assert [(r.scheme, r.case, r.version, r.elements) for r in results] == [
        ("sm90_fp8_nvfp4_bf16_pull_cutedsl[nvfp4_kperm=64]", "three tokens", "flashinfer 1.2.3", 3 * 256),
        ("sm90_bf16_bf16_bf16_pull_cutedsl", "three tokens", "flashinfer 1.2.3", 3 * 256),
        ("Hopper wgmma E4M3", "a chain", "torch 4.5.6", 64),
        ("rcp.approx.ftz.f32", "a few arguments", "torch 4.5.6", 50),
    ]
    for result in results:
        assert (result.recording, result.hardware) == ("small", "a test (0.0)")
        assert (result.differing, result.first, result.evidence) == (0, None, Evidence.VERIFIED)
    assert shares.count(1.0) == len(results)
    assert shares[0] < 1.0  # the first case has four experts


@pytest.mark.parametrize(
    ("index", "output", "place"),
    [(0, "output.nvfp4", (2, 100)), (1, "output.bf16", (0, 0)), (2, "d", (7, 7)), (3, "value", (49,))],
)
@pytest.mark.parametrize("bit", [0, -1], ids=["last bit", "sign"])
def test_one_flipped_bit_is_found(tmp_path, writer, index, output, place, bit):
    path = tmp_path / "small.safetensors"
    writer.write(path)
    good = Recording(path)[output]
    flipped = good.clone()
    integer = {2: torch.int16, 4: torch.int32}[good.element_size()]
    flipped.view(integer)[place] ^= 1 if bit == 0 else torch.iinfo(integer).min
    writer.store(output, flipped)
    writer.write(path)
    recording = Recording(path)
    results = list(replay_cases(recording, recording.cases, quiet))
    assert [r.differing for r in results] == [int(i == index) for i in range(4)]
    assert results[index].evidence is None
    assert results[index].first.startswith(f"{list(place)}: {float(good[place])!r} (0x")
    assert results[index].as_json()["evidence"] is None


def test_an_earlier_launch_is_replayed_first(tmp_path, writer):
    """bf16 sums every slot: what an earlier launch left in the masked one of token 2 counts."""
    writer.store("previous", torch.tensor([[0, 1], [3, 2], [1, 0]]))
    case = writer.cases[1]
    case.tensors["previous_topk_ids"] = "previous"
    path = tmp_path / "small.safetensors"
    writer.write(path)
    recording = Recording(path)
    (result,) = replay_cases(recording, recording.cases[1:2], quiet)
    assert result.differing > 0
    assert result.first.startswith("[2, ")


# --- bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "expected", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), r"torch.float32 \[3, 2\] as recorded, got torch.float32 \[2, 3\]"),
        (torch.zeros(2, 1), torch.zeros(2, 4), r"torch.float32 \[2, 4\] as recorded"),
        (torch.zeros(2), torch.zeros(2).bfloat16(), r"torch.bfloat16 \[2\] as recorded, got torch.float32 \[2\]"),
    ],
    ids=["shape", "shape that broadcasts", "dtype"],
)
def test_other_shape_or_dtype(found, expected, message):
    with pytest.raises(ValueError, match=f"^found must be {message}"):
        compare_bits(found, expected)


def from_bits(*patterns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    raw = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16}[dtype]
    return torch.tensor(patterns, dtype=torch.int64).to(raw).view(dtype)


@pytest.mark.parametrize(
    ("found", "expected", "first"),
    [
        (from_bits(0), from_bits(0x80000000), "[0]: 0.0 (0x0), recorded -0.0 (0x80000000)"),
        (from_bits(0x7FC00000), from_bits(0x7FFFFFFF), "[0]: nan (0x7fc00000), recorded nan (0x7fffffff)"),
        (from_bits(0xFFC00000), from_bits(0x7FC00000), "[0]: nan (0xffc00000), recorded nan (0x7fc00000)"),
        (
            from_bits(0x3F800000),
            from_bits(0x3F800001),
            "[0]: 1.0 (0x3f800000), recorded 1.0000001192092896 (0x3f800001)",
        ),
        (
            from_bits(0x7FFF, dtype=torch.bfloat16),
            from_bits(0xFFFF, dtype=torch.bfloat16),
            "[0]: nan (0x7fff), recorded nan (0xffff)",
        ),
    ],
    ids=["zeros", "NaN payload", "NaN sign", "an ulp", "bf16 NaN"],
)
def test_bits_that_differ(found, expected, first):
    assert compare_bits(found, expected) == (1, first)


def test_equal_bits():
    values = from_bits(0, 0x80000000, 0x7FC00000, 0x7FFFFFFF, 1)
    assert compare_bits(values, values.clone()) == (0, None)
    assert compare_bits(torch.empty(0, 4), torch.empty(0, 4)) == (0, None)


def test_first_difference_is_the_first_in_row_order():
    expected = torch.zeros(3, 4)
    found = expected.clone()
    found[2, 0], found[1, 3] = 1.0, 2.0
    assert compare_bits(found, expected) == (2, "[1, 3]: 2.0 (0x40000000), recorded 0.0 (0x0)")
    # Strides do not matter.
    assert compare_bits(found.T, expected.T) == (2, "[0, 2]: 1.0 (0x3f800000), recorded 0.0 (0x0)")
