"""The command `fp4ep`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fp4ep.optimized.engine_cpu import missing_for_engine

from . import inspect_command, record_command
from .commands import add_parser
from .commands import main as parity
from .evidence import PageError, check_page, write_page
from .recording import Recording, RecordingError
from .replay import AUTO, FAST, REFERENCE, Result, replay_cases, shipped_recordings
from .report import print_results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Exit status of `replay`: 0 all bits equal, 1 some differ, 2 bad arguments or files; of
    `parity`, `inspect` and `record`: see `commands.py`, `inspect_command.py` and `record_command.py`."""
    parser = argparse.ArgumentParser(prog="fp4ep", description="Bit-exact parity for FP4 mixture-of-experts kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "replay",
        help="run recordings of real kernels through the reference",
        description="Run recordings of real kernels through the reference, on the CPU, and compare every bit. "
        "Exit status 1 on any difference.",
    )
    command.add_argument("recordings", nargs="*", type=Path, help="recording files (default: those shipped with fp4ep)")
    command.add_argument("--match", default="", metavar="TEXT", help="only cases whose scheme or title contains TEXT")
    command.add_argument(
        "--by",
        choices=(AUTO, REFERENCE, FAST),
        default=AUTO,
        help="what runs the cases: the reference, the CPU engine, or the engine for those whose outputs are kept as "
        "digests and the reference for the others (%(default)s)",
    )
    command.add_argument("--json", action="store_true", help="print the results as JSON")
    command.add_argument(
        "--page", type=Path, metavar="FILE", help="put the tables into a Markdown page (docs/evidence.md)"
    )
    add_parser(commands)
    inspect_command.add_parser(commands)
    record_command.add_parser(commands)
    arguments = parser.parse_args(argv)
    if arguments.command == "parity":
        return parity(arguments)
    if arguments.command == "inspect":
        return inspect_command.main(arguments)
    if arguments.command == "record":
        return record_command.main(arguments)
    try:
        return _replay(arguments)
    except (PageError, RecordingError, OSError) as error:
        print(f"fp4ep replay: {error}", file=sys.stderr)
        return 2


def _replay(arguments: argparse.Namespace) -> int:
    recordings = [Recording(path) for path in arguments.recordings or shipped_recordings()]
    work = [(r, c) for r in recordings for c in r.cases if arguments.match in f"{c.scheme} {c.title} {c.options}"]
    if not work:
        print(f"fp4ep replay: --match {arguments.match!r} leaves no case", file=sys.stderr)
        return 2
    if arguments.by == FAST and (reason := missing_for_engine()):
        print(f"fp4ep replay: --by {FAST}: {reason}", file=sys.stderr)
        return 2
    if arguments.page:
        check_page(arguments.page)
    results: list[Result] = []
    text, percent = TextColumn("{task.description}"), TextColumn("{task.percentage:3.0f}%")
    with Progress(text, BarColumn(), percent, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(work))

        def progress(case):
            bar.update(task, completed=len(results), description=case.title)
            return lambda share: bar.update(task, completed=len(results) + share)

        for recording in recordings:
            for result in replay_cases(recording, [c for r, c in work if r is recording], progress, arguments.by):
                results.append(result)
            recording.forget()
    if arguments.page:
        write_page(arguments.page, [(r, c, result.differing) for (r, c), result in zip(work, results, strict=True)])
    if arguments.json:
        print(json.dumps([r.as_json() for r in results], indent=1))
    else:
        print_results(results, Console(width=None if sys.stdout.isatty() else 160))
    return int(any(r.differing for r in results))


if __name__ == "__main__":
    sys.exit(main())
