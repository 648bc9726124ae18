"""The CPU engine: the layer bit for bit as the reference gives it, the tensor core compiled by numba.

`emulation` brings quantizers, weights, dispatch and combine, `engine_kernels` the loops; both are written apart from
the reference, which shares descriptions and the measured tables of ex2 and rcp. SM90 schemes only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch

from fp4ep.reference.scheme import Gemm, KOrder, Place, Scheme, TensorCore
from fp4ep.reference.types import MoEInputs, MoEWeights, Trace

from .emulation import Arithmetic, Exchange, Operand, check_shapes, emulate, engine_exactness, placed

#: (K, fraction bits, output bits) of the instructions that have loops -> types of clean operands and of exponents.
_TYPES = {(32, 13, 13): (np.float32, np.int8), (16, 25, 23): (np.float64, np.int16)}
#: Multiply-adds from which on a GEMM gets all threads: about 4 ms of one.
_PARALLEL = 1 << 24


def missing_for_engine() -> str | None:
    """What keeps the engine from running here; None: nothing."""
    return None if find_spec("numba") else "numba is not installed: pip install 'fp4ep[engine]'"


def fast_forward(
    scheme: Scheme,
    weights: MoEWeights,
    inputs: Sequence[MoEInputs],
    *,
    ranks: Sequence[int],
    ep_size: int,
    exchange: Exchange,
    workspace: Sequence[torch.Tensor] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """`emulate` with the tensor core's arithmetic and the measured special functions: every stage as the reference has
    it, bit for bit, whatever the number of ranks or threads.

    Threads: `numba.set_num_threads` or NUMBA_NUM_THREADS for the GEMMs and the sigmoid, torch's for the rest. The first
    call in a fresh installation compiles for some seconds; later processes read numba's cache. Raises ValueError for
    schemes with FP4 activations (SM100), RuntimeError without numba.
    """
    return emulate(
        _EXACT,
        scheme,
        weights,
        inputs,
        ranks=ranks,
        ep_size=ep_size,
        exchange=exchange,
        workspace=workspace,
        progress=progress,
    )


def matmul(core: TensorCore, a: torch.Tensor, b: torch.Tensor, *, c: torch.Tensor | None = None) -> torch.Tensor:
    """`a @ b.T` as a chain of `core` instructions in ascending K order, the accumulator starting from `c`.

    a: `[M, K]`, b: `[N, K]` float32, holding values of the operand formats exactly; K a multiple of `core.k`; c:
    `[M, N]` float32, or None for zero. Returns `[M, N]` float32. NaN and infinity follow IEEE, a NaN result is
    0x7FFFFFFF, a zero +0. Raises ValueError for other shapes or a core with block scales, RuntimeError without numba.
    """
    return _gemm(Gemm(core, None, Place.NONE, Place.NONE), a, b, torch.ones(len(a), 1), torch.ones(1, 1), c)


def expert_gemm(rule: Gemm, x: torch.Tensor, x_scale: torch.Tensor, weight: Operand) -> torch.Tensor:
    """`x @ weight.T` for one expert, by the scheme's rule: chains, promotion by fma, epilogue scale.

    x: `[rows, K]` float32 operand values; x_scale: `[rows, blocks]` float32, blocks dividing K evenly; weight: `[N, K]`
    with its scales. Returns `[rows, N]` float32. Raises as `matmul`.
    """
    k = x.shape[1]
    starts = torch.arange(0, k, rule.chunk or k)
    total = _gemm(
        rule,
        x,
        weight.values,
        placed(x_scale, Place.ACTIVATION, rule.promote)[:, _block(starts, x_scale, k)],
        placed(weight.scale, Place.WEIGHT, rule.promote)[:, _block(starts, weight.scale, k)],
    )
    if rule.epilogue is Place.NONE:
        return total
    return total * (
        placed(x_scale[:, :1], Place.ACTIVATION, rule.epilogue)
        * placed(weight.scale[:, 0], Place.WEIGHT, rule.epilogue)
    )


def _block(starts: torch.Tensor, scale: torch.Tensor, k: int) -> torch.Tensor:
    return starts * scale.shape[1] // k


def _gemm(
    rule: Gemm,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """x_scale: `[M, chains]`, w_scale: `[1 or N, chains]`; a chain is added as fma(chain, x_scale * w_scale, sum)."""
    core, (rows, k) = rule.core, x.shape
    types = _TYPES.get((core.k, core.fraction_bits, core.output_bits))
    if types is None or core.scale_block is not None or core.min_exponent_b is not None:
        raise ValueError(f"core: the engine has no loops for {core}")
    chunk = rule.chunk or k
    check_shapes(core, x, w, c)
    if not rows or not k:
        return torch.zeros(rows, len(w)) if c is None else c.clone()
    kernels = _kernels()
    order = _order(rule.k_order, k)
    values, exponents = (np.empty((rows, k), dtype) for dtype in types)
    zero = kernels.ZEROS[types[1]]
    special = kernels.split(_array(x[:, order]), core.min_exponent, zero, exponents, values)
    if c is not None:
        special |= ~c.isfinite().all(1).numpy()
    out = np.empty((rows, len(w)), np.float32)
    with _threads_for(rows * len(w) * k):
        kernels.gemm(
            _array(x),
            exponents,
            values,
            special,
            _array(w),
            order.numpy(),
            np.empty((0, 0), np.float32) if c is None else _array(c),
            (core.k, core.min_exponent, core.fraction_bits, core.output_bits, zero, chunk),
            (_array(x_scale), _array(w_scale.T.expand(-1, len(w)))),
            out,
        )
    return torch.from_numpy(out)


@contextmanager
def _threads_for(work: int) -> Iterator[None]:
    """One thread for little work: on a busy machine the others' arrival costs more than it saves."""
    import numba

    _kernels()  # which starts numba's threads
    before = numba.get_num_threads()
    numba.set_num_threads(before if work >= _PARALLEL else 1)
    try:
        yield
    finally:
        numba.set_num_threads(before)


