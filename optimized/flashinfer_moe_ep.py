"""The adapter between a serving engine's MoE layer and a megakernel: vLLM's `FlashInferMoeEp` without vLLM.

Source of names, order of calls and decisions: vLLM 0.33.0, `fused_moe/flashinfer_moe_ep.py`. What differs:

- The kernel is FlashInfer's or any other `MegaKernel`, such as the reference.
- FlashInfer's SM90 kernels too. Their alphas live in the weights, see `kernel_alphas`.
- Vectors that a layer lacks are staged as ones. Layers share a workspace, and FlashInfer leaves there what the layer
  before it staged.
- Ids are int64 for the SM90 kernels, int32 as in vLLM for the others.
- `warmup` runs without gradients, not in inference mode: FlashInfer allocates its workspace there, and a tensor made in
  inference mode cannot be written to outside of it.
- Arguments are checked before anything is built or launched.
- Garbage collection destroys the layer of a single rank only: among several, FlashInfer's `destroy` is collective, and
  the garbage of ranks is not collected in one order.
"""

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from .backends import flashinfer_moe_ep_backend_spec
from .config import EpGroup, FusedMoEConfig
from .flashinfer_kernel import FlashInferKernel
from .mega_kernel import (
    VECTORS,
    FlashInferMoeEpEpilogue,
    FlashInferMoeEpWeights,
    KernelFactory,
    KernelRequest,
    MegaKernel,
    Vectors,
)
from .support import is_deepseek_v4, require_finite_positive_scales

__all__ = ["FlashInferMoeEp", "FlashInferMoeEpEpilogue", "FlashInferMoeEpWeights"]


