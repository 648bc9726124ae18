"""Dispatch and combine between EP ranks, as index tables and one sum. Nothing here rounds but the last line."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routes:
    """The (token, slot) pairs that one rank receives, sorted by (expert, source rank, token, slot).

    Each field is `[routes]` int64. The kernel's own order is that of arrival; no bit depends on it, since every route
    is a row of its own until `combine`.
    """

    source_rank: torch.Tensor
    token: torch.Tensor
    slot: torch.Tensor
    expert: torch.Tensor  #: global id

    def __len__(self) -> int:
        return len(self.token)


def dispatch(topk_ids: Sequence[torch.Tensor], num_experts: int) -> list[Routes]:
    """Who sends what to whom. topk_ids: one `[T_r, top_k]` per rank; returns one `Routes` per rank.

    Experts are placed linearly: rank r owns the ids [r * E/R, (r + 1) * E/R). Negative ids are masked and travel
    nowhere; an expert named twice in a row gets the token twice.
    """
    found = []
    for rank, ids in enumerate(topk_ids):
        token, slot = torch.nonzero(ids >= 0, as_tuple=True)
        found.append(torch.stack((ids[token, slot].long(), torch.full_like(token, rank), token, slot)))
    expert, source, token, slot = torch.cat(found, dim=1)
    order = torch.argsort(expert, stable=True)  # each rank's routes already ascend in (source, token, slot)
    local = num_experts // len(topk_ids)
    received = []
    for rank in range(len(topk_ids)):
        mine = order[expert[order] // local == rank]
        received.append(Routes(source[mine], token[mine], slot[mine], expert[mine]))
    return received


def combine(
    topk_ids: torch.Tensor, rank: int, routes: Sequence[Routes], route_outputs: Sequence[torch.Tensor], hidden: int
) -> torch.Tensor:
    """Sum one rank's route outputs over its top-k slots. Returns `[T, hidden]` bf16.

    topk_ids: `[T, top_k]` of that rank; routes and route_outputs: of every rank, rows bf16. The sum runs in float32
    from +0 over the slots in the caller's order, masked slots skipped, and rounds to bf16 once at the end. The routing
    weight is already inside (the kernels multiply the SwiGLU output). A token with every slot masked gives +0.
    Source: FlashInfer 0.7.4, `moe_nvfp4_swapab/topk_reduce.py`.
    """
    terms = torch.zeros(*topk_ids.shape, hidden, dtype=torch.bfloat16)
    for table, output in zip(routes, route_outputs, strict=True):
        mine = table.source_rank == rank
        terms[table.token[mine], table.slot[mine]] = output[mine]
    total = torch.zeros(topk_ids.shape[0], hidden)
    for slot in range(topk_ids.shape[1]):
        live = topk_ids[:, slot, None] >= 0
        total = torch.where(live, total + terms[:, slot].float(), total)
    return total.bfloat16()
