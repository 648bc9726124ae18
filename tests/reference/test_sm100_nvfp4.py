"""The modelled SM100 scheme: its tensor core and quantizer against exact rationals, its layer against the formula."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch

from fp4ep.reference import (
    BLACKWELL_NVFP4,
    E2M1,
    E4M3,
    HOPPER_E4M3,
    Evidence,
    Exactness,
    InputError,
    MoEInputs,
    MoEWeights,
    decode,
    find_scheme,
    matmul,
    moe_forward,
    pack_e2m1,
    quantize_nvfp4_with_norm,
)
from fp4ep.reference.activation import swiglu
from fp4ep.reference.moe import moe_forward_ranks
from fp4ep.reference.special import rcp_approx

NAME = "sm100_nvfp4_nvfp4_bf16_cutedsl"
EARLY = find_scheme(NAME)
LATE = find_scheme(NAME, apply_routing_weights_before_fc2=False)
INF, NAN = math.inf, math.nan


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


# --- the tensor core, literally ------------------------------------------------------------------------------------


def exponent(x: Fraction | float, minimum: int) -> int:
    return max(math.frexp(float(x))[1] - 1, minimum)


def toward_zero(value: Fraction) -> float:
    """float32 by truncation; subnormals have the step of 2^-126."""
    if not value:
        return 0.0
    step = Fraction(2) ** (exponent(value, -126) - 23)
    return float(math.trunc(value / step) * step)


def instruction(a, b, scale_a, scale_b, c: float, fraction_bits: int = 35) -> float:
    """64 elements and four scales of either side, one output."""
    terms = []
    for block in range(4):
        own = range(16 * block, 16 * block + 16)
        dot = sum(Fraction(a[i]) * Fraction(b[i]) for i in own)
        value = dot * Fraction(scale_a[block]) * Fraction(scale_b[block])
        if any(a[i] * b[i] for i in own) and scale_a[block] and scale_b[block]:
            terms.append((exponent(scale_a[block], -6) + exponent(scale_b[block], -6), value))
    if c:
        terms.append((exponent(c, -126), Fraction(c)))
    if not terms:
        return 0.0
    unit = Fraction(2) ** (max(e for e, _ in terms) - fraction_bits)
    return toward_zero(sum(math.trunc(value / unit) for _, value in terms) * unit)


def slow(a, b, scales, c=None) -> torch.Tensor:
    out = torch.zeros(len(a), len(b)) if c is None else c.clone()
    for m, n in np.ndindex(*out.shape):
        value = float(out[m, n])
        for k in range(0, a.shape[1], 64):
            blocks = slice(k // 16, k // 16 + 4)
            parts = (x[row, k : k + 64].tolist() for x, row in ((a, m), (b, n)))
            value = instruction(*parts, scales[0][m, blocks].tolist(), scales[1][n, blocks].tolist(), value)
        out[m, n] = value
    return out


def tile(kind: str, seed: int, m: int = 5, n: int = 7, k: int = 256):
    g = torch.Generator().manual_seed(seed)
    low, high = {"near one": (52, 61), "subnormal": (0, 9), "large": (110, 127)}.get(kind, (0, 127))
    sides, scales = [], []
    for rows in (m, n):
        codes = torch.randint(16, (rows, k), generator=g)
        if kind == "sparse":  # whole blocks of zeros, of both signs
            codes = torch.where(
                (torch.rand(rows, k // 16, generator=g) < 0.5).repeat_interleave(16, 1), codes & 8, codes
            )
        sides.append(E2M1.values[codes])
        scales.append(E4M3.values[torch.randint(low, high, (rows, k // 16), generator=g)])
    if kind == "cancelling":  # the second half of an instruction takes back the first, but for one element
        for x, s in zip(sides, scales, strict=True):
            x.view(-1, 2, 32)[:, 1], s.view(-1, 2, 2)[:, 1] = x.view(-1, 2, 32)[:, 0], s.view(-1, 2, 2)[:, 0]
        sides[0].view(-1, 2, 32)[:, 1] *= -1
        sides[0][:, 63::64] = 0.5
    return (*sides, tuple(scales))


KINDS = ["any scale", "near one", "subnormal", "large", "sparse", "cancelling"]


@pytest.mark.parametrize("c_exponent", [None, 0, 24, 40, 100, -30, -140])
@pytest.mark.parametrize("kind", KINDS)
def test_tensor_core_against_rationals(kind, c_exponent):
    a, b, scales = tile(kind, seed=KINDS.index(kind))
    c = None
    if c_exponent is not None:
        g = torch.Generator().manual_seed(99)
        c = (torch.randn(len(a), len(b), generator=g).double() * 2.0**c_exponent).float()
    assert same_bits(matmul(BLACKWELL_NVFP4, a, b, scales=scales, c=c), slow(a, b, scales, c))


def one_tile(blocks: list[tuple[list[float], float, float]], c: float) -> float:
    """blocks: of a the elements (b's are all 1), and both scales."""
    a, scale_a, scale_b = torch.zeros(1, 64), torch.ones(1, 4), torch.ones(1, 4)
    for i, (elements, own, other) in enumerate(blocks):
        a[0, 16 * i : 16 * i + len(elements)] = torch.tensor(elements)
        scale_a[0, i], scale_b[0, i] = own, other
    b, start = torch.ones(1, 64), torch.tensor([[c]])
    found = matmul(BLACKWELL_NVFP4, a, b, scales=(scale_a, scale_b), c=start)
    if math.isfinite(c) and bool(torch.isfinite(scale_a).all()):
        assert same_bits(found, slow(a, b, (scale_a, scale_b), start))
    return float(found)


LEAST = 2.0**-9  # E4M3's smallest scale


def test_what_falls_below_the_largest_term_is_cut():
    """2^22 is taken back and leaves nothing: 2^-19 is more than 35 bits below. An exact sum would keep it."""
    half = ([4.0] * 16, 256.0, 256.0)  # 64 * 2^16 = 2^22
    least = ([0.5], LEAST, 1.0)
    assert one_tile([half, least], -(2.0**22)) == 2.0**-10  # E = 22: the unit is 2^-13
    assert one_tile([half, half, least], -(2.0**23)) == 2.0**-10
    assert one_tile([half, ([0.5], LEAST, LEAST)], -(2.0**22)) == 0.0
    assert one_tile([([0.5], LEAST, LEAST)], 0.0) == 2.0**-19
    # Scales that are subnormal count as 2^-6: the unit is 2^-47, not 2^-53.
    opposite = [([0.5], LEAST, LEAST), ([-0.5], LEAST, LEAST)]
    assert one_tile(opposite, 2.0**-47) == 2.0**-47
    assert one_tile(opposite, 2.0**-48) == 0.0


def test_a_block_of_zeros_does_not_decide():
    """Its scales are the largest there are, but it is no term: 2^-19 beside it survives 34 bits below C."""
    zeros = ([0.0], 448.0, 448.0)
    least = ([0.5], LEAST, LEAST)
    assert one_tile([zeros, least], 0.0) == 2.0**-19
    assert one_tile([([0.5], 448.0, 448.0), ([-0.5], 448.0, 448.0), least], 0.0) == 2.0**-19  # 16 + 35 - 1: kept
    assert one_tile([least], 2.0**20) - 2.0**20 == 0.0


def test_results_are_truncated_toward_zero():
    assert one_tile([([1.5], 1.0, 1.0)], 2.0**24) == 2.0**24  # to nearest: 2^24 + 2
    assert one_tile([([-1.5], 1.0, 1.0)], -(2.0**24)) == -(2.0**24)
    assert one_tile([([-0.5], LEAST, 1.0)], 1.0) == 1 - 2.0**-10
    assert one_tile([([-0.5], LEAST, LEAST)], 64.0) == 64 - 2.0**-18  # a binade down the step is half


def test_the_accumulator_alone_is_kept():
    for c in (2.0**-149, -(2.0**-149), 3 * 2.0**-128, -(2.0**-126), 3.4e38):
        assert one_tile([], c) == float(torch.tensor(c))
    for c in (0.0, -0.0):
        assert math.copysign(1, one_tile([([-0.0], 1.0, 1.0)], c)) == 1.0


def test_nan_and_infinity():
    """A NaN scale or accumulator gives NaN, even where its block is zero; an infinite accumulator stays."""
    assert math.isnan(one_tile([([1.0], NAN, 1.0)], 0.0))
    assert math.isnan(one_tile([([0.0], NAN, 1.0)], 1.0))
    assert math.isnan(one_tile([([1.0], 1.0, 1.0)], NAN))
    assert one_tile([([6.0] * 16, 448.0, 448.0)], -INF) == -INF
    a, b, scales = tile("any scale", seed=1)
    scales[0][2, 3] = NAN
    found = matmul(BLACKWELL_NVFP4, a, b, scales=scales)
    assert same_bits(found[2], torch.full((7,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32))
    others = [0, 1, 3, 4]
    clean = (scales[0][others], scales[1])
    assert same_bits(found[others], matmul(BLACKWELL_NVFP4, a[others], b, scales=clean))


def test_rows_are_independent():
    """Tiles of 32 rows and of many columns: the same as one row and one column at a time."""
    a, b, scales = tile("any scale", seed=3, m=70, n=40, k=128)
    found = matmul(BLACKWELL_NVFP4, a, b, scales=scales)
    for m, n in ((0, 0), (31, 5), (32, 39), (69, 17)):
        single = (scales[0][m : m + 1], scales[1][n : n + 1])
        assert same_bits(
            found[m : m + 1, n : n + 1], matmul(BLACKWELL_NVFP4, a[m : m + 1], b[n : n + 1], scales=single)
        )


def test_scales_are_asked_for():
    a, b, scales = tile("near one", seed=0)
    for wrong in (None, (scales[0], scales[1][:, :-1])):
        with pytest.raises(ValueError, match=r"^scales must be \[\(5, 16\), \(7, 16\)\]"):
            matmul(BLACKWELL_NVFP4, a, b, scales=wrong)
    with pytest.raises(ValueError, match="K a multiple of 64"):
        matmul(BLACKWELL_NVFP4, a[:, :32], b[:, :32], scales=(scales[0][:, :2], scales[1][:, :2]))
    with pytest.raises(ValueError, match="scales must be None"):
        matmul(HOPPER_E4M3, a, b, scales=scales)


# --- the quantizer, one element at a time --------------------------------------------------------------------------


def nearest(values: list[float], x: float) -> int:
    """Index of the nearest of ascending non-negative values, ties to the even index, beyond the last the last."""
    exact = Fraction(min(x, values[-1]))
    return min(range(len(values)), key=lambda i: (abs(Fraction(values[i]) - exact), i & 1))


def quantize_slowly(block: np.ndarray, norm: float) -> tuple[int, list[int]]:
    """Scale code and E2M1 codes of 16 finite float32 values."""
    f = np.float32
    with np.errstate(over="ignore"):
        wanted = f(f(np.abs(block).max() * f(1 / 6)) * f(norm))
    scale = nearest(E4M3.values[:127].tolist(), float(wanted))
    value = f(E4M3.values[scale])
    factor = f(0) if scale == 0 else f(f(norm) * f(f(1) / value))
    with np.errstate(over="ignore"):
        scaled = block * factor
    magnitudes = E2M1.values[:8].tolist()
    return scale, [nearest(magnitudes, abs(float(x))) | 8 * bool(np.signbit(x)) for x in scaled]


def samples(kind: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(40, 16, generator=g)
    exponents = torch.randint(-14, 16, (40, 1), generator=g)
    if kind == "bf16":
        return (x * 2.0**exponents).bfloat16().float()
    if kind == "float32":
        return x * 2.0**exponents
    midpoints = (E2M1.values[1:8] + E2M1.values[:7]) / 2
    x = midpoints[torch.randint(7, x.shape, generator=g)] * (torch.randint(2, x.shape, generator=g) * 2 - 1)
    x[:, 3] = 6.0
    return x * E4M3.values[torch.randint(1, 127, (40, 1), generator=g)]  # ties, for every significand of a scale


@pytest.mark.parametrize("norm", [1.0, 0.25, 3.7, 1 / 3, 300.0])
@pytest.mark.parametrize("kind", ["bf16", "float32", "ties"])
def test_quantizer_against_one_element_at_a_time(kind, norm):
    x = samples(kind)
    found = quantize_nvfp4_with_norm(x, norm)
    for row, block in enumerate(x.numpy()):
        scale, codes = quantize_slowly(block, norm)
        assert (int(found.scales[row]), found.codes[row].tolist()) == (scale, codes), block


def test_multiplied_by_the_reciprocal_not_divided():
    """For scales of significand 1.875 the product lands beside the tie that the quotient hits: 1.5, not 1."""
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([6.0, 1.25, 2.5, 5.0]) * 1.875
    assert decode(quantize_nvfp4_with_norm(x).codes, E2M1)[0, :4].tolist() == [6.0, 1.5, 3.0, 6.0]


def test_a_scale_is_a_product_not_a_quotient():
    """amax * float32(1/6) is a tie of E4M3 here; amax / 6 is one float below it."""
    amax = np.nextafter(np.float32(1.78125), np.float32(0))
    assert float(decode(quantize_nvfp4_with_norm(block_of(float(amax))).scales, E4M3)) == 0.3125
    assert np.float32(amax / np.float32(6)) < 0.296875


def test_a_reciprocal_of_a_scale_is_exact():
    """So that float32(1 / scale) stands for the kernel's rcp.approx."""
    scales = E4M3.values[1:127]
    assert same_bits(rcp_approx(scales), 1 / scales)


def block_of(*values: float) -> torch.Tensor:
    x = torch.zeros(1, 16)
    x[0, : len(values)] = torch.tensor(values)
    return x


@pytest.mark.parametrize(
    ("values", "norm", "scale", "codes"),
    [
        pytest.param((0.0, -0.0), 1.0, 0.0, [0, 8], id="zeros keep their signs"),
        pytest.param((6 * 2**-10, -(6 * 2**-10)), 1.0, 0.0, [0, 8], id="a scale at half of the smallest is zero"),
        pytest.param((7 * 2**-10, -(2**-12)), 1.0, LEAST, [6, 8], id="above it is the smallest"),
        pytest.param((7 * 2**-10,), 0.5, 0.0, [0], id="the norm constant moves that"),
        pytest.param((-0.1, 6.0), 1.0, 1.0, [8, 7], id="a small negative value becomes -0"),
        pytest.param((2688.0, -2688.0, 1344.0), 1.0, 448.0, [7, 15, 5], id="the largest block"),
        pytest.param((26880.0, 2688.0, -224.0), 1.0, 448.0, [7, 7, 9], id="beyond it saturates"),
        pytest.param((2688.0, 224.0), 2.0, 448.0, [7, 2], id="sooner under a norm constant"),
        pytest.param((INF, -INF, 448.0), 1.0, 448.0, [7, 15, 2], id="infinity saturates"),
        pytest.param((NAN, 6.0, -3.0), 1.0, 1.0, [7, 7, 13], id="NaN becomes +6, unseen by amax"),
        pytest.param((NAN, 2**-11, -(2**-11)), 1.0, 0.0, [7, 0, 8], id="also under a zero scale"),
    ],
)
def test_quantizer_at_its_ends(values, norm, scale, codes):
    found = quantize_nvfp4_with_norm(block_of(*values), norm)
    assert float(decode(found.scales, E4M3)) == scale
    assert found.codes[0, : len(codes)].tolist() == codes


def test_a_block_of_nan():
    """Staging starts its amax from 0 and sees nothing; requantization starts from the first element."""
    x = torch.full((1, 16), NAN)
    for nan_scale, code in ((False, 0), (True, 0x7F)):
        found = quantize_nvfp4_with_norm(x, nan_scale=nan_scale)
        assert found.scales.tolist() == [[code]]
        assert found.codes.unique().tolist() == [7]
    assert (EARLY.stage.nan_scale, EARLY.requantize.nan_scale) == (False, True)


def test_norm_constant_of_each_row():
    x = samples("float32")
    norm = torch.linspace(0.1, 9.0, len(x))[:, None]
    found = quantize_nvfp4_with_norm(x, norm)
    for row in range(len(x)):
        alone = quantize_nvfp4_with_norm(x[row : row + 1], float(norm[row]))
        assert torch.equal(found.codes[row], alone.codes[0])
        assert torch.equal(found.scales[row], alone.scales[0])


def test_vectors_of_flashinfer():
    """What FlashInfer 0.7.4's `nvfp4_quantize_per_block_16` gives for a norm constant of 0.7, on the CPU."""
    x = torch.tensor(
        [[0.11, -0.52, 1.97, 3.3, -6.61, 0.04, 12.5, -0.86, 5.19, 2.34, -9.7, 7.7, 0.001, -1.3, 4.4, -2.9]]
    )
    found = quantize_nvfp4_with_norm(torch.cat((x, x * 0.0071), 1), 0.7)
    assert pack_e2m1(found.codes)[0].tolist() == FLASHINFER_CODES
    assert found.scales[0].tolist() == FLASHINFER_SCALES


FLASHINFER_CODES = [128, 50, 13, 151, 36, 110, 144, 180, 144, 50, 13, 151, 37, 110, 144, 180]
FLASHINFER_SCALES = [60, 5]


# --- the layer -----------------------------------------------------------------------------------------------------

E, H, I, T, TOP_K = 4, 128, 64, 9, 3  # noqa: E741


def layer(seed: int = 0, dense: bool = False, ranks: int = 1) -> tuple[MoEWeights, list[MoEInputs]]:
    """Random codes and scales, alphas and norm constants that are no powers of two; a few slots masked."""
    g = torch.Generator().manual_seed(seed)
    legs = (2 * I, H), (H, I)
    if dense:
        parts = [torch.randn(E, n, k, generator=g).mul(0.2).bfloat16() for n, k in legs]
    else:
        parts = [pack_e2m1(torch.randint(16, (E, n, k), generator=g).to(torch.uint8)) for n, k in legs]
        parts += [torch.randint(32, 50, (E, n, k // 16), generator=g).to(torch.uint8) for n, k in legs]
    constants = {
        "w13_global_scale": torch.rand(E, generator=g) + 0.3,
        "w2_global_scale": torch.rand(E, generator=g) + 0.3,
        "fc1_norm_const": torch.rand(E, generator=g) * 3 + 0.5,
    }
    x = torch.randn(T, H, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(E, generator=g)[:TOP_K] for _ in range(T)])
    ids[2, 1], ids[5] = -1, -1
    rows = torch.rand(T, TOP_K, generator=g)
    split = [T * r // ranks for r in range(ranks + 1)]
    inputs = [MoEInputs(x[a:b], ids[a:b], rows[a:b]) for a, b in pairwise(split)]
    return MoEWeights(*parts, **constants), inputs


def dequantized(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """code * scale, float64."""
    return (values.double().unflatten(-1, (-1, 16)) * scales.double()[..., None]).flatten(-2)


def dequantized_weight(weights: MoEWeights, leg: str, expert: int) -> torch.Tensor:
    payload, scale = getattr(weights, leg)[expert], getattr(weights, f"{leg}_scale")
    if scale is None:
        quantized = quantize_nvfp4_with_norm(payload)
        return dequantized(E2M1.values[quantized.codes.int()], E4M3.values[quantized.scales.int()])
    low_first = torch.stack((payload & 15, payload >> 4), -1).flatten(-2)
    return dequantized(E2M1.values[low_first.int()], E4M3.values[scale[expert].int()])


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("scheme", [EARLY, LATE, replace(EARLY, gate_up_clamp=0.8, input_norm_const=2.3)], ids=str)
def test_row_15_every_stage_against_the_formula_in_double_precision(scheme, dense):
    """Each stage from the stage before it, so that no rounding decision can hide: staging and requantization in bits,
    fc1 and fc2 within K/64 truncations, the activation within a few roundings, combine in bits."""
    weights, (inputs,) = layer(dense=dense)
    _, trace = moe_forward(scheme, weights, inputs)
    staged, rows = trace["stage"].tensors, trace["dispatch"].tensors
    wanted = quantize_nvfp4_with_norm(inputs.hidden_states.float(), scheme.input_norm_const)
    assert torch.equal(staged["values"].float(), E2M1.values[wanted.codes.int()])
    assert torch.equal(staged["scales"].view(torch.uint8), wanted.scales)
    assert staged["values"].dtype is staged["scales"].dtype is torch.float8_e4m3fn

    fc1, activated, requantized = (trace[n].tensors for n in ("fc1", "activation", "requantize"))
    fc2, combined = trace["fc2"].tensors["values"], trace["combine"].tensors
    for row, expert in enumerate(rows["expert"].tolist()):
        alphas = [float(getattr(weights, f"{leg}_global_scale")[expert]) for leg in ("w13", "w2")]
        x = dequantized(rows["values"][row], rows["scales"][row])
        w = dequantized_weight(weights, "w13", expert)
        exact, size = alphas[0] * (w @ x), alphas[0] * (w.abs() @ x.abs())
        found = torch.cat((fc1["gate"][row], fc1["up"][row])).double()
        # An instruction truncates to 24 bits, once for each 64 of K; alpha rounds once.
        assert bool(((found - exact).abs() <= (H // 64) * 2.0**-23 * size + 2.0**-24 * exact.abs()).all())

        gate, up = fc1["gate"][row].double(), fc1["up"][row].double()
        if scheme.gate_up_clamp is not None:
            assert bool((gate > scheme.gate_up_clamp).any())  # alpha has multiplied before the clamp sees it
            gate, up = gate.clamp(max=scheme.gate_up_clamp), up.clamp(-scheme.gate_up_clamp, scheme.gate_up_clamp)
        weight = 1.0 if scheme.combine is LATE.combine else float(rows["topk_weights"][row])
        exact = gate * torch.sigmoid(gate) * up * weight
        assert bool(
            ((activated["values"][row].double() - exact).abs() <= (10 + 2 * gate.abs()) * 2.0**-24 * exact.abs()).all()
        )

        norm = float(weights.fc1_norm_const[expert])
        wanted = quantize_nvfp4_with_norm(activated["values"][row], norm)
        assert torch.equal(requantized["values"][row].float(), E2M1.values[wanted.codes.int()])
        assert torch.equal(requantized["scales"][row].view(torch.uint8), wanted.scales)

        h = dequantized(requantized["values"][row], requantized["scales"][row])
        w = dequantized_weight(weights, "w2", expert)
        exact, size = alphas[1] * (w @ h), alphas[1] * (w.abs() @ h.abs())
        error = (I // 64) * 2.0**-23 * size + (2.0**-8 + 2.0**-24) * exact.abs()
        assert bool(((fc2[row].double() - exact).abs() <= error).all())

    total = torch.zeros(T, H)
    for slot in range(TOP_K):
        term, weight = combined["terms"][:, slot].float(), inputs.topk_weights[:, slot, None]
        if scheme.combine is LATE.combine:  # 8 + 24 bits beside a float32 of like size: exact in float64
            added = (term.double() * weight.double() + total.double()).float()
        else:
            added = total + term
        total = torch.where(inputs.topk_ids[:, slot, None] >= 0, added, total)
    assert same_bits(combined["values"], total.bfloat16())
    assert bool((combined["values"][5] == 0).all())


def test_exactly_representable_data_bit_for_bit():
    """Small whole numbers of which each row has few: nothing is rounded but the activation, so the formula is exact."""
    g = torch.Generator().manual_seed(1)
    ones = torch.full((E, 2 * I, H // 16), 56, dtype=torch.uint8), torch.full((E, H, I // 16), 56, dtype=torch.uint8)
    codes = [torch.tensor([0, 2, 10, 4])[torch.randint(4, (E, n, k), generator=g)] for n, k in ((2 * I, H), (H, I))]
    codes[0][:, :I] = 0
    codes[0][:, :I, 0] = 5  # every gate is 3 * 6 * 8 = 144: its sigmoid is exactly 1
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])[torch.randint(5, (T, H), generator=g)].bfloat16() * 8
    x[:, ::16] = 6.0 * 8
    alphas = torch.tensor([1.0, 0.5, 2.0, 0.25])
    weights = MoEWeights(*(pack_e2m1(c.to(torch.uint8)) for c in codes), *ones, torch.ones(E) / 8, alphas / 8)
    ids = torch.stack([torch.randperm(E, generator=g)[:1] for _ in range(T)])
    inputs = MoEInputs(x, ids, torch.full((T, 1), 0.5))
    for scheme in (EARLY, LATE):
        out, trace = moe_forward(scheme, weights, inputs)
        requantized = trace["requantize"].tensors
        for row, (expert, token) in enumerate(
            zip(*(trace["dispatch"].tensors[n].tolist() for n in ("expert", "token")), strict=True)
        ):
            fc1 = (E2M1.values[codes[0][expert]].double() @ x[token].double()) / 8
            assert torch.equal(
                torch.cat((trace["fc1"].tensors["gate"][row], trace["fc1"].tensors["up"][row])).double(), fc1
            )
            h = fc1[:I] * fc1[I:] * (0.5 if scheme is EARLY else 1.0)
            assert torch.equal(trace["activation"].tensors["values"][row].double(), h)
            h = dequantized(requantized["values"][row], requantized["scales"][row])
            y = (E2M1.values[codes[1][expert]].double() @ h * float(alphas[expert]) / 8).bfloat16()
            assert torch.equal(out[token], y if scheme is EARLY else (y.float() * 0.5).bfloat16())


def test_row_15_early_and_late_weights_differ():
    """Before fc2 a weight moves requantization's codes, after it nothing is rounded but the sum."""
    weights, (inputs,) = layer()
    (early, a), (late, b) = (moe_forward(scheme, weights, inputs) for scheme in (EARLY, LATE))
    assert same_bits(a["fc1"].tensors["gate"], b["fc1"].tensors["gate"])
    assert not torch.equal(a["activation"].tensors["values"], b["activation"].tensors["values"])
    assert float((early.float() - late.float()).abs().max()) > 0.01 * float(early.float().abs().max())
    ones = replace(inputs, topk_weights=torch.ones(T, TOP_K))
    outputs = [moe_forward(scheme, weights, ones)[0] for scheme in (EARLY, LATE)]
    assert same_bits(*outputs)


def test_late_weights_round_once():
    """fma(y, w, sum): the product has bits that float32 cannot hold, and they are what is left of the sum."""
    weights, (inputs,) = layer()
    slots = torch.tensor([[0, 0]]), torch.tensor([[-1.0, 1 + 2.0**-23]])
    out, trace = moe_forward(LATE, weights, MoEInputs(inputs.hidden_states[:1], *slots))
    y = trace["combine"].tensors["terms"][0, 0].double()
    assert same_bits(out[0], (y * 2.0**-23).bfloat16())
    assert not torch.equal(out[0], ((y * (1 + 2.0**-23)).float() - y.float()).bfloat16())


def test_row_23_alphas_multiply_before_the_clamp():
    """The same accumulator, at the limit or not, by alpha."""
    weights, (inputs,) = layer()
    scheme = replace(EARLY, gate_up_clamp=0.5)
    small = replace(weights, w13_global_scale=torch.full((E,), 2.0**-20))
    _, clamped = moe_forward(scheme, weights, inputs)
    _, free = moe_forward(scheme, small, inputs)
    limit = swiglu(torch.full((1, 1), 0.5), torch.full((1, 1), 0.5), None, None)
    weight = clamped["dispatch"].tensors["topk_weights"][:, None]
    assert bool((clamped["activation"].tensors["values"] == limit * weight).any())
    assert float(free["activation"].tensors["values"].abs().max()) < 1e-3 * float(limit)


def test_a_clamp_swallows_nan():
    """PTX min.f32 and min.xorsign.abs.f32 give the number; without a clamp NaN goes on."""
    gate = torch.tensor([[NAN, 1.0, NAN, -INF, 3.0]])
    up = torch.tensor([[1.0, NAN, NAN, 2.0, -INF]])
    found = swiglu(gate, up, 2.0, None, nan_clamps=True)
    assert same_bits(
        found,
        swiglu(torch.tensor([[2.0, 1.0, 2.0, -INF, 2.0]]), torch.tensor([[1.0, 2.0, 2.0, 2.0, -2.0]]), None, None),
    )
    assert bool(swiglu(gate, up, None, None, nan_clamps=True)[0, :3].isnan().all())
    assert bool(swiglu(gate, up, 2.0, None)[0, :3].isnan().all())


def test_a_token_of_nan():
    """Staging gives it zeros, so its routes are zero; one NaN in a block becomes that block's largest value."""
    weights, (inputs,) = layer()
    x = inputs.hidden_states.clone()
    x[0], x[1, 7] = NAN, NAN
    out, trace = moe_forward(EARLY, weights, replace(inputs, hidden_states=x))
    assert bool((out[0] == 0).all())
    assert bool(torch.isfinite(out.float()).all())
    assert float(trace["stage"].tensors["values"][1, 7]) == 6.0
    plain, _ = moe_forward(EARLY, weights, inputs)
    assert same_bits(out[2:], plain[2:])


@pytest.mark.parametrize("scheme", [EARLY, LATE], ids=str)
@pytest.mark.parametrize("dense", [False, True])
def test_ranks_do_not_matter(scheme, dense):
    weights, (whole,) = layer(seed=3, dense=dense)
    expected, _ = moe_forward(scheme, weights, whole)
    for ranks in (2, 4):
        outputs, trace = moe_forward(scheme, weights, layer(seed=3, dense=dense, ranks=ranks)[1])
        assert same_bits(torch.cat(outputs), expected)
        assert trace["requantize", ranks - 1].tensors["scales"].dtype is torch.float8_e4m3fn


def test_a_rank_by_itself():
    """Rank 1 of 2, its tokens all for its own experts: it holds their weights and constants alone."""
    weights, (inputs,) = layer()
    own = replace(inputs, topk_ids=torch.where(inputs.topk_ids >= 0, inputs.topk_ids % 2 + 2, -1))
    expected, _ = moe_forward(EARLY, weights, own)
    half = weights.of_experts(slice(2, 4))
    trace = moe_forward_ranks(EARLY, half, [own], ranks=[1], ep_size=2, exchange=lambda rows, _: list(rows))
    assert same_bits(trace["combine", 1].tensors["values"], expected)


def test_constants_once_for_all_experts_or_not_at_all():
    weights, (inputs,) = layer()
    names = ("w13_global_scale", "w2_global_scale", "fc1_norm_const")
    outputs = []
    for value in (torch.ones(E), torch.ones(()), torch.ones(1), None):
        outputs.append(moe_forward(EARLY, replace(weights, **dict.fromkeys(names, value)), inputs)[0])
    assert all(same_bits(outputs[0], other) for other in outputs[1:])
    assert not torch.equal(outputs[0], moe_forward(EARLY, weights, inputs)[0])


def test_row_23_norm_constants_keep_small_values():
    """At 2^-10 of the usual size a block's scale would be subnormal or zero; constants of 2^10 bring the bits back."""
    weights, (inputs,) = layer()
    plain = replace(weights, fc1_norm_const=None)
    expected, _ = moe_forward(EARLY, plain, inputs)
    tiny = replace(inputs, hidden_states=inputs.hidden_states * 2.0**-10)
    lost, _ = moe_forward(EARLY, replace(plain, w13_global_scale=weights.w13_global_scale * 2.0**10), tiny)
    assert not torch.equal(lost, expected)
    kept, _ = moe_forward(replace(EARLY, input_norm_const=2.0**10), plain, tiny)
    assert same_bits(kept, expected)


def test_what_is_claimed():
    for scheme in (EARLY, LATE, find_scheme(NAME, enable_in_kernel_fc2_reduce=True)):
        assert scheme.evidence is Evidence.MODELLED
        _, trace = moe_forward(scheme, layer()[0], layer()[1])
        claims = {stage.name: stage.exactness for stage in trace}
        assert claims["fc1"] is claims["fc2"] is Exactness.MODELLED_UNVERIFIED
        assert claims["activation"] is Exactness.TABLED
        assert {claims[n] for n in ("stage", "dispatch", "requantize", "combine")} == {Exactness.EXACT}


def test_order_of_arrival_is_one_order():
    """In the kernel's own reduction every addition rounds to bf16."""
    weights, (inputs,) = layer()
    out, trace = moe_forward(find_scheme(NAME, enable_in_kernel_fc2_reduce=True), weights, inputs)
    total = torch.zeros(T, H)
    for slot in range(TOP_K):
        added = (total + trace["combine"].tensors["terms"][:, slot].float()).bfloat16().float()
        total = torch.where(inputs.topk_ids[:, slot, None] >= 0, added, total)
    assert same_bits(out, total.bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc1_norm_const": torch.ones(E + 1)}, "fc1_norm_const must be float32, a scalar or [4], got float32 [5]"),
        ({"fc1_norm_const": torch.ones(E).double()}, "fc1_norm_const must be float32"),
        ({"fc1_norm_const": torch.tensor([1.0, 0.0, NAN, 1.0])}, "fc1_norm_const must be positive and finite"),
        ({"w2_global_scale": -torch.ones(E)}, "w2_global_scale must be positive and finite"),
        ({"w13_scale": torch.full((E, 2 * I, H // 16), 127, dtype=torch.uint8)}, "w13_scale must be E4M3 codes"),
        ({"w2": torch.zeros(E, H, I, dtype=torch.uint8)}, "w2 must be [experts, hidden, intermediate / 2]"),
    ],
)
def test_errors(change, message):
    weights, inputs = layer()
    with pytest.raises(InputError) as raised:
        moe_forward(EARLY, replace(weights, **change), inputs)
    assert str(raised.value).startswith(message)


def test_errors_of_others():
    """Only this scheme reads norm constants; it takes no tokens that were quantized before."""
    weights, (inputs,) = layer()
    sm90 = find_scheme("sm90_bf16_bf16_bf16_pull_cutedsl")
    dense = MoEWeights(
        torch.ones(E, 128, 256).bfloat16(), torch.ones(E, 256, 64).bfloat16(), fc1_norm_const=torch.ones(E)
    )
    wide = replace(inputs, hidden_states=torch.ones(T, 256).bfloat16())
    with pytest.raises(InputError, match=r"^fc1_norm_const must be None: BF16 has no norm constant, got a tensor"):
        moe_forward(sm90, dense, wide)
    codes = inputs.hidden_states.to(torch.float8_e4m3fn)
    with pytest.raises(InputError, match=r"^hidden_states \(rank 0\) must be bfloat16"):
        moe_forward(EARLY, weights, replace(inputs, hidden_states=codes))
