"""Deterministic inputs by name: a recording stores generator, arguments and checksum in place of a large tensor.

Every generator draws raw words from numpy's PCG64 or its legacy MT19937, whose streams numpy guarantees, and uses
integer and exactly rounded operations only, so that any platform makes the same bits.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch


def _words(seed: int, count: int) -> np.ndarray:
    return np.random.PCG64(seed).random_raw(count)


def normal(seed: int, shape: Sequence[int], scale: float, dtype: str = "bfloat16") -> torch.Tensor:
    """About normal with standard deviation `scale`, within 3.5 of them: the sum of four 16-bit integers.

    dtype: torch's name; the float32 value is rounded to it, nearest even.
    """
    words = _words(seed, math.prod(shape))
    total = sum((words >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4))
    values = (np.asarray(total) - 2 * 65535) / 37837.0 * scale
    return torch.from_numpy(values.astype(np.float32)).to(getattr(torch, dtype)).reshape(tuple(shape))


def integers(seed: int, shape: Sequence[int], low: int, high: int) -> torch.Tensor:
    """uint8, uniform over low..high inclusive. Raises ValueError unless 0 <= low <= high <= 255."""
    if not 0 <= low <= high <= 255:
        raise ValueError(f"low and high must be 0 <= low <= high <= 255, got {low} and {high}")
    words = _words(seed, math.prod(shape)) % np.uint64(high - low + 1) + np.uint64(low)
    return torch.from_numpy(words.astype(np.uint8)).reshape(tuple(shape))


def codes(seed: int, shape: Sequence[int], dtype: str, low: int, high: int) -> torch.Tensor:
    """Floating-point values by their bits: magnitude codes uniform over low..high inclusive, either sign.

    dtype: torch's name of one of 1, 2 or 4 bytes. Raises ValueError unless low and high are codes without sign.
    """
    kind = getattr(torch, dtype)
    sign = 1 << 8 * kind.itemsize - 1
    if not 0 <= low <= high < sign:
        raise ValueError(f"low and high must be 0 <= low <= high < {sign:#x} for {dtype}, got {low:#x} and {high:#x}")
    words = _words(seed, math.prod(shape))
    magnitudes = (words & np.uint64((1 << 63) - 1)) % np.uint64(high - low + 1) + np.uint64(low)
    signed = (words >> np.uint64(63)) * np.uint64(sign) + magnitudes
    integer = np.dtype(f"<u{kind.itemsize}")
    return torch.from_numpy(signed.astype(integer)).view(kind).reshape(tuple(shape))


def mt19937(seed: int, skip: int, shape: Sequence[int], low: int, high: int) -> torch.Tensor:
    """uint8, low + word % (high - low + 1) of a 32-bit stream after `skip` words: what torch.randint draws on a CPU."""
    words = np.random.RandomState(seed).randint(0, 1 << 32, size=skip + math.prod(shape), dtype=np.uint32)[skip:]
    return torch.from_numpy((words % np.uint32(high - low + 1) + np.uint32(low)).astype(np.uint8)).reshape(tuple(shape))


GENERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "normal": normal,
    "integers": integers,
    "codes": codes,
    "mt19937": mt19937,
}
