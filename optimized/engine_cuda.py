"""The GPU engine: the layer bit for bit as the reference gives it, on any recent NVIDIA GPU, in Triton.

`emulation` brings quantizers, dispatch and combine as torch operations on the device, `engine_triton` the tensor core
and the special functions, `engine_triton_operands` the weights' formats; nothing comes from the reference but
descriptions and the measured tables of ex2 and rcp. SM90 schemes only. The bits are sm_90's whatever the card: no step
uses an instruction whose result depends on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import torch

from fp4ep.reference.scheme import Gemm, KOrder, Place, Scheme, TensorCore, Weights
from fp4ep.reference.types import MoEInputs, MoEWeights, Trace

from .emulation import Arithmetic, Exchange, Operand, check_shapes, emulate, engine_exactness, load_operand, placed

#: (K, fraction bits, output bits) of the instructions that have kernels.
_CORES = {(32, 13, 13), (16, 25, 23)}
#: Rows and columns of a tile, and its warps. Rows: 16 for GEMMs of no more.
ROWS, COLUMNS, WARPS = 32, 64, 4
#: Octaves below an expert's largest MXFP4 scale that operands hold; from 128 more on the preprocessing's wrap.
_MXFP4_RANGE = 11
#: Bytes of weights that are prepared at once.
_PREPARED = 1 << 29
#: What `prepare` calls the dtypes of operands.
_KINDS = {
    torch.float32: "float",
    torch.bfloat16: "float",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


def missing_for_cuda_engine() -> str | None:
    """What keeps the engine from running here; None: nothing."""
    if find_spec("triton") is None:
        return "triton is not installed: it comes with torch for CUDA"
    if _interpreted():
        return None
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))}, below 8.0"
    return None


def cuda_forward(
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
    """`emulate` on the current CUDA device: every stage as the reference has it, bit for bit but for the payload and
    sign of NaN before the output.

    Arguments may be on the CPU or the device; the Trace is where the tokens are. `exchange` moves rows on the device.
    Memory on the device beside the weights, with the Trace: 1 GiB, 2.6 GiB for FP8 weights (32 experts, H 7168, I 2048,
    128 tokens with 8 slots). Raises ValueError for schemes with FP4 activations (SM100) and the push kernel's,
    RuntimeError where `missing_for_cuda_engine` has a reason.
    """
    if reason := missing_for_cuda_engine():
        raise RuntimeError(reason)
    device, home = _device(), inputs[0].hidden_states.device
    with torch.device(device):
        trace = emulate(
            _EXACT,
            scheme,
            _moved(weights, device),
            [_moved(each, device) for each in inputs],
            ranks=ranks,
            ep_size=ep_size,
            exchange=exchange,
            workspace=None if workspace is None else [each.to(device) for each in workspace],
            progress=progress,
        )
    if home == device or home.type == device.type:
        return trace
    return Trace(tuple(replace(s, tensors={n: t.to(home) for n, t in s.tensors.items()}) for s in trace.stages))


def matmul(core: TensorCore, a: torch.Tensor, b: torch.Tensor, *, c: torch.Tensor | None = None) -> torch.Tensor:
    """`a @ b.T` as a chain of `core` instructions in ascending K order, the accumulator starting from `c`.

    a: `[M, K]`, b: `[N, K]` float32 on the device, holding values of the operand formats exactly; K a multiple of
    `core.k`; c: `[M, N]` float32, or None for zero. Returns `[M, N]` float32. NaN and infinity follow IEEE, a NaN
    result is 0x7FFFFFFF, a zero +0. Raises ValueError for other shapes or a core without kernels.
    """
    rule = Gemm(core, None, Place.NONE, Place.NONE)
    ones = torch.ones(1, 1, device=a.device)
    return expert_gemm(rule, a, ones.expand(len(a), 1), Operand(b, ones), c)


def expert_gemm(
    rule: Gemm, x: torch.Tensor, x_scale: torch.Tensor, weight: Operand, c: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T` for one expert, by the scheme's rule: chains, promotion by fma, epilogue scale.

    x: `[rows, K]` float32 operand values; x_scale: `[rows, blocks]` float32, blocks dividing K evenly; weight: `[N, K]`
    with its scales; all on the device. Returns `[rows, N]` float32. Raises as `matmul`.
    """
    _check(rule.core, x, weight.values, c)
    columns = _columns(rule, weight.values[None])
    return _grouped(rule, x, x_scale, [len(x)], columns, weight.scale[None], len(weight.values), c)


def _check(core: TensorCore, x: torch.Tensor, w: torch.Tensor, c: torch.Tensor | None) -> None:
    known = (core.k, core.fraction_bits, core.output_bits) in _CORES
    if not known or core.scale_block is not None or core.min_exponent_b is not None:
        raise ValueError(f"core: the engine has no kernels for {core}")
    check_shapes(core, x, w, c)


# --- the GEMMs of some experts ---------------------------------------------------------------------------------------