class FlashInferMoeEp:
    """One MoE layer on one EP rank.

    moe: the layer; num_experts counts physical experts on all ranks, rank r of R owns [r * E/R, (r + 1) * E/R).
    weights, epilogue: of this rank's experts. apply_topk_in_fc1: routing weights multiply the SwiGLU output before it
    is quantized, rather than the terms of the sum over top-k; kernels with `late_routing_weights` False always do that.
    ep_group: None for a single rank. kernel: None for FlashInfer's. options: further fields of FlashInfer's config.

    Building, `warmup`, calls and `destroy` are collective.

    Raises ValueError for an unknown backend or what does not fit it, before anything is built; RuntimeError where
    FlashInfer, a GPU or NVSHMEM is missing.
    """

    def __init__(
        self,
        moe: FusedMoEConfig,
        weights: FlashInferMoeEpWeights,
        epilogue: FlashInferMoeEpEpilogue | None = None,
        *,
        apply_topk_in_fc1: bool,
        ep_group: EpGroup | None = None,
        kernel: KernelFactory | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._kernel: MegaKernel | None = None  # for __del__, whatever is raised below
        spec = flashinfer_moe_ep_backend_spec(moe.moe_backend)
        epilogue = epilogue or FlashInferMoeEpEpilogue()
        group = ep_group or EpGroup(world_size=1, rank_in_group=0)
        request = KernelRequest(spec, moe, weights, epilogue, apply_topk_in_fc1, group, options or {})
        check_request(request)
        self._request = request
        self._hidden, self._top_k, self._capacity = moe.hidden_dim, moe.experts_per_token, moe.max_num_tokens
        self._ids_dtype = spec.topk_ids_dtype
        self._staged = _staged(request)
        self._ready = False
        self._kernel = (kernel or FlashInferKernel)(request)
        self._view = is_deepseek_v4(moe.routing_method) and self._kernel.supports_output_view

    @property
    def can_overlap_shared_experts(self) -> bool:
        return False

    @property
    def output_is_reduced(self) -> bool:
        return True

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        return self._ids_dtype

    @property
    def is_monolithic(self) -> bool:
        return False

    def __call__(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """The layer's output, `[T, H]` bf16; for DeepSeek-V4, where the kernel allows it, memory that the next launch
        of any layer overwrites. Launches without tokens too: the other ranks wait for this one.

        hidden_states: `[T, H]` bf16; topk_ids: `[T, top_k]` of `topk_indices_dtype`, global physical ids, negative:
        masked; topk_weights: `[T, top_k]` float32.

        Raises RuntimeError when destroyed, or captured before `warmup`; ValueError for more than max_num_tokens tokens,
        and for dtypes and shapes other than these: FlashInfer fixes them at its first launch.
        """
        kernel = self._kernel
        if kernel is None:
            raise RuntimeError("FlashInfer MoE-EP layer was destroyed")
        self._check_inputs(hidden_states, topk_ids, topk_weights)
        if not self._ready:
            if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("FlashInfer MoE-EP layer is captured before warmup(): call it on every rank first")
            self._ready = True
        return kernel.forward(hidden_states, topk_ids, topk_weights, self._staged, view=self._view)

    def _check_inputs(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        """What fits costs a microsecond: a launch at small batches is the host's time."""
        tokens = hidden_states.shape[0]
        if tokens > self._capacity:
            raise ValueError(
                f"FlashInfer MoE-EP got {tokens} tokens, but the workspace supports at most {self._capacity}"
            )
        routes, ids_dtype = (tokens, self._top_k), self._ids_dtype
        if (
            hidden_states.dtype is torch.bfloat16
            and topk_ids.dtype is ids_dtype
            and topk_weights.dtype is torch.float32
            and hidden_states.shape == (tokens, self._hidden)
            and topk_ids.shape == routes
            and topk_weights.shape == routes
        ):
            return
        for name, tensor, dtype, shape in (
            ("hidden_states", hidden_states, torch.bfloat16, (tokens, self._hidden)),
            ("topk_ids", topk_ids, ids_dtype, routes),
            ("topk_weights", topk_weights, torch.float32, routes),
        ):
            if tensor.dtype is not dtype or tensor.shape != shape:
                raise ValueError(
                    f"{name} must be {dtype} of shape {shape}, got {tensor.dtype} of shape {tuple(tensor.shape)}"
                )

    @torch.no_grad()
    def warmup(self) -> None:
        """Launch one zero row that reaches every rank, so that later launches can be captured. Nothing if destroyed."""
        if self._kernel is None:
            return
        moe, device = self._request.moe, self._request.weights.w13.device
        top_k = moe.experts_per_token
        ids = torch.arange(top_k, dtype=self._ids_dtype, device=device)[None] * (moe.num_experts // top_k)
        weights = torch.full((1, top_k), 1.0 / top_k, device=device)
        tokens = torch.zeros(1, moe.hidden_dim, dtype=torch.bfloat16, device=device)
        self._kernel.warmup(tokens, ids, weights, self._staged)
        self._ready = True

    def kernel_weights(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """fc1 weight, fc1 scales, fc2 weight, fc2 scales: contiguous, experts first, in the memory the kernel reads.

        What is written there, such as experts permuted in place, takes effect. Raises RuntimeError when destroyed.
        """
        state = self._state()
        return state.fc1_weight, state.fc1_scale, state.fc2_weight, state.fc2_scale

    def kernel_alphas(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`[E]` float32 for fc1 and fc2 where the kernel reads a factor per expert beside its weights, else None.

        For SM90 NVFP4 they are 8 * alpha. Where this is None, alphas are those of the epilogue, read at every call.
        """
        state = self._state()
        return None if state.fc1_alpha is None or state.fc2_alpha is None else (state.fc1_alpha, state.fc2_alpha)

    def expert_weight_views(self) -> tuple[torch.Tensor, ...]:
        """All that the kernel reads per expert: kernel_weights, then the alphas and norm constants that there are."""
        weights = tuple(t for t in self.kernel_weights() if t is not None)
        return weights + (self.kernel_alphas() or tuple(self._request.epilogue.vectors.values()))

    def _state(self):
        if self._kernel is None:
            raise RuntimeError("FlashInfer MoE-EP layer was destroyed")
        return self._kernel.state()

    def destroy(self) -> None:
        """Release the layer, after all work and captured graphs that use it; a second call does nothing."""
        kernel = self._kernel
        if kernel is not None:
            kernel.destroy()
            self._kernel = None

    def __del__(self) -> None:
        if self._kernel is None:
            return
        if self._request.ep_group.world_size > 1:
            what = "destroy() was not called on a FlashInferMoeEp of several ranks"
            warnings.warn(what, ResourceWarning, stacklevel=2)
            return
        with contextlib.suppress(Exception):
            self.destroy()


def _staged(request: KernelRequest) -> Vectors:
    """What every launch stages: the layer's own vectors, and ones for those that it lacks."""
    if request.spec.alphas != "per forward":
        return {}
    ones = torch.ones(request.weights.w13.shape[0], device=request.weights.w13.device)
    return dict.fromkeys(VECTORS, ones) | dict(request.epilogue.vectors)


def check_request(request: KernelRequest) -> None:
    """Raises ValueError when the weights or the epilogue do not fit the layer and its backend."""
    spec, moe, weights, epilogue = request.spec, request.moe, request.weights, request.epilogue
    size = request.ep_group.world_size
    if moe.num_experts % size:
        raise ValueError(f"num_experts must be a multiple of the EP size {size}, got {moe.num_experts}")
    if not 0 < moe.experts_per_token <= moe.num_experts:
        raise ValueError(f"experts_per_token must be 1 to num_experts {moe.num_experts}, got {moe.experts_per_token}")
    for name, multiple in (("hidden_dim", spec.hidden_alignment), ("intermediate_size", spec.alignment)):
        if (value := getattr(moe, name)) % multiple:
            raise ValueError(f"{name} must be a multiple of {multiple} for {moe.moe_backend}, got {value}")
    _check_weights(request, moe.num_experts // size)
    for name, vector in epilogue.vectors.items():
        if not (spec.norm_consts if name == "fc1_norm_const" else "nvfp4" in spec.weight_formats):
            raise ValueError(f"{name} must be None: {moe.moe_backend} has no such factor and would ignore it")
        if vector.shape != (moe.num_experts // size,) or vector.dtype is not torch.float32:
            raise ValueError(
                f"{name} must be float32 of shape {(moe.num_experts // size,)}, one per local expert, "
                f"got {vector.dtype} of shape {tuple(vector.shape)}"
            )
        require_finite_positive_scales(name, vector)
    if epilogue.input_norm_const != 1.0 and not spec.norm_consts:
        raise ValueError(f"input_norm_const must be 1: {moe.moe_backend} quantizes tokens by their own amax")
    if weights.w13_scale is None and spec.alphas == "in weights" and epilogue.vectors:
        raise ValueError(f"fc1_alpha and fc2_alpha must be None: {moe.moe_backend} makes its own for bf16 weights")


def _check_weights(request: KernelRequest, experts: int) -> None:
    moe, weights = request.moe, request.weights
    quantized = weights.w13_scale is not None
    if quantized != (weights.w2_scale is not None):
        raise ValueError("w13_scale and w2_scale must be given both or neither: quantized weights need both")
    per_element = 2 if quantized else 1
    hidden, intermediate = moe.hidden_dim, moe.intermediate_size
    for name, rows, columns in (("w13", 2 * intermediate, hidden), ("w2", hidden, intermediate)):
        expected = (experts, rows, columns // per_element)
        if (shape := tuple(getattr(weights, name).shape)) != expected:
            kind = "quantized weights (two codes per byte)" if quantized else "weights without scales"
            raise ValueError(f"{name} must have shape {expected} for {kind}, got {shape}")
        scale = getattr(weights, name + "_scale")
        if scale is not None and scale.shape[:2] != (experts, rows):
            raise ValueError(f"{name}_scale must have shape {(experts, rows, '...')}, got {tuple(scale.shape)}")
