"""Every check on the arguments of `moe_forward`, before any work: which argument, what it got, what is allowed."""

from collections.abc import Sequence

import torch

from .formats import E4M3
from .quantize import MX_BLOCK, NVFP4_BLOCK
from .scheme import ScaleSource, Scheme, Weights
from .types import MoEInputs, MoEWeights

#: The kernels' dispatch lays 32 // top_k tokens across a warp.
MAX_TOP_K = 32

_PACKED_FP4 = (Weights.NVFP4, Weights.NVFP4_BLOCK_SCALED, Weights.MXFP4)
_NVFP4 = (Weights.NVFP4, Weights.NVFP4_BLOCK_SCALED)
_BLOCK_128 = (Weights.FP8_BLOCK_128, Weights.FP8_BLOCK_128_APART)


class InputError(ValueError):
    """An argument does not fit. The message starts with its name."""


def require(condition: bool, argument: str, allowed: object, got: object, rank: int | None = None) -> None:
    """Raises InputError, naming the argument and the rank, unless the condition holds."""
    if not condition:
        where = "" if rank is None else f" (rank {rank})"
        raise InputError(f"{argument}{where} must be {allowed}, got {got}")


def check_arguments(
    scheme: Scheme,
    weights: MoEWeights,
    ranks: Sequence[MoEInputs],
    max_tokens_per_rank: int | None,
    workspace: Sequence[torch.Tensor] | None,
) -> None:
    """Raise InputError unless the arguments have a defined result under the scheme.

    Values are checked where FlashInfer's backend checks them, and ids above the range, which it does not. NaN and
    infinity in activations, dense weights of FP8 and bf16 schemes, and routing weights are legal: they travel through.
    """
    _check_types(scheme, weights, ranks)
    hidden = _check_weights(scheme, weights)
    experts = weights.num_experts
    require(len(ranks) > 0, "inputs", "at least one rank", "an empty sequence")
    require(experts % len(ranks) == 0, "inputs", f"a number of ranks that divides the {experts} experts", len(ranks))
    for rank, inputs in enumerate(ranks):
        _check_tokens(scheme, inputs, hidden, max_tokens_per_rank, rank)
        _check_routing(inputs, experts, ranks[0].topk_ids, rank)
    if workspace is not None:
        same = not isinstance(workspace, torch.Tensor) and len(workspace) == len(ranks)
        require(same, "workspace", f"a sequence of one tensor for each of {len(ranks)} ranks", len(workspace))
        for rank, terms in enumerate(workspace):
            shape = [*ranks[rank].topk_ids.shape, hidden]
            fits = terms.dtype is torch.bfloat16 and list(terms.shape) == shape
            require(fits, "workspace", f"bfloat16 {shape}", _describe(terms), rank)


