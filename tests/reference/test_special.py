"""ex2.approx and rcp.approx: what the measured tables must satisfy, and the special values."""

import math

import numpy as np
import pytest
import torch

from fp4ep.reference.special import ex2_approx, rcp_approx

INF, NAN = math.inf, math.nan
MIN_NORMAL = 2.0**-126
MANTISSAS = 1 << 23


def ulps(found: torch.Tensor, reference: np.ndarray) -> np.ndarray:
    """found - reference in units of the last place; both positive."""
    return found.numpy().view(np.int32) - reference.astype(np.float32).view(np.int32)


def counts(deltas: np.ndarray) -> dict[int, int]:
    values, found = np.unique(deltas, return_counts=True)
    return dict(zip(values.tolist(), found.tolist(), strict=True))


@pytest.fixture(scope="module")
def ex2_grid() -> torch.Tensor:
    """ex2_approx of j * 2^-23 for j in [0, 2^23): all it ever looks up."""
    return torch.cat([ex2_approx(part * 2.0**-23) for part in torch.arange(MANTISSAS).split(1 << 20)])


@pytest.fixture(scope="module")
def rcp_grid() -> torch.Tensor:
    """rcp_approx of every float32 in [1, 2)."""
    return rcp_approx(1 + torch.arange(MANTISSAS) * 2.0**-23)


# --- ex2 ---------------------------------------------------------------------------------------------------------


def test_ex2_counts_of_the_measurement(ex2_grid):
    """At i * 2^-24: two arguments share a result but not a correctly rounded reference."""
    even = ulps(ex2_grid, np.exp2(np.arange(0, 2 * MANTISSAS, 2) * 2.0**-24))
    odd = ulps(ex2_grid, np.exp2(np.arange(1, 2 * MANTISSAS, 2) * 2.0**-24))
    assert counts(np.concatenate([even, odd])) == {-1: 1_245_563, 0: 11_968_158, 1: 3_563_495}


def test_ex2_at_odd_multiples_of_2_to_the_minus_24(ex2_grid):
    j = torch.arange(0, MANTISSAS, 997)
    assert torch.equal(ex2_approx((2 * j + 1) * 2.0**-24), ex2_grid[j])


def test_ex2_is_within_an_ulp_on_the_grid_and_two_below_it_between(ex2_grid):
    """The argument is floored to the grid, negative ones included, so the true argument lies in [j, j + 1] * 2^-23.

    2^x rises with x: the two ends bound everything between, and a power of two changes nothing. The floor costs up to
    ln(2) * 2^-23 relative, 1.39 ulp near 2, on the low side only.
    """
    j = np.arange(MANTISSAS)
    assert set(counts(ulps(ex2_grid, np.exp2(j * 2.0**-23)))) == {-1, 0, 1}
    assert set(counts(ulps(ex2_grid[:-1], np.exp2((j[:-1] + 1) * 2.0**-23)))) == {-2, -1, 0, 1}


@pytest.mark.parametrize(("low", "high"), [(-125.5, 127.5), (-2.0, 2.0), (-1e-3, 1e-3), (-1e-7, 1e-7)])
def test_ex2_over_its_range(low, high):
    x = torch.empty(1 << 18).uniform_(low, high, generator=torch.Generator().manual_seed(0))
    deltas = ulps(ex2_approx(x), np.exp2(x.double().numpy()))
    assert deltas.min() >= -2  # the bound of the test above
    assert deltas.max() <= 1


def test_ex2_range_reduction(ex2_grid):
    """x >= 0: floor(x * 2^23). x < 0: its one's complement, so -n - j * 2^-23 reads entry 2^23 - 1 - j for j > 0."""
    j = torch.arange(4099, MANTISSAS, 4099)
    for n in (1, 2, 30, 100, 124):  # float32 holds few of these sums; keep those
        for sign in (1, -1):
            exact = sign * (n + j.double() * 2.0**-23)
            kept = exact == exact.float().double()
            expected = ex2_grid[j] * 2.0**n if sign > 0 else ex2_grid[MANTISSAS - 1 - j] * 2.0 ** (-n - 1)
            assert torch.equal(ex2_approx(exact.float())[kept], expected[kept])
            assert kept.any()
    below_one = -j * 2.0**-23
    assert torch.equal(ex2_approx(below_one), ex2_grid[MANTISSAS - 1 - j] / 2)


