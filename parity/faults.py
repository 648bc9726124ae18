"""Mistakes that implementations have made, each ready to be planted in the reference: to test a tolerance, to teach.

`FAULTS` is the table, `plant` runs one, and `docs/planted_bugs.md` shows what the harness says about each. Most are
modelled on a public bug report: on what it does to the numbers, not on its code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from fp4ep.reference.activation import swiglu
from fp4ep.reference.formats import Overflow
from fp4ep.reference.moe import Intervention, moe_forward
from fp4ep.reference.scheme import Apply, Combine, Gemm, KOrder, ScaleSource, Weights
from fp4ep.reference.types import MoEInputs, MoEWeights, Stage

from . import mistakes as m
from .mistakes import At, Hook
from .problem import Layer, Problem
from .run import Claim, Run


class Kind(Enum):
    """What a diagnosis names."""

    TIES = "ties rounded another way"
    ROUNDED_TWICE = "rounded twice"
    QUANTIZER = "another quantizer rule"
    STEPS = "codes one step apart"
    SCALE_LOST = "a scale lost"
    FACTOR = "a constant factor"
    GLOBAL_SCALE = "a wrong global scale"
    BLOCK_SCALES = "block scales of another place"
    SHIFT = "rows or channels moved"
    NIBBLES = "nibbles swapped"
    GATE_UP = "gate and up mixed up"
    EXPERT = "another expert"
    ROUTES = "routes lost or invented"
    ROUTING_WEIGHT = "a wrong routing weight"
    PADDING = "padding leaked in"
    NAN = "NaN"
    ZERO = "rows lost"
    GEMM = "another way to accumulate"
    ROUNDING = "rounding only"
    CLAMP = "another clamp"
    SWIGLU = "another activation"
    SUM = "another sum over slots"


@dataclass(frozen=True)
class Fault:
    """One mistake, and how it is planted: by at most one of `weights`, `inputs`, `gemm` and `hook`.

    weights: on the experts' weights. inputs: on the tokens of a rank, given its number, the number of experts and that
    of ranks. gemm: on the rule of the GEMM that `stage` names. hook: on the tensors of `stage`, and the rest follows.
    """

    name: str
    says: str  #: what went wrong
    source: str  #: a public report that it is modelled on, or "design"
    stage: str  #: the first stage that differs
    expects: Kind  #: what `diagnose` must name first
    families: tuple[Weights, ...]
    weights: Callable[[MoEWeights], MoEWeights] | None = None
    inputs: Callable[[MoEInputs, int, int, int], MoEInputs] | None = None
    gemm: Callable[[Gemm], Gemm] | None = None
    hook: Hook | None = None
    problem: Mapping[str, Any] = field(default_factory=dict)  #: fields of Problem that make it visible
    options: Mapping[str, Any] = field(default_factory=dict)  #: options of find_scheme that do
    prepare: Callable[[Layer], Layer] | None = None  #: on the layer, where no Problem makes it visible
    bounded: bool = True  #: whether the derived bound of Claim.FLOAT32 notices too


#: A small scheme of every family: FlashInfer's name, options.
SCHEME_OF: dict[Weights, tuple[str, Mapping[str, Any]]] = {
    Weights.NVFP4: ("sm90_fp8_nvfp4_bf16_pull_cutedsl", {}),
    Weights.MXFP4: ("sm90_fp8_mxfp4_bf16_pull_cutedsl", {}),
    Weights.FP8_PER_EXPERT: ("sm90_fp8_fp8_bf16_pull_cutedsl", {}),
    Weights.FP8_BLOCK_128: ("sm90_fp8_fp8_bf16_pull_cutedsl", {"fp8_scale_mode": "blockwise"}),
    Weights.BF16: ("sm90_bf16_bf16_bf16_pull_cutedsl", {}),
}


def problem_for(fault: Fault | None, family: Weights) -> Problem:
    """A small problem of that family on which the fault shows; None: one that most faults show on."""
    name, options = SCHEME_OF[family]
    options = {**options, **(fault.options if fault else {})}
    sizes = {"tokens": (12,), "num_experts": 4, "hidden": 256 if family is Weights.BF16 else 128}
    return Problem(name, options, **{**sizes, **(fault.problem if fault else {})})


def _named(name: str, value: Any) -> dict[str, Any]:
    return {name: value}


def planted(fault: Fault, layer: Layer) -> tuple[Layer, Intervention]:
    """The layer with the fault in it, and what must be given to `moe_forward` as `intervene` beside it.

    Raises ValueError when the fault does not concern the layer's scheme.
    """
    if layer.scheme.weights not in fault.families:
        names = ", ".join(family.name for family in fault.families)
        raise ValueError(f"fault: {fault.name} must be planted in {names}, got {layer.scheme}")
    scheme, weights, inputs = layer.scheme, layer.weights, layer.inputs
    if fault.gemm:
        scheme = replace(scheme, **_named(fault.stage, fault.gemm(getattr(scheme, fault.stage))))
    if fault.weights:
        weights = fault.weights(weights)
    if fault.inputs:
        sizes = (weights.num_experts, layer.ep_size)
        inputs = tuple(fault.inputs(x, rank, *sizes) for rank, x in enumerate(inputs))
    before: dict[int, dict[str, m.Rows]] = {}

    def intervene(stage: Stage) -> Stage:
        seen = before.setdefault(stage.rank, {})
        if fault.hook and stage.name == fault.stage:
            at = At(layer, stage.name, stage.rank, seen, stage.tensors)
            stage = replace(stage, tensors=stage.tensors | fault.hook(at))
        seen[stage.name] = stage.tensors
        return stage

    return Layer(scheme, weights, inputs), intervene


def plant(fault: Fault, layer: Layer, problem: Problem | None = None) -> Run:
    """Run the layer with the fault in it, all ranks in this process. The run is one of `layer`, which is right.

    problem: what the layer was built from, if a Problem. Raises ValueError as `planted`.
    """
    wrong, intervene = planted(fault, layer)
    _, trace = moe_forward(wrong.scheme, wrong.weights, wrong.inputs, intervene=intervene)
    return Run(f"fault: {fault.name}", Claim.BITS, layer, trace, problem)


NVFP4, MXFP4, BF16 = Weights.NVFP4, Weights.MXFP4, Weights.BF16
TENSOR, BLOCK = Weights.FP8_PER_EXPERT, Weights.FP8_BLOCK_128
FP4 = (NVFP4, MXFP4)
WIDE = {"hidden": 256}

# fmt: off
FAULTS: dict[str, Fault] = {fault.name: fault for fault in (
    # --- stage: tokens to FP8
    Fault("staging-ties-away", "a code at a tie goes away from zero, not to even", "ROCm/aiter#3992", "stage",
          Kind.TIES, (NVFP4, TENSOR, BLOCK), hook=m.rounded(m.up_from_ties), problem={"values": "ties"}),
    Fault("staging-rounded-twice", "rounded to bf16 first, then to FP8", "flashinfer#5128", "stage",
          Kind.ROUNDED_TWICE, (NVFP4, BLOCK), hook=m.rounded(m.through_bf16)),
    Fault("staging-divides", "a division where the kernel multiplies by the reciprocal", "arch-com#905", "stage",
          Kind.QUANTIZER, (TENSOR,), hook=m.quantized(apply=Apply.DIVIDE), problem={"values": "ties"},
          options={"fc1_activation_dequant_scale": 7 / 64}),
    Fault("fp8-maximum-240", "scales made for a largest value of 240, not 448", "design", "stage",
          Kind.QUANTIZER, (NVFP4, BLOCK), hook=m.quantized(element=m.E4M3_240)),
    Fault("cast-saturates", "a cast that saturates where the kernel's gives NaN", "pytorch/ao#1912", "stage",
          Kind.QUANTIZER, (TENSOR,), hook=m.quantized(overflow=Overflow.SATURATE), problem={"values": "saturating"}),
    Fault("scale-made-dynamic", "a scale from the data where a static one is due", "auto-round#2374", "stage",
          Kind.QUANTIZER, (TENSOR,), hook=m.quantized(source=ScaleSource.AMAX, apply=Apply.DIVIDE)),
    Fault("zero-over-zero", "a block of zeros is divided by its amax", "kernels-community#681", "stage",
          Kind.QUANTIZER, (NVFP4,), hook=m.zero_over_zero, problem={"values": "zeros"}),
    Fault("tiny-path-missing", "tiny blocks take the ordinary path", "flashinfer#5024", "stage",
          Kind.QUANTIZER, (NVFP4,), hook=m.quantized(tiny_path=False), problem={"values": "tiny"}),
    Fault("padding-in-scale", "an amax is taken over a padding row too", "flashinfer#3057", "stage",
          Kind.PADDING, (NVFP4, BLOCK), hook=m.nan_from_below, problem={"padding": 5}),
    # --- dispatch: routes, and what travels with them
    Fault("scales-dropped", "codes travel without their scales", "sglang#31529", "dispatch",
          Kind.SCALE_LOST, (NVFP4,), hook=m.only("scales", torch.ones_like)),
    Fault("scale-exponents-only", "scales lose their mantissa", "sglang#39193", "dispatch",
          Kind.SCALE_LOST, (NVFP4, BLOCK), hook=m.only("scales", m.exponent_only)),
    Fault("weight-at-token-index", "routing weights are read at token, not at token * top_k + slot", "flashinfer#2629",
          "dispatch", Kind.ROUTING_WEIGHT, (NVFP4, BF16), hook=m.weight_at_token_index),
    Fault("weight-in-bf16", "routing weights travel as bf16", "design", "dispatch",
          Kind.ROUTING_WEIGHT, (NVFP4,), hook=m.only("topk_weights", lambda w: w.bfloat16().float())),
    Fault("masked-wrapped", "id -1 indexes the expert map from its end", "vllm#46408", "dispatch",
          Kind.ROUTES, (NVFP4, BF16), inputs=m.ids(lambda ids, r, e, n: ids.where(ids >= 0, ids + e)),
          problem={"routing": "masked", "num_experts": 8}),
    Fault("global-ids-as-local", "global ids are taken for local ones: ranks above 0 find none of theirs",
          "vllm-gaudi#1796", "dispatch", Kind.ROUTES, (NVFP4,),
          inputs=m.ids(lambda ids, r, e, n: ids.where(ids < e // n, -1)), problem={"tokens": (5, 7)}),
    Fault("repeats-dropped", "an expert named twice by one token gets it once", "vllm#39391", "dispatch",
          Kind.ROUTES, (NVFP4,), inputs=m.ids(m.repeats_masked), problem={"routing": "duplicates"}),
    Fault("expert-offset", "every route goes one expert too far", "vllm-ascend#4793", "dispatch",
          Kind.ROUTES, (MXFP4,), inputs=m.ids(lambda ids, r, e, n: ids.where(ids < 0, (ids + 1) % e))),
    Fault("next-row-delivered", "routes carry the row of the route behind", "design", "dispatch",
          Kind.SHIFT, (NVFP4, BF16), hook=m.of_next_row),
    # --- fc1: operands, scales, accumulation
    Fault("gate-up-exchanged", "up rows first, gate rows second", "vllm#40082", "fc1",
          Kind.GATE_UP, (NVFP4, MXFP4, TENSOR, BLOCK, BF16), weights=m.rows_of_w13(m.halves_exchanged)),
    Fault("gate-up-interleaved", "rows that alternate gate and up are read as halves", "vllm#44893", "fc1",
          Kind.GATE_UP, (NVFP4, BF16), weights=m.rows_of_w13(m.interleaved)),
    Fault("nibbles-swapped", "the odd code of a byte is taken for the even one", "design", "fc1",
          Kind.NIBBLES, FP4, weights=m.nibbles_swapped("w13")),
    Fault("scale-rows-32", "block scales of the row 32 below: a swizzle not undone", "vllm#42118", "fc1",
          Kind.BLOCK_SCALES, FP4, weights=m.scales_moved("w13", rows=32)),
    Fault("scale-rows-128", "block scales of the row 128 below: a tile of padding", "vllm#35497", "fc1",
          Kind.BLOCK_SCALES, (NVFP4,), weights=m.scales_moved("w13", rows=128)),
    Fault("scale-columns-4", "block scales four to the right", "flashinfer#2848", "fc1",
          Kind.BLOCK_SCALES, FP4, weights=m.scales_moved("w13", columns=4), problem=WIDE),
    Fault("scale-byte", "one byte of one block scale is one too low", "design", "fc1",
          Kind.BLOCK_SCALES, (NVFP4, MXFP4), weights=m.one_code("w13_scale", (1, 5, 3), -1)),
    Fault("scales-of-next-expert", "block scales of the expert behind", "flashinfer#5438", "fc1",
          Kind.EXPERT, FP4, weights=m.from_expert("w13_scale", 1)),
    Fault("e8m0-binade", "E8M0 scales one binade too high", "vllm#53110", "fc1",
          Kind.FACTOR, (MXFP4,), weights=m.part("w13_scale", lambda codes: codes + 1)),
    Fault("global-scale-missing", "the global scale is left out", "transformers#48372", "fc1",
          Kind.GLOBAL_SCALE, (NVFP4,), weights=m.global_scale("w13", torch.ones_like)),
    Fault("global-scale-inverted", "multiplied by the encode scale instead of the decode scale", "vllm#35733", "fc1",
          Kind.GLOBAL_SCALE, (NVFP4,), weights=m.global_scale("w13", torch.reciprocal)),
    Fault("global-scale-one-ulp", "one ulp away, as a reciprocal of a reciprocal can be", "vllm#42549", "fc1",
          Kind.GLOBAL_SCALE, (NVFP4,), weights=m.global_scale("w13", m.one_ulp_up), bounded=False),
    Fault("up-by-gate-scale", "up is multiplied by gate's global scale", "vllm#54974", "fc1",
          Kind.FACTOR, (NVFP4,), hook=m.up_by_gate_scale),
    Fault("scale-of-expert-0", "a stride of 0: expert 0's scale for all", "vllm#57016", "fc1",
          Kind.EXPERT, (TENSOR,), weights=m.from_expert("w13_scale", None), prepare=m.quantized_per_expert),
    Fault("global-scale-of-expert-0", "a stride of 0: expert 0's global scale for all", "vllm#35331", "fc1",
          Kind.EXPERT, (NVFP4,), weights=m.from_expert("w13_global_scale", None)),
    Fault("stale-alphas", "experts moved in pairs, their cached global scales did not", "vllm#34646", "fc1",
          Kind.GLOBAL_SCALE, (NVFP4,), weights=m.global_scale("w13", m.pairs_exchanged)),
    Fault("k-order", "K elements in natural order", "design", "fc1",
          Kind.GEMM, (NVFP4,), gemm=lambda rule: replace(rule, k_order=KOrder.NATURAL), bounded=False),
    Fault("promoted-per-128", "the tensor core's sum is promoted every 128 of K", "FlashInfer 0.7.4, 2xacc", "fc1",
          Kind.GEMM, (NVFP4, TENSOR), gemm=lambda rule: replace(rule, chunk=128), problem=WIDE, bounded=False),
    Fault("k-tile-of-256", "a K tile of two scale blocks multiplied by the scale of one", "FlashInfer 0.7.4", "fc1",
          Kind.GEMM, (BLOCK,), gemm=lambda rule: replace(rule, chunk=256), problem=WIDE),
    Fault("wide-accumulator", "sums of 25 bits where Hopper's FP8 keeps 13", "design", "fc1",
          Kind.GEMM, (NVFP4, TENSOR), gemm=m.wide, bounded=False),
    # --- activation
    Fault("clamp-after-silu", "the clamp acts after silu", "sglang-jax#1358", "activation",
          Kind.CLAMP, (NVFP4,), hook=m.activated(m.clamp_after_silu), options={"gate_up_clamp": 0.5}),
    Fault("clamp-missing", "no clamp", "ROCm/aiter#4526", "activation", Kind.CLAMP, (NVFP4, BF16),
          hook=m.activated(lambda gate, up, _, w: swiglu(gate, up, None, w)), options={"gate_up_clamp": 0.5}),
    Fault("clamp-before-scales", "the clamp meets values without their global scale", "sglang#39939", "activation",
          Kind.CLAMP, (NVFP4,), hook=m.clamp_before_scales),
    Fault("weight-lost", "the routing weight is not applied", "design", "activation", Kind.ROUTING_WEIGHT,
          (NVFP4, BF16), hook=m.activated(lambda gate, up, c, w: swiglu(gate, up, c, torch.ones_like(w)))),
    Fault("weight-twice", "the routing weight is applied twice", "vllm#43694", "activation", Kind.ROUTING_WEIGHT,
          (NVFP4,), hook=m.activated(lambda gate, up, c, w: swiglu(gate, up, c, w) * w[:, None])),
    Fault("gpt-oss-swiglu", "gpt-oss's alpha 1.702 and beta 1 in a plain SwiGLU", "vllm#45738", "activation",
          Kind.SWIGLU, (BF16,), hook=m.activated(m.gpt_oss)),
    Fault("library-exp", "a correctly rounded sigmoid for ex2.approx and rcp.approx", "flashinfer#3387", "activation",
          Kind.SWIGLU, (NVFP4,), hook=m.activated(m.library_exp), bounded=False),
    # --- requantize
    Fault("requantize-ties-away", "a code at a tie goes away from zero, not to even", "ROCm/aiter#2247", "requantize",
          Kind.TIES, (TENSOR,), hook=m.rounded(m.up_from_ties), prepare=m.ties_after_swiglu, bounded=False),
    Fault("requantize-divides", "a division where the kernel multiplies by the reciprocal", "MSLK#224", "requantize",
          Kind.QUANTIZER, (TENSOR,), hook=m.quantized(apply=Apply.DIVIDE), prepare=m.ties_after_swiglu,
          options={"fc2_activation_dequant_scale": 7 / 64}, bounded=False),
    Fault("requantize-rounded-twice", "rounded to bf16 first, then to FP8", "flashinfer#5128", "requantize",
          Kind.ROUNDED_TWICE, (NVFP4,), hook=m.rounded(m.through_bf16)),
    Fault("requantize-scale-lost", "codes go on without their scales", "flashinfer#3548", "requantize",
          Kind.SCALE_LOST, (NVFP4, BLOCK), hook=m.only("scales", torch.ones_like)),
    Fault("requantize-scale-columns", "each block takes its neighbour's scale", "design", "requantize",
          Kind.SHIFT, (NVFP4,), hook=m.only("scales", lambda scales: scales.roll(-1, 1))),
    # --- fc2
    Fault("fc2-scale-rows-32", "block scales of the row 32 below: a swizzle not undone", "vllm#42118", "fc2",
          Kind.BLOCK_SCALES, FP4, weights=m.scales_moved("w2", rows=32)),
    Fault("fc2-alpha-of-fc1", "fc1's global scale in fc2's alpha", "design", "fc2",
          Kind.GLOBAL_SCALE, (NVFP4,), weights=m.global_scale_of("w2", "w13")),
    Fault("payload-moved-alone", "an expert's codes moved, its block scales did not", "sglang#17158", "fc2",
          Kind.EXPERT, FP4, weights=m.from_expert("w2", 1)),
    Fault("promoted-per-2-blocks", "two scale blocks promoted with the scale of the first", "design", "fc2",
          Kind.GEMM, (NVFP4,), gemm=lambda rule: replace(rule, chunk=128)),
    # --- combine
    Fault("combine-in-bf16", "the sum rounds to bf16 at every slot", "TensorRT-LLM#16778", "combine",
          Kind.SUM, (NVFP4,), hook=m.sums(Combine.ON_ARRIVAL), problem={"top_k": 4}),
    Fault("shared-expert-twice", "the last slot, a shared expert's, is summed by each of two ranks", "sglang#26845",
          "combine", Kind.SUM, (NVFP4,), hook=m.sums(counts={-1: 2}), problem={"tokens": (6, 6)}),
    Fault("slot-lost", "the last slot, a shared expert's, is never reduced", "tpu-inference#3435", "combine",
          Kind.SUM, (MXFP4,), hook=m.sums(counts={-1: 0})),
    Fault("masked-slots-summed", "masked slots are summed, and hold what was there before", "vllm#46408", "combine",
          Kind.SUM, (NVFP4, BF16), hook=m.terms_changed(m.stale), problem={"routing": "masked"}),
    Fault("unwritten-slots-summed", "masked slots are summed, and hold NaN", "DeepEP#589", "combine",
          Kind.NAN, (BF16,), hook=m.terms_changed(m.unwritten), problem={"routing": "masked"}),
    Fault("one-row-scrambled", "one row comes back in another order, its norm right", "DeepEP#700", "combine",
          Kind.SHIFT, (NVFP4,), hook=m.terms_changed(m.one_row_scrambled)),
)}
# fmt: on
