"""The float32 emulation: the scheme's own bits where it promises them, derived bounds around float64 elsewhere."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from fp4ep.optimized.emulation import NOT_EMULATED
from fp4ep.optimized.emulation import cast as _cast
from fp4ep.optimized.emulation import combine as _combine
from fp4ep.optimized.emulation import quantize as _quantize
from fp4ep.optimized.fake_quant import dequantize, fake_quant_forward
from fp4ep.parity.problem import CASES, Layer, problems, tie_aligned
from fp4ep.reference.exchange import Rows, combine, exchange_in_process, select
from fp4ep.reference.formats import E4M3, E5M2, Overflow, cast_overflow, encode
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.quantize import quantize_activation
from fp4ep.reference.scheme import Combine, Scheme, Weights
from fp4ep.reference.schemes import SCHEMES as ALL_SCHEMES
from fp4ep.reference.schemes import find_scheme, options_of
from fp4ep.reference.types import MoEInputs, MoEWeights, Stage, Trace
from fp4ep.reference.weights import load_operand

EXPERTS = 4
NAN, INF = float("nan"), float("inf")
U = 2.0**-24  # unit roundoff of float32
ETA = 2.0**-149  # float32's smallest number: bounds what underflow costs one operation

#: Others it refuses: see tests/parity/test_tolerance.py.
SCHEMES = [scheme for scheme in ALL_SCHEMES if scheme.weights not in NOT_EMULATED]
for_each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
SUMS = [rule for rule in Combine if not rule.weighted]
#: The first of the schemes that differ in instructions, chains and combine only; and of those that differ in the first
#: two only, which the emulation does not have.
QUANTIZING = list({(s.weights, s.stage): s for s in reversed(SCHEMES)}.values())
DISTINCT = list({(s.weights, s.stage, s.combine): s for s in reversed(SCHEMES)}.values())
for_each_quantizing_scheme = pytest.mark.parametrize("scheme", QUANTIZING, ids=str)
for_each_distinct_scheme = pytest.mark.parametrize("scheme", DISTINCT, ids=str)
NVFP4, MXFP4 = (find_scheme(f"sm90_fp8_{kind}_bf16_pull_cutedsl") for kind in ("nvfp4", "mxfp4"))


def layer(scheme: Scheme, case: str, ep_size: int | None = None) -> Layer:
    """Built once for all schemes that quantize alike."""
    alike = next(s for s in QUANTIZING if (s.weights, s.stage) == (scheme.weights, scheme.stage))
    return replace(_layer(alike, case, ep_size), scheme=scheme)


@cache
def _layer(scheme: Scheme, case: str, ep_size: int | None) -> Layer:
    problem = problems(scheme.name, options_of(scheme), num_experts=EXPERTS, tokens=(8,))[case]
    return (problem.over(ep_size) if ep_size else problem).build()


def run(at: Layer) -> Trace:
    ranks = range(at.ep_size)
    forward = partial(fake_quant_forward, at.scheme, at.weights, at.inputs, exchange=exchange_in_process)
    return forward(ranks=ranks, ep_size=at.ep_size)


@cache
def ran(scheme: Scheme, case: str, ep_size: int | None = None) -> Trace:
    return run(layer(scheme, case, ep_size))


def outputs(trace: Trace) -> torch.Tensor:
    """`[tokens of every rank, H]` bf16."""
    return torch.cat([stage.tensors["values"] for stage in trace if stage.name == "combine"])


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.dtype.itemsize]
    assert torch.equal(found.contiguous().view(integer), expected.contiguous().view(integer))


def assert_same_stages(found: Sequence[Stage], expected: Sequence[Stage]) -> None:
    assert [(s.name, s.rank, list(s.tensors)) for s in found] == [(s.name, s.rank, list(s.tensors)) for s in expected]
    for mine, other in zip(found, expected, strict=True):
        for name in mine.tensors:
            assert_same_bits(mine.tensors[name], other.tensors[name])


# --- bits --------------------------------------------------------------------------------------------------------


def first_stages(at: Layer) -> list[Stage]:
    """The reference's stage and dispatch; it is stopped before any GEMM."""
    stages: list[Stage] = []

    def keep(stage: Stage) -> Stage:
        stages.append(stage)
        if (stage.name, stage.rank) == ("dispatch", at.ep_size - 1):
            raise StopIteration
        return stage

    with suppress(StopIteration):
        moe_forward(at.scheme, at.weights, at.inputs, intervene=keep)
    return stages


