"""The SM90 kernels' orders, element by element."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import draw

from fp4ep.optimized.layouts_sm90 import (
    fold_scales,
    kperm_gate_up,
    kperm_payload,
    swap_kperm_scales,
    unfold_scales,
    unkperm_gate_up,
    unkperm_payload,
)


def natural(place: int, kperm: int) -> int:
    """The natural index of the element at `place` of the permuted order."""
    chunk, p = place // kperm * kperm, place % kperm
    j, bit2, rest = p % 4, p // 4 % 2, p // 4
    if kperm == 32:  # place 16h + 8a + 4b + j holds 16a + 8b + 4h + j
        h, a, b = rest // 4, rest // 2 % 2, bit2
        return chunk + 16 * a + 8 * b + 4 * h + j
    i, h, c = rest // 8, rest // 4 % 2, rest % 4  # place 32i + 16h + 4c + j holds 16c + 8i + 4h + j
    return chunk + 16 * c + 8 * i + 4 * h + j


def codes(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


@pytest.mark.parametrize("kperm", [32, 64])
def test_kperm_of_every_element(kperm):
    packed = draw("kperm", 2, 3, 96)
    order = [natural(p, kperm) for p in range(192)]
    assert torch.equal(codes(kperm_payload(packed, kperm)), codes(packed)[..., order])
    rows = draw("rows", 2, 256, 5)
    both = [natural(p, kperm) for p in range(128)]
    assert torch.equal(kperm_gate_up(rows, kperm), rows[:, both + [128 + p for p in both]])


def test_kperm64_puts_the_first_eight_of_each_sixteen_in_the_first_instruction():
    """Which elements share a K32 instruction is all that shows in the bits: 32 moves none of them, 64 does."""
    chunk = [natural(p, 64) for p in range(64)]
    assert sorted(chunk[:32]) == [16 * q + r for q in range(4) for r in range(8)]
    assert sorted(natural(p, 32) for p in range(32)) == list(range(32))


@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.sampled_from([0, 32, 64]), st.integers(0, 9))
def test_kperm_comes_back(experts, rows, chunks, kperm, seed):
    packed = draw(f"{seed}", experts, 128 * rows, 32 * chunks)
    assert torch.equal(unkperm_payload(kperm_payload(packed, kperm), kperm), packed)
    assert torch.equal(unkperm_gate_up(kperm_gate_up(packed, kperm), kperm), packed)


def test_kperm_refuses():
    for function in (kperm_payload, unkperm_payload, kperm_gate_up, unkperm_gate_up):
        with pytest.raises(ValueError, match=r"^kperm must be 0, 32 or 64, got 16"):
            function(torch.zeros(1, 128, 32).byte(), 16)
        with pytest.raises(ValueError, match="must be a positive multiple"):
            function(torch.zeros(1, 96, 24).byte(), 64)


def test_scale_swap_of_every_element():
    scale = draw("swap", 2, 32, 6)
    found = swap_kperm_scales(scale)
    for row in range(32):
        for block in range(6):
            source = (row, block)
            if row % 16 < 8 and block % 2 == 1:
                source = (row + 8, block - 1)
            if row % 16 >= 8 and block % 2 == 0:
                source = (row - 8, block + 1)
            assert torch.equal(found[:, row, block], scale[:, source[0], source[1]])
    assert torch.equal(swap_kperm_scales(found), scale)


@pytest.mark.parametrize(("block", "shape"), [(16, (2, 2, 3, 32, 16)), (32, (2, 2, 3, 16, 16))])
def test_fold_of_every_element(block, shape):
    per_tile = 128 // block
    scale = draw("fold", 2, 128, 3 * per_tile)
    folded = fold_scales(scale, block)
    assert folded.shape == shape
    assert folded.is_contiguous()
    tiles = folded.flatten(3)
    for row in range(128):
        s, r = row % 64 // 16, row % 16
        for column in range(3 * per_tile):
            b = column % per_tile
            place = ((s * 4 + b // 2) * 16 + r) * 2 + b % 2 if block == 16 else (r * 4 + s) * 4 + b
            assert torch.equal(tiles[:, row // 64, column // per_tile, place], scale[:, row, column])


@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.sampled_from([16, 32]), st.integers(0, 9))
def test_fold_comes_back(experts, rows, tiles, block, seed):
    scale = draw(f"{seed}", experts, 64 * rows, 128 // block * tiles)
    assert torch.equal(unfold_scales(fold_scales(scale, block), block), scale)


def test_scale_layouts_refuse():
    with pytest.raises(ValueError, match=r"^scale rows must be a positive multiple of 64, got 32"):
        fold_scales(torch.zeros(1, 32, 8), 16)
    with pytest.raises(ValueError, match=r"^scale blocks per row must be a positive multiple of 8, got 4"):
        fold_scales(torch.zeros(1, 64, 4), 16)
    with pytest.raises(ValueError, match=r"^folded scale must have shape \[E, N/64, K/128, 32, 16\]"):
        unfold_scales(torch.zeros(1, 1, 1, 16, 16), 16)
    with pytest.raises(ValueError, match=r"^scale rows must be a positive multiple of 16, got 24"):
        swap_kperm_scales(torch.zeros(1, 24, 8))
    with pytest.raises(ValueError, match=r"^scale blocks per row must be a positive multiple of 2, got 7"):
        swap_kperm_scales(torch.zeros(1, 16, 7))
