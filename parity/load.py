"""How the routes of a layer fall on experts and EP ranks: counts, skew, and what of the capacity they use."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .problem import Layer


@dataclass(frozen=True)
class Spread:
    """Counts of several takers (experts, or ranks), and how far they are from even ones."""

    counts: tuple[int, ...]

    @property
    def mean(self) -> float:
        return sum(self.counts) / len(self.counts)

    @property
    def busiest(self) -> int:
        """The taker with the largest count; the lowest of several."""
        return self.counts.index(max(self.counts))

    @property
    def skew(self) -> float:
        """Largest count / mean: from 1 (all alike, also all 0) to the number of takers (one has everything)."""
        return max(self.counts) / self.mean if any(self.counts) else 1.0

    @property
    def variation(self) -> float:
        """Coefficient of variation: standard deviation (over all takers, not a sample) / mean; 0 where all are 0."""
        mean = self.mean
        return math.sqrt(sum((n - mean) ** 2 for n in self.counts) / len(self.counts)) / mean if mean else 0.0

    @property
    def idle(self) -> tuple[int, ...]:
        """The takers that get nothing, ascending."""
        return tuple(taker for taker, n in enumerate(self.counts) if not n)

    def as_json(self) -> dict[str, Any]:
        names = ("mean", "busiest", "skew", "variation", "idle")
        return {"counts": list(self.counts)} | {name: _plain(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class Load:
    """What `load_of` counts. A route is a slot that is not masked: one row that travels to the expert's rank.

    An expert that a token names twice gets two routes; the rank gets one token. Expert e of E lives on rank
    e // (E / ep_size).
    """

    num_experts: int
    top_k: int
    capacity: int  #: max_tokens_per_rank
    tokens: tuple[int, ...]  #: rows of each rank, those included that are masked altogether
    routes_per_expert: tuple[int, ...]
    routes_between: tuple[tuple[int, ...], ...]  #: [sender][receiver]
    tokens_between: tuple[tuple[int, ...], ...]  #: [sender][receiver]: tokens with at least one route there
    masked_slots: int
    duplicate_slots: int  #: whose expert an earlier slot of the token names

    @property
    def ep_size(self) -> int:
        return len(self.tokens)

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.ep_size

    @property
    def routes(self) -> int:
        return sum(self.routes_per_expert)

    @property
    def experts(self) -> Spread:
        """Routes by expert."""
        return Spread(self.routes_per_expert)

    @property
    def ranks(self) -> Spread:
        """Routes by receiving rank."""
        return Spread(_columns(self.routes_between))

    @property
    def routes_sent(self) -> tuple[int, ...]:
        """By sending rank, to itself included."""
        return tuple(map(sum, self.routes_between))

    @property
    def tokens_received(self) -> tuple[int, ...]:
        """Distinct tokens by receiving rank, its own included."""
        return _columns(self.tokens_between)

    @property
    def capacity_used(self) -> tuple[float, ...]:
        """By rank, its tokens / capacity; 0 where the capacity is 0."""
        return tuple(count / self.capacity if self.capacity else 0.0 for count in self.tokens)

    @property
    def worst_case_routes(self) -> int:
        """The most routes that a rank receives while no token names an expert twice: it is what FlashInfer sizes its
        receive buffers by, before it pads each expert's rows to a tile.

        With duplicates a token may send top_k routes to a rank of fewer experts, and `receive_used` may exceed 1.
        Source: FlashInfer 0.7.4, kernel_src `src/config.py` and `token_comm.py`, worst case of the pool.
        """
        return self.ep_size * self.capacity * min(self.top_k, self.local_experts)

    @property
    def receive_used(self) -> tuple[float, ...]:
        """By rank, its received routes / `worst_case_routes`; 0 where that is 0."""
        worst = self.worst_case_routes
        return tuple(count / worst if worst else 0.0 for count in self.ranks.counts)

    def __str__(self) -> str:
        """In one line: how much, where most of it goes, and what does not travel."""
        tokens = _count(sum(self.tokens), "token")
        found = [f"{_count(self.routes, 'route')} of {tokens}"]
        if self.routes:
            found.append(f"busiest expert {_busiest(self.experts)}")
            found += [f"busiest rank {_busiest(self.ranks)}"] * (self.ep_size > 1)
            idle = (("expert", self.experts.idle), ("rank", self.ranks.idle))
            if words := " and ".join(_count(len(takers), noun) for noun, takers in idle if takers):
                found.append(f"{words} without a route")
        found += [f"{_count(self.masked_slots, 'slot')} masked"] * bool(self.masked_slots)
        found += [f"{_count(self.duplicate_slots, 'slot')} with an expert named before"] * bool(self.duplicate_slots)
        return ", ".join(found)

    def as_json(self) -> dict[str, Any]:
        """The fields, and what follows from them; `experts` and `ranks` are objects with a `Spread`'s numbers."""
        names = ("routes", "routes_sent", "tokens_received", "capacity_used", "worst_case_routes", "receive_used")
        spreads = {"experts": self.experts.as_json(), "ranks": self.ranks.as_json()}
        known = {name: value for name, value in asdict(self).items() if name != "routes_per_expert"}
        return {n: _plain(v) for n, v in known.items()} | spreads | {n: _plain(getattr(self, n)) for n in names}


