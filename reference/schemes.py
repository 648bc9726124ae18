"""The registry: one record per kernel variant that differs in bits, keyed by FlashInfer's registry names.

Source: FlashInfer 0.7.4, `moe_ep/backends/mega/kernel/sm{90,100}` and `moe_ep/kernel_src/sm{90,100}`, read line by
line; what `verified` rests on is listed by `fp4ep replay`. No SM100 record was compared with that hardware.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from .formats import E2M1, E4M3, E5M2, Format, Overflow, cast_overflow
from .scheme import (
    ActivationQuant,
    Apply,
    Combine,
    Evidence,
    Gemm,
    KOrder,
    Place,
    ScaleSource,
    Scheme,
    Swiglu,
    Weights,
)
from .tensor_core import BLACKWELL_NVFP4, HOPPER_BF16, HOPPER_E4M3, HOPPER_E5M2, TensorCore

# --- packed FP4 weights, FP8 activations: NVFP4 and MXFP4 share everything but the weight operand ---------------

#: Dense weights that the quantizing backends take.
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
#: One scale per token over all of H; a true division.
_PER_TOKEN = ActivationQuant(E4M3, None, ScaleSource.AMAX, Apply.DIVIDE, Overflow.SATURATE, tiny_path=True)
#: One scale per 64 SwiGLU outputs; a multiplication by the reciprocal.
_PER_64 = ActivationQuant(E4M3, 64, ScaleSource.AMAX, Apply.RECIPROCAL, Overflow.SATURATE, tiny_path=True)

_NVFP4 = Scheme(
    name="sm90_fp8_nvfp4_bf16_pull_cutedsl",
    knobs={"nvfp4_kperm": (64,)},
    weights=Weights.NVFP4,
    stage=_PER_TOKEN,
    fc1=Gemm(HOPPER_E4M3, None, promote=Place.ACTIVATION, epilogue=Place.WEIGHT, k_order=KOrder.KPERM64),
    requantize=_PER_64,
    fc2=Gemm(HOPPER_E4M3, 64, promote=Place.ACTIVATION, epilogue=Place.WEIGHT, k_order=KOrder.KPERM64),
    combine=Combine.LIVE_SLOTS,
    hidden_multiple=128,
    intermediate_multiple=128,
    packed_weights=True,
    dense_weights=_FLOATS,
    gate_up_clamp=10.0,
    evidence=Evidence.VERIFIED,
)

_NVFP4_NATURAL = replace(
    _NVFP4,
    knobs={"nvfp4_kperm": (0, 32)},  # 32 moves elements inside one instruction only
    fc1=replace(_NVFP4.fc1, k_order=KOrder.NATURAL),
    fc2=replace(_NVFP4.fc2, k_order=KOrder.NATURAL),
)

_MXFP4 = replace(
    _NVFP4_NATURAL,
    name="sm90_fp8_mxfp4_bf16_pull_cutedsl",
    knobs={},
    weights=Weights.MXFP4,
    dense_weights=(),
)

# --- FP8 weights and activations ---------------------------------------------------------------------------------


#: K of `mma_tiler_mnk` that have a record. FlashInfer's default is 128; it takes any multiple.
_TILE_K = (128, 256)


def _fp8_blockwise(kind: str, element: Format, core: TensorCore) -> Scheme:
    return Scheme(
        name="sm90_fp8_fp8_bf16_pull_cutedsl",
        # Always promoted per scale block, in either accumulation mode. A wider K tile is taken by FlashInfer 0.7.4 but
        # gets the wrong scales: tile j those of block j, though it covers blocks 2j and 2j + 1. No record for that.
        knobs={"fp8_scale_mode": ("blockwise",), "kind": (kind,), "mma_tiler_k": (128,)},
        weights=Weights.FP8_BLOCK_128,
        stage=ActivationQuant(element, 128, ScaleSource.AMAX, Apply.DIVIDE, cast_overflow(element)),
        fc1=Gemm(core, 128, promote=Place.BOTH, epilogue=Place.NONE),
        requantize=ActivationQuant(element, 64, ScaleSource.AMAX, Apply.RECIPROCAL, Overflow.SATURATE),
        fc2=Gemm(core, 64, promote=Place.BOTH, epilogue=Place.NONE),
        combine=Combine.LIVE_SLOTS,
        hidden_multiple=128,
        intermediate_multiple=128,
        packed_weights=True,
        dense_weights=_FLOATS,
        gate_up_clamp=None,
        evidence=Evidence.VERIFIED,
    )


def _fp8_per_tensor(kind: str, element: Format, core: TensorCore, tile_k: int | None) -> Scheme:
    """tile_k: None for 1xacc; for 2xacc the tile's K, after which each chain is added to the long-lived sum."""
    knobs = {"fp8_scale_mode": ("per_tensor",), "kind": (kind,), "fp8_accum_mode": ("2xacc" if tile_k else "1xacc",)}
    gemm = Gemm(core, tile_k, promote=Place.NONE, epilogue=Place.BOTH)
    return Scheme(
        name="sm90_fp8_fp8_bf16_pull_cutedsl",
        knobs=knobs | ({"mma_tiler_k": (tile_k,)} if tile_k else {}),
        weights=Weights.FP8_PER_EXPERT,
        stage=ActivationQuant(element, None, ScaleSource.STATIC, Apply.RECIPROCAL_OF_NUMBER, cast_overflow(element)),
        fc1=gemm,
        requantize=ActivationQuant(element, None, ScaleSource.STATIC, Apply.RECIPROCAL, Overflow.SATURATE),
        fc2=gemm,
        combine=Combine.LIVE_SLOTS,
        hidden_multiple=64,
        intermediate_multiple=64,
        packed_weights=True,
        dense_weights=_FLOATS,
        gate_up_clamp=None,
        evidence=Evidence.VERIFIED,
    )


