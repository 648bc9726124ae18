"""The derived bound: sound (honest implementations are inside), and sharp (what is outside by a little is caught)."""

from dataclasses import replace

import pytest
import torch
from runs import NVFP4, change, fake_quant_run, next_code, reference_run

from fp4ep.optimized.emulation import NOT_EMULATED
from fp4ep.parity.compare import Holds, compare
from fp4ep.parity.intervals import Interval, layer_intervals
from fp4ep.parity.order_set import reachable
from fp4ep.parity.problem import Problem, problems
from fp4ep.parity.run import Claim
from fp4ep.parity.tolerance import Rung
from fp4ep.reference.scheme import Scheme
from fp4ep.reference.schemes import SCHEMES, options_of
from fp4ep.reference.weights import load_operand

PROBLEM = Problem(NVFP4, tokens=(9, 3))
#: fake_quant makes no others, and no bound is derived for them.
EMULATED = [scheme for scheme in SCHEMES if scheme.weights not in NOT_EMULATED]
#: The first of those whose quantizers, weights and sums are alike: every case; of the others, which are but other
#: orders and chunks in the reference, the cases that sum and round most unlike random data.
FIRST = {(s.weights, s.stage, s.requantize, s.combine): s for s in reversed(EMULATED)}.values()
FEW = ("values at ties", "routes that cancel")
PROMISES = [(scheme, None if scheme in FIRST else FEW) for scheme in EMULATED]

pytestmark = pytest.mark.usefixtures("quick_gemms")


def by_name(comparison):
    return {(t.stage, t.tensor): t for t in comparison.tensors}


@pytest.mark.parametrize(("scheme", "cases"), PROMISES, ids=lambda x: str(x) if isinstance(x, Scheme) else "")
def test_a_float32_emulation_keeps_its_promise(scheme, cases):
    """Of every scheme. Staging and dispatch are equal in bits; from fc1 on nothing is outside."""
    sizes = {"num_experts": 4, "tokens": (8,)}
    for case, problem in problems(scheme.name, options_of(scheme), cases, **sizes).items():
        found = compare(reference_run(problem), fake_quant_run(problem))
        assert found.passed, f"{case}: {found.first_outside}"
        for tensor in found.tensors:
            exact = tensor.stage in ("stage", "dispatch")
            assert tensor.allowance.rung is (Rung.BITS if exact else Rung.BOUND), tensor
            assert tensor.differing <= tensor.allowed
            assert tensor.allowance.because


@pytest.mark.parametrize(
    ("name", "what", "of"),
    [
        ("sm100_nvfp4_nvfp4_bf16_cutedsl", "FP4 activations", "the FP4 activations"),
        ("sm90_fp8_fp8_bf16_push_cuda", "approximate division", "the approximate divisions"),
    ],
)
def test_no_emulation(name, what, of):
    """Refused with the reason, by the side and by the bound."""
    problem = Problem(name, tokens=(3,), num_experts=2)
    left = reference_run(problem)
    with pytest.raises(ValueError, match=rf"^scheme: fake_quant has no {what} and cannot run {name}"):
        fake_quant_run(problem)
    with pytest.raises(ValueError, match=rf"^scheme: no bound is derived for {of} of {name}"):
        compare(left, replace(left, claim=Claim.FLOAT32))


@pytest.mark.parametrize("wire", ["bf16", "32e4m3xe8m0", "32e5m2xe8m0"])
def test_sums_by_rank_are_bounded(wire):
    """The number of ranks enters; a sum that was not rounded on its way is within the bound, a doubled one is not."""
    options = {"fp8_scale_mode": "blockwise", "grouped_token_back": True, "combine_format": wire}
    sizes = {"tokens": (9, 7), "top_k": 4, "num_experts": 4, "hidden": 512}
    problem = Problem("sm90_fp8_fp8_bf16_pull_cutedsl", options, **sizes, routing="masked")
    left, right = reference_run(problem), fake_quant_run(problem)
    found = compare(left, right)
    assert found.passed, found.first_outside
    assert by_name(found)["combine", "values"].holds is not Holds.NONE
    doubled = edited(right, "combine", "values", lambda v: v.mul_(2))
    assert by_name(compare(left, doubled))["combine", "values"].outside > 1000


