"""Tables on a terminal."""

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .replay import FAST, Result


def print_results(results: Sequence[Result], console: Console) -> None:
    """The replay table, the first difference of every case that has one, and the sums."""
    table = Table(box=None, pad_edge=False)
    table.add_column("scheme", no_wrap=True)
    table.add_column("hardware, version", no_wrap=True)
    for heading in ("elements", "differing"):
        table.add_column(heading, justify="right")
    table.add_column("evidence")
    table.add_column("s", justify="right")
    for scheme, group in groupby(sorted(results, key=lambda r: r.scheme), key=lambda r: r.scheme):
        table.add_row(f"[bold]{escape(scheme)}[/]")
        for r in group:
            table.add_row(
                f"  {escape(r.case)}",
                f"{r.hardware}, {r.version}",
                f"{r.elements:,}",
                f"{r.differing:,}",
                r.evidence.value if r.evidence else "[bold red]DIFFERS[/]",
                f"{r.seconds:.1f}",
            )
    console.print(table)
    for r in results:
        if r.first:
            where = f"{r.recording}: {r.scheme}, {r.case}"
            console.print(f"first difference in {where}: {r.first}", highlight=False, markup=False, soft_wrap=True)
    differing, elements = sum(r.differing for r in results), sum(r.elements for r in results)
    console.print(f"{len(results)} cases, {elements:,} elements, {differing:,} differing", highlight=False)
    if fast := [r for r in results if r.by == FAST]:
        by_engine = f"{len(fast)} cases, {sum(r.elements for r in fast):,} elements, ran on the CPU engine"
        console.print(f"{by_engine}, the others on the reference", highlight=False)
