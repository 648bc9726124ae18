"""Weight operands against definitions written independently: Python floats and ml_dtypes."""

import math
import random

import ml_dtypes
import numpy as np
import pytest
import torch

from fp4ep.reference.formats import E4M3, pack_e2m1
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.quantize import quantize_fp8_block_128, quantize_fp8_per_expert, quantize_nvfp4
from fp4ep.reference.schemes import find_scheme
from fp4ep.reference.types import MoEInputs, MoEWeights
from fp4ep.reference.weights import _rewrite_table, load_operand, mxfp4_operand, nvfp4_operand

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = MAGNITUDES + [-m for m in MAGNITUDES]  # by code; E2M1[8] is -0.0

NVFP4 = find_scheme("sm90_fp8_nvfp4_bf16_pull_cutedsl")
MXFP4 = find_scheme("sm90_fp8_mxfp4_bf16_pull_cutedsl")
PER_TENSOR = find_scheme("sm90_fp8_fp8_bf16_pull_cutedsl")
BLOCKWISE = find_scheme("sm90_fp8_fp8_bf16_pull_cutedsl", fp8_scale_mode="blockwise")


# --- NVFP4 -------------------------------------------------------------------------------------------------------


def test_nvfp4_operand_is_e4m3_of_the_product():
    """All 127 scale codes times all 16 codes: E4M3(code * scale / 8) of the exact product, sign of zero included."""
    codes = torch.arange(16, dtype=torch.uint8).expand(127, 16)
    scale = torch.arange(127, dtype=torch.uint8)[:, None]
    operand = nvfp4_operand(pack_e2m1(codes), scale, torch.tensor(3.0))
    expected = np.empty((127, 16), ml_dtypes.float8_e4m3fn)
    for s in range(127):
        for q in range(16):
            product = E2M1[q] * float(np.uint8(s).view(ml_dtypes.float8_e4m3fn)) / 8  # 2 x 4 bits: exact
            expected[s, q] = np.float32(product)
    found = operand.values.numpy()
    assert np.array_equal(found, expected.astype(np.float32))
    assert np.array_equal(np.signbit(found), np.signbit(expected.astype(np.float32)))
    assert operand.scale.tolist() == [[24.0]]


def test_nvfp4_operand_never_saturates():
    """The largest product, 6 * 448 / 8 = 336, is a tie between 320 and 352 and goes to 320; the maximum is 448."""
    operand = nvfp4_operand(torch.full((1, 8), 0x77, dtype=torch.uint8), torch.tensor([[126]]).byte(), torch.ones(()))
    assert operand.values.unique().tolist() == [320.0]


def _e4m3_values() -> set[float]:
    return set(np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist())


# --- MXFP4 -------------------------------------------------------------------------------------------------------


