"""Run sides on every EP rank of a problem, three ways with one result: in this process, in processes of its own, or in
those that torchrun started."""

import atexit
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fp4ep.optimized.flashinfer_sm90 import stop_runtime
from fp4ep.reference.exchange import exchange_in_process
from fp4ep.reference.types import Trace
from fp4ep.reference.validate import InputError, check_arguments

from .distributed import ContactError, DistributedExchange, from_bytes, gather_traces, shares_gpus
from .problem import Layer, Problem
from .processes import GRACE, RankError, Tell, rank_processes, what_failed
from .run import Run
from .sides import Place, Side, local_layer

#: Called on rank 0 with (name of the side, rows done, rows in all).
Progress = Callable[[str, int, int], None]

#: What torchrun, or another launcher, says to the processes it starts.
_LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class UnavailableError(RuntimeError):
    """A side cannot run here."""


@dataclass(frozen=True)
class _Job:
    """What every rank does."""

    sides: Sequence[Side]
    problems: Sequence[Problem | Layer]
    timeout: float

    @property
    def ep_size(self) -> int:
        return self.problems[0].ep_size

    @property
    def gpu(self) -> bool:
        return any(side.gpu for side in self.sides)

    def shares_gpus(self, ranks_here: int) -> bool:
        return self.gpu and shares_gpus(ranks_here)


#: A layer and, from every side, the stages of all ranks (no sides on any rank but 0).
Result = tuple[Layer, list[Trace]]


def launch(
    sides: Sequence[Side],
    problem: Problem | Layer,
    *,
    how: str | None = None,
    timeout: float = 1800.0,
    progress: Progress | None = None,
) -> list[Run]:
    """Run each side on all ranks of a problem. See `launch_each`."""
    (runs,) = launch_each(sides, [problem], how=how, timeout=timeout, progress=progress)
    return runs


def launch_each(
    sides: Sequence[Side],
    problems: Sequence[Problem | Layer],
    *,
    how: str | None = None,
    timeout: float = 1800.0,
    progress: Progress | None = None,
) -> Iterator[list[Run]]:
    """For each problem, as it is done, one Run per side, in order.

    how: a key of WAYS; None is "torchrun" in a process that torchrun started, else "in_process". problems: all of one
    ep_size, built anew in every process. timeout: seconds that a rank may leave the others waiting; death and
    exceptions are noticed at once, so it is for hangs only. Under torchrun every rank makes the same call and those
    other than rank 0 get empty lists.

    Raises, before any communication: ValueError (InputError for a layer's tensors) on arguments that do not fit,
    UnavailableError where a side cannot run. Then RankError when a rank fails; in one process, what the side raised.
    """
    how = how or ("torchrun" if os.environ.keys() >= _LAUNCHED else "in_process")
    job = _Job(tuple(sides), tuple(problems), timeout)
    if how not in WAYS:
        raise ValueError(f"how: {how!r} is not one of {', '.join(WAYS)}")
    if len({problem.ep_size for problem in problems}) != 1:
        raise ValueError(f"problems must be some of one ep_size, got {[problem.ep_size for problem in problems]}")
    for side in sides:
        if reason := side.missing():
            raise UnavailableError(f"{side.name} cannot run here: {reason}")
    if job.gpu and how != "in_process" and not torch.cuda.device_count():
        raise UnavailableError(f"{', '.join(s.name for s in sides if s.gpu)} cannot run here: no CUDA device")
    return _runs(job, how, progress)


def _runs(job: _Job, how: str, progress: Progress | None) -> Iterator[list[Run]]:
    results = WAYS[how](job, progress)
    for problem, (layer, traces) in zip(job.problems, results, strict=True):
        spec = problem if isinstance(problem, Problem) else None
        pairs = zip(job.sides, traces, strict=True) if traces else ()
        yield [Run(s.name, s.claim, layer, trace, spec, _source(s, how)) for s, trace in pairs]


def _source(side: Side, how: str) -> Mapping[str, str]:
    if side.source is not None:
        return side.source
    cpu = f"{platform.machine()} CPU, {torch.backends.cpu.get_cpu_capability()}"
    hardware = torch.cuda.get_device_name() if side.gpu else cpu
    return {"hardware": hardware, "ranks": how} | {name: version(name) for name in ("fp4ep", "torch", *side.packages)}


def _checked(problem: Problem | Layer) -> Layer:
    """The layer, built and found to fit. Raises InputError alike in every process."""
    layer = problem.build() if isinstance(problem, Problem) else problem
    check_arguments(layer.scheme, layer.weights, layer.inputs, None, None)
    return layer


