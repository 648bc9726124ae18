"""Dispatch and combine between EP ranks: tables of rows, one way to move them, one sum. Only `combine` rounds."""

from collections.abc import Callable, Sequence

import torch

from .formats import Format, decode
from .fp32 import canonical_nan, flush, fma
from .quantize import dequantize_mx, quantize_activation, quantize_mx
from .scales import ScaleRule
from .scheme import ActivationQuant, Combine

#: Columns of equal length, one row per route.
Rows = dict[str, torch.Tensor]

#: Moves rows between ranks. Called with the rows of each rank that this process runs and, for every row, the rank it
#: goes to (`[rows]` int64); returns what each of these ranks receives, by sender ascending, each sender's order kept.
Exchange = Callable[[Sequence[Rows], Sequence[torch.Tensor]], list[Rows]]


def exchange_in_process(rows: Sequence[Rows], destinations: Sequence[torch.Tensor]) -> list[Rows]:
    """The `Exchange` of a process that runs every rank."""
    return [
        concatenate([select(sent, to == rank) for sent, to in zip(rows, destinations, strict=True)])
        for rank in range(len(rows))
    ]


def select(rows: Rows, index: torch.Tensor) -> Rows:
    return {name: column[index] for name, column in rows.items()}


def concatenate(parts: Sequence[Rows]) -> Rows:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def route_rows(rank: int, topk_ids: torch.Tensor, topk_weights: torch.Tensor, staged: Rows) -> Rows:
    """What a rank sends: one row per (token, slot) with its quantized payload, scales and routing.

    topk_ids, topk_weights: `[T, top_k]`; staged: columns of length T. Negative ids are masked and travel nowhere; an
    expert named twice by one token gets the token twice. Ids, ranks, tokens and slots are int64.
    """
    token, slot = torch.nonzero(topk_ids >= 0, as_tuple=True)
    routing = {
        "topk_weights": topk_weights[token, slot],
        "expert": topk_ids[token, slot].long(),
        "source_rank": torch.full_like(token, rank),
        "token": token,
        "slot": slot,
    }
    return select(staged, token) | routing


def by_expert(rows: Rows) -> Rows:
    """Received rows in the order (expert, source rank, token, slot).

    The kernel's own order is that of arrival; no bit depends on it, since every route is a row of its own until
    `combine`.
    """
    return select(rows, torch.argsort(rows["expert"], stable=True))


def route_terms(returned: Rows, workspace: torch.Tensor) -> torch.Tensor:
    """`[T, top_k, hidden]` bf16: the workspace, its live slots overwritten by the routes that came back.

    returned: values `[routes, hidden]` bf16, token, slot. A masked slot keeps what the workspace held before.
    """
    terms = workspace.clone()
    terms[returned["token"], returned["slot"]] = returned["values"]
    return terms


