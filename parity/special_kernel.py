"""One PTX instruction on every element. Needs Triton and a Hopper GPU; `special_probe.py` imports it where it runs."""

import torch
import triton
import triton.language as tl

_SIZE = 1024


@triton.jit
def _unary(x_ptr, y_ptr, n, INSTRUCTION: tl.constexpr, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + index, index < n)
    y = tl.inline_asm_elementwise(INSTRUCTION, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y_ptr + index, y, index < n)


@triton.jit
def _binary(a_ptr, b_ptr, y_ptr, n, INSTRUCTION: tl.constexpr, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    a, b = tl.load(a_ptr + index, index < n), tl.load(b_ptr + index, index < n)
    y = tl.inline_asm_elementwise(INSTRUCTION, "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y_ptr + index, y, index < n)


def apply(instruction: str, *operands: torch.Tensor) -> torch.Tensor:
    """One PTX instruction on one or two float32 CUDA operands `[n]`. Returns float32 `[n]` on their device."""
    kernel = {1: _unary, 2: _binary}[len(operands)]
    text = ", ".join([f"{instruction} $0", *(f"${place + 1}" for place in range(len(operands)))]) + ";"
    given = [x.contiguous() for x in operands]
    y = torch.empty_like(given[0])
    kernel[(triton.cdiv(len(y), _SIZE),)](*given, y, len(y), INSTRUCTION=text, SIZE=_SIZE)
    return y
