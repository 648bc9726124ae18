"""The push kernel's arithmetic, against plain loops that follow its CUDA source line by line; what each rule does."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from fp4ep.reference.activation import fast_swiglu
from fp4ep.reference.exchange import combine
from fp4ep.reference.formats import E4M3, decode, encode
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.quantize import quantize_activation, quantize_fp8_block_128, quantize_fp8_block_128_apart
from fp4ep.reference.scheme import Apply, Combine, Place, ScaleSource, Scheme, Swiglu, Weights
from fp4ep.reference.schemes import find_scheme
from fp4ep.reference.special import ex2_approx, rcp_approx
from fp4ep.reference.types import Exactness, MoEInputs, MoEWeights
from fp4ep.reference.validate import InputError
from fp4ep.reference.weights import load_operand

NAME = "sm90_fp8_fp8_bf16_push_cuda"
GROUPS = find_scheme(NAME)
ROUTES = find_scheme(NAME, grouped_combine=False)
BF16 = find_scheme(NAME, grouped_combine=False, combine_dtype="bf16")
ALL = pytest.mark.parametrize("scheme", [GROUPS, ROUTES, BF16], ids=str)
NAN, INF = float("nan"), float("inf")
E, H, I, T, TOP_K = 4, 256, 128, 12, 4  # noqa: E741

assert GROUPS.stage is not None
RULE = GROUPS.stage


def f32(value: float | Fraction) -> np.float32:
    """Nearest float32, subnormals flushed. (Through float64: a second rounding that none of the values here meets.)"""
    if isinstance(value, Fraction) and abs(value) > 2**128:
        return np.float32(INF if value > 0 else -INF)
    rounded = np.float32(float(value))
    return rounded * np.float32(0) if abs(rounded) < 2.0**-126 else rounded


def special(function, value: np.float32) -> np.float32:
    return np.float32(function(torch.tensor([float(value)])).item())


def plain_quantize(values: list[float]) -> tuple[list[int], float]:
    """One block, as `quant_row_1x128` has it: fmax over |x|, m / 448, x / sc, fminf(fmaxf(f, -448), 448)."""
    largest = f32(0)
    for value in values:
        if abs(f32(value)) > largest:  # false for NaN: fmax drops it
            largest = abs(f32(value))
    scale = f32(largest * special(rcp_approx, np.float32(448))) if largest > 0 else np.float32(1)
    factor, codes = special(rcp_approx, scale), []
    for value in values:
        quotient = f32(f32(value) * factor)
        if not quotient > -448:  # or NaN
            quotient = np.float32(-448)
        codes.append(int(encode(torch.tensor([min(float(quotient), 448.0)]), E4M3)))
    return codes, float(scale)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "exponent", [0, -10, 100, 119, -80, -110, -116, -117, -118, -119, -126, -130], ids=lambda e: f"2^{e}"
)
def test_a_block_of_numbers_of_one_size(exponent):
    """Down to where the scale (amax / 448) and then the values themselves are float32 subnormals, which are zeros."""
    g = torch.Generator().manual_seed(exponent + 200)
    x = (torch.randn(3, 128, generator=g).double() * 2.0**exponent).bfloat16().float()
    found = quantize_activation(x, RULE)
    for row in range(3):
        codes, scale = plain_quantize(x[row].tolist())
        assert found.codes[row].tolist() == codes
        assert found.scales[row].tolist() == [scale]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("first", "code", "scale"),
    [
        ([0.0, -0.0], [0x00, 0x80], 1.0),
        ([NAN, NAN], [0xFE, 0xFE], 1.0),  # NaN is not seen, and comes out as -448
        ([NAN, 7.0], [0xFE, 0x7E], 7 / 448),
        ([INF, 7.0], [0xFE, 0x00], INF),
        ([-INF, -7.0], [0xFE, 0x80], INF),
        ([1e-39, -1e-39], [0x00, 0x80], 1.0),  # subnormal, so a block of zeros
        ([2.0**-120, -(2.0**-121)], [0x7E, 0xFE], 0.0),  # the scale is flushed: x / 0
        ([2.0**-117 * 1.75, 0.0], [0x7E, 0x00], 2.0**-125),
    ],
    ids=str,
)
def test_special_blocks(first, code, scale):
    """Zeros beside a flushed scale are 0 / 0, so -448; elsewhere the rest of the block is zeros."""
    values = first + [0.0] * 126
    found = quantize_activation(torch.tensor([values]), RULE)
    assert (found.codes[0].tolist(), found.scales.item()) == plain_quantize(values)
    assert found.codes[0, :2].tolist() == code
    assert found.scales.item() == pytest.approx(scale, rel=1e-6)
    assert found.codes[0, 2:].unique().tolist() == [0xFE if scale == 0 else 0x00]


def test_the_reciprocal_of_448_is_that_of_the_compiler():
    """The source divides by 448 and nvcc multiplies by a constant (SASS, CUDA 13.0); div.approx would do the same."""
    assert rcp_approx(torch.tensor(448.0)).item() == E4M3.reciprocal_max == np.uint32(0x3B124925).view(np.float32)


def test_an_approximate_division_gives_other_codes():
    """Of all bf16 values up to a bf16 amax, some quantize to other codes than by a true division or a reciprocal."""
    amax = (torch.arange(128) + 128).bfloat16().float()
    x = torch.cat((amax[:, None], torch.rand(128, 127, generator=torch.Generator().manual_seed(1)) * amax[:, None]), 1)
    x[:, 1:] = x[:, 1:].bfloat16().float()
    rules = [replace(RULE, apply=apply) for apply in (Apply.DIVIDE_APPROX, Apply.DIVIDE, Apply.RECIPROCAL)]
    scales = [quantize_activation(x, rule).scales for rule in rules]
    assert torch.equal(scales[0], scales[1])
    # Values made to lie at ties of the true quotient: there an approximate reciprocal decides.
    ties = (
        decode(torch.arange(0x40, 0x7E, dtype=torch.uint8), E4M3) + decode(torch.arange(0x41, 0x7F).byte(), E4M3)
    ) / 2
    x[:, 1:63] = scales[0] * ties
    codes = [quantize_activation(x, rule).codes for rule in rules]
    assert (codes[0] != codes[1]).any()
    assert (codes[0] != codes[2]).any()


# --- SwiGLU ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_swiglu_is_the_plain_formula():
    """a / (1 + __expf(-a)) * b of bf16 values, every float32 step flushed, one rounding to bf16."""
    g = torch.Generator().manual_seed(0)
    gate = torch.cat((torch.randn(400, generator=g) * 8, torch.tensor([0.0, -0.0, 88, -88, 100, -100, INF, -INF, NAN])))
    gate = torch.cat((gate, torch.tensor([1e-39, -1e-39, -87.5, -3e38, 1e30, 1e-20]))).bfloat16().float()
    up = torch.cat((torch.randn(413, generator=g), torch.tensor([1e-39, 1e-19]))).bfloat16().float()
    up[400:408] = torch.tensor([1.0, 1, 2, 2, -1, -1, 1, 1])
    for a, b, found in zip(gate.tolist(), up.tolist(), fast_swiglu(gate[None], up[None])[0].tolist(), strict=True):
        e = special(ex2_approx, f32(f32(a) * np.float32(-1.44269502162933349609375)))
        silu = f32(f32(a) * special(rcp_approx, f32(np.float32(1) + e)))
        expected = torch.tensor(float(f32(silu * f32(b)))).bfloat16().item()
        assert found == expected or (np.isnan(found) and np.isnan(expected)), (a, b)


# --- weights -----------------------------------------------------------------------------------------------------


def test_weight_blocks_keep_gate_and_up_apart():
    w = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    w[256:] *= 64
    w[:128, :128] = 0
    apart, together = quantize_fp8_block_128_apart(w, E4M3), quantize_fp8_block_128(w, E4M3, 2)
    assert apart.scales[0, 0] == 1.0
    for block in range(4):
        for column in range(2):
            here = w[128 * block : 128 * (block + 1), 128 * column : 128 * (column + 1)].float()
            amax = here.abs().max()
            scale = amax * E4M3.reciprocal_max if amax > 0 else torch.tensor(1.0)
            assert apart.scales[block, column] == scale
            codes = apart.codes[128 * block : 128 * (block + 1), 128 * column : 128 * (column + 1)]
            assert torch.equal(codes, encode(here / scale, E4M3))
    assert not torch.equal(apart.codes, together.codes)


def test_a_weight_meets_the_scale_of_its_block():
    """Value times scale is the weight to within half a step of E4M3: 2^-4 of it, or 2^-10 of the scale."""
    weights, _ = layer()
    for leg in ("w13", "w2"):
        weight, operand = getattr(weights, leg)[1].float(), load_operand(GROUPS, weights, leg, 1)
        scale = operand.scale.repeat_interleave(128, 1)
        allowed = weight.abs() * 2.0**-4 + scale * 2.0**-10
        assert ((operand.values * scale - weight).abs() <= allowed * (1 + 2.0**-20)).all()


def test_a_nan_weight_leaves_its_block_without_a_scale():
    """amax is NaN, NaN > 0 is false: the scale is 1, and what is above 448 is cut."""
    w = torch.full((128, 128), 1000.0).bfloat16()
    w[3, 4], w[5, 6] = NAN, -2.0
    found = quantize_fp8_block_128_apart(w, E4M3)
    assert found.scales.item() == 1.0
    assert found.codes[3, 4] == 0x7F
    assert decode(found.codes, E4M3)[5, 6] == -2.0
    assert int((found.codes == E4M3.max_code).sum()) == 128 * 128 - 2


# --- combine -----------------------------------------------------------------------------------------------------


def plain_combine(scheme: Scheme, terms: torch.Tensor, ids: list[int], weights: list[float], local: int) -> list[float]:
    """One token over H channels, in exact arithmetic and one rounding at a time."""
    hidden = terms.shape[1]
    groups: dict[int, list[Fraction]] = {}
    for slot, expert in enumerate(ids):
        if expert >= 0:
            group = groups.setdefault(
                expert // local if scheme.combine is Combine.WEIGHTED_GROUPS else slot, [Fraction(0)] * hidden
            )
            for h, term in enumerate(terms[slot].tolist()):
                group[h] = Fraction(float(f32(Fraction(weights[slot]) * Fraction(term) + group[h])))
    total = [Fraction(0)] * hidden
    for _, sums in sorted(groups.items()):
        values = [float(value) for value in sums]
        if scheme.wire_rule is None:
            sent, scales = torch.tensor(values).bfloat16().tolist(), [1.0] * hidden
        else:
            blocks = [plain_quantize(values[start : start + 128]) for start in range(0, hidden, 128)]
            codes = torch.tensor([code for block, _ in blocks for code in block], dtype=torch.uint8)
            sent, scales = decode(codes, E4M3).tolist(), [scale for _, scale in blocks for _ in range(128)]
        total = [
            Fraction(float(f32(Fraction(code) * Fraction(scale) + sum_))) if scale else sum_
            for code, scale, sum_ in zip(sent, scales, total, strict=True)
        ]
    return torch.tensor([float(value) for value in total]).bfloat16().tolist()


@ALL
@pytest.mark.parametrize("local", [1, 2])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_combine_is_the_plain_loop(scheme, local):
    """Masked slots, an expert named twice, zero and negative weights, blocks of zeros and of tiny terms, and sums that
    cancel: what is left then is one rounding, or the order of the additions."""
    g = torch.Generator().manual_seed(3)
    ids = torch.tensor([[3, 0, 2, 1], [1, -1, 2, 1], [0, 1, 2, 3], [-1, 1, 0, -1], [-1, -1, -1, -1]])
    cancelling = torch.tensor([[0, -1, 0, -1], [0, -1, 2, -1], [0, 1, 2, 3], [2, 0, 3, 1]])
    ids = torch.cat((ids, cancelling))
    terms = torch.randn(9, TOP_K, H, generator=g) * 2.0 ** torch.randint(-6, 6, (9, TOP_K, 1), generator=g)
    weights = torch.rand(9, TOP_K, generator=g)
    weights[0, 1], weights[1, 0] = 0.0, -0.75
    terms[2, :, :128] = 0
    terms[3, 1:, 128:] *= 2.0**-118
    terms[7:, 0] *= 2.0**24
    terms[5:, 2] = -terms[5:, 0]
    weights[5:, 2] = weights[5:, 0]
    terms = terms.bfloat16()
    found = combine(terms, ids, scheme.combine, local, topk_weights=weights, wire_rule=scheme.wire_rule)
    for token in range(9):
        expected = plain_combine(scheme, terms[token].float(), ids[token].tolist(), weights[token].tolist(), local)
        assert found[token].tolist() == expected, token


def test_a_block_with_a_flushed_scale_adds_nothing():
    """Not even +0: the sum stays -0, which the first slot's -0.9375 * scale flushed to. In bf16 the values count."""
    terms = torch.zeros(1, 2, 128)
    terms[0, 0, :2] = torch.tensor([472.0, -1.0]) * 2.0**-126
    terms[0, 1] = 2.0**-125
    arguments = {"local_experts": 1, "topk_weights": torch.ones(1, 2)}
    ids = torch.arange(2)[None]
    for rule in (Combine.WEIGHTED_GROUPS, Combine.WEIGHTED_ROUTES):
        found = combine(terms.bfloat16(), ids, rule, wire_rule=RULE, **arguments)[0]
        assert found[0] == terms[0, 0, 0]
        assert found[1:].count_nonzero() == 0
        assert found[:3].signbit().tolist() == [False, True, False]
        assert combine(terms.bfloat16(), ids, rule, **arguments)[0, 2] == 2.0**-125


