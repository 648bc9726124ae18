"""The tensor-core rule against a slow implementation in exact rationals, one element at a time."""

import math
import re
from fractions import Fraction

import pytest
import torch

from fp4ep.reference import tensor_core
from fp4ep.reference.tensor_core import (
    BLACKWELL_E4M3,
    HOPPER_BF16,
    HOPPER_E4M3,
    HOPPER_E5M2,
    HOPPER_FP16,
    TensorCore,
    matmul,
)

DTYPES = {
    HOPPER_E4M3: torch.float8_e4m3fn,
    HOPPER_E5M2: torch.float8_e5m2,
    HOPPER_BF16: torch.bfloat16,
    HOPPER_FP16: torch.float16,
    BLACKWELL_E4M3: torch.float8_e4m3fn,
}
INF, NAN = math.inf, math.nan
each_core = pytest.mark.parametrize("core", DTYPES, ids=str)


# --- the rule, literally -----------------------------------------------------------------------------------------


def exponent(x: float, minimum: int) -> int:
    """floor(log2|x|) of a non-zero float, at least `minimum`."""
    return max(math.frexp(x)[1] - 1, minimum)


def instruction(core: TensorCore, a: list[float], b: list[float], c: float) -> float:
    terms = [
        (exponent(x, core.min_exponent) + exponent(y, core.min_exponent), Fraction(x) * Fraction(y))
        for x, y in zip(a, b, strict=True)
        if x and y
    ]
    if c:
        terms.append((exponent(c, -126), Fraction(c)))
    if not terms:
        return 0.0
    unit = Fraction(2) ** (max(e for e, _ in terms) - core.fraction_bits)
    total = sum(math.trunc(value / unit) for _, value in terms) * unit
    if not total:
        return 0.0
    top = total.numerator.bit_length() - total.denominator.bit_length()  # of a power-of-two denominator: exact
    step = Fraction(2) ** (max(top, -126) - core.output_bits)
    return float(math.trunc(total / step) * step)


