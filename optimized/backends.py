"""The FlashInfer MoE-EP backends: vLLM's two for SM100, and the SM90 ones, which vLLM does not offer.

Names and rules are those of vLLM 0.33.0 (`config/kernel.py`, `fused_moe/flashinfer_moe_ep.py`); what a kernel takes was
read in FlashInfer 0.7.4. Error texts list every backend of this table, the SM90 ones too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

FLASHINFER_MOE_EP_CUTEDSL = "flashinfer_moe_ep_cutedsl"
FLASHINFER_MOE_EP_DEEP_GEMM = "flashinfer_moe_ep_mega_deep_gemm"
#: vLLM's.
FLASHINFER_MOE_EP_BACKENDS = frozenset({FLASHINFER_MOE_EP_CUTEDSL, FLASHINFER_MOE_EP_DEEP_GEMM})

FLASHINFER_MOE_EP_SM90_NVFP4 = "flashinfer_moe_ep_sm90_nvfp4"
FLASHINFER_MOE_EP_SM90_MXFP4 = "flashinfer_moe_ep_sm90_mxfp4"
FLASHINFER_MOE_EP_SM90_FP8 = "flashinfer_moe_ep_sm90_fp8"
FLASHINFER_MOE_EP_SM90_BF16 = "flashinfer_moe_ep_sm90_bf16"
FLASHINFER_MOE_EP_SM90_BACKENDS = frozenset(
    {
        FLASHINFER_MOE_EP_SM90_NVFP4,
        FLASHINFER_MOE_EP_SM90_MXFP4,
        FLASHINFER_MOE_EP_SM90_FP8,
        FLASHINFER_MOE_EP_SM90_BF16,
    }
)

PASSTHROUGH_ALL2ALL_BACKEND = "passthrough"
_DEFAULT_ALL2ALL_BACKEND = "allgather_reducescatter"
#: What DeepGEMM's kernel is for.
FLASHINFER_MOE_EP_ARCHITECTURES = frozenset({"DeepseekV4ForCausalLM", "DeepSeekV4MTPModel", "DeepseekV41ForCausalLM"})

SM90_CAPABILITIES = frozenset({(9, 0)})
SM100_CAPABILITIES = frozenset({(10, 0), (10, 3)})


@dataclass(frozen=True)
class FlashInferMoeEpBackendSpec:
    """One backend.

    weight_formats: checkpoint formats that load. capabilities: devices, as (major, minor). alignment and
    hidden_alignment: what intermediate_size and hidden_dim must be multiples of. late_routing_weights: can weight after
    fc2; the others weight before it, whatever the model. deepseek_v4_only: admits no other routing. eplb: experts may
    be permuted in place. alphas: where the kernel reads the per-expert factors, "per forward" from the caller's
    tensors, "in weights" from its own vectors, or "none". norm_consts: takes input_norm_const and fc1_norm_const.
    topk_ids_dtype: of the ids that it is given.
    """

    kernel: str
    weight_formats: frozenset[str]
    registry_name: str
    capabilities: frozenset[tuple[int, int]]
    alphas: str
    alignment: int
    hidden_alignment: int
    late_routing_weights: bool = False
    deepseek_v4_only: bool = False
    eplb: bool = True
    norm_consts: bool = False
    topk_ids_dtype: torch.dtype = torch.int32


_BACKEND_SPECS = {
    FLASHINFER_MOE_EP_CUTEDSL: FlashInferMoeEpBackendSpec(
        kernel="cutedsl",
        weight_formats=frozenset({"nvfp4", "mxfp4"}),
        registry_name="sm100_nvfp4_nvfp4_bf16_cutedsl",
        capabilities=SM100_CAPABILITIES,
        alphas="per forward",
        alignment=64,
        hidden_alignment=64,
        late_routing_weights=True,
        norm_consts=True,
    ),
    FLASHINFER_MOE_EP_DEEP_GEMM: FlashInferMoeEpBackendSpec(
        kernel="deep_gemm",
        weight_formats=frozenset({"mxfp4"}),
        registry_name="sm100_fp8_fp4_bf16_deepgemm",
        capabilities=SM100_CAPABILITIES,
        alphas="none",
        alignment=128,
        hidden_alignment=128,
        deepseek_v4_only=True,
        eplb=False,
    ),
    # Weights given as bf16 are quantized when the layer is built.
    FLASHINFER_MOE_EP_SM90_NVFP4: FlashInferMoeEpBackendSpec(
        kernel="sm90_nvfp4",
        weight_formats=frozenset({"nvfp4", "bf16"}),
        registry_name="sm90_fp8_nvfp4_bf16_pull_cutedsl",
        capabilities=SM90_CAPABILITIES,
        topk_ids_dtype=torch.int64,
        alphas="in weights",
        alignment=128,
        hidden_alignment=128,
    ),
    FLASHINFER_MOE_EP_SM90_MXFP4: FlashInferMoeEpBackendSpec(
        kernel="sm90_mxfp4",
        weight_formats=frozenset({"mxfp4"}),
        registry_name="sm90_fp8_mxfp4_bf16_pull_cutedsl",
        capabilities=SM90_CAPABILITIES,
        topk_ids_dtype=torch.int64,
        alphas="in weights",
        alignment=128,
        hidden_alignment=128,
    ),
    # FlashInfer 0.7.4 has no path for FP8 checkpoints here: this kernel quantizes bf16 weights.
    FLASHINFER_MOE_EP_SM90_FP8: FlashInferMoeEpBackendSpec(
        kernel="sm90_fp8",
        weight_formats=frozenset({"bf16"}),
        registry_name="sm90_fp8_fp8_bf16_pull_cutedsl",
        capabilities=SM90_CAPABILITIES,
        topk_ids_dtype=torch.int64,
        alphas="in weights",
        alignment=64,
        hidden_alignment=64,
    ),
    FLASHINFER_MOE_EP_SM90_BF16: FlashInferMoeEpBackendSpec(
        kernel="sm90_bf16",
        weight_formats=frozenset({"bf16"}),
        registry_name="sm90_bf16_bf16_bf16_pull_cutedsl",
        capabilities=SM90_CAPABILITIES,
        topk_ids_dtype=torch.int64,
        alphas="none",
        alignment=64,
        hidden_alignment=256,
    ),
}


def is_flashinfer_moe_ep_backend(moe_backend: str) -> bool:
    return moe_backend in _BACKEND_SPECS


def flashinfer_moe_ep_backend_spec(moe_backend: str) -> FlashInferMoeEpBackendSpec:
    """The record of a backend. Raises ValueError, naming the valid ones, for any other name."""
    if moe_backend not in _BACKEND_SPECS:
        raise ValueError(
            f"{moe_backend!r} is not a FlashInfer MoE-EP backend; expected one of {sorted(_BACKEND_SPECS)}"
        )
    return _BACKEND_SPECS[moe_backend]


def validate_flashinfer_moe_ep_model(moe_backend: str, architectures: Iterable[str]) -> None:
    """Raises ValueError where the backend is DeepGEMM's and no architecture is of DeepSeek-V4."""
    names = list(architectures)
    if moe_backend == FLASHINFER_MOE_EP_DEEP_GEMM and FLASHINFER_MOE_EP_ARCHITECTURES.isdisjoint(names):
        raise ValueError(
            f"moe_backend={moe_backend!r} is only supported for DeepSeek-V4 models "
            f"({sorted(FLASHINFER_MOE_EP_ARCHITECTURES)}), but the model is {names}."
        )


def bind_passthrough_all2all_backend(moe_backend: str, parallel_config: Any) -> None:
    """Set `parallel_config.all2all_backend` to "passthrough" for a backend of this table, which does its own exchange.

    Only the default is replaced; calling it again changes nothing. Raises ValueError for any other explicit choice,
    and for "passthrough" with another MoE backend.
    """
    chosen = parallel_config.all2all_backend
    if is_flashinfer_moe_ep_backend(moe_backend):
        if chosen not in (_DEFAULT_ALL2ALL_BACKEND, PASSTHROUGH_ALL2ALL_BACKEND):
            raise ValueError(
                f"moe_backend={moe_backend!r} dispatches and combines itself and cannot be paired with "
                f"all2all_backend={chosen!r}; leave --all2all-backend unset."
            )
        parallel_config.all2all_backend = PASSTHROUGH_ALL2ALL_BACKEND
    elif chosen == PASSTHROUGH_ALL2ALL_BACKEND:
        raise ValueError(
            f"all2all_backend={chosen!r} is only valid with a moe_backend that dispatches and combines itself "
            f"({sorted(_BACKEND_SPECS)}), got moe_backend={moe_backend!r}."
        )
