"""Numeric bugs from the public issue trackers of the field: the right value from this code, the wrong one imitated.

Numbers count the cases of one survey, whose other groups concern other layers: rounding to E2M1 (1 to 14), block and
global scales (16 to 31), E8M0 scales (32 to 44). Cases without a test, and why:

    4   a test reference kept half-away rounding: no numbers of its own; 3 holds the rule against ml_dtypes
    11  a fast-math switch was ignored: no input given; the arithmetic is a field of the scheme here (see 14)
    12  four-over-six scale selection: not part of any scheme here
    24  another kernel with the cause and the input of 23
    43  packed scales in a dispatch buffer: layout of a communication library
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from fp4ep.reference.activation import swiglu
from fp4ep.reference.formats import E2M1, E4M3, E5M2, UE8M0, Overflow, decode, encode, pack_e2m1, round_to
from fp4ep.reference.fp32 import floor_log2
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.quantize import (
    Quantized,
    dequantize_mx,
    dequantize_nvfp4,
    quantize_activation,
    quantize_mx,
    quantize_nvfp4,
)
from fp4ep.reference.scales import ScaleRule, ue8m0_scale
from fp4ep.reference.scheme import ActivationQuant, Apply, ScaleSource
from fp4ep.reference.schemes import find_scheme
from fp4ep.reference.types import MoEInputs, MoEWeights
from fp4ep.reference.validate import InputError
from fp4ep.reference.weights import nvfp4_operand

ONE = torch.tensor(1.0)
TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
PER_BLOCK = ActivationQuant(E4M3, 64, ScaleSource.AMAX, Apply.RECIPROCAL, Overflow.SATURATE)


def half_away(values: torch.Tensor) -> torch.Tensor:
    """The bug of 1 to 3: `>=` at every boundary."""
    return GRID[torch.bucketize(values.abs(), TIES, right=True)].copysign(values)


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def row(*values: float, length: int = 16) -> torch.Tensor:
    """`[1, length]`, filled up with zeros."""
    return torch.cat((f32(*values), torch.zeros(length - len(values))))[None]


def bits(pattern: int) -> torch.Tensor:
    return torch.tensor(pattern, dtype=torch.int32).view(torch.float32)


# --- A: rounding to E2M1 -----------------------------------------------------------------------------------------


def test_01_ties_up_in_magnitude():
    """ROCm/aiter#974: -0.625 at block scale 0.5 gave -1.5 for -1.0, and 0.25 gave 0.5 for 0."""
    values = torch.stack((f32(-0.625)[0] / 0.5, bits(0x3F000000) / 2, bits(0x3F000003) / 2))
    assert round_to(values, E2M1).tolist() == [-1.0, 0.0, 0.5]
    assert half_away(values).tolist() == [-1.5, 0.5, 0.5]


def test_02_every_copy_rounds_alike():
    """ROCm/aiter#2247: the defect of 1 survived in a second quantizer. Here all paths to E2M1 see the same ties."""
    for sign in (1, -1):
        values = row(*(sign * TIES).tolist(), 6.0, length=32)  # the 6 makes both kinds of block scale 1
        mx = quantize_mx(values, E2M1, ScaleRule.FLOOR)
        nvfp4 = quantize_nvfp4(values, ONE)
        assert decode(mx.scales, UE8M0).tolist() == [[1.0]]
        assert decode(nvfp4.scales, E4M3).tolist() == [[1.0, 0.0]]
        assert torch.equal(mx.codes, encode(values, E2M1))
        assert torch.equal(nvfp4.codes, mx.codes)


