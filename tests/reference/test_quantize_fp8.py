"""FP8 quantizers of activations and weights: properties, and the cases at their edges."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantizer_values import octaves, quick, random_values, rounding_bound, seeds

from fp4ep.reference.formats import E2M1, E4M3, E5M2, Overflow, decode, encode
from fp4ep.reference.quantize import (
    Quantized,
    quantize_activation,
    quantize_fp8_block_128,
    quantize_fp8_per_expert,
    quantize_mx,
    quantize_nvfp4,
)
from fp4ep.reference.scales import ScaleRule
from fp4ep.reference.scheme import ActivationQuant, Apply, ScaleSource

INF, NAN = math.inf, math.nan
F32 = np.float32
SCALE_FLOOR = F32(1e-30)


# --- activations -------------------------------------------------------------------------------------------------

PER_TOKEN = ActivationQuant(E4M3, None, ScaleSource.AMAX, Apply.DIVIDE, Overflow.SATURATE, tiny_path=True)
PER_64 = ActivationQuant(E4M3, 64, ScaleSource.AMAX, Apply.RECIPROCAL, Overflow.SATURATE, tiny_path=True)
PER_128 = ActivationQuant(E4M3, 128, ScaleSource.AMAX, Apply.DIVIDE, Overflow.NAN)
PER_128_E5M2 = ActivationQuant(E5M2, 128, ScaleSource.AMAX, Apply.DIVIDE, Overflow.INF)
PER_64_E5M2 = ActivationQuant(E5M2, 64, ScaleSource.AMAX, Apply.RECIPROCAL, Overflow.SATURATE)
STATIC = ActivationQuant(E4M3, None, ScaleSource.STATIC, Apply.RECIPROCAL, Overflow.NAN)
AMAX_RULES = {
    "per token": PER_TOKEN,
    "per 64": PER_64,
    "per 128": PER_128,
    "per 128 E5M2": PER_128_E5M2,
    "per 64 E5M2": PER_64_E5M2,
}
each_amax_rule = pytest.mark.parametrize("rule", AMAX_RULES.values(), ids=AMAX_RULES)

#: The tiny path begins below this float32.
TINY = F32(4.48e-28)


@each_amax_rule
def test_activation_element_by_element(rule):
    values = random_values(11, 6, 256, octaves=20)
    quantized = quantize_activation(values, rule)
    block = rule.block or 256
    assert quantized.scales.shape == (6, 256 // block)
    assert quantized.scales.dtype == torch.float32
    array, reciprocal = values.numpy(), F32(1) / F32(rule.element.max)
    for row in range(6):
        for index in range(256 // block):
            part = slice(block * index, block * index + block)
            scale = max(F32(np.abs(array[row, part]).max() * reciprocal), SCALE_FLOOR)
            assert F32(quantized.scales[row, index]) == scale
            divide = rule.apply is Apply.DIVIDE
            applied = array[row, part] / scale if divide else array[row, part] * F32(F32(1) / scale)
            expected = encode(torch.from_numpy(applied), rule.element, rule.overflow)
            assert torch.equal(quantized.codes[row, part], expected)


@each_amax_rule
@quick
@given(seeds, octaves, st.integers(-110, 60))
def test_activation_properties(rule, seed, octaves, exponent):
    values = random_values(seed, 3, 128, octaves=octaves, exponent=exponent)
    quantized = quantize_activation(values, rule)
    negated = quantize_activation(-values, rule)
    assert torch.equal(negated.codes, quantized.codes ^ 0x80)
    assert torch.equal(negated.scales, quantized.scales)

    # Idempotence under the same scales.
    scales = quantized.scales.repeat_interleave(rule.block or 128, -1)
    numbers = decode(quantized.codes, rule.element)
    assert torch.equal(encode(numbers * scales / scales, rule.element), quantized.codes)

    # Error, in units of the scale. Besides the element's rounding: the scale is what it is, and its application rounds
    # once (division) or twice (reciprocal and product), 2^-24 each. So a scaled amax exceeds max by less than 2^-22 of
    # it and never overflows.
    assert bool(numbers.isfinite().all())
    scaled = values.double() / scales.double()
    slack = scaled.abs() * 2.0**-22
    assert bool(((numbers.double() - scaled).abs() <= rounding_bound(scaled.abs() + slack, rule.element) + slack).all())


def test_activation_static():
    values = torch.tensor([[1.0, -0.0, 600.0, -600.0, 232.0, 233.0, INF, NAN, 1.0625 * 0.5 + 2.0**-13]])
    quantized = quantize_activation(values, STATIC, static_scale=0.5)
    assert quantized.scales.tolist() == [[0.5]]
    # 232 / 0.5 is the tie 464, 448 by the even code; 466 is beyond.
    assert quantized.codes.tolist() == [[0x40, 0x80, 0x7F, 0xFF, 0x7E, 0x7F, 0x7F, 0x7F, 0x39]]
    saturating = ActivationQuant(E4M3, None, ScaleSource.STATIC, Apply.RECIPROCAL, Overflow.SATURATE)
    assert quantize_activation(values, saturating, 0.5).codes.tolist() == [
        [0x40, 0x80, 0x7E, 0xFE, 0x7E, 0x7E, 0x7E, 0x7F, 0x39]
    ]


def test_the_tiny_path_is_for_scales_from_amax():
    values = torch.tensor([[1e-30, 0.0, -1.0, NAN]])
    rules = (replace(STATIC, tiny_path=tiny_path) for tiny_path in (True, False))
    with_path, without = (quantize_activation(values, rule, static_scale=0.5) for rule in rules)
    assert with_path.codes.tolist() == without.codes.tolist() == [[0, 0, 0xC0, 0x7F]]
    assert with_path.scales.tolist() == without.scales.tolist() == [[0.5]]


def test_activation_static_scale_is_float32_and_its_reciprocal_too():
    values = torch.arange(1, 129).float()[None] / 16
    scale = F32(0.3)
    quantized = quantize_activation(values, STATIC, static_scale=0.3)
    assert F32(quantized.scales) == scale
    expected = encode(torch.from_numpy(values.numpy() * F32(F32(1) / scale)), E4M3, Overflow.NAN)
    assert torch.equal(quantized.codes, expected)


def test_divide_and_reciprocal_differ_near_a_tie():
    """The quotient by float32(1/448) is 13.5 * 2^-9, a tie (14 is even); by the reciprocal it is an ulp less."""
    values = torch.zeros(1, 64)
    values[0, 0] = 1.0
    values[0, 1] = 5.8855330280493945e-05
    divide, reciprocal = (
        quantize_activation(values, ActivationQuant(E4M3, 64, ScaleSource.AMAX, apply, Overflow.SATURATE))
        for apply in (Apply.DIVIDE, Apply.RECIPROCAL)
    )
    assert torch.equal(divide.scales, reciprocal.scales)
    assert divide.codes[0, 1] == 14
    assert reciprocal.codes[0, 1] == 13


@each_amax_rule
def test_activation_zero_rows(rule):
    values = torch.zeros(2, 128)
    values[1] = -0.0
    quantized = quantize_activation(values, rule)
    assert bool((quantized.scales == float(SCALE_FLOOR)).all())
    assert set(quantized.codes[0].tolist()) == {0}
    assert set(quantized.codes[1].tolist()) == {0x80}


@each_amax_rule
def test_activation_nan_and_infinity(rule):
    values = torch.ones(3, 256)
    values[:, 7] = torch.tensor([NAN, INF, -INF])
    values[:, 8] = -1.0
    quantized = quantize_activation(values, rule)
    block = rule.block or 256
    number = decode(quantized.codes, rule.element)

    assert quantized.scales[0, 0].isnan()
    assert bool(number[0, :block].isnan().all())
    for row in (1, 2):
        assert quantized.scales[row, 0] == INF
        assert quantized.codes[row, :9].tolist() == [0] * 7 + [quantized.codes[row, 7].item(), 0x80]
        assert number[row, 7].isnan()
    if rule.block:  # the blocks beside it are untouched
        assert bool(quantized.scales[:, 1:].isfinite().all())
        assert bool(number[:, block:].isfinite().all())


def tiny_pair(amax) -> tuple[F32, F32]:
    """Factor and scale of the tiny path: 448 / max(amax, about 448 / FLT_MAX), and its reciprocal."""
    factor = F32(448) / max(F32(amax), F32(1.3165537626040637e-36))
    return factor, F32(1) / factor


@pytest.mark.parametrize("rule", [PER_TOKEN, PER_64], ids=["per token", "per 64"])
@pytest.mark.parametrize(
    "amax",
    [
        2.0**-92,
        2.0**-100,
        6.220427520688419e-32,  # 448 * (1 / amax), two roundings, would be an ulp off
        7e-32,
        2.0**-119,
        1.3165537626040637e-36,
        6.3e-38,
        2.0**-126,
        2.0**-130,
        1e-44,
        2.0**-149,
    ],
)
def test_tiny_path(rule, amax):
    values = F32(amax) * np.linspace(-1, 1, 64, dtype=F32)
    values[3], values[4], values[5] = 0.0, -0.0, F32(amax)
    factor, scale = tiny_pair(amax)
    assert np.isfinite(factor)
    quantized = quantize_activation(torch.from_numpy(values)[None], rule)
    assert F32(quantized.scales) == scale
    assert torch.equal(quantized.codes[0], encode(torch.from_numpy(values * factor), E4M3))
    assert quantized.codes[0, 3:5].tolist() == [0, 0x80]
    assert bool(decode(quantized.codes, E4M3).isfinite().all())
    if amax >= 1.3165537626040637e-36:
        assert quantized.codes[0, 5] == E4M3.max_code  # the row keeps its digits: amax is at the top


@pytest.mark.parametrize("rule", [PER_TOKEN, PER_64], ids=["per token", "per 64"])
def test_tiny_path_divides_once(rule):
    """The second value times 448 / amax is 25 in float32: a tie, 24 by the even code.

    With 448 * (1 / amax) it would be an ulp more, which is 26, code 93.
    """
    values = torch.zeros(1, 64)
    values[0, :2] = torch.tensor([6.220427520688419e-32, 3.471220858982799e-33])
    quantized = quantize_activation(values, rule)
    assert quantized.codes[0].tolist() == [126, 92] + [0] * 62
    assert quantized.scales.tolist() == [[float.fromhex("0x1.711f9ep-113")]]


@pytest.mark.parametrize("rule", [PER_TOKEN, PER_64], ids=["per token", "per 64"])
def test_tiny_path_begins_below_448_times_the_floor(rule):
    values = torch.full((2, 64), float(TINY))
    values[1] = torch.from_numpy(np.nextafter(np.full(64, TINY), F32(0)))
    quantized = quantize_activation(values, rule)
    at, below = (F32(s) for s in quantized.scales.flatten())
    assert at == max(F32(TINY * F32(1 / 448)), SCALE_FLOOR)
    assert below == tiny_pair(values[1, 0])[1]
    assert set(quantized.codes.flatten().tolist()) == {E4M3.max_code}


def test_without_the_tiny_path_small_rows_lose_their_digits():
    values = torch.full((1, 128), 1e-32)
    quantized = quantize_activation(values, PER_128)
    assert F32(quantized.scales) == SCALE_FLOOR
    assert decode(quantized.codes, E4M3).unique().tolist() == [0.009765625]  # 0.01 to a multiple of 2^-9


def test_activation_needs_whole_blocks():
    with pytest.raises(ValueError, match="multiple of the block 64, got 96"):
        quantize_activation(torch.ones(1, 96), PER_64)
    with pytest.raises(ValueError, match="multiple of the block 32"):
        quantize_mx(torch.ones(1, 48), E2M1, ScaleRule.FLOOR)
    with pytest.raises(ValueError, match="multiple of the block 16"):
        quantize_nvfp4(torch.ones(1, 24))


# --- FP8 weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
def test_fp8_per_expert(element):
    weight = random_values(5, 24, 32, octaves=8)
    quantized = quantize_fp8_per_expert(weight, element)
    scale = F32(weight.abs().max().numpy() * (F32(1) / F32(element.max)))
    assert quantized.scales.shape == (1, 1)
    assert F32(quantized.scales) == scale
    assert torch.equal(quantized.codes, encode(torch.from_numpy(weight.numpy() / scale), element))
    zero = quantize_fp8_per_expert(torch.zeros(8, 32), element)
    assert F32(zero.scales) == F32(1e-12)
    assert not zero.codes.any()


def fp8_block_128_by_hand(weight: np.ndarray, element, parts: int) -> Quantized:
    """Put the rows in the kernel's order, quantize 128 x 128 blocks, put them back."""
    rows, columns = weight.shape
    if parts == 2:  # gate rows 0-7, up rows 0-7, gate rows 8-15, ...
        half = rows // 2
        order = [start + 8 * group + r for group in range(half // 8) for start in (0, half) for r in range(8)]
    else:
        order = list(range(rows))
    codes = np.zeros((rows, columns), np.uint8)
    scales = np.zeros((rows // 128, columns // 128), np.float32)
    for i in range(rows // 128):
        members = order[128 * i : 128 * i + 128]
        for j in range(columns // 128):
            block = weight[members, 128 * j : 128 * j + 128]
            scales[i, j] = max(F32(np.abs(block).max() * (F32(1) / F32(element.max))), SCALE_FLOOR)
            codes[members, 128 * j : 128 * j + 128] = encode(torch.from_numpy(block / scales[i, j]), element).numpy()
    return Quantized(torch.from_numpy(codes), torch.from_numpy(scales))


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_fp8_block_128(element, parts):
    weight = random_values(6, 512, 256, octaves=10)
    weight *= 2.0 ** (torch.arange(512) % 7)[:, None]  # rows of a block differ
    weight[256:] *= 8.0  # up above gate
    quantized = quantize_fp8_block_128(weight, element, parts)
    expected = fp8_block_128_by_hand(weight.numpy(), element, parts)
    assert quantized.scales.shape == (4, 2)
    assert torch.equal(quantized.scales, expected.scales)
    assert torch.equal(quantized.codes, expected.codes)


def test_fp8_block_128_pairs_gate_with_up():
    weight = torch.zeros(256, 128)  # 128 gate rows, 128 up rows: two blocks of 64 + 64
    weight[0, 0] = 448.0  # gate 0
    weight[128 + 64, 0] = 896.0  # up 64
    assert quantize_fp8_block_128(weight, E4M3, parts=2).scales.tolist() == [[1.0], [2.0]]
    assert quantize_fp8_block_128(weight, E4M3, parts=1).scales.tolist() == [[1.0], [2.0]]
    weight[128, 5] = 1792.0  # up 0, beside gate 0
    assert quantize_fp8_block_128(weight, E4M3, parts=2).scales.tolist() == [[4.0], [2.0]]
    assert quantize_fp8_block_128(weight, E4M3, parts=1).scales.tolist() == [[1.0], [4.0]]


def test_fp8_block_128_zero_block():
    quantized = quantize_fp8_block_128(torch.zeros(128, 128), E4M3, parts=1)
    assert F32(quantized.scales) == SCALE_FLOOR
    assert not quantized.codes.any()
