"""Weight layouts of FlashInfer's SM90 pull kernels, forward and back. Any device; nothing rounds.

Source: FlashInfer 0.7.4, `moe_ep/backends/mega/kernel/sm90/*/weights.py` and `fused_moe/prepare.py`.
"""

import torch

from .layouts import require_multiple

#: Rows and K elements whose block scales lie together.
FOLD_ROWS = 64
FOLD_K = 128

#: Octaves of MXFP4 scales in one expert that the kernel's offsets 1..12 can tell apart.
MXFP4_OCTAVES = 11

#: kperm -> how a chunk of that many K elements splits into runs of four (natural order), and the order that gives the
#: permuted chunk. 32: 16a + 8b + 4h + j -> 16h + 8a + 4b + j. 64: 16c + 8i + 4h + j -> 32i + 16h + 4c + j.
_KPERM: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {32: ((2, 2, 2), (2, 0, 1)), 64: ((4, 2, 2), (1, 2, 0))}


def _kperm_runs(tensor: torch.Tensor, dim: int, kperm: int, run: int, back: bool) -> torch.Tensor:
    """`dim` permuted in chunks of kperm elements; four elements are `run` entries of the tensor."""
    if kperm == 0:
        return tensor
    if kperm not in _KPERM:
        raise ValueError(f"kperm must be 0, 32 or 64, got {kperm!r}")
    sizes, order = _KPERM[kperm]
    require_multiple(f"permuted dimension {dim}", tensor.shape[dim], kperm * run // 4)
    if back:
        sizes = tuple(sizes[i] for i in order)
        order = tuple(order.index(i) for i in range(3))
    split = tensor.unflatten(dim, (-1, *sizes, run))
    axes = list(range(split.ndim))
    axes[dim + 1 : dim + 4] = [dim + 1 + i for i in order]
    return split.permute(axes).flatten(dim, dim + 4).contiguous()


def kperm_payload(packed: torch.Tensor, kperm: int) -> torch.Tensor:
    """NVFP4's K order on packed E2M1 `[E, N, K/2]`, so that a lane's eight values share one block scale.

    kperm 0 leaves K alone, 32 permutes within every 32 elements, 64 within every 64; runs of four stay together.
    """
    return _kperm_runs(packed, 2, kperm, 2, back=False)


def unkperm_payload(packed: torch.Tensor, kperm: int) -> torch.Tensor:
    """Inverse of `kperm_payload`."""
    return _kperm_runs(packed, 2, kperm, 2, back=True)


def kperm_gate_up(w13: torch.Tensor, kperm: int) -> torch.Tensor:
    """The same order on w13's rows `[E, 2I, ...]`, gate rows and up rows each: they become fc2's permuted K."""
    return _kperm_runs(w13.unflatten(1, (2, -1)), 2, kperm, 4, back=False).flatten(1, 2)


def unkperm_gate_up(w13: torch.Tensor, kperm: int) -> torch.Tensor:
    """Inverse of `kperm_gate_up`."""
    return _kperm_runs(w13.unflatten(1, (2, -1)), 2, kperm, 4, back=True).flatten(1, 2)


def swap_kperm_scales(scale: torch.Tensor) -> torch.Tensor:
    """Block scales `[E, N, K/16]` for permuted K: the pair read together holds one block of rows g and g + 8.

    Swaps (row 16q + g, block 2t + 1) with (row 16q + g + 8, block 2t), g < 8. Its own inverse.
    """
    require_multiple("scale rows", scale.shape[1], 16)
    require_multiple("scale blocks per row", scale.shape[2], 2)
    split = scale.unflatten(2, (-1, 2)).unflatten(1, (-1, 2, 8))  # [E, N/16, row half, 8, K/32, block of the pair]
    return split.transpose(2, 5).flatten(4, 5).flatten(1, 3).contiguous()


def fold_scales(scale: torch.Tensor, block: int) -> torch.Tensor:
    """Block scales `[E, N, K/block]` with those of 64 rows by 128 K contiguous.

    Any one-byte dtype; N a multiple of 64, K of 128. Row 16s + r of the 64, r < 16, block b of the 128 K's goes to

        block 16 (NVFP4)   ((s * 4 + b div 2) * 16 + r) * 2 + b mod 2     result `[E, N/64, K/128, 32, 16]`
        block 32 (MXFP4)   (r * 4 + s) * 4 + b                            result `[E, N/64, K/128, 16, 16]`
    """
    _, order, folded = _fold(block)
    require_multiple("scale rows", scale.shape[1], FOLD_ROWS)
    require_multiple("scale blocks per row", scale.shape[2], FOLD_K // block)
    split = scale.unflatten(2, (-1, *_fold(block)[0])).unflatten(1, (-1, 4, 16))
    return split.permute(order).flatten(3).unflatten(3, folded).contiguous()


def unfold_scales(folded: torch.Tensor, block: int) -> torch.Tensor:
    """Inverse of `fold_scales`."""
    groups, order, shape = _fold(block)
    if folded.ndim != 5 or tuple(folded.shape[3:]) != shape:
        raise ValueError(f"folded scale must have shape [E, N/64, K/128, {shape[0]}, 16], got {tuple(folded.shape)}")
    sizes = (4, 16, 0, *groups)  # those of the split, its dimensions 2 on
    split = folded.flatten(3).unflatten(3, [sizes[i - 2] for i in order[3:]])
    back = split.permute([order.index(i) for i in range(split.ndim)])
    return back.flatten(4).flatten(1, 3).contiguous()


def _fold(block: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]]:
    """Block scales of 128 K as factors; the order of [E, N/64, 4, 16, K/128, *factors]; the folded block's shape."""
    return {
        16: ((4, 2), (0, 1, 4, 2, 5, 3, 6), (32, 16)),
        32: ((4,), (0, 1, 4, 3, 2, 5), (16, 16)),
    }[block]
