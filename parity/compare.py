"""Two runs of one layer, stage by stage: what differs, where first, and whether the right side keeps its promise."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from . import metrics
from .run import Run
from .tolerance import Allowance, derive

#: The stages in order. Those between dispatch and combine hold one row per route.
STAGES = ("stage", "dispatch", "fc1", "activation", "requantize", "fc2", "combine")
ROUTE_STAGES = STAGES[1:-1]
_KEY = ("expert", "source_rank", "token", "slot")


class Holds(Enum):
    """The strongest rung of the ladder that the data stand on."""

    BITS = "bits"  #: every bit equal
    ULPS = "ulps"  #: within the allowance, no value more than 4 representable values apart
    BOUND = "bound"  #: within the allowance
    NONE = "outside"  #: outside the allowance: distribution metrics only


_FEW_ULPS = 4


@dataclass(frozen=True)
class Difference:
    """One element, or one route that only one side has (tensor "routes", no channel)."""

    stage: str
    tensor: str
    rank: int
    left: float | str
    right: float | str
    left_code: str = ""
    right_code: str = ""
    ulps: int | None = None
    expert: int | None = None
    source_rank: int | None = None
    token: int | None = None
    slot: int | None = None
    channel: int | None = None
    block: int | None = None  #: of the stage's own scale along the channels

    def __str__(self) -> str:
        names = ("rank", "expert", "source_rank", "token", "slot", "channel", "block")
        where = ", ".join(f"{n} {getattr(self, n)}" for n in names if getattr(self, n) is not None)
        codes = [f" ({code})" if code else "" for code in (self.left_code, self.right_code)]
        apart = (
            ""
            if self.ulps is None
            else ", one of them NaN" * (self.ulps >= metrics.NAN_ULPS) or (f", {self.ulps} ulp apart")
        )
        return f"{self.stage}.{self.tensor} at {where}: {self.left}{codes[0]} against {self.right}{codes[1]}{apart}"


@dataclass(frozen=True)
class TensorComparison:
    """One tensor of one stage over all ranks."""

    stage: str
    tensor: str
    elements: int
    differing: int
    outside: int  #: elements that the allowance forbids
    allowed: int  #: elements that may differ from the left side
    max_ulps: int
    rel_l2: float
    sqnr_db: float
    calc_diff: float
    headroom: float | None  #: largest share of its allowance that an element uses; None: no element has one
    allowance: Allowance
    per_rank: dict[int, int] = field(default_factory=dict)  #: differing elements by rank
    per_expert: dict[int, int] = field(default_factory=dict)  #: by expert, where rows are routes

    @property
    def holds(self) -> Holds:
        if self.outside:
            return Holds.NONE
        if self.differing == 0:
            return Holds.BITS
        return Holds.ULPS if self.max_ulps <= _FEW_ULPS else Holds.BOUND


@dataclass(frozen=True)
class Comparison:
    left: Run
    right: Run
    tensors: tuple[TensorComparison, ...]
    missing_routes: int  #: on the left only
    extra_routes: int  #: on the right only
    first: Difference | None  #: the first difference of all
    first_outside: Difference | None  #: the first that the tolerance forbids

    @property
    def passed(self) -> bool:
        return self.first_outside is None


@dataclass(frozen=True)
class Rows:
    """Which rows of a rank's route stages go together. left, right: `[common]` indices of equal length."""

    left: torch.Tensor
    right: torch.Tensor
    only_left: torch.Tensor
    only_right: torch.Tensor


