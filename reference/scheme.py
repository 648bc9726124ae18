"""A scheme: everything that decides the bits of one megakernel, as one frozen record.

The records themselves are in `schemes.py`; `moe.py` runs any of them. Nothing here computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch

from .formats import Format, Overflow
from .tensor_core import TensorCore


class Evidence(Enum):
    """How a claim of equality with a kernel is known. Used in code, docs and reports."""

    VERIFIED = "verified"  #: equal bit for bit to a recording of the named hardware and version
    MODELLED = "modelled"  #: follows a published rule that was not checked on that hardware
    BOUNDED = "bounded"  #: differs within a derived bound


class Weights(Enum):
    """What a kernel makes of the expert weights: the tensor core's operand and the scale beside it."""

    NVFP4 = "E4M3(code * block_scale / 8); 8 * global_scale per expert"
    #: The global scale is the kernel's fc1_alpha or fc2_alpha: it multiplies the accumulator, before the clamp.
    NVFP4_BLOCK_SCALED = "E2M1 codes and E4M3 block scales as they are; global_scale per expert"
    MXFP4 = "code * 2^offset, exact within 11 octaves of the expert's largest scale; 2^n per expert"
    FP8_PER_EXPERT = "FP8 codes; one float32 scale per expert"
    FP8_BLOCK_128 = "FP8 codes; a float32 scale per 128 x 128 block of the kernel's row order"
    FP8_BLOCK_128_APART = "FP8 codes; a float32 scale per 128 x 128 block, gate rows apart from up rows; 1 for zeros"
    BF16 = "bf16, no scale"


class ScaleSource(Enum):
    AMAX = "amax of the block, times float32(1/max)"
    #: Compiled with nvcc's -use_fast_math: float32 subnormals are zeros, so that the scale of a tiny block can be 0.
    AMAX_OR_ONE = "amax of the block's numbers, NaN not seen, times float32(1/max); 1 for a block of zeros"
    STATIC = "a constant from calibration"


class Apply(Enum):
    """How a scale is applied before rounding. They differ by a rounding, so near ties by a code.

    For scales from the amax of bf16 values no E4M3 code tells them apart; for static scales and float32 values some do.
    """

    DIVIDE = "one IEEE division"
    RECIPROCAL = "multiplication by float32(1 / float32(scale))"
    #: What torch's CUDA division by a Python number does (2.11). Differs where the scale is no float32.
    RECIPROCAL_OF_NUMBER = "multiplication by float32(1 / scale), the scale a Python number"
    #: Division under -use_fast_math, then fmax and fmin, of which a NaN comes out as the first of the two limits.
    DIVIDE_APPROX = "multiplication by rcp.approx(scale), float32 subnormals as zeros; NaN becomes -max"


class Place(Enum):
    """Which scales multiply the accumulator at a given point of a GEMM."""

    NONE = "none"
    ACTIVATION = "activation scale"
    WEIGHT = "weight scale"
    BOTH = "float32(activation scale * weight scale)"


class KOrder(Enum):
    """Which K elements share a tensor-core instruction."""

    NATURAL = "ascending"
    KPERM64 = "within each 64: elements 16q + (0..7) first, then 16q + (8..15)"


class Swiglu(Enum):
    """SwiGLU of gate and up, after the clamp. Every product is a float32."""

    UP_FIRST = "up * gate * sigmoid(gate) * routing weight"
    #: Compiled with -use_fast_math: float32 subnormals are zeros.
    FAST_BF16 = "bf16(gate / (1 + 2^(-gate * log2 e)) * up), of gate and up rounded to bf16, by div.approx"


class Combine(Enum):
    """Which top-k slots are summed, and how. In float32 means: slots ascending, rounded to bf16 once."""

    LIVE_SLOTS = "in float32 from +0, masked slots skipped"
    #: A masked slot adds whatever an earlier launch left there; a fresh workspace holds zeros. A sum of -0 stays -0.
    ALL_SLOTS = "in float32 from the first slot's term, masked slots included"
    #: Not deterministic on a GPU, where routes add in order of arrival. The reference takes slots ascending, one of the
    #: possible orders.
    ON_ARRIVAL = "in bf16 from +0, masked slots skipped, rounded at every addition"
    #: The routing weight comes in here, after fc2 and its rounding to bf16, and not with the SwiGLU output.
    WEIGHTED = "in float32 from +0, masked slots skipped, fma(term, routing weight, sum)"
    #: The number of EP ranks enters the arithmetic. On a GPU the slots of one rank add in order of arrival, which shows
    #: in no bit unless terms are many orders of magnitude apart; the reference takes slots ascending.
    GROUPED = "in float32 over each rank's slots, rounded to the wire's format, then in float32 over ranks ascending"
    #: Here and below float32 subnormals are zeros: compiled with -use_fast_math.
    WEIGHTED_ROUTES = "routing weight * term, rounded to the wire's format, then fma(code, scale, sum) over live slots"
    WEIGHTED_GROUPS = "fma(routing weight, term, sum) over each rank's slots, then as before over ranks ascending"

    @property
    def weighted(self) -> bool:
        """Whether the routing weight comes in here, and not with the SwiGLU output."""
        return self in (Combine.WEIGHTED, Combine.WEIGHTED_ROUTES, Combine.WEIGHTED_GROUPS)


