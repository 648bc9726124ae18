"""NVFP4, MXFP4 and MXFP8 quantizers: properties, and the cases at their edges."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantizer_values import half_step, octaves, quick, random_values, rounding_bound, seeds

from fp4ep.reference.formats import E2M1, E4M3, E5M2, UE8M0, decode, encode
from fp4ep.reference.quantize import (
    blocks,
    dequantize_mx,
    dequantize_nvfp4,
    quantize_mx,
    quantize_nvfp4,
)
from fp4ep.reference.scales import ScaleRule

ELEMENTS = [E2M1, E4M3, E5M2]
INF, NAN = math.inf, math.nan
F32 = np.float32
SCALE_FLOOR = F32(1e-30)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# --- MXFP4, MXFP8 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@quick
@given(seeds, octaves, st.integers(-140, 110))
def test_mx_properties(element, rule, seed, octaves, exponent):
    values = random_values(seed, 3, 128, octaves=octaves, exponent=exponent)
    quantized = quantize_mx(values, element, rule)
    back = dequantize_mx(quantized, element)
    scales = decode(quantized.scales, UE8M0).double().repeat_interleave(32, -1)
    assert quantized.codes.shape == (3, 128)
    assert quantized.scales.shape == (3, 4)

    # Error: nothing but the element's rounding. All of this is exact in float64.
    scaled = values.double() / scales
    error = (back.double() - values.double()).abs()
    assert bool((error <= rounding_bound(scaled, element) * scales).all())

    # Idempotence: the same codes under the same scales, the same values under scales chosen anew.
    assert torch.equal(encode((back.double() / scales).float(), element), quantized.codes)
    # (ROUND_UP jumps to code 1 where amax / max leaves zero, so down there the next scale may be chosen.)
    if rule is not ScaleRule.ROUND_UP or exponent > -100:
        assert same_bits(dequantize_mx(quantize_mx(back, element, rule), element), back)

    # Sign symmetry, zeros included.
    negated = quantize_mx(-values, element, rule)
    assert torch.equal(negated.codes, quantized.codes ^ element.sign_bit)
    assert torch.equal(negated.scales, quantized.scales)

    # Blocks know nothing of each other.
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    permuted = quantize_mx(blocks(values, 32)[:, order].flatten(-2), element, rule)
    assert torch.equal(permuted.codes, blocks(quantized.codes, 32)[:, order].flatten(-2).byte())
    assert torch.equal(permuted.scales, quantized.scales[:, order])


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@quick
@given(seeds, octaves, st.integers(-40, 40))
def test_mx_power_of_two_shifts_the_scale_codes(element, rule, seed, octaves, shift):
    values = random_values(seed, 2, 64, octaves=octaves)
    before, after = quantize_mx(values, element, rule), quantize_mx(values * 2.0**shift, element, rule)
    assert torch.equal(after.codes, before.codes)
    moves = blocks(values, 32).abs().amax(-1) > 0  # a block of zeros stays at 2^-127
    assert torch.equal(after.scales.int(), before.scales.int() + shift * moves)


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_mx_floor_clips_and_rceil_does_not(element):
    values = torch.full((1, 32), element.max * 1.125)
    clipped = dequantize_mx(quantize_mx(values, element, ScaleRule.FLOOR), element)
    assert set(clipped.flatten().tolist()) == {element.max}
    for rule in (ScaleRule.RCEIL, ScaleRule.CEIL):
        kept = dequantize_mx(quantize_mx(values, element, rule), element)
        assert bool(((kept - values).abs() <= half_step(values.double() / 2, element) * 2).all())


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_mx_nan_and_infinity_spoil_their_block_only(element, bad):
    values = torch.ones(1, 64)
    values[0, 5] = bad
    quantized = quantize_mx(values, element, ScaleRule.RCEIL)
    assert quantized.scales[0, 0] == UE8M0.nan_code
    back = dequantize_mx(quantized, element)
    assert bool(back[0, :32].isnan().all())
    assert bool((back[0, 32:] == 1).all())


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("rule", ScaleRule)
def test_mx_tiny_and_zero_blocks(element, rule):
    values = torch.zeros(4, 32)
    values[0, 0] = -0.0
    values[1, 3] = 2.0**-127
    values[2, 4] = -(2.0**-149)  # rounds away beside a scale of 2^-127
    values[3, :] = 5.7e-35  # flashinfer#2440
    quantized = quantize_mx(values, element, rule)
    # The quotient of 2^-127 is a subnormal of float32: ROUND_UP takes 2^-126.
    assert quantized.scales[:3].flatten().tolist() == [0, int(rule is ScaleRule.ROUND_UP), 0]
    assert quantized.codes[0, :2].tolist() == [element.sign_bit, 0]
    back = dequantize_mx(quantized, element)
    assert float(back[1, 3]) == 2.0**-127
    assert float(back[2, 4]) == 0.0
    assert back[2, 4].signbit()
    assert bool(back.isfinite().all())
    # At most a quarter is lost: half a step of E2M1 at 2, or 8 cut to 6.
    assert bool(((back[3] - values[3]).abs() <= values[3] / 4).all())


# --- NVFP4 -------------------------------------------------------------------------------------------------------


@quick
@given(seeds, octaves, st.integers(-60, 60))
def test_nvfp4_properties(seed, octaves, exponent):
    values = random_values(seed, 2, 3, 64, octaves=octaves, exponent=exponent)
    quantized = quantize_nvfp4(values)
    back = dequantize_nvfp4(quantized)
    assert quantized.codes.shape == (2, 3, 64)
    assert quantized.scales.shape == (2, 3, 4)
    assert quantized.global_scale.shape == (2,)

    # Error, in units of s * G. Besides the element's rounding: s * G and the quotient by it round once each, which
    # moves the value to be rounded by up to 2^-23 of itself; code * s is exact and its product with G rounds once,
    # 2^-24 of at most 6. 2^-21 of either is more than all that and its second-order terms.
    scales = decode(quantized.scales, E4M3).double().repeat_interleave(16, -1)
    divisor = scales * quantized.global_scale.double()[:, None, None]
    kept = (scales > 0) & (divisor > 1e-30)
    magnitude = torch.where(kept, values.double().abs() / divisor, 0.0)
    slack = 2.0**-21 * torch.maximum(magnitude, torch.tensor(6.0))
    bound = torch.maximum(half_step(magnitude * (1 + 2.0**-22), E2M1), magnitude - 6) + slack
    error = (back.double() - values.double()).abs()
    assert bool((error <= bound * divisor)[kept].all())

    # A normal E4M3 scale is at most 2^-4 of itself below what was asked for, and saturation cuts no more than that.
    normal = scales >= 2.0**E4M3.min_exponent
    assert bool((magnitude[normal] <= 6 * (1 + 2.0**-4) * (1 + 2.0**-21)).all())

    # Idempotence under the same scales.
    given_scales = (decode(quantized.scales, E4M3) * quantized.global_scale[:, None, None]).repeat_interleave(16, -1)
    again = encode(back / given_scales.clamp(min=1e-30), E2M1)
    assert torch.equal(again[kept], quantized.codes[kept])

    # Sign symmetry.
    negated = quantize_nvfp4(-values)
    assert torch.equal(negated.codes, quantized.codes ^ 8)
    assert torch.equal(negated.scales, quantized.scales)
    assert torch.equal(negated.global_scale, quantized.global_scale)

    # Blocks of an expert may move, the amax over them stays; experts are independent.
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    permuted = quantize_nvfp4(values.reshape(2, 12, 16)[:, order].reshape(2, 3, 64))
    assert torch.equal(permuted.codes, quantized.codes.reshape(2, 12, 16)[:, order].reshape(2, 3, 64))
    assert torch.equal(permuted.scales, quantized.scales.reshape(2, 12)[:, order].reshape(2, 3, 4))
    alone = quantize_nvfp4(values[1])
    assert torch.equal(alone.codes, quantized.codes[1])


@quick
@given(seeds, st.integers(-30, 30))
def test_nvfp4_power_of_two_shifts_the_global_scale(seed, shift):
    values = random_values(seed, 4, 64)
    before, after = quantize_nvfp4(values), quantize_nvfp4(values * 2.0**shift)
    assert torch.equal(after.codes, before.codes)
    assert torch.equal(after.scales, before.scales)
    assert torch.equal(after.global_scale, before.global_scale * 2.0**shift)


def test_nvfp4_arithmetic_element_by_element():
    """The three lines of the docstring with numpy scalars."""
    values = random_values(3, 5, 64, octaves=10)
    quantized = quantize_nvfp4(values)
    array = values.numpy()
    global_scale = max(F32(np.abs(array).max() * F32(1 / 2688)), SCALE_FLOOR)
    assert F32(quantized.global_scale) == global_scale
    for row in range(5):
        for block in range(4):
            part = array[row, 16 * block : 16 * block + 16]
            wanted = min(F32(np.abs(part).max() / F32(F32(6) * global_scale)), F32(448))
            scale = encode(torch.tensor(wanted), E4M3)
            assert quantized.scales[row, block] == scale
            divisor = max(F32(decode(scale, E4M3).numpy() * global_scale), SCALE_FLOOR)
            codes = encode(torch.from_numpy(part / divisor), E2M1)
            assert torch.equal(quantized.codes[row, 16 * block : 16 * block + 16], codes)


def test_nvfp4_given_global_scale():
    values = torch.zeros(1, 32)
    values[0, :4] = torch.tensor([4000.0, -1.0, 0.0, -0.0])  # kekzl/imp#1544: clips without a global scale
    values[0, 16] = 3.0
    quantized = quantize_nvfp4(values, torch.tensor(1.0))
    assert decode(quantized.scales, E4M3).tolist() == [[448.0, 0.5]]
    assert dequantize_nvfp4(quantized)[0, [0, 1, 2, 16]].tolist() == [2688.0, 0.0, 0.0, 3.0]
    assert quantized.codes[0, :4].tolist() == [7, 8, 0, 8]


def test_nvfp4_block_scale_is_one_division_by_six_times_the_global_scale():
    """At a tie of the scale: dividing by 6 and then by 0.3 would give code 16."""
    values = torch.zeros(1, 16)
    values[0, 0] = 0.05449218675494194
    assert int(quantize_nvfp4(values, torch.tensor(0.3)).scales) == 15


def test_nvfp4_a_scale_that_rounds_to_zero_saturates_its_block():
    values = torch.zeros(1, 32)
    values[0, 0] = 2688.0
    values[0, 16:20] = torch.tensor([0.005, -0.005, 0.0, -0.0])  # 0.005 / 6 < 2^-10, half the smallest scale
    quantized = quantize_nvfp4(values, torch.tensor(1.0))
    assert decode(quantized.scales, E4M3).tolist() == [[448.0, 0.0]]
    assert quantized.codes[0, 16:20].tolist() == [7, 15, 0, 8]
    assert bool((dequantize_nvfp4(quantized)[0, 16:] == 0).all())


def test_nvfp4_zero_expert_and_nan():
    zero = quantize_nvfp4(torch.tensor([[0.0, -0.0] * 8]))
    assert F32(zero.global_scale) == SCALE_FLOOR
    assert zero.scales.tolist() == [[0]]
    assert zero.codes.tolist() == [[0, 8] * 8]
    values = torch.ones(2, 1, 16)
    values[0, 0, 3] = NAN
    quantized = quantize_nvfp4(values)
    assert quantized.scales[0, 0, 0] == E4M3.nan_code
    assert quantized.scales[1, 0, 0] == 0x7E  # 448: the other expert is untouched
