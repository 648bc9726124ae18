"""Number formats as data: FP4 E2M1, FP8 E4M3 and E5M2, and the scale format UE8M0.

One frozen :class:`Format` describes each; one `decode` and one `encode` serve them all. Sources: OCP
Microscaling Formats (MX) v1.0 for E2M1 and UE8M0, OCP 8-bit Floating Point (OFP8) v1.0 for E4M3 and E5M2,
the PTX ISA `cvt` instruction for saturation and NaN.

A *code* is the bit pattern as an integer (uint8). Two E2M1 codes share a byte, the even element in the low
nibble (`pack_e2m1`, `unpack_e2m1`).
"""

from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch


class Overflow(Enum):
    """What `encode` does with magnitudes that round beyond the largest finite value, infinity included."""

    SATURATE = "the largest finite value, sign kept (PTX .satfinite)"
    NAN = "NaN, sign kept: torch's CUDA cast to E4M3 (464 still rounds to 448, the next float does not)"
    INF = "infinity, sign kept: torch's cast to E5M2"


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with at most 8 bits.

    Values: (-1)^sign * 2^(max(field, 1) - bias) * (implicit + mantissa / 2^mantissa_bits), where the implicit
    bit is 0 for field 0 (subnormals and zero). UE8M0 has no sign, no mantissa, no zero and no subnormals.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int  #: code of the largest finite magnitude
    nan_code: int  #: what NaN becomes: the canonical NaN, or `max_code` where the format has none
    inf_code: int | None = None
    dtype: torch.dtype | None = None  #: torch's dtype for one code per byte
    signed: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def bits(self) -> int:
        return self.exponent_bits + self.mantissa_bits + self.signed

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value, shared by the subnormals."""
        return 1 - self.bias if self.mantissa_bits else -self.bias

    @property
    def max(self) -> float:
        """Largest finite value."""
        return float(self.values[self.max_code])

    @property
    def reciprocal_max(self) -> float:
        """float32 of 1 / max. The kernels multiply by it instead of dividing by max: one ulp apart for some values."""
        return float(torch.tensor(1.0) / torch.tensor(self.max))

    @property
    def values(self) -> torch.Tensor:
        """`[2^bits]` float32: the value of every code, exactly."""
        return _values(self)


E2M1 = Format("E2M1", 2, 1, bias=1, max_code=0x7, nan_code=0x7)
E4M3 = Format("E4M3", 4, 3, bias=7, max_code=0x7E, nan_code=0x7F, dtype=torch.float8_e4m3fn)
E5M2 = Format("E5M2", 5, 2, bias=15, max_code=0x7B, nan_code=0x7F, inf_code=0x7C, dtype=torch.float8_e5m2)
UE8M0 = Format("UE8M0", 8, 0, bias=127, max_code=0xFE, nan_code=0xFF, signed=False, dtype=torch.float8_e8m0fnu)


@cache
def _values(fmt: Format) -> torch.Tensor:
    table = []
    for code in range(1 << fmt.bits):
        magnitude = code & ~fmt.sign_bit
        field, mantissa = divmod(magnitude, 1 << fmt.mantissa_bits)
        if fmt is UE8M0:
            value = 2.0 ** (field - fmt.bias)
        else:
            significand = (field > 0) + mantissa / (1 << fmt.mantissa_bits)
            value = significand * 2.0 ** (max(field, 1) - fmt.bias)
        if magnitude > fmt.max_code:
            value = float("inf") if magnitude == fmt.inf_code else float("nan")
        table.append(-value if code & fmt.sign_bit else value)
    return torch.tensor(table, dtype=torch.float32)


def cast_overflow(fmt: Format) -> Overflow:
    """What torch's eager cast does on CUDA (2.11): infinity where the format has one, NaN where not."""
    return Overflow.NAN if fmt.inf_code is None else Overflow.INF


