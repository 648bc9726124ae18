"""Canonical weights to kernel layouts. Bytes move and bits move; nothing rounds."""

import torch


def interleave_fp4_fp8(packed: torch.Tensor) -> torch.Tensor:
    """The "fp4_fp8" weight layout of FlashInfer's SM90 packed-FP4 kernels.

    packed: `[E, N, K/2]` uint8 with N a multiple of 16 and K of 64, two E2M1 codes per byte, even element low. Returns
    uint8 of the same shape. Replaces `flashinfer.fused_moe.prepare.interleave_moe_weights_for_sm90_mixed_gemm`, which
    compiles the whole CUTLASS MoE module to do it.

    Rows r and r + 8 of each 16 are joined into 32-bit words of eight codes, four from each. The magnitudes stay at bits
    4i..4i+2; the signs of row r go to bits 8i+7, those of row r + 8 to bits 8i+3.
    """
    experts, rows, _ = packed.shape
    wide = packed.int()
    pairs = wide[..., 0::2] | wide[..., 1::2] << 8  # [E, N, K/4], four codes of 16 bits
    # Rows are (N/16, ab, r), columns are (K/64, mma, half, lane).
    pairs = pairs.reshape(experts, rows // 16, 2, 8, -1, 2, 2, 4)
    word = (pairs[:, :, 0] | pairs[:, :, 1] << 16).long() & 0xFFFFFFFF
    moved = word & 0x77777777
    for i in range(4):
        moved |= (word >> (4 * i + 3) & 1) << (8 * i + 7)  # code i of row r
        moved |= (word >> (16 + 4 * i + 3) & 1) << (8 * i + 3)  # code i of row r + 8
    halves = torch.stack((moved & 0xFFFF, moved >> 16), dim=-1)  # [E, N/16, r, K/64, mma, half, lane, 2]
    halves = halves.permute(0, 1, 5, 2, 3, 4, 6, 7)
    out = torch.stack((halves & 0xFF, halves >> 8), dim=-1)
    return out.to(torch.uint8).reshape(packed.shape)
