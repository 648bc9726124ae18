"""A layer as an adapter takes it, and as the reference does, for every backend that has a scheme."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fp4ep.optimized.backends import flashinfer_moe_ep_backend_spec
from fp4ep.optimized.config import EpGroup, FusedMoEConfig
from fp4ep.optimized.flashinfer_moe_ep import FlashInferMoeEp, FlashInferMoeEpEpilogue, FlashInferMoeEpWeights
from fp4ep.optimized.mega_kernel import KernelFactory
from fp4ep.parity.adapter import Batch, adapter_parts, batch_of, rebalance
from fp4ep.parity.corpus_adapter import ORDER
from fp4ep.parity.problem import Layer, Problem
from fp4ep.reference.moe import moe_forward

#: (backend, options) of the SM90 kernels.
SM90: tuple[tuple[str, dict[str, Any]], ...] = (
    ("flashinfer_moe_ep_sm90_nvfp4", {}),
    ("flashinfer_moe_ep_sm90_nvfp4", {"nvfp4_kperm": 32}),
    ("flashinfer_moe_ep_sm90_mxfp4", {}),
    ("flashinfer_moe_ep_sm90_fp8", {}),
    ("flashinfer_moe_ep_sm90_fp8", {"fp8_scale_mode": "blockwise"}),
    ("flashinfer_moe_ep_sm90_bf16", {}),
)
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, CAPACITY = 8, 2, 256, 128, 32


def label(backend: tuple[str, Mapping[str, Any]]) -> str:
    name, options = backend
    return "-".join([name.removeprefix("flashinfer_moe_ep_"), *map(str, options.values())])


@dataclass(frozen=True)
class MoeEpLayer:
    """What both sides of a test are built from. weights and epilogue: of one rank's experts, on `device`."""

    moe: FusedMoEConfig
    weights: FlashInferMoeEpWeights
    epilogue: FlashInferMoeEpEpilogue
    options: Mapping[str, Any]
    layer: Layer  #: whole, on the CPU
    group: EpGroup
    device: str

    def adapter(self, kernel: KernelFactory | None) -> FlashInferMoeEp:
        options: dict[str, Any] = {"ep_group": self.group, "kernel": kernel, "options": self.options}
        return FlashInferMoeEp(self.moe, self.weights, self.epilogue, apply_topk_in_fc1=True, **options)

    def inputs(self) -> Batch:
        """hidden_states, topk_ids, topk_weights of this rank, as the adapter takes them."""
        return batch_of(self.layer, self.moe.moe_backend, self.group.rank_in_group, device=self.device)

    def expected(self) -> torch.Tensor:
        """This rank's output by the reference, all ranks in this process."""
        outputs, _ = moe_forward(self.layer.scheme, self.layer.weights, list(self.layer.inputs))
        return outputs[self.group.rank_in_group]

    def rebalanced(self, adapter: FlashInferMoeEp) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's outputs, before and after experts change places and topk_ids with them. Bits, on the CPU."""
        before = bits(adapter(*self.inputs()))
        return before, bits(adapter(*rebalance(adapter, self.inputs(), ORDER, self.group)))


def moe_ep_layer(
    backend: str,
    options: Mapping[str, Any] | None = None,
    *,
    tokens: tuple[int, ...] = (12,),
    group: EpGroup | None = None,
    device: str = "cpu",
    alphas: bool = True,
    **problem: Any,
) -> MoeEpLayer:
    """alphas: NVFP4's global scales, else none."""
    spec = flashinfer_moe_ep_backend_spec(backend)
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "intermediate": INTERMEDIATE}
    layer = Problem(spec.registry_name, options or {}, tokens=tokens, **sizes | {"routing": "masked"} | problem).build()
    if not alphas:
        layer = replace(layer, weights=replace(layer.weights, w13_global_scale=None, w2_global_scale=None))
    group = group or EpGroup(1, 0)
    parts = adapter_parts(layer, backend, group, device=device, max_num_tokens=max(CAPACITY, *tokens))
    return MoeEpLayer(*parts, options or {}, layer, group, device)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(torch.int16)
