"""What the hardware computes, instruction by instruction. Needs Triton and a Hopper GPU."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from fp4ep.reference.formats import E4M3, E5M2, decode
from fp4ep.reference.tensor_core import HOPPER_BF16, HOPPER_E4M3, HOPPER_E5M2, TensorCore

from .recording import Case, RecordingWriter

_SIZE = 64  # M and N: one wgmma m64n64


@triton.jit
def _chain(a_ptr, b_ptr, c_ptr, d_ptr, K: tl.constexpr, STEP: tl.constexpr, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    step = tl.arange(0, STEP)
    acc = tl.load(c_ptr + row[:, None] * SIZE + row[None, :])
    for k in range(0, K, STEP):
        a = tl.load(a_ptr + row[:, None] * K + k + step[None, :])
        b = tl.load(b_ptr + row[:, None] * K + k + step[None, :])
        acc = tl.dot(a, tl.trans(b), acc)
    tl.store(d_ptr + row[:, None] * SIZE + row[None, :], acc)


def run_chain(core: TensorCore, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a, b: `[64, K]` CUDA tensors of the operand dtype, c: `[64, 64]` float32. Returns float32 on the CPU."""
    d = torch.empty_like(c)
    _chain[(1,)](a, b, c, d, K=a.shape[1], STEP=core.k, SIZE=_SIZE, num_warps=4)
    return d.cpu()


def record_probes(writer: RecordingWriter, report: Callable[[str], None]) -> None:
    random = torch.Generator().manual_seed(60)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    def any_code(k: int, finite: int) -> torch.Tensor:
        """Every finite code, both signs: the exponents are spread over the whole format."""
        codes = torch.randint(0, finite + 1, (_SIZE, k), generator=random)
        return (codes + 128 * torch.randint(0, 2, codes.shape, generator=random)).to(torch.uint8)

    def spread(k: int) -> torch.Tensor:
        """bf16 with exponents over 40 binades."""
        return (normal(_SIZE, k) * 2.0 ** torch.randint(-20, 21, (_SIZE, k), generator=random)).bfloat16()

    for core, dtype, fmt in ((HOPPER_E4M3, torch.float8_e4m3fn, E4M3), (HOPPER_E5M2, torch.float8_e5m2, E5M2)):
        for k, data in ((32, "all codes"), (128, "all codes"), (256, "normal")):
            if data == "normal":
                a, b = (normal(_SIZE, k).to(dtype).view(torch.uint8) for _ in "ab")
            else:
                a, b = (any_code(k, fmt.max_code) for _ in "ab")
            _probe(writer, report, core, f"{data}, K = {k}", a, b, dtype, normal(_SIZE, _SIZE), fmt)
    for k, data in ((16, "40 binades"), (64, "40 binades"), (256, "normal")):
        a, b = ((normal(_SIZE, k).bfloat16() if data == "normal" else spread(k)) for _ in "ab")
        _probe(writer, report, HOPPER_BF16, f"{data}, K = {k}", a, b, torch.bfloat16, normal(_SIZE, _SIZE), None)


def _probe(writer, report, core, title, a, b, dtype, c, fmt) -> None:
    values = [(decode(x, fmt) if fmt else x.float()) for x in (a, b)]
    c = c * (values[0] @ values[1].T).std()  # as large as the sum, with all 23 fraction bits in use
    d = run_chain(core, a.view(dtype).cuda(), b.view(dtype).cuda(), c.cuda())
    names = {}
    for role, tensor in zip("abcd", (a, b, c, d), strict=True):
        names[role] = f"{core.name}, {title}.{role}"
        writer.store(names[role], tensor, "xz")
    writer.cases.append(Case(title, "tensor_core", core.name, names))
    report(f"{core.name} {title}: recorded")