def test_ex2_of_whole_numbers_is_exact():
    """No complement where the 23 fraction bits are zero; that includes what lies within 2^-23 of zero."""
    whole = torch.arange(-126, 128)
    assert torch.equal(ex2_approx(whole.float()).double(), 2.0 ** whole.double())
    beside = torch.nextafter(torch.tensor([-1.0, -2.0, -64.0]), torch.tensor(-INF))
    assert bool((ex2_approx(beside).double() < 2.0 ** torch.tensor([-1.0, -2.0, -64.0]).double()).all())


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (0.0, 1.0),
        (-0.0, 1.0),
        (2.0**-149, 1.0),
        (-(2.0**-149), 1.0),
        (-(2.0**-24), 1.0),  # floor(|x| * 2^23) = 0: no complement
        (1.0, 2.0),
        (127.0, 2.0**127),
        (128.0, INF),
        (1e30, INF),
        (INF, INF),
        (-127.0, 0.0),
        (-1.0, 0.5),
        (-126.0, MIN_NORMAL),
        (-126.00001, 0.0),
        (-150.0, 0.0),
        (-1e30, 0.0),
        (-INF, 0.0),
    ],
)
def test_ex2_special_values(x, expected):
    result = ex2_approx(torch.tensor(x))
    assert float(result) == expected
    assert not result.signbit()


def test_ex2_edges_of_the_range():
    largest = ex2_approx(torch.nextafter(torch.tensor(128.0), torch.tensor(0.0)))
    assert largest.isfinite()
    smallest = ex2_approx(torch.nextafter(torch.tensor(-126.0), torch.tensor(0.0)))
    assert float(smallest) >= MIN_NORMAL
    assert ex2_approx(torch.zeros(2, 3)).shape == (2, 3)


# --- rcp ---------------------------------------------------------------------------------------------------------


def test_rcp_counts_of_the_measurement(rcp_grid):
    deltas = ulps(rcp_grid, 1 / (1 + np.arange(MANTISSAS) * 2.0**-23))
    assert counts(deltas) == {-1: 374_723, 0: 7_280_086, 1: 733_799}


def test_rcp_scales_exactly_with_every_power_of_two(rcp_grid):
    j = torch.arange(0, MANTISSAS, 10_007)
    x = 1 + j * 2.0**-23
    for exponent in range(-126, 128):
        expected = rcp_grid[j].double() * 2.0**-exponent
        expected = torch.where(expected < MIN_NORMAL, 0, expected).float()
        argument = (x.double() * 2.0**exponent).float()
        assert torch.equal(rcp_approx(argument), expected)
        assert torch.equal(rcp_approx(-argument), -expected)


def test_rcp_of_powers_of_two_is_exact():
    powers = 2.0 ** torch.arange(-126, 127).double()
    assert torch.equal(rcp_approx(powers.float()).double(), 1 / powers)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (0.0, INF),
        (2.0**-149, INF),
        (MIN_NORMAL - 2.0**-149, INF),  # the largest subnormal
        (MIN_NORMAL, 2.0**126),
        (2.0**126, MIN_NORMAL),
        (2.0**126 + 2.0**103, 0.0),  # the first whose reciprocal is subnormal
        (2.0**127, 0.0),
        (2.0**128 - 2.0**104, 0.0),
        (INF, 0.0),
    ],
)
def test_rcp_special_values(sign, x, expected):
    result = rcp_approx(torch.tensor(sign * x))
    assert float(result) == sign * expected
    assert bool(result.signbit()) == (sign < 0)


def test_rcp_shape():
    assert rcp_approx(torch.ones(2, 3)).shape == (2, 3)
    x = torch.rand(6, 5) + 1
    assert torch.equal(rcp_approx(x.T), rcp_approx(x).T)  # a strided view


@pytest.mark.parametrize("function", [ex2_approx, rcp_approx])
def test_nan_becomes_the_gpus(function):
    nans = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert set(function(nans).view(torch.int32).tolist()) == {0x7FFFFFFF}