@for_each_scheme
def test_stage_and_dispatch_are_the_references_bits(scheme):
    for case in CASES if scheme in DISTINCT else ("ordinary",):
        expected = first_stages(layer(scheme, case))
        assert {stage.name for stage in expected} == {"stage", "dispatch"}
        assert_same_stages(ran(scheme, case).stages[: len(expected)], expected)


@for_each_distinct_scheme
def test_requantize_and_combine_are_the_references_bits_on_equal_input(scheme):
    """What the emulation made of its own activations and of its own terms, NaN and the tiny path included."""
    for case in CASES:
        trace = ran(scheme, case)
        for rank, inputs in enumerate(layer(scheme, case).inputs):
            activated, found = (trace[stage, rank].tensors for stage in ("activation", "requantize"))
            if scheme.requantize is None:
                assert_same_bits(found["values"], activated["values"].bfloat16())
            else:
                static = scheme.fc2_activation_dequant_scale
                expected = quantize_activation(activated["values"], scheme.requantize, static)
                assert_same_bits(found["values"].view(torch.uint8), expected.codes)
                assert_same_bits(found["scales"], expected.scales)
            home = trace["combine", rank].tensors
            assert_same_bits(home["values"], combine(home["terms"], inputs.topk_ids, scheme.combine))


@pytest.mark.parametrize(
    ("rule", "wire"), [*((s, None) for s in SUMS), (Combine.GROUPED, E4M3), (Combine.GROUPED, E5M2)], ids=str
)
def test_combine_of_special_terms(rule, wire):
    """Five slots, some masked: sums that cancel, of -0 only, of one infinity or two; NaN becomes 0x7FFF."""
    g = torch.Generator().manual_seed(0)
    terms = torch.randn(64, 5, 32, generator=g) * 2.0 ** torch.randint(-9, 9, (64, 5, 32), generator=g)
    terms[0], terms[1], terms[2, :, 3], terms[3, 1:4, 3], terms[3, 2, 3] = -0.0, 0.0, NAN, INF, -INF
    terms[8:16, 4] = -terms[8:16, 0]
    ids = torch.randint(-2, 4, (64, 5), generator=g)
    ids[:2] = 0
    token, slot = torch.nonzero(ids >= 0, as_tuple=True)
    returned = {"values": terms.bfloat16()[token, slot], "token": token, "slot": slot}
    inputs = MoEInputs(torch.zeros(64, 32).bfloat16(), ids, torch.ones(ids.shape))
    if wire is not None:  # the scale of a block that is not finite is FlashInfer's integer arithmetic, not copied here
        returned["values"] = returned["values"].nan_to_num(1.0, 2.0, 3.0)
    found = _combine(replace(SCHEMES[0], combine=rule, wire=wire), 2, returned, inputs)
    expected = torch.zeros_like(found["terms"])
    expected[token, slot] = returned["values"]
    assert_same_bits(found["terms"], expected)
    assert_same_bits(found["values"], combine(expected, ids, rule, local_experts=2, wire=wire))


@pytest.mark.parametrize("static", [0.3, 0.007, 1 / 3])
def test_quantizers_at_ties(static):
    """Every rule of every scheme, on float32 values that one unit in the scale or its reciprocal moves over a tie."""
    for rule in {rule for scheme in SCHEMES for rule in (scheme.stage, scheme.requantize) if rule}:
        values = tie_aligned(1, (64, 256), rule.element, rule.block or 256) * static
        found, expected = _quantize(values, rule, static), quantize_activation(values, rule, static)
        assert_same_bits(found["values"].view(torch.uint8), expected.codes)
        assert_same_bits(found["scales"], expected.scales)


def special_inputs(scheme: Scheme) -> MoEInputs:
    """Rows of what is rare: NaN of both signs, infinities, subnormals, the edges of E4M3, E5M2 and the tiny path.

    Each value twice: as the largest of its row, and here and there in a row of ordinary values.
    """
    large = [448.0, 464.0, 466.0, 480.0, 57344.0, 61440.0, 61696.0, 3e38]
    tiny = [4.6e-28, 4.3e-28, 1.5e-36, 1e-36, 1e-38, 2.0**-133]
    special = torch.tensor([*large, *tiny, 0.0, NAN, INF])
    special = torch.cat((special, -special))[:, None]
    ordinary = layer(scheme, "ordinary").inputs[0].hidden_states[:1].float()
    channels = torch.arange(ordinary.shape[1])
    among = torch.where((channels + torch.arange(len(special))[:, None]) % 7 == 0, special, ordinary)
    x = torch.cat((special * torch.linspace(-1, 1, len(channels)), among)).bfloat16()
    ids = torch.arange(2 * len(x)).reshape(-1, 2) % EXPERTS
    return MoEInputs(x, ids, torch.ones(ids.shape))


