"""The command `fp4ep inspect`.

Exit status: 0 nothing but notes, 1 warnings or errors found, 2 bad arguments or files.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fp4ep.optimized.checkpoint_checks import Finding, Level
from fp4ep.optimized.checkpoint_conventions import in_words
from fp4ep.optimized.inspect_checkpoint import LayerReport, Report, inspect_checkpoint

_STYLES = {Level.ERROR: "bold red", Level.WARNING: "yellow", Level.NOTE: "dim"}


def add_parser(commands) -> None:
    """Add `inspect` to the subcommands of `fp4ep`."""
    command = commands.add_parser(
        "inspect",
        help="tell the FP4 convention of a checkpoint and what is wrong with it",
        description="Read the FP4 experts of a safetensors checkpoint and report their convention, mistakes known from "
        "public bug reports, and the megakernels that take them. Exit status 1 on warnings and errors.",
    )
    command.add_argument("checkpoint", type=Path, help="a folder of safetensors files, or one of them")
    command.add_argument(
        "--layer",
        action="append",
        metavar="N",
        help="a layer's number, or its name such as mtp.0.ffn.experts; may be repeated (default: all layers)",
    )
    command.add_argument("--json", action="store_true", help="print the report as JSON")


def main(arguments: argparse.Namespace) -> int:
    layers = arguments.layer and [int(text) if text.isdecimal() else text for text in arguments.layer]
    text, percent = TextColumn("{task.description}"), TextColumn("{task.percentage:3.0f}%")
    bar = Progress(text, BarColumn(), percent, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=1.0)
    try:
        with ExitStack() as shown:

            def progress(layer: str, done: int, total: int) -> None:
                if not bar.live.is_started:
                    shown.enter_context(bar)
                bar.update(task, completed=done / max(total, 1), description=escape(layer))

            report = inspect_checkpoint(arguments.checkpoint, layers, progress)
    except (ValueError, OSError) as error:
        print(f"fp4ep inspect: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(report.as_json(), indent=1, allow_nan=False))
    else:
        print_report(report, Console(width=None if sys.stdout.isatty() else 160))
    return int(report.level > Level.NOTE)


def print_report(report: Report, console: Console) -> None:
    """A table of the layers that are alike, what tells their convention, the findings, and the backends."""
    names = {layer.layer: layer for layer in report.layers}
    table = Table(box=None, pad_edge=False)
    table.add_column("layers")
    table.add_column("convention", no_wrap=True)
    for heading in ("experts", "hidden", "intermediate"):
        table.add_column(heading, justify="right")
    table.add_column("kernels")
    groups = _alike(report.layers, lambda x: (x.convention, x.experts, x.hidden, x.intermediate, x.backends))
    for group in groups:
        first = group[0]
        takers = [name.removeprefix("flashinfer_moe_ep_") for name, reasons in first.backends.items() if not reasons]
        sizes = (f"{n:,}" for n in (first.experts, first.hidden, first.intermediate))
        table.add_row(escape(_numbers(group)), first.convention or "none known", *sizes, ", ".join(takers) or "none")
    console.print(table)
    for group in groups:
        if not any(not reasons for reasons in group[0].backends.values()):
            _say(console, f"\nno kernel takes {_layers(group)}:")
            for name, reasons in group[0].backends.items():
                _say(console, f"  {name}: {'; '.join(reasons)}")
    for group in _alike(report.layers, lambda x: dict(x.evidence)):
        if group[0].evidence:
            _say(console, f"\n{_layers(group)}")
        for question, answer in group[0].evidence.items():
            _say(console, f"  {question}: {answer}")
        for what, values in (("", [x.amax for x in group]), (" if inverted", [x.inverted_amax for x in group])):
            known = [value for value in values if value is not None]
            if known:
                _say(console, f"  largest weight{what}: {_span(known)} (bound by the scales, median over experts)")
    if report.findings:
        console.print()
    for findings in _alike(report.findings, lambda f: (f.level, f.check)):
        _print_finding(findings, names, console)
    counts = {level: sum(f.level is level for f in report.findings) for level in reversed(Level)}
    summary = ", ".join(f"{count} {level.name.lower()}{'s' * (count != 1)}" for level, count in counts.items())
    _say(console, f"\n{len(report.layers)} layer{'s' * (len(report.layers) != 1)}: {summary}")


#: Findings of one check that are printed; `--json` has all.
_SHOWN = 3


def _print_finding(findings: Sequence[Finding], names: dict[str, LayerReport], console: Console) -> None:
    first = findings[0]
    reports = f"  [dim]{escape(', '.join(first.reports))}[/]" if first.reports else ""
    console.print(
        f"[{_STYLES[first.level]}]{first.level.name.lower()}[/] {escape(first.check)}{reports}", highlight=False
    )
    for f in findings[:_SHOWN]:
        where = f"{_layers([names[f.layer]])}: " if f.layer in names else ""
        experts = f"; expert{'s' * (len(f.experts) != 1)} {in_words(f.experts)}" if f.experts else ""
        _say(console, f"  {where}{f.text}{experts}")
    rest = [names[f.layer] for f in findings[_SHOWN:] if f.layer in names]
    if rest:
        _say(console, f"  and {len(findings) - _SHOWN} more, in {_layers(rest)}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)


def _alike(items: Iterable, key) -> list[list]:
    """Items of equal key together, in the order of first appearance."""
    groups: list[tuple[object, list]] = []
    for item in items:
        found = next((members for k, members in groups if k == key(item)), None)
        if found is None:
            groups.append((key(item), [item]))
        else:
            found.append(item)
    return [members for _, members in groups]


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


def _layers(layers: Sequence[LayerReport]) -> str:
    return f"layer{'s' * (len(layers) != 1)} {_numbers(layers)}"


def _numbers(layers: Iterable[LayerReport]) -> str:
    """'3-5, 9, mtp.0.ffn.experts'"""
    layers = list(layers)
    numbers = in_words(layer.number for layer in layers if layer.number is not None)
    return ", ".join([*([numbers] if numbers else []), *(layer.layer for layer in layers if layer.number is None)])
