"""Pictures of a comparison: inline SVG by matplotlib that takes its ink from the page's CSS variables.

One element is one colour: unpainted where bits are equal, cool where it may differ, warm where it may not. A cell of a
map that covers several elements shows the worst. Nothing here changes matplotlib's settings beyond the call.
"""

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .compare import ROUTE_STAGES, Comparison, Difference, TensorComparison, match_routes
from .metrics import NAN_ULPS, bits_differ, ulp_distance
from .summary import OUTPUT, name_of, sides

#: Largest ulp distance of a level, and its name: of types of one or two bytes, and of float32.
_NARROW = (
    (1, "1 ulp"),
    (4, "2 to 4 ulps"),
    (256, "5 to 256 ulps"),
    (NAN_ULPS - 1, "over 256 ulps"),
    (NAN_ULPS, "NaN"),
)
_FLOAT32 = (
    (256, "up to 256 ulps"),
    (1 << 16, "up to 2¹⁶ ulps"),
    (1 << 22, "up to 2²² ulps"),
    (NAN_ULPS - 1, "over 2²² ulps"),
    (NAN_ULPS, "NaN"),
)
_LEVELS = len(_NARROW)
COOL = ("#8fbce6", "#5b9ad8", "#3a76bd", "#2b5797", "#2aa198")
WARM = ("#f2a93b", "#ea6f2b", "#d42f3c", "#9b2a8f", "#0f9d83")
LOST = ("#8d96a3", "#b9a36b")
#: By class: 0 equal, then the levels of what is allowed, the levels of what is not, rows of one side only.
_COLOURS = ("#00000000", *COOL, *WARM, *LOST)
#: Colours that the page replaces by its own, so that one picture serves light and dark.
_INK = {"#010101": "var(--ink)", "#020202": "var(--muted)", "#030303": "var(--line)", "#040404": "var(--panel)"}
INK, MUTED, LINE, PANEL = _INK
#: Most cells of a map: each has at least three pixels on a page of 1,000.
_MOST = (160, 256)


@dataclass(frozen=True)
class Picture:
    title: str
    alt: str
    caption: str
    legend: tuple[tuple[str, str], ...]  #: colour, what it means
    svg: str
    wide: bool = True


@dataclass(frozen=True)
class Part:
    """One tensor on one rank: left and right in rows that go together, what the tolerance forbids, the rows' keys."""

    rank: int
    left: torch.Tensor
    right: torch.Tensor
    outside: torch.Tensor
    keys: Mapping[str, torch.Tensor] | None  #: of the left side's dispatch rows, where rows are routes

    @property
    def differs(self) -> torch.Tensor:
        """bool; what is outside differs from something, be it not from the left side."""
        return bits_differ(self.left, self.right) | self.outside

    @property
    def classes(self) -> torch.Tensor:
        """uint8 of the tensors' shape: an index into _COLOURS."""
        bounds = torch.tensor([bound for bound, _ in _levels(self.left)])
        level = torch.bucketize(ulp_distance(self.left, self.right), bounds) + 1
        level = torch.where(self.outside, level + _LEVELS, level)
        return torch.where(self.differs, level, 0).to(torch.uint8)


@dataclass(frozen=True)
class Group:
    """Rows of a map that belong together."""

    name: str
    rows: int
    strong: bool = True  #: the line above


def _levels(tensor: torch.Tensor) -> Sequence[tuple[int, str]]:
    return _FLOAT32 if tensor.element_size() > 2 else _NARROW


def require() -> None:
    """Raises ImportError, naming the extra to install, where matplotlib is absent."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("a page needs matplotlib for its pictures: pip install 'fp4ep[report]'") from error


def parts(comparison: Comparison, stage: str, tensor: str) -> Iterator[Part]:
    """Every rank's share of a tensor that both sides show."""
    left, right = comparison.left, comparison.right
    allowance = next(t.allowance for t in comparison.tensors if (t.stage, t.tensor) == (stage, tensor))
    for rank, ours in left.stages(stage).items():
        a, b, rows, keys = ours[tensor], right.stages(stage)[rank][tensor], None, None
        if stage in ROUTE_STAGES:
            table = left.stages("dispatch")[rank]
            match = match_routes(table, right.stages("dispatch")[rank])
            a, b, rows, keys = a[match.left], b[match.right], match.left, {n: table[n][match.left] for n in _KEY}
        yield Part(rank, a, b, allowance.judge(rank, a, b, rows).outside, keys)


