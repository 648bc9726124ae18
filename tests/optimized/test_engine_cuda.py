"""The GPU engine against the reference: on a GPU, where there is one, else under Triton's interpreter on little.

The interpreter runs in a process of its own, since it must be chosen before Triton is imported. There plain operations
stand in for PTX, so only a GPU tests the instructions themselves.
"""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from fp4ep.optimized import engine_cuda
from fp4ep.optimized.emulation import NOT_EMULATED, Operand
from fp4ep.optimized.engine_cuda import cuda_forward, expert_gemm, matmul, missing_for_cuda_engine, sigmoid
from fp4ep.parity.problem import Layer, Problem
from fp4ep.reference import gemm as reference_gemm
from fp4ep.reference import tensor_core, weights
from fp4ep.reference.exchange import exchange_in_process
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.scheme import Scheme
from fp4ep.reference.schemes import SCHEMES, find_scheme, options_of
from fp4ep.reference.special import ex2_approx, rcp_approx
from fp4ep.reference.tensor_core import BLACKWELL_NVFP4, HOPPER_BF16, HOPPER_E4M3, HOPPER_E5M2, TensorCore

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MISSING = missing_for_cuda_engine()
runs = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

DTYPES = {HOPPER_E4M3: torch.float8_e4m3fn, HOPPER_E5M2: torch.float8_e5m2, HOPPER_BF16: torch.bfloat16}
HOPPER = [s for s in SCHEMES if s.weights not in NOT_EMULATED]
FIRST = list({(s.weights, s.stage): s for s in reversed(HOPPER)}.values())
RULES = {(rule, s.name): rule for s in HOPPER for rule in (s.fc1, s.fc2)}
NVFP4 = SCHEMES[0]
MXFP4 = find_scheme("sm90_fp8_mxfp4_bf16_pull_cutedsl")


def there(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(engine_cuda._device())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.cpu().contiguous().view(integer)


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
    found = matmul(core, there(a), there(b), c=None if c is None else there(c))
    assert torch.equal(bits(found), bits(tensor_core.matmul(core, a, b, c=c)))


# --- the instruction -------------------------------------------------------------------------------------------------


@runs
@pytest.mark.parametrize("core", DTYPES, ids=str)
def test_every_bit_pattern(core):
    """NaN and infinity included, then without; on C of every bit pattern and near the products."""
    rows, columns, k = (5, 40, core.k) if INTERPRETED else (40, 150, 4 * core.k)
    a, b = codes(core, 1, rows, k), codes(core, 2, columns, k)
    assert_same(core, a, b, floats(1, rows, columns))
    a, b = (torch.where(x.isfinite(), x, 0.0) for x in (a, b))
    assert_same(core, a, b)
    assert_same(core, a, b, floats(1, rows, columns, low=100, high=150))


@runs
@pytest.mark.parametrize("core", DTYPES, ids=str)
def test_exponent_gaps_that_straddle_the_cut(core):
    """One large product and many small ones of either sign, gaps around the fraction bits, in each place of K."""
    g = torch.Generator().manual_seed(0)
    k = core.k
    gap = torch.randint(0, 15 if core is HOPPER_E4M3 else core.fraction_bits + 4, (k, k), generator=g)
    a = (torch.randint(8, 16, (k, k), generator=g) / 8 * 2.0 ** (7 - gap / 2).floor()).to(DTYPES[core])
    b = (torch.randint(-15, 16, (k, k), generator=g) / 8 * 2.0**-1).to(DTYPES[core])
    a[torch.arange(k), torch.arange(k)] = 256.0
    assert_same(core, a.float(), b.float())


@runs
@pytest.mark.parametrize("core", DTYPES, ids=str)
def test_exponents_of_subnormals_decide(core):
    """Subnormal operands only; bf16's meet large ones, so that products are in range. C has bits on both sides of the
    cut that their exponent makes.
    """
    rows, columns, k = (5, 40, core.k) if INTERPRETED else (40, 150, 4 * core.k)
    lowest = 2.0**core.min_exponent
    a, b = (codes(core, seed, n, k) for seed, n in ((1, rows), (2, columns)))
    fractions = (torch.frexp(torch.where(x.isfinite(), x, 1.0)).mantissa.double() for x in (a, b))  # 0 or [0.5, 1)
    a, b = ((fraction * lowest * 0.75).to(DTYPES[core]).float() for fraction in fractions)
    assert 0 < max(float(a.abs().max()), float(b.abs().max())) < lowest
    if core is HOPPER_BF16:
        b = floats(3, columns, k, low=240, high=252).bfloat16().float()
    assert_same(core, a, b)
    assert_same(core, a, b, floats(4, rows, columns, low=90, high=110))


@pytest.mark.parametrize("core", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (16, 64, 2), (17, 65, 3), (130, 200, 5), (0, 8, 1)], ids=str)
@pytest.mark.usefixtures("gpu_only")
def test_shapes(core, shape):
    rows, columns, instructions = shape
    k = instructions * core.k
    assert_same(core, codes(core, 1, rows, k), codes(core, 2, columns, k))


