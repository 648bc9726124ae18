"""Where experts live: from the logical experts that a router names to the slots that the ranks hold.

A physical expert is a slot on a rank; its id counts slots over the ranks in order, which is what the kernels take as
`topk_ids`. A logical expert has one slot or, under expert-parallel load balancing (EPLB), several, its replicas. Where
an expert lives changes no bit of the layer's output, except where a combine adds by rank (`Combine.GROUPED`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import torch

#: 2^32 divided by the golden ratio: Knuth's multiplicative hash.
_KNUTH = 2654435769


class Replica(Enum):
    """Which replica of its expert a route takes, out of `count`. SGLang's "dynamic" draws one at random: not here."""

    #: vLLM 0.33.0, `fused_moe/router/base_router.py`: token is the row in its rank's batch, padding included. Every
    #: slot of a token agrees.
    HASH = "(token * 2654435769 mod 2^32) mod count"
    #: vLLM before the hash, `eplb_map_to_physical_and_record`: position is token * top_k + slot.
    POSITION = "position mod count"
    FIRST = "always the one with the lowest physical id"


@dataclass(frozen=True)
class Placement:
    """The slots of every rank, in order: for each the logical expert that it holds.

    Raises ValueError unless every logical expert, 0 to num_experts - 1, has a slot.
    """

    num_experts: int  #: logical
    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.num_experts < 1 or not self.ranks:
            raise ValueError(
                f"num_experts and the number of ranks must be positive, got {self.num_experts} and {len(self.ranks)}"
            )
        held = [expert for rank in self.ranks for expert in rank]
        outside = sorted({expert for expert in held if not 0 <= expert < self.num_experts})
        if outside:
            raise ValueError(f"ranks must hold logical experts 0 to {self.num_experts - 1}, got {outside}")
        missing = sorted(set(range(self.num_experts)) - set(held))
        if missing:
            raise ValueError(f"ranks must hold every logical expert, {missing} have no slot")

    @property
    def ep_size(self) -> int:
        return len(self.ranks)

    @property
    def num_physical_experts(self) -> int:
        return sum(map(len, self.ranks))

    @property
    def physical_to_logical(self) -> torch.Tensor:
        """`[physical]` int64."""
        return torch.tensor([expert for rank in self.ranks for expert in rank])

    @property
    def first_slots(self) -> list[int]:
        """The physical id of each rank's first slot, and behind them the number of slots: ep_size + 1 numbers."""
        return list(accumulate(map(len, self.ranks), initial=0))

    @property
    def replica_counts(self) -> torch.Tensor:
        """`[num_experts]` int64, at least 1."""
        return torch.bincount(self.physical_to_logical, minlength=self.num_experts)

    @property
    def logical_to_physical(self) -> torch.Tensor:
        """`[num_experts, most replicas]` int64: each expert's slots, ascending, then -1."""
        counts = self.replica_counts
        table = torch.full((self.num_experts, int(counts.max())), -1)
        # Sorted by expert, slots ascending within: exactly the places of the table that are in use, row by row.
        table[torch.arange(table.shape[1]) < counts[:, None]] = torch.argsort(self.physical_to_logical, stable=True)
        return table

    def to_physical(self, topk_ids: torch.Tensor, replica: Replica = Replica.HASH) -> torch.Tensor:
        """The slots that one rank's routes go to, int64, of topk_ids' shape `[tokens, top_k]`.

        topk_ids: logical. Ids that name no expert, negative or num_experts and above (both are in use as "masked"),
        become -1, as in vLLM's kernel.
        """
        named = (topk_ids >= 0) & (topk_ids < self.num_experts)
        expert = torch.where(named, topk_ids, 0).long()
        place = torch.arange(topk_ids.numel()).reshape(topk_ids.shape)
        if replica is Replica.HASH:
            place = (place // max(topk_ids.shape[1], 1)) * _KNUTH & 0xFFFFFFFF
        elif replica is Replica.FIRST:
            place = torch.zeros_like(place)
        return torch.where(named, self.logical_to_physical[expert, place % self.replica_counts[expert]], -1)

    def local_ids(self, physical: torch.Tensor, rank: int) -> torch.Tensor:
        """Ids as that rank's GEMMs index them, -1 where the slot is another rank's or the id negative."""
        first, end = self.first_slots[rank : rank + 2]
        return torch.where((physical >= first) & (physical < end), physical - first, -1)

    def expert_map(self, rank: int) -> torch.Tensor:
        """`[num_experts]` int32: the local id of each logical expert, -1 for those of other ranks (vLLM's expert_map).

        Raises ValueError with replicas: then the map is over physical ids, see `local_ids`.
        """
        if self.num_physical_experts != self.num_experts:
            raise ValueError("expert_map needs a placement without replicas; use to_physical, then local_ids")
        return self.local_ids(self.logical_to_physical[:, 0], rank).int()


def linear(num_experts: int, ep_size: int) -> Placement:
    """Contiguous experts; where they do not divide, the first ranks hold one more (vLLM's `determine_expert_map`)."""
    _check_sizes(num_experts, ep_size)
    base, more = divmod(num_experts, ep_size)
    first = [rank * base + min(rank, more) for rank in range(ep_size + 1)]
    return Placement(num_experts, tuple(tuple(range(*first[rank : rank + 2])) for rank in range(ep_size)))


def round_robin(num_experts: int, ep_size: int) -> Placement:
    """Expert e on rank e mod ep_size (vLLM's `determine_expert_map`)."""
    _check_sizes(num_experts, ep_size)
    return Placement(num_experts, tuple(tuple(range(rank, num_experts, ep_size)) for rank in range(ep_size)))


def eplb(physical_to_logical: Sequence[int], ep_size: int, num_experts: int) -> Placement:
    """One layer's row of an EPLB `physical_to_logical_map`: slot -> logical expert, an equal share for each rank."""
    slots = [int(expert) for expert in physical_to_logical]
    if ep_size < 1 or len(slots) % ep_size:
        raise ValueError(f"physical_to_logical must have a multiple of ep_size = {ep_size} slots, got {len(slots)}")
    local = len(slots) // ep_size
    return Placement(num_experts, tuple(tuple(slots[rank * local : (rank + 1) * local]) for rank in range(ep_size)))


def redundant(num_experts: int, num_redundant: int, ep_size: int) -> Placement:
    """EPLB's first arrangement: every expert once, then the lowest again (vLLM's `EplbState`)."""
    slots = [*range(num_experts), *(i % num_experts for i in range(num_redundant))]
    return eplb(slots, ep_size, num_experts)


def _check_sizes(num_experts: int, ep_size: int) -> None:
    if not 1 <= ep_size <= num_experts:
        raise ValueError(f"ep_size must be 1 to num_experts = {num_experts}, got {ep_size}")
