"""Every planted fault is caught, found at its stage and named; without one nothing is found.

What is seen is the table in docs/planted_bugs.md, made by FP4EP_WRITE_DOCS=1 pytest tests/parity/test_faults.py
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from fp4ep.optimized.emulation import NOT_EMULATED
from fp4ep.parity import mistakes as m
from fp4ep.parity.compare import STAGES, Comparison, compare
from fp4ep.parity.diagnose import Diagnosis, diagnose
from fp4ep.parity.faults import BF16, BLOCK, FAULTS, MXFP4, NVFP4, SCHEME_OF, TENSOR, Fault, Kind, plant, problem_for
from fp4ep.parity.problem import Layer, Problem
from fp4ep.parity.run import REFERENCE, Claim, Run, outputs_as_trace
from fp4ep.reference.formats import E4M3, encode, round_to
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.scheme import Combine, Scheme, Weights
from fp4ep.reference.schemes import SCHEMES, find_scheme, options_of
from fp4ep.reference.types import MoEInputs, MoEWeights

DOC = Path(__file__).parents[2] / "docs" / "planted_bugs.md"
PLANTED = [(fault, family) for fault in FAULTS.values() for family in fault.families]


def ids(value: object) -> str:
    return value.name if isinstance(value, Fault | Weights | Kind) else str(value)


def reference(layer: Layer) -> Run:
    _, trace = moe_forward(layer.scheme, layer.weights, layer.inputs)
    return Run(REFERENCE, Claim.BITS, layer, trace)


_LEFT: dict[tuple[str, object], Run] = {}


def left_for(fault: Fault | None, family: Weights, **sizes: int) -> Run:
    """The reference on the fault's problem; faults that share a problem share the run."""
    problem, prepare = replace(problem_for(fault, family), **sizes), fault and fault.prepare
    if (repr(problem), prepare) not in _LEFT:
        layer = problem.build()
        _LEFT[repr(problem), prepare] = reference(prepare(layer) if prepare else layer)
    return _LEFT[repr(problem), prepare]


def in_float32(fault: Fault, layer: Layer) -> Run:
    """The fault in a layer whose GEMMs keep 25 bits, as good as float32: a side that may claim that."""
    rules = {leg: m.wide(getattr(layer.scheme, leg)) for leg in ("fc1", "fc2")}
    run = plant(fault, replace(layer, scheme=replace(layer.scheme, **rules)))
    return replace(run, layer=layer, claim=Claim.FLOAT32)


@dataclass(frozen=True)
class Outcome:
    comparison: Comparison
    diagnoses: tuple[Diagnosis, ...]
    bounded: bool  #: the derived bound notices the same fault in a layer that sums in float32


@cache
def outcome(name: str, family: Weights) -> Outcome:
    fault = FAULTS[name]
    left = left_for(fault, family)
    comparison = compare(left, plant(fault, left.layer))
    if fault.stage in ("stage", "dispatch"):  # before any sum: the stage's verdict does not depend on how GEMMs sum
        claiming = compare(left, replace(comparison.right, claim=Claim.FLOAT32))
    else:
        claiming = compare(left, in_float32(fault, left.layer))
    first = claiming.first_outside
    assert first is None or first.stage == fault.stage
    return Outcome(comparison, diagnose(comparison), first is not None)


# --- the table of faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "family"), PLANTED, ids=ids)
def test_a_planted_fault_is_found_and_named(fault, family):
    seen = outcome(fault.name, family)
    assert not seen.comparison.passed
    assert seen.comparison.first is not None
    assert seen.comparison.first.stage == fault.stage
    assert [d.kind for d in seen.diagnoses[:1]] == [fault.expects]
    assert seen.bounded == fault.bounded


def test_the_table_covers_the_layer():
    assert len(FAULTS) >= 24
    assert {fault.stage for fault in FAULTS.values()} == set(STAGES)
    assert {family for fault in FAULTS.values() for family in fault.families} == set(SCHEME_OF)
    assert set(SCHEME_OF) == set(Weights) - set(NOT_EMULATED)  # none planted there
    for fault in FAULTS.values():
        assert len([way for way in (fault.weights, fault.inputs, fault.gemm, fault.hook) if way]) == 1, fault.name


def test_the_docs_show_what_is_seen():
    page = table()
    if os.environ.get("FP4EP_WRITE_DOCS"):
        DOC.parent.mkdir(exist_ok=True)
        DOC.write_text(page, encoding="utf-8")
    assert DOC.read_text(encoding="utf-8") == page, "stale: FP4EP_WRITE_DOCS=1 pytest tests/parity/test_faults.py"