# --- all ranks in this process -----------------------------------------------------------------------------------


def _in_process(job: _Job, progress: Progress | None) -> Iterator[Result]:
    if job.gpu and job.ep_size > 1:
        names = ", ".join(side.name for side in job.sides if side.gpu)
        raise ValueError(f"how: {names} wants a process for each of {job.ep_size} ranks: 'spawned' or 'torchrun'")
    place = Place(range(job.ep_size), job.ep_size, exchange_in_process)
    for problem in job.problems:
        layer = _checked(problem)
        yield layer, [side.run(layer, place, _of(side, progress)) for side in job.sides]


def _of(side: Side, progress: Progress | None) -> Callable[[int, int], None] | None:
    return progress and (lambda done, total: progress(side.name, done, total))


# --- one rank per process ----------------------------------------------------------------------------------------


def _init_group(job: _Job, shared: bool, **options: Any) -> None:
    backend = "cpu:gloo,cuda:nccl" if job.gpu and not shared else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=job.timeout), **options)


def _one_rank(job: _Job, rank: int, local: int, shared: bool, progress: Progress | None) -> Iterator[Result]:
    """On the default group. local: the rank's number on this machine; shared: see `shares_gpus`.

    Ranks other than 0 keep the weights of their own experts only, unless a side wants the whole.
    """
    gpu = local % torch.cuda.device_count() if job.gpu else 0
    if job.gpu:
        torch.cuda.set_device(gpu)
    exchange = DistributedExchange(device=f"cuda:{gpu}" if job.gpu and not shared else "cpu")
    place = Place((rank,), job.ep_size, exchange)
    for problem in job.problems:
        layer = _checked(problem)
        mine = local_layer(layer, place)
        if rank and not any(side.whole for side in job.sides):
            layer = mine
        gathered = [
            gather_traces(side.run(layer if side.whole else mine, place, None if rank else _of(side, progress)))
            for side in job.sides
        ]
        yield layer, [trace for trace in gathered if trace is not None]


def _torchrun(job: _Job, progress: Progress | None) -> Iterator[Result]:
    """Joins the group that is there, or makes it and leaves it for later calls."""
    absent = _LAUNCHED - os.environ.keys()
    if absent and not dist.is_initialized():
        raise ValueError(f"how: 'torchrun' needs {', '.join(sorted(absent))} in the environment: start with torchrun")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else _launched()
    if size != job.ep_size:
        raise ValueError(f"ep_size: {job.ep_size} ranks need as many processes, torchrun started {size}")
    local = int(os.environ.get("LOCAL_RANK", rank))
    shared = job.shares_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    if not dist.is_initialized():
        _init_group(job, shared)
        atexit.register(dist.destroy_process_group)
    if job.gpu:
        atexit.register(stop_runtime)
    try:
        yield from _one_rank(job, rank, local, shared, progress)
    except InputError:
        raise  # alike on all ranks
    except Exception as error:
        atexit.unregister(dist.destroy_process_group)  # both take all ranks
        atexit.unregister(stop_runtime)
        if isinstance(error, ContactError):
            time.sleep(GRACE)  # the rank at fault speaks first, and torchrun ends this one
        raise RankError(rank, what_failed(error)) from error


def _launched() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


# --- processes of our own ----------------------------------------------------------------------------------------


def _spawned(job: _Job, progress: Progress | None) -> Iterator[Result]:
    with rank_processes(_rank_process, job.ep_size, job, job.timeout) as messages:
        for problem in job.problems:
            layer = _checked(problem)
            for kind, *rest in messages:
                if kind == "traces":
                    yield layer, rest[0]
                    break
                if progress:
                    progress(*rest)
        for _ in messages:  # until every rank is done
            pass


def _rank_process(rank: int, folder: Path, tell: Tell) -> None:
    job: _Job = from_bytes((folder / "job").read_bytes())
    torch.set_num_threads(max(1, torch.get_num_threads() // job.ep_size))  # which starts as the number of cores
    shared = job.shares_gpus(job.ep_size)
    store = dist.FileStore(str(folder / "store"), job.ep_size)
    _init_group(job, shared, store=store, rank=rank, world_size=job.ep_size)
    for _, traces in _one_rank(job, rank, rank, shared, partial(tell, "progress")):
        if rank == 0:
            tell("traces", traces)
    if job.gpu:
        stop_runtime()
    dist.destroy_process_group()


#: How ranks run: (job, progress) -> a Result for each problem.
WAYS: dict[str, Callable[[_Job, Progress | None], Iterator[Result]]] = {
    "in_process": _in_process,
    "spawned": _spawned,
    "torchrun": _torchrun,
}
