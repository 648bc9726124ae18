"""Compiled loops of the CPU engine: Hopper's tensor core, ex2 and rcp. Importing this needs numba.

An instruction cuts every product where the largest of its products and C say, per output. In floating point that is a
conversion to integers: `int(a * b * 2^(f - E))` rounds toward zero, and a * b and the scaling by a power of two are
exact. So operands stay floats, with their exponents beside them in small integers for the maximum:

    FP8   float32, int32 sums: products have 8 bits, the scaled ones 15, a sum of 33 of them 21
    bf16  float64, float64 sums: products have 16 bits and exponents beyond float32's, the scaled ones 27, a sum 32

Columns are contiguous in every buffer, so that each loop over them is vector code; a buffer of one instruction and 64
columns of weights stays in the first cache while the rows pass by.
"""

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic, overload

_COLUMNS = 64
_ROWS = 128
_LOWEST_TOP = -133
#: Exponents of zeros, by the exponents' type: sums with them stay below those of products, -28 (FP8) and -266 (bf16).
ZEROS = {np.int8: -64, np.int16: -600}
#: FP8: what lies below is a sum with a zero.
_LEAST8 = -40


def _bitcast(source, target, llvm):
    @intrinsic
    def cast(context, value):
        return target(source), lambda context, builder, signature, args: builder.bitcast(args[0], llvm)

    return cast


_bits32 = _bitcast(types.float32, types.int32, ir.IntType(32))
_float32 = _bitcast(types.int32, types.float32, ir.FloatType())
_bits64 = _bitcast(types.float64, types.int64, ir.IntType(64))
_float64 = _bitcast(types.int64, types.float64, ir.DoubleType())


@intrinsic
def fma(context, a, b, c):
    """float32 a * b + c, rounded once: LLVM's `llvm.fma`, an instruction where the CPU has one, else libm's fmaf."""
    signature = types.float32(types.float32, types.float32, types.float32)
    return signature, lambda context, builder, signature, args: builder.fma(*args)


@intrinsic
def _trunc(context, value):
    def generate(context, builder, signature, args):
        return builder.call(builder.module.declare_intrinsic("llvm.trunc", [ir.DoubleType()]), args)

    return types.float64(types.float64), generate


_compile = njit(cache=True, error_model="numpy")
_inline = njit(cache=True, error_model="numpy", inline="always")


@_inline
def _exponent(value, least):
    """floor(log2|value|) of a finite float32 other than zero, but at least `least` (-126 or more)."""
    return max((_bits32(value) >> 23 & 0xFF) - 127, least)


@_compile
def split(x, least, zero, exps, values):
    """x: `[M, K]` float32 -> exponents and values, NaN and infinity as zeros. Returns which rows have any of those."""
    special = np.zeros(x.shape[0], np.bool_)
    for m in range(x.shape[0]):
        for k in range(x.shape[1]):
            v = x[m, k]
            if v - v != 0:
                special[m] = True
                v = np.float32(0)
            values[m, k] = v
            exps[m, k] = zero if v == 0 else _exponent(v, least)
    return special


@_compile
def _load(w, order, n0, k0, least, zero, values, exps, special):
    """One instruction's part of the columns from n0: `[k, columns]`, zeros behind the last."""
    count = min(w.shape[0] - n0, _COLUMNS)
    for n in range(count):
        for k in range(values.shape[0]):
            v = w[n0 + n, order[k0 + k]]
            if v - v != 0:
                special[n] = True
                v = np.float32(0)
            values[k, n] = v
            exps[k, n] = zero if v == 0 else _exponent(v, least)


def _instruction(x, xe, wv, we, c, tops, ints, floats):
    """For one row: c, `[columns]` float32, becomes x . w + c. The last three are scratch. Compiled by the operands'
    type: float32 means FP8, float64 bf16.
    """
    raise NotImplementedError


@overload(_instruction)
def _by_type(x, xe, wv, we, c, tops, ints, floats):
    return _fp8 if wv.dtype == types.float32 else _bf16