INTRODUCTION = """# Planted bugs

Made by `FP4EP_WRITE_DOCS=1 pytest tests/parity/test_faults.py`. The same test, without the variable, fails when this
page is stale.

{faults} mistakes, most of them modelled on public bug reports, are planted one at a time in the reference, each in one
or more families of schemes: {layers} layers, most of 12 tokens, 4 experts, H 128, I 128. Each row says what
`fp4ep.parity.compare` and `diagnose` then say. Every one breaks "every bit" at the stage where it was planted.

A diagnosis that says *planted* or *replayed* has put a mistake into the stage that differs and got every bit of the
right side. The mistakes it tries are those of this table and sweeps over shifts, experts, scales and orders of
accumulation; what is not among them is told by its pattern (a factor, a shift, ties, routes) or not at all.

*float32 bound* tells whether the derived bound notices too, when a side that sums its GEMMs in float32 makes the same
mistake and claims no more than that. Where it says no, nothing that allows float32 sums can tell it from rounding.

To see one: `fp4ep parity run --scheme nvfp4 --right fault:nibbles-swapped`. The families are FlashInfer's {families}.

| fault | modelled on | family | first stage | first difference | diagnosis | float32 bound |
|---|---|---|---|---|---|---|
"""


def table() -> str:
    families = ", ".join(f"{family.name} (`{name}`)" for family, (name, _) in SCHEME_OF.items())
    lines = INTRODUCTION.format(faults=len(FAULTS), layers=len(PLANTED), families=families).splitlines()
    for fault, family in PLANTED:
        seen = outcome(fault.name, family)
        first = seen.comparison.first
        assert first is not None
        told = "; ".join(f"**{d.kind.value}**: {d.says}" for d in seen.diagnoses) or "none"
        notices = "notices" if seen.bounded else "no"
        cells = (f"`{fault.name}`: {fault.says}", fault.source, family.name, first.stage, str(first), told, notices)
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


# --- without a fault ---------------------------------------------------------------------------------------------

NONE = Fault("none", "", "", "combine", Kind.SUM, tuple(Weights), hook=lambda at: {})


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_without_a_fault_nothing_is_found(scheme):
    problem = Problem(scheme.name, options_of(scheme), tokens=(3, 2), num_experts=2, routing="masked", padding=1)
    left = reference(problem.build())
    sides = [plant(NONE, left.layer)]
    if scheme.weights not in NOT_EMULATED:  # no bound is derived for the others
        sides.append(in_float32(NONE, left.layer))
    for right in sides:
        comparison = compare(left, right)
        assert comparison.passed, comparison.first_outside
        assert diagnose(comparison) == ()


# --- other mistakes than those of the table ----------------------------------------------------------------------


def noise(values: torch.Tensor, share: float) -> torch.Tensor:
    g = torch.Generator().manual_seed(5)
    return (values.float() * (1 + share * (2 * torch.rand(values.shape, generator=g) - 1))).to(values.dtype)


def one(values: torch.Tensor, place: tuple[int, ...], value: float) -> torch.Tensor:
    changed = values.float().clone()
    changed[place] = value
    return changed.to(values.dtype)


def other(stage: str, family: Weights = NVFP4, **how) -> tuple[Fault, Weights]:
    return Fault("other", "", "", stage, Kind.SUM, (family,), **how), family


def hooked(stage: str, name: str, change: Callable, family: Weights = NVFP4, **how) -> tuple[Fault, Weights]:
    return other(stage, family, hook=m.only(name, change), **how)


TIES = {"problem": {"values": "ties"}}


def one_tie(at: m.At) -> m.Rows:
    away = m.rounded(m.up_from_ties)(at)["values"]
    codes = at.now["values"].view(torch.uint8).clone()
    codes[1, 2:9] = away.view(torch.uint8)[1, 2:9]
    return {"values": codes.view(away.dtype)}


def steps(values: torch.Tensor) -> torch.Tensor:
    codes = values.view(torch.uint8).clone()
    codes[:, ::7] ^= codes[:, ::7] & 0x7F < 0x7E
    return codes.view(values.dtype)


def one_channel(values: torch.Tensor) -> torch.Tensor:
    changed = values.clone()
    changed[:, 5] *= 1.0001
    return changed


def next_slot(at: m.At) -> m.Rows:
    (inputs,) = at.layer.inputs
    return {"topk_weights": inputs.topk_weights.roll(1, 1)[at.now["token"], at.now["slot"]]}


