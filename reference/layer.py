"""The chain around the experts: router, placement, routing weight, scaling factor, shared experts.

    route -> (logical to physical ids) -> moe_forward -> scaling factor -> shared experts

Where a factor is multiplied decides where it is rounded, so each place is named here, with who puts it there. What is
between the arrows is `moe_forward`, unchanged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from .fp32 import canonical_nan, fma
from .moe import Intervention, Progress, moe_forward
from .placement import Placement, Replica, linear
from .routing import Router, route
from .scheme import Combine, Scheme
from .tensor_core import HOPPER_BF16, matmul
from .types import Exactness, MoEInputs, MoEWeights, Stage, Trace
from .validate import require


class WeightOn(Enum):
    """Where the routing weight is multiplied, once."""

    SCHEME = "where the scheme has it: the SwiGLU output, or after fc2 (Combine.WEIGHTED)"
    #: Llama 4; top_k must be 1. vLLM 0.33.0, `fused_moe/prepare_finalize/`. Shared experts see the unweighted input.
    INPUT = "hidden_states times the weight, the weight and the product rounded to bf16; the kernel's weight is 1"
    #: What vLLM 0.33.0's megakernels do for a model that asks for INPUT (`flashinfer_moe_ep.apply_topk_in_fc1`), with
    #: any top_k: another number than INPUT's, since SwiGLU is not linear.
    ACTIVATION = "the SwiGLU output in float32, before requantization; needs a scheme that has it there"


class ScalingPlace(Enum):
    """Where routed_scaling_factor, as float32, is multiplied. It never reaches the shared experts."""

    #: vLLM's and FlashInfer's routers; SGLang's where it is fused into top-k.
    WEIGHTS = "the routing weights, in float32, by the router"
    #: vLLM 0.33.0, `MoERunner` with apply_routed_scale_to_output (its DeepSeek-V2 and V3 models).
    OUTPUT = "the bf16 output of the routed experts, rounded to bf16, before shared experts are added"
    #: SGLang, `shared.add_(routed, alpha=factor)`; without shared experts it is OUTPUT. CUDA contracts it to an fma.
    ADDITION = "as shared experts are added: fma(routed, factor, shared) in float32, rounded to bf16 once"


@dataclass(frozen=True)
class SharedExperts:
    """Experts that every token passes, as one of their joint width: w13 `[2I, H]` (gate first), w2 `[H, I]`, bf16.

    Rounded to bf16: both GEMMs, silu(gate), silu(gate) * up. A GEMM is one ascending chain of Hopper's wgmma, as in a
    library kernel that does not split K; silu is taken in double precision. No recording holds this to a GPU.

    tp_size 1: every rank holds all of them and a token's own rank computes its output, which is never summed over ranks
    again. Above, each of tp_size ranks holds an equal part of I, and their bf16 partial outputs are added in float32,
    ranks ascending, and rounded once (vLLM's one-shot custom all-reduce; NCCL's order depends on its algorithm).
    """

    w13: torch.Tensor
    w2: torch.Tensor
    tp_size: int = 1


@dataclass(frozen=True)
class MoELayer:
    """A layer without its experts' weights. The fields up to expert_table are `route`'s arguments."""

    scheme: Scheme
    router: Router
    top_k: int
    bias: torch.Tensor | None = None
    num_expert_group: int | None = None
    topk_group: int | None = None
    expert_table: torch.Tensor | None = None
    placement: Placement | None = None  #: None: linear
    replica: Replica = Replica.HASH
    weight_on: WeightOn = WeightOn.SCHEME
    routed_scaling_factor: float = 1.0
    scaling_place: ScalingPlace = ScalingPlace.WEIGHTS
    shared: SharedExperts | None = None


@dataclass(frozen=True)
class LayerInputs:
    """The tokens of one EP rank: hidden_states `[T, H]` bf16; router_logits `[T, E]`, token_ids: as in `route`.

    num_tokens: rows from here on are padding (None: there is none). They are routed nowhere, add nothing through shared
    experts and give +0, whatever they hold.
    """

    hidden_states: torch.Tensor
    router_logits: torch.Tensor
    token_ids: torch.Tensor | None = None
    num_tokens: int | None = None


def moe_layer_forward(
    layer: MoELayer,
    weights: MoEWeights,
    inputs: LayerInputs | Sequence[LayerInputs],
    *,
    max_tokens_per_rank: int | None = None,
    workspace: Sequence[torch.Tensor] | None = None,
    progress: Progress | None = None,
    intervene: Intervention | None = None,
) -> tuple[torch.Tensor | list[torch.Tensor], Trace]:
    """Run a whole layer, on one or several EP ranks in this process. The other arguments are `moe_forward`'s.

    weights: of the logical experts, in order; the placement hands them out, replicas included. Returns the output,
    `[T, H]` bf16 (a list of them for a sequence), and the trace: `moe_forward`'s between, for each rank, a stage
    "route" (topk_ids `[T, top_k]`, logical and -1 on padding; topk_weights; scores `[T, E]`) and, where something is
    scaled or added behind the kernel, a stage "output" (values `[T, H]` bf16, and shared: what was added). From
    dispatch on, experts are physical. NaN and infinity follow IEEE, NaN as 0x7FFF.

    Raises ValueError before any expert runs: InputError when arguments do not fit together or the scheme, and what
    `route` raises.
    """
    ranks = [inputs] if isinstance(inputs, LayerInputs) else list(inputs)
    placement = _check(layer, weights, ranks)
    in_router = layer.scaling_place is ScalingPlace.WEIGHTS
    stages: list[Stage] = []

    def keep(stage: Stage) -> dict[str, torch.Tensor]:
        stages.append(intervene(stage) if intervene else stage)
        return stages[-1].tensors

    routed = [
        keep(Stage("route", rank, Exactness.MODELLED_UNVERIFIED, _route(layer, x, in_router)))
        for rank, x in enumerate(ranks)
    ]
    kernel_inputs = [_kernel_inputs(layer, placement, x, routes) for x, routes in zip(ranks, routed, strict=True)]
    slots = placement.physical_to_logical
    physical = weights if torch.equal(slots, torch.arange(weights.num_experts)) else weights.of_experts(slots)
    outputs, trace = moe_forward(
        layer.scheme,
        physical,
        kernel_inputs,
        max_tokens_per_rank=max_tokens_per_rank,
        workspace=workspace,
        progress=progress,
        intervene=intervene,
    )
    stages.extend(trace)
    factor = 1.0 if in_router else layer.routed_scaling_factor
    if layer.shared is not None or factor != 1.0:
        exactness = Exactness.EXACT if layer.shared is None else Exactness.MODELLED_UNVERIFIED
        made = [_output(layer, factor, x, values) for x, values in zip(ranks, outputs, strict=True)]
        outputs = [keep(Stage("output", rank, exactness, tensors))["values"] for rank, tensors in enumerate(made)]
    return outputs[0] if isinstance(inputs, LayerInputs) else list(outputs), Trace(tuple(stages))


def _route(layer: MoELayer, inputs: LayerInputs, scaled: bool) -> dict[str, torch.Tensor]:
    routing = route(
        layer.router,
        inputs.router_logits,
        layer.top_k,
        bias=layer.bias,
        num_expert_group=layer.num_expert_group,
        topk_group=layer.topk_group,
        routed_scaling_factor=layer.routed_scaling_factor if scaled else 1.0,
        token_ids=inputs.token_ids,
        expert_table=layer.expert_table,
        is_padding=_padding(inputs),
    )
    return dict(vars(routing))


def _kernel_inputs(
    layer: MoELayer, placement: Placement, inputs: LayerInputs, routes: dict[str, torch.Tensor]
) -> MoEInputs:
    x, topk_weights = inputs.hidden_states, routes["topk_weights"]
    if layer.weight_on is WeightOn.INPUT:
        x = (x.float() * topk_weights.bfloat16().float()).bfloat16()
        topk_weights = torch.ones_like(topk_weights)
    return MoEInputs(x, placement.to_physical(routes["topk_ids"], layer.replica), topk_weights)


def _output(layer: MoELayer, factor: float, inputs: LayerInputs, routed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two roundings or, for ADDITION, one."""
    scale = torch.tensor(factor, dtype=torch.float32)
    if layer.shared is None:
        return {"values": canonical_nan((routed.float() * scale).bfloat16())}
    shared = torch.where(_padding(inputs)[:, None], 0.0, shared_experts(layer.shared, inputs.hidden_states)).bfloat16()
    if layer.scaling_place is ScalingPlace.ADDITION:
        total = fma(routed.float(), scale, shared.float())
    else:
        total = (routed.float() * scale).bfloat16().float() + shared.float()
    return {"values": canonical_nan(total.bfloat16()), "shared": shared}


