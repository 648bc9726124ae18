"""Tensor-core rows with block scales, case by case: what moves the alignment. Random tiles are in `test_mma_sim.py`."""

import math

import torch

from fp4ep.reference.tensor_core import (
    BLACKWELL_MXF4,
    BLACKWELL_MXF8,
    BLACKWELL_MXF8_MXF4,
    BLACKWELL_NVFP4,
    TensorCore,
    matmul,
)

INF, NAN = math.inf, math.nan


def one_row(core: TensorCore, *values: float) -> torch.Tensor:
    row = torch.zeros(1, core.k)
    row[0, : len(values)] = torch.tensor(values)
    return row


def scaled(core: TensorCore, a: torch.Tensor, b: torch.Tensor, scales: tuple[list, list], c: float) -> float:
    """One output; the scales of a and of b."""
    rows = tuple(torch.tensor([side]) for side in scales)
    return float(matmul(core, a, b, scales=rows, c=torch.tensor([[c]])))


def test_scales_move_the_alignment():
    """1 * 1 * 2^10 * 2^-4 counts as 2^6, and C is cut below 2^-19."""
    one = one_row(BLACKWELL_MXF8, 1.0)
    assert scaled(BLACKWELL_MXF8, one, one, ([2.0**10], [2.0**-4]), 0.0) == 64.0
    minus = one_row(BLACKWELL_MXF8, 1.0, -1.0), one_row(BLACKWELL_MXF8, 1.0, 1.0)
    assert scaled(BLACKWELL_MXF8, *minus, ([2.0**10], [2.0**-4]), 2.0**-20) == 0.0
    assert scaled(BLACKWELL_MXF8, *minus, ([2.0**10], [2.0**-4]), 2.0**-19) == 2.0**-19


def test_scaled_products_leave_the_range_of_float32():
    """2^254 less 2^254 is nothing, 2^254 alone infinite, and a NaN scale spoils even zeros."""
    one, minus = one_row(BLACKWELL_MXF8, 1.0, 1.0), one_row(BLACKWELL_MXF8, 1.0, -1.0)
    top = ([2.0**127], [2.0**127])
    assert scaled(BLACKWELL_MXF8, one, minus, top, 5.0) == 0.0
    assert scaled(BLACKWELL_MXF8, one, one, top, 5.0) == INF
    assert scaled(BLACKWELL_MXF8, one, one, ([2.0**127], [2.0**-127]), 5.0) == 7.0
    assert math.isnan(scaled(BLACKWELL_MXF8, one * 0, one, ([NAN], [1.0]), 5.0))


def test_each_side_has_its_own_subnormals():
    """0.5 is subnormal in E2M1, where it counts as 2^0, and normal in E4M3."""
    a, b = one_row(BLACKWELL_MXF8, 1.0, 1.0), one_row(BLACKWELL_MXF8, 0.5, -0.5)
    ones = ([1.0], [1.0])
    assert scaled(BLACKWELL_MXF8, a, b, ones, 2.0**-26) == 2.0**-26
    assert scaled(BLACKWELL_MXF8_MXF4, a, b, ones, 2.0**-26) == 0.0
    assert scaled(BLACKWELL_MXF8_MXF4, a, b, ones, 2.0**-25) == 2.0**-25
    assert scaled(BLACKWELL_MXF8_MXF4, b, a, ones, 2.0**-26) == 2.0**-26  # 0.5 on the E4M3 side


def test_a_group_counts_unless_all_its_products_are_zero():
    """As much as its scales, 2^16: C is cut below 2^-19, though nothing is left of the group."""
    large, ones = ([448.0] * 4, [448.0] * 4), one_row(BLACKWELL_NVFP4, *[1.0] * 64)
    cancelling = one_row(BLACKWELL_NVFP4, 6.0, -6.0)
    assert scaled(BLACKWELL_NVFP4, cancelling, ones, large, 2.0**-20) == 0.0
    assert scaled(BLACKWELL_NVFP4, cancelling, ones, large, 2.0**-19) == 2.0**-19
    assert scaled(BLACKWELL_NVFP4, one_row(BLACKWELL_NVFP4), ones, large, 2.0**-20) == 2.0**-20
    assert scaled(BLACKWELL_NVFP4, cancelling, ones, ([0.0] * 4, [448.0] * 4), 2.0**-20) == 2.0**-20


def test_groups_are_sixteen_whatever_the_block():
    """A block's first half cut below 2^-35, its second half too: together they would have counted."""
    a, b = torch.zeros(1, 64), torch.ones(1, 64)
    a[0, 0], a[0, 32], a[0, 48] = 1.0, 0.5, 0.5
    scales = ([1.0, 2.0**-35], [1.0, 1.0])
    assert scaled(BLACKWELL_MXF4, a, b, scales, -1.0) == 0.0
    together = a.clone()
    together[0, 33], together[0, 48] = 0.5, 0.0
    assert scaled(BLACKWELL_MXF4, together, b, scales, -1.0) == 2.0**-35


def test_the_floor_of_the_groups_is_lower():
    """As that of bf16 above, at 2^-174: the lowest exponent is -139, with 35 bits below."""
    a, b = torch.zeros(1, 64), torch.ones(1, 64)
    a[0, 0], a[0, 32] = 1.0, -1.0
    for exponent, left in ((-174, 0.0), (-175, 2.0**-149)):
        scales = ([2.0**-75, 2.0**-88], [2.0**-74, 2.0 ** (exponent + 88)])
        assert scaled(BLACKWELL_MXF4, a, b, scales, 0.0) == left