def gate_over_square(at: m.At) -> m.Rows:
    scale = at.layer.weights.w13_global_scale[at.before["dispatch"]["expert"]]
    return {"gate": at.now["gate"] / scale[:, None] ** 2}


def scale_of_3_for_1(scales: torch.Tensor) -> torch.Tensor:
    return scales[torch.tensor([0, 3, 2, 3])]


#: A fault, the kind it must be told as (None: nothing must be said), and a part of the sentence.
OTHERS = {
    "ties in one row": (other("stage", hook=one_tie, **TIES), Kind.TIES, "codes that differ stand for values halfway"),
    "last bits": (hooked("stage", "values", steps), Kind.STEPS, "one step away"),
    "rows 32 further": (
        hooked("stage", "scales", lambda s: s.roll(-32, 0), problem={"tokens": (40,)}),
        Kind.SHIFT,
        "right[i] == left[i +32] in 8 of 40",
    ),
    "scale times 4": (hooked("stage", "scales", lambda s: s * 4, BLOCK), Kind.FACTOR, "left * 2^2 in all 12"),
    "weight of the other slot": (other("dispatch", hook=next_slot), Kind.ROUTING_WEIGHT, "some slot of its token"),
    "weight squared": (hooked("dispatch", "topk_weights", lambda w: w * w), Kind.ROUTING_WEIGHT, "once more"),
    "masked slots routed": (
        other("dispatch", inputs=m.ids(lambda i, r, e, n: i.where(i >= 0, 0)), problem={"routing": "masked"}),
        Kind.ROUTES,
        "routes more, from masked slots",
    ),
    "some routes lost": (other("dispatch", inputs=m.ids(lambda i, r, e, n: i.where(i != 1, -1))), None, ""),
    "2688 in up": (hooked("fc1", "up", lambda up: up * 2688), Kind.FACTOR, "up is left * 2688 = 6 * 448 in all 3,072"),
    "1/s^2": (other("fc1", hook=gate_over_square), Kind.GLOBAL_SCALE, "gate is left * 1 / the global scale squared"),
    "another's scale": (
        other("fc1", weights=m.global_scale("w13", scale_of_3_for_1)),
        Kind.GLOBAL_SCALE,
        "gate is left * the global scale of expert 3 / its own in 640 of 3,072",
    ),
    "w2 scales 8 above": (
        other("fc2", MXFP4, weights=m.scales_moved("w2", rows=-8)),
        Kind.BLOCK_SCALES,
        "row 8 above: replayed on 8 routes of experts 0 and 3",
    ),
    "a byte of w2": (
        other("fc2", weights=m.one_code("w2_scale", (3, 100, 7), 1)),
        Kind.BLOCK_SCALES,
        "row 100, block 7, one up",
    ),
    "interleaved blocks": (
        other("fc1", BLOCK, weights=m.rows_of_w13(m.separated)),
        Kind.GATE_UP,
        "halves read as rows that alternate",
    ),
    "channels moved": (
        hooked("fc1", "gate", lambda gate: gate.roll(32, 1), BF16),
        Kind.SHIFT,
        "channel j -32 (modulo 128)",
    ),
    "fc1 a little off": (hooked("fc1", "gate", lambda gate: noise(gate, 1e-4)), Kind.ROUNDING, "order or precision"),
    "one channel a little off": (hooked("fc1", "gate", one_channel), None, ""),
    "fc1 far off": (hooked("fc1", "gate", lambda gate: noise(gate, 0.5)), None, ""),
    "activation far off": (hooked("activation", "values", lambda v: noise(v, 0.5)), None, ""),
    "codes far off": (hooked("requantize", "values", lambda v: noise(v, 0.9)), None, ""),
    "a NaN": (hooked("fc2", "values", lambda v: one(v, (3, 7), torch.nan)), Kind.NAN, "NaN in 1 of 24 rows"),
    "a row of zeros": (hooked("fc2", "values", lambda v: one(v, (3,), 0.0)), Kind.ZERO, "1 of 24 rows are zero"),
    "slot 0 twice": (
        other("combine", TENSOR, hook=m.sums(counts={0: 2}), problem={"top_k": 3}),
        Kind.SUM,
        "slot 0 counted twice",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_mistakes(name):
    (fault, family), kind, words = OTHERS[name]
    left = left_for(fault, family)
    comparison = compare(left, plant(fault, left.layer))
    assert comparison.first is not None
    assert comparison.first.stage == fault.stage
    told = diagnose(comparison)
    assert [d.kind for d in told[:1]] == ([kind] if kind else []), told
    assert words in "".join(d.says for d in told[:1])


# --- a right side that shows less, or claims less ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nibbles-swapped", Kind.NIBBLES),
        ("gate-up-exchanged", Kind.GATE_UP),
        ("expert-offset", Kind.ROUTES),
    ],
)
def test_a_black_box_is_replayed(name, kind):
    fault = FAULTS[name]
    left = left_for(fault, MXFP4, num_experts=12, seed=2)  # the first token needs 4 and 8 and their neighbours
    right = plant(fault, left.layer)
    told = diagnose(compare(left, replace(right, trace=outputs_as_trace(right.outputs()))))
    assert told[0].kind is kind
    assert "replayed on 8 tokens, it gives their output bit for bit" in told[0].says


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda out: out * 2, Kind.FACTOR),
        (lambda out: out.roll(1, 0), Kind.SHIFT),
        (lambda out: one(out, (3,), 0.0), Kind.ZERO),
        (lambda out: one(out, (3, 3), torch.nan), Kind.NAN),
        (lambda out: noise(out, 0.5), None),
    ],
)
def test_outputs_alone(change, kind):
    left = left_for(None, TENSOR, hidden=64, intermediate=64)
    right = Run("black box", Claim.BITS, left.layer, outputs_as_trace([change(out) for out in left.outputs()]))
    assert [d.kind for d in diagnose(compare(left, right))] == ([kind] if kind else [])


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("fp8-maximum-240", BLOCK),
        ("scale-rows-32", NVFP4),
        ("scale-byte", NVFP4),
        ("gate-up-exchanged", TENSOR),
        ("weight-lost", BF16),
        ("requantize-scale-lost", BLOCK),
        ("payload-moved-alone", MXFP4),
        ("slot-lost", MXFP4),
    ],
)
def test_a_side_that_claims_float32(name, family):
    fault = FAULTS[name]
    left = left_for(fault, family)
    comparison = compare(left, in_float32(fault, left.layer))
    assert comparison.first_outside is not None
    assert comparison.first_outside.stage == fault.stage
    assert [d.kind for d in diagnose(comparison)[:1]] == [fault.expects]