def random_mxfp4(low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[8, 256]` random codes and scales, both ends of the range present."""
    g = torch.Generator().manual_seed(low * 256 + high)
    codes = torch.randint(16, (8, 256), generator=g, dtype=torch.uint8)
    scale = torch.randint(low, high + 1, (8, 8), generator=g, dtype=torch.uint8)
    scale[0, 0], scale[-1, -1] = low, high
    return codes, scale


def decoded(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.tensor(E2M1).double()[codes.long()] * torch.exp2(scale.double() - 127).repeat_interleave(32, dim=1)


@pytest.mark.parametrize("octaves", range(12))
@pytest.mark.parametrize("low", [0, 1, 60, 120, 200, 238])
def test_mxfp4_operand_is_exact_within_11_octaves(octaves, low):
    """operand * scale is code * 2^(scale - 127), and the operand is E4M3."""
    codes, scale = random_mxfp4(low, low + octaves)
    operand = mxfp4_operand(pack_e2m1(codes), scale)
    assert torch.equal(operand.values.double() * operand.scale.double(), decoded(codes, scale))
    assert set(operand.values.abs().unique().tolist()) <= _e4m3_values()


@pytest.mark.parametrize("octaves", [12, 13, 16, 40, 127 + 11])
def test_mxfp4_operand_rounds_blocks_below_the_range(octaves):
    """Blocks more than 11 octaves below the expert's largest scale: the code nearest in the raised scale."""
    codes, scale = random_mxfp4(100, 100 + octaves)
    operand = mxfp4_operand(pack_e2m1(codes), scale)
    raised = scale.clamp(min=100 + octaves - 11)
    delta = (raised - scale).repeat_interleave(32, dim=1)
    moved = [nearest(E2M1[q], d) for q, d in zip(codes.flatten().tolist(), delta.flatten().tolist(), strict=True)]
    octave = torch.exp2(raised.double() - 127).repeat_interleave(32, dim=1)
    expected = torch.tensor(moved).double().view_as(octave) * octave
    assert torch.equal(operand.values.double() * operand.scale.double(), expected)
    assert not torch.equal(expected, decoded(codes, scale))


def nearest(value: float, delta: int) -> float:
    """The E2M1 value nearest to value * 2^-delta, ties away from zero."""
    target = abs(value) * 2.0**-delta
    return math.copysign(min(MAGNITUDES, key=lambda m: (abs(m - target), -m)), value)


@pytest.mark.parametrize("delta", range(23))
def test_rewriting_rounds_to_nearest_ties_away(delta):
    for q, code in enumerate(_rewrite_table()[delta].tolist()):
        expected = 0.0 if q == 8 else nearest(E2M1[q], delta)
        assert E2M1[code] == expected
        assert math.copysign(1, E2M1[code]) == math.copysign(1, expected)


def test_rewriting_differs_from_ties_to_even():
    """0.25 becomes 0.5, 1.25 cannot occur, 0.75 becomes 1.0: by the even rule the first would be 0."""
    assert E2M1[_rewrite_table()[1, 1]] == 0.5
    assert E2M1[_rewrite_table()[1, 3]] == 1.0


def test_rewriting_gives_zeros_from_5_octaves_on():
    """6 * 2^-5 lies below 0.25. Negative codes become -0."""
    table = _rewrite_table()[5:128]
    assert bool((table[:, :9] == 0).all())
    assert bool((table[:, 9:] == 8).all())


@pytest.mark.parametrize("delta", [129, 130, 131, 150, 200, 253, 254, 255])
def test_rewriting_wraps_from_128_on(delta):
    """2^-delta made in the bits of float32 1.0 is -2^(256 - delta) here: signs flip, exponents count modulo 4."""
    for q, code in enumerate(_rewrite_table()[delta].tolist()):
        if q in (0, 8):
            assert code == 8
            continue
        fraction, exponent = math.frexp(abs(E2M1[q]))  # fraction 0.5 or 0.75
        assert code == (q ^ 8) & 8 | (exponent + 256 - delta) % 4 << 1 | (fraction == 0.75)


def test_rewriting_by_128_is_garbage():
    """There the factor is -infinity: every code becomes 4 with the other sign, and 0 * infinity becomes a 6."""
    row = [E2M1[code] for code in _rewrite_table()[128].tolist()]
    assert row[1:8] == [-4.0] * 7
    assert row[9:] == [4.0] * 7
    assert row[0] == row[8] == -6.0  # x86's NaN is negative


def test_mxfp4_zeros_with_scale_0_beside_scale_139():
    """139 - 11 - 0 = 128: the zeros of that block become -6 * 2^(1 - 6) beside 2^(128 - 122); of no other block."""
    scale = torch.tensor([[139, 0, 1]], dtype=torch.uint8)
    operand = mxfp4_operand(torch.zeros(1, 48, dtype=torch.uint8), scale)
    assert operand.values.reshape(3, 32).unique(dim=1).flatten().tolist() == [0.0, -6 / 32, 0.0]
    assert operand.scale.tolist() == [[64.0]]


# --- from dense weights ------------------------------------------------------------------------------------------

E, H, I, T = 4, 256, 128, 5  # noqa: E741


@pytest.fixture(scope="module")
def dense() -> MoEWeights:
    """Experts of different magnitude, so that taking another expert's scale shows."""
    g = torch.Generator().manual_seed(0)
    size = torch.tensor([1.0, 2.5, 0.3, 6.0])[:, None, None] / 16
    return MoEWeights(
        (torch.randn(E, 2 * I, H, generator=g) * size).bfloat16(), (torch.randn(E, H, I, generator=g) * size).bfloat16()
    )


@pytest.fixture(scope="module")
def inputs() -> MoEInputs:
    g = torch.Generator().manual_seed(1)
    ids = torch.rand(T, E, generator=g).argsort(1)[:, :2]
    return MoEInputs(torch.randn(T, H, generator=g).bfloat16(), ids, torch.rand(T, 2, generator=g))


def quantized(scheme, dense: MoEWeights, dtype: torch.dtype) -> MoEWeights:
    """The packed weights that equal `dense` after the backend's own quantization, one expert at a time."""
    legs: dict[str, torch.Tensor] = {}
    for leg in ("w13", "w2"):
        experts = getattr(dense, leg)
        if scheme is NVFP4:
            parts = [quantize_nvfp4(w) for w in experts]
            legs[leg] = torch.stack([pack_e2m1(p.codes) for p in parts])
            legs[f"{leg}_scale"] = torch.stack([p.scales for p in parts]).view(dtype)
            legs[f"{leg}_global_scale"] = torch.stack([p.global_scale for p in parts])
            continue
        if scheme is PER_TENSOR:
            parts = [quantize_fp8_per_expert(w, E4M3) for w in experts]
        else:
            parts = [quantize_fp8_block_128(w, E4M3, parts=2 if leg == "w13" else 1) for w in experts]
        legs[leg] = torch.stack([p.codes for p in parts]).view(dtype)
        scales = torch.stack([p.scales for p in parts])
        legs[f"{leg}_scale"] = scales.flatten() if scheme is PER_TENSOR else scales
    return MoEWeights(**legs)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("scheme", [NVFP4, PER_TENSOR, BLOCKWISE], ids=str)
def test_dense_equals_prequantized(scheme, dense, inputs, dtype):
    """Operands of every expert and leg, and the layer's output."""
    packed = quantized(scheme, dense, dtype)
    for leg in ("w13", "w2"):
        for expert in range(E):
            a, b = (load_operand(scheme, w, leg, expert) for w in (dense, packed))
            assert torch.equal(a.values, b.values)
            assert torch.equal(a.scale.broadcast_to(b.scale.shape), b.scale)
    outputs = [moe_forward(scheme, w, inputs)[0] for w in (dense, packed)]
    assert torch.equal(*outputs)


def test_nvfp4_global_scale_may_be_one_for_all_or_missing(dense):
    packed = quantized(NVFP4, dense, torch.uint8)
    for expert in range(E):
        for global_scale, value in ((torch.tensor(0.5), 0.5), (torch.full((1,), 0.5), 0.5), (None, 1.0)):
            w = MoEWeights(packed.w13, packed.w2, packed.w13_scale, packed.w2_scale, global_scale, global_scale)
            assert load_operand(NVFP4, w, "w13", expert).scale.tolist() == [[8 * value]]


def test_block_128_scales_follow_the_kernels_rows(dense):
    """Block b of w13 scales gate rows 64b.. and up rows 64b..; block b of w2 scales rows 128b.."""
    packed = quantized(BLOCKWISE, dense, torch.uint8)
    for leg, row_to_block in (("w13", lambda row: row % I // 64), ("w2", lambda row: row // 128)):
        scale = getattr(packed, f"{leg}_scale")[1]
        operand = load_operand(BLOCKWISE, packed, leg, 1)
        for row in random.Random(0).sample(range(256), 40):
            assert torch.equal(operand.scale[row], scale[row_to_block(row)])
        assert len(scale.unique()) == scale.numel()


def test_mxfp4_load_operand_takes_the_experts_own_scales():
    """Expert 1's range does not move expert 0's base."""
    codes, scale = random_mxfp4(110, 120)
    other = scale + 30
    weights = MoEWeights(*[torch.stack((pack_e2m1(codes),) * 2)] * 2, *[torch.stack((scale, other))] * 2)
    for expert, expected in ((0, scale), (1, other)):
        operand = load_operand(MXFP4, weights, "w2", expert)
        assert torch.equal(operand.values.double() * operand.scale.double(), decoded(codes, expected))