@pytest.fixture(scope="module")
def pair():
    return reference_run(PROBLEM), fake_quant_run(PROBLEM)


def test_the_budget_is_a_count(pair):
    """Few codes may flip, all of them known; the rest are decided, and equal."""
    left, right = pair
    found = by_name(compare(left, right))
    codes = found["requantize", "values"]
    assert 0 < codes.differing <= codes.allowed < codes.elements / 10
    intervals = layer_intervals(left.layer, left.stages("dispatch"))["requantize", "values"]
    free = sum(int((i.low != i.high).sum()) for i in intervals.values())
    assert free <= codes.allowed
    for rank, interval in intervals.items():
        decided = interval.low == interval.high
        ours = right.trace["requantize", rank].tensors["values"].double()
        assert torch.equal(ours[decided], interval.low[decided])


def test_a_decided_code_may_not_flip(pair):
    left, right = pair
    interval = layer_intervals(left.layer, left.stages("dispatch"))["requantize", "values"][0]
    place = tuple(int(i) for i in ((interval.low == interval.high) & (interval.low != 0)).nonzero()[5])
    wrong = edited(right, "requantize", "values", lambda v: next_code(v, place))
    found = compare(left, wrong)
    assert by_name(found)["requantize", "values"].outside == 1
    outside = found.first_outside
    assert (outside.stage, outside.tensor, outside.rank, outside.channel) == ("requantize", "values", 0, place[1])


def edited(run, stage, tensor, edit):
    hook = change(stage, tensor, edit)
    return replace(run, trace=replace(run.trace, stages=tuple(hook(made) for made in run.trace)))


@pytest.mark.parametrize(
    ("stage", "tensor"),
    [("fc1", "gate"), ("fc1", "up"), ("activation", "values"), ("requantize", "scales"), ("fc2", "values"),
     ("combine", "terms"), ("combine", "values")],
)  # fmt: skip
def test_just_outside_is_outside(pair, stage, tensor):
    """The end of the interval is allowed, the next value of the tensor's dtype is not."""
    left, right = pair
    interval = layer_intervals(left.layer, left.stages("dispatch"))[stage, tensor][0]
    place = tuple(int(i) for i in (interval.high > interval.low).nonzero()[0])
    dtype = right.trace[stage].tensors[tensor].dtype
    end = interval.high[place].to(dtype)
    if end.double() > interval.high[place]:
        end = torch.nextafter(end, end - 1)
    beyond = torch.nextafter(end, end.abs() * 2 + 1)
    for value, outside in ((end, 0), (beyond, 1)):
        found = compare(left, edited(right, stage, tensor, lambda v, value=value: v[place].copy_(value)))
        assert by_name(found)[stage, tensor].outside == outside


@pytest.mark.parametrize("order", ["reversed", "pairwise", "one by one", "largest first"])
def test_any_order_of_summation_is_inside(pair, order):
    """float32 sums of float32 products of dequantized operands in orders that torch won't use: fc1 of every expert."""
    left, _ = pair
    rows = left.trace["dispatch"].tensors
    interval = layer_intervals(left.layer, left.stages("dispatch"))["fc1", "gate"][0]
    for expert in rows["expert"].unique().tolist():
        mine = rows["expert"] == expert
        operand = load_operand(left.scheme, left.layer.weights, "w13", expert)
        x = rows["values"][mine].float() * rows["scales"][mine]
        w = (operand.values * operand.scale)[: PROBLEM.intermediate]
        products = x[:, None] * w[None]
        if order == "reversed":
            products = products.flip(-1)
        if order == "largest first":
            products = products.gather(-1, products.abs().argsort(-1, descending=True))
        while order == "pairwise" and products.shape[-1] > 1:
            products = products[..., ::2] + products[..., 1::2]
        total = torch.zeros(products.shape[:2])
        for k in range(products.shape[-1]):
            total = total + products[..., k]
        found = total.double()
        assert bool(((found >= interval.low[mine]) & (found <= interval.high[mine])).all())


