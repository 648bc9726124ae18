"""Weight layouts of the SM100 kernels, forward and back. Any device; nothing rounds.

Sources: FlashInfer 0.7.4, `moe_ep/kernel_src/sm100/cutedsl_megamoe` (`to_blocked`); DeepGEMM, `deep_gemm/mega` and
`csrc/jit_kernels/impls/smxx_layout.hpp`.
"""

import torch

from .layouts import require_multiple

#: Block scales of 128 rows by 4 blocks lie together: 32 groups of 16 bytes, rows r, r + 32, r + 64, r + 96 in a group.
SCALE_ROWS = 128
SCALE_COLS = 4


def _tiles(rows: int, cols: int) -> tuple[int, int]:
    return -(-rows // SCALE_ROWS), -(-cols // SCALE_COLS)


def blocked_scale_size(rows: int, cols: int) -> int:
    """Elements of one expert's blocked scales, padding included."""
    row_tiles, col_tiles = _tiles(rows, cols)
    return row_tiles * col_tiles * SCALE_ROWS * SCALE_COLS


def block_scales(scale: torch.Tensor) -> torch.Tensor:
    """Block scales `[E, R, C]` in the 128x4 blocked order of the tensor cores, `[E, S]`, padding zero.

    Any dtype. Element (r, c) of an expert goes to

        ((r div 128) * ceil(C/4) + c div 4) * 512 + (r mod 32) * 16 + ((r mod 128) div 32) * 4 + c mod 4

    and S = ceil(R/128) * ceil(C/4) * 512: every expert is padded on its own.
    """
    experts, rows, cols = scale.shape
    row_tiles, col_tiles = _tiles(rows, cols)
    padded = scale.new_zeros((experts, row_tiles * SCALE_ROWS, col_tiles * SCALE_COLS))
    padded[:, :rows, :cols] = scale
    split = padded.reshape(experts, row_tiles, 4, 32, col_tiles, SCALE_COLS)
    return split.permute(0, 1, 4, 3, 2, 5).reshape(experts, -1)


def unblock_scales(blocked: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Inverse of `block_scales`: `[E, S]` -> `[E, rows, cols]`. Padding is dropped, whatever it holds."""
    experts, size = blocked.shape
    if size != blocked_scale_size(rows, cols):
        raise ValueError(f"blocked must have {blocked_scale_size(rows, cols)} scales per expert, got {size}")
    row_tiles, col_tiles = _tiles(rows, cols)
    split = blocked.reshape(experts, row_tiles, col_tiles, 32, 4, SCALE_COLS)
    padded = split.permute(0, 1, 4, 3, 2, 5).reshape(experts, row_tiles * SCALE_ROWS, col_tiles * SCALE_COLS)
    return padded[:, :rows, :cols].contiguous()


def pack_scales_deep_gemm(scale: torch.Tensor) -> torch.Tensor:
    """UE8M0 scales `[E, N, K/32]` uint8 -> int32 `[E, K/128, N]`, as DeepGEMM's fp8_fp4_mega_moe reads them.

    Four scales along K share an int32, the first in the lowest byte; N runs fastest. Within each 128 rows, row
    32a + b goes to 4b + a, so that the copy to tensor memory finds rows 32 apart side by side. N and K multiples of
    128. DeepGEMM's own tensor is the transposed view `[E, N, K/128]` of this storage. Every byte passes, 0 and 255 too.
    """
    if scale.dtype is not torch.uint8 or scale.ndim != 3:
        raise ValueError(f"scale must be uint8 [E, N, K/32], got {scale.dtype} {tuple(scale.shape)}")
    require_multiple("scale rows", scale.shape[1], 128)
    require_multiple("scale blocks per row", scale.shape[2], 4)
    split = scale.unflatten(2, (-1, 4)).unflatten(1, (-1, 4, 32))  # [E, N/128, a, b, K/128, byte]
    ordered = split.permute(0, 4, 1, 3, 2, 5).contiguous()
    return ordered.view(torch.int32).reshape(scale.shape[0], scale.shape[2] // 4, scale.shape[1])


def unpack_scales_deep_gemm(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_scales_deep_gemm`: int32 `[E, K/128, N]` -> uint8 `[E, N, K/32]`."""
    if packed.dtype is not torch.int32 or packed.ndim != 3:
        raise ValueError(f"packed must be int32 [E, K/128, N], got {packed.dtype} {tuple(packed.shape)}")
    require_multiple("packed rows", packed.shape[2], 128)
    experts, words, rows = packed.shape
    split = packed.contiguous().view(torch.uint8).reshape(experts, words, rows // 128, 32, 4, 4)
    return split.permute(0, 2, 4, 3, 1, 5).reshape(experts, rows, 4 * words)
