"""FlashInfer's `MoEEpMegaLayer` as the adapter's kernel: vLLM's configuration of it, and of the SM90 kernels.

Source: vLLM 0.33.0, `fused_moe/flashinfer_moe_ep.py`; FlashInfer 0.7.4, `moe_ep`.
"""

import dataclasses
import sys
from importlib.util import find_spec
from typing import Any

import torch

from .flashinfer_sm90 import CONFIGS, prepare_process
from .kernel_layouts import KernelState
from .mega_kernel import KernelRequest, Vectors


class FlashInferKernel:
    """One layer of a FlashInfer megakernel. See `MegaKernel`; FlashInfer's own errors pass through.

    Raises RuntimeError, before any memory is taken, where FlashInfer, a CUDA device, DeepGEMM or NVSHMEM is missing.
    """

    def __init__(self, request: KernelRequest) -> None:
        api = _load_api(request)
        group, moe = request.ep_group, request.moe
        self._tensors = api.MoEEpTensors
        self._in_weights = request.spec.alphas == "in weights"
        self._layer = api.MoEEpMegaLayer(
            api.BootstrapConfig(
                world_size=group.world_size,
                rank=group.rank_in_group,
                process_group=group.device_group,
                device=torch.cuda.current_device(),
            ),
            api.FleetParams(
                num_experts=moe.num_experts,
                max_tokens_per_rank=moe.max_num_tokens,
                token_hidden_size=moe.hidden_dim,
            ),
            _pack(api, request),
            api.MegaConfig(megakernel=_config(api, request), quantize_input=True, preprocess_weights=True),
        )
        self.supports_output_view: bool = getattr(self._layer, "supports_output_view", False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        vectors: Vectors,
        *,
        view: bool,
    ) -> torch.Tensor:
        tensors = self._tensors(hidden_states, topk_ids, topk_weights, **vectors)
        return self._layer.forward(tensors, return_workspace_view=True) if view else self._layer(tensors)

    def warmup(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        vectors: Vectors,
    ) -> None:
        self._layer.warmup(self._tensors(hidden_states, topk_ids, topk_weights, **vectors))

    def state(self) -> KernelState:
        legs = [_leg(leg) for leg in self._layer._transformed]
        (fc1, fc1_scale, fc1_alpha), (fc2, fc2_scale, fc2_alpha) = legs
        alphas = {"fc1_alpha": fc1_alpha, "fc2_alpha": fc2_alpha} if self._in_weights else {}
        return KernelState(fc1, fc1_scale, fc2, fc2_scale, **alphas)

    def destroy(self) -> None:
        self._layer.destroy()


def _leg(leg: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Weight, scales and factor per expert of what FlashInfer calls a transformed leg.

    A plain tensor (bf16), (weight, scales), or (weight, scales, activation scale, factor).
    """
    if isinstance(leg, torch.Tensor):
        return expert_major_bytes(leg), None, None
    weight, scale, *rest = leg
    return expert_major_bytes(weight), expert_major_bytes(scale), rest[1] if rest else None


def expert_major_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The contiguous storage of a kernel's tensor, experts first, dtypes of one byte as uint8. Never a copy.

    Kernels hold `[E, K, N]` views of `[E, N, K]`. Raises ValueError for any other order of the storage.
    """
    if not tensor.is_contiguous():
        tensor = tensor.transpose(1, 2)
    if not tensor.is_contiguous():
        raise ValueError(f"tensor must be contiguous, or its transpose of dimensions 1 and 2, got {tensor.stride()}")
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


# --- what FlashInfer is asked for --------------------------------------------------------------------------------


def _load_api(request: KernelRequest) -> Any:
    """`flashinfer.moe_ep`, once everything that the kernel needs later is known to be there."""
    if not torch.cuda.is_available():
        raise RuntimeError("FlashInfer MoE-EP needs a CUDA device")
    if request.ep_group.world_size > 1 and request.spec.kernel != "deep_gemm" and not find_spec("nvshmem"):
        raise RuntimeError(f"{request.moe.moe_backend} needs NVSHMEM among several ranks: pip install nvshmem4py-cu13")
    if request.spec.kernel == "deep_gemm":
        _expose_deep_gemm()
    try:
        if request.spec.registry_name in CONFIGS:
            prepare_process(request.ep_group.world_size)
        from flashinfer import moe_ep
    except ImportError as error:
        raise RuntimeError(
            "FlashInfer MoE-EP needs flashinfer-python 0.7.0 or newer: pip install 'fp4ep[flashinfer]'"
        ) from error
    return moe_ep


def _expose_deep_gemm() -> None:
    """FlashInfer imports `deep_gemm`; vLLM has a copy of it under another name."""
    if find_spec("deep_gemm"):
        return
    if not find_spec("vllm"):
        raise RuntimeError("FlashInfer MoE-EP DeepGEMM needs DeepGEMM: pip install deep_gemm, or vLLM with its copy")
    from vllm.utils.deep_gemm import _import_deep_gemm

    module = _import_deep_gemm()
    if module is None:
        raise RuntimeError("FlashInfer MoE-EP DeepGEMM: vLLM's copy of DeepGEMM cannot be imported")
    for name, loaded in list(sys.modules.items()):
        if name == module.__name__ or name.startswith(module.__name__ + "."):
            sys.modules.setdefault("deep_gemm" + name.removeprefix(module.__name__), loaded)


def _pack(api: Any, request: KernelRequest) -> Any:
    weights, epilogue = request.weights, request.epilogue
    tensors = vars(weights)
    if request.spec.kernel != "sm90_nvfp4" or weights.w13_scale is None:
        return api.MoEWeightPack(**tensors)
    from flashinfer.moe_ep.backends.mega.kernel.sm90.fp8_nvfp4_bf16_pull_cutedsl import Nvfp4WeightPack

    one = torch.ones(1, device=weights.w13.device)
    alphas = {"w13_global_scale": epilogue.fc1_alpha, "w2_global_scale": epilogue.fc2_alpha}
    return Nvfp4WeightPack(**tensors, **{name: one if t is None else t for name, t in alphas.items()})


def _config(api: Any, request: KernelRequest) -> Any:
    moe = request.moe
    common = {
        "intermediate_size": moe.intermediate_size,
        "top_k": moe.experts_per_token,
        "fast_math": True,
        ("activation_clamp" if request.spec.kernel == "deep_gemm" else "gate_up_clamp"): moe.swiglu_limit,
    }
    if request.spec.kernel == "deep_gemm":
        return api.DeepGemmMegaMoeConfig(**common, **request.options)
    if request.spec.registry_name in CONFIGS:
        return getattr(api, CONFIGS[request.spec.registry_name])(**common, **request.options)
    config = api.Nvfp4CutedslMegaMoeConfig
    fields = {field.name for field in dataclasses.fields(config)}
    # Renamed within 0.7; the old name warns in 0.7.4.
    early = "apply_routing_weights_before_fc2"
    return config(
        **common,
        **{early if early in fields else "apply_topk_in_fc1": request.apply_topk_in_fc1},
        combine_dtype="bf16",
        input_norm_const=request.epilogue.input_norm_const,
        # Alphas go with every launch: FlashInfer shares workspaces between layers by these objects' identity.
        fc1_alpha=None,
        fc2_alpha=None,
        fc1_norm_const=None,
        **request.options,
    )