#: `[tiles, K, rows or columns]` in the order of the kernel, as `prepare` makes it, and `[tiles]` int32: where NaN or
#: infinity is.
Prepared = tuple[torch.Tensor, torch.Tensor]


def _prepared(
    rule: Gemm,
    values: torch.Tensor,
    tiles: torch.Tensor,
    size: int,
    scale: torch.Tensor | None = None,
    spread: torch.Tensor | None = None,
) -> Prepared:
    """values: `[matrices, N, K]` float32, bf16 or FP8 or, with codes in `scale`, packed FP4: NVFP4, or MXFP4 if there
    is a spread of the scales, `[matrices, 2]` int32; tiles: `[tiles, 3]` int32 of (matrix, first row, end), each of at
    most `size` rows.
    """
    from . import engine_triton_operands

    kind = _KINDS[values.dtype] if scale is None else "nvfp4" if spread is None else "mxfp4"
    n, k = values.shape[1], values.shape[2] * (1 if scale is None else 2)
    places = 64 if k % 64 == 0 else 16
    given = values.contiguous()
    given = given.view(torch.uint8) if kind in ("e4m3", "e5m2") else given
    wide = rule.core.k == 16
    dtype = torch.int32 if wide else torch.bfloat16
    out = torch.empty(len(tiles), k, size, dtype=dtype, device=values.device)
    special = torch.zeros(len(tiles), dtype=torch.int32, device=values.device)
    if out.numel():
        engine_triton_operands.prepare[(len(tiles), k // places)](
            given,
            given if scale is None else scale.contiguous(),
            special if spread is None else spread,
            tiles,
            out,
            special,
            n,
            k,
            KIND=kind,
            KPERM=rule.k_order is KOrder.KPERM64,
            WIDE=wide,
            SIZE=size,
            PLACES=places,
            enable_fp_fusion=False,
        )
    return out, special


def _columns(rule: Gemm, values: torch.Tensor, *scales: torch.Tensor) -> Prepared:
    """Experts' weights, tiles of COLUMNS; arguments as those of `_prepared`."""
    experts, n = values.shape[:2]
    first = torch.arange(0, n, COLUMNS, device=values.device)
    tiles = torch.stack((torch.zeros_like(first), first, first + COLUMNS), 1).clamp(max=n).repeat(experts, 1)
    tiles[:, 0] = torch.arange(experts, device=values.device).repeat_interleave(len(first))
    return _prepared(rule, values, tiles.int(), COLUMNS, *scales)


def _grouped(
    rule: Gemm,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    counts: Sequence[int],
    weights: Prepared,
    w_scale: torch.Tensor,
    n: int,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of one expert after the other. x: `[rows, K]`; counts: rows of each expert; w_scale: `[experts, 1 or N,
    blocks]`. Returns `[rows, N]` float32.
    """
    (w, w_special), (rows, k), device = weights, x.shape, x.device
    if not rows or not k:
        return torch.zeros(rows, n, device=device) if c is None else c.clone()
    size = 16 if max(counts) <= 16 else ROWS
    starts = torch.arange(0, k, rule.chunk or k, device=device)
    promote = [
        placed(scale, side, rule.promote)[..., starts * scale.shape[-1] // k]
        for scale, side in ((x_scale, Place.ACTIVATION), (w_scale, Place.WEIGHT))
    ]
    spans = enumerate(_spans(counts))
    tiles = [(expert, first, end) for expert, (begin, end) in spans for first in range(begin, end, size)]
    table = torch.tensor(tiles, dtype=torch.int32, device="cpu").to(device)
    x_tiles = table.clone()
    x_tiles[:, 0] = 0
    x, x_special = _prepared(rule, x[None], x_tiles, size)
    if c is not None:
        x_special |= ~c.isfinite().all()
    out = torch.empty(rows, n, device=device)
    for among_special in (False, True):
        if among_special and not bool(x_special.any() | w_special.any()):
            break
        _kernels().gemm[(len(w) // len(counts), len(tiles))](
            x,
            w,
            table,
            x_special,
            w_special,
            out if c is None else c.contiguous(),
            *promote,
            out,
            k,
            rule.chunk or k,
            n,
            *promote[0].stride(),
            promote[1].stride(0),
            promote[1].stride(1) if promote[1].shape[1] > 1 else 0,
            promote[1].stride(2),
            LEAST=rule.core.min_exponent,
            STEP=rule.core.k,
            HAS_START=c is not None,
            SPECIAL=among_special,
            ROWS=size,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    if rule.epilogue is Place.NONE:
        return out
    expert = torch.repeat_interleave(torch.tensor(counts, device=device), output_size=rows)
    activation = placed(x_scale[:, :1], Place.ACTIVATION, rule.epilogue)
    return out * (activation * placed(w_scale[:, :, 0], Place.WEIGHT, rule.epilogue)[expert])


def _spans(counts: Sequence[int]) -> list[tuple[int, int]]:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return list(zip([0, *ends], ends, strict=False))


def _experts(
    scheme: Scheme, weights: MoEWeights, leg: str, x: torch.Tensor, x_scale: torch.Tensor, expert: torch.Tensor
) -> torch.Tensor:
    """One leg for the rows of all experts. x: `[rows, K]`, expert: `[rows]` ascending, places in `weights`."""
    rule = scheme.fc1 if leg == "w13" else scheme.fc2
    n, k = getattr(weights, leg).shape[1], x.shape[1]
    counts = expert.bincount(minlength=weights.num_experts).tolist()
    live = [e for e, count in enumerate(counts) if count]
    at_once = max(1, _PREPARED // (n * k * (4 if rule.core.k == 16 else 2)))
    out, done = torch.empty(len(x), n, device=x.device), 0
    for group in (live[i : i + at_once] for i in range(0, len(live), at_once)):
        mine = [counts[e] for e in group]
        rows = slice(done, done := done + sum(mine))
        prepared, scale = _operands(scheme, weights, leg, group, rule)
        out[rows] = _grouped(rule, x[rows], x_scale[rows], mine, prepared, scale, n)
    return out


def _operands(
    scheme: Scheme, weights: MoEWeights, leg: str, group: Sequence[int], rule: Gemm
) -> tuple[Prepared, torch.Tensor]:
    """The experts' operands and their scales `[experts, 1 or N, blocks]`. Formats without a kernel go through
    `load_operand`, an expert at a time.
    """
    w, scales = getattr(weights, leg), getattr(weights, leg + "_scale")
    whole = len(group) == group[-1] + 1 - group[0]
    index = slice(group[0], group[-1] + 1) if whole else torch.tensor(group, device=w.device)
    if scheme.weights is Weights.BF16:
        return _columns(rule, w[index]), torch.ones(len(group), 1, 1, device=w.device)
    if scheme.weights is Weights.NVFP4 and scales is not None:
        spread = getattr(weights, leg + "_global_scale")
        spread = torch.ones(1, device=w.device) if spread is None else spread.reshape(-1)
        scale = 8 * spread.expand(weights.num_experts)[index]
        return _columns(rule, w[index].view(torch.uint8), scales[index].view(torch.uint8)), scale[:, None, None]
    if scheme.weights is Weights.MXFP4:
        codes = scales[index].view(torch.uint8)
        ends = torch.stack((codes.amax((1, 2)), codes.amin((1, 2))), 1).tolist()
        if all(top - least < 128 + _MXFP4_RANGE for top, least in ends):
            spread = [(top, max(least, top - _MXFP4_RANGE)) for top, least in ends]
            powers = torch.tensor(
                [[[2.0 ** (lowest - 122)]] for _, lowest in spread], dtype=torch.float64, device=w.device
            )
            where = torch.tensor(spread, dtype=torch.int32, device=w.device)
            return _columns(rule, w[index].view(torch.uint8), codes, where), powers.float()
    operands = [load_operand(scheme, weights, leg, e) for e in group]
    parts = [_columns(rule, each.values[None]) for each in operands]
    scale = torch.stack([each.scale for each in operands])
    return (torch.cat([w for w, _ in parts]), torch.cat([special for _, special in parts])), scale


# --- the sigmoid, and where it runs ----------------------------------------------------------------------------------


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + 2^(-x log2 e)) as the kernels' epilogue has it: `ex2.approx.ftz.f32`, an addition, `rcp.approx.ftz.f32`.

    x: float32 on the device, any shape; returns float32. From tables (64 MiB on the device), so that every card gives
    Hopper's bits. Below about -87 exactly 0; NaN gives 0x7FFFFFFF.
    """
    given, out = x.contiguous(), torch.empty(x.shape, device=x.device)
    if x.numel():
        _kernels().sigmoid[(-(-x.numel() // 1024),)](
            given, *_tables(x.device), out, x.numel(), SIZE=1024, enable_fp_fusion=False
        )
    return out


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    from fp4ep.reference.special import _ex2_table, _rcp_table

    with torch.device("cpu"):
        return _ex2_table().to(device).view(torch.int32), _rcp_table().to(device).view(torch.int32)


@cache
def _interpreted() -> bool:
    """Triton runs its kernels on the CPU (TRITON_INTERPRET=1): for tests."""
    import triton

    return triton.knobs.runtime.interpret


def _device() -> torch.device:
    return torch.device("cpu") if _interpreted() else torch.device("cuda", torch.cuda.current_device())


def _kernels():
    from . import engine_triton

    return engine_triton


def _moved(record, device: torch.device):
    return replace(record, **{n: t.to(device) for n, t in vars(record).items() if t is not None})


def _linear(scheme: Scheme, leg: str, x: torch.Tensor, x_scale: torch.Tensor, operand: Operand) -> torch.Tensor:
    return expert_gemm(scheme.fc1 if leg == "w13" else scheme.fc2, x, x_scale, operand)


_EXACT = Arithmetic("the engine", _linear, sigmoid, engine_exactness, _experts)
