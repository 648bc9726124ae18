"""The tensor core as one rule: a fused dot product of K elements plus the accumulator, with truncation.

Every generation adds all terms of one instruction and the accumulator C in one step, after aligning them to the
largest exponent among them and cutting what falls below:

    p_j    a term: the product of a pair of elements times both their scales, where blocks have scales; or, for the FP4
           instructions, the exact dot product of a group of 16 pairs, times both scales
    e(x)   exponent of x as encoded: floor(log2|x|), but at least the format's minimum (subnormals)
    e_j    sum of e(x) over the factors of p_j, elements and scales; for a group, the scales alone
    E      max of e(C) and the e_j, a zero C and zero terms left out; at least `lowest`. A group is zero when all its
           products are or a scale is: one whose products cancel counts
    t_j    p_j truncated toward zero to a multiple of 2^(E - fraction_bits); C likewise
    D      the exact sum of the t, truncated toward zero to `output_bits` fraction bits

So the order of the elements inside an instruction does not matter, and the order of the instructions does.
The term's own significand is not normalised before E is taken.

Sources: Xie et al., MMA-Sim (arXiv 2511.10909; package mmasim 2.1.1) for the form; the Hopper rows marked so are
verified here against recordings of an H200 (`fp4ep replay`), bit for bit. The Blackwell rows are MMA-Sim's, which its
authors tested on a B200; nothing here confirms them. `tests/reference/test_mma_sim.py` compares all with MMA-Sim.
"""

from dataclasses import dataclass, replace

import torch

from .formats import E2M1, E4M3, E5M2, UE8M0
from .fp32 import canonical_nan, floor_log2, power_of_two, truncate

#: Exponent given to zeros, so that they never decide E.
_EXPONENT_OF_ZERO = -600

#: Products held at once, in elements: bounds the memory of a GEMM of any size (one float each, a few buffers).
_CHUNK = 1 << 18


@dataclass(frozen=True)
class TensorCore:
    """One row of the instruction table."""

    name: str
    k: int  #: elements summed by one instruction
    min_exponent: int  #: exponent of the subnormals of the operands or, where a term is a group, of the scales
    fraction_bits: int  #: bits kept below 2^E when terms and C are aligned
    output_bits: int  #: fraction bits of the result (23: a full float32)
    verified: bool = False  #: shipped recordings of that hardware confirm the row, bit for bit
    scale_block: int | None = None  #: K elements that share a scale on either side; None: there are no scales
    group: int = 1  #: pairs of elements in one term, their products summed exactly; divides `scale_block`
    lowest: int = -133  #: E is never lower. Recorded for Hopper bf16; the products of FP8 stay above it
    min_exponent_b: int | None = None  #: where b is of another format than a; None: `min_exponent`

    def __str__(self) -> str:
        return self.name

    @property
    def terms(self) -> int:
        """Terms of one instruction, C not counted."""
        return self.k // self.group


HOPPER_E4M3 = TensorCore("Hopper wgmma E4M3", 32, E4M3.min_exponent, 13, 13, verified=True)
HOPPER_E5M2 = TensorCore("Hopper wgmma E5M2", 32, E5M2.min_exponent, 13, 13, verified=True)
HOPPER_BF16 = TensorCore("Hopper wgmma bf16", 16, -126, 25, 23, verified=True)
HOPPER_FP16 = TensorCore("Hopper wgmma fp16", 16, -14, 25, 23, verified=True)
HOPPER_TF32 = TensorCore("Hopper wgmma TF32", 8, -126, 25, 23)

# tcgen05.mma kind::f8f6f4, kind::f16 and kind::tf32: Hopper's rule, with all bits for FP8 too.
BLACKWELL_E4M3 = TensorCore("Blackwell tcgen05 E4M3", 32, E4M3.min_exponent, 25, 23)
BLACKWELL_E5M2 = TensorCore("Blackwell tcgen05 E5M2", 32, E5M2.min_exponent, 25, 23)
BLACKWELL_BF16 = TensorCore("Blackwell tcgen05 bf16", 16, -126, 25, 23)
BLACKWELL_FP16 = TensorCore("Blackwell tcgen05 fp16", 16, -14, 25, 23)
BLACKWELL_TF32 = TensorCore("Blackwell tcgen05 TF32", 8, -126, 25, 23)

