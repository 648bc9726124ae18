"""Which outputs a sum in order of arrival can give, against every permutation in exact rational arithmetic."""

import math
from fractions import Fraction
from functools import cache, reduce
from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ep.parity import order_set
from fp4ep.parity.order_set import MAX_LIVE, add, reachable, spread

INF, NAN = math.inf, math.nan
MAX = 255 * 2.0**120  # bf16's largest
TINY = 2.0**-133  # bf16's smallest
EVERY = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16)

CASES = {
    "no term": [],
    "one": [1.5],
    "one negative zero": [-0.0],
    "two that tie": [1.0, 2.0**-8],
    "negative zeros": [-0.0, -0.0, -0.0],
    "signed zeros and a subnormal": [-0.0, 0.0, -TINY],
    "cancellation": [1.0, 2.0**-9, -1.0],
    "cancellation after a tie": [1.0, 3 * 2.0**-8, 2.0**-9, -1.0],
    "ties": [1.0, 2.0**-8, 2.0**-8, 2.0**-8],
    "duplicates": [1.5, 1.5, -(2.0**-7), -(2.0**-7), -(2.0**-7)],
    "beyond float32's 24 bits": [1.0, 2.0**-30, -1.0, -(2.0**-24), 2.0**-8],
    "subnormals": [3 * TINY, -TINY, 2.0**-126, -129 * TINY],
    "infinity": [INF, 1.0, -2.0],
    "both infinities": [INF, -INF, 1.0],
    "overflow and back": [MAX, MAX, -MAX],
    "overflow by a tie": [MAX, 2.0**119, -(2.0**118), 2.0**112],
    "overflow meets infinity": [MAX, MAX, -INF],
    "nan": [NAN, 1.0, INF],
}


def exact_add(a: float, b: float) -> float:
    """a + b rounded to bf16: to nearest, ties to even (as Python's round does), with its subnormals and overflow."""
    total = Fraction(a) + Fraction(b) if math.isfinite(a) and math.isfinite(b) else 0
    if total == 0:
        return a + b  # float64 knows NaN, infinity, and the sign of an exact zero
    exponent = abs(total).numerator.bit_length() - total.denominator.bit_length()
    exponent -= abs(total) < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, -126) - 7)
    rounded = abs(round(total / step) * step)
    return math.copysign(INF if rounded >= 2**128 else float(rounded), total)


def bits(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.bfloat16).view(torch.int16)


def every_order(terms: list[float]) -> torch.Tensor:
    """The sums of all k! orders, exactly rounded, as bf16."""
    plus = cache(exact_add)
    return torch.tensor([reduce(plus, order, 0.0) for order in permutations(terms)]).bfloat16()


