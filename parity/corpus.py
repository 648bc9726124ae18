"""The problems behind the shipped recordings: their tensors and what is run on them.

The build functions fill a RecordingWriter and get every output from a `run` function: the live kernel on a GPU, or any
with the same signature.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fp4ep.optimized.flashinfer_sm90 import capacity_for
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.quantize import quantize_activation
from fp4ep.reference.scheme import ActivationQuant, Apply, Scheme
from fp4ep.reference.schemes import find_scheme
from fp4ep.reference.types import MoEInputs, MoEWeights

from .recording import Case, RecordingWriter

NVFP4 = "sm90_fp8_nvfp4_bf16_pull_cutedsl"
MXFP4 = "sm90_fp8_mxfp4_bf16_pull_cutedsl"
FP8 = "sm90_fp8_fp8_bf16_pull_cutedsl"
BF16 = "sm90_bf16_bf16_bf16_pull_cutedsl"
PUSH = "sm90_fp8_fp8_bf16_push_cuda"

#: (scheme name, kernel options, weights, inputs, max_tokens_per_rank, previous_topk_ids) -> output
Run = Callable[[str, dict, MoEWeights, MoEInputs, int, torch.Tensor | None], torch.Tensor]

_STATIC: dict[str, Any] = {"fc1_activation_dequant_scale": 0.01, "fc2_activation_dequant_scale": 0.02}
_BLOCKWISE: dict[str, Any] = {"fp8_scale_mode": "blockwise"}
_E5M2: dict[str, Any] = {"kind": "fp8_e5m2"}
_2XACC: dict[str, Any] = {"fp8_accum_mode": "2xacc"}
#: A launch geometry given by hand. FlashInfer 0.7.4 takes fp8_accum_mode from the config only beside one; without, the
#: tuning table's "1xacc" replaces it silently (`shim/hopper_fp8.py`).
_GEOMETRY: dict[str, Any] = {
    "swap_ab": True,
    "pingpong": False,
    "mma_tiler_mnk": (256, 32, 128),
    "cluster_shape_mnk": (1, 1, 1),
}

_TILE_K_256: dict[str, Any] = {"swap_ab": False, "pingpong": False, "mma_tiler_mnk": (64, 128, 256)}

_EXPERTS, _HIDDEN, _INTERMEDIATE, _TOP_K, _TOKENS = 8, 512, 256, 4, 24
_TIE_TOKENS = 6  # kept per case of `_tie_cases`


class _Builder:
    def __init__(self, writer: RecordingWriter, run: Run, report: Callable[[str], None]) -> None:
        self.writer, self.run, self.report = writer, run, report
        self.tensors: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}

    def store(self, name: str, tensor: torch.Tensor, encoding: str = "raw") -> None:
        self._put(name, self.writer.store(name, tensor, encoding))

    def generate(self, name: str, generator: str, **arguments) -> None:
        self._put(name, self.writer.generate(name, generator, **arguments))

    def quantize(self, name: str, rule: str, of: str, part: str) -> None:
        self._put(name, self.writer.quantize(name, rule, of, part, self.tensors[of]))

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor
        self.aliases.pop(name, None)

    def alias(self, name: str, of: str) -> None:
        """Let another problem use the same tensor."""
        self.tensors[name], self.aliases[name] = self.tensors[of], self.aliases.get(of, of)

    def case(
        self, title: str, scheme: str, weights: str, inputs: str, options: dict, config: dict | None = None
    ) -> None:
        """weights, inputs: prefixes of tensor names. A failing run is reported and left out; the others go on."""
        roles: dict[str, str] = {}
        for prefix, names in ((weights, _WEIGHTS), (inputs, _INPUTS)):
            roles |= {n: f"{prefix}.{n}" for n in names if f"{prefix}.{n}" in self.tensors}
        roles = {role: self.aliases.get(name, name) for role, name in roles.items()}
        given = {role: self.tensors[name] for role, name in roles.items()}
        previous = given.pop("previous_topk_ids", None)
        tokens = MoEInputs(**{n: given.pop(n) for n in _INPUTS if n in given})
        capacity = capacity_for(len(tokens.hidden_states))
        config = config or {}
        try:
            launch = {k: v for k, v in (options | config).items() if k != "mma_tiler_k"}  # said by the geometry
            output = self.run(scheme, launch, MoEWeights(**given), tokens, capacity, previous)
        except Exception as error:
            self.report(f"LEFT OUT {scheme} {title} {options} {config}: {error!r}")
            return
        name = f"output.{len(self.writer.cases)}"
        self.store(name, output, "xz")
        settings = {"max_tokens_per_rank": capacity, "world_size": 1, **config}
        self.writer.cases.append(Case(title, "moe", scheme, {**roles, "output": name}, options, settings, launches=3))
        self.report(f"{scheme} {title} {options}: recorded, {int(output.isnan().sum())} NaN")


_WEIGHTS = ("w13", "w2", "w13_scale", "w2_scale", "w13_global_scale", "w2_global_scale")
_INPUTS = ("hidden_states", "topk_ids", "topk_weights", "scales", "previous_topk_ids")
#: Tiny inputs times weights this large are ordinary values, so that the tiny path decides bits.
_TINY_GAIN = 1e28


def build_special_values(writer: RecordingWriter, run: Run, report: Callable[[str], None]) -> None:
    """Small problems that hold everything unusual: values, routing, scales, clamps, knobs."""
    b = _Builder(writer, run, report)
    _special_weights(b)
    _special_inputs(b)
    _special_cases(b)


def _special_weights(b: _Builder) -> None:
    _dense_weights(b, "dense", _EXPERTS, _HIDDEN, _INTERMEDIATE, seed=1)
    _packed_weights(b, "nvfp4", block=16, low=0, high=126, seed=3)
    for leg in ("w13", "w2"):
        scale = 4e-4 * 2.0 ** torch.linspace(-2, 1, _EXPERTS)
        b.store(f"nvfp4.{leg}_global_scale", scale if leg == "w13" else scale.flip(0))
    _packed_weights(b, "mxfp4", block=32, low=105, high=124, seed=7)
    _packed_weights(b, "mxfp4_wrap", block=32, low=131, high=142, seed=11)
    # Scales 128 and more below the smallest the operand can hold: FlashInfer's rewriting table wraps there.
    wrapped = b.tensors["mxfp4_wrap.w13_scale"]
    wrapped[0].clamp_(max=139)[::37, 3] = 0  # exactly 128
    wrapped[1:, ::41, 5] = torch.arange(4, dtype=torch.uint8).repeat(2)[1:, None]
    b.store("mxfp4_wrap.w13_scale", wrapped, "xz")
    for name in ("w13", "w2", "w13_scale", "w2_scale"):
        b.alias(f"nvfp4_plain.{name}", f"nvfp4.{name}")
        b.alias(f"tiny_nvfp4.{name}", f"nvfp4.{name}")
        b.alias(f"tiny_mxfp4.{name}", f"mxfp4.{name}")
    b.store("tiny_nvfp4.w13_global_scale", b.tensors["nvfp4.w13_global_scale"] * _TINY_GAIN)
    b.alias("tiny_nvfp4.w2_global_scale", "nvfp4.w2_global_scale")
    scales = [_EXPERTS, 2 * _INTERMEDIATE, _HIDDEN // 32]
    b.generate("tiny_mxfp4.w13_scale", "integers", seed=9, shape=scales, low=105 + 93, high=124 + 93)
    shape = [_EXPERTS, 2 * _INTERMEDIATE, _HIDDEN]
    b.generate("tiny_dense.w13", "normal", seed=1, shape=shape, scale=0.06 * _TINY_GAIN)
    b.alias("tiny_dense.w2", "dense.w2")


def _special_cases(b: _Builder) -> None:
    for kperm, clamp in ((64, 10.0), (64, 2.0), (64, None), (32, 10.0), (0, 10.0)):
        options: dict[str, Any] = {"nvfp4_kperm": kperm, "gate_up_clamp": clamp}
        b.case(f"special values, kperm {kperm}, clamp {clamp}", NVFP4, "nvfp4", "special", options)
    b.case("special values, bf16 weights", NVFP4, "dense", "special", {})
    b.case("no global scale", NVFP4, "nvfp4_plain", "plain", {})
    for clamp in (10.0, 2.0, None):
        b.case(f"special values, clamp {clamp}", MXFP4, "mxfp4", "special", {"gate_up_clamp": clamp})
    b.case("scales more than 128 octaves apart", MXFP4, "mxfp4_wrap", "plain", {})
    b.case("special values", FP8, "dense", "special", _STATIC)
    b.case("special values, static scales 1", FP8, "dense", "special", {})
    b.case("special values", FP8, "dense", "special", _STATIC | _E5M2)
    b.case("2xacc in the knobs", FP8, "dense", "plain", _STATIC | _2XACC, {"knobs": dict(_2XACC)})
    b.case("2xacc beside a geometry", FP8, "dense", "plain", _STATIC | _2XACC, _GEOMETRY)
    b.case("special values", FP8, "dense", "special", _STATIC | _2XACC, _GEOMETRY)
    b.case("2xacc in the config alone: 1xacc runs", FP8, "dense", "plain", _STATIC, dict(_2XACC))
    b.case("2xacc in the knobs", FP8, "dense", "plain", _STATIC | _2XACC | _E5M2, {"knobs": dict(_2XACC)})
    for clamp in (None, 2.0):
        options = _BLOCKWISE | {"gate_up_clamp": clamp}
        b.case(f"special values, clamp {clamp}", FP8, "dense", "special", options)
        b.case(f"special values, clamp {clamp}", BF16, "dense", "special", {"gate_up_clamp": clamp})
    b.case("special values", FP8, "dense", "special", _BLOCKWISE | _E5M2)
    b.case("2xacc in the knobs", FP8, "dense", "plain", _BLOCKWISE | _2XACC, {"knobs": dict(_2XACC)})
    for kind in ({}, _E5M2):
        b.case("2xacc, tile K 256", FP8, "dense", "plain", _STATIC | _2XACC | kind | {"mma_tiler_k": 256}, _TILE_K_256)
    for scheme, weights in ((NVFP4, "tiny_nvfp4"), (MXFP4, "tiny_mxfp4"), (FP8, "tiny_dense"), (BF16, "tiny_dense")):
        b.case("tiny rows", scheme, weights, "tiny", _BLOCKWISE if scheme == FP8 else {})
    for name, scheme, options in (("fp8_token", NVFP4, {}), ("fp8_block", FP8, _BLOCKWISE)):
        _prestaged_inputs(b, name, find_scheme(scheme, **options).stage)
        b.case("input quantized before", scheme, "nvfp4" if scheme == NVFP4 else "dense", name, options)
    # Per tensor the kernel carries a plane of UE8M0 scales along and uses none of them.
    for name in ("hidden_states", "topk_ids", "topk_weights"):
        b.alias(f"fp8_static.{name}", f"fp8_block.{name}")
    scales = torch.randint(100, 150, (_TOKENS, _HIDDEN // 32), generator=_random(19)).byte()
    b.store("fp8_static.scales", scales.view(torch.float8_e8m0fnu))
    b.case("input quantized before", FP8, "dense", "fp8_static", _STATIC)
    _tie_cases(b)
    # A launch with every slot live, then one with some masked, on the same buffers.
    b.alias("stale.hidden_states", "plain.hidden_states")
    masked = torch.rand(_TOKENS, _TOP_K, generator=_random(17)) < 0.3
    b.store("stale.topk_ids", torch.where(masked, -1, b.tensors["plain.topk_ids"]))
    b.alias("stale.previous_topk_ids", "plain.topk_ids")
    b.alias("stale.topk_weights", "plain.topk_weights")
    for scheme, weights, options in (
        (NVFP4, "nvfp4", {}),
        (MXFP4, "mxfp4", {}),
        (FP8, "dense", _STATIC),
        (FP8, "dense", _BLOCKWISE),
        (BF16, "dense", {}),
    ):
        b.case("slots masked after a launch with all live", scheme, weights, "stale", options)
    _dense_weights(b, "odd", 4, 320, 192, seed=61)
    _dense_weights(b, "odd_bf16", 4, 256, 192, seed=63)
    for prefix, hidden in (("odd_inputs", 320), ("odd_bf16_inputs", 256)):
        b.generate(f"{prefix}.hidden_states", "normal", seed=65, shape=[5, hidden], scale=1.0)
        b.store(f"{prefix}.topk_ids", _routing(5, 2, 4, seed=66))
        b.store(f"{prefix}.topk_weights", _routing_weights(5, 2, seed=67))
    b.case("H 320, I 192", FP8, "odd", "odd_inputs", _STATIC)
    b.case("H 320, I 192", FP8, "odd", "odd_inputs", _STATIC | _2XACC, {"knobs": dict(_2XACC)})
    b.case("H 256, I 192", BF16, "odd_bf16", "odd_bf16_inputs", {})
    for tokens, top_k in ((1, 1), (40, 8)):
        prefix = f"top{top_k}"
        b.generate(f"{prefix}.hidden_states", "normal", seed=30 + top_k, shape=[tokens, _HIDDEN], scale=1.0)
        b.store(f"{prefix}.topk_ids", _routing(tokens, top_k, _EXPERTS, seed=31))
        b.store(f"{prefix}.topk_weights", _routing_weights(tokens, top_k, seed=32))
        b.case(f"{tokens} tokens, top-k {top_k}", NVFP4, "nvfp4", prefix, {})


def build_large(writer: RecordingWriter, run: Run, report: Callable[[str], None]) -> None:
    """H 7168 and I 2048, the shape of a DeepSeek-V3 expert: chains of 224 instructions."""
    b = _Builder(writer, run, report)
    experts, hidden, intermediate, tokens, top_k = 2, 7168, 2048, 4, 1
    _dense_weights(b, "dense", experts, hidden, intermediate, seed=41)
    _mxfp4_weights(b, "mxfp4", "dense")
    b.generate("large.hidden_states", "normal", seed=50, shape=[tokens, hidden], scale=1.0)
    b.store("large.topk_ids", _routing(tokens, top_k, experts, seed=51))
    b.store("large.topk_weights", _routing_weights(tokens, top_k, seed=52))
    for scheme, weights, options in (
        (NVFP4, "dense", {}),
        (MXFP4, "mxfp4", {}),
        (FP8, "dense", {"fc1_activation_dequant_scale": 0.01, "fc2_activation_dequant_scale": 0.5}),
        (FP8, "dense", _BLOCKWISE),
        (BF16, "dense", {}),
    ):
        b.case("H 7168, I 2048", scheme, weights, "large", options)


def _tie_cases(b: _Builder) -> None:
    """Values that tell a division by the scale from a multiplication by its reciprocal, however that is made."""
    options = {"fc1_activation_dequant_scale": 0.425, "fc2_activation_dequant_scale": 0.03}
    rule = find_scheme(FP8, **options).stage
    assert rule is not None
    finite = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()[None]
    codes = [quantize_activation(finite, replace(rule, apply=apply), 0.425).codes for apply in Apply]
    values = finite[(codes[0] != codes[1]) | (codes[1] != codes[2])]
    x = values[torch.randint(0, len(values), (_TIE_TOKENS, _HIDDEN), generator=_random(71))]
    b.store("staging_ties.hidden_states", (x * torch.randn(x.shape, generator=_random(72)).sign()).bfloat16())
    b.store("staging_ties.topk_ids", _routing(_TIE_TOKENS, 1, _EXPERTS, seed=74))
    b.store("staging_ties.topk_weights", torch.ones(_TIE_TOKENS, 1))
    b.case("ties in staging", FP8, "dense", "staging_ties", options)

    # Requantized values are float32: about one in 2^22 tells, so many tokens are tried and those that tell are kept.
    hidden, intermediate, tried = 128, 512, 1 << 13
    _dense_weights(b, "tie_dense", 2, hidden, intermediate, seed=76)
    _mxfp4_weights(b, "tie_mxfp4", "tie_dense")
    for i, (name, weights, chosen) in enumerate(
        (
            (NVFP4, "tie_dense", {}),
            (MXFP4, "tie_mxfp4", {}),
            (FP8, "tie_dense", options),
            (FP8, "tie_dense", _BLOCKWISE),
        )
    ):
        given = {n: b.tensors[f"{weights}.{n}"] for n in _WEIGHTS if f"{weights}.{n}" in b.tensors}
        for seed in itertools.count(77):
            x = torch.randn(tried, hidden, generator=_random(seed)).bfloat16()
            inputs = MoEInputs(x, torch.arange(tried)[:, None] % 2, torch.ones(tried, 1))
            telling = _telling_tokens(find_scheme(name, **chosen), MoEWeights(**given), inputs)[:_TIE_TOKENS]
            b.report(f"{name}: {len(telling)} of {tried} tokens tell a division from a product")
            if len(telling):
                break
        b.store(f"ties{i}.hidden_states", inputs.hidden_states[telling])
        b.store(f"ties{i}.topk_ids", inputs.topk_ids[telling])
        b.store(f"ties{i}.topk_weights", inputs.topk_weights[telling])
        b.case("ties in requantization", name, weights, f"ties{i}", chosen)


def _telling_tokens(scheme: Scheme, weights: MoEWeights, inputs: MoEInputs) -> torch.Tensor:
    """Tokens (top-k 1) whose SwiGLU output quantizes to other codes when divided by the scale."""
    _, trace = moe_forward(scheme, weights, inputs)
    rule, static = scheme.requantize, scheme.fc2_activation_dequant_scale
    assert rule is not None
    values = trace["activation"].tensors["values"]
    rules = [replace(rule, apply=apply) for apply in (Apply.DIVIDE, Apply.RECIPROCAL)]
    codes = [quantize_activation(values, r, static).codes for r in rules]
    return trace["dispatch"].tensors["token"][(codes[0] != codes[1]).any(1)]


def _dense_weights(b: _Builder, prefix: str, experts: int, hidden: int, intermediate: int, seed: int) -> None:
    b.generate(f"{prefix}.w13", "normal", seed=seed, shape=[experts, 2 * intermediate, hidden], scale=0.06)
    b.generate(f"{prefix}.w2", "normal", seed=seed + 1, shape=[experts, hidden, intermediate], scale=0.08)


def _mxfp4_weights(b: _Builder, prefix: str, dense: str) -> None:
    """The dense weights of another prefix, quantized."""
    for leg in ("w13", "w2"):
        for part, suffix in (("codes", ""), ("scales", "_scale")):
            b.quantize(f"{prefix}.{leg}{suffix}", "mxfp4_floor", f"{dense}.{leg}", part)


def _packed_weights(b: _Builder, prefix: str, block: int, low: int, high: int, seed: int) -> None:
    """Every code, and scale codes from low to high, at random."""
    for i, (leg, rows, k) in enumerate((("w13", 2 * _INTERMEDIATE, _HIDDEN), ("w2", _HIDDEN, _INTERMEDIATE))):
        b.generate(f"{prefix}.{leg}", "integers", seed=seed + i, shape=[_EXPERTS, rows, k // 2], low=0, high=255)
        scales = [_EXPERTS, rows, k // block]
        b.generate(f"{prefix}.{leg}_scale", "integers", seed=seed + 2 + i, shape=scales, low=low, high=high)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _routing(tokens: int, top_k: int, experts: int, seed: int) -> torch.Tensor:
    return torch.rand(tokens, experts, generator=_random(seed)).topk(top_k).indices


def _routing_weights(tokens: int, top_k: int, seed: int) -> torch.Tensor:
    return torch.rand(tokens, top_k, generator=_random(seed)).softmax(-1)


def _special_inputs(b: _Builder) -> None:
    x = torch.randn(_TOKENS, _HIDDEN, generator=_random(13))
    x[0] = 0.0
    x[1] = -0.0
    for row, scale in ((2, 1e-31), (3, 6e-38), (4, 1e-40), (5, 4.4e-28), (6, 1e-20), (7, 1e20)):
        x[row] *= scale
    x[8, 5], x[9, 6], x[10, 7] = float("inf"), float("-inf"), float("nan")
    x[11, ::100] *= 1000  # outliers: static scales overflow
    x[12] = torch.arange(_HIDDEN) % 449 - 224.0  # lands on E4M3 ties once the scale is a power of two
    x[12, 0] = 448.0
    x[13] = torch.where(torch.arange(_HIDDEN) % 2 == 0, 0.75, -1.25)
    ids = _routing(_TOKENS, _TOP_K, _EXPERTS - 1, seed=14)  # the last expert gets no token
    weights = torch.rand(_TOKENS, _TOP_K, generator=_random(15)).softmax(-1)
    ids[14, 1] = -1
    ids[15, 0], ids[15, 3] = -1, -7
    ids[16] = -1  # fully masked
    ids[17, 2] = ids[17, 0]  # one expert twice
    ids[18] = ids[18, 0]
    weights[19, 0], weights[20] = 0.0, 0.0
    weights[21] *= -1
    weights[22, 1] = -3.0
    weights[23] *= 1e-30
    b.store("special.hidden_states", x.bfloat16())
    b.store("special.topk_ids", ids)
    b.store("special.topk_weights", weights)

    b.generate("plain.hidden_states", "normal", seed=20, shape=[_TOKENS, _HIDDEN], scale=1.0)
    b.store("plain.topk_ids", _routing(_TOKENS, _TOP_K, _EXPERTS, seed=21))
    b.store("plain.topk_weights", _routing_weights(_TOKENS, _TOP_K, seed=22))
    tiny = torch.randn(_TOKENS, _HIDDEN, generator=_random(18)) * 10.0 ** torch.linspace(-27, -33, _TOKENS)[:, None]
    b.store("tiny.hidden_states", tiny.bfloat16())
    for name in ("topk_ids", "topk_weights"):
        b.alias(f"tiny.{name}", f"plain.{name}")


def _prestaged_inputs(b: _Builder, prefix: str, rule: ActivationQuant | None) -> None:
    assert rule is not None
    quantized = quantize_activation(torch.randn(_TOKENS, _HIDDEN, generator=_random(16)), rule)
    b.store(f"{prefix}.hidden_states", quantized.codes.view(torch.float8_e4m3fn))
    b.store(f"{prefix}.scales", quantized.scales)
    for name in ("topk_ids", "topk_weights"):
        b.alias(f"{prefix}.{name}", f"special.{name}")
