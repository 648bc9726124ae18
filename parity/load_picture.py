"""The load as a page shows it: columns of its tables, bars by expert and the ranks' matrix as inline SVG."""

from math import ceil

from .load import Load, Spread
from .pictures import COOL, INK, LINE, MUTED, PANEL, Picture, apart, as_svg, require, short, style
from .summary import Column

#: Most ranks of a matrix with a number in every cell, and of one that has a third of the page's width.
_NUMBERS, _NARROW = 32, 8
#: The colour of a cell, and how much of it covers the page: with the most routes, and with next to none.
_CELL, _DEEPEST, _PALEST = COOL[1], 0.55, 0.08
#: Room of a glyph of a bar's label in inches.
_GLYPH = 0.065


def rank_columns(load: Load) -> tuple[Column, ...]:
    """Columns over the EP ranks by number."""
    ranks = load.ranks
    return (
        Column("rank", lambda r: f"rank {r}", words=True),
        Column("tokens", lambda r: f"{load.tokens[r]:,}"),
        Column("of capacity", lambda r: f"{load.capacity_used[r]:.0%}"),
        Column("routes sent", lambda r: f"{load.routes_sent[r]:,}"),
        Column("routes received", lambda r: f"{ranks.counts[r]:,}"),
        Column("of the mean", lambda r: f"{ranks.counts[r] / ranks.mean:.2f}x" if ranks.mean else "-"),
        Column("of worst case", lambda r: f"{load.receive_used[r]:.0%}"),
        Column("tokens received", lambda r: f"{load.tokens_received[r]:,}"),
        Column("idle experts", lambda r: f"{sum(_owner(load, e) == r for e in load.experts.idle):,}"),
    )


#: Columns over (word, Spread).
SPREAD_COLUMNS = (
    Column("routes over", lambda row: f"{len(row[1].counts):,} {row[0]}{'s' * (len(row[1].counts) > 1)}", words=True),
    Column("most", lambda row: f"{max(row[1].counts):,}"),
    Column("in", lambda row: f"{row[0]} {row[1].busiest}" if any(row[1].counts) else "-", words=True),
    Column("mean", lambda row: f"{row[1].mean:,.1f}"),
    Column("skew", lambda row: f"{row[1].skew:.2f}"),
    Column("variation", lambda row: f"{row[1].variation:.2f}"),
    Column("idle", lambda row: f"{len(row[1].idle):,}"),
)


def expert_columns(load: Load) -> tuple[Column, ...]:
    """Columns over the experts by number."""
    mean = load.experts.mean
    return (
        Column("expert", lambda e: f"expert {e}", words=True),
        Column("rank", lambda e: f"{_owner(load, e)}"),
        Column("routes", lambda e: f"{load.routes_per_expert[e]:,}"),
        Column("of the mean", lambda e: f"{load.routes_per_expert[e] / mean:.2f}x" if mean else "-"),
    )


def spreads(load: Load) -> list[tuple[str, Spread]]:
    """Rows of SPREAD_COLUMNS."""
    return [("expert", load.experts), ("rank", load.ranks)]


def notes(load: Load) -> str:
    """What the tables' words mean, and what did not travel."""
    least = ", the least that holds these" * (load.capacity == max(load.tokens))
    said = [
        "Skew: most / mean. Variation: standard deviation / mean. Idle: without a route.",
        f"Capacity: {load.capacity:,} tokens a rank{least}; worst case: the "
        f"{load.worst_case_routes:,} routes that a rank then receives at most, while no token names an expert twice.",
    ]
    said += [f"Masked slots: {load.masked_slots:,}."] * bool(load.masked_slots)
    said += [f"Slots with an expert named before: {load.duplicate_slots:,}."] * bool(load.duplicate_slots)
    return " ".join(said)


def load_pictures(load: Load) -> tuple[Picture, ...]:
    """Bars by expert and, of several ranks, their matrix; none without routes. ImportError without matplotlib."""
    require()
    if not load.routes:
        return ()
    with style():
        return (_bars(load), *[_matrix(load)] * (load.ep_size > 1))


def _owner(load: Load, expert: int) -> int:
    return expert // load.local_experts


