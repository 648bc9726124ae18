"""What the adapter adds to a call of FlashInfer's `MoEEpMegaLayer`: both over the same kernel, in one run, on a GPU.

Geometry of one rank of DeepSeek-V3: H 7168, I 2048, 32 experts, top-k 8, NVFP4. A round is `CALLS` calls and one
synchronization, so that what the host does while the GPU works costs nothing, as in serving; `host` counts the host's
time alone, with an idle GPU.

    pytest benchmarks/test_adapter_overhead.py --benchmark-json FILE
    python benchmarks/test_adapter_overhead.py FILE        # the table of docs/moe_ep.md
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp4ep.optimized.config import FusedMoEConfig
from fp4ep.optimized.flashinfer_moe_ep import FlashInferMoeEp, FlashInferMoeEpEpilogue, FlashInferMoeEpWeights
from fp4ep.parity.sides import missing_for_flashinfer_sm90

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 7168, 2048, 32, 8
TOKENS = (1, 16, 128, 1024)
CALLS, ROUNDS = 20, 150

MISSING = missing_for_flashinfer_sm90()

Call = Callable[[], object]


def build(tokens: int) -> tuple[FlashInferMoeEp, Call, Call]:
    """The adapter, a call of it, and one of the FlashInfer layer that it holds, with equal arguments."""
    g = torch.Generator("cuda").manual_seed(0)

    def codes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g, device="cuda", dtype=torch.uint8)

    weights = FlashInferMoeEpWeights(
        w13=codes(EXPERTS, 2 * INTERMEDIATE, HIDDEN // 2),
        w2=codes(EXPERTS, HIDDEN, INTERMEDIATE // 2),
        w13_scale=codes(EXPERTS, 2 * INTERMEDIATE, HIDDEN // 16, low=40, high=64),
        w2_scale=codes(EXPERTS, HIDDEN, INTERMEDIATE // 16, low=40, high=64),
    )
    alpha = torch.full((EXPERTS,), 0.01, device="cuda")
    moe = FusedMoEConfig(
        moe_backend="flashinfer_moe_ep_sm90_nvfp4",
        num_experts=EXPERTS,
        experts_per_token=TOP_K,
        hidden_dim=HIDDEN,
        intermediate_size=INTERMEDIATE,
        max_num_tokens=tokens,
    )
    epilogue = FlashInferMoeEpEpilogue(fc1_alpha=alpha, fc2_alpha=alpha.clone())
    adapter = FlashInferMoeEp(moe, weights, epilogue, apply_topk_in_fc1=True)
    adapter.warmup()
    hidden_states = torch.randn(tokens, HIDDEN, generator=g, device="cuda").bfloat16()
    topk_ids = torch.rand(tokens, EXPERTS, generator=g, device="cuda").argsort(1)[:, :TOP_K].contiguous()
    topk_weights = torch.full((tokens, TOP_K), 1 / TOP_K, device="cuda")

    from flashinfer.moe_ep import MoEEpTensors

    layer = adapter._kernel._layer
    return (
        adapter,
        lambda: adapter(hidden_states, topk_ids, topk_weights),
        lambda: layer(MoEEpTensors(hidden_states=hidden_states, topk_ids=topk_ids, topk_weights=topk_weights)),
    )


@pytest.mark.gpu
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("which", ["direct", "adapter"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_forward(benchmark, tokens, which):
    benchmark.group = f"{tokens} tokens"
    adapter, through, direct = build(tokens)
    call = through if which == "adapter" else direct
    benchmark.extra_info |= {"tokens": tokens, "which": which, "calls": CALLS, "gpu": torch.cuda.get_device_name()}
    benchmark.extra_info["interleaved"] = interleaved(through, direct)

    def calls() -> None:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()

    calls()
    benchmark.pedantic(calls, rounds=ROUNDS)
    adapter.destroy()


def interleaved(through: Call, direct: Call) -> dict[str, list[float]]:
    """Seconds per call, adapter and direct in turn, so that clocks and temperature drift alike for both.

    forward: whole rounds; host: until a single call returns, the GPU idle before it.
    """
    found: dict[str, list[float]] = {"forward": [], "host": []}
    for kind, rounds, calls in (("forward", ROUNDS, CALLS), ("host", 10 * ROUNDS, 1)):
        seconds: tuple[list[float], list[float]] = ([], [])
        for i in range(2 * rounds):
            call = (through, direct)[i % 2]
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if kind == "forward":
                torch.cuda.synchronize()
            seconds[i % 2].append((time.perf_counter() - start) / calls)
        found[kind] = [statistics.median(s) for s in seconds]
    return found


def table(file: Path) -> str:
    """Markdown, from pytest-benchmark's JSON: medians, and the adapter's share on top."""
    results = json.loads(file.read_text())["benchmarks"]
    rows = [
        ("tokens", "direct, ms", "adapter, ms", "adapter adds", "host, direct, us", "host, adapter, us"),
        ("---",) * 6,
    ]
    for tokens in TOKENS:
        (info,) = (
            r["extra_info"]["interleaved"]
            for r in results
            if (r["extra_info"]["tokens"], r["extra_info"]["which"]) == (tokens, "adapter")
        )
        (through, direct), (host_through, host_direct) = info["forward"], info["host"]
        times = (f"{direct * 1e3:.3f}", f"{through * 1e3:.3f}", f"{100 * (through / direct - 1):+.1f} %")
        rows.append((str(tokens), *times, f"{host_direct * 1e6:.0f}", f"{host_through * 1e6:.0f}"))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