# --- the layer ---------------------------------------------------------------------------------------------------


def layer(seed: int = 0) -> tuple[MoEWeights, MoEInputs]:
    g = torch.Generator().manual_seed(seed)
    w13 = torch.randn(E, 2 * I, H, generator=g) * 0.06
    w13[:, I:] *= 8  # gate and up blocks have scales of their own
    ids = torch.rand(T, E, generator=g).argsort(1)[:, :TOP_K].contiguous()
    ids[0, 1], ids[1, 2], ids[2] = -1, ids[1, 0], -1
    return MoEWeights(w13.bfloat16(), (torch.randn(E, H, I, generator=g) * 0.08).bfloat16()), MoEInputs(
        torch.randn(T, H, generator=g).bfloat16(), ids, torch.rand(T, TOP_K, generator=g)
    )


@ALL
def test_gate_up_and_activation_are_bf16(scheme):
    _, trace = moe_forward(scheme, *layer())
    for stage, name in (("fc1", "gate"), ("fc1", "up"), ("activation", "values")):
        values = trace[stage].tensors[name]
        assert values.dtype is torch.float32
        assert torch.equal(values, values.bfloat16().float())
    assert trace["activation"].exactness is trace["requantize"].exactness is Exactness.TABLED
    assert trace["combine"].exactness is (Exactness.EXACT if scheme is BF16 else Exactness.TABLED)


