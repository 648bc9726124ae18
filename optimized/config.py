"""What a layer and its deployment look like to the optimized side: vLLM's configuration, as plain records.

Names, numbers and texts are those of vLLM 0.33.0 (`fused_moe/config.py`, `fused_moe/activation.py`,
`quantization/utils/quant_utils.py`). Nothing here reads a process-wide setting. Code that takes these records takes
vLLM's own objects as well: enums are compared by name or value (`routing_method_name`, `activation_name`), quantization
keys by structure (`quant_key_signature`), and the rest by attribute.
"""

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import torch
from torch.fx.graph import dtype_abbrs


class RoutingMethodType(IntEnum):
    """How the router turns logits into top-k weights. The numbers are FlashInfer's up to 9, vLLM's own from 100."""

    Default = 0
    Renormalize = 1
    DeepSeekV3 = 2
    Llama4 = 3
    RenormalizeNaive = 4
    TopK = 5
    SigmoidRenorm = 6
    MiniMax2 = 7
    Sigmoid = 8
    Unspecified = 9
    DeepseekV4 = 100
    Custom = 101
    Simulated = 102


def routing_method_name(method: Any) -> str:
    """The name of a routing method: ours, vLLM's, a plain number or the name itself.

    Raises ValueError for a number that has no name.
    """
    if isinstance(method, str):
        return method
    return getattr(method, "name", None) or RoutingMethodType(method).name


class MoEActivation(Enum):
    """vLLM's activations. `_no_mul`: no gate, so w13 holds one projection only."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"
    SWIGLUOAI = "swigluoai"
    SITU = "situ"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SWIGLUSTEP = "swiglustep"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"

    @property
    def is_gated(self) -> bool:
        return not self.value.endswith("_no_mul")


def activation_name(activation: Any) -> str:
    """An activation's value ("silu"): of ours, of vLLM's, or of the string itself."""
    return str(getattr(activation, "value", activation))


class FusedMoEActivationFormat(Enum):
    """Rows by token, or by expert and slot. The values are one-tuples, as in vLLM, whose texts print them."""

    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


class GroupShape(NamedTuple):
    """How many rows and columns share a scale; -1 means all."""

    row: int
    col: int


PER_TENSOR = GroupShape(-1, -1)
PER_TOKEN = GroupShape(1, -1)
PER_CHANNEL = GroupShape(-1, 1)
_SHAPE_NAMES = {PER_TENSOR: "per_tensor", PER_TOKEN: "per_token", PER_CHANNEL: "per_channel"}


@dataclass(frozen=True)
class ScaleDesc:
    """One level of scales: their dtype, whether they are known before the data, and what shares one."""

    dtype: torch.dtype
    static: bool
    group_shape: GroupShape

    def __str__(self) -> str:
        shape = _SHAPE_NAMES.get(self.group_shape, str(self.group_shape))
        return f"{dtype_abbrs[self.dtype]},{'static' if self.static else 'dynamic'},{shape}"


@dataclass(frozen=True)
class QuantKey:
    """A quantization scheme: storage dtype of the values, scales, second-level scales. Prints as vLLM's."""

    dtype: torch.dtype
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True

    def __str__(self) -> str:
        scale2 = f"scale2({self.scale2})," if self.scale2 else ""
        symmetry = "symmetric" if self.symmetric else "asymmetric"
        return f"QuantKey({dtype_abbrs[self.dtype]},scale({self.scale}),{scale2}{symmetry})"


def quant_key_signature(key: Any) -> tuple | None:
    """What two keys of one scheme share, whichever class they are of: ours or vLLM's. None stays None."""
    if key is None:
        return None
    levels = [None if s is None else (s.dtype, s.static, tuple(s.group_shape)) for s in (key.scale, key.scale2)]
    return (key.dtype, *levels, key.symmetric)


_TENSOR = ScaleDesc(torch.float32, True, PER_TENSOR)
kNvfp4Static = QuantKey(torch.uint8, ScaleDesc(torch.float8_e4m3fn, True, GroupShape(1, 16)), _TENSOR)
kNvfp4Dynamic = QuantKey(torch.uint8, ScaleDesc(torch.float8_e4m3fn, False, GroupShape(1, 16)), _TENSOR)
kMxfp4Static = QuantKey(torch.uint8, ScaleDesc(torch.uint8, True, GroupShape(1, 32)))
kFp8StaticTensorSym = QuantKey(torch.float8_e4m3fn, _TENSOR)
kFp8Static128BlockSym = QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, True, GroupShape(128, 128)))

