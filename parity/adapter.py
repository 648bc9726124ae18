"""A layer of the harness as the adapter takes it, and experts changing places under a live adapter."""

from collections.abc import Sequence

import torch

from fp4ep.optimized.backends import flashinfer_moe_ep_backend_spec
from fp4ep.optimized.config import EpGroup, FusedMoEConfig, FusedMoEParallelConfig
from fp4ep.optimized.eplb import permute_experts, permute_topk_ids
from fp4ep.optimized.flashinfer_moe_ep import FlashInferMoeEp
from fp4ep.optimized.mega_kernel import FlashInferMoeEpEpilogue, FlashInferMoeEpWeights

from .problem import Layer

#: hidden_states, topk_ids, topk_weights
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def adapter_parts(
    layer: Layer, backend: str, group: EpGroup, *, device: str = "cpu", max_num_tokens: int | None = None
) -> tuple[FusedMoEConfig, FlashInferMoeEpWeights, FlashInferMoeEpEpilogue]:
    """What `FlashInferMoeEp` is built from on one rank: copies of its experts' weights, on device.

    The layer's scheme must be the backend's; its global scales become the alphas. max_num_tokens: None for the most
    that a rank of the layer has.
    """
    weights = layer.weights
    local = weights.num_experts // group.world_size
    mine = slice(group.rank_in_group * local, (group.rank_in_group + 1) * local)

    def own(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[mine].clone().to(device)

    def alphas(scale: torch.Tensor | None) -> torch.Tensor | None:
        return own(None if scale is None else scale.expand(weights.num_experts))

    moe = FusedMoEConfig(
        moe_backend=backend,
        num_experts=weights.num_experts,
        experts_per_token=layer.inputs[0].topk_ids.shape[1],
        hidden_dim=weights.w2.shape[1],
        intermediate_size=weights.w13.shape[1] // 2,
        max_num_tokens=max_num_tokens or max(1, *(len(x.hidden_states) for x in layer.inputs)),
        swiglu_limit=layer.scheme.gate_up_clamp,
        moe_parallel_config=FusedMoEParallelConfig(ep_size=group.world_size, ep_rank=group.rank_in_group),
    )
    w13, w2 = weights.w13[mine].clone().to(device), weights.w2[mine].clone().to(device)
    return (
        moe,
        FlashInferMoeEpWeights(w13, w2, own(weights.w13_scale), own(weights.w2_scale)),
        FlashInferMoeEpEpilogue(fc1_alpha=alphas(weights.w13_global_scale), fc2_alpha=alphas(weights.w2_global_scale)),
    )


def batch_of(layer: Layer, backend: str, rank: int, *, device: str = "cpu") -> Batch:
    """One rank's tokens in the adapter's dtypes."""
    x = layer.inputs[rank]
    ids = x.topk_ids.to(flashinfer_moe_ep_backend_spec(backend).topk_ids_dtype)
    return x.hidden_states.to(device), ids.to(device), x.topk_weights.to(device)


def rebalance(adapter: FlashInferMoeEp, batch: Batch, order: Sequence[int], group: EpGroup) -> Batch:
    """Move experts in place, physical expert p becoming what order[p] was; the batch with its topk_ids moved alike.

    order: each expert once. Collective.
    """
    permute_experts(adapter.expert_weight_views(), order, group.device_group if group.world_size > 1 else None)
    tokens, ids, weights = batch
    return tokens, permute_topk_ids(ids, order), weights
