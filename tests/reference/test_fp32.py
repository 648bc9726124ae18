"""float32 arithmetic against exact rational arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ep.reference.formats import E4M3, E5M2
from fp4ep.reference.fp32 import (
    canonical_nan,
    floor_log2,
    fma,
    power_of_two,
    truncate,
)

FLOAT32_MAX = 2.0**128 - 2.0**104
INF, NAN = math.inf, math.nan


def exact_floor_log2(x: Fraction) -> int:
    x = abs(x)
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if x >= Fraction(2) ** exponent else exponent - 1


def nearest_float32(x: Fraction) -> float:
    """Round to nearest, ties to even (as Python's round does), with float32's subnormals and overflow."""
    if x == 0:
        return 0.0
    step = Fraction(2) ** (max(exact_floor_log2(x), -126) - 23)
    rounded = round(x / step) * step
    return math.copysign(INF if abs(rounded) >= 2**128 else float(abs(rounded)), x)


def same_float(a, b) -> bool:
    a, b = float(a), float(b)
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


def fma_of(a, b, c) -> float:
    tensors = [torch.tensor(x, dtype=torch.float64).float() for x in (a, b, c)]
    assert [float(t) for t in tensors] == [a, b, c]  # the operands are float32 values
    return float(fma(*tensors))


def twice_rounded(a, b, c) -> float:
    """The usual wrong fma: float64 arithmetic, then float32."""
    return float(torch.tensor(a * b + c, dtype=torch.float64).float())


def exact_fma(a, b, c) -> float:
    total = Fraction(a) * Fraction(b) + Fraction(c)
    return nearest_float32(total) if total else a * b + c  # float64 knows the sign of an exact zero


thorough = settings(max_examples=300, deadline=None)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MANTISSA = st.integers(-(2**24) + 1, 2**24 - 1)


@thorough
@given(FINITE, FINITE, FINITE)
def test_fma_any_operands(a, b, c):
    assert same_float(fma_of(a, b, c), exact_fma(a, b, c))


@thorough
@given(MANTISSA, MANTISSA, MANTISSA, st.integers(-50, 50), st.integers(-50, 100))
def test_fma_overlapping_operands(m, n, k, exponent, shift):
    a, b, c = m, math.ldexp(n, exponent), math.ldexp(k, min(exponent + shift - 24, 104))
    assert same_float(fma_of(a, b, c), exact_fma(a, b, c))


@thorough
@given(MANTISSA, MANTISSA, MANTISSA, st.integers(-100, -60), st.integers(-149, -120))
def test_fma_near_the_subnormals(m, n, k, p, q):
    a, b, c = math.ldexp(m, p), math.ldexp(n, -115), math.ldexp(k, q)
    assert same_float(fma_of(a, b, c), exact_fma(a, b, c))


# 2^36 + 1 = 4097 * 16773121 and 2^36 - 1 = 262143 * 262145, factors of at most 24 bits: a product just above or just
# below half a step of c, by less than float64 can hold beside c.
ABOVE = (4097.0, 16773121.0)
BELOW = (262143.0, 262145.0)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("exponent", [-126, -100, -1, 0, 1, 50, 103])
@pytest.mark.parametrize(
    ("factors", "mantissa", "expected"),
    [
        (ABOVE, 0, 1),  # just above the tie, whose even neighbour is below
        (BELOW, 1, 1),  # just below the tie, whose even neighbour is above
        (ABOVE, 2, 3),
        (BELOW, 3, 3),
    ],
)
def test_fma_where_two_roundings_are_wrong(sign, exponent, factors, mantissa, expected):
    c = sign * (1 + mantissa * 2.0**-23) * 2.0**exponent
    first = math.ldexp(factors[0], -30 + exponent // 2)
    second = sign * math.ldexp(factors[1], -30 + exponent - exponent // 2)
    right = sign * (1 + expected * 2.0**-23) * 2.0**exponent
    assert exact_fma(first, second, c) == right
    assert twice_rounded(first, second, c) != right
    assert fma_of(first, second, c) == right


def test_fma_two_roundings_at_a_subnormal_and_at_overflow():
    a, b, c = ABOVE[0] * 2.0**-93, ABOVE[1] * 2.0**-93, 2.0**-127
    assert twice_rounded(a, b, c) == 2.0**-127
    assert fma_of(a, b, c) == exact_fma(a, b, c) == 2.0**-127 + 2.0**-149

    a, b, c = BELOW[0] * 2.0**33, BELOW[1] * 2.0**34, FLOAT32_MAX  # half a step less 2^67
    assert math.isinf(twice_rounded(a, b, c))
    assert fma_of(a, b, c) == exact_fma(a, b, c) == FLOAT32_MAX
    assert fma_of(2.0**50, 2.0**53, FLOAT32_MAX) == INF  # the tie itself


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        (INF, 0.0, 1.0, NAN),
        (INF, 1.0, -INF, NAN),
        (NAN, 0.0, 0.0, NAN),
        (0.0, 0.0, NAN, NAN),
        (INF, -1.0, 5.0, -INF),
        (2.0, 3.0, -INF, -INF),
        (FLOAT32_MAX, FLOAT32_MAX, -FLOAT32_MAX, INF),
        (FLOAT32_MAX, FLOAT32_MAX, -INF, -INF),
        (1.0, 1.0, -1.0, 0.0),
        (-0.0, 1.0, -0.0, -0.0),
        (-0.0, 1.0, 0.0, 0.0),
        (-(2.0**-149), 2.0**-149, 0.0, -0.0),  # underflow keeps the sign
    ],
)
def test_fma_special_values(a, b, c, expected):
    result = fma(torch.tensor(a).float(), torch.tensor(b).float(), torch.tensor(c).float())
    assert same_float(result, expected)


def test_fma_broadcasts():
    a, b, c = torch.arange(3.0)[:, None], torch.arange(4.0)[None], torch.tensor(0.5)
    result = fma(a, b, c)
    assert result.dtype == torch.float32
    assert torch.equal(result, a * b + c)
    assert torch.equal(fma(a.expand(3, 4).T, b.expand(3, 4).T, c), result.T)  # strided operands


@thorough
@given(FINITE.filter(bool))
def test_floor_log2(x):
    assert int(floor_log2(torch.tensor(x))) == exact_floor_log2(Fraction(float(np.float32(x))))


def test_floor_log2_every_binade_edge():
    exponents = torch.arange(-149, 128)
    powers = power_of_two(exponents).float()
    assert torch.equal(floor_log2(powers), exponents.int())
    assert torch.equal(floor_log2(-powers), exponents.int())
    below = torch.nextafter(powers[1:], torch.tensor(0.0))
    assert torch.equal(floor_log2(below), exponents[1:].int() - 1)


def test_floor_log2_special_values():
    assert floor_log2(torch.tensor([0.0, -0.0, INF, -INF, NAN])).tolist() == [-1023, -1023, 1024, 1024, 1024]


def test_power_of_two_every_exponent():
    exponents = range(-1022, 1024)
    result = power_of_two(torch.tensor(exponents))
    assert result.dtype == torch.float64
    assert result.tolist() == [math.ldexp(1.0, e) for e in exponents]


@thorough
@given(st.floats(min_value=-FLOAT32_MAX, max_value=FLOAT32_MAX), st.integers(1, 23))
def test_truncate(x, fraction_bits):
    result = truncate(torch.tensor(x, dtype=torch.float64), fraction_bits)
    assert result.dtype == torch.float32
    step = Fraction(2) ** (max(exact_floor_log2(Fraction(x)), -126) - fraction_bits) if x else Fraction(1)
    expected = float(math.trunc(Fraction(x) / step) * step)
    assert same_float(result, math.copysign(expected, x))


@thorough
@given(st.integers(-(2**30), 2**30), st.integers(-160, -100), st.integers(1, 23))
def test_truncate_at_the_subnormals(m, exponent, fraction_bits):
    x = math.ldexp(m, exponent)
    step = Fraction(2) ** (max(exact_floor_log2(Fraction(x)), -126) - fraction_bits) if x else Fraction(1)
    assert float(truncate(torch.tensor(x, dtype=torch.float64), fraction_bits)) == math.trunc(Fraction(x) / step) * step


def test_truncate_passes_nan_and_infinity():
    result = truncate(torch.tensor([INF, -INF, NAN], dtype=torch.float64), 13)
    assert result[:2].tolist() == [INF, -INF]
    assert result[2].isnan()


def test_reciprocals_are_rounded_and_not_a_division():
    assert nearest_float32(Fraction(1, 448)) == E4M3.reciprocal_max
    assert nearest_float32(Fraction(1, 57344)) == E5M2.reciprocal_max
    x = torch.arange(1 << 23, 1 << 24).float()  # every float32 mantissa
    for reciprocal, maximum in ((E4M3.reciprocal_max, 448.0), (E5M2.reciprocal_max, 57344.0)):
        product, quotient = x * reciprocal, x / maximum
        ulps = product.view(torch.int32) - quotient.view(torch.int32)
        assert ulps.abs().max() == 1


def test_canonical_nan_bf16():
    """All 2^16 patterns: the 254 NaNs become one, everything else keeps its bits."""
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    found = canonical_nan(patterns.view(torch.bfloat16)).view(torch.int16)
    nan = (patterns & 0x7FFF) > 0x7F80
    assert int(nan.sum()) == 254
    assert torch.equal(found, torch.where(nan, 0x7FFF, patterns))


def test_canonical_nan_float32():
    nans = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -0x400000, -1]
    others = [0, -(1 << 31), 1, -(1 << 31) + 1, 0x7F7FFFFF, 0x7F800000, -0x800000]
    found = canonical_nan(torch.tensor(nans + others, dtype=torch.int32).view(torch.float32)).view(torch.int32)
    assert found.tolist() == [0x7FFFFFFF] * len(nans) + others
