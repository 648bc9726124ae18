"""From expert weights to what the tensor core multiplies: operand values and the scale beside them.

Sources: FlashInfer 0.7.4, `moe_ep/backends/mega/kernel/sm{90,100}/*/weights.py` and, for MXFP4,
`fused_moe/prepare.py` (the "Humming" preprocessing).
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from .formats import E2M1, E4M3, decode, pack_e2m1, round_to, unpack_e2m1
from .fp32 import power_of_two
from .quantize import (
    MX_BLOCK,
    NVFP4_BLOCK,
    blocks,
    quantize_fp8_block_128,
    quantize_fp8_block_128_apart,
    quantize_fp8_per_expert,
    quantize_nvfp4,
    quantize_nvfp4_with_norm,
)
from .scheme import Scheme, Weights
from .types import MoEWeights

#: Octaves below an expert's largest MXFP4 scale that the E4M3 operand can hold exactly.
MXFP4_RANGE = 11


@dataclass(frozen=True)
class Operand:
    """One expert's leg. values: `[N, K]` float32, exact in the operand format; scale: `[1 or N, blocks]` float32;
    block_scale: `[N, K / 16]` float32 where the tensor core itself multiplies by it."""

    values: torch.Tensor
    scale: torch.Tensor
    block_scale: torch.Tensor | None = None


def load_operand(scheme: Scheme, weights: MoEWeights, leg: str, expert: int) -> Operand:
    """The operand of `leg` ("w13" or "w2") of one expert, quantizing dense weights as the backend does."""
    payload = getattr(weights, leg)[expert]
    if scheme.weights is Weights.BF16:
        return Operand(payload.float(), torch.ones(1, 1))
    scale, global_scale = (getattr(weights, leg + suffix) for suffix in ("_scale", "_global_scale"))
    spread = expert_value(global_scale, expert)
    if scale is None:
        payload, scale, own = quantize_leg(scheme, payload, leg)
        spread = spread if own is None else own
    else:
        scale = scale[expert]
    if scheme.weights in (Weights.FP8_PER_EXPERT, Weights.FP8_BLOCK_128, Weights.FP8_BLOCK_128_APART):
        return _fp8(scheme, payload, scale, leg)
    if scheme.weights is Weights.MXFP4:
        return mxfp4_operand(payload, scale)
    if scheme.weights is Weights.NVFP4_BLOCK_SCALED:
        return Operand(decode(unpack_e2m1(payload), E2M1), spread.reshape(1, 1), decode(scale, E4M3))
    return nvfp4_operand(payload, scale, spread)


def quantize_leg(
    scheme: Scheme, weight: torch.Tensor, leg: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """One expert's dense leg as the scheme's backend quantizes it: codes, scales and, for SM90 NVFP4, its global scale.

    weight: `[N, K]`; shapes and dtypes are those of one expert in `MoEWeights`. Not for bf16 and MXFP4 schemes, whose
    backends quantize nothing.
    """
    if scheme.weights is Weights.NVFP4:
        dense = quantize_nvfp4(weight)
        return pack_e2m1(dense.codes), dense.scales, dense.global_scale
    if scheme.weights is Weights.NVFP4_BLOCK_SCALED:
        dense = quantize_nvfp4_with_norm(weight)
        return pack_e2m1(dense.codes), dense.scales, None
    assert scheme.stage is not None
    if scheme.weights is Weights.FP8_PER_EXPERT:
        dense = quantize_fp8_per_expert(weight, scheme.stage.element)
        return dense.codes, dense.scales.reshape(()), None
    if scheme.weights is Weights.FP8_BLOCK_128_APART:
        dense = quantize_fp8_block_128_apart(weight, scheme.stage.element)
        return dense.codes, dense.scales, None
    dense = quantize_fp8_block_128(weight, scheme.stage.element, _parts(leg))
    return dense.codes, dense.scales, None


def _parts(leg: str) -> int:
    """w13 has two halves, gate and up, whose rows the kernel interleaves."""
    return 2 if leg == "w13" else 1


def expert_value(values: torch.Tensor | None, expert: int | torch.Tensor) -> torch.Tensor:
    """What is given once for all experts, for each, or not at all (1), of `expert`: an id or ids `[routes]`."""
    if values is None:
        return torch.ones(())
    return values if values.numel() == 1 else values[expert]


def nvfp4_operand(packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> Operand:
    """E4M3(code * scale / 8), one rounding; 8 * global_scale goes to the epilogue.

    packed: `[N, K/2]` uint8, scale: `[N, K/16]` E4M3 codes 0..126, global_scale: float32 scalar. The largest magnitude
    is 6 * 448 / 8 = 336, so nothing saturates. Scales below 2^-2 lose digits to E4M3's subnormals.
    """
    values = blocks(decode(unpack_e2m1(packed), E2M1), NVFP4_BLOCK) * (decode(scale, E4M3) / 8)[..., None]
    return Operand(round_to(values.flatten(-2), E4M3), (global_scale * 8).reshape(1, 1))


def mxfp4_operand(packed: torch.Tensor, scale: torch.Tensor) -> Operand:
    """code * 2^(offset - 6) as E4M3, exact; a power of two per expert goes to the epilogue.

    packed: `[N, K/2]` uint8, scale: `[N, K/32]` UE8M0 codes (255 is taken as exponent 255, not NaN), of which
    `_rewrite_mxfp4` makes what the operand can hold.
    """
    codes, raised = _rewrite_mxfp4(packed, scale)
    bottom = int(raised.min())
    values = blocks(decode(codes, E2M1), MX_BLOCK) * power_of_two(raised - bottom + 1 - 6).float()[..., None]
    return Operand(values.flatten(-2), power_of_two(torch.tensor([[bottom - 122]])).float())


def mxfp4_rewrite(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 weights as the SM90 kernel's preparation leaves them: (packed, scale), the operand of both is equal.

    packed: `[..., N, K/2]` uint8, scale: `[..., N, K/32]` UE8M0 codes (uint8 or torch's float8_e8m0fnu); an expert is
    the last two dimensions, and any before are experts (temporaries take 8 bytes a code). Scales more than 11 below the
    expert's largest are raised to that, and their codes rounded to fewer digits (`_rewrite_table`). -0 becomes +0, but
    a negative code may round to -0, so rewriting again can change the sign of a zero, and nothing else.
    """
    codes, raised = _rewrite_mxfp4(packed, scale.view(torch.uint8))
    return pack_e2m1(codes), raised.to(torch.uint8)


