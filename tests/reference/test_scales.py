"""The five UE8M0 rules against their definitions in exact arithmetic."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from fp4ep.reference.formats import E2M1, E4M3, E5M2, UE8M0, decode
from fp4ep.reference.scales import ScaleRule, ue8m0_scale

ELEMENTS = [E2M1, E4M3, E5M2]
MAX = {E2M1: 6, E4M3: 448, E5M2: 57344}
EMAX = {E2M1: 2, E4M3: 8, E5M2: 15}
MANTISSA_BITS = {E2M1: 1, E4M3: 3, E5M2: 2}


def floor_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if x >= Fraction(2) ** exponent else exponent - 1


def ceil_log2(x: Fraction) -> int:
    exponent = floor_log2(x)
    return exponent + (x != Fraction(2) ** exponent)


def float32(x: Fraction) -> Fraction:
    """Nearest float32, ties to even, subnormals included."""
    step = Fraction(2) ** (max(floor_log2(x), -126) - 23)
    return round(x / step) * step


def exact_exponent(amax: Fraction, element, rule) -> int:
    """Exponent of the scale before it is clamped to [-127, 127]."""
    if rule is ScaleRule.FLOOR:
        return floor_log2(amax) - EMAX[element]
    if rule is ScaleRule.CEIL:
        return ceil_log2(amax) - EMAX[element]
    if rule is ScaleRule.EVEN:  # to the element's mantissa, half away from zero
        step = Fraction(2) ** (floor_log2(amax) - MANTISSA_BITS[element])
        return floor_log2((amax / step + Fraction(1, 2)).__floor__() * step) - EMAX[element]
    if rule is ScaleRule.RCEIL:
        quotient = float32(amax / MAX[element])
    else:
        quotient = float32(amax * float32(Fraction(1, MAX[element])))
        return max(ceil_log2(quotient), -126) if quotient else -999  # a subnormal's exponent field reads as 2^-127
    return ceil_log2(quotient) if quotient else -999


def significand_that_carries(element) -> float:
    """Half a mantissa step of the element below 2."""
    return 2 - 2.0 ** -(MANTISSA_BITS[element] + 1)


def edge_values(element) -> torch.Tensor:
    """1, 1.5, `max` and the point where EVEN carries, in every binade, with their neighbours, and random values."""
    significands = [1.0, 1.5, MAX[element] / 2.0 ** EMAX[element], significand_that_carries(element)]
    exponents = torch.arange(-149, 128).double()
    values = torch.cat([(s * 2.0**exponents).float() for s in significands])
    values = torch.cat(
        [torch.nextafter(values, torch.tensor(0.0)), values, torch.nextafter(values, torch.tensor(math.inf))]
    )
    bits = torch.randint(1, 0x7F800000, (1000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    values = torch.cat((values, bits.view(torch.float32)))
    return values[values > 0].unique()


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("rule", ScaleRule)
def test_rule_is_its_definition(element, rule):
    amax = torch.cat((edge_values(element), torch.tensor([torch.finfo(torch.float32).max])))
    expected = [min(max(exact_exponent(Fraction(x), element, rule), -127), 127) + 127 for x in amax.tolist()]
    assert ue8m0_scale(amax, element, rule).tolist() == expected


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_even_carries_from_half_a_mantissa_step_below_the_next_binade(element):
    carries = torch.tensor(significand_that_carries(element))
    below = torch.nextafter(carries, torch.tensor(0.0))
    codes = ue8m0_scale(torch.stack([below, carries]), element, ScaleRule.EVEN).tolist()
    assert codes == [127 - EMAX[element], 128 - EMAX[element]]


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("rule", ScaleRule)
def test_special_values(element, rule):
    """ROUND_UP is integer arithmetic on the bits of the quotient: infinity and NaN have the largest of them."""
    amax = torch.tensor([0.0, 2.0**-149, math.inf, math.nan])
    beyond = 254 if rule is ScaleRule.ROUND_UP else UE8M0.nan_code
    assert ue8m0_scale(amax, element, rule).tolist() == [0, 0, beyond, beyond]


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_round_up_of_a_subnormal_quotient_is_code_1(element):
    """From the smallest non-zero quotient, 2^-149, up to 2^-126. RCEIL reaches code 1 at 2^-127 only."""
    quotients = torch.tensor([2.0**-149, 2.0**-140, 2.0**-127, 2.0**-126])
    amax = MAX[element] * quotients
    assert ue8m0_scale(amax, element, ScaleRule.ROUND_UP).tolist() == [1, 1, 1, 1]
    assert ue8m0_scale(amax, element, ScaleRule.RCEIL).tolist() == [0, 0, 0, 1]
    # Half the smallest float rounds to zero.
    assert int(ue8m0_scale(amax[:1] / 4, element, ScaleRule.ROUND_UP)) == 0


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_largest_float(element):
    """(2 - 2^-23) * 2^127 lies just below 2^128; divided by max = 1.5 or 1.75 * 2^emax it is above 2^(127 - emax)."""
    amax = torch.tensor(torch.finfo(torch.float32).max)
    top = 254 - EMAX[element]
    assert int(ue8m0_scale(amax, element, ScaleRule.FLOOR)) == top
    for rule in (ScaleRule.CEIL, ScaleRule.RCEIL, ScaleRule.ROUND_UP, ScaleRule.EVEN):  # EVEN carries to 2^128
        assert int(ue8m0_scale(amax, element, rule)) == top + 1


def test_shape_and_dtype():
    scale = ue8m0_scale(torch.ones(2, 3, 4, dtype=torch.bfloat16), E2M1, ScaleRule.RCEIL)
    assert scale.dtype == torch.uint8
    assert scale.shape == (2, 3, 4)


# ROCm/aiter#3212: amax -> scale under each rule, E2M1.
@pytest.mark.parametrize(
    ("amax", "floor", "rceil", "ceil", "even"),
    [
        (7.0, 1, 2, 2, 2),
        (6.5, 1, 2, 2, 1),
        (5.0, 1, 1, 2, 1),
        (3.5, 0.5, 1, 1, 1),
        (6.0, 1, 1, 2, 1),
        (4.0, 1, 1, 1, 1),
    ],
)
def test_rules_side_by_side(amax, floor, rceil, ceil, even):
    expected = {
        ScaleRule.FLOOR: floor,
        ScaleRule.RCEIL: rceil,
        ScaleRule.CEIL: ceil,
        ScaleRule.EVEN: even,
        ScaleRule.ROUND_UP: rceil,
    }
    found = {rule: float(decode(ue8m0_scale(torch.tensor(amax), E2M1, rule), UE8M0)) for rule in ScaleRule}
    assert found == expected


def normal_quotients(element) -> torch.Tensor:
    amax = edge_values(element)
    return amax[amax >= MAX[element] * 2.0**-126]


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_rceil_is_the_smallest_scale_that_never_clips(element):
    amax = normal_quotients(element)
    exponents = ue8m0_scale(amax, element, ScaleRule.RCEIL).int() - 127
    for x, exponent in zip(amax.tolist(), exponents.tolist(), strict=True):
        assert Fraction(x) <= MAX[element] * Fraction(2) ** exponent
        assert Fraction(x) > MAX[element] * Fraction(2) ** (exponent - 1)


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_rceil_below_a_normal_quotient_can_miss_by_less_than_an_ulp(element):
    """amax / max is then a subnormal of float32, whose rounding can fall on the power of two."""
    amax = torch.nextafter(torch.tensor(MAX[element] * 2.0**-127), torch.tensor(1.0))
    assert ceil_log2(Fraction(float(amax)) / MAX[element]) == -126
    assert int(ue8m0_scale(amax, element, ScaleRule.RCEIL)) == 0  # 2^-127


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_round_up_and_rceil_agree_on_every_mantissa(element):
    """The reciprocal costs an ulp, but never across a power of two. Both scale with amax, so one binade is all."""
    amax = torch.arange(1 << 23, 1 << 24).float()
    round_up = ue8m0_scale(amax, element, ScaleRule.ROUND_UP)
    assert torch.equal(round_up, ue8m0_scale(amax, element, ScaleRule.RCEIL))
    assert len(round_up.unique()) == 2


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_rules_are_ordered(element):
    amax = normal_quotients(element)
    amax = amax[amax < 2.0**127]
    floor, even, rceil, ceil = (
        ue8m0_scale(amax, element, getattr(ScaleRule, r)).int() for r in ("FLOOR", "EVEN", "RCEIL", "CEIL")
    )
    assert bool((floor <= even).all() and (even <= rceil).all() and (rceil <= ceil).all() and (ceil <= floor + 1).all())


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_the_ml_dtypes_cast_is_another_rule(element):
    """ml_dtypes rounds amax / max to the nearest power of two, ties up (jax-ml/ml_dtypes#298), where RCEIL rounds up.

    So it is one less for a significand in (1, 1.5), equal elsewhere, and NaN for zero.
    """
    quotient = normal_quotients(element) / element.max
    cast = quotient.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8).astype(int)
    significand = np.frexp(quotient.numpy())[0] * 2
    lower = (significand > 1) & (significand < 1.5)
    rceil = ue8m0_scale(normal_quotients(element), element, ScaleRule.RCEIL).int().numpy()
    assert np.array_equal(cast, rceil - lower)
    assert lower.any()
    assert not lower.all()
    assert np.float32(3).astype(ml_dtypes.float8_e8m0fnu) == 4
    assert np.isnan(np.float32(0).astype(ml_dtypes.float8_e8m0fnu).astype(np.float32))
