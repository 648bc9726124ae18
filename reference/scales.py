"""UE8M0 block scales: the rules in use, side by side. They differ; a scheme must name its own.

For a block with largest magnitude `amax` and an element format with largest value `max` and largest exponent `emax`
(E2M1: 6 and 2; E4M3: 448 and 8):

    FLOOR     2^(floor(log2 amax) - emax)                      OCP MX v1.0, section 6.3; the top of the block may clip
    CEIL      2^(ceil(log2 amax) - emax)                       never clips; wastes a binade unless amax is 2^n
    RCEIL     amax / max rounded up to a power of two          PTX cvt.rp.ue8m0x2; the smallest that never clips
    EVEN      FLOOR of amax rounded to the element's mantissa  torchao ScaleCalculationMode.EVEN, Quark "even"
    ROUND_UP  as RCEIL, from float32(amax * float32(1 / max))  FlashInfer's SM90 quantized combine
"""

from enum import Enum

import torch

from .formats import UE8M0, Format
from .fp32 import floor_log2


class ScaleRule(Enum):
    FLOOR = "floor"
    CEIL = "ceil"
    RCEIL = "rceil"
    EVEN = "even"
    ROUND_UP = "round_up"


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)


def _ceil_log2(values: torch.Tensor) -> torch.Tensor:
    mantissa = values.double().view(torch.int64) & ((1 << 52) - 1)
    return floor_log2(values) + (mantissa != 0).int()


def ue8m0_scale(amax: torch.Tensor, element: Format, rule: ScaleRule) -> torch.Tensor:
    """UE8M0 codes for block maxima. amax: float32, non-negative, any shape. Returns uint8 of that shape.

    Exponents outside [-127, 127] take the nearest end, so amax = 0 gives code 0 (2^-127) and never a division by zero.
    NaN and infinity give code 255 (NaN): a block that holds one cannot be trusted, and E2M1 could not show it. ROUND_UP
    mirrors its kernel's integer arithmetic instead: NaN and infinity give 254, a subnormal quotient gives 1.
    """
    amax = amax.float()
    top = floor_log2(torch.tensor(element.max))
    if rule is ScaleRule.FLOOR:
        exponent = floor_log2(amax) - top
    elif rule is ScaleRule.CEIL:
        exponent = _ceil_log2(amax) - top
    elif rule is ScaleRule.RCEIL:
        exponent = _ceil_log2(amax / element.max)
    elif rule is ScaleRule.EVEN:
        # Add half of the element's last mantissa bit to the float32 bits of amax; a carry reaches the exponent.
        half = 1 << (23 - element.mantissa_bits - 1)
        exponent = ((_bits(amax) + half) >> 23) - 127 - top
    else:
        bits = _bits(amax * element.reciprocal_max)
        return ((bits >> 23) + (bits & 0x7FFFFF != 0)).clamp(max=UE8M0.max_code).to(torch.uint8)
    codes = (exponent + UE8M0.bias).clamp(0, UE8M0.max_code)
    return torch.where(torch.isfinite(amax), codes, UE8M0.nan_code).to(torch.uint8)
