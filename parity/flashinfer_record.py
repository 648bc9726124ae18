"""Make the shipped recordings again, on a machine with SM90 GPUs, flashinfer-python and Triton.

Run `python -m fp4ep.parity.flashinfer_record FOLDER` for those of one GPU, and for those of two
`torchrun --standalone --nproc-per-node 2 -m fp4ep.parity.flashinfer_record FOLDER`. A further argument, the stem of a
file, makes that one only.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from fp4ep.optimized.config import EpGroup
from fp4ep.optimized.flashinfer_moe_ep import FlashInferMoeEp
from fp4ep.optimized.flashinfer_sm90 import launch_megakernel, run_megakernel, stop_runtime
from fp4ep.optimized.mega_kernel import KernelFactory
from fp4ep.reference.types import MoEInputs, MoEWeights

from .adapter import Batch, adapter_parts, batch_of, rebalance
from .corpus import build_large, build_special_values
from .corpus_adapter import ORDER, build_adapter
from .corpus_problems import build_problems
from .corpus_ranks import build_ranks
from .problem import Problem
from .recording import RecordingWriter


def describe_machine() -> dict[str, str]:
    """What ran: for the `source` of a recording."""
    major, minor = torch.cuda.get_device_capability()
    return {
        "hardware": torch.cuda.get_device_name(),
        "compute_capability": f"{major}.{minor}",
        "flashinfer": version("flashinfer-python"),
        "cutlass_dsl": version("nvidia-cutlass-dsl"),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "driver": subprocess.check_output(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], text=True
        ).split()[0],
    }


def record_ranks(folder: str, launch=launch_megakernel, source: Mapping[str, str] | None = None) -> None:
    """The recording of several EP ranks, made by all processes that torchrun started; rank 0 writes it.

    launch: the kernel, or any with the same signature. source: what ran, None for this machine with its GPUs.
    """
    ep_rank, ep_size = dist.get_rank(), dist.get_world_size()

    def run(scheme: str, options: dict, weights: MoEWeights, inputs: list[MoEInputs], capacity: int):
        mine = launch(
            scheme,
            options,
            weights,
            inputs[ep_rank],
            max_tokens_per_rank=capacity,
            ep_rank=ep_rank,
            ep_size=ep_size,
        )
        gathered: list = [None] * ep_size
        dist.all_gather_object(gathered, mine)
        return [list(outputs) for outputs in zip(*gathered, strict=True)]

    title = "Two EP ranks: every scheme, uneven and missing tokens, opt-in variants"
    writer = RecordingWriter(title, describe_machine() if source is None else source)
    build_ranks(writer, run, lambda line: print(line, flush=True) if ep_rank == 0 else None)
    if ep_rank == 0:
        writer.write(Path(folder) / "h200_two_ranks.safetensors")
    stop_runtime()


def record_adapter(
    folder: str, group: EpGroup, kernel: KernelFactory | None = None, source: Mapping[str, str] | None = None
) -> None:
    """The adapter's recording, made by every rank of the group together; rank 0 writes it.

    kernel: None for FlashInfer's, on the current device; another runs on the CPU, without a captured pass.
    """
    rank, size = group.rank_in_group, group.world_size
    device = "cuda" if kernel is None else "cpu"
    adapters = []  # the last one destroyed ends NVSHMEM

    def run(backend: str, problem: Problem) -> dict[str, torch.Tensor]:
        layer = problem.build()
        parts = adapter_parts(layer, backend, group, device=device)
        options: dict = {"apply_topk_in_fc1": True, "ep_group": group, "kernel": kernel, "options": problem.options}
        adapter = FlashInferMoeEp(*parts, **options)
        adapters.append(adapter)
        adapter.warmup()
        batch = batch_of(layer, backend, rank, device=device)
        passes = {"eager": adapter(*batch).cpu()}
        if device == "cuda" and size == 1:
            passes["captured"] = _captured(adapter, batch)
        passes["experts moved in place"] = adapter(*rebalance(adapter, batch, ORDER, group)).cpu()
        return {name: torch.cat(_of_all_ranks(output, group)) for name, output in passes.items()}

    title = f"The adapter over live kernels, {size} EP rank{'s' * (size > 1)}"
    writer = RecordingWriter(title, describe_machine() if source is None else source)
    build_adapter(writer, size, run, lambda line: print(line, flush=True) if rank == 0 else None)
    for adapter in adapters:
        adapter.destroy()
    if rank == 0:
        writer.write(Path(folder) / f"h200_adapter_{size}.safetensors")


def _of_all_ranks(output: torch.Tensor, group: EpGroup) -> list[torch.Tensor]:
    if group.world_size == 1:
        return [output]
    gathered: list = [None] * group.world_size
    dist.all_gather_object(gathered, output, group=group.device_group)
    return gathered


def _captured(adapter: FlashInferMoeEp, batch: Batch) -> torch.Tensor:
    """Captured with a batch of zeros, replayed with this one."""
    fixed = [torch.zeros_like(tensor) for tensor in batch]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = adapter(fixed[0], fixed[1], fixed[2])
    for place, tensor in zip(fixed, batch, strict=True):
        place.copy_(tensor)
    graph.replay()
    return output.cpu()


def main(folder: str, only: str = "") -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
        group = EpGroup(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
        if only in ("", "h200_two_ranks"):
            record_ranks(folder)
        if only in ("", "h200_adapter_2"):
            record_adapter(folder, group)
        dist.destroy_process_group()
        return
    if only in ("", "h200_adapter_1"):
        record_adapter(folder, EpGroup(1, 0))
    if only != "h200_adapter_1":
        record_one_rank(folder, only)


def record_one_rank(folder: str, only: str) -> None:
    """The recordings of the kernels by themselves, one file or all."""
    start = time.perf_counter()

    def report(line: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s  {line}", flush=True)

    def run(scheme, options, weights, inputs, capacity, previous):
        return run_megakernel(
            scheme, options, weights, inputs, max_tokens_per_rank=capacity, previous_topk_ids=previous
        )

    def launches(scheme, options, weights, inputs, capacity):
        return launch_megakernel(scheme, options, weights, inputs, max_tokens_per_rank=capacity)

    def probes(writer: RecordingWriter) -> None:
        from .triton_probe import record_probes

        record_probes(writer, report)

    files: tuple[tuple[str, str, Callable[[RecordingWriter], object]], ...] = (
        (
            "h200_special_values",
            "Special values, routing, scales, clamps and knobs, small problems",
            lambda writer: build_special_values(writer, run, report),
        ),
        (
            "h200_large",
            "H 7168 and I 2048: a DeepSeek-V3 expert's shape",
            lambda writer: build_large(writer, run, report),
        ),
        (
            "h200_problems",
            "The harness's own problems, rounding ties and poisoned padding among them",
            lambda writer: build_problems(writer, launches, report),
        ),
        (
            "h200_tensor_core",
            "wgmma chains with an accumulator operand (Triton's tl.dot), ex2.approx and rcp.approx",
            probes,
        ),
    )
    for name, title, build in files:
        if only in ("", name):
            writer = RecordingWriter(title, describe_machine())
            build(writer)
            writer.write(Path(folder) / f"{name}.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:3])