def test_the_routing_weight_changes_the_combine_only():
    weights, inputs = layer()
    doubled = replace(inputs, topk_weights=inputs.topk_weights * 2)
    (one, first), (two, second) = (moe_forward(GROUPS, weights, x) for x in (inputs, doubled))
    assert torch.equal(first["fc2"].tensors["values"], second["fc2"].tensors["values"])
    assert torch.equal(one * 2, two)


@ALL
def test_every_rule_shows(scheme):
    """Another rule at any place of the record changes the output: none of them is idle."""
    arguments = layer()
    output, _ = moe_forward(scheme, *arguments)
    changes: dict[str, Scheme] = {
        "weights": replace(scheme, weights=Weights.FP8_BLOCK_128),
        "stage": replace(scheme, stage=replace(RULE, block=256)),
        "requantize": replace(scheme, requantize=replace(RULE, block=64)),
        "fc1 chunk": replace(scheme, fc1=replace(scheme.fc1, chunk=256, promote=Place.BOTH)),
        "fc2 chunk": replace(scheme, fc2=replace(scheme.fc2, chunk=64)),
        "swiglu": replace(scheme, swiglu=Swiglu.UP_FIRST),
        "wire": replace(scheme, wire_rule=None if scheme.wire_rule else RULE),
        "combine": replace(scheme, combine=Combine.WEIGHTED),
    }
    for name, changed in changes.items():
        other, _ = moe_forward(changed, *arguments)
        assert not torch.equal(output, other), name


