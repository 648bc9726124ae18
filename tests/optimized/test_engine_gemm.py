"""The engine's compiled loops against the reference's tensor core and special functions, on values made to tell."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ep.optimized.emulation import NOT_EMULATED, Operand
from fp4ep.optimized.engine_cpu import expert_gemm, matmul, missing_for_engine, sigmoid
from fp4ep.parity.recording import Recording
from fp4ep.parity.replay import _OPERANDS, TENSOR_CORES, compare_bits, compare_rows, shipped_recordings
from fp4ep.reference import gemm as reference_gemm
from fp4ep.reference import tensor_core, weights
from fp4ep.reference.formats import decode
from fp4ep.reference.schemes import SCHEMES
from fp4ep.reference.special import ex2_approx, rcp_approx
from fp4ep.reference.tensor_core import BLACKWELL_NVFP4, HOPPER_BF16, HOPPER_E4M3, HOPPER_E5M2, TensorCore

if reason := missing_for_engine():
    pytest.skip(reason, allow_module_level=True)

CORES = (HOPPER_E4M3, HOPPER_E5M2, HOPPER_BF16)
DTYPES = {HOPPER_E4M3: torch.float8_e4m3fn, HOPPER_E5M2: torch.float8_e5m2, HOPPER_BF16: torch.bfloat16}
HOPPER = [s for s in SCHEMES if s.weights not in NOT_EMULATED]
RULES = {(rule, s.name): rule for s in HOPPER for rule in (s.fc1, s.fc2)}
for_each_core = pytest.mark.parametrize("core", CORES, ids=str)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


def codes(core: TensorCore, seed: int, *shape: int) -> torch.Tensor:
    """Every bit pattern of the operand format alike."""
    size = 8 * DTYPES[core].itemsize
    drawn = torch.randint(0, 1 << size, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to({8: torch.uint8, 16: torch.uint16}[size]).view(DTYPES[core]).float()


def floats(seed: int, *shape: int, low: int = 0, high: int = 0xFF) -> torch.Tensor:
    """float32 of every bit pattern with exponent fields from low to high."""
    g = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 1 << 24, shape, generator=g)
    field = torch.randint(low, high + 1, shape, generator=g)
    return ((drawn >> 23 << 31) | field << 23 | drawn & 0x7FFFFF).to(torch.uint32).view(torch.float32)


def assert_same(core: TensorCore, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> None:
    assert torch.equal(bits(matmul(core, a, b, c=c)), bits(tensor_core.matmul(core, a, b, c=c)))


@for_each_core
def test_every_bit_pattern(core):
    """NaN and infinity included, then without; alone, and on C of every bit pattern."""
    for seed, k in ((1, core.k), (2, 4 * core.k)):
        a, b = codes(core, seed, 40, k), codes(core, seed + 10, 70, k)
        for _ in range(2):
            assert_same(core, a, b)
            assert_same(core, a, b, floats(seed, 40, 70))
            assert_same(core, a, b, floats(seed, 40, 70, high=2))
            a, b = (torch.where(x.isfinite(), x, 0.0) for x in (a, b))


@for_each_core
def test_exponent_gaps_that_straddle_the_cut(core):
    """One large product and many small ones of either sign, gaps around the fraction bits, in each place of K."""
    g = torch.Generator().manual_seed(0)
    k, dtype = 2 * core.k, DTYPES[core]
    gap = torch.randint(0, 15 if core is HOPPER_E4M3 else core.fraction_bits + 4, (128, k), generator=g)
    a = torch.randint(8, 16, (128, k), generator=g) / 8 * 2.0 ** (7 - gap / 2).floor()
    a = a.to(dtype)
    b = (torch.randint(-15, 16, (128, k), generator=g) / 8 * 2.0**-1).to(dtype)
    a[torch.arange(128), torch.arange(128) % k] = 256.0
    assert_same(core, a.float(), b.float())
    exponent = torch.randint(-30, 30, (128, 128), generator=g)
    assert_same(core, a.float(), b.float(), floats(1, 128, 128, low=127, high=127) * 2.0**exponent)


@for_each_core
def test_sums_that_cancel(core):
    """C is minus the products' sum, or nearly; also products that cancel pairwise to an exact zero, which is +0."""
    a, b = codes(core, 1, 24, 2 * core.k), codes(core, 2, 24, 2 * core.k)
    a, b = (torch.where(x.isfinite(), x, 0.0) for x in (a, b))
    c = -tensor_core.matmul(core, a, b)
    assert_same(core, a, b, c)
    assert_same(core, a, b, torch.nextafter(c, torch.zeros(())))
    pairs = torch.cat((a[:, : core.k // 2], -a[:, : core.k // 2]), 1)
    same = torch.cat((b[:, : core.k // 2], b[:, : core.k // 2]), 1)
    assert_same(core, pairs, same)
    assert not bool(bits(matmul(core, pairs, same)).any())


def test_bf16_at_both_ends_of_float32():
    """Products below 2^-133, and sums that overflow and then meet finite values or the other infinity."""
    for low, high in ((0, 3), (55, 70), (188, 200), (250, 254)):
        a, b = (floats(seed, 33, 64, low=low, high=high).bfloat16().float() for seed in (1, 2))
        assert_same(HOPPER_BF16, *(torch.where(x.isfinite(), x, 0.0) for x in (a, b)))
        assert_same(HOPPER_BF16, a, b, floats(3, 33, 33))
        a[:, ::17] = torch.inf
        assert_same(HOPPER_BF16, a, b, floats(3, 33, 33, low=250))


@settings(max_examples=25, deadline=None)
@given(
    core=st.sampled_from(CORES),
    rows=st.integers(0, 140),
    columns=st.integers(1, 140),
    instructions=st.integers(1, 5),
    seed=st.integers(0, 1 << 30),
)
def test_shapes(core, rows, columns, instructions, seed):
    k = instructions * core.k
    assert_same(core, codes(core, seed, rows, k), codes(core, seed + 1, columns, k))


@pytest.mark.parametrize("rule", RULES.values(), ids=[name for _, name in RULES])
def test_chains_and_promotion(rule):
    """Scales of any exponent, so that promotion and epilogue overflow, underflow and cancel; K of chains and a half."""
    k = 320 if rule.chunk == 256 else 256
    x, w = (torch.where((v := codes(rule.core, seed, 40, k)).isfinite(), v, 1.0) for seed in (1, 2))
    for low, high in ((120, 130), (1, 254)):
        x_scale, scale = (floats(seed, 40, 4, low=low, high=high).abs() for seed in (3, 4))
        x_scale, scale = (s if k % 128 == 0 else s[:, :1].contiguous() for s in (x_scale, scale))
        found = expert_gemm(rule, x, x_scale, Operand(w, scale))
        expected = reference_gemm.expert_gemm(rule, x, x_scale, weights.Operand(w, scale))
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(bits(found.nan_to_num(0.0)), bits(expected.nan_to_num(0.0)))


@for_each_core
def test_threads_and_tiles_change_nothing(core):
    """More rows and columns than one tile has; each part alone gives what it gives in the whole."""
    import numba

    a, b = (torch.where((v := codes(core, seed, 200, 1024)).isfinite(), v, 1.0) for seed in (1, 2))
    before = numba.get_num_threads()
    try:
        found = []
        for count in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
            numba.set_num_threads(count)
            found.append(matmul(core, a, b))
    finally:
        numba.set_num_threads(before)
    assert torch.equal(bits(found[0]), bits(found[1]))
    assert torch.equal(bits(found[0][130:, 70:90]), bits(matmul(core, a[130:], b[70:90])))
    assert torch.equal(bits(found[0][127:129]), bits(tensor_core.matmul(core, a[127:129], b)))


def test_promotion_rounds_once():
    """fma where the product lies just beside a tie of the sum: rounding the product, or twice, gives another float."""
    g = torch.Generator().manual_seed(0)
    rule = next(s for s in SCHEMES if s.fc1.chunk == 128).fc1
    x, w = torch.zeros(64, 256), torch.zeros(64, 256)
    x[:, 0], x[:, 128] = 1.0, 1.0
    w[:, 0] = w[:, 128] = torch.randint(8, 16, (64,), generator=g) / 8
    x_scale, scale = torch.ones(64, 2), torch.ones(64, 2)
    # The second product's low bits lie 24 to 48 places below the first's leading one.
    x_scale[:, 1] = (1 + torch.randint(0, 1 << 23, (64,), generator=g) * 2.0**-23) * 2.0**-24
    scale[:, 1] = 1 + torch.randint(0, 1 << 12, (64,), generator=g) * 2.0**-23
    found = expert_gemm(rule, x, x_scale, Operand(w, scale))
    expected = reference_gemm.expert_gemm(rule, x, x_scale, weights.Operand(w, scale))
    assert torch.equal(bits(found), bits(expected))


def test_fma_is_one_rounding():
    """Random and special operands, sums at ties of float32 plus or minus one bit far below: where double rounding of a
    float64 sum goes wrong."""
    import numpy as np
    from numba import njit

    from fp4ep.optimized.engine_kernels import fma
    from fp4ep.reference.fp32 import fma as expected

    @njit
    def each(a, b, c, out):
        for i in range(len(a)):
            out[i] = fma(a[i], b[i], c[i])

    a, b, c = (floats(seed, 20000) for seed in (1, 2, 3))
    # 1 + 2^-24 is a tie; the product of the others adds or takes away 2^-60 or less.
    near = torch.tensor([1.0 + 2.0**-23, 1.0, 1.0 - 2.0**-24] * 4)
    tie = torch.tensor([2.0**-24, -(2.0**-24), 2.0**-25, -(2.0**-25)]).repeat_interleave(3)
    a = torch.cat((a, tie * (1 + 2.0**-12), tie * (1 - 2.0**-23), tie))
    b = torch.cat((b, torch.full_like(tie, 1 - 2.0**-12), torch.full_like(tie, 1 + 2.0**-23), torch.ones_like(tie)))
    c = torch.cat((c, near, near, near))
    out = np.empty(len(a), np.float32)
    each(a.numpy(), b.numpy(), c.numpy(), out)
    found, wanted = torch.from_numpy(out), expected(a, b, c)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(bits(found.nan_to_num(0.0)), bits(wanted.nan_to_num(0.0)))
    assert bool((wanted != (a.double() * b.double() + c.double()).float())[-36:].any())


def test_sigmoid():
    """Every exponent and sign, a dense range, whole arguments of ex2, NaN and infinities."""
    x = torch.cat((floats(1, 200000), torch.linspace(-130, 130, 200001), -torch.arange(-130, 130) / 1.442695))
    x = torch.cat((x, torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf])))
    expected = rcp_approx(ex2_approx(x * -1.44269502162933349609375) + 1.0)
    assert torch.equal(bits(sigmoid(x)), bits(expected))
    assert sigmoid(torch.empty(0, 4)).shape == (0, 4)


def recorded_cases() -> list:
    return [
        pytest.param(path, index, id=f"{path.stem}-{index}")
        for path in shipped_recordings()
        for index, case in enumerate(Recording(path).cases)
        if case.kind == "tensor_core"
    ]


@pytest.mark.parametrize(("path", "index"), recorded_cases())
def test_recorded_instructions(path, index):
    recording = Recording(path)
    case = recording.cases[index]
    roles = recording.roles(case)
    core = TENSOR_CORES[case.scheme]
    a, b = (decode(roles[x], _OPERANDS[core]) if core in _OPERANDS else roles[x].float() for x in "ab")
    found = matmul(core, a, b, c=roles.get("c"))
    assert (compare_bits(found, roles["d"]) if "d" in roles else compare_rows(found, roles["d_rows"])) == (0, None)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"^core: the engine has no loops for Blackwell"):
        matmul(BLACKWELL_NVFP4, torch.zeros(1, 64), torch.zeros(1, 64))
    with pytest.raises(ValueError, match="K a multiple of 32"):
        matmul(HOPPER_E4M3, torch.zeros(1, 48), torch.zeros(1, 48))
    with pytest.raises(ValueError, match=r"x and w must be"):
        matmul(HOPPER_E4M3, torch.zeros(1, 32), torch.zeros(1, 64))
    with pytest.raises(ValueError, match=r"^c must be"):
        matmul(HOPPER_E4M3, torch.zeros(1, 32), torch.zeros(2, 32), c=torch.zeros(2, 1))
