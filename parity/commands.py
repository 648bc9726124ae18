"""The commands `fp4ep parity run`, `compare` and `report`.

Exit status: 0 the right side keeps its promise, 1 it does not, 2 bad arguments or files, 3 a side cannot run here or a
rank failed.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fp4ep.reference.scheme import Evidence
from fp4ep.reference.schemes import SCHEMES

from .compare import Comparison, compare
from .diagnose import diagnose
from .html import write_page
from .launch import UnavailableError, launch_each
from .pictures import require
from .problem import CASES, ROUTING, VALUES, Layer, Problem, problems
from .processes import RankError
from .run import Run, load_run, save_run
from .sides import RECORDING, find_side
from .summary import as_json, print_comparison
from .tolerance import check_claims

_SIDES = (
    "reference, fast, cuda, fake_quant, flashinfer, fault:NAME (see docs/planted_bugs.md), recording:FILE or "
    "recording:FILE#CASE"
)
#: Fields of Problem that are numbers or names on the command line.
SIZES = ("num_experts", "top_k", "hidden", "intermediate", "padding", "seed")


def add_parser(commands) -> None:
    """Add `parity` to the subcommands of `fp4ep`."""
    parity = commands.add_parser("parity", help="compare two implementations of a layer, stage by stage")
    verbs = parity.add_subparsers(dest="verb", required=True)

    run = verbs.add_parser("run", help="run two sides on one problem and compare them")
    add_problem_arguments(run)
    run.add_argument("--left", default="reference", metavar="SIDE", help=f"the expectation: {_SIDES} (%(default)s)")
    run.add_argument("--right", default="fake_quant", metavar="SIDE", help="what is judged (%(default)s)")
    run.add_argument("--ep", type=int, default=1, metavar="N", help="number of EP ranks (%(default)s)")
    run.add_argument("--spawn", action="store_true", help="one process per rank over gloo (else all in this process)")
    run.add_argument("--case", default="ordinary", help=f"'all' or one of: {', '.join(CASES)} (%(default)s)")
    run.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="longest wait for a silent rank")
    run.add_argument("--save", type=Path, metavar="DIR", help="save both runs there")

    two = verbs.add_parser("compare", help="compare two saved runs")
    two.add_argument("left", type=Path)
    two.add_argument("right", type=Path)

    report = verbs.add_parser("report", help="write one HTML page about a folder that `run --save` made, or two runs")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a folder, or the left and the right file")
    report.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (report.html beside the right run)")

    for command in (run, two):
        command.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page too")
    for command in (run, two, report):
        command.add_argument("--json", action="store_true", help="print the comparison as JSON")


def add_problem_arguments(command: argparse.ArgumentParser) -> None:
    """What makes problems, but for --case and --ep; see `chosen_problems`."""
    command.add_argument("--scheme", help="FlashInfer's registry name, or a part that fits one only, or one verified")
    command.add_argument("--option", action="append", default=[], metavar="KNOB=VALUE", help="as for find_scheme")
    command.add_argument("--tokens", metavar="T[,T...]", help="in all, or of each rank (16)")
    command.add_argument("--values", choices=VALUES, help="how hidden_states are made, in place of the case's")
    command.add_argument("--routing", choices=ROUTING, help="how topk_ids are made, in place of the case's")
    for name in SIZES:
        command.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")


def main(arguments: argparse.Namespace) -> int:
    try:
        if arguments.verb == "report" or arguments.html:
            require()
        return {"run": _run, "compare": _compare, "report": _report}[arguments.verb](arguments)
    except (UnavailableError, RankError) as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        print(f"fp4ep parity {arguments.verb}: {error}{notes}", file=sys.stderr)
        return 3
    except (ImportError, ValueError, OSError) as error:
        print(f"fp4ep parity {arguments.verb}: {error}", file=sys.stderr)
        return 2


# --- run ---------------------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    sides = [find_side(arguments.left), find_side(arguments.right)]
    check_claims(sides[0].name, sides[0].claim, sides[1].claim)
    recorded = {side.name: side.layer(arguments.ep) for side in sides if side.layer}
    named: dict[str, Problem | Layer] = {**recorded} if recorded else {**chosen_problems(arguments)}
    if len(named) > 1 and arguments.html:
        raise ValueError("--html: one page shows one case; give --case, or --save DIR and `fp4ep parity report`")
    how = "spawned" if arguments.spawn else None
    text, percent = TextColumn("{task.description}"), TextColumn("{task.percentage:3.0f}%")
    found: dict[str, Comparison] = {}
    with Progress(text, BarColumn(), percent, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def progress(side: str, done: int, total: int) -> None:
            bar.update(task, completed=done / max(total, 1), description=side)

        runs = launch_each(sides, list(named.values()), how=how, timeout=arguments.timeout, progress=progress)
        for name, pair in zip(named, runs, strict=True):
            if not pair:  # a rank other than 0 under torchrun
                continue
            if arguments.save:
                _save(pair, arguments.save if len(named) == 1 else arguments.save / name.replace(" ", "_"))
            found[name] = compare(*pair)
    return _tell(found, arguments)


def _save(pair: Sequence[Run], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for run, name in zip(pair, _FILES, strict=True):
        save_run(run, folder / name)


_FILES = ("left.safetensors", "right.safetensors")


def chosen_problems(arguments: argparse.Namespace) -> dict[str, Problem]:
    """By name of the case: `add_problem_arguments`', `case` ("all" or a key of CASES) and `ep`. Raises ValueError."""
    if not arguments.scheme:
        raise ValueError(f"--scheme is needed unless a side is {RECORDING}FILE")
    changes = {name: getattr(arguments, name) for name in SIZES if getattr(arguments, name) is not None}
    options = dict(_option(text) for text in arguments.option)
    cases = None if arguments.case == "all" else [arguments.case]
    chosen = problems(_scheme_name(arguments.scheme), options, cases, **changes)
    return {name: _spread(problem, arguments) for name, problem in chosen.items()}