@for_each_scheme
def test_special_values_are_staged_as_the_reference_does(scheme):
    """To the sign of a NaN."""
    scheme = replace(scheme, fc1_activation_dequant_scale=0.3) if "per_tensor" in str(scheme) else scheme
    at = replace(layer(scheme, "ordinary"), scheme=scheme, inputs=(special_inputs(scheme),))
    assert bool(at.inputs[0].hidden_states.isnan().any())
    assert_same_stages(run(at).stages[:2], first_stages(at))


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.stage], ids=str)
def test_codes_that_were_quantized_before_pass_with_their_scales(scheme):
    at = layer(scheme, "ordinary")
    staged = ran(scheme, "ordinary")["stage"].tensors
    for scales in (staged["scales"] * 2, None) if "per_tensor" in str(scheme) else (staged["scales"] * 2,):
        given = replace(at, inputs=(replace(at.inputs[0], hidden_states=staged["values"], scales=scales),))
        assert_same_stages(run(given).stages[:2], first_stages(given))


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("saturate", [True, False])
def test_cast_of_every_upper_half_of_a_float32(element, saturate):
    """Every exponent and seven fraction bits, with the bits below zero, just above zero, at and beside the middle."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    values = ((torch.arange(-(1 << 15), 1 << 15)[:, None] << 16) | low).int().view(torch.float32)
    expected = encode(values, element, Overflow.SATURATE if saturate else cast_overflow(element))
    assert_same_bits(_cast(values, element.dtype, saturate).view(torch.uint8), expected)


# --- weights -----------------------------------------------------------------------------------------------------


def assert_same_operands(scheme: Scheme, weights: MoEWeights) -> None:
    """Exactly in FP4; in FP8, where code * scale is rounded to float32 here, after that rounding."""
    for leg in ("w13", "w2"):
        for expert in range(weights.num_experts):
            values, scale = dequantize(scheme, weights, leg, expert)
            operand = load_operand(scheme, weights, leg, expert)
            factor = operand.scale.double()
            expected = operand.values.double() * factor.repeat_interleave(values.shape[1] // factor.shape[1], 1)
            if scheme.weights in (Weights.FP8_PER_EXPERT, Weights.FP8_BLOCK_128):
                expected = expected.float().double()
            found = values.double() * scale.double()
            assert bool(((found == expected) | (found.isnan() & expected.isnan())).all())


@for_each_quantizing_scheme
def test_operands_of_problems(scheme):
    for case in ("ordinary", "tiny values", "values at ties"):
        assert_same_operands(scheme, layer(scheme, case).weights)


def random_bytes(seed: int, *shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.parametrize("spread", [None, torch.tensor(3e-3), torch.tensor([0.7]), torch.tensor([0.7, 1e-20])])
def test_every_nvfp4_code_under_every_scale(spread):
    """E4M3(code * scale / 8) rounds below a scale of 2^-2."""
    legs = random_bytes(1, 2, 256, 64), random_bytes(2, 2, 128, 64)
    scales = [random_bytes(3, *leg.shape[:2], leg.shape[2] // 8, high=127) for leg in legs]
    assert_same_operands(NVFP4, MoEWeights(*legs, *scales, spread, spread))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dense_nvfp4(dtype):
    """Ties of E2M1, blocks of zeros, and blocks so small beside the expert's largest value that their scale is 0."""
    g = torch.Generator().manual_seed(0)
    octaves = torch.randint(-20, 0, (24, 64, 8), generator=g).repeat_interleave(16, 2)
    w = torch.randint(-24, 25, (24, 64, 128), generator=g) * 2.0**octaves
    w *= 1 + torch.arange(24)[:, None, None] / 32  # experts with amax of their own
    w[:, ::9, :32] = 0
    w[-1] = 0
    assert_same_operands(NVFP4, MoEWeights(w.to(dtype), w[:, :32].to(dtype)))


