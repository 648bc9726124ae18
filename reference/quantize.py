"""Quantizers: float32 values to codes and scales, block by block along the last dimension.

Each states its arithmetic in full, because codes at a tie depend on it: how the scale is rounded, and whether the
value is divided by it or multiplied by its reciprocal.
"""

from dataclasses import dataclass

import torch

from .formats import E2M1, E4M3, UE8M0, Format, Overflow, cast_overflow, decode, encode
from .fp32 import flush, multiply_ftz
from .scales import ScaleRule, ue8m0_scale
from .scheme import ActivationQuant, Apply, ScaleSource
from .special import div_approx

NVFP4_BLOCK = 16
MX_BLOCK = 32

#: Scale of an all-zero block; the bound of the tiny path is 448 times this.
SCALE_FLOOR = 1e-30
TINY_AMAX = 4.48e-28
#: About 448 / FLT_MAX: the smallest amax whose 448 / amax is finite.
SMALLEST_AMAX = 1.3165537626040637e-36


@dataclass(frozen=True)
class Quantized:
    """Codes with the scales they were made with.

    codes: `[..., K]` uint8. scales: `[..., K / block]`, float32 values, or uint8 codes of the scale format.
    global_scale: float32 decode multiplier of the second level (NVFP4), else None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None = None


def blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """`[..., K]` -> `[..., K / block, block]` float32. Raises ValueError when the block does not divide K."""
    if values.shape[-1] % block:
        raise ValueError(f"values: last dimension must be a multiple of the block {block}, got {values.shape[-1]}")
    return values.float().unflatten(-1, (-1, block))


def quantize_nvfp4(values: torch.Tensor, global_scale: torch.Tensor | None = None) -> Quantized:
    """NVFP4: E2M1 codes, one E4M3 scale per 16, one float32 global scale; the rule of FlashInfer's SM90 backend.

        global_scale = max(amax * float32(1/2688), 1e-30)         2688 = 6 * 448; decode direction
        scale        = E4M3(min(block_amax / (6 * global_scale), 448))
        code         = E2M1(value / max(scale * global_scale, 1e-30))

    values: `[..., N, K]`; the global scale spans the last two dimensions (one expert). global_scale: float32, shape
    `[...]`, to use a given one instead. In a block whose scale rounds to zero every non-zero value saturates to +-6,
    which then decodes to 0. A NaN makes the global scale and every scale of its expert NaN (code 127), which the
    kernels' own check refuses.
    Source: `fp8_nvfp4_bf16_pull_cutedsl/weights.py`, `_quantize_leg`; the product with float32(1/2688) is what torch's
    CUDA division by a Python number does.
    """
    split = blocks(values, NVFP4_BLOCK)
    amax = split.abs().amax(-1)
    if global_scale is None:
        global_scale = (amax.flatten(-2).amax(-1) * (torch.tensor(1.0) / 2688)).clamp(min=SCALE_FLOOR)
    spread = global_scale[..., None, None]
    scales = encode((amax / (6 * spread)).clamp(0, 448), E4M3)
    divisor = (decode(scales, E4M3) * spread).clamp(min=SCALE_FLOOR)
    return Quantized(encode(split / divisor[..., None], E2M1).flatten(-2), scales, global_scale)


def dequantize_nvfp4(quantized: Quantized) -> torch.Tensor:
    """float32(code * scale) * global_scale: `[..., N, K]` float32. The first product is exact."""
    values = blocks(decode(quantized.codes, E2M1), NVFP4_BLOCK) * decode(quantized.scales, E4M3)[..., None]
    assert quantized.global_scale is not None
    return values.flatten(-2) * quantized.global_scale[..., None, None]


def quantize_mx(values: torch.Tensor, element: Format, rule: ScaleRule) -> Quantized:
    """MXFP4 (element E2M1) or MXFP8 (E4M3, E5M2): one UE8M0 scale per 32. values: `[..., K]`.

    Division by a power of two is exact, so the element rounding is the only one; values above the element's maximum
    saturate. A NaN or infinity makes the scale NaN (code 255), and with it the whole block (not under ROUND_UP).
    """
    split = blocks(values, MX_BLOCK)
    scales = ue8m0_scale(split.abs().amax(-1), element, rule)
    scaled = split.double() / decode(scales, UE8M0).double()[..., None]  # float64: a scale of 2^-127 is subnormal
    return Quantized(encode(scaled.float(), element).flatten(-2), scales)


def dequantize_mx(quantized: Quantized, element: Format) -> torch.Tensor:
    """code * 2^(scale - 127): `[..., K]` float32, exact unless it underflows."""
    return (blocks(decode(quantized.codes, element), MX_BLOCK) * decode(quantized.scales, UE8M0)[..., None]).flatten(-2)


def quantize_nvfp4_with_norm(
    values: torch.Tensor,
    norm_const: torch.Tensor | float = 1.0,
    apply: Apply = Apply.RECIPROCAL,
    nan_scale: bool = False,
) -> Quantized:
    """NVFP4 as the SM100 kernels quantize: E2M1 codes, one E4M3 scale per 16, and a norm constant given from outside.

        scale  = E4M3(min(float32(float32(amax * float32(1/6)) * norm_const), 448))
        factor = float32(norm_const * (1 / scale)), 0 where the scale is 0
        code   = E2M1(float32(value * factor))

    values: `[..., K]`; norm_const: a positive number, or float32 that broadcasts against `[..., K / 16]`. code * scale
    stands for value * norm_const; 1 / norm_const is for the caller to multiply in. scales: E4M3 codes.

    Blocks with an amax up to 6 * 2^-10 / norm_const become zeros, whose signs are kept; values above 2688 / norm_const
    saturate to 6 * 448, and so does infinity. A NaN is not seen by amax and becomes +6. A block of NaN alone has scale
    0, so that it counts as zeros, or with nan_scale a NaN scale (code 127). The kernel's rcp.approx is exact for every
    E4M3 scale. apply: DIVIDE is what the kernel does not do.
    Source: FlashInfer 0.7.4, `src/inputs_process.py` and `moe_nvfp4_swapab/epilogue_refactor.py`, `nvfp4_quant_impl`.
    """
    split = blocks(values, NVFP4_BLOCK)
    amax = split.abs().nan_to_num(0.0, torch.inf).amax(-1)
    if nan_scale:
        amax = torch.where(torch.isnan(split).all(-1), torch.nan, amax)
    norm = torch.as_tensor(norm_const, dtype=torch.float32)
    codes = encode(amax * E2M1.reciprocal_max * norm, E4M3)
    scale = decode(codes, E4M3)
    if apply is Apply.DIVIDE:
        applied = split * norm[..., None] / scale[..., None]
    else:
        applied = split * (norm * (1 / scale)).clamp(max=torch.finfo(torch.float32).max)[..., None]
    applied = torch.where(scale[..., None] == 0, split * 0.0, applied)
    return Quantized(encode(applied, E2M1).flatten(-2), codes)


def quantize_activation(
    values: torch.Tensor, rule: ActivationQuant, static_scale: float = 1.0, norm_const: torch.Tensor | float = 1.0
) -> Quantized:
    """FP8 codes and float32 scales by a scheme's rule: per token, per block, or static.

    values: `[rows, K]` float32. Returns codes `[rows, K]` and scales `[rows, K / block]` (`[rows, 1]` for the whole
    row). A rule with a scale format is `quantize_nvfp4_with_norm`; nothing else reads norm_const. Arithmetic of the
    SM90 kernels (`safe_quantize.py`, `staging.py`, `epilogue_fp8_common.py`):

        scale = max(amax * float32(1/max), 1e-30)      the product, not amax / max
        code  = FP8(value applied to scale)            see `Apply`

    An all-zero block: scale 1e-30, codes +-0. From amax, a NaN makes the scale and the whole block NaN; an infinity
    makes the scale infinite, the finite values zero and itself NaN. With a static scale a NaN stays a single NaN, and
    infinity follows `rule.overflow`. The sign of zero is kept.

    The push kernel (`push_style_megamoe/src/a2a/sm90_push_a2a_ops.cu`) has AMAX_OR_ONE and DIVIDE_APPROX instead. NaN
    is not seen by amax and becomes -max. A block whose amax is below max * 2^-126 has scale 0: its values become +-max,
    its zeros -max, and all of them count nothing. Subnormals are zeros; an infinity is -max, but its scale infinite.
    """
    if rule.scale is not None:
        return quantize_nvfp4_with_norm(values, norm_const, rule.apply, rule.nan_scale)
    split = blocks(values, rule.block or values.shape[-1])
    if rule.source is ScaleSource.STATIC:
        scale = torch.full(split.shape[:-1], static_scale)
    elif rule.source is ScaleSource.AMAX_OR_ONE:
        amax = flush(split.abs().nan_to_num(0.0, torch.inf)).amax(-1)
        scale = torch.where(amax > 0, multiply_ftz(amax, torch.tensor(rule.element.reciprocal_max)), 1.0)
    else:
        amax = split.abs().amax(-1)
        scale = (amax * rule.element.reciprocal_max).clamp(min=SCALE_FLOOR)
    if rule.apply is Apply.DIVIDE:
        applied = split / scale[..., None]
    elif rule.apply is Apply.RECIPROCAL:
        applied = split * (1 / scale)[..., None]
    elif rule.apply is Apply.DIVIDE_APPROX:
        applied = div_approx(split, scale[..., None]).nan_to_num(-rule.element.max, torch.inf, -torch.inf)
    else:
        applied = split * torch.tensor(1 / static_scale, dtype=torch.float32)
    if rule.tiny_path and rule.source is ScaleSource.AMAX:
        tiny = (amax > 0) & (amax < TINY_AMAX)
        # Two tensors: torch turns `448 / tensor` into a reciprocal and a product, which rounds twice.
        factor = torch.full_like(amax, rule.element.max) / amax.clamp(min=SMALLEST_AMAX)
        scale = torch.where(tiny, 1 / factor, scale)
        applied = torch.where(tiny[..., None], split * factor[..., None], applied)
    return Quantized(encode(applied, rule.element, rule.overflow).flatten(-2), scale)


def quantize_fp8_per_expert(weight: torch.Tensor, element: Format) -> Quantized:
    """One float32 scale for `[N, K]`: max(amax * float32(1/max), 1e-12), then a true division. scales: `[1, 1]`."""
    scale = (weight.float().abs().amax() * element.reciprocal_max).clamp(min=1e-12).reshape(1, 1)
    return Quantized(encode(weight.float() / scale, element, cast_overflow(element)), scale)


def quantize_fp8_block_128(weight: torch.Tensor, element: Format, parts: int) -> Quantized:
    """One float32 scale per 128 rows of the kernel and 128 K: max(amax * float32(1/max), 1e-30), a true division.

    weight: `[N, K]`. The kernel interleaves gate and up rows by eights before it cuts its 128-row blocks, so a block of
    w13 holds 64 gate rows and the 64 up rows beside them: parts = 2 (w13, gate half then up half) or 1 (w2).
    scales: `[N / 128, K / 128]`.
    """
    split = weight.float().reshape(parts, -1, 128 // parts, weight.shape[-1] // 128, 128)
    scale = (split.abs().amax((0, 2, 4)) * element.reciprocal_max).clamp(min=SCALE_FLOOR)
    codes = encode(split / scale[None, :, None, :, None], element, cast_overflow(element))
    return Quantized(codes.reshape(weight.shape), scale)


def quantize_fp8_block_128_apart(weight: torch.Tensor, element: Format) -> Quantized:
    """One float32 scale per 128 x 128 block in canonical row order: amax * float32(1/max), 1 for zeros.

    weight: `[N, K]`; a true division, then a clamp to +-max. A NaN makes the scale 1 and stays a single NaN, so that
    the rest of its block is cut at max. scales: `[N / 128, K / 128]`.
    Source: FlashInfer 0.7.4, `push_style_megamoe/shim/weights.py`.
    """
    split = weight.float().reshape(-1, 128, weight.shape[-1] // 128, 128)
    amax = split.abs().amax((1, 3))
    scale = torch.where(amax > 0, amax * element.reciprocal_max, 1.0)
    clamped = (split / scale[:, None, :, None]).clamp(-element.max, element.max)
    return Quantized(encode(clamped, element, Overflow.NAN).reshape(weight.shape), scale)