def among(outputs: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """What `reachable` promises: bits equal one of the sums, or both are NaN."""
    return torch.isin(bits(outputs), bits(sums)) | (outputs.isnan() & sums.isnan().any())


def one_token(terms, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """terms and topk_ids of one token whose elements all have the same terms, in live slots."""
    return torch.tensor(terms).bfloat16().view(1, -1, 1).expand(-1, -1, hidden), torch.zeros(1, len(terms))


def random_terms(seed: int, *shape: int, octaves: float = 3.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * 2 ** (torch.rand(shape, generator=g) * octaves)).bfloat16()


def in_some_order(terms: torch.Tensor, seed: int) -> torch.Tensor:
    """Sum over the slots, an order of its own for every element."""
    order = torch.rand(terms.shape, generator=torch.Generator().manual_seed(seed)).argsort(1)
    return reduce(add, terms.gather(1, order).unbind(1), torch.zeros_like(terms[:, 0]))


# --- the addition ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
def test_add_all_significands_and_distances(sign):
    # Integers: a = A * 2^distance and b = B, rounded to 8 bits by hand. Other exponents only scale this.
    a, b, distance = torch.meshgrid(torch.arange(128, 256), torch.arange(128, 256), torch.arange(41), indexing="ij")
    total = (a << distance) + sign * b
    size = total.abs()
    cut = sum((size >> 8 + i > 0).long() for i in range(42))  # bits too many
    kept, rest = size >> cut, size & (1 << cut) - 1
    half = (1 << cut) >> 1
    kept = kept + ((rest > half) | ((rest == half) & (cut > 0) & (kept & 1 == 1)))
    expected = total.sign() * (kept << cut)
    found = add((a.double() * 2.0**distance).bfloat16(), (sign * b).bfloat16())
    assert torch.equal(found.double(), expected.double())


HARD = [
    *(s * m * 2.0**e for s, e, m in product((1, -1), (-133, -127, -126, -110, 0, 104, 119, 120), (128, 129, 255))),
    *(s * m * TINY for s, m in product((1, -1), (0, 1, 2, 63, 127))),
]


def test_add_at_the_ends_of_the_range():
    operands = torch.tensor([*(x for x in HARD if abs(x) <= MAX), 2.0**112, 2.0**119, INF, -INF, NAN]).bfloat16()
    found = add(operands[:, None], operands)
    expected = torch.tensor([[exact_add(a, b) for b in operands.tolist()] for a in operands.tolist()]).bfloat16()
    assert torch.equal(found.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(bits(found)[number], bits(expected)[number])


# --- reachable: every output there is ----------------------------------------------------------------------------


@pytest.mark.parametrize("terms", CASES.values(), ids=CASES.keys())
def test_each_of_65536_outputs(terms):
    found = reachable(EVERY[None], *one_token(terms, len(EVERY)))
    assert torch.equal(found[0], among(EVERY, every_order(terms)))


@pytest.mark.parametrize("live", [5, 6])
def test_random_terms_and_neighbours(live):
    for row in random_terms(live, 6, live).tolist():
        sums = every_order(row)
        outputs = torch.cat([bits(sums) + step for step in (-1, 0, 1)]).unique().view(torch.bfloat16)
        found = reachable(outputs[None], *one_token(row, len(outputs)))[0]
        assert torch.equal(found, among(outputs, sums))
        assert 0 < found.sum() < len(found)


def test_a_sum_in_float32_rounded_once_is_told_apart():
    terms = [1.0, 1 + 2.0**-7, 2.0**-9]
    once = torch.tensor([terms]).sum(1, keepdim=True).bfloat16()
    assert once == 2.015625
    assert not reachable(once, *one_token(terms, 1))  # all six orders give 2
    assert reachable(torch.full((1, 1), 2.0).bfloat16(), *one_token(terms, 1))


def test_rounding_once_may_coincide_with_an_order():
    # 1 and three halves of its last place, the example of TensorRT-LLM#16778: slot order gives 1, float32 1.015625,
    # and so does bf16 when the 1 comes third or last. No order stops in between.
    outputs = torch.tensor([[1.0, 1.0078125, 1.015625]]).bfloat16()
    assert reachable(outputs, *one_token(CASES["ties"], 3)).tolist() == [[True, False, True]]


# --- masked slots, shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stale", [NAN, INF, 0.25, -0.0])
def test_masked_slots_are_not_added(stale):
    row = [1.0, 3 * 2.0**-8, 2.0**-9, -1.0]
    masks = list(product((True, False), repeat=len(row)))  # one token each, so every number of live slots
    per_token = [every_order([x for x, is_live in zip(row, mask, strict=True) if is_live]) for mask in masks]
    outputs = bits(torch.cat([*per_token, torch.tensor([NAN, INF, -0.0]).bfloat16()])).unique().view(torch.bfloat16)
    live = torch.tensor(masks)
    terms = torch.where(live, torch.tensor(row), stale).bfloat16()[:, :, None].expand(-1, -1, len(outputs))
    found = reachable(outputs.expand(len(masks), -1), terms, torch.where(live, 7, -1))
    assert torch.equal(found, torch.stack([among(outputs, sums) for sums in per_token]))


def test_all_masked_is_plus_zero():
    terms, ids = torch.full((2, 3, 4), NAN).bfloat16(), torch.full((2, 3), -1)
    output = torch.tensor([[0.0, -0.0, TINY, NAN]]).bfloat16().expand(2, -1)
    assert reachable(output, terms, ids).tolist() == 2 * [[True, False, False, False]]
    assert [x.tolist() for x in spread(terms, ids)] == 2 * [2 * [4 * [0.0]]]


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 3, 0), (2, 0, 3)])
def test_empty_shapes(shape):
    terms, ids = torch.zeros(shape).bfloat16(), torch.zeros(shape[:2])
    assert reachable(torch.zeros(shape[0], shape[2]).bfloat16(), terms, ids).sum() == shape[0] * shape[2]
    assert spread(terms, ids)[0].shape == shape[::2]