@pytest.mark.usefixtures("gpu_only")
def test_bf16_at_both_ends_of_float32():
    """Products below 2^-133, and sums that overflow and then meet finite values or the other infinity."""
    for low, high in ((0, 3), (55, 70), (188, 200), (250, 254)):
        a, b = (floats(seed, 33, 64, low=low, high=high).bfloat16().float() for seed in (1, 2))
        assert_same(HOPPER_BF16, *(torch.where(x.isfinite(), x, 0.0) for x in (a, b)))
        assert_same(HOPPER_BF16, a, b, floats(3, 33, 33))
        a[:, ::17] = torch.inf
        assert_same(HOPPER_BF16, a, b, floats(3, 33, 33, low=250))


@pytest.mark.usefixtures("gpu_only")
def test_tiles_change_nothing(monkeypatch):
    """More rows and columns than one tile has, whatever the tile."""
    a, b = (there(torch.where((v := codes(HOPPER_E4M3, seed, 200, 512)).isfinite(), v, 1.0)) for seed in (1, 2))
    found = matmul(HOPPER_E4M3, a, b)
    for rows, columns, warps in ((16, 64, 4), (64, 32, 4), (32, 128, 8)):
        monkeypatch.setattr(engine_cuda, "ROWS", rows)
        monkeypatch.setattr(engine_cuda, "COLUMNS", columns)
        monkeypatch.setattr(engine_cuda, "WARPS", warps)
        assert torch.equal(bits(matmul(HOPPER_E4M3, a, b)), bits(found))
        assert torch.equal(bits(matmul(HOPPER_E4M3, a[130:], b[70:90])), bits(found)[130:, 70:90])


# --- what stands around it -------------------------------------------------------------------------------------------


@runs
@pytest.mark.parametrize("rule", RULES.values(), ids=[name for _, name in RULES])
def test_chains_and_promotion(rule):
    """Scales of any exponent, so that promotion and epilogue overflow, underflow and cancel; K of chains and a half."""
    if INTERPRETED and (rule.chunk != 64 or rule.core is HOPPER_E5M2):
        pytest.skip("too much for the interpreter")
    rows, columns, k = (3, 20, 128) if INTERPRETED else (40, 40, 320 if rule.chunk == 256 else 256)
    x, w = (torch.where((v := codes(rule.core, s, n, k)).isfinite(), v, 1.0) for s, n in ((1, rows), (2, columns)))
    for low, high in ((120, 130), (1, 254))[INTERPRETED:]:
        blocks = 4 if k % 128 == 0 else 1
        x_scale, scale = (floats(s, n, blocks, low=low, high=high).abs() for s, n in ((3, rows), (4, columns)))
        found = expert_gemm(rule, there(x), there(x_scale), Operand(there(w), there(scale))).cpu()
        expected = reference_gemm.expert_gemm(rule, x, x_scale, weights.Operand(w, scale))
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(bits(found.nan_to_num(0.0)), bits(expected.nan_to_num(0.0)))