def _spread(problem: Problem, arguments: argparse.Namespace) -> Problem:
    """The problem with the command line's tokens, values, routing and ranks."""
    given = {name: getattr(arguments, name) for name in ("values", "routing") if getattr(arguments, name)}
    tokens = tuple(int(t) for t in arguments.tokens.split(",")) if arguments.tokens else problem.tokens
    if len(tokens) == arguments.ep:
        return replace(problem, tokens=tokens, **given)
    if arguments.tokens and len(tokens) > 1:
        raise ValueError(f"--tokens must be one number or one for each of {arguments.ep} ranks, got {len(tokens)}")
    return replace(problem, tokens=(sum(tokens),), **given).over(arguments.ep)


def _scheme_name(text: str) -> str:
    names = sorted({scheme.name for scheme in SCHEMES})
    fitting = [name for name in names if text == name] or [name for name in names if text in name]
    if len(fitting) > 1:
        verified = {scheme.name for scheme in SCHEMES if scheme.evidence is Evidence.VERIFIED}
        fitting = [name for name in fitting if name in verified] or fitting
    if len(fitting) != 1:
        raise ValueError(f"--scheme: {text!r} must fit one of {', '.join(names)}; it fits {len(fitting)}")
    return fitting[0]


def _option(text: str) -> tuple[str, object]:
    knob, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--option must be KNOB=VALUE, got {text!r}")
    try:
        return knob, json.loads(value)
    except json.JSONDecodeError:
        return knob, value


# --- saved runs --------------------------------------------------------------------------------------------------


def _compare(arguments: argparse.Namespace) -> int:
    found = compare(load_run(arguments.left), load_run(arguments.right))
    return _tell({str(arguments.right): found}, arguments)


def _report(arguments: argparse.Namespace) -> int:
    files = arguments.runs
    if len(files) == 1:
        files = [files[0] / name for name in _FILES]
    if len(files) != 2:
        raise ValueError(f"RUN must be one folder or two files, got {len(files)}")
    found = compare(*map(load_run, files))
    arguments.html = arguments.output or files[1].with_name("report.html")
    return _tell({str(files[1]): found}, arguments)


# --- what is told ------------------------------------------------------------------------------------------------


def _tell(found: dict[str, Comparison], arguments: argparse.Namespace) -> int:
    console = Console(width=None if sys.stdout.isatty() else 160)
    told = []
    for name, comparison in found.items():
        diagnoses = diagnose(comparison)
        if arguments.json:
            told.append({"case": name} | as_json(comparison, diagnoses))
        elif len(found) == 1 or not comparison.passed:
            print_comparison(comparison, diagnoses, console)
        else:
            console.print(f"holds: {name}", highlight=False, markup=False)
        if arguments.html:
            write_page(comparison, diagnoses, arguments.html)
            print(f"wrote {arguments.html}", file=sys.stderr)
    if told:
        print(json.dumps(told[0] if len(told) == 1 else told, indent=1, allow_nan=False))
    return int(not all(comparison.passed for comparison in found.values()))