# --- many elements, many slots -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(0, 2**32 - 1), st.floats(0, 24))
def test_every_order_of_arrival_is_accepted(live, seed, octaves):
    terms = random_terms(seed, 2, live, 16, octaves=octaves)
    assert reachable(in_some_order(terms, seed), terms, torch.zeros(2, live)).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.floats(0, 24))
def test_spread_is_reached_and_not_passed(live, seed, octaves):
    terms, ids = random_terms(seed, 2, live, 8, octaves=octaves), torch.zeros(2, live)
    low, high = (bound.bfloat16() for bound in spread(terms, ids))
    assert reachable(low, terms, ids).all()
    assert reachable(high, terms, ids).all()
    for bound, away in ((low, -INF), (high, INF)):
        outside = torch.nextafter(bound, torch.full_like(bound, away))
        assert not reachable(outside, terms, ids).any()


@pytest.mark.parametrize("terms", CASES.values(), ids=CASES.keys())
def test_spread_of_each_case(terms):
    low, high = spread(*one_token(terms, 2))
    sums = every_order(terms).float()
    np.testing.assert_array_equal(low, sums.amin().expand(1, 2))  # a NaN equals a NaN here
    np.testing.assert_array_equal(high, sums.amax().expand(1, 2))


def test_the_search_alone_in_chunks(monkeypatch):
    monkeypatch.setattr(order_set, "_unexplained", lambda wanted, rows, left: left)
    terms = random_terms(1, 2, 8, 700)  # 1,400 elements, 639 at a time
    wrong = torch.arange(700) % 3 == 0
    output = torch.where(wrong, 4096.0, in_some_order(terms, 2))
    assert torch.equal(reachable(output, terms, torch.zeros(2, 8)), ~wrong.expand(2, -1))


def test_luck_alone_accepts_nothing_wrong(monkeypatch):
    monkeypatch.setattr(order_set, "_all_sums", lambda rows: [])
    for row in random_terms(3, 4, 4).tolist():
        found = reachable(EVERY[None], *one_token(row, len(EVERY)))[0]
        assert 0 < found.sum()
        assert not (found & ~among(EVERY, every_order(row))).any()


def test_most_live_slots():
    row = random_terms(4, MAX_LIVE)
    sums = in_some_order(row[None, :, None].expand(1, -1, 300), 5)
    outputs = bits(sums).unique().view(torch.bfloat16)[None]
    assert outputs.shape[1] > 4
    terms, ids = one_token([NAN, *row.tolist()], outputs.shape[1])
    ids[0, 0] = -1  # one more slot, but masked
    assert reachable(outputs, terms, ids).all()


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"output": torch.zeros(2, 4)}, "output must be bf16"),
        ({"output": torch.zeros(4, 2).bfloat16()}, r"output must be bf16 \[2, 4\]"),
        ({"terms": torch.zeros(2, 3, 4)}, "terms must be bf16"),
        ({"terms": torch.zeros(2, 4).bfloat16()}, r"terms must be bf16 \[T, top_k, H\]"),
        ({"topk_ids": torch.zeros(2, 4)}, r"topk_ids must be \[2, 3\]"),
        (
            {"terms": torch.zeros(2, MAX_LIVE + 1, 4).bfloat16(), "topk_ids": torch.zeros(2, MAX_LIVE + 1)},
            f"topk_ids must have at most {MAX_LIVE} live slots per token, got {MAX_LIVE + 1}",
        ),
    ],
)
def test_bad_arguments(changed, message):
    good = {
        "output": torch.zeros(2, 4).bfloat16(),
        "terms": torch.zeros(2, 3, 4).bfloat16(),
        "topk_ids": torch.zeros(2, 3),
    }
    with pytest.raises(ValueError, match=message):
        reachable(**good | changed)
    if "output" not in changed:
        with pytest.raises(ValueError, match=message):
            spread(**{name: value for name, value in (good | changed).items() if name != "output"})
