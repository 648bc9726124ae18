"""ex2.approx, rcp.approx and div.approx: the special functions of the SwiGLU epilogue, as Hopper's unit computes them.

ex2 of a fraction and the reciprocal of a mantissa come from one interpolator, quadratic over short segments. Of the 23
bits, the top m choose a segment and its coefficients (c0, c1, c2), the others are an integer X < 2^L, L = 23 - m:

    result = floor((c0 * 2^13 + c1 * X + c2 * square(X) + bias) / 2^15)        in units of the last place
    square(X) = X^2 * 2^(15 - 2L) without the partial products of weight below 1

Squarer: X^2 is the sum of b_i * 2^(2i) and, for j < i, of b_i * b_j * 2^(i + j + 1) over X's bits b. Every term below
2^(2L - 15) is left out, before any addition, so that square(X) has 15 bits. The products and the sum are exact.

            m   L    c0 in    c1 in    c2 in    bias    c0, c1, c2 wide       results
    ex2     6  17    2^-25    2^-15    2^-11    6114    26, 16, 10 bits       [1, 2),   last place 2^-23
    rcp     7  16    2^-26    2^-16    2^-10    2023    26, 16, 10 bits       (0.5, 1], last place 2^-24

m and the widths are those that S. Oberman and M. Siu give for their interpolator in "A High-Performance Area-Efficient
Multifunction Interpolator" (ARITH 2005, doi:10.1109/ARITH.2005.7). Coefficients, squarer and bias are recovered from
measurements: the outputs for all 2^23 arguments of both functions, on an H200 (compute capability 9.0, torch
2.11.0+cu130). The rule gives every one of them, and the tests hold its digests. c1 of rcp is negative. c0 of rcp's
first segment is 2^26, which gives 1 for 1. Nothing in the outputs tells bias from a multiple of 2^13 in every c0; here
0 <= bias < 2^13. Given that, the outputs fix c0 and bias to the unit, and no c1 and c2 within three steps fit as well.

Range reduction, special values and flushing hold on an H200 for every one of 10^8 random bit patterns and of the
arguments aimed at their edges, for each function here (`python -m fp4ep.parity.special_probe`).
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch

from .fp32 import multiply_ftz

_FRACTIONS = (1 << 23) - 1
_SIGN, _NAN, _INFINITY, _MIN_NORMAL = -(1 << 31), 0x7FFFFFFF, 0x7F800000, 0x00800000  # bits of float32
_BELOW = 15  # bits of the squarer's output, and of the sum below the result's last place
#: SHA-256 of the measured outputs, little-endian float32, in the order of the arguments.
EX2_SHA256 = "b2a42c4a626469c986e33e43f16f41bde9d84de94347cd9ceaa1bd68d36bcdf0"
RCP_SHA256 = "c408381446132e07fa5581e930dc33fb790bea7ec4276ef3621e322df2492a55"


@dataclass(frozen=True)
class Interpolator:
    """One function of the unit. name: of the rows in `data/special_h200.csv`; segment_bits: m; bias: of the sum;
    last_place: exponent of the result's last place."""

    name: str
    segment_bits: int
    bias: int
    last_place: int

    def coefficients(self) -> torch.Tensor:
        """`[2^m, 3]` int64: c0, c1, c2 of each segment."""
        text = files(__package__).joinpath("data", "special_h200.csv").read_text(encoding="ascii")
        rows = [row for row in csv.DictReader(text.splitlines()) if row["function"] == self.name]
        return torch.tensor([[int(row[c]) for c in ("c0", "c1", "c2")] for row in rows])

    def table(self, coefficients: torch.Tensor) -> torch.Tensor:
        """`[2^23]` float32: the results for every argument, ascending."""
        low = 23 - self.segment_bits
        x, square = torch.arange(1 << low), _squares(low)
        results = torch.empty(len(coefficients), 1 << low)
        for row, (c0, c1, c2) in zip(results, coefficients.tolist(), strict=True):
            row.copy_((c0 << 13) + self.bias + c1 * x + c2 * square >> _BELOW)  # at most 2^24: exact in float32
        return results.view(-1).mul_(2.0**self.last_place)


EX2 = Interpolator("ex2", 6, 6114, -23)
RCP = Interpolator("rcp", 7, 2023, -24)


def _squares(width: int) -> torch.Tensor:
    """`[2^width]` int64: what the squarer gives for every X of that many bits."""
    x = torch.arange(1 << width)
    drop = 2 * width - _BELOW
    total = torch.zeros_like(x)
    for i in range(width):
        below = x & (1 << i) - 1  # its bits b_j stand at j + i + 1, one partial product each
        total += (x >> i & 1) * ((1 << 2 * i >> drop) + (below << i + 1 >> drop))
    return total


