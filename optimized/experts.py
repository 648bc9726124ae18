"""The megakernels as a modular-kernel experts class: vLLM's `FlashInferMoeEpExperts` without vLLM.

Surface, decisions and texts are those of vLLM 0.33.0 (`fused_moe/experts/flashinfer_moe_ep.py`, `modular_kernel.py`,
`quant_utils.py`). What differs, each because the original fails:

- A layer parameter that is missing or None after loading (MXFP4 turned into bf16) is registered; vLLM 0.33.0 assigns
  `.data` of None. Where there is one, its `.data` is rebound. Copying into it, as vLLM did before, leaves the layer a
  private copy, and EPLB, which permutes the layer's parameters in place, gives experts the scales of others.
- The layer's global scales are tied to what the kernel reads in the same way.
- Routing weights are cast to float32, ids to the dtype that the kernel takes. vLLM casts ids only, to int32, and
  FlashInfer refuses other weights.
- Weights are processed once: afterwards the layer's parameters are in the kernel's layout.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from .backends import flashinfer_moe_ep_backend_spec
from .config import (
    Deployment,
    EpGroup,
    FusedMoEActivationFormat,
    activation_name,
    weight_format,
)
from .flashinfer_moe_ep import FlashInferMoeEp
from .mega_kernel import FlashInferMoeEpEpilogue, FlashInferMoeEpWeights, KernelFactory
from .passthrough import PassThroughPrepareAndFinalize, TopKWeightAndReduceNoOP, run_experts
from .support import (
    apply_topk_in_fc1,
    current_device_name,
    flashinfer_moe_ep_unsupported_reasons,
    require_finite_positive_scales,
    supports_current_device,
    validate_flashinfer_moe_ep_layer,
)

__all__ = [
    "KERNEL_ALPHA_NAMES",
    "KERNEL_WEIGHT_NAMES",
    "FlashInferMoeEpExperts",
    "PassThroughPrepareAndFinalize",
    "TopKWeightAndReduceNoOP",
    "epilogue_from_quant_config",
    "rebind_parameter",
    "run_experts",
]

#: Layer parameters that the kernel reads, in the order of `FlashInferMoeEp.kernel_weights`.
KERNEL_WEIGHT_NAMES = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
#: And the global scales, in the order (fc1, fc2).
KERNEL_ALPHA_NAMES = ("w13_weight_scale_2", "w2_weight_scale_2")

Shape = tuple[int, ...]


class FlashInferMoeEpExperts:
    """One MoE layer's experts on one EP rank. Unprocessed until `process_weights_after_loading`.

    moe_config, quant_config: as in `optimized.config`, or vLLM's. max_num_tokens and num_dispatchers are for batched
    formats, and refused. kernel, ep_group and options go to `FlashInferMoeEp`.

    Raises ValueError where max_num_tokens or num_dispatchers is given.
    """

    def __init__(
        self,
        moe_config: Any,
        quant_config: Any,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
        *,
        deployment: Deployment | None = None,
        ep_group: EpGroup | None = None,
        kernel: KernelFactory | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if max_num_tokens is not None or num_dispatchers is not None:
            raise ValueError(
                "max_num_tokens and num_dispatchers should only be set for BatchedExperts activation format."
            )
        self.moe_config = moe_config
        self.quant_config = quant_config
        self.deployment = deployment or Deployment()
        self._adapter_options: dict[str, Any] = {"ep_group": ep_group, "kernel": kernel, "options": options}
        self._adapter: FlashInferMoeEp | None = None

    @staticmethod
    def is_supported_config(
        cls: type["FlashInferMoeEpExperts"],
        moe_config: Any,
        weight_key: Any,
        activation_key: Any,
        activation_format: Any,
        deployment: Deployment | None = None,
    ) -> tuple[bool, str | None]:
        """(True, None), or False and "kernel does not support ...": the first general check that fails, else all of
        `flashinfer_moe_ep_unsupported_reasons`, joined by commas.

        deployment: by default the current device and nothing special. For an SM90 backend, device and weight scheme are
        those of its record instead of vLLM's predicates. Raises ValueError for an unknown backend.
        """
        where = deployment or Deployment()
        spec = flashinfer_moe_ep_backend_spec(moe_config.moe_backend)
        scheme = cls._supports_quant_scheme(weight_key, activation_key) or (
            weight_format(weight_key) in spec.weight_formats
        )
        checks = (
            (
                cls._supports_current_device(where.capability, spec.capabilities),
                f"current device {current_device_name()}",
            ),
            (moe_config.is_act_and_mul or cls._supports_no_act_and_mul(), "no act_and_mul MLP layer"),
            (cls._supports_activation(moe_config.activation), f"{moe_config.activation} activation"),
            (scheme, f"quantization scheme {weight_key}x{activation_key}"),
            (
                cls._supports_parallel_config(moe_config.moe_parallel_config),
                f"parallel config {moe_config.moe_parallel_config}",
            ),
            (activation_format.value == cls.activation_format().value, f"{activation_format.value} activation format"),
            (not where.batch_invariant, "batch invariance"),
            (not moe_config.is_lora_enabled, "LoRA"),
        )
        failed = [text for holds, text in checks if not holds][:1]
        failed = failed or list(flashinfer_moe_ep_unsupported_reasons(moe_config, weight_key, activation_key, where))
        return (False, f"kernel does not support {', '.join(failed)}") if failed else (True, None)

    @staticmethod
    def is_monolithic() -> bool:
        return False

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    #: Without arguments as in vLLM: whether the current device is an SM100 or SM103.
    _supports_current_device = staticmethod(supports_current_device)

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_format(weight_key) in ("nvfp4", "mxfp4")

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation_name(activation) == "silu"

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return moe_parallel_config.use_ep and not moe_parallel_config.use_batched_activation_format

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceNoOP:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[Shape, Shape, Shape]:
        """No workspaces, and an output of M tokens by K channels. All other arguments are ignored."""
        return (0,), (0,), (M, K)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Build and warm up the kernel from the layer's canonical weights, and tie the layer to the kernel's memory.

        Collective. layer: a torch module, or any object with vLLM's attributes: w13_weight and w2_weight, with packed
        FP4 also w13_weight_scale and w2_weight_scale, expert_map_manager.placement_strategy, moe_config and
        apply_router_weight_on_input. See `FlashInferMoeEpWeights` for shapes and dtypes.

        Afterwards the parameters named in KERNEL_WEIGHT_NAMES are the kernel's memory in the kernel's layout. So are
        those of KERNEL_ALPHA_NAMES where the kernel keeps its factors with its weights (SM90), as it keeps them: for
        NVFP4 8 * alpha; quant_config.g1_alphas then holds that too, if it is the layer's parameter. Where the kernel
        reads the epilogue's vectors at every launch, existing parameters of those names become them.

        Raises ValueError for a placement other than linear, and whatever the adapter raises; RuntimeError the second
        time. After an error the experts are still unprocessed. Where alphas had to be copied and the layer has no
        parameter to tie to the copy, EPLB would not reach them: ValueError if the deployment enables EPLB, else a
        warning.
        """
        if self._adapter is not None:
            raise RuntimeError("FlashInfer MoE-EP weights have been processed, and are in the kernel's layout")
        validate_flashinfer_moe_ep_layer(layer)
        epilogue = epilogue_from_quant_config(self.quant_config)
        self._check_alphas_reachable(layer, epilogue)
        adapter = FlashInferMoeEp(
            self.moe_config,
            FlashInferMoeEpWeights(
                w13=layer.w13_weight,
                w2=layer.w2_weight,
                w13_scale=getattr(layer, "w13_weight_scale", None),
                w2_scale=getattr(layer, "w2_weight_scale", None),
            ),
            epilogue,
            apply_topk_in_fc1=apply_topk_in_fc1(
                self.moe_config, apply_router_weight_on_input=layer.apply_router_weight_on_input
            ),
            **self._adapter_options,
        )
        adapter.warmup()
        for name, weight in zip(KERNEL_WEIGHT_NAMES, adapter.kernel_weights(), strict=True):
            if weight is not None:
                rebind_parameter(layer, name, weight)
        own = adapter.kernel_alphas()
        for name, alpha in zip(KERNEL_ALPHA_NAMES, own or (epilogue.fc1_alpha, epilogue.fc2_alpha), strict=True):
            # The epilogue's are not registered where the name is missing: the layer may have the same memory under
            # another name, and EPLB would permute it twice.
            if alpha is not None and (own or _is_parameter(layer, name)):
                rebind_parameter(layer, name, alpha)
        self._adapter = adapter

    def _check_alphas_reachable(self, layer: Any, epilogue: FlashInferMoeEpEpilogue) -> None:
        if flashinfer_moe_ep_backend_spec(self.moe_config.moe_backend).alphas != "per forward":
            return
        given = (self.quant_config.g1_alphas, self.quant_config.g2_alphas)
        for name, source, alpha in zip(
            KERNEL_ALPHA_NAMES, given, (epilogue.fc1_alpha, epilogue.fc2_alpha), strict=True
        ):
            if alpha is None or alpha.data_ptr() == source.data_ptr() or _is_parameter(layer, name):
                continue
            message = (
                f"{name}: the alphas had to be copied to contiguous float32, and the layer has no parameter of this "
                "name to tie to the copy: experts permuted in place (EPLB) would keep their predecessors' alphas"
            )
            if self.deployment.enable_eplb:
                raise ValueError(message)
            warnings.warn(message, stacklevel=3)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the layer's final output into `output` `[T, H]`.

        hidden_states `[T, H]` bf16; topk_ids `[T, top_k]`, global physical ids, negative: masked, cast to the kernel's
        dtype; topk_weights `[T, top_k]`, cast to float32. Collective, also with T = 0. All other arguments are ignored,
        the weights too: the kernel has its own.

        Raises RuntimeError when unprocessed, ValueError for more than max_num_tokens tokens.
        """
        if self._adapter is None:
            raise RuntimeError("FlashInfer MoE-EP weights have not been processed")
        ids = topk_ids.to(self._adapter.topk_indices_dtype)
        output.copy_(self._adapter(hidden_states, ids, topk_weights.to(torch.float32)))


def epilogue_from_quant_config(quant_config: Any) -> FlashInferMoeEpEpilogue:
    """The weight global scales g1_alphas and g2_alphas, `[E_local]`, as fc1_alpha and fc2_alpha; none, no factors.

    A contiguous float32 tensor is taken as it is, so that a permutation of the layer's parameter reaches the kernel;
    another dtype or layout becomes a copy. Input scales are dropped: activations are quantized by their own amax.

    Raises ValueError when only one is there (vLLM asserts), then for a NaN, infinite, zero or negative scale, g1 first,
    then where a scale is not 1-D.
    """
    alphas = {"g1_alphas": quant_config.g1_alphas, "g2_alphas": quant_config.g2_alphas}
    missing = [name for name, alpha in alphas.items() if alpha is None]
    if len(missing) == 2:
        return FlashInferMoeEpEpilogue()
    if missing:
        raise ValueError(f"{missing[0]} is None but the other is not: g1_alphas and g2_alphas must be both or neither")
    for name, alpha in alphas.items():
        require_finite_positive_scales(name, alpha)
    if any(alpha.dim() != 1 for alpha in alphas.values()):
        raise ValueError("the megakernel needs one weight global scale per expert")
    fc1_alpha, fc2_alpha = (alpha.float().contiguous() for alpha in alphas.values())
    return FlashInferMoeEpEpilogue(fc1_alpha=fc1_alpha, fc2_alpha=fc2_alpha)


def _is_parameter(layer: Any, name: str) -> bool:
    return isinstance(getattr(layer, name, None), torch.nn.Parameter)


def rebind_parameter(layer: Any, name: str, tensor: torch.Tensor) -> None:
    """Make the layer's parameter `name` the memory of `tensor`: shape, dtype and device may differ from what it was.

    A parameter stays the same object, with its attributes, and gets another `.data`; it no longer requires a gradient.
    Anything else, None and nothing included, is replaced by a new parameter. Nothing is ever copied.
    """
    if _is_parameter(layer, name):
        getattr(layer, name).requires_grad_(False).data = tensor
    else:
        setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
