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


def normal(seed: int, shape: Sequence[int], scale: float) -> torch.Tensor:
    """bf16, about normal with standard deviation `scale`, within 3.5 of them: the sum of four 16-bit integers."""
    words = _words(seed, math.prod(shape))
    total = sum((words >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4))
    values = (np.asarray(total) - 2 * 65535) / 37837.0 * scale
    return torch.from_numpy(values.astype(np.float32)).bfloat16().reshape(tuple(shape))


def integers(seed: int, shape: Sequence[int], low: int, high: int) -> torch.Tensor:
    """uint8, uniform over low..high inclusive. Raises ValueError unless 0 <= low <= high <= 255."""
    if not 0 <= low <= high <= 255:
        raise ValueError(f"low and high must be 0 <= low <= high <= 255, got {low} and {high}")
    words = _words(seed, math.prod(shape)) % np.uint64(high - low + 1) + np.uint64(low)
    return torch.from_numpy(words.astype(np.uint8)).reshape(tuple(shape))


def mt19937(seed: int, skip: int, shape: Sequence[int], low: int, high: int) -> torch.Tensor:
    """uint8, low + word % (high - low + 1) of a 32-bit stream after `skip` words: what torch.randint draws on a CPU."""
    words = np.random.RandomState(seed).randint(0, 1 << 32, size=skip + math.prod(shape), dtype=np.uint32)[skip:]
    return torch.from_numpy((words % np.uint32(high - low + 1) + np.uint32(low)).astype(np.uint8)).reshape(tuple(shape))


GENERATORS: dict[str, Callable[..., torch.Tensor]] = {"normal": normal, "integers": integers, "mt19937": mt19937}