def match_routes(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> Rows:
    """Pair the dispatch rows of two sides by (expert, source rank, token, slot)."""
    places = [
        {key: row for row, key in enumerate(zip(*(side[name].tolist() for name in _KEY), strict=True))}
        for side in (left, right)
    ]
    common = [key for key in places[0] if key in places[1]]
    index = [torch.tensor([place[key] for key in common], dtype=torch.int64) for place in places]
    only = [
        torch.tensor([row for key, row in mine.items() if key not in other], dtype=torch.int64)
        for mine, other in (places, reversed(places))
    ]
    return Rows(*index, *only)


def compare(left: Run, right: Run) -> Comparison:
    """Compare every tensor that both sides show. The left side is the expectation.

    Raises ValueError when the two are not of one layer (scheme, ranks, shapes), when they show no stage in common, or
    when the right side claims less than bits and the left is not the reference.
    """
    _check(left, right)
    allowance = derive(left, right)
    rows = {
        rank: match_routes(tensors, right.stages("dispatch")[rank])
        for rank, tensors in left.stages("dispatch").items()
        if right.stages("dispatch")
    }
    tensors, first, outside = [], None, None
    for stage in STAGES:
        if stage == "dispatch":
            lost = next(_unmatched(left, right, rows), None)
            first, outside = first or lost, outside or lost
        for name in _common_tensors(left, right, stage):
            found, differences = _compare_tensor(left, right, stage, name, rows, allowance(stage, name))
            tensors.append(found)
            first, outside = first or differences[0], outside or differences[1]
    missing, extra = (sum(len(getattr(r, n)) for r in rows.values()) for n in ("only_left", "only_right"))
    return Comparison(left, right, tuple(tensors), missing, extra, first, outside)


def _check(left: Run, right: Run) -> None:
    if (left.scheme.name, left.layer.ep_size) != (right.scheme.name, right.layer.ep_size):
        raise ValueError(
            f"left and right must be of one scheme and ep_size, got {left.scheme} over {left.layer.ep_size} ranks and "
            f"{right.scheme} over {right.layer.ep_size}"
        )
    for ours, theirs in zip(left.layer.inputs, right.layer.inputs, strict=True):
        for name in ("hidden_states", "topk_ids", "topk_weights"):
            a, b = getattr(ours, name), getattr(theirs, name)
            if a.shape != b.shape or a.dtype != b.dtype or bool(metrics.bits_differ(a, b).any()):
                raise ValueError(f"left and right must be given the same tokens, got other {name}")
    if not any(_common_tensors(left, right, stage) for stage in STAGES):
        raise ValueError("left and right must show a stage in common, got none")


def _common_tensors(left: Run, right: Run, stage: str) -> list[str]:
    """Names in the left side's order; the keys of dispatch rows are what rows are matched by."""
    ours, theirs = left.stages(stage), right.stages(stage)
    if not ours or not theirs or (stage in ROUTE_STAGES and not (left.stages("dispatch") and right.stages("dispatch"))):
        return []
    return [name for name in ours[min(ours)] if name in theirs[min(theirs)] and name not in _KEY]


def _unmatched(left: Run, right: Run, rows: dict[int, Rows]) -> Iterator[Difference]:
    """Routes that only one side has."""
    for rank, match in rows.items():
        for side, run, index in (("left", left, match.only_left), ("right", right, match.only_right)):
            table = run.stages("dispatch")[rank]
            for row in index.tolist():
                here, there = ("present", "absent") if side == "left" else ("absent", "present")
                where: dict[str, Any] = {name: int(table[name][row]) for name in _KEY}
                yield replace(Difference("dispatch", "routes", rank, here, there), **where)


def _compare_tensor(
    left: Run, right: Run, stage: str, name: str, rows: dict[int, Rows], allowance: Allowance
) -> tuple[TensorComparison, tuple[Difference | None, Difference | None]]:
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    per_rank: dict[int, int] = {}
    per_expert: dict[int, int] = {}
    first, outside, allowed, forbidden, headroom = None, None, 0, 0, None
    for rank, ours in left.stages(stage).items():
        a, b = ours[name], right.stages(stage)[rank][name]
        keys = None
        if stage in ROUTE_STAGES:
            a, b = a[rows[rank].left], b[rows[rank].right]
            keys = {n: left.stages("dispatch")[rank][n][rows[rank].left] for n in _KEY}
        if a.shape != b.shape or a.dtype != b.dtype:
            wanted, got = (f"{x.dtype} {list(x.shape)}" for x in (a, b))
            raise ValueError(f"right's {stage}.{name} (rank {rank}) must be {wanted} as on the left, got {got}")
        differs = metrics.bits_differ(a, b)
        verdict = allowance.judge(rank, a, b, rows[rank].left if keys else None)
        per_rank[rank] = int(differs.sum())
        if keys:
            rowwise = differs.sum(1) if differs.ndim > 1 else differs.long()
            for expert in keys["expert"].unique().tolist():
                per_expert[expert] = per_expert.get(expert, 0) + int(rowwise[keys["expert"] == expert].sum())
        allowed, forbidden = allowed + verdict.allowed, forbidden + int(verdict.outside.sum())
        if verdict.headroom is not None:
            headroom = max(headroom or 0.0, verdict.headroom)
        blocks = _blocks(left, stage, rank)
        first = first or _first(stage, name, rank, a, b, differs, keys, blocks)
        outside = outside or _first(stage, name, rank, a, b, verdict.outside, keys, blocks)
        pairs.append((a, b))
    a, b = (torch.cat([pair[side].flatten() for pair in pairs]) for side in (0, 1))
    values = (a.float(), b.float())
    found = TensorComparison(
        stage=stage,
        tensor=name,
        elements=a.numel(),
        differing=sum(per_rank.values()),
        outside=forbidden,
        allowed=allowed,
        max_ulps=int(metrics.ulp_distance(a, b).max()) if a.numel() else 0,
        rel_l2=metrics.rel_l2(*values),
        sqnr_db=metrics.sqnr_db(*values),
        calc_diff=metrics.calc_diff(*values),
        headroom=headroom,
        allowance=allowance,
        per_rank=per_rank,
        per_expert=per_expert,
    )
    return found, (first, outside)


def _blocks(run: Run, stage: str, rank: int) -> int | None:
    """Channels that share a scale in that stage."""
    tensors = run.stages(stage)[rank]
    if "scales" not in tensors or not tensors["scales"].shape[1]:
        return None
    return tensors["values"].shape[1] // tensors["scales"].shape[1]


def _first(stage, name, rank, a, b, where, keys, block) -> Difference | None:
    if not bool(where.any()):
        return None
    place = tuple(int(i) for i in where.nonzero()[0])
    row, channel = place[0], place[-1] if len(place) > 1 else None
    at: dict[str, Any] = {n: int(column[row]) for n, column in keys.items()} if keys else {"token": row}
    if len(place) == 3:  # terms: token, slot, channel
        at["slot"] = place[1]
    if channel is not None and block is not None:
        at["block"] = channel if name == "scales" else channel // block
    if name != "scales" and channel is not None:
        at["channel"] = channel
    x, y = a[place], b[place]
    codes = (metrics.hex_code(x), metrics.hex_code(y))
    ulps = int(metrics.ulp_distance(x.reshape(1), y.reshape(1)))
    return replace(Difference(stage, name, rank, float(x), float(y), *codes, ulps), **at)
