"""How far the right side may be from the left, for every tensor, and why.

A ladder; the strongest rung that a side's claim allows is the one asserted:

    bits    the side claims the scheme's own arithmetic, or the step is integer and IEEE operations on equal input
    order   bits, in any order of the routes' bf16 additions (`enable_in_kernel_fc2_reduce`)
    bound   the side claims FLOAT32: an interval for each element, derived from the scheme and the data (`intervals.py`)

Distribution metrics (rel_l2, SQNR, calc_diff) are reported and never asserted: a wrong alpha hides behind a cosine, one
wrong row behind a norm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from fp4ep.reference.scheme import Combine

from .intervals import Interval, layer_intervals
from .metrics import bits_differ
from .order_set import reachable
from .run import REFERENCE, Claim, Run


class Rung(Enum):
    BITS = "bits"
    ORDER = "order"
    BOUND = "bound"


@dataclass(frozen=True)
class Verdict:
    """outside: bool, the elements that are not allowed; allowed: how many may differ from the left side; headroom: the
    largest share of its interval that an element uses, None where no element has one."""

    outside: torch.Tensor
    allowed: int = 0
    headroom: float | None = None


#: (rank, left, right, rows of the rank's table that both hold or None for all) -> Verdict
Judge = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor | None], Verdict]


@dataclass(frozen=True)
class Allowance:
    rung: Rung
    because: str
    judge: Judge
    intervals: Mapping[int, Interval] | None = None  #: of each rank, in the order of its rows; BOUND only


def _every_bit(rank: int, left: torch.Tensor, right: torch.Tensor, rows: torch.Tensor | None) -> Verdict:
    return Verdict(bits_differ(left, right))


def _in_some_order(run: Run) -> Judge:
    """run: the side that shows its terms. NaN is in order wherever some order gives one."""
    terms = run.stages("combine")

    def judge(rank: int, left: torch.Tensor, right: torch.Tensor, rows: torch.Tensor | None) -> Verdict:
        ids = run.layer.inputs[rank].topk_ids
        several = int(((ids >= 0).sum(1) > 2).sum())  # two additions commute
        return Verdict(~reachable(right, terms[rank]["terms"], ids), several * left.shape[1])

    return judge


def _within(intervals: Mapping[int, Interval]) -> Judge:
    def judge(rank: int, left: torch.Tensor, right: torch.Tensor, rows: torch.Tensor | None) -> Verdict:
        interval = intervals[rank] if rows is None else intervals[rank][rows]
        low, high, value = interval.low, interval.high, right.double()
        claimed = ~torch.isnan(low)
        inside = (value >= low) & (value <= high)
        free = (low != high) | (left.double() != low)
        used = ((value - interval.center).abs() / interval.radius)[claimed & (low != high)]
        headroom = float(used.max()) if used.numel() else None
        return Verdict(claimed & ~inside, int(free.sum()), headroom)

    return judge


_SUM = "float32 sums of K products in any order: within gamma_(K+8) * sum |x||w| of the exact value"
_BECAUSE = {
    ("fc1", "gate"): _SUM,
    ("fc1", "up"): _SUM,
    ("activation", "values"): "SwiGLU over the intervals of gate and up, and (10 + 2|gate|) 2^-24 for its roundings",
    ("requantize", "values"): "a code may flip only where its value before rounding is within its error of a boundary",
    ("requantize", "scales"): "the scale of the block's amax, whose interval is known",
    ("fc2", "values"): f"codes that may flip, times |w|; {_SUM}; bf16 of both ends",
    ("combine", "terms"): "as fc2: rows move, nothing rounds",
    ("combine", "values"): "the scheme's own sum on both ends of every term",
}


def check_claims(left: str, left_claim: Claim, right_claim: Claim) -> None:
    """Raises ValueError when the left side does not claim bits, and when the right claims FLOAT32 and the left is not
    the reference: errors are bounded around exact values, which say nothing about a third implementation."""
    if left_claim is not Claim.BITS:
        raise ValueError(f"left must claim bits, got {left}, which claims {left_claim.value}")
    if right_claim is Claim.FLOAT32 and left != REFERENCE:
        raise ValueError(f"left must be the reference when the right side claims float32, got {left}")


def derive(left: Run, right: Run) -> Callable[[str, str], Allowance]:
    """(stage, tensor) -> what the right side is allowed there.

    Raises ValueError as `check_claims`, and when the scheme's combine is not deterministic and neither side shows its
    terms.
    """
    check_claims(left.side, left.claim, right.claim)
    if right.claim is Claim.BITS:
        same = Allowance(Rung.BITS, "both sides claim the scheme's own arithmetic", _every_bit)
        if left.scheme.combine is not Combine.ON_ARRIVAL:
            return lambda stage, tensor: same
        run = next((run for run in (right, left) if "terms" in run.stages("combine").get(0, {})), None)
        if run is None:
            raise ValueError("left or right must show its combine terms: routes add in order of arrival")
        summed = Allowance(Rung.ORDER, "the routes' terms, added in bf16 in some order", _in_some_order(run))
        return lambda stage, tensor: summed if (stage, tensor) == ("combine", "values") else same
    intervals = layer_intervals(left.layer, left.stages("dispatch"))

    def allowance(stage: str, tensor: str) -> Allowance:
        found = intervals.get((stage, tensor))
        if found is None:
            return Allowance(Rung.BITS, "equal input, and no operation that the claim leaves open", _every_bit)
        return Allowance(Rung.BOUND, _BECAUSE[stage, tensor], _within(found), found)

    return allowance
