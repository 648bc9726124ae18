"""Expert-parallel load balancing as the kernel sees it: experts change places in memory, in place."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def permute_experts(
    views: Sequence[torch.Tensor], order: Sequence[int], group: dist.ProcessGroup | None = None
) -> None:
    """Physical expert p becomes what physical expert order[p] was, in every view, on every rank.

    views: what `expert_weight_views` returns, `[E_local, ...]` each; order: E physical experts, with or without
    repetitions. Written in place, so that a kernel, or a captured graph, that reads this memory goes on with it. With
    group, collective over its ranks; rank r holds [r * E_local, (r + 1) * E_local). Routes follow by
    `permute_topk_ids`.

    Raises ValueError for an order that does not fit, before anything moves.
    """
    ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
    local = views[0].shape[0]
    experts = ranks * local
    if len(order) != experts or not all(0 <= source < experts for source in order):
        raise ValueError(f"order must hold {experts} physical experts, 0 to {experts - 1}, got {list(order)}")
    if any(len(view) != local for view in views):
        raise ValueError(f"views must have {local} experts each, got {[len(view) for view in views]}")
    here = range(rank * local, (rank + 1) * local)
    sent = [p for p in range(experts) if order[p] in here]  # ascending, so by receiver
    to = [sum(p // local == r for p in sent) for r in range(ranks)]
    came = sorted(here, key=lambda p: (order[p] // local, p))  # as they arrive: by sender, then ascending
    from_ = [sum(order[p] // local == r for p in here) for r in range(ranks)]
    for view in views:
        moved = view[torch.tensor([order[p] - here.start for p in sent], device=view.device, dtype=torch.long)]
        if group is not None:
            flat = moved.reshape(len(sent), -1).view(torch.uint8)
            arrived = flat.new_empty(local, flat.shape[1])
            dist.all_to_all_single(arrived, flat, from_, to, group=group)
            moved = arrived.view(view.dtype).reshape(view.shape)
        view[torch.tensor([p - here.start for p in came], device=view.device)] = moved


def permute_topk_ids(topk_ids: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Ids of the same experts after `permute_experts`; negative ones, masked, stay. order: every expert once."""
    places = torch.tensor(list(order), device=topk_ids.device).argsort().to(topk_ids.dtype)
    return torch.where(topk_ids < 0, topk_ids, places[topk_ids.clamp(min=0).long()])