def _fp8(x, xe, wv, we, c, tops, ints, floats):
    top, total, scale = ints[0], ints[1], floats[0]
    for n in range(_COLUMNS):
        tops[n] = -128
    for k in range(0, 32, 8):
        e0, e1, e2, e3 = xe[k], xe[k + 1], xe[k + 2], xe[k + 3]
        e4, e5, e6, e7 = xe[k + 4], xe[k + 5], xe[k + 6], xe[k + 7]
        for n in range(_COLUMNS):
            t = max(np.int8(e0 + we[k, n]), np.int8(e1 + we[k + 1, n]))
            u = max(np.int8(e2 + we[k + 2, n]), np.int8(e3 + we[k + 3, n]))
            v = max(np.int8(e4 + we[k + 4, n]), np.int8(e5 + we[k + 5, n]))
            y = max(np.int8(e6 + we[k + 6, n]), np.int8(e7 + we[k + 7, n]))
            tops[n] = max(tops[n], max(max(t, u), max(v, y)))
    for n in range(_COLUMNS):
        bits = _bits32(c[n])
        of_c = max((bits >> 23 & 0xFF) - 127, -126)
        of_c = _LOWEST_TOP if bits & 0x7FFFFFFF == 0 else of_c
        of_products = np.int32(tops[n])
        of_products = _LOWEST_TOP if of_products < _LEAST8 else of_products
        e = np.int32(max(of_c, of_products))
        top[n] = e
        # 2^(13 - e) in two factors, because it may exceed float32. Products need the first only: they are 0 then.
        first = np.int32(min(13 - e, 127))
        s = _float32(np.int32((first + 127) << 23))
        scale[n] = s
        total[n] = np.int32(c[n] * s * _float32(np.int32((13 - e - first + 127) << 23)))
    for k in range(0, 32, 8):
        a0, a1, a2, a3, a4, a5, a6, a7 = x[k], x[k + 1], x[k + 2], x[k + 3], x[k + 4], x[k + 5], x[k + 6], x[k + 7]
        for n in range(_COLUMNS):
            s = scale[n]
            t = np.int32(a0 * wv[k, n] * s) + np.int32(a1 * wv[k + 1, n] * s)
            u = np.int32(a2 * wv[k + 2, n] * s) + np.int32(a3 * wv[k + 3, n] * s)
            v = np.int32(a4 * wv[k + 4, n] * s) + np.int32(a5 * wv[k + 5, n] * s)
            y = np.int32(a6 * wv[k + 6, n] * s) + np.int32(a7 * wv[k + 7, n] * s)
            total[n] += np.int32((t + u) + (v + y))
    for n in range(_COLUMNS):
        e = np.int32(top[n] - 13)
        first = np.int32(max(e, -126))
        d = np.float32(total[n]) * _float32(np.int32((first + 127) << 23)) * _float32(np.int32((e - first + 127) << 23))
        # Ten bits less than float32: 13 fraction bits, or multiples of 2^-139 among the subnormals. -0 becomes +0.
        c[n] = _float32(np.int32(_bits32(d) & ~0x3FF)) + np.float32(0)


def _bf16(x, xe, wv, we, c, tops, ints, floats):
    total, scale = floats[0], floats[1]
    for n in range(_COLUMNS):
        tops[n] = -1200
    for k in range(0, 16, 4):
        e0, e1, e2, e3 = xe[k], xe[k + 1], xe[k + 2], xe[k + 3]
        for n in range(_COLUMNS):
            t = max(np.int16(e0 + we[k, n]), np.int16(e1 + we[k + 1, n]))
            u = max(np.int16(e2 + we[k + 2, n]), np.int16(e3 + we[k + 3, n]))
            tops[n] = max(tops[n], max(t, u))
    for n in range(_COLUMNS):
        bits = _bits32(c[n])
        of_c = max((bits >> 23 & 0xFF) - 127, -126)
        of_c = _LOWEST_TOP if bits & 0x7FFFFFFF == 0 else of_c
        e = max(np.int64(max(np.int32(tops[n]), np.int32(of_c))), _LOWEST_TOP)
        s = _float64((25 - e + 1023) << 52)
        scale[n] = s
        total[n] = _trunc(np.float64(c[n]) * s)
    for k in range(0, 16, 4):
        a0, a1, a2, a3 = x[k], x[k + 1], x[k + 2], x[k + 3]
        for n in range(_COLUMNS):
            s = scale[n]
            t = _trunc(a0 * wv[k, n] * s) + _trunc(a1 * wv[k + 1, n] * s)
            u = _trunc(a2 * wv[k + 2, n] * s) + _trunc(a3 * wv[k + 3, n] * s)
            total[n] += t + u
    for n in range(_COLUMNS):
        d = total[n] * _float64((2046 << 52) - _bits64(scale[n]))
        normal = _float64(_bits64(d) & -(1 << 29))  # 23 fraction bits
        below = _trunc(d * 2.0**149) * 2.0**-149
        c[n] = np.float32(below if abs(d) < 2.0**-126 else normal) + np.float32(0)


@_compile
def _chain(x, w, order, k0, k1, step, least, fraction_bits, output_bits, c):
    """A chain for one output, of any values: slow, for those that NaN or infinity may reach."""
    c = np.float64(c)
    for start in range(k0, k1, step):
        top, irregular, finite = np.int64(_LOWEST_TOP), 0.0, c - c == 0
        for k in range(start, start + step):
            p = np.float64(x[order[k]]) * np.float64(w[order[k]])
            if p - p != 0:
                irregular += p
                finite = False
            elif p != 0:
                top = max(top, _exponent(x[order[k]], least) + _exponent(w[order[k]], least))
        if not finite:
            c += irregular
            continue
        if c != 0:
            top = max(top, max((_bits64(c) >> 52 & 0x7FF) - 1023, -126))
        scale = _float64((fraction_bits - top + 1023) << 52)
        total = _trunc(c * scale)
        for k in range(start, start + step):
            total += _trunc(np.float64(x[order[k]]) * np.float64(w[order[k]]) * scale)
        total /= scale
        unit = _float64((max((_bits64(total) >> 52 & 0x7FF) - 1023, -126) - output_bits + 1023) << 52)
        c = np.float64(np.float32(_trunc(total / unit) * unit + 0.0))
    return np.float32(c) if c == c else _float32(np.int32(0x7FFFFFFF))