def test_bf16_accumulation_is_outside(pair):
    """What a kernel with too short an accumulator gives is no float32 sum."""
    left, right = pair
    wrong = edited(right, "fc1", "gate", lambda v: v.copy_(v.bfloat16().float()))
    assert by_name(compare(left, wrong))["fc1", "gate"].outside > 0


def test_no_claim_about_nan(pair):
    """Where the exact value is NaN or infinite every value is allowed, and elsewhere NaN never is."""
    problem = replace(PROBLEM, tokens=(4,))
    layer = problem.build()
    layer.inputs[0].hidden_states[1, 3] = torch.inf
    left = reference_run(problem, layer=layer)
    left = replace(left, layer=layer)
    found = layer_intervals(layer, left.stages("dispatch"))["combine", "values"][0]
    assert bool(torch.isnan(found.low[1]).all())
    assert not bool(torch.isnan(found.low[[0, 2, 3]]).any())
    right = replace(left, side="other", claim=Claim.FLOAT32)
    assert (
        by_name(compare(left, edited(right, "combine", "values", lambda v: v[1].fill_(7.0))))[
            "combine", "values"
        ].outside
        == 0
    )
    assert (
        by_name(compare(left, edited(right, "combine", "values", lambda v: v[0, 0].fill_(torch.nan))))[
            "combine", "values"
        ].outside
        == 1
    )


def test_interval_arithmetic():
    a, b = (Interval(torch.tensor([low]).double(), torch.tensor([high]).double()) for low, high in ((-2, 3), (-5, 1)))
    assert [float(end) for end in ((a * b).low, (a * b).high)] == [-15.0, 10.0]
    third = torch.tensor([1 / 3], dtype=torch.float64)
    out = Interval(third, third).map(lambda v: v)
    assert float(out.low) < 1 / 3 < float(out.high)
    assert float(out.high - out.low) == 2.0**-25  # neighbours in float32
    exact = Interval(third.bfloat16().double(), third.bfloat16().double()).map(lambda v: v)
    assert float(out.low) < float(exact.low) == float(exact.high)
    nothing = Interval.around(torch.tensor([torch.inf]), torch.tensor([1.0]))
    assert bool(torch.isnan(nothing.low))
    assert bool(torch.isnan(nothing.high))


def test_arrival_order_is_judged_by_reachability():
    """`enable_in_kernel_fc2_reduce`: another order of the terms is right, a sum that rounds once need not be."""
    name = "sm90_bf16_bf16_bf16_pull_cutedsl"
    problem = Problem(name, {"enable_in_kernel_fc2_reduce": True}, tokens=(5, 3), top_k=4)
    left = reference_run(problem)
    terms = left.trace["combine"].tensors["terms"]
    backwards = torch.zeros_like(terms[:, 0])
    for slot in reversed(range(4)):
        backwards = backwards + terms[:, slot]
    other = edited(left, "combine", "values", lambda v: v.copy_(backwards))
    found = compare(left, other)
    summed = by_name(found)["combine", "values"]
    assert found.passed
    assert summed.differing > 0
    assert summed.allowance.rung is Rung.ORDER
    assert summed.holds in (Holds.ULPS, Holds.BOUND)

    once = terms.float().sum(1).bfloat16()
    impossible = ~reachable(once, terms, problem.build().inputs[0].topk_ids)
    assert bool(impossible.any())
    found = compare(left, edited(left, "combine", "values", lambda v: v.copy_(once)))
    assert by_name(found)["combine", "values"].outside == int(impossible.sum())
    mute = replace(left, trace=replace(left.trace, stages=tuple(
        replace(s, tensors={"values": s.tensors["values"]}) for s in left.trace if s.name == "combine")))  # fmt: skip
    with pytest.raises(ValueError, match="must show its combine terms"):
        compare(mute, mute)