# --- bf16 --------------------------------------------------------------------------------------------------------

_BF16 = Scheme(
    name="sm90_bf16_bf16_bf16_pull_cutedsl",
    knobs={},
    weights=Weights.BF16,
    stage=None,
    fc1=Gemm(HOPPER_BF16, None, promote=Place.NONE, epilogue=Place.NONE),
    requantize=None,
    fc2=Gemm(HOPPER_BF16, None, promote=Place.NONE, epilogue=Place.NONE),
    combine=Combine.ALL_SLOTS,
    hidden_multiple=256,
    intermediate_multiple=64,
    packed_weights=False,
    dense_weights=(torch.bfloat16,),
    gate_up_clamp=None,
    evidence=Evidence.VERIFIED,
)

_FP8 = (
    *(_fp8_per_tensor("fp8_e4m3", E4M3, HOPPER_E4M3, tile_k) for tile_k in (None, *_TILE_K)),
    *(_fp8_per_tensor("fp8_e5m2", E5M2, HOPPER_E5M2, tile_k) for tile_k in (None, *_TILE_K)),
    _fp8_blockwise("fp8_e4m3", E4M3, HOPPER_E4M3),
    _fp8_blockwise("fp8_e5m2", E5M2, HOPPER_E5M2),
)


# --- the push kernel: FP8 blocks of 128 on every leg, the combine's too -------------------------------------------

#: One rule for tokens, SwiGLU outputs and what travels back. The file is compiled with nvcc's -use_fast_math.
_FAST_128 = ActivationQuant(E4M3, 128, ScaleSource.AMAX_OR_ONE, Apply.DIVIDE_APPROX, Overflow.SATURATE)
#: DeepGEMM's kernels, compiled without it: the scales' product rounded, then fma(product, chain, sum).
_DEEP_GEMM = Gemm(HOPPER_E4M3, 128, promote=Place.BOTH, epilogue=Place.NONE)

_PUSH = Scheme(
    name="sm90_fp8_fp8_bf16_push_cuda",
    # payload_dtype and dedup_dispatch move the quantization and the rows, fuse_fc1_epilogue fuses stages: the same
    # bits, but that the fused ones keep float32 subnormals.
    knobs={"combine_dtype": ("fp8",), "grouped_combine": (True,)},
    weights=Weights.FP8_BLOCK_128_APART,
    stage=_FAST_128,
    fc1=_DEEP_GEMM,
    requantize=_FAST_128,
    fc2=_DEEP_GEMM,
    combine=Combine.WEIGHTED_GROUPS,
    hidden_multiple=128,
    intermediate_multiple=128,
    packed_weights=True,
    dense_weights=(torch.bfloat16,),
    gate_up_clamp=None,
    wire_rule=_FAST_128,
    swiglu=Swiglu.FAST_BF16,
    quantized_inputs=False,
    evidence=Evidence.VERIFIED,
)
_PUSH_ROUTES = replace(
    _PUSH, knobs={"combine_dtype": ("fp8",), "grouped_combine": (False,)}, combine=Combine.WEIGHTED_ROUTES
)
_PUSH_BF16 = replace(_PUSH_ROUTES, knobs={"combine_dtype": ("bf16",), "grouped_combine": (False,)}, wire_rule=None)