def slow_matmul(core: TensorCore, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.zeros(len(a), len(b)) if c is None else c.clone()
    for m, row in enumerate(a.tolist()):
        for n, column in enumerate(b.tolist()):
            value = float(out[m, n])
            for k in range(0, len(row), core.k):
                value = instruction(core, row[k : k + core.k], column[k : k + core.k], value)
            out[m, n] = value
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


# --- operands ----------------------------------------------------------------------------------------------------


def finite_values(core: TensorCore) -> torch.Tensor:
    """Every finite value of the operand format; for bf16, those whose products stay within float32."""
    dtype = DTYPES[core]
    codes = torch.arange(1 << 8 * dtype.itemsize).to(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
    values = codes.view(dtype).float()
    return values[values.abs() < 2.0**58]


def rounded(core: TensorCore, values: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(DTYPES[core]).max
    return values.clamp(-largest, largest).to(DTYPES[core]).float()


def operands(core: TensorCore, kind: str, rows: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = (rows, k)
    if kind == "normal":
        a, b = (rounded(core, torch.randn(shape, generator=g) * 4) for _ in range(2))
    elif kind == "any code":  # exponents over the whole range: most products are cut away
        table = finite_values(core)
        a, b = (table[torch.randint(len(table), shape, generator=g)] for _ in range(2))
    elif kind == "subnormal":
        table = finite_values(core)
        table = table[table.abs() < 2.0 ** (core.min_exponent + 1)]
        a, b = (table[torch.randint(len(table), shape, generator=g)] for _ in range(2))
        if core is HOPPER_BF16:  # subnormal times subnormal is nothing to a float32
            b = (b.double() * 2.0**133).float()
    elif kind == "straddling":  # products from 2^0 to 2^-16: around the last bit kept
        a, b = (
            rounded(core, (1 + torch.rand(shape, generator=g)) * 2.0 ** -torch.randint(9, shape, generator=g))
            for _ in range(2)
        )
        a *= torch.randint(2, shape, generator=g) * 2 - 1
    elif kind == "cancelling":  # pairs that cancel but for their last bit, and small terms
        a, b = (rounded(core, 1 + torch.rand(shape, generator=g)) for _ in range(2))
        a[:, 1::2], b[:, 1::2] = -a[:, 0::2], b[:, 0::2]
        a[:, ::7] = rounded(core, torch.randn(rows, len(range(0, k, 7)), generator=g) * 2.0**-6)
    else:  # mostly zeros of both signs
        a, b = (rounded(core, torch.randn(shape, generator=g)) for _ in range(2))
        a, b = (x * (torch.rand(shape, generator=g) < 0.1) for x in (a, b))
    return a, b


KINDS = ["normal", "any code", "subnormal", "straddling", "cancelling", "sparse"]


def accumulators(kind: str, rows: int, columns: int, seed: int) -> torch.Tensor | None:
    """Accumulators of 24 significant bits, near the products or far from them."""
    if kind == "none":
        return None
    low, high = {"near": (-4, 8), "below": (-40, -8), "above": (12, 40), "tiny": (-149, -100)}[kind]
    g = torch.Generator().manual_seed(seed)
    exponents = torch.randint(low, high, (rows, columns), generator=g)
    return torch.randn(rows, columns, generator=g) * 2.0**exponents


@each_core
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("instructions", [1, 2, 3, 4])
def test_matmul_is_the_rule(core, kind, instructions):
    a, b = operands(core, kind, 7, instructions * core.k, seed=instructions)
    b = b[:5]
    result = matmul(core, a, b)
    assert result.dtype == torch.float32
    assert same_bits(result, slow_matmul(core, a, b))


@each_core
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", ["near", "below", "above", "tiny"])
def test_matmul_from_an_accumulator(core, kind, start):
    a, b = operands(core, kind, 6, 2 * core.k, seed=5)
    c = accumulators(start, 6, 6, seed=6)
    before = c.clone()
    assert same_bits(matmul(core, a, b, c=c), slow_matmul(core, a, b, c))
    assert same_bits(c, before)  # not written to


@each_core
def test_the_slow_rule_is_not_an_ordinary_sum(core):
    """Without truncation the comparison above would prove little: it must differ from the exact dot product."""
    a, b = operands(core, "any code", 16, 4 * core.k, seed=9)
    exact = (a.double() @ b.double().T).float()
    assert not torch.equal(matmul(core, a, b), exact)


# --- the rule, case by case --------------------------------------------------------------------------------------


def one_row(core: TensorCore, *values: float) -> torch.Tensor:
    row = torch.zeros(1, core.k)
    row[0, : len(values)] = torch.tensor(values)
    return row


@pytest.mark.parametrize("core", [HOPPER_E4M3, HOPPER_E5M2], ids=str)
def test_fp8_products_are_cut_below_13_bits(core):
    a = one_row(core, 1.0, 2.0**-6, 2.0**-6)
    assert float(matmul(core, a, one_row(core, 1.0, 2.0**-7, 2.0**-7))) == 1 + 2.0**-12
    assert float(matmul(core, a, one_row(core, 1.0, 2.0**-8, 2.0**-8))) == 1.0  # 2^-14 each: cut before they are added
    assert float(matmul(core, a, one_row(core, -1.0, 2.0**-8, 2.0**-8))) == -1.0  # towards zero, not down
    assert float(matmul(core, a, one_row(core, 0.0, 2.0**-8, 2.0**-8))) == 2.0**-13  # nothing larger: kept


def test_bf16_products_are_cut_below_25_bits_and_the_sum_below_23():
    a = one_row(HOPPER_BF16, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert float(matmul(HOPPER_BF16, a, one_row(HOPPER_BF16, 1.0, *[2.0**-25] * 4))) == 1 + 2.0**-23
    assert float(matmul(HOPPER_BF16, a, one_row(HOPPER_BF16, 1.0, *[2.0**-25] * 3))) == 1.0
    assert float(matmul(HOPPER_BF16, a, one_row(HOPPER_BF16, 1.0, *[2.0**-26] * 4))) == 1.0


@pytest.mark.parametrize("core", [HOPPER_E4M3, HOPPER_E5M2], ids=str)
def test_products_are_not_normalised_before_they_are_aligned(core):
    """1.5 * 1.5 = 2.25 counts as exponent 0, so 2^-13 beside it is kept; two of them reach the result."""
    a, b = one_row(core, 1.5, 2.0**-6, 2.0**-6), one_row(core, 1.5, 2.0**-7, 2.0**-7)
    assert float(matmul(core, a, b)) == 2.25 + 2.0**-12


def test_subnormal_operands_count_with_the_minimum_exponent():
    """2^-9 of E4M3 counts as exponent -6: with 2^-6 the sum is aligned to 2^-12, and C = 2^-26 is cut."""
    a, b = one_row(HOPPER_E4M3, 2.0**-9), one_row(HOPPER_E4M3, 2.0**-6)
    assert float(matmul(HOPPER_E4M3, a, b, c=torch.tensor([[2.0**-26]]))) == 2.0**-15
    assert float(matmul(HOPPER_E4M3, a, b, c=torch.tensor([[2.0**-25]]))) == 2.0**-15 + 2.0**-25


@pytest.mark.parametrize("core", [HOPPER_E4M3, HOPPER_E5M2], ids=str)
def test_the_accumulator_is_cut_too(core):
    zeros = one_row(core)
    c = torch.tensor([[1 + 2.0**-13 + 2.0**-14]])
    assert float(matmul(core, zeros, zeros, c=c)) == 1 + 2.0**-13
    assert float(matmul(core, zeros, zeros, c=-c)) == -1 - 2.0**-13


def test_an_accumulator_between_zero_products_survives():
    """Zeros never decide the alignment: not even beside the largest operand."""
    a, b = one_row(HOPPER_BF16, 2.0**127), one_row(HOPPER_BF16)
    for c in (2.0**-126, 2.0**-149, -(2.0**-140)):
        assert float(matmul(HOPPER_BF16, a, b, c=torch.tensor([[c]]))) == c


@each_core
@pytest.mark.parametrize("c", [None, 0.0, -0.0])
def test_a_zero_result_is_positive(core, c):
    start = None if c is None else torch.full((1, 1), c)
    for a, b in [
        (one_row(core), one_row(core)),
        (-torch.ones(1, core.k), one_row(core)),
        (one_row(core), -one_row(core)),
    ]:
        result = matmul(core, a, b, c=start)
        assert float(result) == 0
        assert not result.signbit()
    cancelling = matmul(core, one_row(core, 1.0, -1.0), one_row(core, 1.0, 1.0), c=start)
    assert not cancelling.signbit()


def test_the_alignment_never_goes_below_its_floor():
    """2^-149 less something: one that is cut at 2^-158 leaves it, one that is kept takes the result to zero."""
    a = one_row(HOPPER_BF16, 2.0**-74, 2.0**-79)
    assert float(matmul(HOPPER_BF16, a, one_row(HOPPER_BF16, 2.0**-75, -(2.0**-80)))) == 2.0**-149
    assert float(matmul(HOPPER_BF16, a, one_row(HOPPER_BF16, 2.0**-75, -(2.0**-79)))) == 0.0


# --- order -------------------------------------------------------------------------------------------------------


@each_core
@pytest.mark.parametrize("kind", ["normal", "straddling", "cancelling"])
def test_order_inside_an_instruction_does_not_matter(core, kind):
    a, b = operands(core, kind, 8, 2 * core.k, seed=12)
    result = matmul(core, a, b)
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        order = torch.cat([torch.randperm(core.k, generator=g) + start for start in (0, core.k)])
        assert same_bits(matmul(core, a[:, order], b[:, order]), result)


@pytest.mark.parametrize("core", [HOPPER_E4M3, HOPPER_E5M2], ids=str)
def test_order_of_the_instructions_matters(core):
    """2^-14 + 2^-14 first, then 1: the sum 2^-13 is kept. The other way round each 2^-14 is cut."""
    small = one_row(core, 2.0**-6, 2.0**-6), one_row(core, 2.0**-8, 2.0**-8)
    large = one_row(core, 1.0), one_row(core, 1.0)
    ascending = [torch.cat(pair, 1) for pair in zip(small, large, strict=True)]
    descending = [torch.cat(pair, 1) for pair in zip(large, small, strict=True)]
    assert float(matmul(core, *ascending)) == 1 + 2.0**-13
    assert float(matmul(core, *descending)) == 1.0


def test_order_of_the_instructions_matters_bf16():
    small = one_row(HOPPER_BF16, 1.0, 1.0), one_row(HOPPER_BF16, 2.0**-24, 2.0**-24)
    large = one_row(HOPPER_BF16, 1.0), one_row(HOPPER_BF16, 1.0)
    later = one_row(HOPPER_BF16, 1.0), one_row(HOPPER_BF16, 2.0**-24)
    together = [torch.cat(pair, 1) for pair in zip(small, large, strict=True)]
    apart = [torch.cat(triple, 1) for triple in zip(large, later, later, strict=True)]
    assert float(matmul(HOPPER_BF16, *together)) == 1 + 2.0**-23
    assert float(matmul(HOPPER_BF16, *apart)) == 1.0


@each_core
def test_a_chain_can_be_cut_between_instructions(core):
    a, b = operands(core, "normal", 5, 3 * core.k, seed=13)
    first = matmul(core, a[:, : core.k], b[:, : core.k])
    assert same_bits(matmul(core, a[:, core.k :], b[:, core.k :], c=first), matmul(core, a, b))


# --- NaN and infinity --------------------------------------------------------------------------------------------


@each_core
@pytest.mark.parametrize("position", [0, 1])
def test_nan_operand_spoils_its_row_or_column_only(core, position):
    a, b = operands(core, "normal", 4, 2 * core.k, seed=14)
    clean = matmul(core, a, b)
    pair = [a.clone(), b.clone()]
    pair[position][2, core.k + 3] = NAN  # in the second instruction
    spoiled = matmul(core, *pair)
    spoiled = spoiled if position == 0 else spoiled.T
    clean = clean if position == 0 else clean.T
    assert bool(spoiled[2].isnan().all())
    others = [0, 1, 3]
    assert same_bits(spoiled[others], clean[others])


@each_core
def test_nan_becomes_the_gpus(core):
    """Whatever its sign, its payload and where it comes from: an operand, the accumulator, or infinities."""
    nans = torch.tensor([[0x7FC00000, -0x400000, 0x7F800001, -1]], dtype=torch.int32).view(torch.float32)
    operand, ones = torch.cat((nans, one_row(core)[:, 4:]), 1), torch.ones(4, core.k)
    infinities = one_row(core, INF, -INF)
    for result in (
        matmul(core, operand, ones),
        matmul(core, one_row(core), ones, c=nans),
        matmul(core, infinities, ones),
        matmul(core, infinities, ones * 0),
    ):
        assert result.view(torch.int32).tolist() == [[0x7FFFFFFF] * 4]


@each_core
def test_nan_times_zero_and_nan_accumulator(core):
    assert matmul(core, one_row(core, NAN), one_row(core)).isnan()
    assert matmul(core, one_row(core, 1.0), one_row(core, 1.0), c=torch.tensor([[NAN]])).isnan()
    assert matmul(core, one_row(core), one_row(core), c=torch.tensor([[NAN]])).isnan()


@each_core
@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        ((INF,), (INF,), 0.0, INF),
        ((-INF,), (INF,), 0.0, -INF),
        ((INF, 1.0), (2.0, 1.0), 0.0, INF),
        ((INF, 1.0), (-2.0, 1.0), 5.0, -INF),
        ((INF,), (0.0,), 0.0, NAN),
        ((INF, INF), (1.0, -1.0), 0.0, NAN),
        ((INF,), (1.0,), -INF, NAN),
        ((INF,), (1.0,), INF, INF),
        ((1.0,), (1.0,), -INF, -INF),
        ((0.0,), (0.0,), INF, INF),
        ((INF, NAN), (1.0, 1.0), 0.0, NAN),
    ],
)
def test_infinity(core, a, b, c, expected):
    """As float32 operands, whether or not the operand format has an infinity (E4M3 has none)."""
    result = float(matmul(core, one_row(core, *a), one_row(core, *b), c=torch.tensor([[c]])))
    assert result == expected or (math.isnan(result) and math.isnan(expected))


def test_infinite_accumulator_of_an_earlier_instruction_stays():
    a, b = torch.ones(1, 64), torch.ones(1, 64)
    a[0, 0] = INF
    assert float(matmul(HOPPER_E5M2, a, b)) == INF
    b[0, 40] = -INF
    assert matmul(HOPPER_E5M2, a, b).isnan()


# --- shapes and memory -------------------------------------------------------------------------------------------


@each_core
def test_shapes_that_do_not_match(core):
    good = torch.zeros(2, core.k)
    for a, b in [
        (torch.zeros(2, core.k + 1), torch.zeros(2, core.k + 1)),
        (torch.zeros(2, core.k // 2), torch.zeros(2, core.k // 2)),
        (good, torch.zeros(2, 2 * core.k)),
        (good[0], good),
        (good, good[None]),
    ]:
        with pytest.raises(ValueError, match=f"K a multiple of {core.k}"):
            matmul(core, a, b)


@each_core
@pytest.mark.parametrize("shape", [(2, 3), (3,), (1, 2), (3, 2, 1), ()])
def test_accumulator_of_another_shape(core, shape):
    """Not even one that would broadcast."""
    with pytest.raises(ValueError, match=r"^c must be \[M, N\] = \(3, 2\), got " + re.escape(str(shape))):
        matmul(core, torch.zeros(3, core.k), torch.zeros(2, core.k), c=torch.zeros(shape))


@each_core
def test_empty_sides(core):
    some, none = torch.ones(3, 2 * core.k), torch.ones(0, 2 * core.k)
    assert matmul(core, none, some).shape == (0, 3)
    assert matmul(core, some, none).shape == (3, 0)
    assert matmul(core, none, none).shape == (0, 0)
    no_k = torch.ones(3, 0)
    assert torch.equal(matmul(core, no_k, no_k), torch.zeros(3, 3))
    c = torch.randn(3, 3)
    assert torch.equal(matmul(core, no_k, no_k, c=c), c)  # no instruction touches it


@each_core
@pytest.mark.parametrize("chunk", [1, 3000, 1 << 24])
def test_result_does_not_depend_on_the_chunk(core, chunk, monkeypatch):
    a, _ = operands(core, "normal", 67, 2 * core.k, seed=15)
    b, _ = operands(core, "straddling", 45, 2 * core.k, seed=16)
    c = accumulators("near", 67, 45, seed=17)
    whole = matmul(core, a, b, c=c)
    monkeypatch.setattr(tensor_core, "_CHUNK", chunk)
    assert same_bits(matmul(core, a, b, c=c), whole)
    alone = matmul(core, a[50:51], b[44:], c=c[50:51, 44:])
    assert same_bits(alone, whole[50:51, 44:])
