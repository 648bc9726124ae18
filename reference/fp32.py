"""IEEE float32 arithmetic, made explicit.

torch's float32 `+ - * /` on the CPU round to nearest even and keep subnormals, which is what the kernels' `.rn`
instructions do. (One trap: `number / tensor` is a reciprocal and a product, two roundings; only `1 / tensor` is exact
division.) What torch lacks is here: a fused multiply-add that rounds once, truncation, exponents.
"""

import torch


def floor_log2(values: torch.Tensor) -> torch.Tensor:
    """floor(log2(|x|)) as int32, exact for float32 subnormals. Zero gives -1023, infinity and NaN give 1024."""
    return ((values.double().view(torch.int64) >> 52 & 0x7FF) - 1023).int()


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as float64, exactly, for integer exponents in [-1022, 1023]: assembled from its bits."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def canonical_nan(values: torch.Tensor) -> torch.Tensor:
    """Every NaN as the GPU writes it: all bits set but the sign, 0x7FFFFFFF in float32 and 0x7FFF in bf16."""
    integer = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[values.dtype]
    nan = torch.tensor(torch.iinfo(integer).max, dtype=integer).view(values.dtype)
    return torch.where(torch.isnan(values), nan, values)


def flush(values: torch.Tensor) -> torch.Tensor:
    """.ftz: float32 below the normal range, 2^-126, becomes zero of the same sign."""
    return torch.where(values.abs() < 2.0**-126, values * 0.0, values)


def multiply_ftz(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a * b in float32 with .ftz (SASS FMUL.FTZ). Shapes broadcast; any device; NaN as torch makes it.

    Operands below 2^-126 count as zeros. The product is rounded to 24 bits whatever its exponent, and flushed if it is
    below 2^-126 then: just under it, gradual underflow would round more products up. Measured on an H200
    (`python -m fp4ep.parity.special_probe`, quotients at 2^-126).
    """
    a, b = flush(a), flush(b)
    product = a * b
    rounded = (a.double() * b.double() * 2.0**64).float()
    return torch.where(rounded.abs() < 2.0**-62, product * 0.0, product)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in float32 with a single rounding to nearest even (PTX fma.rn.f32). Shapes broadcast.

    The product is exact in float64 (24 + 24 bits). The float64 sum is then rounded *to odd* with the exact error
    of that sum (Knuth's TwoSum), after which rounding to float32 cannot round twice (Boldo and Melquiond, 2008).
    NaN and infinity follow IEEE.
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    addend_part = total - product
    error = (product - (total - addend_part)) + (addend - addend_part)
    bits = total.contiguous().view(torch.int64)
    inexact = (error != 0) & torch.isfinite(total) & torch.isfinite(error)
    step = torch.where((error > 0) == (total > 0), 1, -1)  # towards the exact sum, in units of the last place
    bits = torch.where(inexact & (bits & 1 == 0), bits + step, bits)
    return bits.view(torch.float64).float()


def truncate(values: torch.Tensor, fraction_bits: int) -> torch.Tensor:
    """Round float64 toward zero to `fraction_bits` bits after the leading one, in float32's exponent range.

    Below 2^-126 the step is that of 2^-126, as for float32 subnormals. Returns float32; NaN and infinity pass.
    """
    exponent = floor_log2(values).clamp(min=-126)
    step = power_of_two(exponent - fraction_bits)
    return ((values / step).trunc() * step).float()
