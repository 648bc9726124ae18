"""Generated tensors: the same bits on every platform, from the ranges and distributions that they promise."""

import hashlib
import math

import numpy as np
import pytest
import torch

from fp4ep.parity import generate
from fp4ep.parity.generate import GENERATORS, codes, integers, mt19937, normal

#: A recording rebuilds its tensors by these rules: a change of any makes every shipped recording unreadable.
SAMPLES = [
    (
        "normal",
        {"seed": 7, "shape": [2, 3, 5], "scale": 1.0},
        "b128f2e63952db6645d0f4749d63b07f216af3a12c56b6e510797a6337819255",
    ),
    (
        "normal",
        {"seed": 7, "shape": [33], "scale": 0.06},
        "ed78418bfdb0a70ae08ff79503146d6b0c1b2c10a8f1aad8315073198dca746c",
    ),
    (
        "normal",
        {"seed": 7, "shape": [33], "scale": 1.0, "dtype": "float8_e5m2"},
        "bf2f18530bad0bb08fc8ccaf6612b0ef576474184a6b337462ba9a31d3e11ffc",
    ),
    (
        "codes",
        {"seed": 7, "shape": [3, 11], "dtype": "float8_e4m3fn", "low": 0, "high": 126},
        "a4f5d8baab662bbaa3428e93e4a03c2a2e00feab5851b06c893f5bf6fc4c7ad1",
    ),
    (
        "codes",
        {"seed": 7, "shape": [33], "dtype": "float32", "low": 0x3F800000, "high": 0x3FFFFFFF},
        "3a860e9e073b3309c4eef8cf3f1baf30d5a3bd5a6bb891cd3d3c49fce70ed0a1",
    ),
    (
        "integers",
        {"seed": 7, "shape": [33], "low": 1, "high": 126},
        "0b2d602d5c8daa68a5c35524fdf16ffa316780ccd59f0e8940a74cc55887f06f",
    ),
    (
        "integers",
        {"seed": 7, "shape": [33], "low": 0, "high": 255},
        "2cc6a8e9de879d93d8371db70986bec487d1d291a40a6caa295f4e1b786862ad",
    ),
    (
        "mt19937",
        {"seed": 1, "skip": 5, "shape": [33], "low": 1, "high": 126},
        "e1b24ef02b907e9c75436c2cbe6357ac24ec10d1be2e9f8f2aed54f8485dae9d",
    ),
]

ONES = (1 << 64) - 1


@pytest.mark.parametrize(("name", "arguments", "sha256"), SAMPLES, ids=lambda value: str(value)[:24])
def test_bits_never_change(name, arguments, sha256):
    tensor = GENERATORS[name](**arguments)
    assert list(tensor.shape) == arguments["shape"]
    assert hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() == sha256


def test_every_generator_has_a_sample():
    assert {name for name, *_ in SAMPLES} == set(GENERATORS)


