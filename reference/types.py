"""What goes in and out of `moe_forward`: weights, one rank's tokens, and the trace of stages."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch


@dataclass(frozen=True)
class MoEWeights:
    """Expert weights of the whole layer in canonical order; rank r of R owns experts [r * E/R, (r + 1) * E/R).

    Dense: w13 `[E, 2I, H]` (gate rows first, then up rows) and w2 `[E, H, I]`, bf16 (where the backend quantizes them
    also fp16 or float32); every scale None.
    NVFP4: uint8, two E2M1 codes per byte, even K low: w13 `[E, 2I, H/2]`, w2 `[E, H, I/2]`; w13_scale `[E, 2I, H/16]`,
    w2_scale `[E, H, I/16]`, E4M3 codes; global scales float32, scalar or `[E]`, decode direction (None: 1).
    Where the tensor core scales blocks itself (SM100), global scales are the kernel's fc1_alpha and fc2_alpha and may
    stand beside dense weights too; fc1_norm_const (float32, scalar or `[E]`; None: 1) multiplies the SwiGLU output as
    it is quantized, and its reciprocal belongs in w2_global_scale.
    MXFP4: the same payload; scales UE8M0 codes per 32, no global scale.
    FP8: codes `[E, 2I, H]` and `[E, H, I]` (uint8 or torch float8); scales float32, `[E]` per expert or
    `[E, N/128, K/128]` blockwise, in the row order of the kernel (see `quantize_fp8_block_128`). FlashInfer takes these
    as transformed weights only.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w13_global_scale: torch.Tensor | None = None
    w2_global_scale: torch.Tensor | None = None
    fc1_norm_const: torch.Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def quantized(self) -> bool:
        return self.w13_scale is not None

    def of_experts(self, index: slice | torch.Tensor) -> "MoEWeights":
        """The weights of some experts. A scale of a single element is that of all experts and stays as it is."""
        given = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        return MoEWeights(**{name: t if t.numel() == 1 else t[index] for name, t in given.items()})


@dataclass(frozen=True)
class MoEInputs:
    """The tokens of one EP rank.

    hidden_states: `[T, H]` bf16; or FP8 codes (torch float8 dtype) that were quantized before, with their `scales`.
    topk_ids: `[T, top_k]` int64 or int32, global expert ids; negative means masked: that slot adds nothing.
    topk_weights: `[T, top_k]` float32.
    scales: None for bf16; beside FP8 codes float32 `[T, 1]` (per token) or `[T, H/128]` (blockwise). Per-tensor FP8 has
    a static scale and ignores them, as the kernel does.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    scales: torch.Tensor | None = None


class Exactness(Enum):
    """How the numbers of a stage come about."""

    EXACT = "IEEE and integer operations only"
    TABLED = "uses measured tables of hardware functions"
    MODELLED_VERIFIED = "uses a hardware model that recordings confirm"
    MODELLED_UNVERIFIED = "uses a published hardware model, not confirmed on that hardware"


@dataclass(frozen=True)
class Stage:
    """One named step on one EP rank.

    | stage      | tensors                                                                                          |
    |------------|--------------------------------------------------------------------------------------------------|
    | stage      | values `[T, H]` in the operand's dtype, scales `[T, blocks]`: the quantized tokens               |
    | dispatch   | values, scales, topk_weights, expert, source_rank, token, slot: one row per received route       |
    | fc1        | gate, up `[routes, I]` float32, descaled (under Swiglu.FAST_BF16 rounded to bf16)                |
    | activation | values `[routes, I]` float32: SwiGLU times the routing weight (not if `Combine.weighted`)        |
    | requantize | values `[routes, I]` in the operand's dtype, scales `[routes, blocks]`                           |
    | fc2        | values `[routes, H]` bf16, descaled: what travels back                                           |
    | combine    | terms `[T, top_k, H]` bf16 as they arrived, values `[T, H]` bf16: the output                     |

    `moe_layer_forward` adds one before and, where something is scaled or added behind the kernel, one behind:

    | route      | topk_ids, topk_weights `[T, top_k]`, scores `[T, E]`                                             |
    | output     | values `[T, H]` bf16; shared `[T, H]` bf16: what shared experts add                              |

    The operand's dtype is torch's FP8 dtype, with float32 scales, or bf16, with scales of 1. FP4 operands are held one
    value to an element in torch.float8_e4m3fn, which has every E2M1 value, beside scales in their own format, for NVFP4
    torch.float8_e4m3fn too.
    """

    name: str
    rank: int
    exactness: Exactness
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trace:
    """All stages of a run, in order. Route rows are sorted by (expert, source rank, token, slot)."""

    stages: tuple[Stage, ...]

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __getitem__(self, key: str | tuple[str, int]) -> Stage:
        """`trace["fc1"]` for rank 0, `trace["fc1", 2]` for rank 2. Raises KeyError naming what there is."""
        name, rank = (key, 0) if isinstance(key, str) else key
        for stage in self.stages:
            if (stage.name, stage.rank) == (name, rank):
                return stage
        raise KeyError(f"no stage {name!r} on rank {rank}; there are {[(s.name, s.rank) for s in self.stages]}")