_KEY = ("expert", "source_rank", "token", "slot")


def focus(comparison: Comparison) -> TensorComparison | None:
    """The tensor of route rows to look at: the first outside the tolerance, else the first that differs."""
    rows = [t for t in comparison.tensors if t.stage in ROUTE_STAGES]
    lost = comparison.missing_routes or comparison.extra_routes
    choices = ([t for t in rows if t.outside], rows if lost else [], [t for t in rows if t.differing])
    return next((t for choice in choices for t in choice), None)


def pictures(comparison: Comparison) -> tuple[Picture, ...]:
    """What is worth looking at: none where every bit is equal. Raises ImportError where matplotlib is absent."""
    require()
    shown = [t for t in comparison.tensors if t.differing or t.outside]
    rows = focus(comparison)
    output = next((t for t in shown if (t.stage, t.tensor) == OUTPUT), None)
    found = []
    with style():
        if output:
            found.append(_tokens(comparison))
        if rows:
            found.append(_routes(comparison, rows))
        if shown:
            found.append(_histograms(comparison, shown))
        if rows in shown:
            found.append(_bars(comparison, rows, "expert"))
        for tensor in {name_of(t): t for t in (rows, output) if t in shown and len(t.per_rank) > 1}.values():
            found.append(_bars(comparison, tensor, "rank"))
    return tuple(found)


def style() -> AbstractContextManager[Any]:
    """Settings of every picture, given back at the end whatever the reader's own are."""
    import matplotlib

    return matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "text.usetex": False,
            "font.family": "DejaVu Sans",
            "font.size": 8,
            "text.color": INK,
            "axes.labelcolor": MUTED,
            "axes.edgecolor": LINE,
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "axes.linewidth": 0.8,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "xtick.color": LINE,
            "ytick.color": LINE,
            "xtick.labelcolor": MUTED,
            "ytick.labelcolor": MUTED,
            "xtick.major.size": 3,
            "ytick.major.size": 3,
        }
    )


# --- maps --------------------------------------------------------------------------------------------------------


def _tokens(comparison: Comparison) -> Picture:
    """Token by channel of the output, ranks below each other."""
    found = list(parts(comparison, *OUTPUT))
    classes = torch.cat([part.classes for part in found])
    groups = [Group(f"rank {part.rank}", len(part.left)) for part in found]
    first = _first(comparison, *OUTPUT)
    mark = None
    if first:
        mark = sum(group.rows for group in groups[: first.rank]) + (first.token or 0), first.channel or 0
    height, width = classes.shape
    lines = _lines(width, 128)
    svg, cell = _map(classes, "token", "channel", groups, lines, mark)
    wrong = int((classes > 0).any(1).sum())
    return Picture(
        "The output, token by channel",
        f"Map of the output, {height} tokens by {width} channels: {wrong} tokens differ somewhere.",
        _caption(cell, {"ranks": len(groups) > 1, f"every {lines} channels": width > lines}, mark),
        _legend(classes, found[0], comparison),
        svg,
    )


def _caption(cell: str, lines: Mapping[str, bool], mark: tuple[int, int] | None) -> str:
    drawn = ", ".join(name for name, there in lines.items() if there)
    return f"{cell}. Unpainted: equal." + f" Lines: {drawn}." * bool(drawn) + " Ring: the first." * bool(mark)