def test_normal_is_the_sum_of_four_halfwords():
    """Word by word with Python's integers and floats."""
    words = np.random.PCG64(3).random_raw(50).tolist()
    expected = []
    for word in words:
        total = sum(word >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 2 * 65535
        expected.append(float(np.float32(total / 37837.0 * 0.06)))
    assert normal(3, [50], 0.06).tolist() == torch.tensor(expected).bfloat16().tolist()


def test_integers_is_the_remainder():
    words = np.random.PCG64(3).random_raw(50).tolist()
    assert integers(3, [50], 105, 124).tolist() == [word % 20 + 105 for word in words]


def test_normal_is_rounded_once():
    """From float32 to the type asked for: through bf16 some of these would be rounded twice."""
    words = np.random.PCG64(3).random_raw(2000).tolist()
    exact = [np.float32((sum(w >> s & 0xFFFF for s in (0, 16, 32, 48)) - 2 * 65535) / 37837.0) for w in words]
    expected = torch.from_numpy(np.array(exact))
    assert torch.equal(normal(3, [2000], 1.0, "float16"), expected.half())
    found = normal(3, [2000], 1.0, "float8_e4m3fn")
    assert torch.equal(found.view(torch.uint8), expected.to(torch.float8_e4m3fn).view(torch.uint8))


def test_codes_are_sign_and_remainder():
    """The first bit of a word is the sign, the others draw the magnitude."""
    words = np.random.PCG64(3).random_raw(50).tolist()
    expected = [(word >> 63 << 15) + 0x3C00 + word % (1 << 63) % 0x400 for word in words]
    drawn = codes(3, [50], "float16", 0x3C00, 0x3FFF)
    assert drawn.dtype is torch.float16
    assert drawn.view(torch.int16).tolist() == [code - (code >> 15 << 16) for code in expected]
    assert 1 <= float(drawn.abs().min()) <= float(drawn.abs().max()) < 2


@pytest.mark.parametrize("dtype", ["float8_e5m2", "bfloat16", "float32"])
def test_codes_range(monkeypatch, dtype):
    """Both ends with both signs, from the extreme words."""
    sign = 1 << 8 * getattr(torch, dtype).itemsize - 1
    monkeypatch.setattr(generate, "_words", lambda seed, count: np.array([0, ONES >> 1, 1 << 63, ONES], np.uint64))
    integer = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[getattr(torch, dtype).itemsize]
    last = (ONES >> 1) % 5 + 3
    assert codes(0, [4], dtype, 3, 7).view(integer).tolist() == [3, last, sign + 3, sign + last]
    assert codes(0, [4], dtype, 0, sign - 1).view(integer).tolist() == [0, sign - 1, sign, 2 * sign - 1]


@pytest.mark.parametrize(("low", "high"), [(-1, 3), (4, 3), (0, 128)])
def test_codes_beyond_the_type(low, high):
    with pytest.raises(ValueError, match=r"low and high must be 0 <= low <= high < 0x80 for float8_e5m2, got "):
        codes(0, [4], "float8_e5m2", low, high)


def test_mt19937_is_the_stream_of_the_original_code():
    """The first outputs for seed 5489, the default of Matsumoto and Nishimura's code and of C++'s std::mt19937."""
    words = [3499211612, 581869302, 3890346734, 3586334585, 545404204]
    assert mt19937(5489, 0, [5], 0, 255).tolist() == [word % 256 for word in words]
    assert mt19937(5489, 2, [3], 105, 124).tolist() == [word % 20 + 105 for word in words[2:]]


def test_a_seed_gives_one_stream():
    """A longer tensor begins with the shorter one; another seed gives another."""
    assert torch.equal(normal(5, [4, 6], 1.0).flatten()[:7], normal(5, [7], 1.0))
    assert torch.equal(integers(5, [4, 6], 0, 255).flatten()[:7], integers(5, [7], 0, 255))
    assert not torch.equal(normal(5, [64], 1.0), normal(6, [64], 1.0))


@pytest.mark.parametrize("scale", [1.0, 0.06])
def test_normal_has_its_mean_and_deviation(scale):
    """Bounds for n values: five standard errors, and a rounding to bf16 of each value.

    A sum of four uniform halfwords has standard deviation sqrt(4 * (2^32 - 1) / 12) = 37837.2 and kurtosis 3 - 1.2 / 4,
    so the mean has standard error 1 / sqrt(n) and the deviation sqrt((2.7 - 1) / n) / 2, in units of `scale`. Rounding
    moves each value by at most 2^-9 of itself, so the deviation by as much, and the mean by less than 2^-9 deviations.
    """
    n = 1 << 16
    values = normal(11, [256, 256], scale).double()
    assert abs(float(values.mean())) <= scale * (5 / math.sqrt(n) + 2**-9)
    assert abs(float(values.std(correction=0)) / scale - 1) <= 5 * math.sqrt(1.7 / n) / 2 + 2**-9


def test_normal_range(monkeypatch):
    """All halfwords 0, or all 65535: 2 * 65535 / 37837 = 3.464 deviations, either side."""
    monkeypatch.setattr(generate, "_words", lambda seed, count: np.array([0, ONES], np.uint64))
    ends = normal(0, [2], 2.0)
    assert ends.tolist() == [-6.9375, 6.9375]  # bf16 of 6.928
    assert float(ends.abs().max()) < 2 * 3.5


@pytest.mark.parametrize(("low", "high"), [(0, 255), (1, 126), (105, 105)])
def test_integers_range(monkeypatch, low, high):
    """Both ends are reached and nothing else: 64 times as many draws as values, then the extreme words."""
    drawn = integers(2, [64, high - low + 1], low, high)
    assert drawn.dtype is torch.uint8
    assert drawn.unique().tolist() == list(range(low, high + 1))
    words = np.array([0, ONES, ONES - ONES % (high - low + 1) - 1], np.uint64)
    monkeypatch.setattr(generate, "_words", lambda seed, count: words)
    assert integers(0, [3], low, high).tolist() == [low, ONES % (high - low + 1) + low, high]
