"""Run FlashInfer's SM90 megakernels: on one GPU, or as one EP rank of several."""

import dataclasses
import os

import torch

from fp4ep.reference.types import MoEInputs, MoEWeights

from .layouts import interleave_fp4_fp8

#: FlashInfer's registry name -> its config class.
CONFIGS = {
    "sm90_fp8_nvfp4_bf16_pull_cutedsl": "Sm90_Fp8_Nvfp4_Bf16_PullCutedsl_MegaMoeConfig",
    "sm90_fp8_mxfp4_bf16_pull_cutedsl": "Sm90_Fp8_Mxfp4_Bf16_PullCutedsl_MegaMoeConfig",
    "sm90_fp8_fp8_bf16_pull_cutedsl": "Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig",
    "sm90_bf16_bf16_bf16_pull_cutedsl": "Sm90_Bf16_Bf16_Bf16_PullCutedsl_MegaMoeConfig",
    "sm90_fp8_fp8_bf16_push_cuda": "Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig",
}

#: The dtype of expert ids that a kernel takes, where it is not int64.
_IDS = {"sm90_fp8_fp8_bf16_push_cuda": torch.int32}


def capacity_for(tokens: int) -> int:
    """max_tokens_per_rank for a rank of so many tokens, or the one with most: a power of two, at least 8."""
    return max(8, 1 << (tokens - 1).bit_length())


def run_megakernel(
    name: str,
    options: dict,
    weights: MoEWeights,
    inputs: MoEInputs,
    *,
    max_tokens_per_rank: int,
    previous_topk_ids: torch.Tensor | None = None,
    launches: int = 3,
    ep_rank: int = 0,
    ep_size: int = 1,
) -> torch.Tensor:
    """The output of a kernel that gives the same bits on every launch, `[T, H]` bf16. See `launch_megakernel`.

    Raises RuntimeError when the launches do not give the same bits.
    """
    outputs = launch_megakernel(
        name,
        options,
        weights,
        inputs,
        max_tokens_per_rank=max_tokens_per_rank,
        previous_topk_ids=previous_topk_ids,
        launches=launches,
        ep_rank=ep_rank,
        ep_size=ep_size,
    )
    if any(not torch.equal(outputs[0].view(torch.int16), other.view(torch.int16)) for other in outputs[1:]):
        raise RuntimeError(f"{name} is not deterministic here: {launches} launches gave different bits")
    return outputs[0]


def launch_megakernel(
    name: str,
    options: dict,
    weights: MoEWeights,
    inputs: MoEInputs,
    *,
    max_tokens_per_rank: int,
    previous_topk_ids: torch.Tensor | None = None,
    launches: int = 3,
    ep_rank: int = 0,
    ep_size: int = 1,
) -> list[torch.Tensor]:
    """Launch the kernel `launches` times on the current device, on its own buffers. Returns every output, on the CPU.

    name: FlashInfer's registry name; options: fields of its config class; weights and inputs: CPU tensors in canonical
    layout (see `fp4ep.reference.types`), hidden_states in FP8 meaning `quantize_input=False`. previous_topk_ids: launch
    once with this routing before, on the same buffers.

    With ep_size > 1 this is collective, also for a rank without tokens: every process that torchrun started calls it,
    with its own rank, inputs and device, all else equal; of `weights` it takes its own experts. Where a rank does not
    call, the others wait in their kernel for ever. FlashInfer starts torch.distributed, unless it runs, and NVSHMEM.
    The push kernel is compiled by nvcc at its first use and starts torch.distributed on one rank too, for as long as
    the layer lives; each of its ranks needs a GPU of its own.

    FlashInfer's own errors pass through.
    """
    prepare_process(ep_size)
    from flashinfer import moe_ep

    bootstrap = moe_ep.BootstrapConfig(world_size=ep_size, rank=ep_rank, device=torch.cuda.current_device())
    _start_runtime(bootstrap)
    top_k = inputs.topk_ids.shape[1]
    hidden, intermediate = inputs.hidden_states.shape[1], weights.w13.shape[1] // 2
    config = getattr(moe_ep, CONFIGS[name])(intermediate_size=intermediate, top_k=top_k, **options)
    layer = moe_ep.MoEEpLayer(
        bootstrap=bootstrap,
        fleet_params=moe_ep.FleetParams(
            num_experts=weights.num_experts, max_tokens_per_rank=max_tokens_per_rank, token_hidden_size=hidden
        ),
        weights=_pack(weights, ep_rank, ep_size),
        backend=moe_ep.MegaConfig(megakernel=config, quantize_input=inputs.hidden_states.dtype is torch.bfloat16),
    )
    ids = _IDS.get(name, torch.int64)
    tensors = moe_ep.MoEEpTensors(
        hidden_states=inputs.hidden_states.cuda(),
        topk_ids=inputs.topk_ids.to(ids).cuda(),
        topk_weights=inputs.topk_weights.cuda(),
        scales=None if inputs.scales is None else inputs.scales.cuda(),
    )
    if previous_topk_ids is not None:
        layer(dataclasses.replace(tensors, topk_ids=previous_topk_ids.to(ids).cuda()))
    outputs = [layer(tensors).cpu().clone() for _ in range(launches)]
    torch.cuda.synchronize()
    layer.destroy()  # collective, so not after an error that only this rank may have had
    return outputs


def prepare_process(ep_size: int) -> None:
    """What FlashInfer's SM90 kernels want of a process before the first of them is built.

    One rank runs without torch.distributed and NVSHMEM; the layout of packed FP4 weights is ours, where FlashInfer
    would compile its whole CUTLASS MoE module for it.
    """
    if ep_size > 1:
        os.environ["MEGA_NO_DIST"] = "0"
    else:
        os.environ.setdefault("MEGA_NO_DIST", "1")
    import flashinfer.fused_moe.prepare as prepare

    prepare.interleave_moe_weights_for_sm90_mixed_gemm = lambda weight, quant_type="fp4_fp8": interleave_fp4_fp8(weight)


#: FlashInfer's handle on NVSHMEM. Without it the last layer's `destroy` would end NVSHMEM between two calls.
_runtime: list = []


def _start_runtime(bootstrap) -> None:
    if bootstrap.world_size == 1 or _runtime:
        return
    from flashinfer.moe_ep.core.runtime import NVSHMEM, TORCH_DIST, bootstrap_moe_ep_runtime

    _runtime.append(bootstrap_moe_ep_runtime(bootstrap, frozenset({TORCH_DIST, NVSHMEM})))


def stop_runtime() -> None:
    """End NVSHMEM, on every rank together, after the last call with ep_size > 1. torch.distributed is left running."""
    while _runtime:
        from flashinfer.moe_ep.core.runtime import finalize_moe_ep_runtime

        finalize_moe_ep_runtime(_runtime.pop())


def _pack(weights: MoEWeights, ep_rank: int, ep_size: int):
    """This rank's experts, on the device."""
    from flashinfer.moe_ep import MoEWeightPack
    from flashinfer.moe_ep.backends.mega.kernel.sm90.fp8_nvfp4_bf16_pull_cutedsl import Nvfp4WeightPack

    count = weights.num_experts // ep_size
    mine = slice(ep_rank * count, (ep_rank + 1) * count)
    given = vars(weights.of_experts(mine)).items()
    tensors = {name: t.contiguous().cuda() for name, t in given if t is not None}
    return Nvfp4WeightPack(**tensors) if weights.w13_global_scale is not None else MoEWeightPack(**tensors)