def test_a_tensor_core_is_no_float32_sum():
    left = left_for(None, NVFP4)
    (told,) = diagnose(compare(left, replace(left, side="emulation", claim=Claim.FLOAT32)))
    assert "the claim should be bits" in told.says


# --- what the mistakes do, in numbers of the reports -------------------------------------------------------------


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_rounding():
    assert encode(m.up_from_ties(f32(1.0625, -1.0625, 1.1875), E4M3), E4M3).tolist() == [0x39, 0xB9, 0x3A]
    assert encode(f32(1.0625, -1.0625, 1.1875), E4M3).tolist() == [0x38, 0xB8, 0x3A]
    assert m.tied(f32(1.0625, 1.0625001, 448, 2.0**-10, 0), E4M3).tolist() == [True, False, False, True, False]
    assert round_to(m.through_bf16(f32(1.0625 + 2.0**-12), E4M3), E4M3) == 1.0  # flashinfer#5128: right is 1.125
    assert m.exponent_only(f32(1.5, 1.0, 3.9)).tolist() == [1, 1, 2]  # sglang#39193
    assert m.E4M3_240.max == 240


def test_activations():
    gate, up, weight = f32(8)[None], f32(1)[None], f32(1)
    assert m.clamp_after_silu(gate, up, 7.0, weight) == 7  # sglang-jax#1358: 7.0 against 6.9936
    assert m.library_exp(gate, up, 7.0, weight).item() == pytest.approx(6.9936, abs=5e-5)
    assert m.gpt_oss(up, up, None, weight).item() == pytest.approx(1.6916, abs=5e-5)  # vllm#45738


def test_sums():
    layer = problem_for(None, NVFP4).build()
    terms = f32(1, 2.0**-8, 2.0**-8, 2.0**-8).bfloat16()[None, :, None]
    here, ones = torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4)
    assert m.summed(layer, terms, here, ones, Combine.ON_ARRIVAL) == 1.0  # TensorRT-LLM#16778: right is 1.015625
    assert m.summed(layer, terms, here, ones, Combine.LIVE_SLOTS) == 1.015625
    terms, here, ones = f32(1, 2, 5).bfloat16()[None, :, None], here[:, :3], ones[:, :3]
    assert m.summed(layer, terms, here, ones, Combine.LIVE_SLOTS, {-1: 2}) == 13  # sglang#26845: right is 8
    assert m.summed(layer, terms, here, ones, Combine.LIVE_SLOTS, {-1: 0}) == 3
    assert m.summed(layer, terms[:, :1], here[:, :1], ones[:, :1], Combine.ALL_SLOTS, {0: 0}) == 0


