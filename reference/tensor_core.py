"""The tensor core as one rule: a fused dot product of K elements plus the accumulator, with truncation.

Every generation adds all products of one instruction and the accumulator C in one step, after aligning them to
the largest exponent among them and cutting what falls below:

    e(x)   exponent of x as encoded: floor(log2|x|), but at least the format's minimum (subnormals)
    E      max over the non-zero products of e(a_k) + e(b_k), and e(C); at least -133
    t_k    a_k * b_k truncated toward zero to a multiple of 2^(E - fraction_bits); C likewise
    D      the exact sum of the t, truncated toward zero to `output_bits` fraction bits

So the order of the elements inside an instruction does not matter, and the order of the instructions does.
The product's own significand, in [1, 4), is not normalised before E is taken.

Sources: Xie et al., MMA-Sim (arXiv 2511.10909) for the form; the Hopper rows are verified here against recordings
of an H200 (`fp4ep replay`), bit for bit.
"""

from dataclasses import dataclass

import torch

from .formats import E4M3, E5M2
from .fp32 import canonical_nan, floor_log2, power_of_two, truncate

#: E is never lower. Recorded for bf16; the products of the FP8 formats stay above it.
_LOWEST_TOP = -133
#: Exponent given to zeros, so that they never decide E.
_EXPONENT_OF_ZERO = -600

#: Products held at once, in elements: bounds the memory of a GEMM of any size (one float each, a few buffers).
_CHUNK = 1 << 18


@dataclass(frozen=True)
class TensorCore:
    """One row of the instruction table."""

    name: str
    k: int  #: elements summed by one instruction
    min_exponent: int  #: exponent of the operands' subnormals
    fraction_bits: int  #: bits kept below 2^E when products and C are aligned
    output_bits: int  #: fraction bits of the result (23: a full float32)
    verified: bool = False  #: shipped recordings of that hardware confirm the row, bit for bit

    def __str__(self) -> str:
        return self.name


HOPPER_E4M3 = TensorCore("Hopper wgmma E4M3", 32, E4M3.min_exponent, 13, 13, verified=True)
HOPPER_E5M2 = TensorCore("Hopper wgmma E5M2", 32, E5M2.min_exponent, 13, 13, verified=True)
HOPPER_BF16 = TensorCore("Hopper wgmma bf16", 16, -126, 25, 23, verified=True)


def _exponents(values: torch.Tensor, min_exponent: int) -> torch.Tensor:
    exponents = floor_log2(values).clamp(min_exponent, 127)
    return torch.where(values == 0, _EXPONENT_OF_ZERO, exponents)


def _dot_add(core: TensorCore, a, b, exponent_a, exponent_b, c, scratch):
    """One instruction for each of the M * N outputs.

    a: `[k, M, 1]`, b: `[k, 1, N]`, their exponents likewise, c: `[M, N]`, scratch: two `[k, M, N]` buffers.
    """
    products, terms = scratch
    top = torch.maximum((exponent_a + exponent_b).amax(0), _exponents(c, -126).to(torch.int16)).clamp(min=_LOWEST_TOP)
    scale = power_of_two(core.fraction_bits - top)
    torch.mul(a, b, out=products)
    # Beyond these limits C alone decided `top`, and every product is zero or infinite.
    limits = torch.finfo(a.dtype)
    products *= scale.clamp(limits.tiny, limits.max).to(a.dtype)
    torch.abs(products, out=terms).floor_().copysign_(products)  # trunc, but vectorised
    total = terms.sum(0).double() + (c * scale).trunc_()
    return truncate(total / scale, core.output_bits) + 0.0  # a sum that underflows to -0 is +0


def matmul(core: TensorCore, a: torch.Tensor, b: torch.Tensor, *, c: torch.Tensor | None = None) -> torch.Tensor:
    """`a @ b.T` as a chain of `core` instructions in ascending K order, the accumulator starting from `c`.

    a: `[M, K]`, b: `[N, K]` float32, holding values of the operand formats exactly; K a multiple of `core.k`.
    c: `[M, N]` float32, or None for zero. Returns `[M, N]` float32.

    NaN in, NaN out (0x7FFFFFFF); infinities follow IEEE: inf - inf and 0 * inf give NaN. A zero result is +0.
    Raises ValueError when K is not a multiple of `core.k` or the shapes do not match.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or a.shape[1] % core.k:
        raise ValueError(
            f"a and b must be [M, K] and [N, K] with K a multiple of {core.k} ({core}), "
            f"got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if c is not None and c.shape != (len(a), len(b)):
        raise ValueError(f"c must be [M, N] = {(len(a), len(b))}, got {tuple(c.shape)}")
    # Integers below 2^(fraction_bits + 2) summed k + 1 at a time: float32 holds the sum exactly when it stays
    # below 2^24, float64 otherwise.
    dtype = torch.float32 if core.fraction_bits + 2 + core.k.bit_length() <= 24 else torch.float64
    out = torch.zeros(a.shape[0], b.shape[0]) if c is None else c.clone()
    rows = min(len(a), 32)
    columns = max(1, _CHUNK // (core.k * max(1, rows)))
    # K first: reductions over the leading dimension vectorise.
    left = [x.T.contiguous()[:, :, None] for x in (a.to(dtype), _exponents(a, core.min_exponent).to(torch.int16))]
    right = [x.T.contiguous()[:, None, :] for x in (b.to(dtype), _exponents(b, core.min_exponent).to(torch.int16))]
    for m in range(0, len(a), 32):
        for n in range(0, len(b), columns):
            tile = out[m : m + rows, n : n + columns]
            scratch = torch.empty(2, core.k, *tile.shape, dtype=dtype)
            for k in range(0, a.shape[1], core.k):
                a_tile, exponent_a = (x[k : k + core.k, m : m + rows] for x in left)
                b_tile, exponent_b = (x[k : k + core.k, :, n : n + columns] for x in right)
                tile = _dot_add(core, a_tile, b_tile, exponent_a, exponent_b, tile, scratch)
            out[m : m + rows, n : n + columns] = tile
    return canonical_nan(out)
