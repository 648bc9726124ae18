"""Make the shipped recordings again, on a machine with an SM90 GPU, flashinfer-python and Triton.

Run `python -m fp4ep.parity.flashinfer_record FOLDER`.
"""

import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

from .corpus import build_large, build_special_values
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


def main(folder: str) -> None:
    from fp4ep.optimized.flashinfer_sm90 import run_megakernel

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
    from .triton_probe import record_probes

    writer = RecordingWriter(
        "wgmma chains with an accumulator operand (Triton's tl.dot), ex2.approx and rcp.approx", source
    )
    record_probes(writer, report)
    writer.write(Path(folder) / "h200_tensor_core.safetensors")


if __name__ == "__main__":
    main(sys.argv[1])
