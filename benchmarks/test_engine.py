"""One expert GEMM of each Hopper instruction: the CPU engine, the reference, and torch's float32 matmul, in one run.

The reference and the engine compute the same bits; float32 is the floor, what the shape costs without the tensor
core's rounding. The reference gets fewer columns, and its time is scaled up: its cost is linear in them.

    pytest benchmarks/test_engine.py --benchmark-json FILE     # on one thread: OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1
    python benchmarks/test_engine.py FILE                      # ratios
"""

import json
import sys

import pytest
import torch

from fp4ep.optimized.engine_cpu import matmul, missing_for_engine
from fp4ep.reference import tensor_core
from fp4ep.reference.tensor_core import HOPPER_BF16, HOPPER_E4M3, HOPPER_E5M2, TensorCore

DTYPES = {
    HOPPER_E4M3: torch.float8_e4m3fn,
    HOPPER_E5M2: torch.float8_e5m2,
    HOPPER_BF16: torch.bfloat16,
}
ROWS, COLUMNS, K = (4, 128), 2048, 2048
REFERENCE_COLUMNS = 64


def operands(core: TensorCore, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, K, generator=g) * 8 for n in (rows, columns))
    return a.to(DTYPES[core]).float(), b.to(DTYPES[core]).float()


def measure(benchmark, call, rows: int, columns: int, name: str, core: TensorCore) -> None:
    call()
    benchmark.extra_info |= {"name": name, "core": str(core), "rows": rows, "multiply_adds": rows * columns * K}
    benchmark.pedantic(call, rounds=5)


@pytest.mark.skipif(missing_for_engine() is not None, reason=str(missing_for_engine()))
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("core", DTYPES, ids=str)
def test_engine(benchmark, core, rows):
    a, b = operands(core, rows, COLUMNS)
    measure(benchmark, lambda: matmul(core, a, b), rows, COLUMNS, "engine", core)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("core", DTYPES, ids=str)
def test_reference(benchmark, core, rows):
    a, b = operands(core, rows, REFERENCE_COLUMNS)
    measure(benchmark, lambda: tensor_core.matmul(core, a, b), rows, REFERENCE_COLUMNS, "reference", core)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("core", DTYPES, ids=str)
def test_float32(benchmark, core, rows):
    a, b = operands(core, rows, COLUMNS)
    measure(benchmark, lambda: torch.matmul(a, b.T), rows, COLUMNS, "float32", core)


def table(saved: dict) -> str:
    """Multiply-adds per second, from the shortest of each one's rounds, and ratios of the same run."""
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for each in saved["benchmarks"]:
        info = each["extra_info"]
        row = rates.setdefault((info["core"], info["rows"]), {})
        row[info["name"]] = info["multiply_adds"] / each["stats"]["min"]
    lines = [
        f"{saved['machine_info']['cpu'].get('brand_raw', 'unknown CPU')}, K {K}, N {COLUMNS}",
        "| instruction | rows | engine, G/s | reference, G/s | float32, G/s | engine / reference | float32 / engine |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (core, rows), r in rates.items():
        per_second = " | ".join(f"{r[name] / 1e9:.3g}" for name in ("engine", "reference", "float32"))
        ratios = f"{r['engine'] / r['reference']:.1f} | {r['float32'] / r['engine']:.1f}"
        lines.append(f"| {core} | {rows} | {per_second} | {ratios} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print(table(json.load(file)))
