"""The GPU engine on one rank's share of DeepSeek-V3, beside torch's GEMMs of the same shapes and the real kernel.

32 experts, H 7168, I 2048, top-k 8, 128 tokens: 45 G multiply-adds. A round is one forward and one synchronization,
with weights and tokens on the device. torch's GEMMs are the floor: one call for each expert and leg, no rounding
emulated.

    pytest benchmarks/test_engine_cuda.py --benchmark-json FILE
    python benchmarks/test_engine_cuda.py FILE        # a table
"""

import json
import sys
from functools import partial

import pytest
import torch

from fp4ep.optimized.engine_cuda import cuda_forward, missing_for_cuda_engine
from fp4ep.parity.sides import missing_for_flashinfer_sm90
from fp4ep.reference.exchange import exchange_in_process
from fp4ep.reference.scheme import Scheme, Weights
from fp4ep.reference.schemes import find_scheme
from fp4ep.reference.types import MoEInputs, MoEWeights

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 32, 7168, 2048, 8, 128
LEGS = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
MULTIPLY_ADDS = TOKENS * TOP_K * 3 * HIDDEN * INTERMEDIATE
FP8 = "sm90_fp8_fp8_bf16_pull_cutedsl"
SCHEMES = {
    "NVFP4": find_scheme("sm90_fp8_nvfp4_bf16_pull_cutedsl"),
    "MXFP4": find_scheme("sm90_fp8_mxfp4_bf16_pull_cutedsl"),
    "FP8 by block": find_scheme(FP8, fp8_scale_mode="blockwise"),
    "FP8 per tensor": find_scheme(FP8, fp8_scale_mode="per_tensor", fc1_activation_dequant_scale=0.01),
    "bf16": find_scheme("sm90_bf16_bf16_bf16_pull_cutedsl"),
}

MISSING = missing_for_cuda_engine()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


def weights(scheme: Scheme) -> MoEWeights:
    """Random, on the device, packed as the scheme has them."""
    g = torch.Generator("cuda").manual_seed(0)

    def codes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g, device="cuda", dtype=torch.uint8)

    if scheme.weights in (Weights.NVFP4, Weights.MXFP4):
        block, low, high = (16, 40, 64) if scheme.weights is Weights.NVFP4 else (32, 110, 122)
        packed = (codes(EXPERTS, n, k // 2) for n, k in LEGS)
        return MoEWeights(*packed, *(codes(EXPERTS, n, k // block, low=low, high=high) for n, k in LEGS))
    dense = [torch.empty(EXPERTS, n, k, dtype=torch.bfloat16, device="cuda").normal_(generator=g) for n, k in LEGS]
    if scheme.weights is Weights.BF16:
        return MoEWeights(*(leg.mul_(0.02) for leg in dense))
    legs = [torch.stack([(expert * 64).to(torch.float8_e4m3fn) for expert in leg]) for leg in dense]
    blocks = [(EXPERTS, n // 128, k // 128) if scheme.weights is Weights.FP8_BLOCK_128 else (EXPERTS,) for n, k in LEGS]
    return MoEWeights(*legs, *(torch.rand(shape, generator=g, device="cuda") * 1e-3 for shape in blocks))


def measure(benchmark, call, name: str, kind: str) -> None:
    def once() -> None:
        call()
        torch.cuda.synchronize()

    once()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once()
    benchmark.extra_info |= {
        "name": name,
        "kind": kind,
        "gpu": torch.cuda.get_device_name(),
        "beyond_weights": torch.cuda.max_memory_allocated() - before,
    }
    benchmark.pedantic(once, rounds=10)


@pytest.mark.parametrize("kind", SCHEMES)
def test_engine(benchmark, kind):
    g = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=g, device="cuda").bfloat16()
    ids = torch.rand(TOKENS, EXPERTS, generator=g, device="cuda").argsort(1)[:, :TOP_K].contiguous()
    inputs = MoEInputs(x, ids, torch.full(ids.shape, 1 / TOP_K, device="cuda"))
    place = {"ranks": range(1), "ep_size": 1, "exchange": exchange_in_process}
    forward = partial(cuda_forward, SCHEMES[kind], weights(SCHEMES[kind]), [inputs], **place)
    measure(benchmark, forward, "engine", kind)


@pytest.mark.parametrize("kind", ["FP8 per tensor", "bf16"])
def test_torch(benchmark, kind):
    rows = TOKENS * TOP_K // EXPERTS
    legs = [leg for leg in (vars(weights(SCHEMES[kind]))[name] for name in ("w13", "w2"))]
    one = torch.ones((), device="cuda")
    tokens = [torch.randn(rows, leg.shape[2], device="cuda").to(leg.dtype) for leg in legs]

    def gemms() -> None:
        for x, leg in zip(tokens, legs, strict=True):
            for w in leg:
                _ = x @ w.T if kind == "bf16" else torch._scaled_mm(x, w.T, one, one, out_dtype=torch.bfloat16)

    measure(benchmark, gemms, "torch", kind)


@pytest.mark.skipif(missing_for_flashinfer_sm90() is not None, reason=str(missing_for_flashinfer_sm90()))
def test_megakernel(benchmark):
    from test_adapter_overhead import build

    adapter, _, direct = build(TOKENS)
    measure(benchmark, direct, "megakernel", "NVFP4")
    adapter.destroy()


def table(saved: dict) -> str:
    """Markdown, from pytest-benchmark's JSON: the shortest round of each."""
    rows: dict[str, dict[str, float]] = {}
    memory: dict[str, float] = {}
    for each in saved["benchmarks"]:
        info = each["extra_info"]
        rows.setdefault(info["kind"], {})[info["name"]] = each["stats"]["min"] * 1e3
        if info["name"] == "engine":
            memory[info["kind"]] = info["beyond_weights"] / 2**20
    lines = [
        f"{saved['benchmarks'][0]['extra_info']['gpu']}, {MULTIPLY_ADDS / 1e9:.0f} G multiply-adds",
        "| scheme | engine, ms | G multiply-adds/s | torch's GEMMs, ms | megakernel, ms | memory beyond weights, MiB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind, row in rows.items():
        engine, peers = row["engine"], (row.get(name) for name in ("torch", "megakernel"))
        shown = " | ".join("" if peer is None else f"{peer:.3f}" for peer in peers)
        lines.append(f"| {kind} | {engine:.1f} | {MULTIPLY_ADDS / engine / 1e6:.0f} | {shown} | {memory[kind]:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print(table(json.load(file)))