# --- SM100: NVFP4 weights and activations, block-scaled by the tensor core -----------------------------------------

_BLOCKS = ActivationQuant(E2M1, 16, ScaleSource.AMAX, Apply.RECIPROCAL, Overflow.SATURATE, scale=E4M3)
_BLOCK_SCALED = Gemm(BLACKWELL_NVFP4, None, promote=Place.NONE, epilogue=Place.WEIGHT)

_SM100_NVFP4 = Scheme(
    name="sm100_nvfp4_nvfp4_bf16_cutedsl",
    knobs={"apply_routing_weights_before_fc2": (True,)},
    weights=Weights.NVFP4_BLOCK_SCALED,
    stage=_BLOCKS,
    fc1=_BLOCK_SCALED,
    requantize=replace(_BLOCKS, nan_scale=True),
    fc2=_BLOCK_SCALED,
    combine=Combine.LIVE_SLOTS,
    hidden_multiple=64,
    intermediate_multiple=64,
    packed_weights=True,
    dense_weights=_FLOATS,
    gate_up_clamp=None,
    nan_clamps=True,
)


def _reduced_in_kernel(record: Scheme) -> tuple[Scheme, Scheme]:
    """The record without and with the opt-in sum of routes inside fc2."""
    without, reduced = ({**record.knobs, "enable_in_kernel_fc2_reduce": (value,)} for value in (False, True))
    return replace(record, knobs=without), replace(record, knobs=reduced, combine=Combine.ON_ARRIVAL)


_WITHOUT, _REDUCED = zip(*map(_reduced_in_kernel, (*_FP8, _BF16, _SM100_NVFP4)), strict=True)
_SM100_LATE = replace(
    _WITHOUT[-1],
    knobs={**_WITHOUT[-1].knobs, "apply_routing_weights_before_fc2": (False,)},
    combine=Combine.WEIGHTED,
)

#: Every record. The first of each name has FlashInfer's default knobs.
SCHEMES: tuple[Scheme, ...] = (
    *(_NVFP4, _NVFP4_NATURAL, _MXFP4),
    *_WITHOUT,
    *_REDUCED,
    _SM100_LATE,
    *(_PUSH, _PUSH_ROUTES, _PUSH_BF16),
)

_STATIC_SCALES = ("fc1_activation_dequant_scale", "fc2_activation_dequant_scale")

#: Options that change bits and have no record: the one value that may be given, FlashInfer's default.
_NOT_MODELLED: Mapping[str, Mapping[str, Any]] = {
    _SM100_NVFP4.name: {
        "combine_dtype": "bf16",
        "activation": "swiglu",
        "swiglu_alpha": None,
        "swiglu_beta": None,
        "situ_beta": None,
        "situ_linear_beta": None,
        "enable_fc1_activation_per_token_scale": False,
    }
}