def load_of(topk_ids: Sequence[torch.Tensor], num_experts: int, ep_size: int, capacity: int | None = None) -> Load:
    """Count the load of one layer.

    topk_ids: of each rank `[T, top_k]`, int64 or int32, global ids of experts; negative: masked. T may be 0 anywhere.
    capacity: max_tokens_per_rank; None: the least that holds every rank's tokens.

    Raises ValueError where these are not so, an id is not below num_experts, ep_size does not divide num_experts, or a
    rank has more tokens than capacity.
    """
    ids = _checked(topk_ids, num_experts, ep_size)
    tokens = tuple(map(len, ids))
    if capacity is None:
        capacity = max(tokens)
    elif capacity < max(tokens):
        raise ValueError(f"capacity must be at least the {max(tokens)} tokens of a rank, got {capacity}")
    local = num_experts // ep_size
    per_expert = torch.stack([torch.bincount(x[x >= 0], minlength=num_experts) for x in ids])
    reached = [_reached(x, num_experts) for x in ids]
    routes = int(per_expert.sum())
    return Load(
        num_experts=num_experts,
        top_k=ids[0].shape[1],
        capacity=capacity,
        tokens=tokens,
        routes_per_expert=tuple(per_expert.sum(0).tolist()),
        routes_between=_table(per_expert.view(ep_size, ep_size, local).sum(2)),
        tokens_between=_table(torch.stack([x.view(-1, ep_size, local).any(2).sum(0) for x in reached])),
        masked_slots=sum(x.numel() for x in ids) - routes,
        duplicate_slots=routes - sum(int(x.sum()) for x in reached),
    )


def load_of_layer(layer: Layer, capacity: int | None = None) -> Load:
    """`load_of` the tokens of a layer."""
    return load_of([x.topk_ids for x in layer.inputs], layer.weights.num_experts, layer.ep_size, capacity)


def _checked(topk_ids: Sequence[torch.Tensor], num_experts: int, ep_size: int) -> list[torch.Tensor]:
    """The ids as int64."""
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    if ep_size < 1 or num_experts % ep_size:
        raise ValueError(f"ep_size must be at least 1 and divide the {num_experts} experts, got {ep_size}")
    if isinstance(topk_ids, torch.Tensor) or len(topk_ids) != ep_size:
        raise ValueError(f"topk_ids must be a sequence of one tensor for each of {ep_size} ranks, got {len(topk_ids)}")
    for rank, ids in enumerate(topk_ids):
        fits = ids.ndim == 2 and ids.dtype in (torch.int64, torch.int32) and ids.shape[1:] == topk_ids[0].shape[1:]
        if not fits or not ids.shape[1]:
            wanted = "int64 or int32 [tokens, top_k] with one top_k >= 1 for all ranks"
            raise ValueError(f"topk_ids (rank {rank}) must be {wanted}, got {ids.dtype} {list(ids.shape)}")
        if ids.numel() and int(ids.max()) >= num_experts:
            raise ValueError(f"topk_ids (rank {rank}) must be below num_experts = {num_experts}, got {int(ids.max())}")
    return [ids.cpu().long() for ids in topk_ids]


def _reached(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """bool `[T, num_experts]`: which experts a token names at all."""
    found = torch.zeros(len(ids), num_experts + 1, dtype=torch.bool)
    found.scatter_(1, torch.where(ids < 0, num_experts, ids), True)
    return found[:, :num_experts]


def _table(counts: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, counts.tolist()))


def _columns(table: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*table, strict=True)))


def _plain(value: Any) -> Any:
    """Lists in place of tuples, as JSON gives them back."""
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def _busiest(spread: Spread) -> str:
    return f"{spread.busiest} with {max(spread.counts):,} ({spread.skew:.3g}x the mean)"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
