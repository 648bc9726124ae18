"""A layer as an engine has it after loading, with its experts over the reference kernel."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from moe_ep_layers import SM90, moe_ep_layer
from torch.nn import Module, Parameter

from fp4ep.optimized.backends import FLASHINFER_MOE_EP_CUTEDSL
from fp4ep.optimized.config import FusedMoEQuantConfig
from fp4ep.optimized.experts import KERNEL_ALPHA_NAMES, FlashInferMoeEpExperts, run_experts
from fp4ep.optimized.mega_kernel import KernelRequest
from fp4ep.optimized.mxfp4 import mxfp4_moe_ep_weights
from fp4ep.parity.reference_kernel import ReferenceKernel

CUTEDSL = (FLASHINFER_MOE_EP_CUTEDSL, {})
SM90_NVFP4 = ("flashinfer_moe_ep_sm90_nvfp4", {})
BACKENDS = (CUTEDSL, *SM90)
E, K, H, I = 8, 2, 256, 128  # noqa: E741


def quant(g1: torch.Tensor | None, g2: torch.Tensor | None) -> FusedMoEQuantConfig:
    return FusedMoEQuantConfig(g1_alphas=g1, g2_alphas=g2)


def parameter(tensor: torch.Tensor) -> Parameter:
    return Parameter(tensor.clone(), requires_grad=False)


@dataclass
class Loaded:
    """A layer as an engine has it after loading, and its experts."""

    backend: tuple[str, dict[str, Any]]
    container: type = Module
    changes: dict[str, Any] = field(default_factory=dict)  #: of the experts' constructor
    requests: list[KernelRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made = moe_ep_layer(*self.backend)
        weights, epilogue = self.made.weights, self.made.epilogue
        given = {
            "w13_weight": weights.w13,
            "w13_weight_scale": weights.w13_scale,
            "w2_weight": weights.w2,
            "w2_weight_scale": weights.w2_scale,
            "w13_weight_scale_2": epilogue.fc1_alpha,
            "w2_weight_scale_2": epilogue.fc2_alpha,
        }
        self.layer = self.container()
        for name, tensor in given.items():
            setattr(self.layer, name, None if tensor is None else parameter(tensor))
        self.layer.expert_map_manager = SimpleNamespace(placement_strategy="linear")
        self.layer.moe_config = self.made.moe
        self.layer.apply_router_weight_on_input = False
        self.quant = FusedMoEQuantConfig(self.layer.w13_weight_scale_2, self.layer.w2_weight_scale_2)
        self.experts = self.new()

    def new(self, **changes: Any) -> FlashInferMoeEpExperts:
        arguments = {"kernel": self.kernel, "options": self.made.options} | self.changes | changes
        return FlashInferMoeEpExperts(self.made.moe, self.quant, **arguments)

    def kernel(self, request: KernelRequest) -> ReferenceKernel:
        self.requests.append(request)
        return ReferenceKernel(request, workspaces={})

    def process(self) -> "Loaded":
        self.experts.process_weights_after_loading(self.layer)
        return self

    def run(self, order: list[int] | None = None, tokens: int | None = None) -> torch.Tensor:
        """order: expert p is now what expert order[p] was, so a route to order[p] goes to p."""
        hidden_states, topk_ids, topk_weights = (t[:tokens] for t in self.made.inputs())
        if order is not None:
            place = torch.tensor([order.index(e) for e in range(E)], dtype=torch.int32)
            topk_ids = torch.where(topk_ids < 0, topk_ids, place[topk_ids.clamp(min=0).long()])
        return run_experts(self.experts, hidden_states, topk_weights, topk_ids)

    def parameters(self) -> dict[str, Parameter]:
        """What EPLB permutes: every parameter of the layer."""
        return {name: t for name in names_of(self.layer) if isinstance(t := getattr(self.layer, name), Parameter)}

    def permute(self, order: list[int]) -> None:
        for tensor in self.parameters().values():
            tensor.data.copy_(tensor.data[order])


def names_of(layer: Any) -> list[str]:
    return [name for name, _ in layer.named_parameters()] if isinstance(layer, Module) else list(vars(layer))


def as_mxfp4_in_bf16(loaded: Loaded, missing: bool = False) -> Loaded:
    """A CuTe DSL layer whose MXFP4 weights became bf16: no scales, no alphas."""
    shapes = {"w13": (E, 2 * I, H), "w2": (E, H, I)}
    generator = torch.Generator().manual_seed(3)
    given = {}
    for name, (experts, rows, columns) in shapes.items():
        given[name] = torch.randint(0, 256, (experts, rows, columns // 2), generator=generator, dtype=torch.uint8)
        given[name + "_scale"] = torch.full((experts, rows, columns // 32), 122, dtype=torch.uint8)
    weights = mxfp4_moe_ep_weights(FLASHINFER_MOE_EP_CUTEDSL, **given)
    loaded.layer.w13_weight, loaded.layer.w2_weight = parameter(weights.w13), parameter(weights.w2)
    for name in ("w13_weight_scale", "w2_weight_scale", *KERNEL_ALPHA_NAMES):
        if missing:
            delattr(loaded.layer, name)
        else:
            setattr(loaded.layer, name, None)
    loaded.quant = FusedMoEQuantConfig()
    loaded.experts = loaded.new()
    return loaded