#: Weight formats by signature. Weights without a key are bf16.
_WEIGHT_FORMATS = {
    None: "bf16",
    quant_key_signature(kNvfp4Static): "nvfp4",
    quant_key_signature(kMxfp4Static): "mxfp4",
    quant_key_signature(kFp8StaticTensorSym): "fp8",
    quant_key_signature(kFp8Static128BlockSym): "fp8",
}


def weight_format(key: Any) -> str | None:
    """ "nvfp4", "mxfp4", "fp8" or, for None, "bf16"; None for any other key."""
    return _WEIGHT_FORMATS.get(quant_key_signature(key))


@dataclass
class FusedMoEParallelConfig:
    """How a layer is spread. Not frozen: `bind_passthrough_all2all_backend` writes `all2all_backend`, as in vLLM."""

    use_ep: bool = True
    ep_size: int = 1
    ep_rank: int = 0
    all2all_backend: str = "allgather_reducescatter"
    use_batched_activation_format: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.ep_rank < self.ep_size:
            raise ValueError(f"ep_rank is {self.ep_rank}, must be in [0, {self.ep_size})")


@dataclass(frozen=True, kw_only=True)
class FusedMoEConfig:
    """One MoE layer. Sizes in elements; `num_experts` counts the physical experts of all ranks, redundant ones too.

    intermediate_size is the width after SwiGLU, whole, not that of a shard. max_num_tokens is the most rows one rank
    brings to a forward. swiglu_limit clamps gate from above and up on both sides.

    Raises ValueError where a size is not positive or the ranks do not divide the experts.
    """

    moe_backend: str
    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size: int
    max_num_tokens: int
    routing_method: RoutingMethodType = RoutingMethodType.Unspecified
    activation: MoEActivation = MoEActivation.SILU
    in_dtype: torch.dtype = torch.bfloat16
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    has_bias: bool = False
    is_lora_enabled: bool = False
    skip_final_all_reduce: bool = False
    moe_parallel_config: FusedMoEParallelConfig = field(default_factory=FusedMoEParallelConfig)

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "hidden_dim", "intermediate_size", "max_num_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be positive")
        if self.num_experts % self.moe_parallel_config.ep_size:
            raise ValueError(f"num_experts is {self.num_experts}, not a multiple of {self.moe_parallel_config.ep_size}")

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.moe_parallel_config.ep_size

    @property
    def is_act_and_mul(self) -> bool:
        return self.activation.is_gated


@dataclass(frozen=True, eq=False)
class FusedMoEQuantConfig:
    """A layer's quantization tensors, as far as a megakernel could use them. Compared by identity.

    g1_alphas, g2_alphas: `[E_local]` weight global scales as dequantization factors, finite and positive; usually the
    layer's own parameters `w13_weight_scale_2` and `w2_weight_scale_2`. a1_gscale, a2_gscale: 1 / input scale, not
    read by these backends. Both alphas None: the checkpoint has no global scales (MXFP4, bf16).
    """

    g1_alphas: torch.Tensor | None = None
    g2_alphas: torch.Tensor | None = None
    a1_gscale: torch.Tensor | None = None
    a2_gscale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None


@dataclass
class Deployment:
    """What vLLM looks up in its process-wide configuration, given explicitly.

    weight_transfer: weights are replaced while serving. capability: (major, minor) of the device, None: ask torch.
    batch_invariant: outputs must not depend on what else is in the batch (VLLM_BATCH_INVARIANT). Not frozen, because
    `bind_passthrough_all2all_backend` writes `all2all_backend`.
    """

    weight_transfer: bool = False
    enable_dbo: bool = False
    enable_eplb: bool = False
    capability: tuple[int, int] | None = None
    all2all_backend: str = "allgather_reducescatter"
    batch_invariant: bool = False


@dataclass(frozen=True)
class EpGroup:
    """The expert-parallel group as vLLM's `get_ep_group()` shows it. device_group: a torch process group, or None."""

    world_size: int
    rank_in_group: int
    device_group: Any = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank_in_group < self.world_size:
            raise ValueError(f"rank_in_group is {self.rank_in_group}, must be in [0, {self.world_size})")
