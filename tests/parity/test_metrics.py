"""Distances: bits, ulps, norms; what zero, NaN and infinity are to each."""

import math

import pytest
import torch

from fp4ep.parity import metrics


def tensor(*values: float, dtype=torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ulp_distance_counts_steps(dtype):
    one, zero = tensor(1.0, dtype=dtype), tensor(0.0, dtype=dtype)
    up = torch.nextafter(one, one * 2)
    assert metrics.ulp_distance(one, up).item() == metrics.ulp_distance(up, one).item() == 1
    assert metrics.ulp_distance(zero, -zero).item() == 1
    smallest = torch.nextafter(zero, one)
    assert metrics.ulp_distance(-smallest, smallest).item() == 3  # over -0 and +0
    binades = metrics.ulp_distance(one, one * 2).item()
    assert binades == {torch.float32: 2**23, torch.bfloat16: 2**7, torch.float16: 2**10}[dtype]


def test_ulp_distance_of_every_pair_of_fp8_codes():
    """Against the rank of each value in the sorted list of codes."""
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[~torch.isnan(codes.view(torch.float8_e4m3fn).float())]
    order = sorted(finite.tolist(), key=lambda c: (-1 if c >= 128 else 1) * ((c & 127) + (c < 128) * 0.5))
    place = {code: rank for rank, code in enumerate(order)}
    left, right = (x.flatten() for x in torch.meshgrid(finite, finite, indexing="ij"))
    found = metrics.ulp_distance(left.view(torch.float8_e4m3fn), right.view(torch.float8_e4m3fn))
    expected = [abs(place[a] - place[b]) for a, b in zip(left.tolist(), right.tolist(), strict=True)]
    assert found.tolist() == expected


def test_nan_is_far_from_all_but_itself():
    nan = tensor(math.nan)
    other = nan.view(torch.int32).add(1).view(torch.float32)
    assert metrics.ulp_distance(nan, nan).item() == 0
    for value in (other, tensor(math.inf), tensor(0.0)):
        assert metrics.ulp_distance(nan, value).item() == metrics.NAN_ULPS
    assert metrics.bits_differ(nan, other).item()
    assert not metrics.bits_differ(nan, nan).item()


def test_integers_differ_by_their_difference():
    assert metrics.ulp_distance(torch.tensor([3, -1]), torch.tensor([5, 7])).tolist() == [2, 8]


def test_bits_differ_wants_one_shape_and_dtype():
    for right in (torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="left and right must be of one shape and dtype"):
            metrics.bits_differ(torch.zeros(2), right)
    assert metrics.bits_differ(tensor(0.0), tensor(-0.0)).item()


def test_norms_of_a_wrong_scale():
    """Cosine would be 1: rel_l2, SQNR and calc_diff see the factor."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert metrics.rel_l2(x, 2 * x) == pytest.approx(1.0)
    assert metrics.sqnr_db(x, 1.1 * x) == pytest.approx(20.0, abs=1e-3)
    assert metrics.calc_diff(x, 2 * x) == pytest.approx(0.2)


def test_norms_of_equal_and_of_nothing():
    special = tensor(1.0, math.nan, math.inf, -math.inf)
    assert metrics.rel_l2(special, special) == 0.0
    assert metrics.sqnr_db(special, special) == math.inf
    assert metrics.rel_l2(tensor(0.0), tensor(1.0)) == math.inf
    assert metrics.calc_diff(tensor(0.0), tensor(0.0)) == 0.0
    assert metrics.rel_l2(torch.zeros(0), torch.zeros(0)) == 0.0


def test_hex_code_shows_every_digit():
    assert metrics.hex_code(tensor(-0.0)[0]) == "0x80000000"
    assert metrics.hex_code(tensor(1.0, dtype=torch.bfloat16)[0]) == "0x3f80"
    assert metrics.hex_code(torch.tensor(7, dtype=torch.uint8)) == "0x07"
