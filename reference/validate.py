"""Every check on the arguments of `moe_forward`, before any work: what was wrong, in which argument, what is allowed."""

from collections.abc import Sequence

import torch

from .formats import E4M3
from .quantize import MX_BLOCK, NVFP4_BLOCK
from .scheme import Scheme, Weights
from .types import MoEInputs, MoEWeights

#: The kernels' dispatch lays 32 // top_k tokens across a warp.
MAX_TOP_K = 32

_FP8_DTYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


class InputError(ValueError):
    """An argument does not fit. The message starts with its name."""


def _require(condition: bool, argument: str, allowed: object, got: object, rank: int | None = None) -> None:
    if not condition:
        where = "" if rank is None else f" (rank {rank})"
        raise InputError(f"{argument}{where} must be {allowed}, got {got}")


def check_arguments(
    scheme: Scheme, weights: MoEWeights, ranks: Sequence[MoEInputs], max_tokens_per_rank: int | None
) -> None:
    """Raise InputError unless the scheme's kernel would take these arguments and give a defined result."""
    _require(len(ranks) > 0, "inputs", "at least one rank", "an empty sequence")
    hidden, intermediate = _check_weights(scheme, weights)
    _require(
        weights.num_experts % len(ranks) == 0,
        "inputs",
        f"a number of ranks that divides the {weights.num_experts} experts",
        len(ranks),
    )
    _require(hidden % scheme.hidden_multiple == 0, "w13", f"of a hidden size that is a multiple of {scheme.hidden_multiple}", hidden)
    _require(
        intermediate % scheme.intermediate_multiple == 0,
        "w2",
        f"of an intermediate size that is a multiple of {scheme.intermediate_multiple}",
        intermediate,
    )
    for rank, inputs in enumerate(ranks):
        _check_tokens(scheme, inputs, hidden, rank)
        _check_routing(inputs, weights.num_experts, ranks[0].topk_ids.shape[-1], rank)
        tokens = inputs.hidden_states.shape[0]
        limit = tokens if max_tokens_per_rank is None else max_tokens_per_rank
        _require(tokens <= limit, "hidden_states", f"at most max_tokens_per_rank = {limit} tokens", tokens, rank)


def _check_tokens(scheme: Scheme, inputs: MoEInputs, hidden: int, rank: int) -> None:
    x, scales = inputs.hidden_states, inputs.scales
    _require(x.ndim == 2 and x.shape[1] == hidden, "hidden_states", f"[tokens, {hidden}]", list(x.shape), rank)
    if x.dtype is torch.bfloat16:
        _require(scales is None, "scales", "None when hidden_states is bf16: the scheme makes its own", "a tensor", rank)
        return
    allowed = "bfloat16"
    if scheme.stage is not None:
        staged = _FP8_DTYPES[str(scheme.stage.element)]
        allowed += f", or {staged} with scales"
    _require(scheme.stage is not None and x.dtype is staged, "hidden_states", allowed, x.dtype, rank)
    if scheme.stage.block is None and scheme.weights is Weights.FP8_PER_EXPERT:
        return  # static scale: whatever scales travel along are not used
    columns = 1 if scheme.stage.block is None else hidden // scheme.stage.block
    shape = [x.shape[0], columns]
    _require(scales is not None, "scales", f"float32 {shape} with {x.dtype} hidden_states", None, rank)
    _require(scales.dtype is torch.float32 and list(scales.shape) == shape, "scales", f"float32 {shape}", _describe(scales), rank)


def _check_routing(inputs: MoEInputs, num_experts: int, top_k: int, rank: int) -> None:
    ids, weights = inputs.topk_ids, inputs.topk_weights
    shape = [inputs.hidden_states.shape[0], top_k]
    _require(ids.dtype in (torch.int64, torch.int32), "topk_ids", "int64 or int32", ids.dtype, rank)
    _require(list(ids.shape) == shape, "topk_ids", f"[tokens, top_k] = {shape}", list(ids.shape), rank)
    _require(1 <= top_k <= MAX_TOP_K, "topk_ids", f"of 1 to {MAX_TOP_K} slots per token", top_k, rank)
    largest = int(ids.max()) if ids.numel() else -1
    # The kernels do not check this: such an id indexes a counter in shared memory out of range.
    _require(largest < num_experts, "topk_ids", f"below num_experts = {num_experts} (negative: masked)", largest, rank)
    _require(weights.dtype is torch.float32, "topk_weights", "float32", weights.dtype, rank)
    _require(weights.shape == ids.shape, "topk_weights", f"of topk_ids' shape {list(ids.shape)}", list(weights.shape), rank)