def decode(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Values of `codes`, exactly.

    codes: any shape, uint8 (or a one-byte float dtype, viewed as its bytes). Returns float32 of that shape.
    Every NaN code gives NaN; -0 keeps its sign. Raises ValueError for wider dtypes and, in E2M1, codes above 15.
    """
    if codes.dtype.itemsize != 1:
        raise ValueError(f"codes must be uint8 or a one-byte float dtype, got {codes.dtype}")
    codes = codes.view(torch.uint8)
    if fmt.bits < 8 and codes.numel() and int(codes.max()) >> fmt.bits:
        raise ValueError(f"codes must be below {1 << fmt.bits} in {fmt}, got {int(codes.max())}")
    return fmt.values[codes.int()]


def encode(values: torch.Tensor, fmt: Format, overflow: Overflow = Overflow.SATURATE) -> torch.Tensor:
    """Round to the nearest representable value, ties to the even code. Returns uint8 codes.

    values: any shape, float32 (bf16 and fp16 convert exactly). One rounding, straight from float32: a detour over
    bf16 would round twice.

    Zero keeps its sign; so does a negative value that rounds to zero. Magnitudes beyond the largest finite value
    plus half a step follow `overflow`. NaN gives the canonical positive NaN, except under `Overflow.NAN` and
    `Overflow.INF`, where torch's casts keep its sign; E2M1 has no NaN and gives +6, as PTX cvt.satfinite does.

    Raises ValueError for UE8M0, whose rounding is a scale rule: see `fp4ep.reference.scales`.
    """
    if fmt is UE8M0:
        raise ValueError("fmt UE8M0 has no rounding of its own: choose a ScaleRule in fp4ep.reference.scales")
    has_nan = fmt.nan_code != fmt.max_code
    beyond = {
        Overflow.SATURATE: fmt.max_code,
        Overflow.NAN: fmt.nan_code if has_nan else None,
        Overflow.INF: fmt.inf_code,
    }[overflow]
    if beyond is None:
        raise ValueError(f"overflow {overflow.name} is not possible in {fmt}: it has no such code")
    flat = values.reshape(-1)
    codes = torch.empty(flat.shape, dtype=torch.uint8)
    for part, out in zip(flat.split(_CHUNK), codes.split(_CHUNK), strict=True):
        out.copy_(_encode(part.float(), fmt, beyond, keep_nan_sign=overflow is not Overflow.SATURATE))
    return codes.reshape(values.shape)


#: Elements encoded at a time: keeps the temporaries in cache.
_CHUNK = 1 << 16


def _encode(values: torch.Tensor, fmt: Format, beyond: int, keep_nan_sign: bool) -> torch.Tensor:
    nan = torch.isnan(values)
    magnitude = torch.where(nan, 0.0, values.abs().clamp(max=2 * fmt.max))
    # One step is 2^(e - mantissa_bits). Dividing by a power of two is exact, so `round` is the only rounding; a
    # carry into the next binade is carried by the integer addition below. Exponents come straight from the float32
    # bits: float32's own subnormals are far below half the smallest step of every format here.
    exponent = ((magnitude.view(torch.int32) >> 23) - 127).clamp(min=fmt.min_exponent)
    step = ((exponent + (127 - fmt.mantissa_bits)) << 23).view(torch.float32)
    codes = ((exponent - fmt.min_exponent) << fmt.mantissa_bits) + torch.round(magnitude / step).int()
    codes = torch.where(codes > fmt.max_code, beyond, codes)
    sign = torch.signbit(values) * fmt.sign_bit
    if not keep_nan_sign:
        sign = torch.where(nan, 0, sign)
    return torch.where(nan, fmt.nan_code, codes) | sign


def round_to(values: torch.Tensor, fmt: Format, overflow: Overflow = Overflow.SATURATE) -> torch.Tensor:
    """`decode(encode(values))`: the nearest representable values, as float32."""
    return decode(encode(values, fmt, overflow), fmt)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Two codes per byte along the last dimension, even element low: `[..., K]` uint8 -> `[..., K/2]` uint8.

    Raises ValueError when K is odd or a code needs more than 4 bits.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: last dimension must be even to pack two per byte, got {codes.shape[-1]}")
    if bool((codes > 15).any()):
        raise ValueError(f"codes must be 4-bit (0..15), got {int(codes.max())}")
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_e2m1`: `[..., K/2]` uint8 -> `[..., K]` uint8 codes."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