def _rewrite_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes `[..., N, K]` uint8, scales `[..., N, K/32]` int32); the smallest scale is what offsets count from."""
    scale = scale.int()
    top = scale.amax((-2, -1), keepdim=True)
    raised = torch.maximum(scale, top - MXFP4_RANGE)
    codes = blocks(unpack_e2m1(packed), MX_BLOCK).long()
    return _rewrite_table()[(raised - scale).long()[..., None], codes].flatten(-2), raised


@cache
def _rewrite_table() -> torch.Tensor:
    """`[256, 16]` uint8: the code that stands for code * 2^-delta, ties away from zero; -0 becomes +0.

    Computed as the preprocessing does, on floats whose exponent field holds the E2M1 exponent. Its 2^-delta comes from
    integer arithmetic on the float32 bits of 1.0 and wraps from delta = 128 on, where it is negative or infinite. At
    exactly 128 even zeros become large codes (0 * -inf is NaN): a block of zeros with scale code 0 is enough, in an
    expert whose largest scale code is 139 (2^12). We mirror that, as x86 computes it (its default NaN is negative).
    """
    factor = (np.uint32(0x3F800000) - (np.arange(256, dtype=np.uint32) << 23)).view(np.float32)
    codes = np.arange(16, dtype=np.uint32)
    codes[8] = 0
    value = (codes >> 3 << 31 | (codes & 7) << 22).view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):
        scaled = factor.astype(np.float64)[:, None] * value
        bits = scaled.astype(np.float32).view(np.uint32)
        down, up = (b & np.uint32(0x81C00000) for b in (bits, bits + np.uint32(0x00200000)))
        distance_down, distance_up = (np.abs(scaled - b.view(np.float32)) for b in (down, up))
        rounded = np.where(distance_down >= distance_up, up, down)
    table = rounded >> 28 & 8 | rounded >> 22 & 7
    table[0] = codes
    return torch.from_numpy(table.astype(np.uint8))


def _fp8(scheme: Scheme, payload: torch.Tensor, scale: torch.Tensor, leg: str) -> Operand:
    assert scheme.stage is not None
    values = decode(payload, scheme.stage.element)
    if scheme.weights is Weights.FP8_PER_EXPERT:
        return Operand(values, scale.reshape(1, 1))
    # One scale row for each canonical row: block b of w13 covers gate rows 64b.. and up rows 64b.., if not apart.
    parts = 1 if scheme.weights is Weights.FP8_BLOCK_128_APART else _parts(leg)
    return Operand(values, scale[None, :, None].expand(parts, -1, 128 // parts, -1).reshape(payload.shape[0], -1))
