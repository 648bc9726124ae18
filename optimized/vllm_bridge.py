"""Our `FlashInferMoeEpExperts` inside vLLM 0.33.0, instead of vLLM's. vLLM is optional: only calls import it.

One attribute is hooked: `FlashInferMoeEpExperts` of `vllm.model_executor.layers.fused_moe.experts.flashinfer_moe_ep`.
vLLM's oracles for NVFP4 and MXFP4 import it from there whenever they turn a backend into its experts class, and nothing
else refers to it. So the oracles, their weight conversions and vLLM's command line stay as they are, and a server is
started as for vLLM's own class: `--moe-backend flashinfer_moe_ep_cutedsl --enable-expert-parallel`.

Every process that loads a model must register. vLLM's workers, processes of their own, call what the entry points of
the group `vllm.general_plugins` name; a package with nothing but this one is enough:

    [project.entry-points."vllm.general_plugins"]
    fp4ep = "fp4ep.optimized.vllm_bridge:register_with_vllm"

fp4ep itself has no such entry point: installing it must not change what vLLM runs.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .backends import FLASHINFER_MOE_EP_BACKENDS, flashinfer_moe_ep_backend_spec
from .config import Deployment, EpGroup
from .experts import FlashInferMoeEpExperts
from .mega_kernel import KernelFactory

_NAME = "FlashInferMoeEpExperts"


@dataclass(frozen=True, eq=False)
class VllmRegistration:
    """Who took whose place in `module`. Leaving a `with` block undoes it."""

    module: ModuleType
    experts_cls: type[FlashInferMoeEpExperts]
    replaced: type

    def undo(self) -> None:
        """Give vLLM back what was replaced; a second call does nothing. Layers built before keep their class.

        Raises RuntimeError when another class took the place since: the latest registration is undone first.
        """
        current = getattr(self.module, _NAME)
        if current is not self.replaced and current is not self.experts_cls:
            raise RuntimeError(f"{current.__module__}.{_NAME} took this class's place in vLLM: undo that first")
        setattr(self.module, _NAME, self.replaced)

    def __enter__(self) -> "VllmRegistration":
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def register_with_vllm(
    *,
    backends: Mapping[str, str] | None = None,
    kernel: KernelFactory | None = None,
    options: Mapping[str, Any] | None = None,
) -> VllmRegistration:
    """Let vLLM, in this process, build its FlashInfer MoE-EP layers with our experts class, until undone.

    backends: what to run instead of vLLM's backend, by vLLM's name, such as
    `{"flashinfer_moe_ep_cutedsl": "flashinfer_moe_ep_sm90_nvfp4"}` on an H200: vLLM knows only its own two names and
    converts weights for these. kernel, options: go to `FlashInferMoeEp`. Registering again takes the latest arguments.

    Raises RuntimeError where vLLM, or its FlashInfer MoE-EP experts, cannot be imported; ValueError where backends
    names a backend that there is not, or replaces one that is not vLLM's.
    """
    experts_cls = vllm_experts_class(backends=backends, kernel=kernel, options=options)
    from vllm.model_executor.layers.fused_moe.experts import flashinfer_moe_ep as module

    registration = VllmRegistration(module, experts_cls, getattr(module, _NAME))
    setattr(module, _NAME, experts_cls)
    return registration


def vllm_experts_class(
    *,
    backends: Mapping[str, str] | None = None,
    kernel: KernelFactory | None = None,
    options: Mapping[str, Any] | None = None,
) -> type[FlashInferMoeEpExperts]:
    """Our experts class as a `FusedMoEExpertsModular` of vLLM's; arguments and errors as `register_with_vllm`.

    `Deployment` and `EpGroup` are read from vLLM's current configuration and EP group, the former also by
    `is_supported_config`, so that vLLM's signatures hold. Unlike vLLM's class it launches without tokens too: vLLM's
    driver returns early on such a rank, and the others wait for ever.
    """
    for name, instead in (backends or {}).items():
        if name not in FLASHINFER_MOE_EP_BACKENDS:
            raise ValueError(f"backends: {name!r} is not a backend of vLLM's: {sorted(FLASHINFER_MOE_EP_BACKENDS)}")
        flashinfer_moe_ep_backend_spec(instead)
    mk, reduce = _import_vllm()
    modular: Any = mk.FusedMoEExpertsModular

    def ours(moe_config: Any) -> Any:
        name = (backends or {}).get(moe_config.moe_backend)
        if name is None:
            return moe_config
        moe_config = copy.copy(moe_config)
        moe_config.moe_backend = name
        return moe_config

    class VllmFlashInferMoeEpExperts(FlashInferMoeEpExperts, modular):
        def __init__(self, moe_config: Any, quant_config: Any, **batched: Any) -> None:
            moe_config = ours(moe_config)
            modular.__init__(self, moe_config, quant_config, **batched)
            FlashInferMoeEpExperts.__init__(
                self,
                moe_config,
                quant_config,
                deployment=_deployment(),
                ep_group=_ep_group(),
                kernel=kernel,
                options=options,
            )

        @staticmethod
        def is_supported_config(
            cls: type[FlashInferMoeEpExperts],
            moe_config: Any,
            weight_key: Any,
            activation_key: Any,
            activation_format: Any,
            deployment: Deployment | None = None,
        ) -> tuple[bool, str | None]:
            return FlashInferMoeEpExperts.is_supported_config(
                cls, ours(moe_config), weight_key, activation_key, activation_format, deployment or _deployment()
            )

        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.Standard  # the driver compares with ==

        def finalize_weight_and_reduce_impl(self) -> Any:
            return reduce.TopKWeightAndReduceNoOP()

        def moe_problem_size(
            self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
        ) -> tuple[int, int, int, int, int]:
            """The sizes. The driver asks for them once per forward, and goes no further without tokens."""
            sizes = super().moe_problem_size(a1, w1, w2, topk_ids)
            if not a1.shape[0]:
                no_weights = torch.empty(topk_ids.shape, device=a1.device)
                self.apply(a1, a1, w1, w2, no_weights, topk_ids, None, 0, None, None, None, a1, a1, None, False)
            return sizes

    return VllmFlashInferMoeEpExperts


def _import_vllm() -> tuple[Any, Any]:
    """vLLM's modular kernel and its reductions, once vLLM is known to have what is replaced."""
    try:
        import vllm
    except ImportError as error:
        raise RuntimeError("vLLM is not installed: pip install vllm") from error
    try:
        import vllm.model_executor.layers.fused_moe.experts.flashinfer_moe_ep
        from vllm.model_executor.layers.fused_moe import modular_kernel, topk_weight_and_reduce
    except ImportError as error:
        version = getattr(vllm, "__version__", "of unknown version")
        raise RuntimeError(f"vLLM {version} lacks the FlashInfer MoE-EP experts of 0.33.0: {error}") from error
    return modular_kernel, topk_weight_and_reduce


def _deployment() -> Deployment:
    from vllm import envs
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform

    config = get_current_vllm_config()
    capability = current_platform.get_device_capability()
    return Deployment(
        weight_transfer=config.weight_transfer_config is not None,
        enable_dbo=config.parallel_config.enable_dbo,
        enable_eplb=config.parallel_config.enable_eplb,
        capability=None if capability is None else (capability.major, capability.minor),
        all2all_backend=config.parallel_config.all2all_backend,
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
    )


def _ep_group() -> EpGroup:
    from vllm.distributed import get_ep_group

    group = get_ep_group()
    return EpGroup(group.world_size, group.rank_in_group, group.device_group)
