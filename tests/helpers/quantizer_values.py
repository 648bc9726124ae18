"""Inputs and bounds shared by the quantizer tests."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

quick = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**32 - 1)
octaves = st.integers(0, 12)


def random_values(seed: int, *shape: int, octaves: int = 4, exponent: int = 0) -> torch.Tensor:
    """Normal values with a magnitude of its own for every 16, spread over `octaves`; some zeros of both signs."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=g)
    spread = 2.0 ** (torch.rand(*shape[:-1], shape[-1] // 16, generator=g) * octaves + exponent)
    zeros = torch.rand(shape, generator=g) < 0.05
    return torch.where(zeros, values * 0.0, values * spread.repeat_interleave(16, -1))


def half_step(magnitude: torch.Tensor, element) -> torch.Tensor:
    """Half the spacing of `element` at `magnitude` (float64): the bound of round to nearest up to the maximum."""
    exponent = torch.frexp(magnitude)[1] - 1
    return 2.0 ** (exponent.clamp(min=element.min_exponent) - element.mantissa_bits - 1).double()


def rounding_bound(scaled: torch.Tensor, element) -> torch.Tensor:
    """Largest distance between `scaled` (float64) and its code's value: half a step, or what saturation cuts off."""
    return torch.maximum(half_step(scaled.abs(), element), scaled.abs() - element.max)
