"""Work in worker processes that may die or hang: each costs one answer, not the rest."""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any


@dataclass(frozen=True)
class Failure:
    """In place of an answer: what became of the work."""

    reason: str


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    item: int  #: what it works on
    deadline: float


def run_each(
    function: Callable[[Any], Any], items: Sequence[Any], workers: int, timeout: float
) -> Iterator[tuple[int, Any]]:
    """(index, answer) for each item, as they come. function and items travel by pickle, to fresh processes.

    An answer is what the function returns; a Failure where it raises, its process dies or it takes longer than timeout
    seconds. A worker that failed is replaced: what broke may be the process, as a GPU's context is after a bad access.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(range(len(items)))[::-1]
    busy: dict[Connection, _Worker] = {}

    def give(worker: _Worker | None) -> None:
        if not waiting:
            if worker:
                worker.pipe.close()
            return
        if worker is None:
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(function, theirs), daemon=True)
            process.start()
            theirs.close()
            worker = _Worker(process, mine, 0, 0.0)
        worker.item, worker.deadline = waiting.pop(), time.monotonic() + timeout
        with suppress(OSError):  # it is dead already, and its answer will say so
            worker.pipe.send(items[worker.item])
        busy[worker.pipe] = worker

    try:
        for _ in range(min(workers, len(items))):
            give(None)
        while busy:
            soonest = min(worker.deadline for worker in busy.values())
            ready = wait(list(busy), max(0.0, soonest - time.monotonic()))
            late = {pipe for pipe, worker in busy.items() if worker.deadline <= time.monotonic()}
            for pipe in [pipe for pipe in busy if pipe in ready or pipe in late]:
                worker = busy.pop(pipe)
                item = worker.item
                answer = _answer(worker) if pipe in ready else Failure(f"no answer in {timeout:.0f} s")
                if isinstance(answer, Failure):
                    worker.process.kill()
                    worker.process.join()
                give(None if isinstance(answer, Failure) else worker)
                yield item, answer
    finally:
        for worker in busy.values():
            worker.process.kill()


def _answer(worker: _Worker) -> Any:
    try:
        return worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join()
        return Failure(f"the process ended with status {worker.process.exitcode}")


def _work(function: Callable[[Any], Any], pipe: Connection) -> None:
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        try:
            answer = function(item)
        except Exception as error:
            traceback.print_exc()
            answer = Failure(f"{type(error).__name__}: {error}")
        pipe.send(answer)