@cache
def _ex2_table() -> torch.Tensor:
    """`[2^23]` float32 in [1, 2): ex2.approx of j * 2^-23."""
    return EX2.table(EX2.coefficients())


@cache
def _rcp_table() -> torch.Tensor:
    """`[2^23]` float32 in (0.5, 1]: rcp.approx of 1 + j * 2^-23."""
    return RCP.table(RCP.coefficients())


@cache
def _bits(table: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """The entries' bit patterns, int32, on a device."""
    return table().to(device).view(torch.int32)


def _float(bits: torch.Tensor, nan: torch.Tensor) -> torch.Tensor:
    """float32 of int32 bit patterns, but 0x7FFFFFFF where nan."""
    return torch.where(nan, _NAN, bits).view(torch.float32)


def ex2_approx(x: torch.Tensor, *, ftz: bool = True) -> torch.Tensor:
    """2^x as `ex2.approx.ftz.f32` gives it. x: float32, any shape and device; returns float32.

    The argument becomes fixed point with 23 fraction bits, m = floor(|x| * 2^23). For negative x the unit takes the
    one's complement of m, so that the result can be two ulp low, except that whole numbers stay exact. Results below
    2^-126 flush to 0; from 128 on the result is infinity; NaN gives NaN (0x7FFFFFFF).

    ftz False: `ex2.approx.f32`, which has subnormal results: ptxas (CUDA 13.0, sm_90a) halves arguments below -126 and
    squares their results.
    """
    if not ftz:
        low = x < -126.0
        result = ex2_approx(torch.where(low, x * 0.5, x))
        return torch.where(low, _product(result, result), result)
    m = (x.abs().clamp(max=200.0).nan_to_num() * 2.0**23).int()  # int() floors: it is positive
    negative = torch.where(m & _FRACTIONS == 0, -m, ~m)
    fixed = torch.where(x < 0, negative, m)
    exponent = (fixed >> 23).clamp(-127, 128)
    bits = _bits(_ex2_table, x.device)[fixed & _FRACTIONS] + (exponent << 23)
    bits = torch.where(exponent < -126, 0, torch.where(exponent > 127, _INFINITY, bits))
    return _float(bits, torch.isnan(x))


def rcp_approx(x: torch.Tensor) -> torch.Tensor:
    """1/x as `rcp.approx.ftz.f32` gives it. x: float32, any shape and device; returns float32.

    Depends on the mantissa alone; the exponent is mirrored. Zero and subnormals give infinity of the same sign,
    infinity gives zero of the same sign, results below 2^-126 flush to zero, NaN gives NaN (0x7FFFFFFF).
    """
    argument = x.contiguous().view(torch.int32)
    exponent = (argument >> 23 & 0xFF) - 127
    bits = _bits(_rcp_table, x.device)[argument & _FRACTIONS] - (exponent << 23)
    bits = torch.where(bits < _MIN_NORMAL, 0, bits)
    bits = torch.where(exponent == -127, _INFINITY, bits) | argument & _SIGN
    return _float(bits, torch.isnan(x))


def div_approx(a: torch.Tensor, b: torch.Tensor, *, ftz: bool = True) -> torch.Tensor:
    """a / b as `div.approx.ftz.f32` gives it. a, b: float32, shapes broadcast, any device; returns float32.

    ptxas (CUDA 13.0, sm_90a) makes MUFU.RCP and FMUL.FTZ of it: a * rcp_approx(b), rounded to nearest even with 24 bits
    whatever the exponent, and what then is below 2^-126 is zero; so are subnormal operands. For |b| > 2^126 the
    reciprocal is 0: a finite a gives zero, an infinite one NaN. NaN is 0x7FFFFFFF.

    ftz False: `div.approx.f32`, where the product keeps subnormals and ptxas multiplies both operands by 2^24 if
    |b| < 2^-126. The range above 2^126 is the same.
    """
    if ftz:
        product = multiply_ftz(a, rcp_approx(b))
        return _float(product.view(torch.int32), torch.isnan(product))
    small = b.abs() < 2.0**-126
    return _product(torch.where(small, a * 2.0**24, a), rcp_approx(torch.where(small, b * 2.0**24, b)))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """FMUL: float32 rounded to nearest even, subnormals kept, NaN 0x7FFFFFFF."""
    product = a * b
    return _float(product.view(torch.int32), torch.isnan(product))
