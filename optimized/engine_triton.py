"""Triton kernels of the GPU engine: Hopper's tensor core, ex2 and rcp, on any card. Importing this needs Triton.

An instruction cuts every product where the largest of its products and C say, per output. Here a cut is an addition
that rounds toward zero: of a product and M, of the same sign, where the last place of M is what may stay.

    FP8   float32: products have 8 bits; 33 terms that are multiples of 2^(E-13) sum exactly
    bf16  float64: products have 16 bits and exponents beyond float32's

The largest exponent of FP8 products comes from the card's own tensor core: of 32 powers 2^(6e) the sum lies in
[2^(6E), 2^(6E+5)], whatever the order and rounding of the additions. Sums of E5M2's exponents span more than float32
has room for, hence two windows. bf16's are maxima of integers.

Operands come as `engine_triton_operands` makes them, in tiles of some rows or columns and all of K, K-major, so that
neighbouring threads read neighbouring rows or columns. NaN and infinity have kernels of their own (SPECIAL): those run
for tiles that hold any. Under TRITON_INTERPRET=1 plain operations stand in for PTX.
"""

import triton
import triton.language as tl

_INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
_SIGN32 = tl.constexpr(-(1 << 31))
_SIGN64 = tl.constexpr(-(1 << 63))
_INFINITY = tl.constexpr(0x7F800000)
_LOWEST_TOP = tl.constexpr(-133)
_NO_FIELD = tl.constexpr(-1000)  # of zeros: below every sum of two others


@triton.jit
def _cut(a, b, magic):
    """a * b toward zero to the last place of `magic`, which has the product's sign; its type is that of all three."""
    if _INTERPRET:
        p = a.to(tl.float64) * b.to(tl.float64)
        unit = tl.abs(magic.to(tl.float64)) * (2.0**-23 if magic.dtype == tl.float32 else 2.0**-52)
        size = tl.where(unit > 0, tl.floor(tl.abs(p) / tl.where(unit > 0, unit, 1.0)) * unit, tl.abs(p))
        return tl.where(p < 0, -size, size).to(magic.dtype)
    elif magic.dtype == tl.float32:
        return (
            tl.inline_asm_elementwise(
                "fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, magic], dtype=tl.float32, is_pure=True, pack=1
            )
            - magic
        )
    else:
        return (
            tl.inline_asm_elementwise(
                "fma.rz.f64 $0, $1, $2, $3;", "=d,d,d,d", [a, b, magic], dtype=tl.float64, is_pure=True, pack=1
            )
            - magic
        )


@triton.jit
def _fma(a, b, c):
    if _INTERPRET:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def _bits(x):
    """The pattern of a bf16 tensor as int32, nothing above it."""
    return x.to(tl.uint16, bitcast=True).to(tl.int32)


@triton.jit
def _load(pointer, k, SIZE: tl.constexpr, SPECIAL: tl.constexpr):
    """Patterns of one K of a tile, NaN and infinity as zeros, if there are any."""
    bits = _bits(tl.load(pointer + k * SIZE + tl.arange(0, SIZE)))
    if SPECIAL:
        bits = tl.where(bits & 0x7F80 == 0x7F80, 0, bits)
    return bits


