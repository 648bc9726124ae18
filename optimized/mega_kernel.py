"""What the adapter drives: one layer's megakernel on one EP rank, FlashInfer's or an emulation of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .backends import FlashInferMoeEpBackendSpec
from .config import EpGroup, FusedMoEConfig
from .kernel_layouts import KernelState


@dataclass(frozen=True)
class FlashInferMoeEpWeights:
    """One rank's experts in canonical order: w13 `[E, 2I, H]` (gate rows first), w2 `[E, H, I]`, bf16, scales None.

    Or quantized: uint8 with two E2M1 codes per byte, even column low, `[E, 2I, H/2]` and `[E, H, I/2]`, and both
    scales: NVFP4 E4M3 per 16, `[E, 2I, H/16]` and `[E, H, I/16]`; MXFP4 UE8M0 per 32.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class FlashInferMoeEpEpilogue:
    """The factors beside the weights, `[E]` float32 of this rank's experts; None: ones.

    fc1 = fc1_alpha * (x W13), before clamp and SwiGLU; its output is quantized times fc1_norm_const, and
    fc2 = fc2_alpha * (... W2). input_norm_const multiplies the tokens when they are quantized.
    """

    input_norm_const: float = 1.0
    fc1_alpha: torch.Tensor | None = None
    fc2_alpha: torch.Tensor | None = None
    fc1_norm_const: torch.Tensor | None = None

    @property
    def vectors(self) -> "Vectors":
        """Those that there are, in the order of `VECTORS`."""
        given = ((name, getattr(self, name)) for name in VECTORS)
        return {name: vector for name, vector in given if vector is not None}

    @property
    def is_default(self) -> bool:
        return self.input_norm_const == 1.0 and not self.vectors


VECTORS = ("fc1_alpha", "fc2_alpha", "fc1_norm_const")
#: Some of VECTORS by name.
Vectors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class KernelRequest:
    """What a kernel is built from; checked before.

    options: further fields of FlashInfer's config class, such as `nvfp4_kperm` or `knobs`.
    """

    spec: FlashInferMoeEpBackendSpec
    moe: FusedMoEConfig
    weights: FlashInferMoeEpWeights
    epilogue: FlashInferMoeEpEpilogue
    apply_topk_in_fc1: bool
    ep_group: EpGroup
    options: Mapping[str, Any] = field(default_factory=dict)


class MegaKernel(Protocol):
    """One layer on one rank. Methods other than `state` are collective: all ranks call them, in one order."""

    #: forward can return its workspace's output without a copy.
    supports_output_view: bool

    def forward(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        vectors: Vectors,
        *,
        view: bool,
    ) -> torch.Tensor:
        """`[T, H]` bf16, summed over top-k. view: it may be memory that the next launch overwrites.

        vectors: what the launch stages. Where layers share a workspace, one that is left out stays what an earlier
        launch staged.
        """
        ...

    def warmup(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        vectors: Vectors,
    ) -> None:
        """Everything that must not happen under CUDA-graph capture: allocation, compilation, a first launch."""
        ...

    def state(self) -> KernelState:
        """The weights in the kernel's layout, views of the memory it reads: what is written there takes effect."""
        ...

    def destroy(self) -> None: ...


#: Builds the kernel of a layer; collective.
KernelFactory = Callable[[KernelRequest], MegaKernel]