def _check_types(scheme: object, weights: object, ranks: Sequence[object]) -> None:
    if not isinstance(scheme, Scheme):
        raise InputError(f"scheme must be a Scheme (see find_scheme), got {scheme!r}")
    if not isinstance(weights, MoEWeights):
        raise InputError(f"weights must be MoEWeights, got {type(weights).__name__}")
    for inputs in ranks:
        if not isinstance(inputs, MoEInputs):
            raise InputError(f"inputs must be MoEInputs or a sequence of them, got {type(inputs).__name__}")
    for owner in (weights, *ranks):
        for name, value in vars(owner).items():
            optional = "scale" in name or name == "fc1_norm_const"
            if not (isinstance(value, torch.Tensor) or (value is None and optional)):
                raise InputError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def _check_tokens(scheme: Scheme, inputs: MoEInputs, hidden: int, max_tokens: int | None, rank: int) -> None:
    x, scales = inputs.hidden_states, inputs.scales
    require(x.ndim == 2 and x.shape[1] == hidden, "hidden_states", f"[tokens, {hidden}]", list(x.shape), rank)
    limit = len(x) if max_tokens is None else max_tokens
    require(len(x) <= limit, "hidden_states", f"at most max_tokens_per_rank = {limit} tokens", len(x), rank)
    if x.dtype is torch.bfloat16:
        allowed = "None when hidden_states is bf16: the scheme makes its own"
        require(scales is None, "scales", allowed, "a tensor", rank)
        return
    if scheme.stage is None or scheme.stage.element.dtype is None or not scheme.quantized_inputs:
        raise InputError(f"hidden_states (rank {rank}) must be bfloat16, got {x.dtype}")
    staged = scheme.stage.element.dtype
    require(x.dtype is staged, "hidden_states", f"bfloat16, or {staged} with scales", x.dtype, rank)
    if scheme.stage.source is ScaleSource.STATIC:
        return  # whatever scales travel along are not used
    shape = [len(x), hidden // (scheme.stage.block or hidden)]
    if scales is None:
        raise InputError(f"scales (rank {rank}) must be float32 {shape} with {x.dtype} hidden_states, got None")
    fits = scales.dtype is torch.float32 and list(scales.shape) == shape
    require(fits, "scales", f"float32 {shape}", _describe(scales), rank)
    require(not bool((scales < 0).any()), "scales", "not negative", "negative values", rank)


def _check_routing(inputs: MoEInputs, num_experts: int, first_ids: torch.Tensor, rank: int) -> None:
    ids, weights = inputs.topk_ids, inputs.topk_weights
    tokens = len(inputs.hidden_states)
    require(ids.dtype in (torch.int64, torch.int32), "topk_ids", "int64 or int32", ids.dtype, rank)
    require(ids.ndim == 2, "topk_ids", "[tokens, top_k]", list(ids.shape), rank)
    top_k = ids.shape[1]
    require(1 <= top_k <= MAX_TOP_K, "topk_ids", f"of 1 to {MAX_TOP_K} slots per token", top_k, rank)
    shape = [tokens, first_ids.shape[1]]
    require(list(ids.shape) == shape, "topk_ids", f"[tokens, top_k] = {shape}", list(ids.shape), rank)
    largest = int(ids.max()) if ids.numel() else -1
    # The kernels do not check this: such an id indexes a counter in shared memory out of range.
    require(largest < num_experts, "topk_ids", f"below num_experts = {num_experts} (negative: masked)", largest, rank)
    require(weights.dtype is torch.float32, "topk_weights", "float32", weights.dtype, rank)
    same = weights.shape == ids.shape
    require(same, "topk_weights", f"of topk_ids' shape {list(ids.shape)}", list(weights.shape), rank)


def _check_weights(scheme: Scheme, weights: MoEWeights) -> int:
    """Shapes, dtypes and values of the weights. Returns the hidden size."""
    for missing, other in (("w13_scale", weights.w2_scale), ("w2_scale", weights.w13_scale)):
        together = other is None or getattr(weights, missing) is not None
        require(together, missing, "given together with the other leg's scales, or neither (bf16 weights)", None)
    for leg in ("w13", "w2"):
        _check_kind(scheme, weights, leg)
    w13, w2 = weights.w13, weights.w2
    fits = w13.ndim == 3 and w13.numel() > 0 and w13.shape[1] % 2 == 0
    require(fits, "w13", "[experts, 2 * intermediate, hidden], none of them 0", list(w13.shape))
    packing = 2 if weights.quantized and scheme.weights in _PACKED_FP4 else 1
    hidden, intermediate = w13.shape[2] * packing, w13.shape[1] // 2
    shape = [len(w13), hidden, intermediate // packing]
    names = "[experts, hidden, intermediate" + " / 2]" * (packing == 2) + "]" * (packing == 1)
    require(list(w2.shape) == shape, "w2", f"{names} = {shape}", list(w2.shape))
    for leg, what, size, multiple in (
        ("w13", "hidden", hidden, scheme.hidden_multiple),
        ("w2", "intermediate", intermediate, scheme.intermediate_multiple),
    ):
        require(size % multiple == 0, leg, f"of a {what} size that is a multiple of {multiple}", size)
    if weights.quantized:
        _check_scales(scheme, weights, "w13", hidden)
        _check_scales(scheme, weights, "w2", intermediate)
    elif scheme.weights in _NVFP4:
        for leg in ("w13", "w2"):
            finite = torch.isfinite(getattr(weights, leg)).flatten(1).all(1)
            require(bool(finite.all()), leg, "finite", f"NaN or infinity in experts {_where(~finite)}")
    for name in ("w13_global_scale", "w2_global_scale", "fc1_norm_const"):
        _check_per_expert(scheme, weights, name)
    return hidden


def _check_kind(scheme: Scheme, weights: MoEWeights, leg: str) -> None:
    """bf16 or quantized, as the scheme's backend takes it."""
    payload, scale = getattr(weights, leg), f"{leg}_scale"
    if not weights.quantized:
        wanted = f"packed FP4 with scales: {scheme.name} does not quantize weights"
        if scheme.dense_weights:
            wanted = f"{' or '.join(map(str, scheme.dense_weights))}, or quantized with w13_scale and w2_scale"
        require(payload.dtype in scheme.dense_weights, leg, wanted, payload.dtype)
        name = f"{leg}_global_scale"
        allowed = getattr(weights, name) is None or scheme.weights is Weights.NVFP4_BLOCK_SCALED
        require(allowed, name, "None with dense weights", "a tensor")
        return
    require(scheme.packed_weights, scale, f"None: {scheme.name} takes bf16 weights only", "a tensor")
    dtypes: tuple[torch.dtype, ...] = (torch.uint8,)
    if scheme.weights not in _PACKED_FP4:
        assert scheme.stage is not None
        assert scheme.stage.element.dtype is not None
        dtypes = (torch.uint8, scheme.stage.element.dtype)
    require(payload.dtype in dtypes, leg, f"{' or '.join(map(str, dtypes))} with scales", payload.dtype)


def _check_scales(scheme: Scheme, weights: MoEWeights, leg: str, k: int) -> None:
    payload, scale = getattr(weights, leg), getattr(weights, f"{leg}_scale")
    experts, rows = payload.shape[:2]
    dtypes, shape = {
        **dict.fromkeys(_NVFP4, ((torch.uint8, torch.float8_e4m3fn), [experts, rows, k // NVFP4_BLOCK])),
        Weights.MXFP4: ((torch.uint8,), [experts, rows, k // MX_BLOCK]),
        Weights.FP8_PER_EXPERT: ((torch.float32,), [experts]),
        **dict.fromkeys(_BLOCK_128, ((torch.float32,), [experts, rows // 128, k // 128])),
    }[scheme.weights]
    fits = scale.dtype in dtypes and list(scale.shape) == shape
    require(fits, f"{leg}_scale", f"{' or '.join(map(str, dtypes))} {shape}", _describe(scale))
    if scheme.weights in _NVFP4:
        codes = scale.view(torch.uint8).flatten(1).amax(1)
        bad = codes > E4M3.max_code
        got = f"code {int(codes.max())} in experts {_where(bad)}"
        require(not bool(bad.any()), f"{leg}_scale", "E4M3 codes 0..126 (finite, not negative)", got)
    elif scale.dtype is torch.float32:
        _check_positive(scale.reshape(experts, -1), f"{leg}_scale")


def _check_per_expert(scheme: Scheme, weights: MoEWeights, name: str) -> None:
    """A float32 factor, one for all experts or one for each."""
    values, experts = getattr(weights, name), weights.num_experts
    if values is None:
        return
    allowed = (Weights.NVFP4_BLOCK_SCALED,) if name == "fc1_norm_const" else _NVFP4
    what = "norm constant" if name == "fc1_norm_const" else "global scale"
    require(scheme.weights in allowed, name, f"None: {scheme.weights.name} has no {what}", "a tensor")
    fits = values.dtype is torch.float32 and values.numel() in (1, experts)
    require(fits, name, f"float32, a scalar or [{experts}]", _describe(values))
    _check_positive(values.reshape(-1).expand(experts)[:, None], name)


def _check_positive(values: torch.Tensor, name: str) -> None:
    """values: `[experts, any]`."""
    bad = ~(torch.isfinite(values) & (values > 0)).all(1)
    got = f"zero, negative, NaN or infinity in experts {_where(bad)}"
    require(not bool(bad.any()), name, "positive and finite", got)


def _where(bad: torch.Tensor) -> list[int]:
    return bad.nonzero().flatten().tolist()


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