@triton.jit
def _float(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _sign(bits):
    return (bits << 16) & _SIGN32


@triton.jit
def _powers(bits, LEAST: tl.constexpr, SHIFT: tl.constexpr):
    """2^(6e + SHIFT) for exponents e of FP8 values, at least LEAST, and 0 for zeros."""
    field = tl.maximum((bits >> 7) & 0xFF, LEAST + 127)
    power = tl.where(bits & 0x7FFF == 0, 0, field * 6 + (127 - 6 * 127 + SHIFT))
    if _INTERPRET:
        return (power << 23).to(tl.float32, bitcast=True)
    else:
        return (power << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _exponent(powers, SHIFT: tl.constexpr):
    """E of a sum of products 2^(6e + 2 SHIFT), as float32's field; 0 for an empty sum."""
    field = powers.to(tl.int32, bitcast=True) >> 23
    return tl.where(field == 0, 0, (field + (6 * 127 - 127 - 2 * SHIFT)) // 6)


@triton.jit
def _top8(x, w, LEAST: tl.constexpr):
    """The field of the largest exponent among the products of one instruction, `[rows, columns]`.

    x: `[rows, 32]`, w: `[32, columns]` patterns.
    """
    if LEAST == -6:  # E4M3: sums from -12 to 16
        return _exponent(tl.dot(_powers(x, LEAST, 0), _powers(w, LEAST, 0)), 0)
    else:  # E5M2: from -28 to 30
        high = _exponent(tl.dot(_powers(x, LEAST, -30), _powers(w, LEAST, -30)), -30)
        low = _exponent(tl.dot(_powers(x, LEAST, 24), _powers(w, LEAST, 24)), 24)
        return tl.where(high >= 127 + 10, high, low)


@triton.jit
def _fp8(c, top, x_ptr, w_ptr, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPECIAL: tl.constexpr):
    """c plus 32 products whose largest exponent has the field `top`."""
    of_c = c.to(tl.int32, bitcast=True) & _INFINITY
    # Above 2^60 there is C alone, below 2^-126 too.
    above = tl.minimum(tl.maximum(top << 23, of_c), (127 + 60) << 23)
    magic = tl.where(above == 0, 0, above + (10 << 23))
    c_magic = (magic | (c.to(tl.int32, bitcast=True) & _SIGN32)).to(tl.float32, bitcast=True)
    total = tl.where(of_c > (127 + 60) << 23, c, _cut(c, tl.full((1, 1), 1.0, tl.float32), c_magic))
    for j in tl.range(0, 32, loop_unroll_factor=8):
        a = _load(x_ptr, k + j, ROWS, SPECIAL)
        b = _load(w_ptr, k + j, COLUMNS, SPECIAL)
        signed = (magic ^ (_sign(a)[:, None] ^ _sign(b)[None, :])).to(tl.float32, bitcast=True)
        total += _cut(_float(a)[:, None], _float(b)[None, :], signed)
    return (total.to(tl.int32, bitcast=True) & ~0x3FF).to(tl.float32, bitcast=True) + 0.0


@triton.jit
def _load_wide(pointer, k, SIZE: tl.constexpr, SPECIAL: tl.constexpr):
    """As `_load`, of bf16's wide form."""
    wide = tl.load(pointer + k * SIZE + tl.arange(0, SIZE))
    if SPECIAL:
        wide = tl.where(wide & 0x1FFF == 0xFF, _NO_FIELD & 0x1FFF, wide)
    return wide


@triton.jit
def _field(wide):
    return wide << 19 >> 19


@triton.jit
def _double(wide):
    return ((wide & ~0x1FFF).to(tl.int64) << 32).to(tl.float64, bitcast=True)


@triton.jit
def _bf16(c, x_ptr, w_ptr, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPECIAL: tl.constexpr):
    """c plus 16 products."""
    pattern = c.to(tl.int32, bitcast=True)
    of_c = tl.where(pattern & 0x7FFFFFFF == 0, _LOWEST_TOP, tl.maximum(pattern >> 23 & 0xFF, 1) - 127)
    top = tl.maximum(of_c, _LOWEST_TOP) + 254
    for j in tl.range(0, 16, loop_unroll_factor=4):
        a = _field(_load_wide(x_ptr, k + j, ROWS, SPECIAL))
        b = _field(_load_wide(w_ptr, k + j, COLUMNS, SPECIAL))
        top = tl.maximum(top, a[:, None] + b[None, :])
    magic = (top + (1023 + 52 - 25 - 254)).to(tl.int64) << 52
    c_magic = (magic | pattern.to(tl.int64) & _SIGN64).to(tl.float64, bitcast=True)
    total = _cut(c.to(tl.float64), tl.full((1, 1), 1.0, tl.float64), c_magic)
    for j in tl.range(0, 16, loop_unroll_factor=4):
        a = _load_wide(x_ptr, k + j, ROWS, SPECIAL)
        b = _load_wide(w_ptr, k + j, COLUMNS, SPECIAL)
        sign = (a & _SIGN32)[:, None] ^ (b & _SIGN32)[None, :]
        signed = (magic ^ sign.to(tl.int64) << 32).to(tl.float64, bitcast=True)
        total += _cut(_double(a)[:, None], _double(b)[None, :], signed)
    normal = (total.to(tl.int64, bitcast=True) & -(1 << 29)).to(tl.float64, bitcast=True)  # 23 fraction bits
    below = tl.floor(tl.abs(total) * 2.0**149) * 2.0**-149
    small = tl.abs(total) < 2.0**-126
    return tl.where(small, tl.where(total < 0, -below, below), normal).to(tl.float32) + 0.0


@triton.jit
def _irregular(x_ptr, w_ptr, k, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of the products of one instruction that are NaN or infinite, or 0."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for j in range(STEP):
        if STEP == 32:
            a = _float(_load(x_ptr, k + j, ROWS, False)).to(tl.float64)
            b = _float(_load(w_ptr, k + j, COLUMNS, False)).to(tl.float64)
        else:
            a, b = _double(_load_wide(x_ptr, k + j, ROWS, False)), _double(_load_wide(w_ptr, k + j, COLUMNS, False))
        product = a[:, None] * b[None, :]
        total += tl.where(product - product == 0, 0.0, product).to(tl.float32)
    return total


_STRIDES = ["K", "CHUNK", "N", "x_scale_row", "x_scale_chain", "w_scale_expert", "w_scale_column", "w_scale_chain"]
_SCALES = ["x_scale_ptr", "w_scale_ptr", "start_ptr"]


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_SCALES)
def gemm(
    x_ptr,
    w_ptr,
    tile_ptr,
    x_special_ptr,
    w_special_ptr,
    start_ptr,
    x_scale_ptr,
    w_scale_ptr,
    out_ptr,
    K,
    CHUNK,
    N,
    x_scale_row,
    x_scale_chain,
    w_scale_expert,
    w_scale_column,
    w_scale_chain,
    LEAST: tl.constexpr,
    STEP: tl.constexpr,
    HAS_START: tl.constexpr,
    SPECIAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile of chains of instructions, promoted to float32 between them.

    x: `[tiles, K, ROWS]`, w: `[experts, column tiles, K, COLUMNS]`, with x_special `[tiles]` and w_special `[experts,
    column tiles]`, as `prepare` makes them; tiles: `[tiles, 3]` int32, each the place of its expert, its first row and
    the one behind its last; start: `[rows, N]` float32, where the first chain starts (HAS_START); x_scale: `[rows,
    chains]`, w_scale: `[experts, N, chains]` float32, whose product promotes, strides 0 where they repeat; CHUNK: K of
    a chain; out: `[rows, N]` float32.
    """
    tile, column_tile = tl.program_id(1), tl.program_id(0)
    expert = tl.load(tile_ptr + tile * 3).to(tl.int64)
    w_tile = expert * tl.num_programs(0) + column_tile
    if SPECIAL:
        if tl.load(x_special_ptr + tile) + tl.load(w_special_ptr + w_tile) == 0:
            return
    rows = tl.load(tile_ptr + tile * 3 + 1) + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    row_in, column_in = rows < tl.load(tile_ptr + tile * 3 + 2), columns < N
    x_ptr += tile.to(tl.int64) * K * ROWS
    w_ptr += w_tile * K * COLUMNS
    w_scale_ptr += expert * w_scale_expert
    c = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    inside = row_in[:, None] & column_in[None, :]
    if HAS_START:
        c = tl.load(start_ptr + rows[:, None] * N + columns[None, :], inside, 0.0)
    chain, k = 0, 0
    while k < K:  # not `for`: Triton's interpreter takes no bounds that are arguments
        end = tl.minimum(k + CHUNK, K)
        while k < end:
            if STEP == 32:
                at = k + tl.arange(0, 32)
                a = _bits(tl.load(x_ptr + at[None, :] * ROWS + tl.arange(0, ROWS)[:, None]))
                b = _bits(tl.load(w_ptr + at[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]))
                if SPECIAL:
                    a, b = tl.where(a & 0x7F80 == 0x7F80, 0, a), tl.where(b & 0x7F80 == 0x7F80, 0, b)
                d = _fp8(c, _top8(a, b, LEAST), x_ptr, w_ptr, k, ROWS, COLUMNS, SPECIAL)
            else:
                d = _bf16(c, x_ptr, w_ptr, k, ROWS, COLUMNS, SPECIAL)
            if SPECIAL:
                odd = _irregular(x_ptr, w_ptr, k, STEP, ROWS, COLUMNS)
                c = tl.where((c - c == 0) & (odd == 0), d, c + odd)
            else:
                c = tl.where(c - c == 0, d, c)
            k += STEP
        x_scale = tl.load(x_scale_ptr + rows.to(tl.int64) * x_scale_row + chain * x_scale_chain, row_in, 0.0)
        w_scale = tl.load(w_scale_ptr + columns * w_scale_column + chain * w_scale_chain, column_in, 0.0)
        total = _fma(c, x_scale[:, None] * w_scale[None, :], total)
        c = tl.zeros((ROWS, COLUMNS), tl.float32)
        chain += 1
    if SPECIAL:
        bits = tl.where(total == total, total.to(tl.int32, bitcast=True), 0x7FFFFFFF)
        total = bits.to(tl.float32, bitcast=True)
    tl.store(out_ptr + rows[:, None].to(tl.int64) * N + columns[None, :], total, inside)


@triton.jit
def sigmoid(x_ptr, ex2_ptr, rcp_ptr, out_ptr, n, SIZE: tl.constexpr):
    """rcp(1 + ex2(-x log2 e)), each step a float32. x, out: `[n]` float32; the tables' patterns: `[2^23]` int32."""
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + index, index < n, 0.0)
    y = x * -1.44269502162933349609375
    size = (tl.minimum(tl.where(y == y, tl.abs(y), 0.0), 200.0) * 8388608.0).to(tl.int32)
    fixed = tl.where(y < 0, tl.where(size & 0x7FFFFF == 0, -size, ~size), size)
    exponent = tl.maximum(fixed >> 23, -127)
    power = tl.load(ex2_ptr + (fixed & 0x7FFFFF)) + (tl.minimum(exponent, 127) << 23)
    power = tl.where(exponent < -126, 0, tl.where(exponent > 127, _INFINITY, power))
    bits = (power.to(tl.float32, bitcast=True) + 1.0).to(tl.int32, bitcast=True)
    inverse = tl.load(rcp_ptr + (bits & 0x7FFFFF)) - ((bits >> 23) - 127 << 23)
    inverse = tl.where(inverse < 0x00800000, 0, inverse)
    tl.store(out_ptr + index, tl.where(x == x, inverse, 0x7FFFFFFF).to(tl.float32, bitcast=True), index < n)
