"""Sides for tests of ranks, in a module that other processes can import; as a script, what torchrun starts."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from fp4ep.parity.distributed import to_bytes
from fp4ep.parity.launch import launch
from fp4ep.parity.problem import Layer, Problem
from fp4ep.parity.run import Claim
from fp4ep.parity.sides import SIDES, Place, Side
from fp4ep.reference.exchange import Rows
from fp4ep.reference.moe import Progress
from fp4ep.reference.types import Exactness, Stage, Trace

PROBLEM = Problem("sm90_fp8_nvfp4_bf16_pull_cutedsl", tokens=(3, 2), routing="masked")


def as_trace(name: str, ranks: Sequence[int], tensors: Sequence[Rows]) -> Trace:
    return Trace(tuple(Stage(name, r, Exactness.EXACT, t) for r, t in zip(ranks, tensors, strict=True)))


def rows_of(rank: int, size: int) -> tuple[Rows, torch.Tensor]:
    """Columns of many dtypes and shapes, any bits in them; some ranks get and give nothing. And where rows go."""
    g = torch.Generator().manual_seed(rank)
    count = (9, 0, 1, 30)[rank % 4]

    def column(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randint(
            0, 256, (count, *shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=g
        ).view(dtype)

    rows = {
        "values": column(torch.float8_e4m3fn, 5),
        "e5m2": column(torch.float8_e5m2, 3),
        "bf16": column(torch.bfloat16, 4, 2),
        "scales": column(torch.float32, 1),
        "a_number": column(torch.int64, 1)[:, 0],
    }
    return rows, torch.randint(0, size - 1, (count,), generator=g)


def exchanged(layer: Layer, place: Place, progress: object) -> Trace:
    """Two exchanges of such rows."""
    rows, to = zip(*(rows_of(rank, place.ep_size) for rank in place.ranks), strict=True)
    for _ in range(2):
        rows = place.exchange(rows, to)
        to = [table["a_number"] % place.ep_size for table in rows]
    return as_trace("rows", place.ranks, rows)


def facts(layer: Layer, place: Place, progress: object) -> Trace:
    """What a rank's process is like."""
    numbers = {"threads": torch.get_num_threads(), "experts": layer.weights.num_experts, "pid": os.getpid()}
    return as_trace("facts", place.ranks, [{n: torch.tensor([x]) for n, x in numbers.items()}] * len(place.ranks))


def misbehaves(
    act: Callable[[], object], rank: int, folder: Path, layer: Layer, place: Place, progress: Progress | None
) -> Trace:
    """One rank acts between two exchanges, the others wait for it. Each leaves its process id, and its parent's."""
    (mine,) = place.ranks
    partial_file = folder / f"{mine}.partial"
    partial_file.write_text(f"{os.getpid()} {os.getppid()}")
    partial_file.rename(folder / f"{mine}.pid")
    exchanged(layer, place, progress)
    if progress:
        progress(1, 2)
    if mine == rank:
        act()
    return exchanged(layer, place, progress)


def fail() -> None:
    raise ZeroDivisionError("planted")


ACTS: dict[str, Callable[[], object]] = {
    "raise": fail,
    "quit": partial(os._exit, 7),
    "leave": partial(os._exit, 0),
    "die": partial(signal.raise_signal, signal.SIGKILL),
    "hang": partial(time.sleep, 3600),
}


def side(act: str, rank: int, folder: Path) -> Side:
    return Side(act, Claim.BITS, partial(misbehaves, ACTS[act], rank, folder))


def sleep(folder: Path) -> None:
    launch([side("hang", 0, folder)], PROBLEM, how="spawned")


def main(folder: Path) -> None:
    """Run PROBLEM and save what the reference made as folder/runs; then rank 1 fails."""
    runs = launch([SIDES["reference"]], PROBLEM)
    if runs:
        (folder / "runs").write_bytes(to_bytes(runs))
    launch([side("raise", 1, folder)], PROBLEM)  # joins the group of the first


if __name__ == "__main__":
    main(Path(sys.argv[1]))