@pytest.mark.parametrize(("low", "high"), [(120, 128), (100, 140), (1, 129), (244, 256), (0, 12)])
def test_mxfp4_scales_far_apart(low, high):
    """Beyond 11 octaves codes lose digits, ties away from zero; up to 127, where the kernel's own wrap begins."""
    legs = random_bytes(1, 2, 256, 64), random_bytes(2, 2, 128, 64)
    scales = [random_bytes(3, *leg.shape[:2], leg.shape[2] // 16, low=low, high=high) for leg in legs]
    assert_same_operands(MXFP4, MoEWeights(*legs, *scales))


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.name.startswith("sm90_fp8_fp8")], ids=str)
def test_fp8_weights_with_special_values(scheme):
    """Dense with NaN, infinity, an outlier, zeros and experts below the scales' floors; and every code as given."""
    g = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(4, 512, 256, generator=g), torch.randn(4, 256, 256, generator=g)
    for w in (w13, w2):
        w[2] *= 1e-11
        w[3] *= 1e-29
    w13[0, 3, 7], w13[1, 200, 1], w2[0, 140, 130], w13[1, 64:128] = NAN, -INF, 1e6, 0.0
    assert_same_operands(scheme, MoEWeights(w13, w2))
    codes = random_bytes(1, 2, 512, 256), random_bytes(2, 2, 256, 256)
    shapes = [(2,), (2,)] if scheme.weights is Weights.FP8_PER_EXPERT else [(2, 4, 2), (2, 2, 2)]
    scales = [torch.rand(shape, generator=g) + 0.1 for shape in shapes]
    assert_same_operands(scheme, MoEWeights(*codes, *scales))
    assert scheme.stage is not None
    assert_same_operands(scheme, MoEWeights(*(c.view(scheme.stage.element.dtype) for c in codes), *scales))


# --- bounds ------------------------------------------------------------------------------------------------------


