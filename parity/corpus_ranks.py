"""The problems behind the recording of two EP ranks: every scheme, uneven and missing tokens, opt-in variants."""

import math
from collections.abc import Callable
from typing import Any

import torch

from fp4ep.reference.types import MoEInputs, MoEWeights

from .corpus import BF16, FP8, MXFP4, NVFP4
from .recording import Case, RecordingWriter, alike

#: (scheme name, kernel options, weights of all experts, inputs of every rank, max_tokens_per_rank) -> the output of
#: every rank, for each of three launches.
RunRanks = Callable[[str, dict, MoEWeights, list[MoEInputs], int], list[list[torch.Tensor]]]

_EXPERTS, _HIDDEN, _INTERMEDIATE, _TOP_K, _CAPACITY = 8, 512, 256, 4, 64
TOKENS = ((48, 17), (0, 64))

_STATIC = {"fc1_activation_dequant_scale": 0.01, "fc2_activation_dequant_scale": 0.02}
_BLOCKWISE: dict[str, Any] = {"fp8_scale_mode": "blockwise"}
_REDUCED: dict[str, Any] = {"enable_in_kernel_fc2_reduce": True}
_DEDUP: dict[str, Any] = {"dedup_dispatch": True}
_GROUPED: dict[str, Any] = _BLOCKWISE | {"grouped_token_back": True}
_REUSE: dict[str, Any] = {"token_back_mode": "reuse_dispatch_warps"}  # grouping wants it

#: Title, scheme, options that decide bits, options that do not.
CASES: tuple[tuple[str, str, dict, dict], ...] = (
    ("two ranks", NVFP4, {}, {}),
    ("two ranks", MXFP4, {}, {}),
    ("two ranks", FP8, _STATIC, {}),
    ("two ranks", FP8, _BLOCKWISE, {}),
    ("two ranks", BF16, {}, {}),
    ("two ranks, each token sent once per rank", NVFP4, {}, _DEDUP),
    ("two ranks, each token sent once per rank", FP8, _BLOCKWISE, _DEDUP),
    ("two ranks, summed by rank", FP8, _GROUPED, _REUSE),
    ("two ranks, summed by rank", FP8, _GROUPED | {"combine_format": "32e4m3xe8m0"}, _REUSE),
    ("two ranks, summed by rank", FP8, _GROUPED | {"combine_format": "32e5m2xe8m0"}, _REUSE),
    ("two ranks, routes added on arrival", FP8, _STATIC | _REDUCED, {}),
    ("two ranks, routes added on arrival", BF16, _REDUCED, {}),
)


def build_ranks(writer: RecordingWriter, run: RunRanks, report: Callable[[str], None]) -> None:
    """Weights and tokens go into the writer once; a deterministic case has one output, others one for each launch."""
    named = {scheme: _weights(writer, scheme) for scheme in (NVFP4, MXFP4, FP8)}
    named[BF16] = named[FP8]
    tokens = {counts: [_tokens(n, 100 + 10 * sum(counts) + rank) for rank, n in enumerate(counts)] for counts in TOKENS}
    for counts, inputs in tokens.items():
        for name in ("hidden_states", "topk_ids", "topk_weights"):
            writer.store(f"{counts}.{name}", torch.cat([getattr(x, name) for x in inputs]))
    for title, scheme, options, config in CASES:
        for counts, inputs in tokens.items():
            reduced = "enable_in_kernel_fc2_reduce" in options
            if reduced and not min(counts):
                continue  # FlashInfer 0.7.4's FP8 frontend launches nothing on an empty rank then, and its peers hang
            roles, weights = named[scheme]
            launches = [torch.cat(ranks) for ranks in run(scheme, options | config, weights, inputs, _CAPACITY)]
            if not (reduced or alike(launches)):
                raise RuntimeError(f"{scheme} {options} is not deterministic here")
            settings = {"max_tokens_per_rank": _CAPACITY, "world_size": len(counts), "tokens_per_rank": list(counts)}
            roles = roles | {n: f"{counts}.{n}" for n in ("hidden_states", "topk_ids", "topk_weights")}
            for launch, output in enumerate(launches if reduced else launches[:1]):
                name = f"output.{len(writer.cases)}"
                writer.store(name, output, "xz")
                full = f"{title}, tokens {counts[0]} and {counts[1]}" + f", launch {launch + 1}" * reduced
                repeats = 1 if reduced else len(launches)
                case = Case(full, "moe", scheme, {**roles, "output": name}, options, settings | config, repeats)
                writer.cases.append(case)
            report(f"{scheme} {title} {counts}: recorded")


def _weights(writer: RecordingWriter, scheme: str) -> tuple[dict[str, str], MoEWeights]:
    """Role -> name in the writer, and the tensors."""
    prefix = "dense" if scheme == FP8 else "nvfp4" if scheme == NVFP4 else "mxfp4"
    shapes = {"w13": (_EXPERTS, 2 * _INTERMEDIATE, _HIDDEN), "w2": (_EXPERTS, _HIDDEN, _INTERMEDIATE)}
    tensors: dict[str, torch.Tensor] = {}
    random, drawn = torch.Generator().manual_seed(1), 0
    for leg, (experts, rows, k) in shapes.items():
        if scheme == FP8:
            dense = (torch.randn((experts, rows, k), generator=random) * {"w13": 0.06, "w2": 0.08}[leg]).bfloat16()
            tensors[leg] = writer.store(f"{prefix}.{leg}", dense, "xz")
            continue
        block, low, high = (16, 0, 126) if scheme == NVFP4 else (32, 105, 124)
        for name, columns, least, most in ((leg, k // 2, 0, 255), (f"{leg}_scale", k // block, low, high)):
            shape = [experts, rows, columns]
            tensors[name] = writer.generate(
                f"{prefix}.{name}", "mt19937", seed=1, skip=drawn, shape=shape, low=least, high=most
            )
            drawn += math.prod(shape)
        if scheme == NVFP4:
            spread = 4e-4 * 2.0 ** torch.linspace(-2, 1, _EXPERTS)
            name = f"{leg}_global_scale"
            tensors[name] = writer.store(f"{prefix}.{name}", spread if leg == "w13" else spread.flip(0))
    return {role: f"{prefix}.{role}" for role in tensors}, MoEWeights(**tensors)


def _tokens(count: int, seed: int) -> MoEInputs:
    """Masked slots, one expert named twice and four times, all routes on one rank, a negative and a zero weight."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, _HIDDEN, generator=random).bfloat16()
    ids = torch.rand(count, _EXPERTS, generator=random).argsort(1)[:, :_TOP_K].contiguous()
    weights = torch.rand(count, _TOP_K, generator=random).softmax(-1)
    if count:
        ids[0, 1] = -1
        ids[1, 2] = ids[1, 0]
        ids[2] = -1
        ids[3] = ids[3, 0]
        ids[4], ids[5] = torch.arange(4), torch.arange(4, 8)
        ids[6] = torch.tensor([7, -1, -7, 0])
        weights[7, 0], weights[8, 1] = -0.5, 0.0
    return MoEInputs(x, ids, weights)