@njit(cache=True, error_model="numpy", parallel=True)
def gemm(x, exps, clean, x_special, w, order, start, rule, scales, out):
    """`[M, N]`: chains of instructions, promoted to float32 between them.

    x: `[M, K]` float32 in natural order; exps, clean: what `split` made of it, in the order of the kernel, clean
    float32 for FP8 and float64 for bf16; w: `[N, K]` float32 in natural order; order: `[K]`; start: `[M, N]` or
    `[0, 0]`, where the first chain starts; rule: (K of an instruction, its least exponent, fraction bits, output bits,
    the exponent of zeros, K of a chain); scales: `[M, chains]` and `[chains, N]` float32, whose product promotes.
    """
    step, least, fraction_bits, output_bits, zero, chunk = rule
    x_scale, w_scale = scales
    column_tiles = (w.shape[0] + _COLUMNS - 1) // _COLUMNS
    for tile in prange((x.shape[0] + _ROWS - 1) // _ROWS * column_tiles):
        m0, n0 = tile // column_tiles * _ROWS, tile % column_tiles * _COLUMNS
        rows, columns = min(_ROWS, x.shape[0] - m0), min(_COLUMNS, w.shape[0] - n0)
        wv, we = np.zeros((step, _COLUMNS), clean.dtype), np.full((step, _COLUMNS), zero, exps.dtype)
        c, total = np.zeros((_ROWS, _COLUMNS), np.float32), np.zeros((_ROWS, _COLUMNS), np.float32)
        special, tops = np.zeros(_COLUMNS, np.bool_), np.empty(_COLUMNS, exps.dtype)
        ints, floats = np.empty((2, _COLUMNS), np.int32), np.empty((2, _COLUMNS), clean.dtype)
        if start.size:
            c[:rows, :columns] = start[m0 : m0 + rows, n0 : n0 + columns]
        for chain in range(x_scale.shape[1]):
            k0, k1 = chain * chunk, min((chain + 1) * chunk, len(order))
            for k in range(k0, k1, step):
                _load(w, order, n0, k, least, zero, wv, we, special)
                for m in range(rows):
                    a, e = clean[m0 + m, k : k + step], exps[m0 + m, k : k + step]
                    _instruction(a, e, wv, we, c[m], tops, ints, floats)
            for m in range(rows):
                if x_special[m0 + m] or special.any():
                    for n in range(columns):
                        if x_special[m0 + m] or special[n]:
                            first = start[m0 + m, n0 + n] if start.size and chain == 0 else np.float32(0)
                            row, column = x[m0 + m], w[n0 + n]
                            c[m, n] = _chain(row, column, order, k0, k1, step, least, fraction_bits, output_bits, first)
                for n in range(columns):
                    s = x_scale[m0 + m, chain] * w_scale[chain, n0 + n]
                    total[m, n] = fma(c[m, n], s, total[m, n])
                    c[m, n] = 0
        out[m0 : m0 + rows, n0 : n0 + columns] = total[:rows, :columns]


@_inline
def _ex2(x, table):
    """ex2.approx.ftz.f32. Negative fixed-point arguments are one's complements, unless they are whole."""
    if x != x:
        return _float32(np.int32(0x7FFFFFFF))
    magnitude = np.int64(min(abs(np.float64(x)) * 2.0**23, 2.0**40))
    if x < 0:
        magnitude = ~magnitude if magnitude & 0x7FFFFF else -magnitude
    exponent = min(max(magnitude >> 23, -1000), 1000)
    value = np.float64(table[magnitude & 0x7FFFFF]) * _float64((exponent + 1023) << 52)
    return np.float32(value) if value >= 2.0**-126 else np.float32(0)


@_inline
def _rcp(x, table):
    """rcp.approx.ftz.f32 of x >= 1, infinity or NaN."""
    if x != x:
        return _float32(np.int32(0x7FFFFFFF))
    if x - x != 0:
        return np.float32(0)
    bits = np.int64(_bits32(x))
    value = np.float64(table[bits & 0x7FFFFF]) * _float64((1023 + 127 - (bits >> 23)) << 52)
    return np.float32(value) if value >= 2.0**-126 else np.float32(0)


@njit(cache=True, error_model="numpy", parallel=True)
def sigmoid(x, ex2_table, rcp_table, out):
    """rcp(1 + ex2(-x log2 e)), each step a float32. x, out: `[n]` float32."""
    for i in prange(len(x)):
        out[i] = _rcp(_ex2(x[i] * np.float32(-1.44269502162933349609375), ex2_table) + np.float32(1), rcp_table)
