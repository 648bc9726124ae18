"""Make the shipped recordings again, on a machine with SM90 GPUs, flashinfer-python and Triton.

Run `python -m fp4ep.parity.flashinfer_record FOLDER` for those of one GPU, and for those of two
`torchrun --standalone --nproc-per-node 2 -m fp4ep.parity.flashinfer_record FOLDER`.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from fp4ep.optimized.flashinfer_sm90 import launch_megakernel, run_megakernel, stop_runtime
from fp4ep.reference.types import MoEInputs, MoEWeights

from .corpus import build_large, build_special_values
from .corpus_problems import build_problems
from .corpus_ranks import build_ranks
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
    ep_rank, ep_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if source is None:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        source = describe_machine()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")

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

    writer = RecordingWriter("Two EP ranks: every scheme, uneven and missing tokens, opt-in variants", source)
    build_ranks(writer, run, lambda line: print(line, flush=True) if ep_rank == 0 else None)
    if ep_rank == 0:
        writer.write(Path(folder) / "h200_two_ranks.safetensors")
    stop_runtime()
    dist.destroy_process_group()


def main(folder: str) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return record_ranks(folder)
    start = time.perf_counter()

    def report(line: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s  {line}", flush=True)

    def run(scheme, options, weights, inputs, capacity, previous):
        return run_megakernel(
            scheme, options, weights, inputs, max_tokens_per_rank=capacity, previous_topk_ids=previous
        )

    source = describe_machine()
    for name, title, build in (
        (
            "h200_special_values",
            "Special values, routing, scales, clamps and knobs, small problems",
            build_special_values,
        ),
        ("h200_large", "H 7168 and I 2048: a DeepSeek-V3 expert's shape", build_large),
    ):
        writer = RecordingWriter(title, source)
        build(writer, run, report)
        writer.write(Path(folder) / f"{name}.safetensors")

    def launches(scheme, options, weights, inputs, capacity):
        return launch_megakernel(scheme, options, weights, inputs, max_tokens_per_rank=capacity)

    writer = RecordingWriter("The harness's own problems, rounding ties and poisoned padding among them", source)
    build_problems(writer, launches, report)
    writer.write(Path(folder) / "h200_problems.safetensors")
    from .triton_probe import record_probes

    writer = RecordingWriter(
        "wgmma chains with an accumulator operand (Triton's tl.dot), ex2.approx and rcp.approx", source
    )
    record_probes(writer, report)
    writer.write(Path(folder) / "h200_tensor_core.safetensors")


if __name__ == "__main__":
    main(sys.argv[1])