def _bars(load: Load) -> Picture:
    """Routes by expert, ranks side by side."""
    from matplotlib.figure import Figure

    experts, ranks, count, local = load.experts, load.ranks, load.num_experts, load.local_experts
    width, most = 9.6, max(experts.counts)
    unit = count / (width - 0.7)  # experts to an inch
    figure = Figure(figsize=(width, 2.1), layout="constrained")
    axes = figure.subplots()
    axes.bar(range(count), experts.counts, 0.8 if count <= 64 else 0.9, color=COOL[2])
    for start in range(local, count, local):
        axes.axvline(start - 0.5, color=LINE, linewidth=0.8)
    axes.axhline(experts.mean, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    glyphs = max(len(short(n)) for n in experts.counts)
    told = range(count) if glyphs * _GLYPH * unit < 0.95 else [experts.busiest]
    for expert in told:
        n = experts.counts[expert]
        label = axes.text(expert, n + 0.03 * most, short(n), ha="center", va="bottom", color=INK if n else MUTED)
        label.set(fontsize=7, bbox={"facecolor": PANEL, "linewidth": 0, "pad": 1})  # not struck through by the mean
    axes.set(xlim=(-0.5, count - 0.5), ylim=(0, 1.12 * most), ylabel="routes")
    axes.set_yticks([0, most], ["0", short(most)])
    step = _step(count, 0.3 * unit)
    axes.set_xticks(range(0, count, step))
    axes.tick_params("x", length=0 if step == 1 else 3)
    axes.set_xlabel("expert")
    if load.ep_size > 1:
        names = [(rank * local + (local - 1) / 2, f"rank {rank}: {short(n)}") for rank, n in enumerate(ranks.counts)]
        room = (max(len(name) for _, name in names) + 1) * _GLYPH * unit
        above = axes.secondary_xaxis("top")
        above.set_xticks(*apart(names, room))
        above.tick_params("x", length=0)
        above.spines[:].set_visible(False)
    return Picture(
        "Routes by expert",
        f"Bars of the routes of {count} experts on {load.ep_size} ranks: {load}.",
        f"Dashed: the mean, {experts.mean:,.1f}."
        + " Above: ranks with the routes they receive. Lines: ranks." * (load.ep_size > 1),
        (),
        as_svg(figure, "load-expert"),
    )


def _matrix(load: Load) -> Picture:
    """Routes from rank to rank: the more the deeper, with numbers while there is room."""
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    size, table = load.ep_size, load.routes_between
    most = max(map(max, table))
    wide = size > _NARROW
    inches = (9.6, min(0.6 + 0.26 * size, 8.0)) if wide else (3.4, 0.7 + 0.28 * size)
    figure = Figure(figsize=inches, layout="constrained")
    axes = figure.subplots()
    cells = [[(*to_rgb(_CELL), depth(n, most)) for n in row] for row in table]
    axes.imshow(cells, aspect="auto", interpolation="none")
    for sender, row in enumerate(table if size <= _NUMBERS else ()):
        for receiver, n in enumerate(row):
            text = axes.text(receiver, sender, short(n), ha="center", va="center", color=INK if n else MUTED)
            text.set_fontsize(8 if size <= 16 else 6.5)
    for edge in range(size + 1):
        axes.axvline(edge - 0.5, color=LINE, linewidth=0.6)
        axes.axhline(edge - 0.5, color=LINE, linewidth=0.6)
    axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), xlabel="to rank", ylabel="from rank")
    axes.set_xticks(range(0, size, _step(size, size / 32)))
    axes.set_yticks(range(0, size, _step(size, size / 32)))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    at = next((s, r) for s, row in enumerate(table) for r, n in enumerate(row) if n == most)
    return Picture(
        "Routes from rank to rank",
        f"Matrix of the routes that each of {size} ranks sends to each; most, {most:,}, from rank {at[0]} to {at[1]}.",
        f"The more, the deeper; most, {most:,}, from rank {at[0]} to rank {at[1]}.",
        (),
        as_svg(figure, "load-ranks"),
        wide,
    )


def depth(routes: int, most: int) -> float:
    """How much of a cell's colour covers the page; the page's ink stays readable on it in light and dark."""
    return _PALEST + (_DEEPEST - _PALEST) * routes / most if routes else 0.0


def _step(count: int, least: float) -> int:
    """The smallest power of two that is at least `least`, or count."""
    step = 1
    while step < min(ceil(least), count):
        step *= 2
    return step