def routed(name: str, topk_ids: list, experts: int, ranks: int = 1) -> list:
    ids = torch.tensor(topk_ids)
    inputs = MoEInputs(torch.zeros(len(ids), 64), ids, torch.ones(ids.shape))
    return FAULTS[name].inputs(inputs, 0, experts, ranks).topk_ids.tolist()


def test_routes():
    assert routed("masked-wrapped", [[-1, 2]], 4) == [[3, 2]]  # vllm#46408
    assert routed("global-ids-as-local", [[2, 3, 0], [5, 2, 7]], 8, 2) == [[2, 3, 0], [-1, 2, -1]]  # vllm-gaudi#1796
    assert routed("repeats-dropped", [[5, 88, 88, 65]], 128) == [[5, 88, -1, 65]]  # vllm#39391
    assert routed("expert-offset", [[0, 3]], 4) == [[1, 0]]


def test_weight_of_token_3():
    """flashinfer#2629: token 3 of top-k 2 reads flat entry 3, which is token 1's."""
    layer = problem_for(None, NVFP4).build()
    one_row = {"source_rank": torch.tensor([0]), "token": torch.tensor([3]), "slot": torch.tensor([0])}
    (found,) = m.weight_at_token_index(m.At(layer, "dispatch", 0, {}, one_row))["topk_weights"]
    assert found == layer.inputs[0].topk_weights[1, 1]


def test_weights():
    scale = torch.arange(2 * 128 * 4).reshape(2, 128, 4)
    weights = MoEWeights(torch.tensor([[0x21]], dtype=torch.uint8), torch.zeros(1), scale, None, f32(1, 2), f32(3, 4))
    moved = m.scales_moved("w13", rows=32, columns=1)(weights).w13_scale
    assert moved[1, 3, 2] == scale[1, 35, 3]
    assert m.from_expert("w13_scale", 1)(weights).w13_scale[0, 0, 0] == scale[1, 0, 0]
    assert m.from_expert("w13_global_scale", None)(weights).w13_global_scale.tolist() == [1, 1]
    assert m.global_scale_of("w13", "w2")(weights).w13_global_scale.tolist() == [3, 4]
    assert m.pairs_exchanged(f32(1, 2, 3, 4, 5)).tolist() == [2, 1, 4, 3, 5]
    assert m.nibbles_swapped("w13")(weights).w13.tolist() == [[0x12]]
    assert m.one_code("w13_scale", (1, 2, 3), -1)(weights).w13_scale[1, 2, 3] == scale[1, 2, 3] - 1
    assert m.scales_moved("w2", rows=1)(weights) is weights
    assert m.interleaved(6).tolist() == [0, 3, 1, 4, 2, 5]
    assert m.separated(6).tolist() == [0, 2, 4, 1, 3, 5]
    assert m.halves_exchanged(6).tolist() == [3, 4, 5, 0, 1, 2]
    assert weights.w13_scale is scale
    assert torch.equal(scale, torch.arange(2 * 128 * 4).reshape(2, 128, 4))


# --- plant -------------------------------------------------------------------------------------------------------


def test_a_run_with_a_fault_is_of_the_right_layer():
    problem = problem_for(None, NVFP4)
    layer = problem.build()
    run = plant(FAULTS["nibbles-swapped"], layer, problem)
    assert (run.side, run.claim, run.problem) == ("fault: nibbles-swapped", Claim.BITS, problem)
    assert run.layer is layer


def test_a_fault_is_planted_where_it_belongs():
    layer = problem_for(None, BF16).build()
    with pytest.raises(ValueError, match=r"^fault: nibbles-swapped must be planted in NVFP4, MXFP4, got sm90_bf16"):
        plant(FAULTS["nibbles-swapped"], layer)


def test_the_problem_is_of_the_family():
    for fault, family in PLANTED:
        problem = problem_for(fault, family)
        scheme: Scheme = find_scheme(problem.scheme, **problem.options)
        assert scheme.weights is family


def test_ranks_do_not_hide_a_fault():
    """Over two ranks the first expert of the second is number 2; the replay takes the same neighbours along."""
    fault = FAULTS["scales-of-next-expert"]
    left = reference(replace(problem_for(fault, NVFP4), tokens=(5, 7)).build())
    (told,) = diagnose(compare(left, plant(fault, left.layer)))
    assert told.kind is Kind.EXPERT
    assert told.says.startswith("w13's scales of the expert behind: replayed on 8 routes of experts 0 and 3")