def test_03_half_away_called_even():
    """ROCm/aiter#3992: a function named "even" rounded all seven ties away from zero."""
    assert round_to(TIES, E2M1).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert half_away(TIES).tolist() == [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    oracle = TIES.numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert round_to(TIES, E2M1).tolist() == oracle.tolist()


def test_06_float32_through_a_16_bit_path():
    """compressed-tensors#781: the packer read float32 by a 16-bit pattern; half of what it read was zero."""
    exact = torch.cat((GRID, -GRID[1:]))
    assert torch.equal(encode(exact, E2M1), encode(exact.bfloat16(), E2M1))
    assert round_to(exact, E2M1).tolist() == exact.tolist()
    misread = exact.view(torch.bfloat16)[: len(exact)]
    assert round_to(misread, E2M1).tolist() != exact.tolist()
    assert not bool(misread[::2].any())


def test_07_argmin_over_the_table():
    """flashinfer#4601: the nearest entry by argmin is the first at a tie, so the smaller; and -0 lost its sign."""
    values = f32(0.75, 1.75, 3.5)
    assert round_to(values, E2M1).tolist() == [1.0, 2.0, 4.0]
    assert GRID[(values[:, None] - GRID).abs().argmin(1)].tolist() == [0.5, 1.5, 3.0]
    assert encode(f32(-0.0), E2M1).tolist() == [0x8]


def test_08_codes_round_trip():
    """tt-metal#51971: an encoder did not return 2 of the 16 codes, and gave 0 for 0.25000006."""
    for fmt in (E2M1, E4M3, E5M2):
        codes = torch.arange(1 << fmt.bits, dtype=torch.uint8)
        finite = codes[decode(codes, fmt).isfinite()]
        assert torch.equal(encode(decode(finite, fmt), fmt), finite)
    assert round_to(f32(0.25000006), E2M1).tolist() == [0.5]


def test_09_reciprocal_instead_of_division():
    """arch-com#905: x * (1 / s) is not x / s. They differ only near ties, which random vectors do not hit."""
    scale, x = 0.013671875, 0.02392577938735485
    quantized = quantize_nvfp4(row(x, 6 * scale), ONE)
    assert quantized.scales.tolist() == [[0x07]]
    assert decode(quantized.codes, E2M1)[0, 0] == 1.5
    assert round_to(f32(x) * (1 / f32(scale)), E2M1).tolist() == [2.0]


def test_13_double_rounding_through_bf16():
    """flashinfer#5128: float32 to E4M3 went through bf16."""
    value = f32(1.0625 + 2.0**-12)
    assert round_to(value, E4M3).tolist() == [1.125]
    assert round_to(value.bfloat16(), E4M3).tolist() == [1.0]


def test_14_two_backends_one_reciprocal():
    """meta-pytorch/MSLK#224: division in one backend, multiplication by the reciprocal in the other."""
    values = row(0.010176149196922779, 2.515263080596924, length=64)
    codes = {apply: quantize_activation(values, replace(PER_BLOCK, apply=apply)).codes[0, 0] for apply in Apply}
    assert codes[Apply.DIVIDE] - codes[Apply.RECIPROCAL] == 1


# --- B: block scale and global scale -----------------------------------------------------------------------------


def test_16_overflow_is_a_choice():
    """pytorch/ao#1912, ml_dtypes#260: casts to E4M3 saturate in one library and give NaN in another; NaN stays NaN."""
    values = f32(448, 464, 465, 480, 1000, -1000, torch.inf, torch.nan)
    saturating, cast = (encode(values, E4M3, overflow).tolist() for overflow in (Overflow.SATURATE, Overflow.NAN))
    assert saturating == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0x7F]
    assert cast == [0x7E, 0x7E, 0x7F, 0x7F, 0x7F, 0xFF, 0x7F, 0x7F]
    assert bool(values.clamp(-448, 448)[-1].isnan())  # a clamp before the cast does not remove NaN


def test_17_expert_of_zeros():
    """compressed-tensors#595: 2688 / 0 is infinite, and 0 * infinity is NaN. The decode scale has a floor instead."""
    quantized = quantize_nvfp4(torch.zeros(4, 32))
    assert float(quantized.global_scale) == float(torch.tensor(1e-30))
    assert not bool(dequantize_nvfp4(quantized).any())
    assert bool((torch.zeros(1) * (2688 / torch.zeros(1))).isnan())


def test_18_missing_input_scale_of_a_rare_expert():
    """vllm#45212: a scale slot stayed 0, and only tokens routed to that expert failed. It is refused."""
    scheme = find_scheme("sm90_fp8_fp8_bf16_pull_cutedsl")
    w13, w2 = torch.zeros(4, 128, 64, dtype=torch.uint8), torch.zeros(4, 64, 64, dtype=torch.uint8)
    inputs = MoEInputs(torch.ones(1, 64, dtype=torch.bfloat16), torch.tensor([[0]]), torch.ones(1, 1))
    moe_forward(scheme, MoEWeights(w13, w2, torch.ones(4), torch.ones(4)), inputs)
    with pytest.raises(InputError, match=r"^w13_scale must be positive"):
        moe_forward(scheme, MoEWeights(w13, w2, f32(0.1, 0.1, 0.0, 0.1), torch.ones(4)), inputs)


