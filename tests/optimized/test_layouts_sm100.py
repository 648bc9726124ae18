"""The SM100 kernels' scale orders, element by element, and the public reports of getting them wrong."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import draw

from fp4ep.optimized.kernel_layouts import KERNEL_LAYOUTS
from fp4ep.optimized.layouts_sm100 import (
    block_scales,
    blocked_scale_size,
    pack_scales_deep_gemm,
    unblock_scales,
    unpack_scales_deep_gemm,
)
from fp4ep.reference.types import MoEWeights


def offset(row: int, col: int, cols: int) -> int:
    return (row // 128 * -(-cols // 4) + col // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4


@pytest.mark.parametrize(("rows", "cols"), [(128, 4), (129, 5), (300, 9), (64, 3), (256, 8)])
def test_blocked_offset_of_every_element(rows, cols):
    scale = draw("blocked", 2, rows, cols) | 1  # no zeros, so that padding tells
    blocked = block_scales(scale)
    size = -(-rows // 128) * -(-cols // 4) * 512
    assert blocked.shape == (2, size)
    assert blocked_scale_size(rows, cols) == size
    places = torch.tensor([[offset(row, col, cols) for col in range(cols)] for row in range(rows)])
    assert torch.equal(blocked[:, places], scale)
    rest = torch.ones(size, dtype=torch.bool)
    rest[places.flatten()] = False
    assert not bool(blocked[:, rest].any())


def test_row_major_scales_are_not_blocked_ones():
    """vllm#42118: only NVFP4 scales were blocked after the EP exchange, MXFP8's came row-major. Any dtype is here."""
    scale = torch.zeros(1, 256, 6, dtype=torch.uint8)
    marks = {(32, 0): 4, (1, 0): 16, (0, 4): 512, (128, 0): 512 * 2}
    for value, place in enumerate(marks, start=1):
        scale[0, place[0], place[1]] = value
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu):
        blocked = block_scales(scale.view(dtype)).view(torch.uint8)[0]
        assert [int(blocked[place]) for place in marks.values()] == [1, 2, 3, 4]
    rows = torch.arange(128, dtype=torch.uint8).reshape(1, 128, 1).expand(1, 128, 4)
    for rank_rows in rows.split(64, 1):  # two ranks
        assert int(block_scales(rank_rows)[0, 4]) == int(rank_rows[0, 32, 0])


@pytest.mark.parametrize(("rows", "cols", "size"), [(2880, 180, 529_920), (1600, 100, 166_400)])
def test_an_expert_starts_where_the_padded_one_before_ends(rows, cols, size):
    """vllm#35497: scales padded to 2944 rows were read at offsets of 2880, so at 518,400 for expert 1."""
    assert blocked_scale_size(rows, cols) == size != rows * cols
    scale = draw("experts", 2, rows, cols)
    flat = block_scales(scale).flatten()
    assert torch.equal(flat[size:], block_scales(scale[1:]).flatten())
    assert torch.equal(unblock_scales(flat.reshape(2, -1), rows, cols), scale)


def test_the_column_count_is_given_not_inferred():
    """flashinfer#2898: 2880 / 32 = 90 columns are stored as 92; dividing by those makes a block of 31."""
    scale = draw("columns", 1, 128, 90)
    blocked = block_scales(scale)
    assert blocked.shape == (1, 128 * 92)
    assert torch.equal(unblock_scales(blocked, 128, 90), scale)
    with pytest.raises(ValueError, match=r"^blocked must have 12288 scales per expert, got 11776"):
        unblock_scales(blocked, 128, 96)


@pytest.mark.parametrize("intermediate", [1856, 96, 192])
def test_fc1_rows_are_padded_to_128_not_64(intermediate):
    """flashinfer#4653, #5122: a check that aligned rows to 64 refused these."""
    hidden, rows = 128, 2 * intermediate
    weights = MoEWeights(
        draw("w13", 1, rows, hidden // 2),
        draw("w2", 1, hidden, intermediate // 2),
        draw("w13_scale", 1, rows, hidden // 16),
        draw("w2_scale", 1, hidden, intermediate // 16),
    )
    layout = KERNEL_LAYOUTS["cutedsl"]
    state = layout.pack(weights)
    assert state.fc1_scale.shape == (1, -(-rows // 128) * 128 * 8)
    assert torch.equal(layout.unpack(state, hidden=hidden, intermediate=intermediate).w13_scale, weights.w13_scale)


def test_padding_is_not_read():
    """TransformerEngine#3070 and others: poison in the padding must not reach a real row."""
    scale = draw("poison", 1, 192, 6)
    inside = block_scales(torch.ones_like(scale)).bool()
    poisoned = torch.where(inside, block_scales(scale), 0x7F)
    assert torch.equal(unblock_scales(poisoned, 192, 6), scale)


@given(st.integers(1, 3), st.integers(1, 400), st.integers(1, 40), st.integers(0, 9))
def test_blocked_scales_come_back(experts, rows, cols, seed):
    scale = draw(f"{seed}", experts, rows, cols)
    assert torch.equal(unblock_scales(block_scales(scale), rows, cols), scale)


def test_deep_gemm_word_of_every_scale():
    """Four scales along K in an int32, first in the low byte; N fastest; row 32a + b of each 128 at 4b + a."""
    scale = draw("deep_gemm", 2, 384, 8)
    packed = pack_scales_deep_gemm(scale)
    assert packed.dtype is torch.int32
    assert packed.shape == (2, 2, 384)
    assert packed.is_contiguous()
    words = packed.long() & 0xFFFFFFFF
    for row in range(384):
        place = row // 128 * 128 + row % 32 * 4 + row % 128 // 32
        for col in range(8):
            assert torch.equal(words[:, col // 4, place] >> 8 * (col % 4) & 255, scale[:, row, col].long())


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(0, 9))
def test_deep_gemm_scales_come_back(experts, rows, words, seed):
    scale = draw(f"{seed}", experts, 128 * rows, 4 * words)
    packed = pack_scales_deep_gemm(scale)
    assert torch.equal(unpack_scales_deep_gemm(packed), scale)
    view = packed.mT  # DeepGEMM's own tensor
    assert torch.equal(unpack_scales_deep_gemm(view.mT), scale)


def test_deep_gemm_refuses():
    with pytest.raises(ValueError, match=r"^scale must be uint8 \[E, N, K/32\]"):
        pack_scales_deep_gemm(torch.zeros(1, 128, 4))
    with pytest.raises(ValueError, match=r"^scale rows must be a positive multiple of 128, got 64"):
        pack_scales_deep_gemm(torch.zeros(1, 64, 4).byte())
    with pytest.raises(ValueError, match=r"^scale blocks per row must be a positive multiple of 4, got 6"):
        pack_scales_deep_gemm(torch.zeros(1, 128, 6).byte())
    with pytest.raises(ValueError, match=r"^packed must be int32 \[E, K/128, N\]"):
        unpack_scales_deep_gemm(torch.zeros(1, 1, 128))
    with pytest.raises(ValueError, match=r"^packed rows must be a positive multiple of 128, got 96"):
        unpack_scales_deep_gemm(torch.zeros(1, 1, 96, dtype=torch.int32))
