"""The approximate instructions of the SM90 kernels on a GPU, against reference/special.py: `python -m` this, OUT.json.

Two things. Both tables are made again, every entry, and their SHA-256 compared with the reference's. And each
instruction runs on at least 10^8 random arguments (32 random bits each, so that NaN, subnormals and both signs occur)
and on sets aimed at the edges of its rules, compared bit for bit with `special.py`.

Which kernels use what (FlashInfer 0.7.4): the pull kernels and the cake kernel `ex2.approx.ftz` and `rcp.approx.ftz`;
the push kernel `ex2.approx.ftz` and `div.approx.ftz` (built with -use_fast_math), its fused fc1 `ex2.approx` and
`div.approx` (built without). None uses another approximate instruction.

Exit status: 0 all bits equal, 1 some differ (OUT.json says where), 3 cannot run here.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fp4ep.reference.special import EX2_SHA256, RCP_SHA256, div_approx, ex2_approx, rcp_approx

from .metrics import bits, bits_differ, hex_code

CHUNK = 1 << 22
MANY = 24  #: chunks: 100,663,296 arguments
SHOWN = 4  #: differing arguments that the result names

#: (instruction, operands `[n]` float32) -> float32 `[n]`: the hardware, or what stands for it.
Apply = Callable[..., torch.Tensor]
Operands = tuple[torch.Tensor, ...]


#: Zero, the least normal, infinity, and where a rule changes.
_EDGES = (0.0, 2.0**-126, float("inf"), 2.0**-24, 2.0**-23, 1.0, 126.0, 127.0, 128.0, 149.0, 252.0, 2.0**125, 2.0**126)


# --- arguments: (n, generator) -> operands `[n]` float32 on the generator's device -------------------------------


def _integers(low: int, high: int, n: int, random: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, (n,), generator=random, device=random.device)  # int64


def _any_bits(n: int, random: torch.Generator) -> torch.Tensor:
    return _integers(-(1 << 31), 1 << 31, n, random).int().view(torch.float32)


def _one(n: int, random: torch.Generator) -> Operands:
    return (_any_bits(n, random),)


def _two(n: int, random: torch.Generator) -> Operands:
    return _any_bits(n, random), _any_bits(n, random)


def _edge(n: int, random: torch.Generator) -> torch.Tensor:
    """Either sign of _EDGES, and up to four float32 steps beside each."""
    places = _integers(0, len(_EDGES), n, random)
    edges = torch.tensor(_EDGES, device=random.device).view(torch.int32)[places] + _integers(-4, 5, n, random).int()
    return (edges ^ _integers(0, 2, n, random).int() << 31).view(torch.float32)


def _one_edge(n: int, random: torch.Generator) -> Operands:
    return (_edge(n, random),)


def _two_edges(n: int, random: torch.Generator) -> Operands:
    return _edge(n, random), _edge(n, random)


def _uniform(n: int, random: torch.Generator) -> Operands:
    return (torch.rand(n, generator=random, device=random.device).double().mul(280).sub(150).float(),)


def _tiny(n: int, random: torch.Generator) -> Operands:
    """|x| < 2^-20, every exponent down to the subnormals."""
    x, exponent = bits(_any_bits(n, random)), _integers(0, 107, n, random).int()
    return ((x & ~0x7F800000 | exponent << 23).view(torch.float32),)


def _near_whole(n: int, random: torch.Generator) -> Operands:
    """Whole numbers from -150 to 130, zeros of both signs, and up to 16 float32 steps beside each."""
    whole = torch.where(_integers(0, 64, n, random) > 0, _integers(-150, 131, n, random), 0).float()
    whole = torch.where(_integers(0, 2, n, random) > 0, whole, -whole).clamp(-150, 130)
    return ((bits(whole) + _integers(-16, 17, n, random).int()).view(torch.float32),)


def _large_divisor(n: int, random: torch.Generator) -> Operands:
    """Divisors of both signs from 2^125 up to the largest, dividends of any bits."""
    a, b = _two(n, random)
    exponent = _integers(252, 255, n, random).int()
    return a, (bits(b) & ~0x7F800000 | exponent << 23).view(torch.float32)


def _quotient_at_flush(n: int, random: torch.Generator) -> Operands:
    """Quotients within a few ulp of 2^-126, where rounding and flushing meet."""
    exponent = _integers(128, 228, n, random).int()
    b = (bits(_any_bits(n, random)) & ~0x7F800000 | exponent << 23).view(torch.float32)
    a = (2.0**-126 / rcp_approx(b).double()).float()
    return (bits(a) + _integers(-4, 5, n, random).int()).view(torch.float32), b


@dataclass(frozen=True)
class Probe:
    """arguments: name -> (draw, chunks); rule: the reference's function."""

    instruction: str
    arguments: Mapping[str, tuple[Callable[[int, torch.Generator], Operands], int]]
    rule: Callable[..., torch.Tensor]


