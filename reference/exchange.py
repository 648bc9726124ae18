"""Dispatch and combine between EP ranks, as index tables and one sum. Nothing rounds but `combine`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .fp32 import canonical_nan
from .scheme import Combine


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


def route_terms(
    rank: int, routes: Sequence[Routes], route_outputs: Sequence[torch.Tensor], workspace: torch.Tensor
) -> torch.Tensor:
    """Send route outputs home: `[T, top_k, hidden]` bf16, rank's workspace with its live slots overwritten.

    routes and route_outputs (rows bf16): of every rank. A masked slot keeps what the workspace held before.
    """
    terms = workspace.clone()
    for table, output in zip(routes, route_outputs, strict=True):
        mine = table.source_rank == rank
        terms[table.token[mine], table.slot[mine]] = output[mine]
    return terms


def combine(terms: torch.Tensor, topk_ids: torch.Tensor, rule: Combine) -> torch.Tensor:
    """Sum route terms over the top-k slots. Returns `[T, hidden]` bf16.

    terms: `[T, top_k, hidden]` bf16; topk_ids: `[T, top_k]`. The sum runs in float32 over the slots in the caller's
    order and rounds to bf16 once at the end; the routing weight is already inside (the kernels multiply the SwiGLU
    output). Which slots count, and where the sum starts, is `rule`. NaN becomes the GPU's canonical 0x7FFF.
    Source: FlashInfer 0.7.4, `moe_nvfp4_swapab/topk_reduce.py`.
    """
    values = terms.float()
    if rule is Combine.LIVE_SLOTS:
        total = torch.zeros_like(values[:, 0])
        for slot in range(terms.shape[1]):
            total = torch.where(topk_ids[:, slot, None] >= 0, total + values[:, slot], total)
    else:
        total = values[:, 0]
        for slot in range(1, terms.shape[1]):
            total = total + values[:, slot]
    return canonical_nan(total.bfloat16())