@pytest.mark.usefixtures("gpu_only")
def test_promotion_rounds_once():
    """fma where the product lies just beside a tie of the sum. The interpreter's fma rounds twice."""
    g = torch.Generator().manual_seed(0)
    rule = next(s for s in SCHEMES if s.fc1.chunk == 128).fc1
    x, w = torch.zeros(64, 256), torch.zeros(64, 256)
    x[:, 0], x[:, 128] = 1.0, 1.0
    w[:, 0] = w[:, 128] = torch.randint(8, 16, (64,), generator=g) / 8
    x_scale, scale = torch.ones(64, 2), torch.ones(64, 2)
    x_scale[:, 1] = (1 + torch.randint(0, 1 << 23, (64,), generator=g) * 2.0**-23) * 2.0**-24
    scale[:, 1] = 1 + torch.randint(0, 1 << 12, (64,), generator=g) * 2.0**-23
    found = expert_gemm(rule, there(x), there(x_scale), Operand(there(w), there(scale)))
    expected = reference_gemm.expert_gemm(rule, x, x_scale, weights.Operand(w, scale))
    assert torch.equal(bits(found), bits(expected))


@runs
@pytest.mark.parametrize(
    ("scheme", "least", "most"),
    [(SCHEMES[0], 0, 126), (SCHEMES[1], 0, 126), (MXFP4, 119, 124), (MXFP4, 0, 138), (MXFP4, 0, 255)],
    ids=str,
)
def test_fp4_operands(scheme, least, most):
    """Every code under scales from least to most: what `prepare` makes of them, in the order of the kernel. MXFP4's
    are raised to at least 11 below the largest; from 139 below it on the kernel's table wraps.
    """
    at = Problem(scheme.name, options_of(scheme), num_experts=2, tokens=(1,), hidden=128, intermediate=64).build()
    g = torch.Generator().manual_seed(0)
    w = at.weights
    scales = torch.randint(least, most + 1, w.w13_scale.shape, generator=g, dtype=torch.uint8)
    packed = torch.randint(0, 256, w.w13.shape, generator=g, dtype=torch.uint8)
    w = replace(w, w13=packed, w13_scale=scales)
    moved = engine_cuda._moved(w, engine_cuda._device())
    with torch.device(engine_cuda._device()):
        (tiles, special), scale = engine_cuda._operands(scheme, moved, "w13", [0, 1], scheme.fc1)
    found = tiles.unflatten(0, (2, -1)).transpose(2, 3).flatten(1, 2).float().cpu()
    order = reference_gemm.k_permutation(scheme.fc1.k_order, 128)
    for e in range(2):
        expected = weights.load_operand(scheme, w, "w13", e)
        assert torch.equal(found[e], expected.values[:, order])
        assert torch.equal(bits(scale[e]), bits(expected.scale))
    assert not bool(special.any())


@runs
def test_sigmoid():
    """Every exponent and sign, a dense range, whole arguments of ex2, NaN and infinities."""
    x = torch.cat((floats(1, 20000), torch.linspace(-130, 130, 20001), -torch.arange(-130, 130) / 1.442695))
    x = torch.cat((x, torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf])))
    expected = rcp_approx(ex2_approx(x * -1.44269502162933349609375) + 1.0)
    assert torch.equal(bits(sigmoid(there(x))), bits(expected))
    assert sigmoid(there(torch.empty(0, 4))).shape == (0, 4)


# --- the layer -------------------------------------------------------------------------------------------------------


def assert_same_stages(at: Layer) -> None:
    """Every tensor of every stage; NaN counts as equal to NaN, but in the output."""
    place = {"ranks": range(at.ep_size), "ep_size": at.ep_size, "exchange": exchange_in_process}
    found, expected = cuda_forward(at.scheme, at.weights, at.inputs, **place), moe_forward(*vars(at).values())[1]
    assert [(s.name, s.rank, s.exactness) for s in found] == [(s.name, s.rank, s.exactness) for s in expected]
    for mine, other in zip(found, expected, strict=True):
        assert list(mine.tensors) == list(other.tensors)
        for name, tensor in mine.tensors.items():
            wanted = other.tensors[name]
            assert (tensor.dtype, tensor.shape, tensor.device) == (wanted.dtype, wanted.shape, wanted.device)
            differ = bits(tensor) != bits(wanted)
            if (mine.name, name) != ("combine", "values") and wanted.is_floating_point():
                differ &= ~(tensor.float().isnan() & wanted.float().isnan())
            assert not bool(differ.any()), (mine.name, mine.rank, name)


def layer(scheme: Scheme, **changes: object) -> Layer:
    given = {"num_experts": 4, "tokens": (8,), "values": "ties", **changes}
    return Problem(scheme.name, options_of(scheme), **given).build()


