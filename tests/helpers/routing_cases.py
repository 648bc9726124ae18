"""Logits that tell routing rules apart, and the cases on which peers were run: see tests/reference/routing_vectors.py.

Everything is made of integers, so that the same bits come out everywhere and only the peers' answers need a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fp4ep.reference.routers import Bias, Renormalize
from fp4ep.reference.routing import Routing, find_router, route

VECTORS = Path(__file__).parents[1] / "reference" / "data" / "routing_vectors.npz"
RANDOM_ROWS = 40
INF, NAN = torch.inf, torch.nan


def noise(seed: int, *shape: int) -> torch.Tensor:
    """float32, bell-shaped within (-8, 8), a multiple of 2^-20 exactly; from a counter, by splitmix64."""
    count = torch.Size(shape).numel()
    total = torch.zeros(count, dtype=torch.int64)
    for draw in range(4):
        x = torch.arange(count, dtype=torch.int64) + (seed * 4 + draw) * (1 << 32)
        x = x * -7046029254386353131
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
            x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
        total += (x >> 42) & 0x3FFFFF  # 22 bits
    return ((total - 2 * 0x3FFFFF).double() / 2**20).float().reshape(shape)


def adversarial(experts: int) -> torch.Tensor:
    """`[19, E]`: ties, masks, NaN, infinities, huge and tiny logits."""
    base, e = noise(99, experts), torch.arange(experts)
    last = e == experts - 1
    rows = [
        torch.zeros(experts),
        torch.full((experts,), 3.0),
        (e % 2).float(),
        (e % 3).float() - 1,
        base.round(),  # many exact ties
        torch.where(e < 5, -INF, base),
        torch.where(e % 2 == 0, -INF, base),
        torch.where(e > 1, -INF, base),  # fewer live than top_k
        torch.where(last, base, -INF),
        torch.full((experts,), -INF),
        torch.where(e == 3, NAN, base),
        torch.full((experts,), NAN),
        torch.where(e == 7, INF, base),
        base * 1e30,
        base * 1e-30,
        torch.full((experts,), -100.0) + e * 0.125,  # sigmoids near the smallest float32
        torch.full((experts,), -200.0),  # sigmoids underflow
        torch.where(e % 2 == 0, -0.0, 0.0),
        torch.where(last, 88.0, -17.0),
    ]
    return torch.stack(rows)


def logits_of(experts: int, seed: int = 1) -> torch.Tensor:
    """`[RANDOM_ROWS + 19, E]` float32."""
    return torch.cat([noise(seed, RANDOM_ROWS, experts), adversarial(experts)])


def bias_of(kind: str, experts: int) -> torch.Tensor | None:
    e = torch.arange(experts)
    return {
        "none": lambda: None,
        "noise": lambda: noise(7, experts) / 8,
        "coarse": lambda: noise(7, experts).round() / 8,  # ties in the bias
        "twelve": lambda: torch.full((experts,), 12.0),  # score + 12 - 12 loses the score
        "below": lambda: torch.full((experts,), -2.0),  # below a marker of -1
        "masked": lambda: torch.where(e % 8 < 6, 0.0, -INF),
    }[kind]()


@dataclass(frozen=True)
class Case:
    """One peer on one problem. router: which record is to equal it, and with which fields changed."""

    name: str
    router: str
    changes: Mapping[str, object] = field(default_factory=dict)
    experts: int = 32
    top_k: int = 4
    bias: str = "none"
    groups: tuple[int, int] | None = None
    factor: float = 1.0
    dtype: torch.dtype = torch.float32
    peer: str = ""
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def logits(self) -> torch.Tensor:
        return logits_of(self.experts).to(self.dtype)

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """token_ids `[T]` and expert_table `[vocabulary, top_k]` with distinct ids per row."""
        tokens = torch.arange(len(self.logits)) * 7 % 50
        return tokens, torch.argsort(noise(5, 50, self.experts), dim=-1, stable=True)[:, : self.top_k].int()

    def route(self) -> Routing:
        router = find_router(self.router, **self.changes)
        num_expert_group, topk_group = self.groups or (None, None)
        token_ids, expert_table = self.table if router.hash_routing else (None, None)
        return route(
            router,
            self.logits,
            self.top_k,
            bias=bias_of(self.bias, self.experts) if router.bias is not Bias.NONE else None,
            num_expert_group=num_expert_group,
            topk_group=topk_group,
            routed_scaling_factor=self.factor,
            token_ids=token_ids,
            expert_table=expert_table,
        )


def _cases() -> list[Case]:
    no_renorm = {"renormalize": Renormalize.NONE}
    cases = []

    def add(name: str, router: str, peer: str, changes: Mapping[str, object] | None = None, **rest: object) -> None:
        cases.append(Case(name, router, changes or {}, peer=peer, **rest))  # type: ignore[arg-type]

    for bias in ("none", "noise"):
        add(f"trace default, bias {bias}", "trace_Default", "fi_default", bias=bias, factor=2.5)
        add(f"trace renormalize, bias {bias}", "trace_Renormalize", "fi_renormalize", bias=bias, factor=2.5)
        add(f"trace naive, bias {bias}", "trace_RenormalizeNaive", "fi_renormalize_naive", bias=bias)
        add(f"trace topk, bias {bias}", "trace_TopK", "fi_topk", bias=bias, factor=2.0)
        add(f"trace llama4, bias {bias}", "trace_Llama4", "fi_llama4", bias=bias, top_k=1)
    add("trace default, 512 experts", "trace_Default", "fi_default", experts=512, top_k=10)
    for bias in ("noise", "coarse", "twelve", "below"):
        grouped = {"experts": 64, "top_k": 8, "groups": (8, 4), "bias": bias, "factor": 2.5}
        add(f"trace DeepSeek-V3, bias {bias}", "trace_DeepSeekV3", "fi_ds", **grouped)
        add(f"trace fused_topk_deepseek, bias {bias}", "trace_fused_topk_deepseek", "fi_fused", **grouped)
        add(f"vLLM grouped sigmoid, bias {bias}", "vllm_grouped_sigmoid", "vllm_grouped_sigmoid", **grouped)
        add(f"vLLM grouped softmax, bias {bias}", "vllm_grouped_softmax", "vllm_grouped_softmax", **grouped)
    grouped = {"experts": 64, "top_k": 8, "groups": (8, 4)}
    add("vLLM grouped sigmoid, bias masked", "vllm_grouped_sigmoid", "vllm_grouped_sigmoid", bias="masked", **grouped)
    add("vLLM grouped sigmoid", "vllm_grouped_sigmoid", "vllm_grouped_sigmoid", **grouped)
    add("vLLM grouped softmax", "vllm_grouped_softmax", "vllm_grouped_softmax", **grouped)
    bf16 = {**grouped, "dtype": torch.bfloat16, "bias": "noise"}
    add("vLLM grouped sigmoid, bf16 logits", "vllm_grouped_sigmoid", "vllm_grouped_sigmoid", **bf16)
    add("vLLM grouped softmax, bf16 logits", "vllm_grouped_softmax", "vllm_grouped_softmax", **bf16)
    add("vLLM CPU grouped, bf16 logits", "vllm_cpu_grouped_sigmoid", "vllm_cpu_grouped", **bf16)
    wide = {"experts": 256, "top_k": 8, "groups": (8, 4), "bias": "noise", "factor": 2.5}
    add("trace DeepSeek-V3, 256 experts", "trace_DeepSeekV3", "fi_ds", **wide)
    add("vLLM grouped sigmoid, 256 experts", "vllm_grouped_sigmoid", "vllm_grouped_sigmoid", **wide)
    for bias in ("none", "noise", "twelve", "masked"):
        for score in ("sigmoid", "softmax"):
            changes = {"score": find_router(f"vllm_grouped_{score}").score}
            add(
                f"vLLM topk bias {score}, bias {bias}",
                "vllm_topk_bias",
                f"vllm_bias_{score}",
                changes,
                bias=bias,
                factor=1.5,
            )
    add("vLLM topk bias, not renormalized", "vllm_topk_bias", "vllm_bias_raw", no_renorm, bias="noise")
    add("vLLM CPU softmax", "vllm_cpu_softmax", "vllm_cpu_softmax")
    add("vLLM CPU softmax, renormalized", "trace_Renormalize", "vllm_cpu_renormalize")
    add("vLLM Llama 4", "vllm_llama4", "vllm_llama4", top_k=1)
    add("vLLM Llama 4, bf16 logits", "vllm_llama4", "vllm_llama4", top_k=1, dtype=torch.bfloat16)
    add("vLLM Cohere", "vllm_topk_bias", "vllm_cohere_raw", no_renorm)
    add("vLLM Cohere, renormalized", "vllm_topk_bias", "vllm_cohere")
    add("hash_topk", "hash_topk", "fi_hash", experts=64, top_k=6)
    for bias in ("noise", "twelve", "below"):
        add(f"dsv4_topk, bias {bias}", "DeepseekV4", "vllm_dsv4", experts=256, top_k=6, bias=bias, factor=1.5)
    return cases


CASES = {case.name: case for case in _cases()}
