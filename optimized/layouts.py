"""What the kernels' weight layouts share. Bytes move and bits move; nothing rounds.

The layouts themselves are in `layouts_sm90.py` and `layouts_sm100.py`, put together per kernel in `kernel_layouts.py`.
"""

from collections.abc import Iterable

import torch


def require(
    name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> torch.Tensor:
    """The tensor. Raises ValueError naming the argument unless it has this shape and one of these dtypes."""
    if tensor is None:
        raise ValueError(f"{name} is missing: it must have shape {shape}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must have dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    return tensor


def require_none(name: str, tensor: torch.Tensor | None, why: str) -> None:
    """Raises ValueError naming the argument if there is a tensor."""
    if tensor is not None:
        raise ValueError(f"{name} must be None: {why}")


def require_multiple(name: str, size: int, multiple: int) -> None:
    """Raises ValueError naming the argument unless `size` is a positive multiple."""
    if size <= 0 or size % multiple:
        raise ValueError(f"{name} must be a positive multiple of {multiple}, got {size}")


def interleave_gate_up(w13: torch.Tensor, block: int) -> torch.Tensor:
    """Rows gate then up -> `block` gate rows, the `block` up rows beside them, and so on.

    w13: `[E, 2I, ...]`, any dtype, I a multiple of `block` (8 in the SM90 kernels and DeepGEMM, 16 in SM100's CuTe-DSL
    NVFP4 kernel). Returns a contiguous tensor of the same shape. Weights and their scales take the same interleave.
    Source: FlashInfer 0.7.4, `_interleave_gate_up_8`, `_interleave_gate_up_16`; DeepGEMM, `_interleave_weights`.
    """
    require_multiple("w13 rows", w13.shape[1], 2 * block)
    return w13.unflatten(1, (2, -1, block)).transpose(1, 2).flatten(1, 3).contiguous()


def deinterleave_gate_up(w13: torch.Tensor, block: int) -> torch.Tensor:
    """Inverse of `interleave_gate_up`."""
    require_multiple("w13 rows", w13.shape[1], 2 * block)
    return w13.unflatten(1, (-1, 2, block)).transpose(1, 2).flatten(1, 3).contiguous()


#: The "fp4_fp8" layout's sign bits, in a word that holds four codes of row r and above them four of row r + 8:
#: (bit where they come from, bit where they go). Magnitudes stay.
_SIGN_MOVES = tuple((4 * i + 3, 8 * i + 7) for i in range(4)) + tuple((4 * i + 19, 8 * i + 3) for i in range(4))


def interleave_fp4_fp8(packed: torch.Tensor) -> torch.Tensor:
    """The "fp4_fp8" weight layout of FlashInfer's SM90 packed-FP4 kernels.

    packed: `[E, N, K/2]` uint8 with N a multiple of 16 and K of 64, two E2M1 codes per byte, even element low. Returns
    uint8 of the same shape. Replaces `flashinfer.fused_moe.prepare.interleave_moe_weights_for_sm90_mixed_gemm`, which
    compiles the whole CUTLASS MoE module to do it.

    Rows r and r + 8 of each 16 are joined into 32-bit words of eight codes, four from each. The magnitudes stay at bits
    4i..4i+2; the signs of row r go to bits 8i+7, those of row r + 8 to bits 8i+3.
    """
    _require_fp4_fp8(packed)
    experts, rows, _ = packed.shape
    # Rows are (N/16, ab, r), columns are (K/64, mma, half, lane, byte) with two bytes to a lane.
    parts = packed.reshape(experts, rows // 16, 2, 8, -1, 2, 2, 4, 2)
    words = parts.permute(0, 1, 6, 3, 4, 5, 7, 2, 8).reshape(-1, 4).view(torch.int32)
    return _move_bits(words, _SIGN_MOVES).view(torch.uint8).reshape(packed.shape)


def deinterleave_fp4_fp8(shuffled: torch.Tensor) -> torch.Tensor:
    """Inverse of `interleave_fp4_fp8`."""
    _require_fp4_fp8(shuffled)
    experts, rows, _ = shuffled.shape
    words = shuffled.clone(memory_format=torch.contiguous_format).view(torch.int32)
    moved = _move_bits(words, [(target, source) for source, target in _SIGN_MOVES]).view(torch.uint8)
    parts = moved.reshape(experts, rows // 16, 2, 8, -1, 2, 4, 2, 2)  # (N/16, half, r, K/64, mma, lane, ab, byte)
    return parts.permute(0, 1, 7, 3, 4, 5, 2, 6, 8).reshape(shuffled.shape)


def _require_fp4_fp8(packed: torch.Tensor) -> None:
    if packed.dtype is not torch.uint8 or packed.ndim != 3 or packed.shape[1] % 16 or packed.shape[2] % 32:
        raise ValueError(
            "packed must be uint8 [E, N, K/2] with N a multiple of 16 and K of 64, "
            f"got {packed.dtype} {tuple(packed.shape)}"
        )


def _move_bits(words: torch.Tensor, moves: Iterable[tuple[int, int]]) -> torch.Tensor:
    """Magnitudes of eight E2M1 codes per int32 where they are, each sign bit where `moves` says."""
    moved = words & 0x77777777
    for source, target in moves:
        moved |= (words >> source & 1) << target
    return moved