def find_scheme(name: str, **options: Any) -> Scheme:
    """The record for a FlashInfer registry name and config options, with the options' numbers filled in.

    options: the knobs that select among variants (`nvfp4_kperm`; `fp8_scale_mode`, `kind`, `fp8_accum_mode`,
    `mma_tiler_k` for the K of `mma_tiler_mnk`, `enable_in_kernel_fc2_reduce`), for FP8 `grouped_token_back` and
    `combine_format`, and the numbers `gate_up_clamp` (FlashInfer's alias for it is `activation_clamp`) and, for FP8 per
    tensor, `fc1_activation_dequant_scale` and `fc2_activation_dequant_scale`. The names are those of FlashInfer's
    config classes; what is left out takes FlashInfer's default. SM100 has `apply_routing_weights_before_fc2`,
    `enable_in_kernel_fc2_reduce`, `gate_up_clamp` and `input_norm_const`; its quantized combine, SwiGLU constants, SiTU
    and per-token scales are refused. The push kernel has `combine_dtype` and `grouped_combine`, and no clamp.

    Raises ValueError for an unknown name, option or value, listing what is allowed.
    """
    records = [scheme for scheme in SCHEMES if scheme.name == name]
    if not records:
        raise ValueError(f"name: no scheme {name!r}; known: {', '.join(sorted({s.name for s in SCHEMES}))}")
    options = _modelled(name, options)
    knobs: dict[str, list] = {}
    for scheme in records:
        for knob, values in scheme.knobs.items():
            knobs.setdefault(knob, []).extend(value for value in values if value not in knobs.get(knob, []))
    for knob in knobs.keys() & options.keys():
        value = options[knob]
        if not any(type(value) is type(allowed) and value == allowed for allowed in knobs[knob]):
            raise ValueError(f"{knob}: {value!r} is not one of {knobs[knob]}")
    wanted = {knob: options.get(knob, values[0]) for knob, values in knobs.items()}
    record = next((r for r in records if all(wanted[knob] in values for knob, values in r.knobs.items())), None)
    if record is None:
        raise ValueError(
            f"{', '.join(options)}: no record of {name} for {wanted}; there are {', '.join(map(str, records))}"
        )
    options, record = _grouped(options, record)
    numbers = _numbers(record)
    for option in options.keys() - knobs.keys():
        if option not in numbers:
            raise ValueError(f"{option}: {record} has no such option; it has {', '.join([*knobs, *numbers])}")
        if not (_positive(options[option]) or (option == "gate_up_clamp" and options[option] is None)):
            allowed = "a positive finite number" + " or None" * (option == "gate_up_clamp")
            raise ValueError(f"{option} must be {allowed}, got {options[option]!r}")
    return replace(record, **{option: options[option] for option in options.keys() - knobs.keys()})


def _modelled(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those that must have their default."""
    fixed = _NOT_MODELLED.get(name, {})
    for option in fixed.keys() & options.keys():
        value, default = options[option], fixed[option]
        if type(value) is not type(default) or value != default:
            raise ValueError(f"{option}: {value!r} is not modelled for {name}, only {default!r}")
    return {option: value for option, value in options.items() if option not in fixed}


#: `combine_format` of FlashInfer's FP8 config -> the wire's format.
_WIRES = {"bf16": None, "32e4m3xe8m0": E4M3, "32e5m2xe8m0": E5M2}


def _grouped(options: dict[str, Any], record: Scheme) -> tuple[dict[str, Any], Scheme]:
    """The options without `grouped_token_back` and `combine_format`, and the record with what they say."""
    rest = {name: value for name, value in options.items() if name not in ("grouped_token_back", "combine_format")}
    if rest == options or record.name != _FP8[0].name:
        return options, record
    grouped, wire = options.get("grouped_token_back", False), options.get("combine_format", "bf16")
    if not isinstance(grouped, bool):
        raise ValueError(f"grouped_token_back: {grouped!r} is not one of [False, True]")
    if wire not in _WIRES or (wire != "bf16" and not grouped):
        allowed = list(_WIRES) if grouped else ["bf16"]
        raise ValueError(f"combine_format: {wire!r} is not one of {allowed} with grouped_token_back={grouped}")
    if not grouped:
        return rest, record
    if record.combine is Combine.ON_ARRIVAL:
        raise ValueError("grouped_token_back: True is not possible with enable_in_kernel_fc2_reduce")
    knobs = {**record.knobs, "grouped_token_back": (True,), "combine_format": (wire,)}
    evidence = Evidence.VERIFIED if record is _WITHOUT[len(_FP8) - 2] else Evidence.MODELLED
    record = replace(record, knobs=knobs, combine=Combine.GROUPED, wire=_WIRES[wire], evidence=evidence)
    return rest, replace(record, hidden_multiple=512)  # sums in chunks of 512


def options_of(scheme: Scheme) -> dict[str, Any]:
    """The options that make find_scheme return an equal record."""
    return {knob: values[0] for knob, values in scheme.knobs.items()} | {
        n: getattr(scheme, n) for n in _numbers(scheme)
    }


def _numbers(scheme: Scheme) -> tuple[str, ...]:
    """The options that are fields of the record."""
    if scheme.swiglu is Swiglu.FAST_BF16:
        return ()
    if scheme.stage is None:
        return ("gate_up_clamp",)
    static = scheme.stage.source is ScaleSource.STATIC
    return ("gate_up_clamp", *_STATIC_SCALES * static, *("input_norm_const",) * (scheme.stage.scale is not None))


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