@pytest.mark.parametrize(("amax", "factor"), [(1.0, 2688.0), (3.5, 768.0)])
def test_19_global_scale_left_out(amax, factor):
    """flashinfer#3548: no field for the activation's global scale, so the output grows by 2688 / amax."""
    quantized = quantize_nvfp4(row(amax))
    right, wrong = (float(dequantize_nvfp4(q)[0, 0]) for q in (quantized, replace(quantized, global_scale=ONE)))
    # three roundings to float32, 2^-24 each
    assert right == pytest.approx(amax, rel=2**-22)
    assert wrong / right == pytest.approx(factor, rel=2**-22)


def test_21_multiplied_where_it_divides():
    """vllm#35733: the encode direction (2688 / amax) used as the decode direction: off by its square, 7.2e6."""
    quantized = quantize_nvfp4(row(1.0))
    wrong = replace(quantized, global_scale=1 / quantized.global_scale)
    # four roundings to float32, 2^-24 each
    assert float(dequantize_nvfp4(wrong)[0, 0]) == pytest.approx(2688.0**2, rel=2**-21)


def test_22_global_scale_not_loaded():
    """transformers#48372: experts decompressed without it: no error, weights 100 times too large."""
    packed, scale = pack_e2m1(torch.full((1, 16), 2, dtype=torch.uint8)), torch.tensor([[56]], dtype=torch.uint8)
    right, wrong = (nvfp4_operand(packed, scale, f32(g)[0]) for g in (0.01, 1.0))
    assert torch.equal(right.values, wrong.values)
    assert float(wrong.scale / right.scale) == pytest.approx(100, rel=2**-22)  # 0.01 and the quotient are rounded


def test_23_one_global_scale_for_gate_and_up():
    """vllm#54974: fused w13 kept the gate's scale for both; gate 1, up 3 with up's scale doubled: 1.097 for 2.193.

    The repair leaves the payload alone and moves the ratio into the block scales, exactly while they stay normal.
    """
    right, wrong = (swiglu(f32(1)[None], f32(up)[None], None, torch.ones(1)).item() for up in (3.0, 1.5))
    assert right == pytest.approx(2.193, abs=5e-4)  # quoted to three decimals
    assert wrong == pytest.approx(1.097, abs=5e-4)
    codes, scale = torch.full((1, 8), 0x32, dtype=torch.uint8), torch.tensor([[56]], dtype=torch.uint8)
    own, shared = nvfp4_operand(codes, scale, f32(0.5)[0]), nvfp4_operand(codes, scale - 8, f32(1.0)[0])
    assert decode(scale - 8, E4M3) * 2 == decode(scale, E4M3)
    assert torch.equal(own.values * own.scale, shared.values * shared.scale)


def test_26_small_block_scales_flushed():
    """vllm#34577: with global scale 1 a block of 0.02 has a subnormal E4M3 scale, 2^-8; a kernel flushed such to 0."""
    values = row(0.02)
    quantized = quantize_nvfp4(values, ONE)
    assert decode(quantized.scales, E4M3).tolist() == [[0.00390625]]
    assert float(dequantize_nvfp4(quantized)[0, 0]) > 0
    flushed = replace(quantized, scales=torch.where(quantized.scales < 8, 0, quantized.scales))
    assert float(dequantize_nvfp4(flushed)[0, 0]) == 0
    assert decode(quantize_nvfp4(values).scales, E4M3).tolist() == [[448.0]]  # the right repair: a global scale


def test_27_no_global_scale_clips():
    """kekzl/imp#1544: without one, blocks above 2688 clip: [4000, 1 x 15] becomes 2688 and fifteen zeros."""
    values = row(4000.0, *[1.0] * 15)
    clipped = dequantize_nvfp4(quantize_nvfp4(values, ONE))
    assert clipped.tolist() == [[2688.0] + [0.0] * 15]
    # amax * float32(1/2688), times 6 * 448: three roundings of 2^-24
    assert dequantize_nvfp4(quantize_nvfp4(values))[0, 0] == pytest.approx(4000, rel=2**-22)


def test_28_reciprocal_of_a_reciprocal():
    """vllm#42549: one ulp in the decode scale changed greedy output. Here the scale is taken as given, times 8."""
    scale = f32(0.029281556606292725)
    packed, block_scale = torch.zeros(1, 8, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8)
    assert float(nvfp4_operand(packed, block_scale, scale[0]).scale) == 8 * scale.item()
    assert (1 / (1 / scale)).item() == np.nextafter(np.float32(scale.item()), np.float32(0))


