"""A comparison in words and numbers: on a terminal, and as JSON. `html.py` shows the same words on a page."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from fp4ep.reference.scheme import Evidence
from fp4ep.reference.schemes import options_of

from .compare import Comparison, Difference, Holds, TensorComparison
from .load import load_of_layer
from .metrics import NAN_ULPS
from .peers import PeerTolerance, peers_for
from .run import Run
from .tolerance import Rung

FORMAT = "fp4ep.comparison"
VERSION = 1
OUTPUT = ("combine", "values")
CAVEAT = "Their inputs and references differ from test to test: the numbers show the order of magnitude, no ranking."


class Diagnosed(Protocol):
    """What a known mistake would have left behind, and was found."""

    @property
    def kind(self) -> Any: ...  #: a word, or a member of an enum whose value is one
    @property
    def says(self) -> str: ...


class Mood(Enum):
    EQUAL = "equal"
    WITHIN = "within"
    OUTSIDE = "outside"
    EMPTY = "empty"  #: no elements: nothing was shown


@dataclass(frozen=True)
class Verdict:
    mood: Mood
    headline: str
    detail: str

    def __str__(self) -> str:
        return f"{self.headline}. {self.detail}"


@dataclass(frozen=True)
class Beside:
    """Another project's tolerance beside ours, on the output. None where the one or the other has no bound per element.

    wider: median over the elements of its bound / the radius of ours (infinite where ours is bits); accepts: how many
    of the elements that ours forbids are within its bound.
    """

    peer: PeerTolerance
    wider: float | None
    accepts: int | None


# --- words -------------------------------------------------------------------------------------------------------


def name_of(found: TensorComparison | Difference) -> str:
    return f"{found.stage}.{found.tensor}"


def sides(comparison: Comparison) -> tuple[str, str]:
    """Two words that tell the sides apart."""
    names = comparison.left.side, comparison.right.side
    return names if names[0] != names[1] else ("left", "right")


_HEADLINES = {
    Rung.BITS: "Bits differ, first in {}",
    Rung.ORDER: "No order of addition gives {}",
    Rung.BOUND: "Outside the bound, first in {}",
}


def verdict(comparison: Comparison) -> Verdict:
    left, right = sides(comparison)
    tensors, ranks = comparison.tensors, comparison.left.layer.ep_size
    elements, differing = sum(t.elements for t in tensors), sum(t.differing for t in tensors)
    shown = f"{_count(elements, 'element')} in {_count(len(tensors), 'tensor')} on {_count(ranks, 'rank')}"
    lost = comparison.missing_routes + comparison.extra_routes
    first = comparison.first_outside
    if first and first.tensor == "routes":
        only = ((comparison.missing_routes, left), (comparison.extra_routes, right))
        words = " and ".join(f"{_count(n, 'row')} in {side} only" for n, side in only if n)
        return Verdict(Mood.OUTSIDE, "Routes are lost or added at dispatch", f"{words}.")
    if first:
        found = next(t for t in tensors if name_of(t) == name_of(first))
        more = sum(t.outside > 0 for t in tensors) - 1
        detail = f"Outside the tolerance: {found.outside:,} of its {_count(found.elements, 'element')}"
        detail += f", and elements of {_count(more, 'other tensor')}." if more else "."
        return Verdict(Mood.OUTSIDE, _HEADLINES[found.allowance.rung].format(name_of(first)), detail)
    if not elements and not lost:
        return Verdict(Mood.EMPTY, "Nothing to compare", f"No rank has a token: {shown}.")
    if not differing:
        what = "Every bit equal" if len(tensors) > 1 else f"Every bit of {name_of(tensors[0])} equal"
        return Verdict(Mood.EQUAL, what, f"{shown}: {right} gives the bits of {left}.")
    return Verdict(Mood.WITHIN, "Within the tolerance", f"{differing:,} of {shown} differ, all where they may.")


def sentence(difference: Difference, comparison: Comparison) -> str:
    """Where, and what either side has there."""
    d, (left, right) = difference, sides(comparison)
    if d.tensor == "routes":
        owner = left if d.left == "present" else right
        row = f"the row of token {d.token} of rank {d.source_rank}, slot {d.slot}, for expert {d.expert}"
        return f"rank {d.rank}: {row} is in {owner} only"
    token = f"token {d.token}" + (f" of rank {d.source_rank}" if d.source_rank not in (None, d.rank) else "")
    where = [f"rank {d.rank}", f"expert {d.expert}" * (d.expert is not None), token]
    where += [f"{name} {at}" for name in ("slot", "channel", "block") if (at := getattr(d, name)) is not None]
    apart = (
        "" if d.ulps is None else "; one of them is NaN" if d.ulps >= NAN_ULPS else f"; {_count(d.ulps, 'ulp')} apart"
    )
    values = [f"{side} has {_value(v)} ({code})" for side, v, code in
              ((left, d.left, d.left_code), (right, d.right, d.right_code))]  # fmt: skip
    return f"{name_of(d)} at {', '.join(filter(None, where))}: {values[0]}, {values[1]}{apart}"


def evidence(found: TensorComparison, comparison: Comparison) -> Evidence | None:
    """How equality with the kernel is known for that tensor; None where it does not hold."""
    if found.outside:
        return None
    return Evidence.BOUNDED if found.allowance.rung is Rung.BOUND else comparison.left.scheme.evidence


def kind_of(diagnosis: Diagnosed) -> str:
    return str(getattr(diagnosis.kind, "value", diagnosis.kind))


def ulps(distance: int) -> str:
    return "NaN" if distance >= NAN_ULPS else f"{distance:,}"


def wider(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return "infinitely" if math.isinf(ratio) else f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.9g}"


# --- other projects ----------------------------------------------------------------------------------------------


def output_of(comparison: Comparison) -> TensorComparison | None:
    return next((t for t in comparison.tensors if (t.stage, t.tensor) == OUTPUT), None)


def beside(comparison: Comparison) -> tuple[Beside, ...]:
    """Every tolerance of other projects for the scheme's family; its bound is taken at the left side's output."""
    peers = peers_for(comparison.left.scheme.weights)
    found = output_of(comparison)
    if found is None:
        return tuple(Beside(peer, None, None) for peer in peers)
    ranks = range(comparison.left.layer.ep_size)
    pairs = list(zip(comparison.left.outputs(), comparison.right.outputs(), strict=True))
    outside = torch.cat([found.allowance.judge(r, *pairs[r], None).outside for r in ranks])
    expected, given = (torch.cat(side).float() for side in zip(*pairs, strict=True))
    radius = _radius(found)
    return tuple(_beside(peer, expected, given, outside, radius) for peer in peers)


def _beside(peer: PeerTolerance, expected, given, outside, radius: torch.Tensor | None) -> Beside:
    bound = peer.allowed(expected)
    if bound is None:
        return Beside(peer, None, None)
    accepts = int((outside & ((given - expected).abs() <= bound)).sum())
    if radius is None:
        return Beside(peer, None, accepts)
    ratio = torch.where(radius == bound, 1.0, bound.double() / radius)
    ratio = ratio[~torch.isnan(ratio)]
    return Beside(peer, float(ratio.median()) if ratio.numel() else None, accepts)


def _radius(found: TensorComparison) -> torch.Tensor | None:
    """float64 `[T of all ranks, H]`: how far the output may be away; NaN: no claim. None where no width says it."""
    if found.allowance.rung is Rung.BITS:
        return torch.zeros((), dtype=torch.float64)
    if found.allowance.rung is Rung.ORDER:
        return None
    intervals = found.allowance.intervals
    assert intervals is not None
    return torch.cat([intervals[rank].radius for rank in sorted(intervals)])


# --- tables ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    heading: str
    cell: Callable[[Any], str]
    words: bool = False  #: aligned left
    drop: int = 0  #: where a terminal is narrow, columns with the largest number go first; 0: never


def ladder(comparison: Comparison) -> tuple[Column, ...]:
    """Columns over `comparison.tensors`."""
    return (
        Column("stage.tensor", name_of, words=True),
        Column("elements", lambda t: f"{t.elements:,}"),
        Column("differing", lambda t: f"{t.differing:,}"),
        Column("allowed", lambda t: f"{t.allowed:,}", drop=3),
        Column("outside", lambda t: f"{t.outside:,}"),
        Column("max ulps", lambda t: ulps(t.max_ulps), drop=1),
        Column("rel-L2", lambda t: f"{t.rel_l2:.1e}" if t.rel_l2 else "0", drop=4),
        Column("headroom", lambda t: "-" if t.headroom is None else f"{t.headroom:.0%} used", drop=6),
        Column("holds", lambda t: t.holds.value, words=True),
        Column("asserted", lambda t: t.allowance.rung.value, words=True, drop=2),
        Column("evidence", lambda t: known.value if (known := evidence(t, comparison)) else "-", words=True, drop=5),
    )


def others(comparison: Comparison) -> tuple[Column, ...]:
    """Columns over `beside(comparison)`, behind the name of the test."""
    found = output_of(comparison)
    columns = (
        Column("atol", lambda b: _number(b.peer.atol)),
        Column("rtol", lambda b: _number(b.peer.rtol)),
        Column("share", lambda b: "-" if b.peer.atol is b.peer.rtol is None else f"{b.peer.share:.0%}", drop=1),
        Column("wider", lambda b: wider(b.wider)),
    )
    return columns + (Column("accepts", lambda b: _number(b.accepts)),) * bool(found and found.outside)


def about_others(comparison: Comparison) -> str:
    """What the last two columns of `others` mean."""
    found = output_of(comparison)
    text = "wider: the test's bound over ours, median of the output's elements"
    if found and found.outside:
        text += f"; accepts: elements that ours forbids and its bound takes, of {found.outside:,}"
    return text


def reasons(comparison: Comparison) -> list[tuple[Rung, str, list[str]]]:
    """Rung, reason, and what has them: stages by name where all their tensors do."""
    found: dict[tuple[Rung, str], list[TensorComparison]] = {}
    for tensor in comparison.tensors:
        found.setdefault((tensor.allowance.rung, tensor.allowance.because), []).append(tensor)
    shown = [t.stage for t in comparison.tensors]
    named = []
    for (rung, because), tensors in found.items():
        stages = [t.stage for t in tensors]
        names = [t.stage if stages.count(t.stage) == shown.count(t.stage) else name_of(t) for t in tensors]
        named.append((rung, because, list(dict.fromkeys(names)) if len(found) > 1 else ["every stage"]))
    return named


def firsts(comparison: Comparison) -> list[tuple[str, str]]:
    """The first element that is outside the tolerance and, where it is another, the first that differs at all."""
    first, outside = comparison.first, comparison.first_outside
    found = [("first outside the tolerance", outside), ("first difference, allowed", first)]
    if not outside or (first and sentence(first, comparison) == sentence(outside, comparison)):
        found = [("first difference", first)]
    return [(title, sentence(difference, comparison)) for title, difference in found if difference]


# --- a terminal --------------------------------------------------------------------------------------------------

_COLOURS = {Mood.EQUAL: "green", Mood.WITHIN: "blue", Mood.OUTSIDE: "red", Mood.EMPTY: "yellow"}
_HELD = {Holds.BITS: "", Holds.ULPS: "blue", Holds.BOUND: "blue", Holds.NONE: "bold red"}


def print_comparison(comparison: Comparison, diagnoses: Sequence[Diagnosed], console: Console) -> None:
    """The ladder, one line per tensor that both sides show; the verdict; what differs first; the tolerance; the load in
    a line; others' tolerances.

    A narrow terminal gets fewer columns.
    """

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    said = verdict(comparison)
    line(f"{comparison.left.side} against {comparison.right.side}: {comparison.left.problem or comparison.left.scheme}")
    tensors = comparison.tensors
    console.print(_table(console, ladder(comparison), tensors, [_HELD[t.holds] for t in tensors]))
    line(str(said), f"bold {_COLOURS[said.mood]}")
    lost = zip((comparison.missing_routes, comparison.extra_routes), sides(comparison), strict=True)
    routes = " and ".join(f"{_count(n, 'row')} in {side} only" for n, side in lost if n)
    for title, text in [*firsts(comparison), *[("routes", routes)] * bool(routes)]:
        line(f"{title}: {text}")
    for diagnosis in diagnoses:
        line(f"diagnosis, {kind_of(diagnosis)}: {diagnosis.says}")
    for rung, because, names in reasons(comparison):
        line(f"tolerance of {', '.join(names)}: {rung.value}: {because}")
    line(f"load: {load_of_layer(comparison.left.layer)}")
    room = max(console.width - 45, 20)
    test = Column("tests of other projects", lambda b: _test(b.peer)[:room], words=True)
    console.print(_table(console, (test, *others(comparison)), beside(comparison)))
    line(f"{about_others(comparison)}. {CAVEAT}", "dim")


def _test(peer: PeerTolerance) -> str:
    return f"{peer.project} {PurePosixPath(peer.test).stem.removeprefix('test_')}"


def _table(console: Console, columns: Sequence[Column], rows: Sequence[Any], styles: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.heading, justify="left" if column.words else "right", no_wrap=True)
    for row, style in zip_longest(rows, styles):
        table.add_row(*(escape(column.cell(row)) for column in columns), style=style)
    last = max(columns, key=lambda column: column.drop)
    if last.drop and Measurement.get(console, console.options.update(max_width=1000), table).maximum > console.width:
        return _table(console, [column for column in columns if column is not last], rows, styles)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:g}"


# --- machines ----------------------------------------------------------------------------------------------------


def as_json(comparison: Comparison, diagnoses: Sequence[Diagnosed]) -> dict[str, Any]:
    """The comparison for a script. Numbers that JSON lacks are the strings "nan", "inf" and "-inf".

    format, version     "fp4ep.comparison", 1; a key may be added under one version, none changes its meaning
    passed              nothing is outside the tolerance
    mood, verdict       "equal", "within", "outside" or "empty" (no elements at all); the same as a sentence
    left, right         side, claim, source (versions and hardware)
    scheme              name, options, label, evidence
    problem             fields of the left side's Problem, or null
    ep_size             number of ranks
    load                of experts and ranks by routes, as `Load.as_json` makes it; at the least capacity that fits
    tensors             in order of the stages, those that both sides show: stage, tensor, elements, differing, allowed
                        (may differ), outside, max_ulps ("nan": a NaN on one side), rel_l2, sqnr_db, calc_diff, headroom
                        (largest share of its allowance that an element uses, or null), holds (bits, ulps, bound,
                        outside), rung (asserted), because, evidence (null: outside), per_rank and per_expert
                        (differing elements by rank and expert)
    missing_routes, extra_routes    rows in the left only, in the right only
    first, first_outside            fields of a Difference, and `text`; null: there is none
    diagnoses           kind (the enum member's name), says
    peers               tolerances of other projects' tests: their fields, wider and accepts as in `Beside`
    """
    c, said = comparison, verdict(comparison)
    return _finite(
        {
            "format": FORMAT,
            "version": VERSION,
            "passed": c.passed,
            "mood": said.mood.value,
            "verdict": str(said),
            "left": _side(c.left),
            "right": _side(c.right),
            "scheme": {
                "name": c.left.scheme.name,
                "options": options_of(c.left.scheme),
                "label": str(c.left.scheme),
                "evidence": c.left.scheme.evidence.value,
            },
            "problem": c.left.problem and c.left.problem.as_json(),
            "ep_size": c.left.layer.ep_size,
            "load": load_of_layer(c.left.layer).as_json(),
            "tensors": [_tensor(t, c) for t in c.tensors],
            "missing_routes": c.missing_routes,
            "extra_routes": c.extra_routes,
            "first": c.first and asdict(c.first) | {"text": sentence(c.first, c)},
            "first_outside": c.first_outside and asdict(c.first_outside) | {"text": sentence(c.first_outside, c)},
            "diagnoses": [{"kind": getattr(d.kind, "name", str(d.kind)), "says": d.says} for d in diagnoses],
            "peers": [
                {**asdict(b.peer), "weights": [w.name for w in b.peer.weights], "wider": b.wider, "accepts": b.accepts}
                for b in beside(c)
            ],
        }
    )


def _side(run: Run) -> dict[str, Any]:
    return {"side": run.side, "claim": run.claim.value, "source": dict(run.source)}


_NUMBERS = ("stage", "tensor", "elements", "differing", "allowed", "outside", "rel_l2", "sqnr_db", "calc_diff")


def _tensor(found: TensorComparison, comparison: Comparison) -> dict[str, Any]:
    known = evidence(found, comparison)
    return {name: getattr(found, name) for name in _NUMBERS} | {
        "max_ulps": "nan" if found.max_ulps >= NAN_ULPS else found.max_ulps,
        "headroom": found.headroom,
        "holds": found.holds.value,
        "rung": found.allowance.rung.value,
        "because": found.allowance.because,
        "evidence": known and known.value,
        "per_rank": found.per_rank,
        "per_expert": found.per_expert,
    }


def _finite(value: Any) -> Any:
    """Keys as strings, and no number that JSON lacks."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