@runs
def test_every_stage_of_a_little_layer():
    scheme = find_scheme("sm90_fp8_fp8_bf16_pull_cutedsl", fp8_scale_mode="per_tensor")
    changes = {"num_experts": 2, "top_k": 1, "tokens": (2, 1), "hidden": 64, "intermediate": 64}
    assert_same_stages(layer(scheme, **changes))


@pytest.mark.parametrize("scheme", FIRST, ids=str)
@pytest.mark.parametrize("changes", [{}, {"tokens": (3, 5), "routing": "masked"}], ids=str)
@pytest.mark.usefixtures("gpu_only")
def test_every_stage_is_the_references(scheme, changes):
    assert_same_stages(layer(scheme, **changes))


@pytest.mark.parametrize("scheme", FIRST, ids=str)
@pytest.mark.usefixtures("gpu_only")
def test_special_values(scheme):
    """NaN and infinity in tokens and in routing weights, and rows at the edges of the formats."""
    at = layer(scheme)
    x, topk_weights = at.inputs[0].hidden_states.clone(), at.inputs[0].topk_weights.clone()
    x[0, 3], x[1, 5], x[2, 7], x[3, :] = torch.nan, torch.inf, -torch.inf, 0.0
    x[4] *= 1e-30
    x[5] *= 1e30
    x[6] = torch.where(torch.arange(x.shape[1]) % 2 == 0, 2.0**-133, -0.0)
    topk_weights[7, 0] = torch.nan
    assert_same_stages(replace(at, inputs=(replace(at.inputs[0], hidden_states=x, topk_weights=topk_weights),)))


# --- where it runs, and what it refuses ------------------------------------------------------------------------------


@pytest.fixture
def gpu_only() -> None:
    if MISSING is not None or INTERPRETED:
        pytest.skip(MISSING or "too much for the interpreter")


@pytest.mark.skipif(INTERPRETED or not MISSING, reason="the tests run in this process")
def test_under_the_interpreter():
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"^core: the engine has no kernels for Blackwell"):
        matmul(BLACKWELL_NVFP4, torch.zeros(1, 64), torch.zeros(1, 64))
    with pytest.raises(ValueError, match="K a multiple of 32"):
        matmul(HOPPER_E4M3, torch.zeros(1, 48), torch.zeros(1, 48))
    with pytest.raises(ValueError, match=r"x and w must be"):
        matmul(HOPPER_E4M3, torch.zeros(1, 32), torch.zeros(1, 64))
    with pytest.raises(ValueError, match=r"^c must be"):
        matmul(HOPPER_E4M3, torch.zeros(1, 32), torch.zeros(2, 32), c=torch.zeros(2, 1))


@pytest.mark.parametrize(("capability", "reason"), [((7, 5), "compute capability 7.5, below 8.0"), ((10, 3), None)])
def test_why_it_cannot_run(monkeypatch, capability, reason):
    monkeypatch.setattr(engine_cuda, "find_spec", lambda name: None)
    assert missing_for_cuda_engine() == "triton is not installed: it comes with torch for CUDA"
    with pytest.raises(RuntimeError, match="triton is not installed"):
        cuda_forward(NVFP4, None, [], ranks=range(1), ep_size=1, exchange=exchange_in_process)
    monkeypatch.setattr(engine_cuda, "find_spec", lambda name: name)
    monkeypatch.setattr(engine_cuda, "_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert missing_for_cuda_engine() == "no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert missing_for_cuda_engine() == reason


@pytest.mark.parametrize("kind", NOT_EMULATED)
def test_what_it_lacks_is_refused(monkeypatch, kind):
    monkeypatch.setattr(engine_cuda, "missing_for_cuda_engine", lambda: None)
    monkeypatch.setattr(engine_cuda, "_device", lambda: torch.device("cpu"))
    at = layer(NVFP4)
    scheme = next(s for s in SCHEMES if s.weights is kind)
    what = f"^scheme: the engine has no {NOT_EMULATED[kind]} and cannot run {scheme.name}"
    with pytest.raises(ValueError, match=what):
        cuda_forward(scheme, at.weights, at.inputs, ranks=range(1), ep_size=1, exchange=exchange_in_process)