def test_29_static_scale_lost():
    """auto-round#2374: evaluation silently used a dynamic scale. The rule says which; the codes differ."""
    values = row(1.0, 3.0, length=64)
    static = quantize_activation(values, replace(PER_BLOCK, source=ScaleSource.STATIC), static_scale=0.5)
    dynamic = quantize_activation(values, PER_BLOCK)
    assert static.scales.tolist() == [[0.5]]
    assert decode(static.codes, E4M3)[0, :2].tolist() == [2.0, 6.0]
    assert decode(dynamic.codes, E4M3)[0, 1] == 448.0


def test_31_small_scales_to_zero_or_to_the_floor():
    """pytorch/ao#4598: one library clamps scales to 2^-6, another rounds; we round, so 2^-11 becomes 0."""
    scales = f32(0.004, 2.0**-11)
    assert round_to(scales, E4M3).tolist() == [0.00390625, 0.0]
    assert round_to(scales.clamp(min=2.0**-6), E4M3).tolist() == [0.015625, 0.015625]
    assert not bool(dequantize_nvfp4(quantize_nvfp4(row(6 * 2.0**-11), ONE)).any())


# --- C: E8M0 scales ----------------------------------------------------------------------------------------------

FLOOR, CEIL, RCEIL, EVEN = ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.RCEIL, ScaleRule.EVEN


@pytest.mark.parametrize(
    ("amax", "rule", "scale", "dequantized"),
    [
        (7.0, FLOOR, 1, 6),
        (7.0, RCEIL, 2, 8),
        (7.0, CEIL, 2, 8),
        (7.0, EVEN, 2, 8),
        (6.5, FLOOR, 1, 6),
        (6.5, RCEIL, 2, 6),
        (5.0, FLOOR, 1, 4),
        (5.0, RCEIL, 1, 4),
        (5.0, EVEN, 1, 4),
        (5.0, CEIL, 2, 4),
        (3.5, FLOOR, 0.5, 3),
        (3.5, RCEIL, 1, 4),
        (3.5, CEIL, 1, 4),
        (3.5, EVEN, 1, 4),
    ],
)
def test_32_the_rules_differ(amax, rule, scale, dequantized):
    """ROCm/aiter#3212: several scale rules in one code base."""
    quantized = quantize_mx(row(amax, length=32), E2M1, rule)
    assert decode(quantized.scales, UE8M0).item() == scale
    assert dequantize_mx(quantized, E2M1)[0, 0] == dequantized


def test_33_weights_and_activations_by_different_rules():
    """ROCm/ATOM#1601: calibrated with "even", run with "up": amax 6.5 has scale 1 in one and 2 in the other."""
    codes = {rule: decode(ue8m0_scale(f32(6.5), E2M1, rule), UE8M0).item() for rule in ScaleRule}
    assert codes[EVEN] == 1
    assert codes[RCEIL] == codes[ScaleRule.ROUND_UP] == 2


def test_34_no_unnamed_rounding_to_e8m0():
    """ml_dtypes#298: a cast declared nearest-even rounds 3.0 to 4.0 (even: 2.0). Here a rule must be named."""
    with pytest.raises(ValueError, match="ScaleRule"):
        encode(f32(3.0), UE8M0)
    cast = (f32(3.0, 0.75).view(torch.int32) + 0x400000) >> 23
    assert decode(cast.byte(), UE8M0).tolist() == [4.0, 1.0]


def test_36_top_of_the_range():
    """vllm#53110: floor(log2 amax) + 127 maps amax to 1 and not to the top: for 448 byte 135, the right one is 127."""
    assert ue8m0_scale(f32(448), E4M3, FLOOR).tolist() == [127]
    assert (floor_log2(f32(448)) + 127).tolist() == [135]


def test_37_bytes_in_half_precisions_subnormals():
    """1Cat-vLLM#222: bytes 103 to 112 were flushed to 0, though fp16 subnormals hold them."""
    codes = torch.arange(100, 121, dtype=torch.uint8)
    values = decode(codes, UE8M0)
    assert values.tolist() == [2.0 ** (b - 127) for b in range(100, 121)]
    assert torch.equal(values.half().float()[3:], values[3:])
    flushed = torch.where(values < 2.0**-14, 0, values)
    assert codes[(flushed == 0) & (values.half() > 0)].tolist() == list(range(103, 113))


