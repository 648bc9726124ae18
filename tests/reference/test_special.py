"""ex2.approx, rcp.approx, div.approx: the interpolator against its measured outputs, and the special values."""

import hashlib
import math

import numpy as np
import pytest
import torch

from fp4ep.reference import special
from fp4ep.reference.special import EX2, EX2_SHA256, RCP, RCP_SHA256, Interpolator, div_approx, ex2_approx, rcp_approx

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


# --- the interpolator --------------------------------------------------------------------------------------------

MEASURED = pytest.mark.parametrize(("unit", "sha256"), [(EX2, EX2_SHA256), (RCP, RCP_SHA256)], ids=["ex2", "rcp"])


def digest(table: torch.Tensor) -> str:
    return hashlib.sha256(table.numpy().astype("<f4").tobytes()).hexdigest()


@MEASURED
def test_every_output_is_the_measured_one(unit, sha256):
    table = unit.table(unit.coefficients())
    assert table.shape == (MANTISSAS,)
    assert digest(table) == sha256


@pytest.mark.parametrize("unit", [EX2, RCP], ids=["ex2", "rcp"])
def test_coefficients_have_the_published_widths(unit):
    """26, 16 and 10 bits for 2^6 and 2^7 segments; c0 has a leading one, but for rcp's first, which is 1 itself."""
    c0, c1, c2 = unit.coefficients().T
    assert len(c0) == {"ex2": 64, "rcp": 128}[unit.name]
    ones = c0 == 1 << 26
    assert ones.tolist() == [unit is RCP] + [False] * (len(c0) - 1)
    assert bool(((c0 >= 1 << 25) & (c0 < 1 << 26) | ones).all())
    assert bool((c1.abs() < 1 << 16).all())
    assert bool((c1.sign() == {"ex2": 1, "rcp": -1}[unit.name]).all())
    assert bool(((c2 > 0) & (c2 < 1 << 10)).all())
    assert int(c1.abs().max()).bit_length() == 16
    assert int(c2.max()).bit_length() == 10


@pytest.mark.parametrize("unit", [EX2, RCP], ids=["ex2", "rcp"])
@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_no_coefficient_can_be_another(unit, column, step):
    """One more or less in any coefficient of any segment changes an output of that segment."""
    rows = unit.coefficients()
    good = unit.table(rows).view(len(rows), -1)
    rows[:, column] += step
    bad = unit.table(rows).view(len(rows), -1)
    assert bool((good != bad).any(1).all())


@MEASURED
@pytest.mark.parametrize("step", [-1, 1])
def test_nor_can_the_bias(unit, sha256, step):
    other = Interpolator(unit.name, unit.segment_bits, unit.bias + step, unit.last_place)
    assert digest(other.table(unit.coefficients())) != sha256


@pytest.mark.parametrize(("unit", "segment"), [(EX2, 0), (EX2, 37), (EX2, 63), (RCP, 0), (RCP, 54), (RCP, 127)])
def test_no_other_pair_fits_with_any_c0(unit, segment):
    """result <= (c0' + c1 X + c2 square) / 2^15 < result + 1 bounds c0' from both sides: empty for every pair near."""
    rows = unit.coefficients()[segment : segment + 1]
    results = (unit.table(rows).double() * 2.0**-unit.last_place).long().numpy() << 15
    width = 23 - unit.segment_bits
    x, square = np.arange(1 << width), special._squares(width).numpy()
    _, c1, c2 = rows[0].tolist()
    fits = []
    for near1 in range(-3, 4):
        for near2 in range(-3, 4):
            needed = results - (c1 + near1) * x - (c2 + near2) * square
            if needed.max() - needed.min() < 1 << 15:
                fits.append((near1, near2))
    assert fits == [(0, 0)]


@pytest.mark.parametrize("width", [16, 17])
def test_squarer_drops_partial_products_below_its_last_place(width):
    x = np.random.default_rng(width).integers(0, 1 << width, 500)
    expected = np.zeros_like(x)
    for i in range(width):
        for j in range(width):
            column = i + j + (i != j)  # b_i b_j and b_j b_i are one partial product, of twice the weight
            if i >= j and column >= 2 * width - 15:
                expected += (x >> i & 1) * (x >> j & 1) << column - (2 * width - 15)
    squares = special._squares(width)
    assert squares[torch.from_numpy(x)].tolist() == expected.tolist()
    assert int(squares.max()).bit_length() == 15
    lost = torch.arange(1 << width).double() ** 2 * 2.0 ** (15 - 2 * width) - squares
    assert float(lost.min()) == 0
    assert float(lost.max()) > 1  # more than flooring the whole square would lose


@MEASURED
def test_squarer_that_floors_the_whole_square_is_refuted(unit, sha256, monkeypatch):
    monkeypatch.setattr(special, "_squares", lambda width: torch.arange(1 << width) ** 2 >> 2 * width - 15)
    assert digest(unit.table(unit.coefficients())) != sha256


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


