"""One EP rank per process: rows and traces move over torch.distributed."""

import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fp4ep.reference.exchange import Rows
from fp4ep.reference.types import Stage, Trace


class ContactError(RuntimeError):
    """A collective failed: another rank is gone or silent. What went wrong is there, not here."""


@dataclass(frozen=True)
class DistributedExchange:
    """An `Exchange` for a process that runs one rank; every rank of the group calls it together.

    group: None for the default one. device: where rows travel, "cpu" for gloo, the rank's own GPU for NCCL; they arrive
    on the device they came from. Columns travel as bytes, so every dtype and every bit gets through, in order of name;
    what arrives equals `exchange_in_process`. Raises ContactError when another rank does not answer.
    """

    group: dist.ProcessGroup | None = None
    device: str = "cpu"

    def __call__(self, rows: Sequence[Rows], destinations: Sequence[torch.Tensor]) -> list[Rows]:
        ((sent,), (to,)) = rows, destinations
        order = torch.argsort(to, stable=True)  # by receiver, else as it was
        outgoing = torch.bincount(to, minlength=dist.get_world_size(self.group))
        incoming = self._all_to_all(outgoing, None, None).tolist()
        arrived = {name: self._column(sent[name][order], incoming, outgoing.tolist()) for name in sorted(sent)}
        return [{name: arrived[name] for name in sent}]

    def _column(self, column: torch.Tensor, incoming: list[int], outgoing: list[int]) -> torch.Tensor:
        flat = column.reshape(len(column), math.prod(column.shape[1:])).contiguous()
        received = self._all_to_all(flat.view(torch.uint8), incoming, outgoing)
        return received.view(column.dtype).reshape(sum(incoming), *column.shape[1:])

    def _all_to_all(self, sent: torch.Tensor, incoming: list[int] | None, outgoing: list[int] | None) -> torch.Tensor:
        here = sent.to(self.device)
        received = here.new_empty(len(here) if incoming is None else sum(incoming), *here.shape[1:])
        contact(dist.all_to_all_single, received, here, incoming, outgoing, group=self.group)
        return received.to(sent.device)


def shares_gpus(ranks_here: int) -> bool:
    """Whether the ranks of this machine share GPUs. FlashInfer is told; NCCL refuses, so rows go over gloo.

    Their processes take turns on it: seen with two and four on an H200. Under MPS, with half the SMs each, two hung in
    their first launch.
    """
    shared = torch.cuda.device_count() < ranks_here
    if shared:
        os.environ["MEGA_SINGLE_GPU_GLOO"] = "1"
    return shared


def gather_traces(trace: Trace, group: dist.ProcessGroup | None = None) -> Trace | None:
    """The stages of all ranks on rank 0, on the CPU, ranks ascending within a stage; None on the others.

    trace: one stage of every name. Raises ContactError when another rank does not answer.
    """
    here = dist.get_rank(group)
    sent = to_bytes(tuple(_on_cpu(stage) for stage in trace))
    gathered: list[Any] | None = None if here else [None] * dist.get_world_size(group)
    contact(dist.gather_object, sent, gathered, group=group, group_dst=0)
    if gathered is None:
        return None
    return Trace(tuple(stage for same in zip(*map(from_bytes, gathered), strict=True) for stage in same))


def contact(collective: Callable[..., object], *arguments: Any, **options: Any) -> None:
    """Call a collective of torch.distributed; what it raises becomes a ContactError."""
    try:
        collective(*arguments, **options)
    except RuntimeError as error:
        raise ContactError(f"{getattr(collective, '__name__', collective)}: {error}") from error


def to_bytes(value: object) -> bytes:
    """Of anything that pickles; unlike pickle itself, float8 too."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(saved: bytes) -> Any:
    """Runs what the bytes say, as pickle does: for one's own processes only."""
    return torch.load(io.BytesIO(saved), weights_only=False)


def _on_cpu(stage: Stage) -> Stage:
    """A copy that holds its own elements only, not the storage that they are a view of."""
    own = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in stage.tensors.items()}
    return replace(stage, tensors=own)