def combine(
    terms: torch.Tensor,
    topk_ids: torch.Tensor,
    rule: Combine,
    local_experts: int | None = None,
    wire: Format | None = None,
    topk_weights: torch.Tensor | None = None,
    wire_rule: ActivationQuant | None = None,
) -> torch.Tensor:
    """Sum route terms over the top-k slots. Returns `[T, hidden]` bf16.

    terms: `[T, top_k, hidden]` bf16; topk_ids: `[T, top_k]`; the routing weight is already inside (the kernels multiply
    the SwiGLU output), but where `rule.weighted`, which needs topk_weights, `[T, top_k]` float32. Slots are taken in
    the caller's order; which count, where the sum starts and when it rounds is `rule`; GROUPED and WEIGHTED_GROUPS need
    local_experts, the experts of a rank, and wire or wire_rule, the scheme's. NaN becomes the GPU's canonical 0x7FFF.
    Source: FlashInfer 0.7.4, `moe_nvfp4_swapab/topk_reduce.py`, `moe_hopper_fp8/epilogue_fp8.py`; for WEIGHTED_ROUTES
    and WEIGHTED_GROUPS `push_style_megamoe/src/a2a/sm90_push_a2a_ops.cu`.
    """
    if rule in (Combine.WEIGHTED_ROUTES, Combine.WEIGHTED_GROUPS):
        assert topk_weights is not None
        groups = torch.arange(topk_ids.shape[1]).expand_as(topk_ids)
        if rule is Combine.WEIGHTED_GROUPS:
            assert local_experts is not None
            groups = topk_ids // local_experts
        groups = torch.where(topk_ids >= 0, groups, -1)
        return canonical_nan(_sum_of_weighted(terms.float(), groups, topk_weights, wire_rule).bfloat16())
    if rule is Combine.GROUPED:
        assert local_experts is not None
        return canonical_nan(_sum_of_groups(terms.float(), topk_ids, local_experts, wire).bfloat16())
    values = terms.float()
    live = topk_ids[..., None] >= 0
    if rule is Combine.ALL_SLOTS:
        total, first, live = values[:, 0], 1, torch.ones_like(live)
    else:
        total, first = torch.zeros_like(values[:, 0]), 0
    for slot in range(first, terms.shape[1]):
        if rule is Combine.WEIGHTED:
            assert topk_weights is not None
            added = fma(values[:, slot], topk_weights[:, slot, None], total)
        else:
            added = total + values[:, slot]
        # Two bf16 values summed in float32 and then rounded to bf16 are rounded once in effect: see `order_set.add`.
        added = added.bfloat16().float() if rule is Combine.ON_ARRIVAL else added
        total = torch.where(live[:, slot], added, total)
    return canonical_nan(total.bfloat16())


def _sum_of_weighted(
    values: torch.Tensor, groups: torch.Tensor, weights: torch.Tensor, wire: ActivationQuant | None
) -> torch.Tensor:
    """float32 `[T, hidden]`, the sum over groups ascending of the sums over their slots, with float32 subnormals zero.

    values: `[T, top_k, hidden]`; groups: `[T, top_k]`, negative: masked. What travels is a group's sum by `wire`, bf16
    if None. A scale of 0 marks a slot that nobody wrote, so that such a block adds nothing.
    """
    values, weights = flush(values), flush(weights)
    total = torch.zeros_like(values[:, 0])
    for group in groups[groups >= 0].unique().tolist():
        mine = (groups == group)[..., None]
        part = torch.zeros_like(total)
        for slot in range(values.shape[1]):
            added = flush(fma(weights[:, slot, None], values[:, slot], part))
            part = torch.where(mine[:, slot], added, part)
        if wire is None:
            sent, scale = flush(part.bfloat16().float()), torch.ones_like(total)
        else:
            quantized = quantize_activation(part, wire)
            sent = decode(quantized.codes, wire.element)
            scale = quantized.scales.repeat_interleave(sent.shape[1] // quantized.scales.shape[1], 1)
        counts = mine.any(1) & (scale != 0)
        total = torch.where(counts, flush(fma(sent, scale, total)), total)
    return total


def _sum_of_groups(
    values: torch.Tensor, topk_ids: torch.Tensor, local_experts: int, wire: Format | None
) -> torch.Tensor:
    """float32 `[T, hidden]`. Sums whose block maximum is below about 1e-27 the kernel damps before it casts them to an
    FP8 wire; that is not modelled."""
    owner = torch.where(topk_ids >= 0, topk_ids // local_experts, -1)
    total = torch.zeros_like(values[:, 0])
    for rank in owner[owner >= 0].unique().tolist():
        mine = (owner == rank)[..., None]
        part = torch.zeros_like(total)
        for slot in range(values.shape[1]):
            part = torch.where(mine[:, slot], part + values[:, slot], part)
        if wire is None:
            sent = part.bfloat16().float()
        else:
            sent = dequantize_mx(quantize_mx(part, wire, ScaleRule.ROUND_UP), wire)
        total = torch.where(mine.any(1), total + sent, total)
    return total
