"""Run FlashInfer's SM90 pull megakernels on one GPU, as one EP rank."""

import dataclasses
import os

import torch

from fp4ep.reference.types import MoEInputs, MoEWeights

from .layouts import interleave_fp4_fp8

_CONFIGS = {
    "sm90_fp8_nvfp4_bf16_pull_cutedsl": "Sm90_Fp8_Nvfp4_Bf16_PullCutedsl_MegaMoeConfig",
    "sm90_fp8_mxfp4_bf16_pull_cutedsl": "Sm90_Fp8_Mxfp4_Bf16_PullCutedsl_MegaMoeConfig",
    "sm90_fp8_fp8_bf16_pull_cutedsl": "Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig",
    "sm90_bf16_bf16_bf16_pull_cutedsl": "Sm90_Bf16_Bf16_Bf16_PullCutedsl_MegaMoeConfig",
}


def run_megakernel(
    name: str,
    options: dict,
    weights: MoEWeights,
    inputs: MoEInputs,
    *,
    max_tokens_per_rank: int,
    previous_topk_ids: torch.Tensor | None = None,
    launches: int = 3,
) -> torch.Tensor:
    """Launch the kernel `launches` times on the current device. Returns the output, `[T, H]` bf16, on the CPU.

    name: FlashInfer's registry name; options: fields of its config class; weights and inputs: CPU tensors in canonical
    layout (see `fp4ep.reference.types`), hidden_states in FP8 meaning `quantize_input=False`. previous_topk_ids: launch
    once with this routing before, on the same buffers.

    Raises RuntimeError when the launches do not give the same bits; FlashInfer's own errors pass through.
    """
    os.environ.setdefault("MEGA_NO_DIST", "1")  # one rank: neither torch.distributed nor NVSHMEM
    import flashinfer.fused_moe.prepare as prepare
    from flashinfer import moe_ep

    prepare.interleave_moe_weights_for_sm90_mixed_gemm = lambda weight, quant_type="fp4_fp8": interleave_fp4_fp8(weight)
    top_k = inputs.topk_ids.shape[1]
    hidden, intermediate = inputs.hidden_states.shape[1], weights.w13.shape[1] // 2
    config = getattr(moe_ep, _CONFIGS[name])(intermediate_size=intermediate, top_k=top_k, **options)
    layer = moe_ep.MoEEpLayer(
        bootstrap=moe_ep.BootstrapConfig(world_size=1, rank=0, device=torch.cuda.current_device()),
        fleet_params=moe_ep.FleetParams(
            num_experts=weights.num_experts, max_tokens_per_rank=max_tokens_per_rank, token_hidden_size=hidden
        ),
        weights=_pack(weights),
        backend=moe_ep.MegaConfig(megakernel=config, quantize_input=inputs.hidden_states.dtype is torch.bfloat16),
    )
    tensors = moe_ep.MoEEpTensors(
        hidden_states=inputs.hidden_states.cuda(),
        topk_ids=inputs.topk_ids.long().cuda(),
        topk_weights=inputs.topk_weights.cuda(),
        scales=None if inputs.scales is None else inputs.scales.cuda(),
    )
    if previous_topk_ids is not None:
        layer(dataclasses.replace(tensors, topk_ids=previous_topk_ids.long().cuda()))
    outputs = []
    for _ in range(launches):
        outputs.append(layer(tensors).cpu().clone())
    torch.cuda.synchronize()
    if any(not torch.equal(outputs[0].view(torch.int16), other.view(torch.int16)) for other in outputs[1:]):
        raise RuntimeError(f"{name} is not deterministic here: {launches} launches gave different bits")
    return outputs[0]


def _pack(weights: MoEWeights):
    from flashinfer.moe_ep import MoEWeightPack
    from flashinfer.moe_ep.backends.mega.kernel.sm90.fp8_nvfp4_bf16_pull_cutedsl import Nvfp4WeightPack

    tensors = {name: t.cuda().contiguous() for name, t in vars(weights).items() if t is not None}
    return Nvfp4WeightPack(**tensors) if weights.w13_global_scale is not None else MoEWeightPack(**tensors)
