"""A comparison as one HTML page that asks nothing of the network: styles inline, pictures as SVG, no script.

Top to bottom: the verdict and what differs first, the chain of stages, the ladder, pictures (none where every bit is
equal), the load of experts and ranks, the tolerance and those of other projects, what ran, and what the words mean.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from html import escape
from pathlib import Path
from typing import Any

from fp4ep.reference.scheme import Evidence

from .compare import STAGES, Comparison, Holds, TensorComparison
from .load import Load, load_of_layer
from .load_picture import SPREAD_COLUMNS, expert_columns, load_pictures, notes, rank_columns, spreads
from .pictures import Picture, pictures
from .run import Run
from .summary import (
    CAVEAT,
    Beside,
    Column,
    Diagnosed,
    Mood,
    about_others,
    beside,
    firsts,
    kind_of,
    ladder,
    others,
    reasons,
    verdict,
)
from .tolerance import Rung

_SIGNS = {Mood.EQUAL: "=", Mood.WITHIN: "≈", Mood.OUTSIDE: "≠", Mood.EMPTY: "∅"}
_HELD = {Holds.BITS: "equal", Holds.ULPS: "within", Holds.BOUND: "within", Holds.NONE: "outside"}
_EVIDENCE = {
    Evidence.VERIFIED: "The reference equals a recording of the kernel on the named hardware and version in every bit.",
    Evidence.MODELLED: "The reference follows a published rule that was not checked on that hardware.",
    Evidence.BOUNDED: "Differs from the reference, within a bound that is derived from the scheme and the data.",
}
_RUNGS = {
    Rung.BITS: "Every bit has to be equal.",
    Rung.ORDER: "Every bit has to come from some order of the routes' additions.",
    Rung.BOUND: "Every element has to lie in an interval of its own; how many may differ is counted, not chosen.",
}
_HOLDS = {
    Holds.BITS: "Every bit is equal.",
    Holds.ULPS: "Within the tolerance, and no element more than 4 representable values away.",
    Holds.BOUND: "Within the tolerance.",
    Holds.NONE: "At least one element is outside the tolerance.",
}


def write_page(comparison: Comparison, diagnoses: Sequence[Diagnosed], path: str | Path) -> None:
    """Write the page, replacing an older one only when the new one is complete.

    Raises ImportError where matplotlib (the extra fp4ep[report]) is absent, even if there is nothing to draw.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(page(comparison, diagnoses), encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def page(comparison: Comparison, diagnoses: Sequence[Diagnosed]) -> str:
    """The whole document."""
    said = verdict(comparison)
    shown = pictures(comparison)
    sections = (
        _verdict(comparison, diagnoses),
        _section("Stages", _table("Every tensor that both sides show", ladder(comparison), comparison.tensors, _row)),
        _section("Where it differs", _figures(shown)) if shown else "",
        _section("Load", _load(load_of_layer(comparison.left.layer))),
        _section("Tolerance", _tolerance(comparison)),
        _section("What ran", _ran(comparison)),
        _section("Words", _words()),
    )
    title = f"{said.headline}: {comparison.right.side} against {comparison.left.side}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
{"".join(sections)}
</main>
</body>
</html>
"""


# --- sections ----------------------------------------------------------------------------------------------------


def _verdict(comparison: Comparison, diagnoses: Sequence[Diagnosed]) -> str:
    said = verdict(comparison)
    lines = [f"<p><b>{escape(title.capitalize())}</b> {escape(text)}</p>" for title, text in firsts(comparison)]
    lines += [f"<p><b>Looks like: {escape(kind_of(d))}</b> {escape(d.says)}</p>" for d in diagnoses]
    stages = "".join(_stage(comparison, stage) for stage in STAGES)
    return f"""<header class="{said.mood.value}">
<p class="over">{escape(comparison.right.side)} against {escape(comparison.left.side)}</p>
<h1><span class="sign" aria-hidden="true">{_SIGNS[said.mood]}</span> {escape(said.headline)}</h1>
<p>{escape(said.detail)}</p>
{"".join(lines)}
<ol class="chain" aria-label="Stages in order">{stages}</ol>
<p class="under">{escape(str(comparison.left.problem or comparison.left.scheme))}</p>
</header>
"""


def _stage(comparison: Comparison, stage: str) -> str:
    """One link of the chain: the worst of its tensors."""
    tensors = [t for t in comparison.tensors if t.stage == stage]
    differing, outside = sum(t.differing for t in tensors), sum(t.outside for t in tensors)
    lost = (comparison.missing_routes + comparison.extra_routes) * (stage == "dispatch")
    word = (
        f"{lost:,} row{'s' * (lost > 1)} lost or added" if lost
        else f"{outside:,} outside" if outside
        else f"{differing:,} within" if differing
        else "not shown" if not tensors
        else "equal" if any(t.elements for t in tensors)
        else "empty"
    )  # fmt: skip
    mood = "outside" if outside or lost else "within" if differing else word.replace(" ", "-")
    return f'<li class="{mood}"><b>{stage}</b> <span>{word}</span></li>'


def _row(found: TensorComparison) -> str:
    return _HELD[found.holds] if found.elements else "empty"


def _figures(shown: Iterable[Picture]) -> str:
    return f'<div class="figures">{"".join(map(_figure, shown))}</div>'


def _figure(picture: Picture) -> str:
    legend = "".join(
        f'<li><i style="background:{colour}"></i>{escape(meaning)}</li>' for colour, meaning in picture.legend
    )
    return f"""<figure class="{"wide" if picture.wide else "narrow"}">
<h3>{escape(picture.title)}</h3>
{f'<ul class="legend">{legend}</ul>' * bool(legend)}
<div class="scroll" tabindex="0" role="img" aria-label="{escape(picture.alt)}">{picture.svg}</div>
<figcaption>{escape(picture.caption)}</figcaption>
</figure>
"""


def _load(load: Load) -> str:
    shown = load_pictures(load)
    place = "wide" if all(picture.wide for picture in shown) else "beside"
    evenness = _table("How even", SPREAD_COLUMNS, spreads(load)) + f'<p class="note">{escape(notes(load))}</p>'
    ranks = _table("By EP rank", rank_columns(load), range(load.ep_size))
    experts = _table("By expert", expert_columns(load), range(load.num_experts))
    return (
        f"<p>{escape(str(load))}.</p>"
        f'<div class="figures">{"".join(map(_figure, shown))}<div class="{place}">{evenness}</div></div>'
        + (ranks if load.ep_size <= 16 else _folded("Every rank", ranks))
        + _folded("Every expert", experts)
    )


def _folded(name: str, body: str) -> str:
    return f"<details><summary>{escape(name)}</summary>{body}</details>"


def _tolerance(comparison: Comparison) -> str:
    columns = (
        Column("for", lambda reason: ", ".join(reason[2]), words=True),
        Column("asserted", lambda reason: reason[0].value, words=True),
        Column("because", lambda reason: reason[1], words=True),
    )
    peers = (
        Column("test", lambda b: f"{b.peer.project}: {b.peer.test}", words=True),
        *others(comparison),
        Column("further, and what the numbers do not say", _further, words=True),
    )
    family = comparison.left.scheme.weights.name.replace("_", " ")
    return (
        _table("This comparison's own", columns, reasons(comparison))
        + _table(f"What tests of other projects allow a layer with {family} weights", peers, beside(comparison))
        + f'<p class="note">{escape(about_others(comparison))}. {escape(CAVEAT)}</p>'
    )


def _further(row: Beside) -> str:
    return "; ".join(filter(None, (row.peer.other, row.peer.seen)))


def _ran(comparison: Comparison) -> str:
    runs = (comparison.left, comparison.right)
    sources = dict.fromkeys(name for run in runs for name in run.source)
    rows = [("side", *(run.side for run in runs)), ("claims", *(run.claim.value for run in runs))]
    rows += [("shows", *map(_shows, runs))]
    rows += [(name, *(str(run.source.get(name, "-")) for run in runs)) for name in sources]
    headings = ("", "left, the expectation", "right")
    columns = [Column(h, lambda row, n=n: row[n], words=True) for n, h in enumerate(headings)]  # type: ignore[misc]
    pairs = (Column("field", lambda pair: pair[0], words=True), Column("value", lambda pair: pair[1], words=True))
    problem = comparison.left.problem
    details = {f"Scheme {comparison.left.scheme}": list(_flat(comparison.left.scheme))}
    if problem:
        details = {"Problem": [(name, _text(value)) for name, value in problem.as_json().items()]} | details
    folded = (_folded(name, _table(name, pairs, lines)) for name, lines in details.items())
    return _table("The two sides", columns, rows) + "".join(folded)


def _shows(run: Run) -> str:
    return ", ".join(stage for stage in STAGES if run.stages(stage))


def _flat(record: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    """Fields of a scheme and of the records in it."""
    for each in fields(record):
        value = getattr(record, each.name)
        if is_dataclass(value) and type(value).__str__ is object.__str__:
            yield from _flat(value, f"{prefix}{each.name}.")
        else:
            yield prefix + each.name, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        name = value.name.lower().replace("_", " ")
        return name if value.value in (name, value.name) else f"{name}: {value.value}"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_text(item)}" for name, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return "none" if value is None else str(value)


def _words() -> str:
    groups = (("Evidence", _EVIDENCE), ("Asserted: the rungs", _RUNGS), ("What holds", _HOLDS))
    lists = (
        f"<div><h3>{name}</h3><dl>"
        + "".join(f"<dt>{escape(word.value)}</dt><dd>{escape(text)}</dd>" for word, text in words.items())
        + "</dl></div>"
        for name, words in groups
    )
    return f'<div class="legends">{"".join(lists)}</div>'


# --- parts -------------------------------------------------------------------------------------------------------


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n"


def _table(caption: str, columns: Sequence[Column], rows: Sequence[Any], mood: Any = lambda row: "") -> str:
    """A table in a box of its own that scrolls where the window is narrow; the first cell of a row heads it."""
    classes = ["words" if column.words else "number" for column in columns]
    head = "".join(
        f'<th scope="col" class="{c}">{escape(column.heading)}</th>' for c, column in zip(classes, columns, strict=True)
    )
    body = []
    for row in rows:
        cells = [_breakable(escape(column.cell(row))) for column in columns]
        rest = "".join(f'<td class="{c}">{cell}</td>' for c, cell in zip(classes[1:], cells[1:], strict=True))
        body.append(f'<tr class="{mood(row)}"><th scope="row" class="{classes[0]}">{cells[0]}</th>{rest}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>\n"
    )


def _breakable(text: str) -> str:
    """Long names may break behind / and _."""
    return re.sub(r"(?<=[/_])(?=\w)", "<wbr>", text)


_STYLE = """
:root { color-scheme: light dark; --back: #f5f6f8; --panel: #fff; --ink: #1a1f26; --muted: #57606c; --line: #dbe0e6;
  --equal: #1a7348; --within: #1d5fa8; --outside: #b3261e; --empty: #6a5a12; }
@media (prefers-color-scheme: dark) { :root { --back: #0e1116; --panel: #171b22; --ink: #e6e9ed; --muted: #9aa5b1;
  --line: #2d343e; --equal: #57c98d; --within: #74b3f5; --outside: #ff8078; --empty: #d9c36a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
header, section { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: 1.25rem;
  margin: 0 0 1rem; min-width: 0; }
header { border-top: 5px solid var(--mood); }
h1, h3, p, li, summary, figcaption { overflow-wrap: anywhere; }
header p { margin: .35rem 0; }
header p b { display: inline-block; margin-right: .35rem; }
.equal { --mood: var(--equal); } .within { --mood: var(--within); } .outside { --mood: var(--outside); }
.empty { --mood: var(--empty); } .not-shown { --mood: var(--muted); }
h1 { margin: 0; font-size: 1.9rem; line-height: 1.25; color: var(--mood); }
h2 { margin: 0 0 .75rem; font-size: 1.1rem; }
h3 { margin: 0 0 .35rem; font-size: .95rem; }
.over, .under, .note, figcaption { color: var(--muted); font-size: .87rem; }
.chain { display: flex; flex-wrap: wrap; gap: .4rem; list-style: none; margin: 1rem 0 .75rem; padding: 0; }
.chain li { flex: 1 1 7.5rem; border: 1px solid var(--line); border-left: 4px solid var(--mood); border-radius: 6px;
  padding: .35rem .6rem; }
.chain b, .chain span { display: block; } .chain span { color: var(--mood); font-size: .87rem; }
.chain .outside { background: color-mix(in srgb, var(--mood) 9%, transparent); }
.chain .not-shown { border-style: dashed; }
.scroll { overflow-x: auto; max-width: 100%; }
.scroll + .scroll { margin-top: 1.25rem; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; }
caption { text-align: left; font-weight: 600; padding: 0 0 .3rem; }
th, td { padding: .28rem .6rem; text-align: left; vertical-align: top; font-weight: 400;
  border-top: 1px solid var(--line); }
tbody td.words { min-width: 5.5rem; } tbody th.words { min-width: 9rem; }
thead th { color: var(--muted); border-top: 0; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.within td, tr.outside td, tr.within th, tr.outside th { color: var(--mood); }
tr.outside th, tr.outside td { font-weight: 600; }
.figures { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 1.75rem 1.5rem; }
figure { margin: 0; min-width: 0; } .figures > .wide { grid-column: 1 / -1; }
.figures > .beside { grid-column: 2 / -1; min-width: 0; } .figures + .scroll { margin-top: 1.25rem; }
figure svg { display: block; width: 100%; height: auto; } figure.wide svg { min-width: 50rem; }
svg text { font-family: system-ui, sans-serif !important; }
.legend { display: flex; flex-wrap: wrap; gap: .15rem 1rem; list-style: none; margin: 0 0 .4rem; padding: 0;
  font-size: .87rem; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
.note { margin: .75rem 0 0; }
details { margin-top: .9rem; } summary { cursor: pointer; font-size: .87rem; font-weight: 600; }
details caption { display: none; }
.legends { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(17rem, 100%), 1fr));
  gap: 1rem 2rem; font-size: .87rem; }
dl { margin: 0; } dt { font-weight: 600; } dd { margin: 0 0 .4rem; color: var(--muted); }
@media (max-width: 40rem) { h1 { font-size: 1.45rem; } figure.narrow, .figures > .beside { grid-column: 1 / -1; } }
"""