@pytest.mark.parametrize("rule", ScaleRule)
def test_38_tiny_blocks(rule):
    """flashinfer#2440: tiny blocks gave +-448 and NaN. The scale stops at 2^-127; what lies below goes to 0."""
    for amax in (2.8e-36, 2.0**-126, 2.0**-149):
        values = row(amax, -amax, amax / 4, length=32)
        quantized = quantize_mx(values, E4M3, rule)
        error = (dequantize_mx(quantized, E4M3) - values).abs()
        # Half a step of E4M3 is 2^-4, or 2^-10 scales for subnormals; FLOOR clips up to 1 - 448 / 512 = 2^-3.
        assert bool((error <= torch.maximum(values.abs() * 2**-3, decode(quantized.scales, UE8M0) * 2**-10)).all())
    flushed = values / 0  # the scale 2^-127 flushed
    assert bool((flushed.isinf() | flushed.isnan()).all())


def test_39_factor_of_a_dormant_expert():
    """flashinfer#5024: 448 / amax overflows below 1.3166e-36, and 0 * infinity is NaN. The denominator has a floor."""
    values = row(6.3e-38, length=64)
    quantized = quantize_activation(values, replace(PER_BLOCK, tiny_path=True))
    assert bool(quantized.scales.isfinite().all())
    assert decode(quantized.codes, E4M3)[0, :2].tolist() == [22.0, 0.0]  # 6.3e-38 * 448 / 1.3166e-36 = 21.4
    assert bool((values * (448 / values.abs().amax())).isnan().any())


def test_41_fp32_scales_for_a_kernel_of_exponents():
    """sglang#39193: only the exponent was kept, 1.5 became 1.0, no error. Float scales are refused."""
    assert (f32(1.5).view(torch.int32) & 0x7F800000).view(torch.float32).tolist() == [1.0]
    w13, w2 = torch.zeros(1, 256, 64, dtype=torch.uint8), torch.zeros(1, 128, 64, dtype=torch.uint8)
    inputs = MoEInputs(torch.ones(1, 128, dtype=torch.bfloat16), torch.tensor([[0]]), torch.ones(1, 1))
    weights = MoEWeights(w13, w2, torch.full((1, 256, 4), 1.5), torch.full((1, 128, 4), 1.5))
    with pytest.raises(InputError, match=r"^w13_scale must be torch.uint8"):
        moe_forward(find_scheme("sm90_fp8_mxfp4_bf16_pull_cutedsl"), weights, inputs)


def test_42_zero_block():
    """kernels-community#681: 0 / 0 in a block of zeros."""
    zeros = torch.zeros(1, 128)
    quantized = quantize_activation(zeros, replace(PER_BLOCK, block=128, apply=Apply.DIVIDE))
    assert not bool(quantized.codes.any())
    assert bool((quantized.scales == torch.tensor(1e-30)).all())
    assert bool((zeros / (zeros.abs().amax() / 448)).isnan().all())


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rule", [rule for rule in ScaleRule if rule is not ScaleRule.ROUND_UP])
def test_44_nan_and_infinity_reach_the_scale(special, rule):
    """pytorch/ao#4725: E2M1 cannot hold NaN, so the scale must; a maximum that ignores NaN hides it."""
    block = row(special, *[1.0] * 31, length=32)
    quantized = quantize_mx(block, E2M1, rule)
    assert quantized.scales.tolist() == [[255]]
    assert bool(dequantize_mx(quantized, E2M1).isnan().all())
    hidden = Quantized(encode(block, E2M1), ue8m0_scale(block.nan_to_num(0, 0, 0).amax(-1, keepdim=True), E2M1, rule))
    assert bool(dequantize_mx(hidden, E2M1).isfinite().all())


@pytest.mark.parametrize(
    ("special", "found"), [(torch.nan, torch.inf), (torch.inf, torch.inf), (-torch.inf, -torch.inf)]
)
def test_44_round_up_has_no_nan_scale(special, found):
    """The kernel's integer arithmetic stops at 2^127: NaN becomes +6 * 2^127, infinite, and the others vanish."""
    block = row(special, *[1.0] * 31, length=32)
    quantized = quantize_mx(block, E2M1, ScaleRule.ROUND_UP)
    assert quantized.scales.tolist() == [[254]]
    assert dequantize_mx(quantized, E2M1).tolist() == [[found] + [0.0] * 31]


def test_44_no_logarithm_in_floating_point():
    """The same thread: log2 in float32 rounds just below a power of two up to it."""
    below = torch.nextafter(f32(8), f32(0))
    assert floor_log2(below).tolist() == [2]
    assert below.log2().floor().tolist() == [3.0]
