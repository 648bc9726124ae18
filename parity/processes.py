"""One process per rank on this machine, that end together: when one fails, when it is killed, when the parent is."""

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .distributed import ContactError, from_bytes, to_bytes

#: Seconds: for the cause to show itself after a rank lost contact with another; for processes to end by themselves.
GRACE = 5.0

#: Sends a message, any picklable objects, to the parent.
Tell = Callable[..., None]


class RankError(RuntimeError):
    """One rank failed, was killed or fell silent; the others were ended. A traceback that it had is in the notes."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


def what_failed(error: BaseException) -> str:
    verb = "lost contact" if isinstance(error, ContactError) else "failed"
    return f"{verb}: {type(error).__name__}: {error}"


@contextmanager
def rank_processes(
    target: Callable[[int, Path, Tell], None], size: int, job: object, timeout: float
) -> Iterator[Iterator[tuple]]:
    """Processes that run target(rank, folder, tell), and an iterator over what they tell, until all are done.

    target: a function of a module. folder: one that they share, with the job (`to_bytes`) in the file "job". When the
    context is left, whatever happened, no process is left; they also watch the parent and end with it. The iterator
    raises RankError for the rank at fault, or when no process tells anything for timeout and GRACE seconds.

    They are forked from multiprocessing's server, as clean as spawned ones; it imports `preload` once and stays.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fp4ep.parity.preload"])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fp4ep-")))
        (folder / "job").write_bytes(to_bytes(job))
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        stack.callback(_end, processes, pipes)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: Ctrl-C is for the parent
        try:
            for rank in range(size):
                here, there = context.Pipe(duplex=False)
                pipes.append(here)
                process: BaseProcess = context.Process(target=_run, args=(target, rank, folder, there))
                process.start()
                processes.append(process)
                there.close()  # so that the pipe ends with the process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield _messages(processes, pipes, timeout)
        for process in processes:
            process.join(GRACE)


def _end(processes: Sequence[BaseProcess], pipes: Sequence[Connection]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
    for pipe in pipes:
        pipe.close()


# --- in the parent -----------------------------------------------------------------------------------------------


def _messages(processes: Sequence[BaseProcess], pipes: Sequence[Connection], timeout: float) -> Iterator[tuple]:
    """The rank at fault is not one that lost contact with another, unless nothing else shows itself within GRACE."""
    running = dict(enumerate(processes))
    lost: list[RankError] = []
    while running:
        ends: dict[Any, int] = {pipes[rank]: rank for rank in running}
        ends |= {process.sentinel: rank for rank, process in running.items()}
        ready = wait(list(ends), GRACE if lost else timeout + GRACE)
        if not ready:
            raise RankError(min(running), f"did not answer: {lost[0] if lost else f'silent for {timeout:g} s'}")
        for rank in sorted({ends[end] for end in ready}):
            message = _message(pipes[rank], running[rank])
            if not isinstance(message, _Last):
                yield message
                continue
            del running[rank]
            if message.error is None:
                continue
            error = RankError(rank, message.error)
            if message.traceback:
                error.add_note(message.traceback)
            if not message.by_another:
                raise error
            lost.append(error)
    if lost:
        raise lost[0]


class _Last:
    """The last message of a process. error: None when it is done."""

    def __init__(self, error: str | None = None, traceback: str = "", by_another: bool = False) -> None:
        self.error, self.traceback, self.by_another = error, traceback, by_another


def _message(pipe: Connection, process: BaseProcess) -> Any:
    try:
        if pipe.poll():
            return from_bytes(pipe.recv_bytes())
    except (EOFError, OSError):  # it ended, maybe amid a message
        pass
    process.join(GRACE)
    code = process.exitcode
    if code is None or code >= 0:
        return _Last(f"exited with status {code} before it was done")
    names = {s.value: s.name for s in signal.Signals}
    return _Last(f"was killed by {names.get(-code, f'signal {-code}')}")


# --- in the process of a rank ------------------------------------------------------------------------------------


def _run(target: Callable[[int, Path, Tell], None], rank: int, folder: Path, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    try:
        target(rank, folder, lambda *message: pipe.send_bytes(to_bytes(message)))
        pipe.send_bytes(to_bytes(_Last()))
    except BaseException as error:
        last = _Last(what_failed(error), traceback.format_exc(), isinstance(error, ContactError))
        pipe.send_bytes(to_bytes(last))
        threading.Event().wait()  # for the end: a socket that closes would be an error on every other rank


def _end_with_parent(folder: Path) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)  # the parent cannot any more
    os._exit(1)