def exact_product(at: Layer, leg: str, rows: Rows, expert: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[routes, N]` float64: the product of operands and scales, and a bound on what float32 makes of it.

    K products and additions, in any order and with or without FMA, are off by gamma_K * sum |x w| (Higham, section
    3.1). One rounding each for code * scale of x and of w, and for the scale behind the GEMM: gamma_(K + 3). Any of
    them may underflow.
    """
    x, x_scale = rows["values"].double(), rows["scales"].double()
    x = x * x_scale.repeat_interleave(x.shape[1] // x_scale.shape[1], 1)
    count, k = x.shape[1] + 3, x.shape[1]
    gamma = count * U / (1 - count * U)
    exact = torch.zeros(len(x), getattr(at.weights, leg).shape[1], dtype=torch.float64)
    bound = torch.zeros_like(exact)
    for e in expert.unique().tolist():
        operand, mine = load_operand(at.scheme, at.weights, leg, e), expert == e
        scale = operand.scale.double()
        w = operand.values.double() * scale.repeat_interleave(k // scale.shape[1], 1)
        exact[mine] = x[mine] @ w.T
        lost = (x[mine].abs().sum(1)[:, None] + w.abs().sum(1)[None]) + k * scale.max() + 1
        bound[mine] = gamma * (x[mine].abs() @ w.abs().T) + ETA * lost
    return exact, bound


def assert_within(found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    """Where the exact value is finite; where not, neither is what was found."""
    finite = exact.isfinite()
    assert bool(((found.double() - exact).abs() <= bound)[finite].all())
    assert not bool(found.isfinite()[~finite].any())


@for_each_quantizing_scheme
def test_gemms_and_activation_stay_within_float32(scheme):
    """Each against float64 from what it was given. Activation: exp to 2 units (one ulp), its sum, quotient and three
    products one each; 8 for their products. Flushed sigmoids: below 2^-126, times up * gate * weight."""
    for case in CASES:
        at, trace = layer(scheme, case), ran(scheme, case)
        for rank in range(at.ep_size):
            rows, fc1, activation, requantize, fc2 = (
                trace[stage, rank].tensors for stage in ("dispatch", "fc1", "activation", "requantize", "fc2")
            )
            exact, bound = exact_product(at, "w13", rows, rows["expert"])
            assert_within(torch.cat((fc1["gate"], fc1["up"]), 1), exact, bound)
            gate, up, weight = fc1["gate"].double(), fc1["up"].double(), rows["topk_weights"].double()[:, None]
            if scheme.gate_up_clamp is not None:
                gate, up = gate.clamp(max=scheme.gate_up_clamp), up.clamp(-scheme.gate_up_clamp, scheme.gate_up_clamp)
            exact = gate * torch.sigmoid(gate) * up * weight
            lost = 2.0**-126 * (1 + (gate * up).abs()) * (1 + weight.abs())
            assert_within(activation["values"], exact, 8 * U * exact.abs() + lost)
            exact, bound = exact_product(at, "w2", requantize, rows["expert"])
            bound = bound + 2.0**-8 * (exact.abs() + bound) + 2.0**-134  # bf16: unit roundoff, half its smallest number
            assert_within(fc2["values"], exact, bound)


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.combine is not Combine.ON_ARRIVAL], ids=str)
def test_output_is_near_the_references(scheme):
    """Two layers that shared no rounding before fc2 would be 0.53 half steps apart in relative L2: an error uniform
    over +-h on values uniform over a binade is 0.38 h in rms, twice that is sqrt(2) more. Half a half step demands that
    most codes be the same; the bounds above carry the proof."""
    digits = 8 if scheme.requantize is None else scheme.requantize.element.mantissa_bits + 1
    for case in ("ordinary", "outliers"):
        at = layer(scheme, case)
        expected = outputs(moe_forward(scheme, at.weights, at.inputs)[1]).double()
        distance = float((outputs(ran(scheme, case)).double() - expected).norm() / expected.norm())
        assert distance < 0.5 * 2.0**-digits


# --- ranks and routes --------------------------------------------------------------------------------------------


@for_each_distinct_scheme
def test_any_number_of_ranks_is_one(scheme):
    """Bits: an expert's GEMM gets the same rows in the same order. (Another batch may move a row's last bits.)"""
    for case in ("masked slots", "duplicate ids"):
        for ep_size in (2, 4):
            assert_same_bits(outputs(ran(scheme, case, ep_size)), outputs(ran(scheme, case, 1)))


@for_each_distinct_scheme
def test_a_rank_needs_its_own_experts_only(scheme):
    """Rank 1 of 2 with its own weights and tokens, the others' rows played back."""
    at, whole, rank = layer(scheme, "masked slots", 2), ran(scheme, "masked slots", 2), 1
    calls = []

    def playback(rows: Sequence[Rows], destinations: Sequence[torch.Tensor]) -> list[Rows]:
        calls.append(destinations[0])
        if len(calls) == 1:
            return [whole["dispatch", rank].tensors]
        routes = [whole["dispatch", r].tensors | whole["fc2", r].tensors for r in range(2)]
        back = [select(table, table["source_rank"] == rank) for table in routes]
        return [{name: torch.cat([table[name] for table in back]) for name in ("values", "token", "slot")}]

    per_rank = EXPERTS // 2
    mine = {name: t[rank * per_rank :][:per_rank] for name, t in vars(at.weights).items() if t is not None}
    trace = fake_quant_forward(
        scheme, MoEWeights(**mine), at.inputs[rank : rank + 1], ranks=[rank], ep_size=2, exchange=playback
    )
    assert_same_stages(trace.stages, [stage for stage in whole if stage.rank == rank])
    assert set(calls[0].tolist()) <= set(range(2))
    assert_same_bits(calls[1], whole["dispatch", rank].tensors["source_rank"])


@for_each_distinct_scheme
def test_without_tokens_or_routes(scheme):
    """Empty tensors of the right shapes, and zeros for tokens that go nowhere."""
    at = layer(scheme, "ordinary")
    x = at.inputs[0]
    nothing = MoEInputs(x.hidden_states[:0], x.topk_ids[:0], x.topk_weights[:0])
    masked = replace(x, topk_ids=torch.full_like(x.topk_ids, -1))
    for inputs in (nothing, masked):
        empty = replace(at, inputs=(inputs,))
        expected = moe_forward(scheme, at.weights, inputs)[1]
        assert_same_stages(run(empty).stages, expected.stages)
        assert not bool(outputs(run(empty)).view(torch.int16).any())


@for_each_distinct_scheme
def test_masked_and_padded_nan_reaches_no_output(scheme):
    """NaN in padding rows, in a masked slot's weight, and in a token whose every slot is masked."""
    padded = ran(scheme, "poisoned padding")["combine"].tensors["values"]
    plain = ran(scheme, "ordinary")["combine"].tensors["values"]
    assert_same_bits(padded[: len(plain)], plain)
    assert len(padded) > len(plain)
    assert not bool(padded[len(plain) :].view(torch.int16).any())

    at = layer(scheme, "masked slots")
    x = at.inputs[0]
    masked = x.topk_ids < 0
    nowhere = masked.all(1)
    assert bool(nowhere.any())
    assert bool(masked[~nowhere].any())
    poisoned = replace(
        x,
        hidden_states=torch.where(nowhere[:, None], NAN, x.hidden_states),
        topk_weights=torch.where(masked, NAN, x.topk_weights),
    )
    assert_same_bits(outputs(run(replace(at, inputs=(poisoned,)))), outputs(ran(scheme, "masked slots")))


def test_progress_ends_at_all_rows():
    at, seen = layer(NVFP4, "masked slots", 4), []
    options = {"ranks": range(4), "ep_size": 4, "exchange": exchange_in_process}
    fake_quant_forward(at.scheme, at.weights, at.inputs, **options, progress=lambda *rows: seen.append(rows))
    routes = sum(int((x.topk_ids >= 0).sum()) for x in at.inputs)
    assert [total for _, total in seen] == [2 * routes] * len(seen)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == 2 * routes
