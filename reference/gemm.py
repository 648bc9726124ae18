"""One expert GEMM by a scheme's rule: chains on the tensor core, promotion to float32, epilogue scale."""

import torch

from .fp32 import fma
from .scheme import Gemm, KOrder, Place
from .tensor_core import matmul
from .weights import Operand


def k_permutation(order: KOrder, k: int) -> torch.Tensor:
    """`[k]` int64: the natural index of the element at each place of the kernel's K axis."""
    index = torch.arange(k)
    if order is KOrder.KPERM64:
        return index.reshape(-1, 4, 2, 8).permute(0, 2, 1, 3).reshape(-1)
    return index


def _scale(place: Place, activation: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """activation: `[rows, 1]`, weight: `[1 or N]`; float32 products."""
    if place is Place.NONE:
        return None
    if place is Place.ACTIVATION:
        return activation
    return weight if place is Place.WEIGHT else activation * weight


def expert_gemm(rule: Gemm, x: torch.Tensor, x_scale: torch.Tensor, weight: Operand) -> torch.Tensor:
    """`x @ weight.T` for one expert.

    x: `[rows, K]` float32 operand values; x_scale: `[rows, blocks]` float32, blocks dividing K evenly;
    weight: `[N, K]` with its scales. Returns `[rows, N]` float32. A core with block scales gets both sides', and K in
    natural order.
    """
    k = x.shape[1]
    chunk = rule.chunk or k
    order = k_permutation(rule.k_order, k)
    x, w = x[:, order], weight.values[:, order]
    total = torch.zeros(x.shape[0], w.shape[0])
    for start in range(0, k, chunk):
        block_scales = None
        if (block := rule.core.scale_block) is not None:
            assert weight.block_scale is not None
            here = slice(start // block, (start + chunk) // block)
            block_scales = (x_scale[:, here], weight.block_scale[:, here])
        part = matmul(rule.core, x[:, start : start + chunk], w[:, start : start + chunk], scales=block_scales)
        scale = _scale(
            rule.promote,
            x_scale[:, start * x_scale.shape[1] // k, None],
            weight.scale[:, start * weight.scale.shape[1] // k],
        )
        total = fma(part, torch.ones(()) if scale is None else scale, total)
    scale = _scale(rule.epilogue, x_scale[:, :1], weight.scale[:, 0])
    return total if scale is None else total * scale