def _order(order: KOrder, k: int) -> torch.Tensor:
    """`[K]` int64: where the element at each place of the kernel's K axis comes from."""
    place = torch.arange(k)
    if order is KOrder.NATURAL:
        return place
    half, quarter, element = place % 64 // 32, place % 32 // 8, place % 8
    return place - place % 64 + 16 * quarter + 8 * half + element


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().contiguous().numpy()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + 2^(-x log2 e)) as the kernels' epilogue has it: `ex2.approx.ftz.f32`, an addition, `rcp.approx.ftz.f32`.

    x: float32, any shape; returns float32. Below about -87 exactly 0; NaN gives 0x7FFFFFFF. Source: FlashInfer 0.7.4,
    `moe_hopper_fp8/epilogue_fp8_common.py`; the tables are an H200's, every entry (`reference.special`).
    """
    out = np.empty(x.numel(), np.float32)
    with _threads_for(16 * x.numel()):
        _kernels().sigmoid(_array(x).reshape(-1), *_tables(), out)
    return torch.from_numpy(out).view(x.shape)


@cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    from fp4ep.reference.special import _ex2_table, _rcp_table

    return _ex2_table().numpy(), _rcp_table().numpy()


@cache
def _kernels():
    if reason := missing_for_engine():
        raise RuntimeError(reason)
    import numba

    from . import engine_kernels

    threads = torch.get_num_threads()
    numba.get_num_threads()  # starts its threads; where both use one OpenMP, their number becomes torch's too
    torch.set_num_threads(threads)
    return engine_kernels


def _linear(scheme: Scheme, leg: str, x: torch.Tensor, x_scale: torch.Tensor, operand: Operand) -> torch.Tensor:
    return expert_gemm(scheme.fc1 if leg == "w13" else scheme.fc2, x, x_scale, operand)


_EXACT = Arithmetic("the engine", _linear, sigmoid, engine_exactness)
