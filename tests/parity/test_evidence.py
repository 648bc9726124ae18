"""`verified` must mean something: change a rule of a scheme, and a shipped recording has to notice."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from fp4ep.parity import Recording, shipped_recordings
from fp4ep.parity.replay import run_moe
from fp4ep.reference import E5M2, Overflow, Scheme, find_scheme
from fp4ep.reference.scheme import Apply, Combine, KOrder

#: The rules are what is tested, not the instruction.
pytestmark = pytest.mark.usefixtures("quick_gemms")

NVFP4 = ("sm90_fp8_nvfp4_bf16_pull_cutedsl", {})
MXFP4 = ("sm90_fp8_mxfp4_bf16_pull_cutedsl", {})
PER_TENSOR = ("sm90_fp8_fp8_bf16_pull_cutedsl", {})
TWICE = ("sm90_fp8_fp8_bf16_pull_cutedsl", {"fp8_accum_mode": "2xacc"})
BLOCKWISE = ("sm90_fp8_fp8_bf16_pull_cutedsl", {"fp8_scale_mode": "blockwise"})
BF16 = ("sm90_bf16_bf16_bf16_pull_cutedsl", {})

#: (scheme, field, change, title of the case that notices). Rules that no legal input can tell apart are left out: a
#: division from a product where bf16 values meet the scale of their own amax, and overflow where the scale prevents it.
CHANGES = [
    (NVFP4, "stage", {"tiny_path": False}, "tiny rows"),
    (NVFP4, "stage", {"block": 128}, "special values"),
    (NVFP4, "requantize", {"apply": Apply.DIVIDE}, "ties in requantization"),
    (NVFP4, "requantize", {"tiny_path": False}, "special values"),
    (NVFP4, "requantize", {"block": 128}, "special values"),
    (NVFP4, "fc1", {"chunk": 128}, "special values"),
    (NVFP4, "fc2", {"chunk": 128}, "special values"),
    (NVFP4, "fc1", {"k_order": KOrder.NATURAL}, "special values"),
    (NVFP4, "fc2", {"k_order": KOrder.NATURAL}, "special values"),
    (NVFP4, "combine", Combine.ALL_SLOTS, "slots masked"),
    (MXFP4, "stage", {"tiny_path": False}, "tiny rows"),
    (MXFP4, "requantize", {"apply": Apply.DIVIDE}, "ties in requantization"),
    (MXFP4, "requantize", {"tiny_path": False}, "special values"),
    (MXFP4, "fc1", {"k_order": KOrder.KPERM64}, "special values"),
    (MXFP4, "combine", Combine.ALL_SLOTS, "slots masked"),
    (PER_TENSOR, "stage", {"apply": Apply.DIVIDE}, "ties in staging"),
    (PER_TENSOR, "stage", {"apply": Apply.RECIPROCAL}, "ties in staging"),
    (PER_TENSOR, "stage", {"overflow": Overflow.SATURATE}, "special values"),
    (PER_TENSOR, "requantize", {"apply": Apply.DIVIDE}, "ties in requantization"),
    (PER_TENSOR, "requantize", {"overflow": Overflow.NAN}, "special values"),
    (PER_TENSOR, "fc1", {"chunk": 128}, "special values"),
    (PER_TENSOR, "combine", Combine.ALL_SLOTS, "slots masked"),
    (TWICE, "fc1", {"chunk": 256}, "2xacc in the knobs"),
    (TWICE, "fc2", {"chunk": None}, "2xacc in the knobs"),
    (BLOCKWISE, "stage", {"tiny_path": True}, "tiny rows"),
    (BLOCKWISE, "stage", {"block": 256}, "special values"),
    (BLOCKWISE, "requantize", {"apply": Apply.DIVIDE}, "ties in requantization"),
    (BLOCKWISE, "requantize", {"block": 128}, "special values"),
    (BLOCKWISE, "fc2", {"chunk": 128}, "special values"),
    (BLOCKWISE, "combine", Combine.ALL_SLOTS, "slots masked"),
    (BF16, "fc1", {"chunk": 16}, "tiny rows"),
    (BF16, "fc2", {"chunk": 16}, "tiny rows"),
    (BF16, "combine", Combine.LIVE_SLOTS, "slots masked"),
]


@cache
def recording(stem: str) -> Recording:
    (path,) = (path for path in shipped_recordings() if path.stem == stem)
    return Recording(path)


def differing(stem: str, index: int, scheme: Scheme) -> int:
    case = recording(stem).cases[index]
    tensors = recording(stem).roles(case)
    trace = run_moe(scheme, tensors, tokens_per_rank=case.tokens_per_rank)
    output = torch.cat([stage.tensors["values"] for stage in trace if stage.name == "combine"])
    return int((output.view(torch.int16) != tensors["output"].view(torch.int16)).sum())


@cache
def unchanged(stem: str, index: int) -> tuple[Scheme, int]:
    """The scheme of a case, and how many elements differ by it; several changes are judged by one case."""
    case = recording(stem).cases[index]
    scheme = find_scheme(case.scheme, **case.options)
    return scheme, differing(stem, index, scheme)


@pytest.mark.parametrize(
    ("named", "field", "change", "title"),
    CHANGES,
    ids=lambda x: x[0].split("_")[2] if isinstance(x, tuple) else str(x),
)
def test_a_changed_rule_is_noticed(named, field, change, title):
    name, knobs = named
    stem, wanted = "h200_special_values", find_scheme(name, **knobs)
    index = next(
        index
        for index, case in enumerate(recording(stem).cases)
        if case.scheme == name
        and case.title.startswith(title)
        and str(find_scheme(name, **case.options)) == str(wanted)
    )
    scheme, differ = unchanged(stem, index)
    changed = replace(getattr(scheme, field), **change) if isinstance(change, dict) else change
    assert changed != getattr(scheme, field)
    assert differ == 0
    assert differing(stem, index, replace(scheme, **{field: changed})) > 0


@pytest.mark.parametrize("change", [{"combine": Combine.LIVE_SLOTS}, {"wire": None}, {"wire": E5M2}], ids=str)
def test_a_changed_sum_over_ranks_is_noticed(change):
    stem = "h200_two_ranks"
    (index,) = (
        index
        for index, case in enumerate(recording(stem).cases)
        if "32e4m3xe8m0" in case.options.values() and "48 and 17" in case.title
    )
    scheme, differ = unchanged(stem, index)
    assert differ == 0
    assert differing(stem, index, replace(scheme, **change)) > 0