def _routes(comparison: Comparison, tensor: TensorComparison) -> Picture:
    """Route rows by channel, sorted by expert, with the rows that one side lacks."""
    tables: list[tuple[tuple[int, ...], torch.Tensor]] = []
    found = list(parts(comparison, tensor.stage, tensor.tensor))
    for part in found:
        assert part.keys is not None
        classes = part.classes.unsqueeze(-1).flatten(1)
        tables += zip(zip(*(part.keys[n].tolist() for n in _KEY), strict=True), classes, strict=True)
        received = [run.stages("dispatch")[part.rank] for run in (comparison.left, comparison.right)]
        match = match_routes(*received)
        for n, (table, only) in enumerate(zip(received, (match.only_left, match.only_right), strict=True)):
            lost = torch.full(classes.shape[1:], len(_COLOURS) - 2 + n, dtype=torch.uint8)
            tables += [(tuple(int(table[k][row]) for k in _KEY), lost) for row in only.tolist()]
    tables.sort(key=lambda row: row[0])
    classes = torch.stack([row for _, row in tables])
    experts = [key[0] for key, _ in tables]
    per_rank = comparison.left.layer.weights.num_experts // comparison.left.layer.ep_size
    present = sorted(set(experts))
    strong = [a // per_rank != b // per_rank for a, b in pairwise([-1, *present])]
    groups = [Group(f"expert {e}", experts.count(e), s) for e, s in zip(present, strong, strict=True)]
    first = _first(comparison, tensor.stage, tensor.tensor) or comparison.first
    mark = None
    if first:
        key = tuple(getattr(first, n) for n in _KEY)
        at = first.channel if first.channel is not None else first.block or 0
        mark = next(((n, at) for n, (k, _) in enumerate(tables) if k == key), None)
    scales = tensor.tensor == "scales"
    column, block = ("block", 1) if scales else ("channel", _block(comparison, tensor.stage))
    every = _lines(classes.shape[1], block)
    svg, cell = _map(classes, "route", column, groups, every, mark)
    lines = {
        "experts": len(groups) > 1,
        "ranks (strong)": len(groups) > 1 and any(strong[1:]),
        f"every {every} {column}s": classes.shape[1] > every > 1,
    }
    return Picture(
        f"{name_of(tensor)}, route rows by {column}",
        f"Map of {len(classes)} route rows of {name_of(tensor)} by {column}, sorted by expert.",
        _caption(cell, lines, mark),
        _legend(classes, found[0], comparison),
        svg,
    )


def _lines(width: int, block: int) -> int:
    """Columns between two lines: a block, or several where there are more than 16."""
    return block * -(-width // (16 * block))


def _block(comparison: Comparison, stage: str) -> int:
    """Channels that share a scale at that stage; 128 where it has none of its own."""
    tensors = next(iter(comparison.left.stages(stage).values()))
    blocks = tensors["scales"].shape[1] if "scales" in tensors else 0
    return tensors["values"].shape[1] // blocks if blocks > 1 else 128


def _first(comparison: Comparison, stage: str, tensor: str) -> Difference | None:
    """The first difference to mark in that tensor: the first outside, if there."""
    for found in (comparison.first_outside, comparison.first):
        if found and (found.stage, found.tensor) == (stage, tensor):
            return found
    return None


def _legend(classes: torch.Tensor, part: Part, comparison: Comparison) -> tuple[tuple[str, str], ...]:
    """The classes that occur, with their counts: of elements, or of rows that one side lacks. part: any one."""
    counts = torch.bincount(classes.flatten().long(), minlength=len(_COLOURS)).tolist()
    counts[-2:] = [n // classes.shape[1] for n in counts[-2:]]
    levels, both = [name for _, name in _levels(part.left)], ", outside" * any(counts[1 : 1 + _LEVELS])
    names = ["", *(f"{name}, allowed" for name in levels), *(name + both for name in levels)]
    names += [f"row in {side} only" for side in sides(comparison)]
    entries = list(zip(_COLOURS, names, counts, strict=True))[1:]
    return tuple((colour, f"{name}: {n:,}") for colour, name, n in entries if n)


def _worst(classes: np.ndarray) -> tuple[np.ndarray, int, int]:
    """The map in cells of (rows, columns): each as bad as its worst element."""
    rows = -(-classes.shape[0] // _MOST[0])
    columns = 1
    while classes.shape[1] > columns * _MOST[1]:
        columns *= 2
    padding = [(0, -size % step) for size, step in zip(classes.shape, (rows, columns), strict=True)]
    padded = np.pad(classes, padding)
    cells = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    return cells.max((1, 3)), rows, columns


def _map(
    classes: torch.Tensor, row: str, column: str, groups: Sequence[Group], lines: int, mark: tuple[int, int] | None
) -> tuple[str, str]:
    """The picture, and what one of its cells covers. lines: columns between two of them."""
    from matplotlib.colors import to_rgba
    from matplotlib.figure import Figure

    height, width = classes.shape
    cells, rows, columns = _worst(classes.numpy())
    inches = min(max(0.16 * height, 1.2), 4.6)
    figure = Figure(figsize=(9.6, inches + 0.5), layout="constrained")
    axes = figure.subplots()
    extent = (0, cells.shape[1] * columns, cells.shape[0] * rows, 0)
    palette = np.array([to_rgba(colour) for colour in _COLOURS])
    axes.imshow(palette[cells], extent=extent, aspect="auto", interpolation="none")
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.spines[:].set_visible(True)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel(column)
    edges = range(0, width + 1, lines) if width > lines else np.linspace(0, width, min(width, 4) + 1, dtype=int)
    axes.set_xticks(edges)
    for edge in edges[1:-1] if width > lines else ():
        axes.axvline(edge, color=LINE, linewidth=0.6)
    line = 0.15 * height / inches  # rows under a line of text
    ends = np.cumsum([0, *(group.rows for group in groups)])
    for group, end in zip(groups[1:], ends[1:-1], strict=True):
        axes.axhline(end, color=MUTED if group.strong else LINE, linewidth=0.9 if group.strong else 0.6)
    if len(groups) > 1:
        labels = (((a + b) / 2, g.name) for (a, b), g in zip(pairwise(ends), groups, strict=True) if g.rows)
        axes.set_yticks(*apart(labels, line))
        axes.tick_params("y", length=0)
    if row == "token":
        step = next(n for k in range(9) for n in (10**k, 2 * 10**k, 5 * 10**k) if n >= line)
        tokens = ((end + n + 0.5, str(n)) for g, end in zip(groups, ends, strict=False) for n in range(0, g.rows, step))
        right = axes.secondary_yaxis("right") if len(groups) > 1 else axes
        right.set_yticks(*apart(tokens, line))
        right.set_ylabel(row)
    if mark:
        axes.plot(mark[1] + 0.5, mark[0] + 0.5, "o", ms=11, mfc="none", mec=INK, mew=1.2, clip_on=False)
    shape = [f"{n} {word}{'s' * (n > 1)}" for n, word in ((rows, row), (columns, column))]
    worst = ", coloured by its worst element" if rows * columns > 1 else ""
    return as_svg(figure, f"map-{row}"), f"One cell is {' by '.join(shape)}{worst}"


def apart(labels: Iterable[tuple[float, str]], room: float) -> tuple[list[float], list[str]]:
    """Places and names of the labels that keep `room` from the one before."""
    places: list[float] = []
    names: list[str] = []
    for place, name in labels:
        if not places or place - places[-1] >= room:
            places.append(place)
            names.append(name)
    return places, names


# --- counts ------------------------------------------------------------------------------------------------------


def _histograms(comparison: Comparison, shown: Sequence[TensorComparison]) -> Picture:
    """ulp distance on a log2 axis, one row for every tensor; heights are logarithmic."""
    from matplotlib.figure import Figure

    counts = {name_of(t): _bins(comparison, t) for t in shown}
    last = max((int(both.any(0)[:-1].nonzero().max()) for both in counts.values() if both[:, :-1].any()), default=0)
    bins = max(last + 1, 6)
    figure = Figure(figsize=(9.6, 0.5 + 0.5 * len(counts)), layout="constrained")
    axes = figure.subplots()
    x = np.array([*range(bins), bins + 0.5])
    for n, both in enumerate(counts.values()):
        floor = -1.4 * n
        total, outside = (np.array([*row[:bins], row[-1]]) for row in both.numpy())
        top = np.log2(1 + total.max())
        for values, colour in ((total, COOL[1]), (outside, WARM[2])):
            there = values > 0
            axes.bar(x[there], np.log2(1 + values[there]) / top, 0.86, bottom=floor, color=colour)
        for place, value in zip(x, total, strict=True):
            if value:
                at = place, floor + np.log2(1 + value) / top + 0.04
                axes.text(*at, short(int(value)), ha="center", va="bottom", fontsize=6.5)
        axes.axhline(floor, color=LINE, linewidth=0.8)
    axes.set(ylim=(-1.4 * (len(counts) - 1), 1.3), xlim=(-0.7, bins + 1.2))
    axes.set_yticks([0.35 - 1.4 * n for n in range(len(counts))], list(counts))
    axes.tick_params("y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.set_xticks(x, [*(_power(n) for n in range(bins)), "NaN"])
    axes.set_xlabel("ulps apart, each bar up to twice its left edge")
    names = ", ".join(f"{name}: {int(both[0].sum()):,}" for name, both in counts.items())
    differing, wrong = (sum(int(both[n].sum()) for both in counts.values()) for n in (0, 1))
    return Picture(
        "How far apart",
        f"Histograms of the ulp distance of differing elements, by tensor. {names}.",
        "Elements that differ, by distance in representable values of their own type. Heights are logarithmic.",
        _allowed_or_not(differing - wrong, wrong),
        as_svg(figure, "histogram"),
    )


def _bins(comparison: Comparison, tensor: TensorComparison) -> torch.Tensor:
    """int64 `[2, 34]`: differing elements, and those outside, by floor(log2(ulps)) and, last, NaN."""
    found = torch.zeros(2, 34, dtype=torch.int64)
    for part in parts(comparison, tensor.stage, tensor.tensor):
        distance = ulp_distance(part.left, part.right)
        log = torch.where(distance >= NAN_ULPS, 33, distance.double().clamp(min=1).log2().floor().long())
        found += torch.stack([torch.bincount(log[mask], minlength=34) for mask in (part.differs, part.outside)])
    return found


def _bars(comparison: Comparison, tensor: TensorComparison, by: str) -> Picture:
    """Differing elements of one tensor by rank or expert: lying and labelled where they are few."""
    from matplotlib.figure import Figure

    counts = _counts(comparison, tensor, by)
    keys, total, outside = list(counts), [n for n, _ in counts.values()], [n for _, n in counts.values()]
    few, wide, most = len(keys) <= 16, len(keys) > 64, max(total)
    figure = Figure(figsize=(9.6 if wide else 3.4, 0.3 + 0.17 * len(keys) if few else 1.9), layout="constrained")
    axes = figure.subplots()
    places = list(range(len(keys))) if few else keys
    for values, colour in ((total, COOL[1]), (outside, WARM[2])):
        (axes.barh if few else axes.bar)(places, values, 0.75, color=colour)
    if few:
        axes.set(xticks=[], xlim=(0, 1.25 * most), ylim=(len(keys) - 0.4, -0.6))
        axes.set_yticks(places, [f"{by} {key}" for key in keys])
        axes.tick_params("y", length=0)
        axes.spines["bottom"].set_visible(False)
        for place, n in zip(places, total, strict=True):
            axes.text(n + 0.02 * most, place, f"{n:,}", va="center", color=INK if n else MUTED)
    else:
        axes.set(xlabel=by, yticks=[0, most], yticklabels=["0", f"{most:,}"])
    what, told = ("outside the tolerance", outside) if any(outside) else ("that differ", total)
    worst = keys[told.index(max(told))]
    some = sum(n > 0 for n in told)
    return Picture(
        f"{name_of(tensor)} by {by}",
        f"Elements of {name_of(tensor)} {what}, by {by}; most, {max(told):,}, in {by} {worst}.",
        f"Elements {what}: in {some} of {len(keys)} {by}s, most in {by} {worst}.",
        _allowed_or_not(sum(total) - sum(outside), sum(outside)),
        as_svg(figure, f"{by}-{tensor.stage}-{tensor.tensor}"),
        wide,
    )


def _counts(comparison: Comparison, tensor: TensorComparison, by: str) -> dict[int, tuple[int, int]]:
    """Expert or rank -> elements that differ, and those of them outside the tolerance."""
    counts: dict[int, tuple[int, int]] = {}
    for part in parts(comparison, tensor.stage, tensor.tensor):
        if by == "rank":
            counts[part.rank] = int(part.differs.sum()), int(part.outside.sum())
            continue
        assert part.keys is not None
        expert = part.keys["expert"]
        for key in expert.unique().tolist():
            differing, outside = counts.get(key, (0, 0))
            mine = expert == key
            counts[key] = differing + int(part.differs[mine].sum()), outside + int(part.outside[mine].sum())
    return counts


def _allowed_or_not(allowed: int, outside: int) -> tuple[tuple[str, str], ...]:
    entries = ((COOL[1], "allowed", allowed), (WARM[2], "outside the tolerance", outside))
    return tuple((colour, f"{name}: {n:,}") for colour, name, n in entries if n)


def short(n: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if n >= size:
            return f"{n / (1000 if unit == 'k' else size):.3g}{unit}"
    return f"{n:,}"


def _power(n: int) -> str:
    return f"{2**n:,}" if n < 10 else "2" + "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(n))


def as_svg(figure: Any, prefix: str) -> str:
    """The figure as an SVG element to be put into a page: ids of its own, the page's ink, no size, no metadata."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true" focusable="false">', svg)
    names = {name: f"{prefix}-{n}" for n, name in enumerate(dict.fromkeys(re.findall(r' id="([^"]*)"', svg)))}
    svg = re.sub(r'( id="|url\(#|href="#)([^")]+)', lambda m: m[1] + names.get(m[2], m[2]), svg)
    for colour, variable in _INK.items():
        svg = svg.replace(colour, variable)
    return svg.strip()