def test_ex2_without_ftz_is_the_same_where_results_are_normal():
    x = torch.empty(1 << 16).uniform_(-126, 130, generator=torch.Generator().manual_seed(0))
    x = torch.cat((x, torch.tensor([-126.0, INF, 0.0, -0.0, 2.0**-149])))
    assert torch.equal(ex2_approx(x, ftz=False), ex2_approx(x))


def test_ex2_without_ftz_squares_the_result_of_half_the_argument():
    x = torch.empty(1 << 16).uniform_(-151, -126.001, generator=torch.Generator().manual_seed(0))
    half = ex2_approx(x / 2).double()
    assert torch.equal(ex2_approx(x, ftz=False), (half * half).float())
    # Half the argument gives at most 2.5 ulp, so 2.5 * 2^-23 relative; the square doubles it and rounds once more.
    # Results stay below 2^23 steps of 2^-149.
    steps = (ex2_approx(x, ftz=False).double() - torch.exp2(x.double())).abs() * 2.0**149
    assert float(steps.max()) < 2.0**23 * 5.01 * 2.0**-23 + 0.5
    assert float(ex2_approx(torch.tensor(-127.0), ftz=False)) != 2.0**-127


@pytest.mark.parametrize(
    ("x", "expected"),
    [(-128.0, 2.0**-128), (-149.0, 2.0**-149), (-150.0, 0.0), (-200.0, 0.0), (-1e30, 0.0), (-INF, 0.0)],
)
def test_ex2_without_ftz_of_special_values(x, expected):
    assert float(ex2_approx(torch.tensor(x), ftz=False)) == expected


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


# --- div ---------------------------------------------------------------------------------------------------------

A, B = (torch.empty(1 << 16).uniform_(-2, 2, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))


@pytest.mark.parametrize("ftz", [True, False])
def test_div_is_a_product_with_the_reciprocal(ftz):
    assert torch.equal(div_approx(A, B, ftz=ftz), A * rcp_approx(B))
    assert bool((div_approx(A, B, ftz=ftz) != A / B).any())
    error = (div_approx(A, B, ftz=ftz).double() * B.double() / A.double() - 1).abs().max()
    assert float(error) < 1.5 * 2.0**-23  # the reciprocal is within one ulp, the product adds half


def test_div_broadcasts():
    assert torch.equal(div_approx(A.view(64, -1), B[:64, None]), A.view(64, -1) * rcp_approx(B[:64, None]))


SMALL = 2.0**-130


@pytest.mark.parametrize("ftz", [True, False])
@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (1.0, 0.0, INF),
        (0.0, 0.0, NAN),
        (INF, INF, NAN),
        (INF, 2.0, INF),
        (3.0, INF, 0.0),
        (1.0, 2.0**126, 2.0**-126),
        (2.0**100, 2.0**126 + 2.0**103, 0.0),  # the reciprocal is flushed
        (INF, 2.0**127, NAN),
        (2.0**127, 0.25, INF),
        (2.0**-126, 1.0, 2.0**-126),
        (448.0, 448.0, 1.0),
        (NAN, 1.0, NAN),
        (1.0, NAN, NAN),
    ],
)
def test_div_special_values(a, b, expected, ftz):
    for sign_a in (1.0, -1.0):
        for sign_b in (1.0, -1.0):
            result = div_approx(torch.tensor(sign_a * a), torch.tensor(sign_b * b), ftz=ftz)
            if math.isnan(expected):
                assert int(result.view(torch.int32)) == 0x7FFFFFFF
            else:
                assert float(result) == sign_a * sign_b * expected
                assert bool(result.signbit()) == (sign_a * sign_b < 0)


@pytest.mark.parametrize(
    ("a", "b", "flushed", "kept"),
    [
        (SMALL, 1.0, 0.0, SMALL),  # a subnormal dividend
        (2.0**-120, 2.0**10, 0.0, SMALL),  # a subnormal quotient
        (1.0, SMALL, INF, INF),  # 2^130 does not fit
        (SMALL, SMALL, NAN, 1.0),
        (2.0**-120, SMALL, INF, 2.0**10),
        (2.0**104, SMALL, INF, INF),
    ],
)
def test_div_of_subnormals(a, b, flushed, kept):
    a, b = torch.tensor(a), torch.tensor(b)
    assert float(div_approx(a, b)) == flushed or (math.isnan(flushed) and bool(div_approx(a, b).isnan()))
    assert float(div_approx(a, b, ftz=False)) == kept
    assert float(div_approx(-a, b, ftz=False)) == -kept


# --- NaN ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        ex2_approx,
        rcp_approx,
        lambda x: ex2_approx(x, ftz=False),
        lambda x: div_approx(x, torch.tensor(3.0)),
        lambda x: div_approx(torch.tensor(3.0), x, ftz=False),
    ],
)
def test_nan_becomes_the_gpus(function):
    nans = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert set(function(nans).view(torch.int32).tolist()) == {0x7FFFFFFF}
