"""The command `fp4ep record`.

Exit status: 0 recorded, 1 refused because launches gave different bits (of the shipped recordings: a case was left
out), 2 bad arguments or files, 3 cannot run here or a rank failed. Nothing is written of a recording that fails.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from fp4ep.optimized.config import EpGroup
from fp4ep.optimized.flashinfer_sm90 import CONFIGS
from fp4ep.reference.scheme import Combine
from fp4ep.reference.validate import check_arguments

from .commands import SIZES, add_problem_arguments, chosen_problems
from .distributed import ContactError
from .flashinfer_record import (
    CORPORA,
    FLASHINFER,
    Kernels,
    Report,
    UnsteadyError,
    record_corpus,
    record_problems,
    started_group,
    started_ranks,
)
from .launch import UnavailableError
from .order_set import MAX_LIVE
from .problem import CASES, Problem
from .processes import GRACE, what_failed

#: (group, kernels, report) -> a line about each file, on rank 0.
Work = Callable[[EpGroup, Kernels, Report], list[str]]

_USAGE = """fp4ep record FOLDER [--only NAME ...]
       fp4ep record FILE --scheme SCHEME [--option KNOB=VALUE] [--case CASE ...] [--ep N] [--tokens T[,T...]]
                    [--values NAME] [--routing NAME] [--num-experts N] [--top-k N] [--hidden N] [--intermediate N]
                    [--padding N] [--seed N]"""


def add_parser(commands) -> None:
    """Add `record` to the subcommands of `fp4ep`."""
    command = commands.add_parser(
        "record",
        usage=_USAGE,
        help="record what FlashInfer's kernels give, on a GPU",
        description="Launch FlashInfer's kernels three times and write what they gave as a recording, which "
        "`fp4ep replay` runs: problems of the harness with --scheme, the shipped recordings without. Launches that "
        "differ are refused unless the scheme sums in order of arrival; then each is a case. Several EP ranks: "
        "`torchrun --nproc-per-node N -m fp4ep.parity record ...`.",
    )
    command.add_argument("target", type=Path, metavar="FOLDER or FILE", help="an existing folder, or the file to write")
    command.add_argument(
        "--only", action="extend", nargs="+", default=[], metavar="NAME", help=f"some of: {', '.join(CORPORA)}"
    )
    add_problem_arguments(command)
    command.add_argument(
        "--case", action="extend", nargs="+", default=[], help=f"'all' or some of: {', '.join(CASES)} (ordinary)"
    )
    command.add_argument("--ep", type=int, metavar="N", help="number of EP ranks (as many as torchrun started)")


#: What makes a problem, beside the scheme.
_OF_PROBLEMS = ("option", "case", "ep", "tokens", "values", "routing", *SIZES)


def main(arguments: argparse.Namespace, kernels: Kernels = FLASHINFER) -> int:
    """Under torchrun every rank makes the call; there, a rank that fails while kernels run ends its process, and
    torchrun the others."""
    try:
        modules, work = _checked_work(arguments)
        absent = [f"{name} is not installed" for name in modules if find_spec(name) is None]
        if reason := kernels.missing() or ", ".join(absent):
            raise UnavailableError(f"cannot run here: {reason}")
    except (UnavailableError, ValueError, OSError) as error:
        return _refused(error, 3 if isinstance(error, UnavailableError) else 2)
    rank = int(os.environ.get("RANK", "0"))
    said = _Lines(rank == 0)
    try:
        with started_group(kernels.gpu) as group:
            told = work(group, kernels, said)
    except Exception as error:
        return _failed(error, rank)
    if rank == 0:
        print("\n".join(told), flush=True)
    return int(said.left_out)


class _Lines:
    """Prints lines with the seconds since the start. left_out: whether one says so."""

    def __init__(self, shown: bool) -> None:
        self.shown, self.left_out, self.start = shown, False, time.perf_counter()

    def __call__(self, line: str) -> None:
        self.left_out |= line.startswith("LEFT OUT")
        if self.shown:
            print(f"{time.perf_counter() - self.start:6.1f} s  {line}", flush=True)


# --- before anything runs ----------------------------------------------------------------------------------------


def _checked_work(arguments: argparse.Namespace) -> tuple[set[str], Work]:
    """The modules it takes, and what the arguments ask for. Raises ValueError; OSError where nothing can be written."""
    target: Path = arguments.target
    if arguments.scheme is None:
        if given := [
            f"--{name.replace('_', '-')}" for name in _OF_PROBLEMS if getattr(arguments, name) not in (None, [])
        ]:
            raise ValueError(f"{', '.join(given)}: only with --scheme")
        names = _corpora(arguments.only)
        _check_writable("FOLDER", target)
        modules = {name for corpus in names for name in CORPORA[corpus].modules}
        return modules, lambda *place: [_record_corpus(name, target, *place) for name in names]
    if arguments.only:
        raise ValueError("--only: not with --scheme")
    named = _checked_problems(arguments)
    if target.is_dir():
        raise ValueError(f"FILE: {target} is a folder")
    _check_writable("FILE", target.parent)
    return set(), lambda *place: [_record_problems(target, named, *place)]


def _check_writable(what: str, folder: Path) -> None:
    if int(os.environ.get("RANK", "0")):
        return  # rank 0 writes, maybe on another machine
    if not folder.is_dir():
        raise ValueError(f"{what}: {folder} is not a folder" + "; a file takes --scheme" * (what == "FOLDER"))
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{what}: {folder} cannot be written")


def _corpora(only: Sequence[str]) -> list[str]:
    ranks = started_ranks()
    if unknown := [name for name in only if name not in CORPORA]:
        raise ValueError(f"--only: {', '.join(unknown)} not among {', '.join(CORPORA)}")
    for name in only:
        _check_ranks(f"--only {name}", CORPORA[name].ep_size)
    names = [name for name, corpus in CORPORA.items() if corpus.ep_size == ranks and (not only or name in only)]
    if not names:
        sizes = sorted({corpus.ep_size for corpus in CORPORA.values()})
        raise ValueError(f"FOLDER: the shipped recordings take {' or '.join(map(str, sizes))} ranks, here are {ranks}")
    return names


def _check_ranks(what: str, wanted: int) -> None:
    if wanted != (ranks := started_ranks()):
        how = f"with torchrun --nproc-per-node {wanted}" if wanted > 1 else "without torchrun"
        raise ValueError(f"{what}: start {how}; here {'is 1 rank' if ranks == 1 else f'are {ranks} ranks'}")


def _checked_problems(arguments: argparse.Namespace) -> dict[str, Problem]:
    if arguments.ep is not None:
        _check_ranks(f"--ep {arguments.ep}", arguments.ep)
    named: dict[str, Problem] = {}
    for case in arguments.case or ["ordinary"]:
        named |= chosen_problems(argparse.Namespace(**vars(arguments) | {"ep": started_ranks(), "case": case}))
    for name, problem in named.items():
        _check(name, problem)
    return named


def _check(name: str, problem: Problem) -> None:
    """Raises ValueError where FlashInfer has no such kernel, would hang, or gives what no replay can judge."""
    if problem.scheme not in CONFIGS:
        raise ValueError(f"--scheme: {problem.scheme} cannot be launched, only {', '.join(CONFIGS)}")
    layer = problem.build()
    check_arguments(layer.scheme, layer.weights, layer.inputs, None, None)
    if layer.scheme.combine is not Combine.ON_ARRIVAL:
        return
    if problem.top_k > MAX_LIVE:
        raise ValueError(f"--top-k: orders of arrival can be judged up to {MAX_LIVE}, got {problem.top_k}")
    if problem.ep_size > 1 and not all(len(inputs.hidden_states) for inputs in layer.inputs):
        raise ValueError(
            f"--tokens: {name!r} leaves a rank without tokens; there FlashInfer 0.7.4 launches nothing with "
            "enable_in_kernel_fc2_reduce, and the other ranks wait for ever"
        )


def _refused(error: Exception, status: int) -> int:
    """Every rank of a machine comes to the same end; one says so, and torchrun ends the others when it is gone."""
    if int(os.environ.get("LOCAL_RANK", "0")):
        time.sleep(12 * GRACE)
    else:
        print(f"fp4ep record: {error}", file=sys.stderr)
    return status


# --- while kernels run -------------------------------------------------------------------------------------------


def _record_corpus(name: str, folder: Path, group: EpGroup, kernels: Kernels, report: Report) -> str:
    count = record_corpus(name, folder, group, kernels, report)
    return f"wrote {folder / name}.safetensors: {count} case{'s' * (count != 1)}"


def _record_problems(path: Path, named: dict[str, Problem], group: EpGroup, kernels: Kernels, report: Report) -> str:
    count = record_problems(path, named, group, kernels, report)
    return f"wrote {path}: {count} case{'s' * (count != 1)}; compare with `fp4ep replay {path}`"


def _failed(error: Exception, rank: int) -> int:
    """The rank at fault speaks. Of several, none ends as Python does: what ends a kernel or a group waits for all."""
    unsteady, ranks = isinstance(error, UnsteadyError), started_ranks()
    status = 1 if unsteady else 3
    if isinstance(error, ContactError) or (unsteady and rank):
        time.sleep(GRACE)  # torchrun ends this process when the one that speaks is gone
    if unsteady and not rank:
        print(f"fp4ep record: {error}; nothing is written", file=sys.stderr)
    elif not unsteady:
        if not isinstance(error, ContactError):
            traceback.print_exception(error)
        print(f"fp4ep record: rank {rank} {what_failed(error)}; nothing is written", file=sys.stderr)
    if ranks > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