def _check_weights(scheme: Scheme, weights: MoEWeights) -> tuple[int, int]:
    """Shapes, dtypes and values of the weights. Returns (hidden, intermediate)."""
    w13, w2 = weights.w13, weights.w2
    _require(w13.ndim == 3 and w13.shape[0] > 0 and w13.shape[1] % 2 == 0, "w13", "[experts, 2 * intermediate, hidden], experts > 0", list(w13.shape))
    for scales, present in (("w13_scale", weights.w2_scale), ("w2_scale", weights.w13_scale)):
        _require(
            getattr(weights, scales) is not None or present is None,
            scales,
            "given together with the other leg's scales, or neither (bf16 weights)",
            None,
        )
    packing = 2 if scheme.weights in (Weights.NVFP4, Weights.MXFP4) and weights.quantized else 1
    hidden, intermediate = w13.shape[2] * packing, w13.shape[1] // 2
    expected = [w13.shape[0], hidden, intermediate // packing]
    _require(list(w2.shape) == expected, "w2", f"[experts, hidden, intermediate{' / 2' * (packing == 2)}] = {expected}", list(w2.shape))
    for leg in ("w13", "w2"):
        if weights.quantized:
            _check_quantized_leg(scheme, weights, leg, hidden if leg == "w13" else intermediate)
        else:
            _check_dense_leg(scheme, weights, leg)
    return hidden, intermediate


def _check_dense_leg(scheme: Scheme, weights: MoEWeights, leg: str) -> None:
    payload = getattr(weights, leg)
    _require(scheme.dense_weights, leg, f"packed with scales: {scheme.name} does not quantize bf16 weights", payload.dtype)
    _require(payload.dtype is torch.bfloat16, leg, "bfloat16 (or quantized, with w13_scale and w2_scale)", payload.dtype)
    _require(getattr(weights, f"{leg}_global_scale") is None, f"{leg}_global_scale", "None with bf16 weights", "a tensor")
    if scheme.weights is Weights.NVFP4:
        _require(bool(torch.isfinite(payload).all()), leg, "finite", "NaN or infinity")


def _check_quantized_leg(scheme: Scheme, weights: MoEWeights, leg: str, k: int) -> None:
    payload, scale, global_scale = (getattr(weights, leg + s) for s in ("", "_scale", "_global_scale"))
    _require(scheme.packed_weights, f"{leg}_scale", f"None: {scheme.name} takes bf16 weights only", "a tensor")
    experts, rows = payload.shape[:2]
    payload_dtypes, scale_dtypes, scale_shape = {
        Weights.NVFP4: ((torch.uint8,), (torch.uint8, torch.float8_e4m3fn), [experts, rows, k // NVFP4_BLOCK]),
        Weights.MXFP4: ((torch.uint8,), (torch.uint8,), [experts, rows, k // MX_BLOCK]),
        Weights.FP8_PER_EXPERT: (_fp8_dtypes(scheme), (torch.float32,), [experts]),
        Weights.FP8_BLOCK_128: (_fp8_dtypes(scheme), (torch.float32,), [experts, rows // 128, k // 128]),
    }[scheme.weights]
    names = " or ".join(str(d) for d in payload_dtypes)
    _require(payload.dtype in payload_dtypes, leg, f"{names} with scales", payload.dtype)
    names = " or ".join(str(d) for d in scale_dtypes)
    fits = scale.dtype in scale_dtypes and list(scale.shape) == scale_shape
    _require(fits, f"{leg}_scale", f"{names} {scale_shape}", _describe(scale))
    if scheme.weights is Weights.NVFP4:
        largest = int(scale.view(torch.uint8).max())
        _require(largest <= E4M3.max_code, f"{leg}_scale", "E4M3 codes 0..126 (finite, not negative)", f"code {largest}")
    elif scale.dtype is torch.float32:
        _require(_positive_finite(scale), f"{leg}_scale", "positive and finite", "zero, negative, NaN or infinity")
    name = f"{leg}_global_scale"
    if global_scale is None:
        return
    _require(scheme.weights is Weights.NVFP4, name, f"None: {scheme.weights.name} has no global scale", "a tensor")
    fits = global_scale.dtype is torch.float32 and global_scale.numel() in (1, experts)
    _require(fits, name, f"float32, a scalar or [{experts}]", _describe(global_scale))
    _require(_positive_finite(global_scale), name, "positive and finite", "zero, negative, NaN or infinity")


def _fp8_dtypes(scheme: Scheme) -> tuple[torch.dtype, ...]:
    assert scheme.stage is not None
    return torch.uint8, _FP8_DTYPES[str(scheme.stage.element)]


def _positive_finite(values: torch.Tensor) -> bool:
    return bool((torch.isfinite(values) & (values > 0)).all())


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
