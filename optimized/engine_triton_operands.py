"""Triton kernels of the GPU engine: weights and tokens in their formats to what `engine_triton` multiplies.

FP8 becomes bf16, which holds every value. bf16 becomes a wide form, int32: the high half of the float64, whose low 13
bits are zeros and here hold bf16's exponent field, 1 for subnormals and -1000 for zeros. Importing this needs Triton.
"""

import triton
import triton.language as tl

_NO_FIELD = tl.constexpr(-1000)


@triton.jit
def _e2m1(code):
    """float32 of a code: exponent in bits 1 and 2, fraction in bit 0, sign in bit 3."""
    size = code & 7
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, ((size << 22) + (126 << 23)).to(tl.float32, bitcast=True))
    return tl.where(code & 8 != 0, -value, value)


@triton.jit
def _e4m3(code):
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 2.0**-9, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where(code & 0x80 != 0, -value, value)


@triton.jit
def _e5m2(code):
    size = code & 0x7F
    normal = ((size << 21) + (112 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 4, size.to(tl.float32) * 2.0**-16, normal)
    value = tl.where(size == 0x7C, float("inf"), tl.where(size > 0x7C, float("nan"), value))
    return tl.where(code & 0x80 != 0, -value, value)


@triton.jit
def _rounded_to_e4m3(value):
    """float32 to E4M3's digits, to nearest even. Not for what exceeds 448."""
    field = tl.maximum(value.to(tl.int32, bitcast=True) >> 23 & 0xFF, 127 - 6)
    magic = (field + (23 - 3) << 23).to(tl.float32, bitcast=True) * 1.5
    return value + magic - magic


@triton.jit
def _mxfp4(code, scale, top, lowest):
    """code * 2^(scale - lowest - 5), once scales more than 11 below `top` are raised to that and their values are
    rounded to E2M1, ties away from zero.
    """
    value = _e2m1(code)
    missing = tl.maximum(top - 11 - scale, 0)
    size = tl.abs(value) * ((127 - tl.minimum(missing, 30)) << 23).to(tl.float32, bitcast=True)
    step = tl.where(size < 2, 0.5, tl.where(size < 4, 1.0, 2.0))
    inverse = tl.where(size < 2, 2.0, tl.where(size < 4, 1.0, 0.5))
    size = tl.floor(size * inverse + 0.5) * step
    size *= ((scale + missing - lowest + (127 - 5)) << 23).to(tl.float32, bitcast=True)
    return tl.where(value < 0, -size, size)


@triton.jit
def prepare(
    in_ptr,
    scale_ptr,
    range_ptr,
    tile_ptr,
    out_ptr,
    special_ptr,
    N,
    K,
    KIND: tl.constexpr,
    KPERM: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
    PLACES: tl.constexpr,
):
    """`[matrices, N, K]` operands to `[tiles, K, SIZE]`, bf16 or WIDE, K in the order of the kernel; special `[tiles]`
    int32 becomes 1 where NaN or infinity is.

    tiles: `[tiles, 3]` int32, each its matrix, its first row and the one behind its last; zeros fill it up. KIND:
    "float" (bf16 or float32), "e4m3" and "e5m2" (codes), or packed codes, `[matrices, N, K / 2]`: "nvfp4", beside
    scales `[matrices, N, K / 16]`, which become E4M3(code * scale / 8), and "mxfp4", beside scales `[matrices, N, K /
    32]` and their range, `[matrices, 2]` int32: the largest, and the smallest once raised. K a multiple of PLACES.
    """
    tile = tl.program_id(0).to(tl.int64)
    row = tl.load(tile_ptr + tile * 3 + 1) + tl.arange(0, SIZE)
    inside = (row < tl.load(tile_ptr + tile * 3 + 2))[:, None]
    matrix = tl.load(tile_ptr + tile * 3).to(tl.int64)
    row = (matrix * N + row)[:, None]
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    source = place
    if KPERM:
        source = place // 64 * 64 + place % 32 // 8 * 16 + place % 64 // 32 * 8 + place % 8
    if KIND == "nvfp4" or KIND == "mxfp4":
        BLOCK: tl.constexpr = 16 if KIND == "nvfp4" else 32
        packed = tl.load(in_ptr + row * (K // 2) + (source // 2)[None, :], inside, 0).to(tl.int32)
        code = packed >> ((source % 2) * 4)[None, :] & 15
        scale = tl.load(scale_ptr + row * (K // BLOCK) + (source // BLOCK)[None, :], inside, 0).to(tl.int32)
        if KIND == "nvfp4":
            value = _rounded_to_e4m3(_e2m1(code) * _e4m3(scale) * 0.125)
        else:
            top, lowest = tl.load(range_ptr + matrix * 2), tl.load(range_ptr + matrix * 2 + 1)
            value = tl.where(inside, _mxfp4(code, scale, top, lowest), 0.0)
    else:
        value = tl.load(in_ptr + row * K + source[None, :], inside, 0)
        if KIND == "e4m3":
            value = _e4m3(value.to(tl.int32))
        elif KIND == "e5m2":
            value = _e5m2(value.to(tl.int32))
        else:
            value = value.to(tl.float32)
    odd = tl.max(tl.max((value - value != 0).to(tl.int32), 1), 0)
    tl.atomic_max(special_ptr + tile, odd, mask=odd != 0)
    to = out_ptr + (tile * K + place[:, None]) * SIZE + tl.arange(0, SIZE)[None, :]
    if WIDE:
        field = tl.maximum(value.to(tl.int32, bitcast=True) >> 23 & 0xFF, 1)
        field = tl.where(value == 0, _NO_FIELD, field) & 0x1FFF
        half = (value.to(tl.float64).to(tl.int64, bitcast=True) >> 32).to(tl.int32)
        tl.store(to, tl.trans(half & ~0x1FFF | field))
    else:
        tl.store(to, tl.trans(value).to(tl.bfloat16))