def test_the_source_of_scales_shows_in_a_block_of_zeros():
    """Under the pull kernels' rule a zero block's scale is 1e-30; here it is 1, and both give zeros."""
    x = torch.zeros(1, 128)
    assert quantize_activation(x, RULE).scales.item() == 1.0
    assert quantize_activation(x, replace(RULE, source=ScaleSource.AMAX)).scales.item() < 1e-29


@ALL
def test_weights_quantized_before_give_the_same(scheme):
    weights, inputs = layer()
    legs = {leg: [quantize_fp8_block_128_apart(w, E4M3) for w in getattr(weights, leg)] for leg in ("w13", "w2")}
    packed = MoEWeights(
        *(torch.stack([q.codes for q in leg]) for leg in legs.values()),
        *(torch.stack([q.scales for q in leg]) for leg in legs.values()),
    )
    assert torch.equal(moe_forward(scheme, packed, inputs)[0], moe_forward(scheme, weights, inputs)[0])


def test_what_it_does_not_take():
    weights, inputs = layer()
    quantized = quantize_activation(inputs.hidden_states.float(), RULE)
    codes = replace(inputs, hidden_states=quantized.codes.view(torch.float8_e4m3fn), scales=quantized.scales)
    with pytest.raises(InputError, match=r"^hidden_states \(rank 0\) must be bfloat16, got torch.float8_e4m3fn"):
        moe_forward(GROUPS, weights, codes)
    with pytest.raises(InputError, match=r"^w13 must be torch.bfloat16, or quantized"):
        moe_forward(GROUPS, MoEWeights(weights.w13.float(), weights.w2.float()), inputs)
