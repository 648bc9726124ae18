"""The stages around experts that do their own exchange, and the smallest driver of a modular layer.

Behaviour is that of vLLM 0.33.0 (`prepare_finalize/passthrough.py`, `topk_weight_and_reduce.py`, `modular_kernel.py`),
except that the driver launches without tokens too: vLLM's returns early, and the other ranks wait for ever.
"""

from typing import TYPE_CHECKING, Any

import torch

from .config import FusedMoEActivationFormat, MoEActivation

if TYPE_CHECKING:
    from .experts import FlashInferMoeEpExperts

PrepareResult = tuple[torch.Tensor, None, None, None, None]


class TopKWeightAndReduceNoOP:
    """Nothing is left to weight or to reduce: the kernel's output is final. All instances are equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopKWeightAndReduceNoOP)

    def __hash__(self) -> int:
        return hash(TopKWeightAndReduceNoOP)

    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        """fused_expert_output, copied into output unless that is None or the same tensor.

        Raises ValueError when the sizes differ (vLLM asserts).
        """
        if output is None or output is fused_expert_output:
            return fused_expert_output
        if output.size() != fused_expert_output.size():
            raise ValueError(
                "output shape is expected to match the fused_expert_output shape. "
                f"But got output={output.size()}, fused_expert_output={fused_expert_output.size()}"
            )
        return output.copy_(fused_expert_output, non_blocking=True)


class PassThroughPrepareAndFinalize:
    """The stages around experts that dispatch and combine themselves: nothing is quantized, sent or weighted here."""

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    def num_dispatchers(self) -> int:
        return 1

    def output_is_reduced(self) -> bool:
        return True

    def supports_async(self) -> bool:
        return False

    def supports_deferred_moe_finalize(self) -> bool:
        return False

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> PrepareResult:
        """a1 itself, and no scales, token counts, ids or weights in its place. All other arguments are ignored."""
        return a1, None, None, None, None

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """What weight_and_reduce_impl does, into output."""
        weight_and_reduce_impl.apply(output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input)


def run_experts(
    experts: "FlashInferMoeEpExperts",
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    """The smallest modular driver: prepare, experts, finalize. Returns `[T, H]` bf16, a tensor of the caller's.

    hidden_states `[T, H]` bf16, topk_weights and topk_ids `[T, top_k]`; see `FlashInferMoeEpExperts.apply`. Collective.
    Launches with T = 0 too.

    Raises ValueError where the routing is not 2-D with a row per token, and what `apply` raises.
    """
    tokens, hidden = hidden_states.shape
    for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        if tensor.dim() != 2 or tensor.shape[0] != tokens:
            raise ValueError(f"{name} must be [{tokens}, top_k], one row per token, got {tuple(tensor.shape)}")
    moe, stages = experts.moe_config, PassThroughPrepareAndFinalize()
    counts = (moe.num_experts, moe.num_local_experts)
    a1q, a1q_scale, expert_tokens_meta, _, _ = stages.prepare(
        hidden_states, topk_weights, topk_ids, counts[0], None, apply_router_weight_on_input, experts.quant_config, True
    )
    sizes = (tokens, 2 * moe.intermediate_size, hidden, topk_ids.shape[1], *counts)
    shapes = experts.workspace_shapes(*sizes, expert_tokens_meta, MoEActivation.SILU)
    workspace13, workspace2, output = (hidden_states.new_empty(shape) for shape in shapes)
    experts.apply(
        output=output,
        hidden_states=a1q,
        w1=workspace13,  # ignored, as the workspaces are
        w2=workspace2,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        activation=MoEActivation.SILU,
        global_num_experts=counts[0],
        expert_map=None,
        a1q_scale=a1q_scale,
        a2_scale=None,
        workspace13=workspace13,
        workspace2=workspace2,
        expert_tokens_meta=expert_tokens_meta,
        apply_router_weight_on_input=apply_router_weight_on_input,
    )
    reduce = experts.finalize_weight_and_reduce_impl()
    stages.finalize(output, output, topk_weights, topk_ids, apply_router_weight_on_input, reduce)
    return output