def shared_experts(shared: SharedExperts, hidden_states: torch.Tensor) -> torch.Tensor:
    """The output of shared experts, `[T, H]` bf16, for hidden_states `[T, H]` bf16: see `SharedExperts`."""
    gate, up = shared.w13.chunk(2)
    pieces = [w.chunk(shared.tp_size) for w in (gate, up)] + [shared.w2.chunk(shared.tp_size, dim=1)]
    total = torch.zeros(())
    for part in zip(*pieces, strict=True):
        total = total + _mlp(hidden_states, *part).float()
    return canonical_nan(total.bfloat16())


def _mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    g, u = (matmul(HOPPER_BF16, x.float(), w.float()).bfloat16() for w in (gate, up))
    silu = (g.double() / (1 + torch.exp(-g.double()))).bfloat16()
    return matmul(HOPPER_BF16, (silu.float() * u.float()).bfloat16().float(), down.float()).bfloat16()


def _padding(inputs: LayerInputs) -> torch.Tensor:
    """`[T]` bool."""
    tokens = len(inputs.hidden_states)
    return torch.arange(tokens) >= (tokens if inputs.num_tokens is None else inputs.num_tokens)


def _check(layer: MoELayer, weights: MoEWeights, ranks: Sequence[LayerInputs]) -> Placement:
    """The placement, once it is sure that everything fits. What `route` and `moe_forward` check is left to them."""
    experts = weights.num_experts
    require(len(ranks) > 0, "inputs", "at least one rank", "an empty sequence")
    require(len(ranks) <= experts, "inputs", f"at most {experts} ranks, one for each expert", len(ranks))
    placement = layer.placement or linear(experts, len(ranks))
    require(placement.num_experts == experts, "placement", f"of the {experts} experts", placement.num_experts)
    require(placement.ep_size == len(ranks), "placement", f"over the {len(ranks)} ranks of inputs", placement.ep_size)
    held = [len(rank) for rank in placement.ranks]
    require(len(set(held)) == 1, "placement", "of equally many slots on every rank, as the kernels need it", held)
    factor = layer.routed_scaling_factor
    require(math.isfinite(factor), "routed_scaling_factor", "finite", factor)
    one = layer.weight_on is not WeightOn.INPUT or layer.top_k == 1
    require(one, "top_k", "1 with WeightOn.INPUT: a token has one input, not one for each of its experts", layer.top_k)
    late = layer.weight_on is WeightOn.ACTIVATION and layer.scheme.combine is Combine.WEIGHTED
    require(not late, "weight_on", "SCHEME or INPUT", f"ACTIVATION, but {layer.scheme} weights routes after fc2")
    for rank, x in enumerate(ranks):
        require(isinstance(x, LayerInputs), "inputs", "LayerInputs or a sequence of them", type(x).__name__, rank)
        hidden, logits = x.hidden_states, x.router_logits
        fits = hidden.dtype is torch.bfloat16 and hidden.ndim == 2
        require(fits, "hidden_states", "bfloat16 [tokens, hidden]", f"{hidden.dtype} {list(hidden.shape)}", rank)
        shape = [len(hidden), experts]
        require(list(logits.shape) == shape, "router_logits", shape, list(logits.shape), rank)
        count = x.num_tokens
        fits = count is None or 0 <= count <= len(hidden)
        require(fits, "num_tokens", f"None or 0 to {len(hidden)}", count, rank)
        if layer.shared is not None:
            _check_shared(layer.shared, hidden.shape[1])
    return placement


def _check_shared(shared: SharedExperts, hidden: int) -> None:
    for name, tensor in (("w13", shared.w13), ("w2", shared.w2)):
        fits = tensor.dtype is torch.bfloat16 and tensor.ndim == 2
        require(fits, f"shared.{name}", "a bfloat16 matrix", f"{tensor.dtype} {list(tensor.shape)}")
    width = shared.w2.shape[1]
    require(shared.w2.shape[0] == hidden, "shared.w2", f"[{hidden}, I]", list(shared.w2.shape))
    require(list(shared.w13.shape) == [2 * width, hidden], "shared.w13", [2 * width, hidden], list(shared.w13.shape))
    require(hidden % HOPPER_BF16.k == 0, "hidden_states", f"a multiple of {HOPPER_BF16.k} wide", hidden)
    step = HOPPER_BF16.k * shared.tp_size
    fits = shared.tp_size >= 1 and width > 0 and width % step == 0
    require(fits, "shared.tp_size", f">= 1, with {HOPPER_BF16.k} * tp_size dividing I = {width}", shared.tp_size)