@dataclass(frozen=True)
class ActivationQuant:
    """float32 rows to FP8 codes and float32 scales, or to FP4 codes and FP8 scales.

    scale = max(float32(amax * float32(1/element.max)), 1e-30) per block, but see `source`; code = element(value applied
    to scale). With a scale format there is a norm constant and another rule, see `quantize_activation`.
    """

    element: Format
    block: int | None  #: elements sharing a scale; None: the whole row
    source: ScaleSource
    apply: Apply
    overflow: Overflow
    #: Blocks with 0 < amax < 448e-30 use max(448 / amax, bounded) as the factor and its reciprocal as the scale,
    #: so that tiny rows keep their digits.
    tiny_path: bool = False
    scale: Format | None = None  #: format of the scales, which the tensor core reads; None: float32
    nan_scale: bool = False  #: a block of NaN alone has a NaN scale, not 0; asked only where scales have a format


@dataclass(frozen=True)
class Gemm:
    """One expert GEMM: chains of tensor-core instructions, promoted to float32 between chains.

    Each chunk of K is a chain from zero, t. Promotion: acc = fma(t, s, acc) with s from `promote` (NONE: s = 1).
    At the end out = float32(acc * s) with s from `epilogue`.
    """

    core: TensorCore
    chunk: int | None  #: K elements per chain; None: all of K
    promote: Place
    epilogue: Place
    k_order: KOrder = KOrder.NATURAL


@dataclass(frozen=True)
class Scheme:
    """One row of the registry. `name` is FlashInfer's registry name; `knobs` tells its variants apart."""

    name: str
    #: knob of FlashInfer's config -> the values that select this record; the first is written in reports. A knob that
    #: changes no bit here is left out.
    knobs: Mapping[str, tuple] = field(hash=False)
    weights: Weights
    stage: ActivationQuant | None  #: quantization of hidden_states; None: bf16 as it is
    fc1: Gemm
    requantize: ActivationQuant | None  #: quantization of the SwiGLU output; None: round to bf16
    fc2: Gemm
    combine: Combine
    hidden_multiple: int  #: alignment of H
    intermediate_multiple: int  #: alignment of I
    packed_weights: bool  #: the kernel takes quantized weights with their scales
    dense_weights: tuple[torch.dtype, ...]  #: dtypes of unquantized weights that the backend takes (and quantizes)
    gate_up_clamp: float | None
    fc1_activation_dequant_scale: float = 1.0  #: static scale of `stage` (ScaleSource.STATIC)
    fc2_activation_dequant_scale: float = 1.0  #: static scale of `requantize`
    #: Norm constant of `stage` where its scales have a format; that of `requantize` is MoEWeights.fc1_norm_const.
    input_norm_const: float = 1.0
    nan_clamps: bool = False  #: the clamp turns NaN into the limit (PTX min without .NaN); else NaN passes
    wire: Format | None = None  #: of a rank's sums under Combine.GROUPED, one UE8M0 scale per 32; None: bf16
    wire_rule: ActivationQuant | None = None  #: the same under WEIGHTED_ROUTES and WEIGHTED_GROUPS; None: bf16
    swiglu: Swiglu = Swiglu.UP_FIRST
    quantized_inputs: bool = True  #: tokens may come quantized, with their scales
    evidence: Evidence = Evidence.MODELLED

    def __str__(self) -> str:
        off = [k for k, v in self.knobs.items() if v[0] is False and k.startswith("enable_")]
        shown = [v[0] if isinstance(v[0], str) else f"{k}={v[0]}" for k, v in self.knobs.items() if k not in off]
        return f"{self.name}[{','.join(shown)}]" if shown else self.name
