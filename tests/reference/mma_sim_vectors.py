"""Run Microsoft's MMA-Sim beside the reference and keep its outputs for the tests, which do not need it.

    python tests/reference/mma_sim_vectors.py --mma-sim DIR [--results benchmarks/results/mma_sim.json]

DIR: the unpacked wheel of mmasim 2.1.1 (PyPI). Prints how many outputs differ, and the multiply-adds per CPU second of
MMA-Sim, of the reference and, where it has the instruction, of the CPU engine on the same tiles, one thread each.
"""

import argparse
import hashlib
import json
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from mma_sim_cases import (
    CODINGS,
    INSTRUCTIONS,
    SETS,
    VECTORS,
    Instruction,
    Tiles,
    as_dtype,
    digest,
    ours,
    sample,
    tiles,
    values,
)

from fp4ep.optimized import engine_cpu

_REPEATS = 3  #: the fastest counts


def theirs(module: object, instruction: Instruction, given: Tiles) -> torch.Tensor:
    arch = "Hopper" if instruction.kind == "WGMMA" else "Blackwell"
    simulator = getattr(module, instruction.kind)(arch, instruction.qualifier)
    operands = []
    for codes, name in ((given.a, instruction.a), (given.b, instruction.b)):
        if name != "e2m1":
            operands.append(as_dtype(codes, CODINGS[name]))
        elif instruction.core.group > 1:  # two to a byte
            operands.append((codes[:, 0::2] << 4 | codes[:, 1::2]).to(torch.uint8))
        else:  # in bits 5 to 2
            operands.append((codes << 2).to(torch.uint8))
    a, b = operands
    c = as_dtype(given.c, CODINGS["f32"])
    if instruction.scale is None or given.scales is None:
        return simulator(a, b.T, c)
    left, right = (as_dtype(codes, CODINGS[instruction.scale]) for codes in given.scales)
    return simulator(a, b.T, c, left, right.T)


def engine(instruction: Instruction, given: Tiles) -> torch.Tensor | None:
    """None: the engine has no loops for it."""
    a, b = values(given.a, CODINGS[instruction.a]), values(given.b, CODINGS[instruction.b])
    if instruction.core.scale_block is not None or instruction.core.min_exponent_b is not None:
        return None
    try:
        return engine_cpu.matmul(instruction.core, a, b, c=values(given.c, CODINGS["f32"]))
    except ValueError:
        return None


def per_second(
    run: Callable[[Instruction, Tiles], torch.Tensor | None], instruction: Instruction, given: Tiles
) -> float:
    """Multiply-adds a second of CPU time, of the fastest of a few runs."""
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.process_time()
        run(instruction, given)
        best = min(best, time.process_time() - start)
    return given.multiply_adds / best


def wheel(root: Path) -> tuple[str, str]:
    """Version, and SHA-256 over the package's Python files in order of name."""
    (version,) = [d.version for d in distributions(path=[str(root)]) if d.name == "mmasim"]
    files = sorted((root / "mmasim").rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    return version, hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mma-sim", type=Path, required=True, metavar="DIR")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if engine_cpu.missing_for_engine() is None:
        import numba

        numba.set_num_threads(1)
    sys.path.insert(0, str(args.mma_sim))
    from mmasim import nv_ptx

    version, sources = wheel(args.mma_sim)
    rows: dict[str, dict] = {}
    digests, samples = [], []
    for instruction in INSTRUCTIONS.values():
        outputs = differing = 0
        for name in SETS:
            given = tiles(instruction, name)
            expected, found = theirs(nv_ptx, instruction, given), ours(instruction, given)
            differing += int((expected.view(torch.int32) != found.view(torch.int32)).sum())
            outputs += expected.numel()
            digests.append(digest(expected))
            samples.append(sample(expected))
        row: dict = {"row": str(instruction.core), "outputs": outputs, "differing": differing}
        given = tiles(instruction, next(iter(SETS)))
        runs = {"mma_sim": partial(theirs, nv_ptx), "reference": ours, "engine": engine}
        if engine(instruction, given) is None:
            del runs["engine"]
        speeds = {name: per_second(run, instruction, given) for name, run in runs.items()}
        rows[instruction.name] = row | {"multiply_adds_per_second": {name: round(x) for name, x in speeds.items()}}
        shown = ", ".join(f"{name} {value / 1e6:.1f} M/s" for name, value in speeds.items())
        print(f"{instruction.name:75} {differing:6} of {outputs} differ; {shown}", flush=True)
    about = {"mmasim": version, "sha256": sources, "torch": torch.__version__, "python": platform.python_version()}
    VECTORS.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        VECTORS,
        digests=np.frombuffer(b"".join(digests), np.uint8).reshape(len(INSTRUCTIONS), len(SETS), -1),
        samples=np.stack(samples).reshape(len(INSTRUCTIONS), len(SETS), -1),
        about=np.array(json.dumps(about | {"instructions": list(INSTRUCTIONS), "sets": list(SETS)})),
    )
    print(f"{VECTORS}: {VECTORS.stat().st_size} bytes")
    if args.results:
        machine = {"machine": platform.machine(), "threads": 1}
        args.results.write_text(json.dumps(about | machine | {"instructions": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