# kind::mxf8f6f4: one UE8M0 scale for the 32 elements of an instruction.
BLACKWELL_MXF8 = TensorCore("Blackwell tcgen05 MXFP8", 32, E4M3.min_exponent, 25, 23, scale_block=32)
BLACKWELL_MXF8_MXF4 = replace(BLACKWELL_MXF8, name="Blackwell tcgen05 MXFP8 x MXFP4", min_exponent_b=E2M1.min_exponent)

# kind::mxf4 and kind::mxf4nvf4: groups of 16, whatever the block.
_GROUPS = TensorCore("", 64, 0, 35, 23, group=16, lowest=-139)
BLACKWELL_MXF4 = replace(_GROUPS, name="Blackwell tcgen05 MXFP4", min_exponent=UE8M0.min_exponent, scale_block=32)
BLACKWELL_NVFP4 = replace(_GROUPS, name="Blackwell tcgen05 NVFP4", min_exponent=E4M3.min_exponent, scale_block=16)


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
    if core.group == 1:
        torch.mul(a, b, out=products)
    else:
        products.copy_(torch.bmm(a, b))
        products.mul_(*scale_a).mul_(*scale_b)
        if bool((zero := products == 0).any()):
            cancelled = torch.bmm(a.abs(), b.abs()) > 0
            exponents = torch.where(zero & ~cancelled, _EXPONENT_OF_ZERO, exponents)
    top = torch.maximum(exponents.amax(0), _exponents(c, -126).to(torch.int16)).clamp(min=core.lowest)
    scale = power_of_two(core.fraction_bits - top)
    # Beyond these limits C alone decided `top`, and every product is zero or infinite.
    limits = torch.finfo(products.dtype)
    products *= scale.clamp(limits.tiny, limits.max).to(products.dtype)
    torch.abs(products, out=terms).floor_().copysign_(products)  # trunc, but vectorised
    total = terms.sum(0).double() + (c * scale).trunc_()
    return truncate(total / scale, core.output_bits) + 0.0  # a sum that underflows to -0 is +0


def _operands(core: TensorCore, x: torch.Tensor, scale: torch.Tensor | None, min_exponent: int, dtype: torch.dtype):
    """Values `[K, rows, 1]`, scaled, and their exponents; K first, because reductions over the leading dimension
    vectorise.

    Where a term is a group: values `[groups, rows, group]` float32 (a group's dot product is a multiple of 1/4 below
    2^10, exact in any order), the scales' exponents and the scales, both `[groups, rows, 1]`.
    """
    decisive = x
    if core.scale_block is not None:
        assert scale is not None
        scale = scale.repeat_interleave(core.scale_block // core.group, 1)
        decisive = x if core.group == 1 else scale
    values, exponents = decisive.to(dtype), _exponents(decisive, min_exponent)
    if core.group == 1 and scale is not None:
        values, exponents = values * scale, exponents + _exponents(scale, UE8M0.min_exponent)
    values, exponents = (column.T.contiguous()[..., None] for column in (values, exponents.to(torch.int16)))
    if core.group == 1:
        return values, exponents
    return x.unflatten(1, (-1, core.group)).transpose(0, 1).contiguous(), exponents, values


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
    # below 2^24, float64 otherwise. A group is below 2^(fraction_bits + 12), and scaled elements leave float32's range:
    # float64 as well.
    dtype = torch.float32 if core.fraction_bits + 2 + core.k.bit_length() <= 24 else torch.float64
    out = torch.zeros(a.shape[0], b.shape[0]) if c is None else c.clone()
    rows = min(len(a), 32)
    columns = max(1, _CHUNK // (core.terms * max(1, rows)))
    min_exponent_b = core.min_exponent if core.min_exponent_b is None else core.min_exponent_b
    left = _operands(core, a, scales and scales[0], core.min_exponent, dtype)
    right = [x.mT for x in _operands(core, b, scales and scales[1], min_exponent_b, dtype)]
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