_OF_EX2 = {
    "any bits": (_one, MANY),
    "-150 to 130": (_uniform, MANY),
    "below 2^-20": (_tiny, 8),
    "whole": (_near_whole, 2),
    "edges": (_one_edge, 1),
}
_OF_DIV = {
    "any bits": (_two, MANY),
    "divisor above 2^125": (_large_divisor, 8),
    "at 2^-126": (_quotient_at_flush, 8),
    "edges": (_two_edges, 2),
}
PROBES = (
    Probe("ex2.approx.ftz.f32", _OF_EX2, ex2_approx),
    Probe("ex2.approx.f32", _OF_EX2, partial(ex2_approx, ftz=False)),
    Probe("rcp.approx.ftz.f32", {"any bits": (_one, MANY), "edges": (_one_edge, 1)}, rcp_approx),
    Probe("div.approx.ftz.f32", _OF_DIV, div_approx),
    Probe("div.approx.f32", _OF_DIV, partial(div_approx, ftz=False)),
)


def remake_tables(apply: Apply, device: str) -> dict[str, Any]:
    """SHA-256 of both tables from the instructions, little-endian float32, beside the reference's."""
    x = torch.arange(1 << 24, device=device) * 2.0**-24
    even, odd = apply("ex2.approx.ftz.f32", x).view(-1, 2).T
    rcp = apply("rcp.approx.ftz.f32", 1 + torch.arange(1 << 23, device=device) * 2.0**-23)
    return {
        "ex2.approx.ftz.f32": {"entries": 1 << 23, "sha256": _digest(even), "reference": EX2_SHA256},
        "ex2.approx.ftz.f32 at odd multiples of 2^-24": {"sha256": _digest(odd), "reference": EX2_SHA256},
        "rcp.approx.ftz.f32": {"entries": 1 << 23, "sha256": _digest(rcp), "reference": RCP_SHA256},
    }


def _digest(values: torch.Tensor) -> str:
    return hashlib.sha256(bits(values).cpu().numpy().astype("<i4").tobytes()).hexdigest()


def compare(probe: Probe, apply: Apply, device: str, seed: int, chunk: int = CHUNK) -> Iterator[dict[str, Any]]:
    """One entry per argument set: arguments tried, how many results differ, and the first few."""
    for place, (name, (draw, chunks)) in enumerate(probe.arguments.items()):
        random = torch.Generator(device).manual_seed(seed + place)
        differing, first = 0, list[dict[str, Any]]()
        for _ in range(chunks):
            operands = draw(chunk, random)
            hardware, result = apply(probe.instruction, *operands), probe.rule(*operands)
            wrong = bits_differ(hardware, result).nonzero().flatten()
            differing += len(wrong)
            for i in wrong[: SHOWN - len(first)].tolist():
                row = {"hardware": hex_code(hardware[i].cpu()), "rule": hex_code(result[i].cpu())}
                first.append({"arguments": [hex_code(x[i].cpu()) for x in operands], **row})
        yield {
            "instruction": probe.instruction,
            "arguments": name,
            "tried": chunk * chunks,
            "seed": seed + place,
            "differing": differing,
            "first": first,
        }


def measure(apply: Apply, device: str, seed: int, report: Callable[[str], None], chunk: int = CHUNK) -> dict[str, Any]:
    """Tables and comparisons; `equal` says whether every bit is the reference's."""
    tables = remake_tables(apply, device)
    for name, row in tables.items():
        report(f"table {name}: {'equal' if row['sha256'] == row['reference'] else 'DIFFERS'}")
    comparisons = []
    for probe in PROBES:
        for row in compare(probe, apply, device, seed, chunk):
            comparisons.append(row)
            report(f"{row['instruction']}, {row['arguments']}: {row['tried']:,} tried, {row['differing']:,} differ")
            for found in row["first"]:
                report(f"  {found}")
    equal = all(row["sha256"] == row["reference"] for row in tables.values())
    equal &= not any(row["differing"] for row in comparisons)
    return {"equal": equal, "tables": tables, "comparisons": comparisons}


def missing() -> str | None:
    """What keeps this machine from running the instructions; None: nothing."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"the rules are Hopper's (compute capability 9.0), the GPU is {torch.cuda.get_device_name()}"
    if find_spec("triton") is None:
        return "triton is not installed"
    return None if shutil.which("nvidia-smi") else "nvidia-smi, which knows the driver's version, is not there"


def _machine() -> dict[str, str]:
    import triton

    driver = subprocess.check_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], text=True)
    return {
        "hardware": torch.cuda.get_device_name(),
        "driver": driver.split()[0],
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fp4ep.parity.special_probe", description=__doc__)
    parser.add_argument("out", type=Path, help="the JSON file to write")
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args(arguments)
    if reason := missing():
        print(f"cannot run here: {reason}", file=sys.stderr)
        return 3
    from .special_kernel import apply

    result = {"source": _machine(), **measure(apply, "cuda", given.seed, print)}
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{given.out}: {'all bits equal' if result['equal'] else 'SOME BITS DIFFER'}")
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
