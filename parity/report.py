"""Tables on a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .replay import Result


def print_results(results: Sequence[Result], console: Console) -> None:
    """The replay table and its verdict."""
    table = Table(box=None, pad_edge=False)
    for heading, justify in (
        ("scheme", "left"),
        ("case", "left"),
        ("hardware, version", "left"),
        ("elements", "right"),
        ("differing", "right"),
        ("evidence", "left"),
        ("s", "right"),
    ):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for r in results:
        table.add_row(
            escape(r.scheme),
            escape(r.case),
            f"{r.hardware}, {r.version}",
            f"{r.elements:,}",
            f"{r.differing:,}",
            r.evidence.value if r.evidence else "[bold red]DIFFERS[/]",
            f"{r.seconds:.1f}",
        )
    console.print(table)
    for r in results:
        if r.first:
            console.print(f"first difference in {r.recording}, {r.case}: {r.first}", highlight=False, markup=False)
    differing, elements = sum(r.differing for r in results), sum(r.elements for r in results)
    console.print(f"{len(results)} cases, {elements:,} elements, {differing:,} differing", highlight=False)
