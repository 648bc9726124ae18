"""The gate/up interleave, and the fp4_fp8 weight layout bit by bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import draw

from fp4ep.optimized.layouts import (
    deinterleave_fp4_fp8,
    deinterleave_gate_up,
    interleave_fp4_fp8,
    interleave_gate_up,
)


@pytest.mark.parametrize("block", [8, 16])
def test_gate_and_up_rows_lie_side_by_side(block):
    rows = torch.arange(64).reshape(1, 64, 1)  # gate 0..31, up 32..63
    found = interleave_gate_up(rows, block).flatten().tolist()
    wanted = [row + half for start in range(0, 32, block) for half in (0, 32) for row in range(start, start + block)]
    assert found == wanted
    assert found[block] == 32


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 7), st.sampled_from([8, 16]), st.integers(0, 9))
def test_gate_up_comes_back(experts, groups, columns, block, seed):
    w13 = draw(f"{seed}", experts, 2 * groups * block, columns)
    for dtype in (torch.uint8, torch.float8_e4m3fn):  # any dtype: bytes only move
        found = interleave_gate_up(w13.view(dtype), block)
        assert found.is_contiguous()
        assert torch.equal(deinterleave_gate_up(found, block).view(torch.uint8), w13)


def test_gate_up_refuses_rows_that_do_not_split():
    for function in (interleave_gate_up, deinterleave_gate_up):
        with pytest.raises(ValueError, match=r"^w13 rows must be a positive multiple of 32, got 48"):
            function(torch.zeros(1, 48, 2), 16)


def literal(packed: list[list[list[int]]]) -> list[list[list[int]]]:
    """The layout in scalar loops: 16-bit halfwords of four codes along K, in groups of 16 rows by 64 K.

    The word of a place joins the halfwords of rows r (low) and r + 8 (high). Its halves come to lie side by side in one
    row; the row is r + 8 * half, where half is the second-slowest of K's coordinates (K/64, mma 2, half 2, lane 4).
    """
    experts, rows, row_bytes = len(packed), len(packed[0]), len(packed[0][0])
    out = [[[0] * row_bytes for _ in range(rows)] for _ in range(experts)]
    for expert in range(experts):
        for group in range(0, rows, 16):
            for r in range(8):
                for column in range(row_bytes // 2):
                    chunk, place = divmod(column, 16)
                    mma, half, lane = place // 8, place // 4 % 2, place % 4
                    low, high = (packed[expert][group + r + part][2 * column : 2 * column + 2] for part in (0, 8))
                    word = move_signs(int.from_bytes(bytes([*low, *high]), "little"))
                    start = 32 * chunk + 16 * mma + 4 * lane
                    out[expert][group + r + 8 * half][start : start + 4] = word.to_bytes(4, "little")
    return out


def move_signs(word: int) -> int:
    """Signs of row r's codes to the top of each byte, those of row r + 8 to the top of each byte's low nibble."""
    moved = 0
    for nibble in range(8):
        code = word >> 4 * nibble & 15
        moved |= (code & 7) << 4 * nibble
        row, i = divmod(nibble, 4)
        moved |= (code >> 3) << (8 * i + (3 if row else 7))
    return moved


def test_interleave_is_the_literal_loop():
    packed = torch.randint(256, (2, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    before = packed.clone()
    found = interleave_fp4_fp8(packed)
    assert found.dtype is torch.uint8
    assert found.shape == packed.shape
    assert found.is_contiguous()
    assert found.tolist() == literal(packed.tolist())
    assert torch.equal(packed, before)


def test_one_mask_gives_four_signs():
    """What the moving is for: a row's four signs in the top bits of four bytes, row r + 8's after one shift."""
    packed = torch.zeros(1, 16, 32, dtype=torch.uint8)
    packed[0, 0, :2] = torch.tensor([0x8F, 0x70])  # codes 15, 8, 0, 7: signs 1, 1, 0, 0
    packed[0, 8, :2] = torch.tensor([0x01, 0x98])  # codes 1, 0, 8, 9: signs 0, 0, 1, 1
    word = int.from_bytes(bytes(interleave_fp4_fp8(packed)[0, 0, :4].tolist()), "little")
    assert word & 0x80808080 == 0x00008080
    assert word << 4 & 0x80808080 == 0x80800000
    assert word & 0x77777777 == 0x10017007


def bits(values: torch.Tensor) -> torch.Tensor:
    """`[..., bytes]` uint8 -> `[..., 8 * bytes]` bool."""
    return (values[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten(-2)


def test_interleave_permutes_the_bits_of_one_group():
    """Each of the 4096 bits of 16 rows by 64 K goes to a place of its own."""
    count = 16 * 32 * 8
    single = torch.zeros(count, 16 * 32, dtype=torch.uint8)
    index = torch.arange(count)
    single[index, index // 8] = (1 << index % 8).to(torch.uint8)
    moved = bits(interleave_fp4_fp8(single.reshape(count, 16, 32)).reshape(count, -1))
    assert bool((moved.sum(1) == 1).all())
    assert bool((moved.sum(0) == 1).all())


@pytest.mark.parametrize("seed", range(3))
def test_interleave_moves_bits_one_by_one_within_a_group(seed):
    """No bit leaves its 16 rows by 64 K, and none depends on another: the layout of a ^ b is that of a ^ that of b."""
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(256, (3, 48, 96), generator=g, dtype=torch.uint8) for _ in range(2))
    found = interleave_fp4_fp8(a)
    groups = [bits(x).reshape(3, 3, 16, 3, 256).sum((2, 4)) for x in (a, found)]
    assert torch.equal(*groups)
    assert torch.equal(interleave_fp4_fp8(a ^ b), found ^ interleave_fp4_fp8(b))
    assert torch.equal(interleave_fp4_fp8(a[1:2, 16:32, 32:64]), found[1:2, 16:32, 32:64])


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))
def test_interleave_comes_back(experts, rows, columns, seed):
    packed = draw(f"{seed}", experts, 16 * rows, 32 * columns)
    assert torch.equal(deinterleave_fp4_fp8(interleave_fp4_fp8(packed)), packed)
    assert torch.equal(interleave_fp4_fp8(deinterleave_fp4_fp8(packed)), packed)


def test_interleave_takes_any_stride_and_offset():
    packed = draw("strided", 32 * 64 + 1)[1:].reshape(1, 64, 32)  # at an odd address
    for given_packed in (packed, packed.mT.contiguous().mT):
        assert torch.equal(interleave_fp4_fp8(given_packed), interleave_fp4_fp8(packed.clone()))
        assert torch.equal(deinterleave_fp4_fp8(given_packed), deinterleave_fp4_fp8(packed.clone()))


@pytest.mark.parametrize("bad", [torch.zeros(1, 8, 32), torch.zeros(1, 16, 16).byte(), torch.zeros(1, 24, 32).byte()])
def test_interleave_refuses(bad):
    for function in (interleave_fp4_fp8, deinterleave_fp4_fp8):
        with pytest.raises(ValueError, match=r"^packed must be uint8 \[E, N, K/2\]"):
            function(bad)
