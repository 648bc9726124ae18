"""The tensor core as one rule: a fused dot product of K elements plus the accumulator, with truncation.

Every generation adds all terms of one instruction and the accumulator C in one step, after aligning them to the
largest exponent among them and cutting what falls below:

    p_j    a term: one product a_k * b_k; where blocks have scales, the exact dot product of a block times both scales
    e(x)   exponent of x as encoded: floor(log2|x|), but at least the format's minimum (subnormals)
    e_j    e(a_k) + e(b_k); where blocks have scales, the sum of the two scales' exponents, whatever the elements
    E      max over the non-zero terms of e_j, and e(C); at least -133
    t_j    p_j truncated toward zero to a multiple of 2^(E - fraction_bits); C likewise
    D      the exact sum of the t, truncated toward zero to `output_bits` fraction bits

So the order of the elements inside an instruction does not matter, and the order of the instructions does.
The term's own significand is not normalised before E is taken.

Sources: Xie et al., MMA-Sim (arXiv 2511.10909) for the form; the Hopper rows are verified here against recordings
of an H200 (`fp4ep replay`), bit for bit. The Blackwell row is MMA-Sim's for `tcgen05.mma.kind::mxf4nvf4`, which its
authors tested on a B200; nothing here confirms it.
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
    min_exponent: int  #: exponent of the subnormals of the operands or, where blocks have scales, of the scales
    fraction_bits: int  #: bits kept below 2^E when terms and C are aligned
    output_bits: int  #: fraction bits of the result (23: a full float32)
    verified: bool = False  #: shipped recordings of that hardware confirm the row, bit for bit
    scale_block: int | None = None  #: K elements that share a scale on either side; None: there are no scales

    def __str__(self) -> str:
        return self.name

    @property
    def terms(self) -> int:
        """Terms of one instruction, C not counted."""
        return self.k // (self.scale_block or 1)


HOPPER_E4M3 = TensorCore("Hopper wgmma E4M3", 32, E4M3.min_exponent, 13, 13, verified=True)
HOPPER_E5M2 = TensorCore("Hopper wgmma E5M2", 32, E5M2.min_exponent, 13, 13, verified=True)
HOPPER_BF16 = TensorCore("Hopper wgmma bf16", 16, -126, 25, 23, verified=True)
BLACKWELL_NVFP4 = TensorCore("Blackwell tcgen05 NVFP4", 64, E4M3.min_exponent, 35, 23, scale_block=16)


def _exponents(values: torch.Tensor, min_exponent: int) -> torch.Tensor:
    exponents = floor_log2(values).clamp(min_exponent, 127)
    return torch.where(values == 0, _EXPONENT_OF_ZERO, exponents)


def _dot_add(core: TensorCore, left, right, c, scratch):
    """One instruction for each of the M * N outputs.

    left and right, as `_operands` makes them, one instruction's part of their leading dimension; c: `[M, N]`; scratch:
    two `[terms, M, N]` buffers.
    """
    products, terms = scratch
    (a, exponent_a, *scale_a), (b, exponent_b, *scale_b) = left, right
    exponents = exponent_a + exponent_b
    if core.scale_block is None:
        torch.mul(a, b, out=products)
    else:
        products.copy_(torch.bmm(a, b))
        products.mul_(*scale_a).mul_(*scale_b)
        exponents = torch.where(products == 0, _EXPONENT_OF_ZERO, exponents)
    top = torch.maximum(exponents.amax(0), _exponents(c, -126).to(torch.int16)).clamp(min=_LOWEST_TOP)
    scale = power_of_two(core.fraction_bits - top)
    # Beyond these limits C alone decided `top`, and every product is zero or infinite.
    limits = torch.finfo(products.dtype)
    products *= scale.clamp(limits.tiny, limits.max).to(products.dtype)
    torch.abs(products, out=terms).floor_().copysign_(products)  # trunc, but vectorised
    total = terms.sum(0).double() + (c * scale).trunc_()
    return truncate(total / scale, core.output_bits) + 0.0  # a sum that underflows to -0 is +0


def _operands(core: TensorCore, x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype):
    """Values `[K, rows, 1]` and their exponents; K first, because reductions over the leading dimension vectorise.

    With block scales: values `[blocks, rows, block]` float32 (a block's dot product is a multiple of 1/4 below 2^10,
    exact in any order), the scales' exponents and the scales, both `[blocks, rows, 1]`.
    """
    decisive = x if scale is None else scale
    columns = (decisive.to(dtype), _exponents(decisive, core.min_exponent).to(torch.int16))
    values, exponents = (column.T.contiguous()[..., None] for column in columns)
    if scale is None:
        return values, exponents
    return x.unflatten(1, (scale.shape[1], -1)).transpose(0, 1).contiguous(), exponents, values


def matmul(
    core: TensorCore,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    c: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`a @ b.T` as a chain of `core` instructions in ascending K order, the accumulator starting from `c`.

    a: `[M, K]`, b: `[N, K]` float32, holding values of the operand formats exactly; K a multiple of `core.k`.
    c: `[M, N]` float32, or None for zero. scales: for a core with `scale_block` the block scales of a `[M, blocks]`
    and b `[N, blocks]`, float32, not negative, values of the scale format; else None. Returns `[M, N]` float32.

    NaN in, NaN out (0x7FFFFFFF), in scales too; infinities follow IEEE: inf - inf and 0 * inf give NaN. A zero result
    is +0. Raises ValueError when K is not a multiple of `core.k` or the shapes do not match.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or a.shape[1] % core.k:
        raise ValueError(
            f"a and b must be [M, K] and [N, K] with K a multiple of {core.k} ({core}), "
            f"got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if c is not None and c.shape != (len(a), len(b)):
        raise ValueError(f"c must be [M, N] = {(len(a), len(b))}, got {tuple(c.shape)}")
    wanted = core.scale_block and [(len(x), a.shape[1] // core.scale_block) for x in (a, b)]
    if (scales and [tuple(scale.shape) for scale in scales]) != wanted:
        got = scales and [tuple(scale.shape) for scale in scales]
        raise ValueError(f"scales must be {'None' if wanted is None else wanted} ({core}), got {got}")
    # Integers below 2^(fraction_bits + 2) summed k + 1 at a time: float32 holds the sum exactly when it stays
    # below 2^24, float64 otherwise. With block scales a term is below 2^(fraction_bits + 12): float64 as well.
    dtype = torch.float32 if core.fraction_bits + 2 + core.k.bit_length() <= 24 else torch.float64
    out = torch.zeros(a.shape[0], b.shape[0]) if c is None else c.clone()
    rows = min(len(a), 32)
    columns = max(1, _CHUNK // (core.terms * max(1, rows)))
    left = _operands(core, a, scales and scales[0], dtype)
    right = [x.mT for x in _operands(core, b, scales and scales[1], dtype)]
    for m in range(0, len(a), 32):
        for n in range(0, len(b), columns):
            tile = out[m : m + rows, n : n + columns]
            scratch = torch.empty(2, core.terms, *tile.shape, dtype=dtype)
            for k in range(0, len(left[0]), core.terms):
                mine = [x[k : k + core.terms, m : m + rows] for x in left]
                theirs = [x[k : k + core.terms, :, n : n + columns] for x in right]
                tile = _dot_add(core, mine, theirs, tile, scratch)
            out[m : m + rows, n : n + columns] = tile
    return canonical_nan(out)
