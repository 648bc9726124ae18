"""What the megakernels do not support, and the small decisions made before one is built.

Rules, order and texts are those of vLLM 0.33.0 (`fused_moe/flashinfer_moe_ep.py`, `quant_utils.py`).
"""

from typing import Any

import torch

from .backends import FLASHINFER_MOE_EP_BACKENDS, SM100_CAPABILITIES, flashinfer_moe_ep_backend_spec
from .config import Deployment, routing_method_name, weight_format

#: The formats that vLLM's table of weight schemes has.
_VLLM_FORMATS = frozenset({"nvfp4", "mxfp4"})


def is_deepseek_v4(routing_method: Any) -> bool:
    """Whether this is DeepSeek-V4's routing, which weights routes before fc2. Takes vLLM's enum too."""
    return routing_method_name(routing_method) == "DeepseekV4"


def current_device_name() -> str:
    """ "cuda" or "cpu", the word in vLLM's texts."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def supports_current_device(
    capability: tuple[int, int] | None = None, capabilities: frozenset[tuple[int, int]] = SM100_CAPABILITIES
) -> bool:
    """Whether a device of this capability, by default the current CUDA device, is among those a backend runs on.

    False without a CUDA device. FlashInfer's own gate for SM100 kernels is looser: any capability from 10.0 on.
    """
    if capability is None and torch.version.cuda and torch.cuda.is_available():  # ROCm counts otherwise
        capability = torch.cuda.get_device_capability()
    return capability is not None and tuple(capability) in capabilities


def flashinfer_moe_ep_unsupported_reasons(
    moe: Any, weight_key: Any, activation_key: Any, deployment: Deployment | None = None
) -> tuple[str, ...]:
    """Every reason why the backend `moe.moe_backend` cannot run this layer, in vLLM's order; empty: it can.

    moe: a `FusedMoEConfig`, ours or vLLM's. weight_key: the checkpoint's scheme, None for bf16. activation_key: None
    with MXFP4, whose kernels quantize bf16 activations themselves; with NVFP4 None means 16-bit activations, which no
    kernel here keeps. deployment: what vLLM reads from its process-wide configuration; by default nothing special.

    SM90 backends: the same list. Their kernels weight routes before fc2 and have no switch; any routing method is
    admitted, as SGLang does with these kernels, since the weight is a factor of the route's output either way. Whether
    sizes are aligned is checked when the kernel is built.

    Raises ValueError for an unknown backend.
    """
    spec = flashinfer_moe_ep_backend_spec(moe.moe_backend)
    where = deployment or Deployment()
    given = weight_format(weight_key)
    known = given is not None and (given in _VLLM_FORMATS or moe.moe_backend not in FLASHINFER_MOE_EP_BACKENDS)
    routing = routing_method_name(moe.routing_method)
    reasons = (
        (not known, f"weight scheme {weight_key}"),
        (known and given not in spec.weight_formats, f"{str(given).upper()} weights"),
        (given == "nvfp4" and activation_key is None, "A16 activations with NVFP4 weights"),
        (moe.skip_final_all_reduce, "skip_final_all_reduce"),  # the output is reduced already
        (moe.in_dtype != torch.bfloat16, f"activation dtype {moe.in_dtype}"),
        (moe.has_bias, "expert bias"),
        (moe.swiglu_alpha is not None or moe.swiglu_beta is not None, "custom SwiGLU alpha or beta"),
        (spec.deepseek_v4_only and not is_deepseek_v4(routing), f"routing method {routing}"),
        (where.weight_transfer, "runtime weight transfer"),
        (where.enable_dbo, "dual batch overlap"),
        (where.enable_eplb and not spec.eplb, "EPLB"),
    )
    return tuple(text for applies, text in reasons if applies)


def validate_flashinfer_moe_ep_layer(layer: Any) -> None:
    """Raises ValueError unless placement is "linear": rank r holds the experts [r * E_local, (r + 1) * E_local)."""
    if layer.expert_map_manager.placement_strategy != "linear":
        raise ValueError(f"{layer.moe_config.moe_backend} requires contiguous linear expert placement")


def apply_topk_in_fc1(moe: Any, *, apply_router_weight_on_input: bool = False) -> bool:
    """Whether routing weights multiply the SwiGLU output, before fc2, rather than the sum over top-k.

    True for DeepSeek-V4's routing, and where the model weights the layer's input (Llama 4). For the latter the result
    is vLLM's and not the model's: w * silu(g) * u instead of silu(w * g) * (w * u).
    """
    return bool(apply_router_weight_on_input) or is_deepseek_v4(moe.routing_method)


def require_finite_positive_scales(name: str, value: torch.Tensor) -> None:
    """Raises ValueError where any element is NaN, infinite, zero or negative. Waits for the device."""
    if not (torch.isfinite(value) & (value > 0)).all():
        raise ValueError(f"{name} must contain finite positive scales")
