"""What the hardware computes, instruction by instruction. Needs Triton and a Hopper GPU."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from fp4ep.reference.formats import E4M3, E5M2, Format, decode
from fp4ep.reference.tensor_core import HOPPER_BF16, HOPPER_E4M3, HOPPER_E5M2, TensorCore

from .corpus_probes import SIZE, build_probes
from .recording import Case, RecordingWriter


@triton.jit
def _chain(a_ptr, b_ptr, c_ptr, d_ptr, N, K: tl.constexpr, STEP: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    step = tl.arange(0, STEP)
    acc = tl.load(c_ptr + row[:, None] * N + column[None, :])
    for k in range(0, K, STEP):
        a = tl.load(a_ptr + row[:, None] * K + k + step[None, :])
        b = tl.load(b_ptr + column[:, None] * K + k + step[None, :])
        acc = tl.dot(a, tl.trans(b), acc)
    tl.store(d_ptr + row[:, None] * N + column[None, :], acc)


def run_chain(core: TensorCore, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """`[M, N]` float32: per 64 x 64 outputs one wgmma for every `core.k` elements, in ascending order.

    a: `[M, K]`, b: `[N, K]` of the operand dtype, c: `[M, N]` float32, M and N multiples of 64. All on the CPU.
    """
    a, b, c = a.cuda(), b.cuda(), c.cuda()
    d = torch.empty_like(c)
    grid = (len(a) // SIZE, len(b) // SIZE)
    _chain[grid](a, b, c, d, len(b), K=a.shape[1], STEP=core.k, SIZE=SIZE, num_warps=4)
    return d.cpu()


@triton.jit
def _special(x_ptr, y_ptr, INSTRUCTION: tl.constexpr, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    y = tl.inline_asm_elementwise(INSTRUCTION, "=f,f", [tl.load(x_ptr + index)], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y_ptr + index, y)


def run_special(instruction: str, x: torch.Tensor) -> torch.Tensor:
    """One PTX instruction on float32 CUDA arguments, a multiple of 256 of them. Returns float32 on the CPU."""
    y = torch.empty_like(x)
    _special[(len(x) // 256,)](x, y, INSTRUCTION=f"{instruction} $0, $1;", SIZE=256)
    return y.cpu()


def record_probes(writer: RecordingWriter, report: Callable[[str], None]) -> None:
    """Chains of wgmma for each operand format, and the two special functions, on ordinary and unusual values."""
    random = torch.Generator().manual_seed(60)
    for core, dtype, fmt in (
        (HOPPER_E4M3, torch.float8_e4m3fn, E4M3),
        (HOPPER_E5M2, torch.float8_e5m2, E5M2),
        (HOPPER_BF16, torch.bfloat16, None),
    ):
        for title, k, a, b, c in _operands(core, fmt, random):
            a, b = (x.to(dtype) if x.is_floating_point() else x.view(dtype) for x in (a, b))
            d = run_chain(core, a, b, c)
            names = {}
            for role, tensor in (("a", a), ("b", b), ("c", c), ("d", d)):
                names[role] = f"{core.name}, {title}, K = {k}.{role}"
                writer.store(names[role], tensor if fmt is None or role in "cd" else tensor.view(torch.uint8), "xz")
            writer.cases.append(Case(f"{title}, K = {k}", "tensor_core", core.name, names))
            report(f"{core.name} {title}, K = {k}: recorded, {int(d.isnan().sum())} NaN")
    for instruction, x in (
        ("ex2.approx.ftz.f32", _ex2_arguments(random)),
        ("rcp.approx.ftz.f32", _rcp_arguments(random)),
    ):
        names = {"x": f"{instruction}.x", "y": f"{instruction}.y"}
        writer.store(names["x"], x, "xz")
        writer.store(names["y"], run_special(instruction, x.cuda()), "xz")
        writer.cases.append(Case("unusual and random arguments", "special_function", instruction, names))
        report(f"{instruction}: recorded")


def record_chains(writer: RecordingWriter, report: Callable[[str], None]) -> None:
    """The probes of `corpus_probes.py`, run as wgmma chains."""
    build_probes(writer, run_chain, report)


def _operands(core: TensorCore, fmt: Format | None, random: torch.Generator):
    """(title, K, a, b, c) with a, b as values or uint8 codes, c float32."""
    shape = (SIZE, SIZE)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random)

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high + 1, size, generator=random)

    def binades(low: int, high: int, *size: int) -> torch.Tensor:
        return (normal(*size).double() * 2.0 ** integers(low, high, *size)).float()

    for instructions in (1, 4):
        k = core.k * instructions
        if fmt is None:
            a, b = binades(-20, 20, SIZE, k), binades(-20, 20, SIZE, k)
            yield "40 binades", k, a, b, normal(*shape) * (a @ b.T).std()
        else:
            a, b = ((integers(0, fmt.max_code, SIZE, k) + 128 * integers(0, 1, SIZE, k)).byte() for _ in "ab")
            yield "every code", k, a, b, normal(*shape) * (decode(a, fmt) @ decode(b, fmt).T).std()
    # Sums that cancel, zeros of both signs.
    signs = [integers(-1, 1, SIZE, core.k).float() * normal(SIZE, core.k).sign() for _ in "ab"]
    sparse = [torch.where(integers(0, 7, SIZE, core.k) > 0, x * 0, x) for x in signs]
    yield "cancellation", core.k, *sparse, torch.tensor([0.0, -0.0, 1.0, -1.0])[integers(0, 3, *shape)]
    unusual = torch.tensor([float("nan"), float("inf"), float("-inf"), 2.0**-140, -(2.0**-149), 1.5])
    c = torch.where(integers(0, 15, *shape) > 0, normal(*shape), unusual[integers(0, 5, *shape)])
    operands = []
    for _ in "ab":
        odd = unusual[integers(0, 1 if fmt is E4M3 else 5, SIZE, core.k)]  # E4M3 has no infinity
        operands.append(torch.where(integers(0, 255, SIZE, core.k) > 0, normal(SIZE, core.k).clamp(-3, 3), odd))
    yield "infinity and NaN", core.k, *operands, c
    if fmt is None:
        yield "underflow", 64, binades(-80, -55, SIZE, 64), binades(-80, -55, SIZE, 64), binades(-149, -125, *shape)
        yield "underflow from zero", 16, binades(-85, -64, SIZE, 16), binades(-85, -64, SIZE, 16), torch.zeros(shape)
        yield "overflow", 64, binades(50, 64, SIZE, 64), binades(50, 64, SIZE, 64), binades(110, 126, *shape)
    else:
        yield "tiny accumulator", core.k, *sparse, binades(-149, -125, *shape)


_UNUSUAL = (0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, -(2.0**-126), float("inf"), float("-inf"), float("nan"))


def _ex2_arguments(random: torch.Generator) -> torch.Tensor:
    integers = torch.arange(-160.0, 140.0)
    edges = torch.tensor([*_UNUSUAL, 2.0**-23, -(2.0**-23), 2.0**-24, -(2.0**-24), 3e38, -3e38])
    rest = torch.randn(4096 - 2 * len(integers) - len(edges), generator=random) * 30
    return torch.cat((edges, integers, integers.nextafter(torch.tensor(0.0)), rest))


def _rcp_arguments(random: torch.Generator) -> torch.Tensor:
    edges = torch.tensor([*_UNUSUAL, 3.4028234663852886e38, 2.0**127, 2.0**126, 1.0, -1.0])
    exponents = torch.randint(-140, 128, (4096 - len(edges),), generator=random)
    rest = (torch.rand(len(exponents), generator=random).double() + 1) * 2.0**exponents
    return torch.cat((edges, rest.float()))
