"""ex2.approx and rcp.approx: the two special functions of the SwiGLU epilogue, from measured tables.

Both units give results that no IEEE formula predicts, so their outputs were measured on an H200 over the whole
reduced range and are shipped as package data: the distance, in units of the last place, from the correctly rounded
result (`data/*.int8.xz`, one byte per entry). A checksum over the rebuilt table guards against a platform whose exp2
rounds differently.

Measured with torch 2.11.0+cu130 on one H200 (compute capability 9.0): `ex2.approx.ftz.f32` over [0, 1) in steps of
2^-24 (the unit uses floor(x * 2^23), so every second entry is kept), `rcp.approx.ftz.f32` over the 2^23 mantissas of
[1, 2); range reduction on 480,000 random arguments and on every whole number.
"""

import hashlib
import lzma
from functools import cache
from importlib.resources import files

import numpy as np
import torch

from .fp32 import canonical_nan, power_of_two

_SIZE = 1 << 23
_EX2_SHA256 = "b2a42c4a626469c986e33e43f16f41bde9d84de94347cd9ceaa1bd68d36bcdf0"
_RCP_SHA256 = "c408381446132e07fa5581e930dc33fb790bea7ec4276ef3621e322df2492a55"


def _table(name: str, rounded: np.ndarray, sha256: str) -> torch.Tensor:
    packed = files(__package__).joinpath("data", f"{name}_h200.int8.xz").read_bytes()
    bits = rounded.view(np.int32) + np.frombuffer(lzma.decompress(packed), np.int8)
    found = hashlib.sha256(bits.astype("<i4").tobytes()).hexdigest()
    if found != sha256:
        raise RuntimeError(
            f"the {name}.approx table does not rebuild to its measured values here: sha256 {found}, expected {sha256}"
        )
    return torch.from_numpy(bits).view(torch.float32)


@cache
def _ex2_table() -> torch.Tensor:
    """`[2^23]` float32 in [1, 2): ex2.approx of j * 2^-23."""
    return _table("ex2", np.exp2(np.arange(_SIZE) / _SIZE).astype(np.float32), _EX2_SHA256)


@cache
def _rcp_table() -> torch.Tensor:
    """`[2^23]` float32 in (0.5, 1]: rcp.approx of 1 + j * 2^-23."""
    return _table("rcp", 1 / (1 + np.arange(_SIZE) / _SIZE).astype(np.float32), _RCP_SHA256)


def _flush(values: torch.Tensor) -> torch.Tensor:
    """.ftz: what is below float32's normal range becomes zero of the same sign."""
    return torch.where(values.abs() < 2.0**-126, values * 0.0, values)


def ex2_approx(x: torch.Tensor) -> torch.Tensor:
    """2^x as `ex2.approx.ftz.f32` gives it. x: float32, any shape; returns float32.

    The argument becomes fixed point with 23 fraction bits, m = floor(|x| * 2^23). For negative x the unit takes the
    one's complement of m, so that the result can be two ulp low, except that whole numbers stay exact. Results below
    2^-126 flush to 0; from 128 on the result is infinity; NaN gives NaN (0x7FFFFFFF).
    """
    m = (x.double().abs() * _SIZE).nan_to_num(0.0).clamp(max=2.0**40).long()  # long() floors: it is positive
    whole = m & (_SIZE - 1) == 0
    fixed = torch.where(x < 0, -m - (~whole).long(), m)
    exponent = (fixed >> 23).clamp(-1000, 1000)
    result = _flush(_ex2_table()[fixed & (_SIZE - 1)].double() * power_of_two(exponent))
    return canonical_nan(torch.where(torch.isnan(x), x, result.float()))


def rcp_approx(x: torch.Tensor) -> torch.Tensor:
    """1/x as `rcp.approx.ftz.f32` gives it. x: float32, any shape; returns float32.

    Depends on the mantissa alone; the exponent is mirrored. Zero and subnormals give infinity of the same sign,
    infinity gives zero of the same sign, results below 2^-126 flush to zero, NaN gives NaN (0x7FFFFFFF).
    """
    x = _flush(x)
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23 & 0xFF) - 127
    result = _flush(_rcp_table()[bits & (_SIZE - 1)].double() * power_of_two(-exponent)).float()
    regular = torch.isfinite(x) & (x != 0)
    return canonical_nan(torch.where(regular, result.copysign(x), 1 / x))
