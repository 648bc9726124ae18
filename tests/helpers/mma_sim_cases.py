"""Instructions that MMA-Sim and `fp4ep.reference.tensor_core` both model, and the tiles on which they are compared.

A tile set is M x N outputs of one instruction, each from its own row of a, row of b and C: 64 x 256 or, with block
scales, 128 x 256. Everything is drawn as codes from numpy's PCG64, so that any platform makes the same bits.
"""

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fp4ep.reference import tensor_core
from fp4ep.reference.formats import E2M1
from fp4ep.reference.tensor_core import TensorCore, matmul

VECTORS = Path(__file__).parents[1] / "reference" / "data" / "mma_sim_vectors.npz"
SAMPLES = 48  #: outputs of each set that are stored


@dataclass(frozen=True)
class Coding:
    """A format by its codes, sign apart; those above max_code, up to last, are infinity and NaN."""

    dtype: torch.dtype
    bits: int
    one: int  #: code of 1.0
    binade: int  #: codes from one power of two to the next
    max_code: int
    min_exponent: int
    last: int
    dropped: int = 0  #: low bits that are zero

    def code(self, exponent: int) -> int:
        """Of 2^exponent or, where that is no normal value, the nearest that is."""
        return min(max(self.one + exponent * self.binade, self.binade), self.max_code)


CODINGS = {
    "e4m3": Coding(torch.float8_e4m3fn, 8, 0x38, 0x08, 0x7E, -6, 0x7F),
    "e5m2": Coding(torch.float8_e5m2, 8, 0x3C, 0x04, 0x7B, -14, 0x7F),
    "e2m1": Coding(torch.uint8, 4, 0x2, 0x2, 0x7, 0, 0x7),
    "f16": Coding(torch.float16, 16, 0x3C00, 0x0400, 0x7BFF, -14, 0x7FFF),
    "bf16": Coding(torch.bfloat16, 16, 0x3F80, 0x0080, 0x7F7F, -126, 0x7FFF),
    "tf32": Coding(torch.float32, 32, 0x3F800000, 0x00800000, 0x7F7FFFFF, -126, 0x7FFFFFFF, dropped=13),
    "f32": Coding(torch.float32, 32, 0x3F800000, 0x00800000, 0x7F7FFFFF, -126, 0x7FFFFFFF),
    "ue8m0": Coding(torch.float8_e8m0fnu, 8, 0x7F, 0x01, 0xFE, -127, 0xFF),
    "ue4m3": Coding(torch.float8_e4m3fn, 8, 0x38, 0x08, 0x7E, -6, 0x7F),
}


@dataclass(frozen=True)
class Instruction:
    """kind: MMA-Sim's class. core: our row."""

    kind: str
    qualifier: str  #: shape and types, in MMA-Sim's and PTX's words
    core: TensorCore
    a: str
    b: str
    scale: str | None = None

    @property
    def name(self) -> str:
        return f"{self.kind} {self.qualifier}"

    @property
    def shape(self) -> tuple[int, int]:
        return (64 if self.scale is None else 128), 256


def _instructions() -> list[Instruction]:
    found = []

    def add(kind: str, form: str, core: TensorCore, a: str, b: str, scale: str | None = None) -> None:
        m = 64 if scale is None else 128
        qualifier = f"m{m}n256k{core.k}.{form}.{a}.{b}" + (f".{scale}" if scale else "")
        if core.group == 1:
            low = CODINGS[b].min_exponent
            core = replace(core, min_exponent=CODINGS[a].min_exponent, min_exponent_b=None if a == b else low)
        found.append(Instruction(kind, qualifier, core, a, b, scale))

    fp8 = [("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e4m3", "e5m2")]
    for a, b in fp8:
        add("WGMMA", "f32", tensor_core.HOPPER_E4M3 if a == b == "e4m3" else tensor_core.HOPPER_E5M2, a, b)
    add("WGMMA", "f32", tensor_core.HOPPER_BF16, "bf16", "bf16")
    add("WGMMA", "f32", tensor_core.HOPPER_FP16, "f16", "f16")
    add("WGMMA", "f32", tensor_core.HOPPER_TF32, "tf32", "tf32")
    add("TCGen05MMA", "kind::f16.f32", tensor_core.BLACKWELL_BF16, "bf16", "bf16")
    add("TCGen05MMA", "kind::f16.f32", tensor_core.BLACKWELL_FP16, "f16", "f16")
    add("TCGen05MMA", "kind::tf32.f32", tensor_core.BLACKWELL_TF32, "tf32", "tf32")
    for a, b in [*fp8, ("e4m3", "e2m1"), ("e2m1", "e2m1")]:
        core = tensor_core.BLACKWELL_E4M3 if a == b == "e4m3" else tensor_core.BLACKWELL_E5M2
        add("TCGen05MMA", "kind::f8f6f4.f32", core, a, b)
    scaled = "TCGen05MMABlockScale"
    for a, b in [*fp8, ("e4m3", "e2m1"), ("e5m2", "e2m1"), ("e2m1", "e2m1")]:
        core = tensor_core.BLACKWELL_MXF8_MXF4 if (a, b) == ("e4m3", "e2m1") else tensor_core.BLACKWELL_MXF8
        add(scaled, "kind::mxf8f6f4.block32.f32", core, a, b, "ue8m0")
    mxf4, nvf4 = tensor_core.BLACKWELL_MXF4, tensor_core.BLACKWELL_NVFP4
    add(scaled, "kind::mxf4.block32.f32", mxf4, "e2m1", "e2m1", "ue8m0")
    add(scaled, "kind::mxf4nvf4.block32.f32", mxf4, "e2m1", "e2m1", "ue8m0")
    add(scaled, "kind::mxf4nvf4.block16.f32", replace(mxf4, scale_block=16), "e2m1", "e2m1", "ue8m0")
    add(scaled, "kind::mxf4nvf4.block16.f32", nvf4, "e2m1", "e2m1", "ue4m3")
    return found


INSTRUCTIONS = {instruction.name: instruction for instruction in _instructions()}


@dataclass(frozen=True)
class Tiles:
    """Codes, int64: a `[M, K]`, b `[N, K]`, c `[M, N]`, and the scales `[M, blocks]` and `[N, blocks]` if any."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None

    @property
    def multiply_adds(self) -> int:
        return self.c.numel() * self.a.shape[1]


#: Exponents from and to, or a name of codes.
Range = tuple[int, int] | str


def _plain(operands: Range, scales: Range, c: Range) -> Callable[[Instruction, np.random.PCG64], Tiles]:
    def build(instruction: Instruction, stream: np.random.PCG64) -> Tiles:
        a, b, own, other = _drawn(instruction, stream, operands, operands, scales, scales)
        return _tiles(instruction, a, b, _draw(stream, CODINGS["f32"], instruction.shape, c), own, other)

    return build


def _cancelling(instruction: Instruction, stream: np.random.PCG64) -> Tiles:
    """Neighbours cancel, but for one element of every other row; C is anything."""
    a, b, own, other = _drawn(instruction, stream, "finite", "finite", "finite", "finite")
    _cancel(instruction, a, b)
    a[::2, instruction.core.k // 2] = CODINGS[instruction.a].one
    return _tiles(instruction, a, b, _draw(stream, CODINGS["f32"], instruction.shape, "sparse"), own, other)


def _subnormal(side: str) -> Callable[[Instruction, np.random.PCG64], Tiles]:
    """What decides E is subnormal on one side: elements or, for groups, scales. All products cancel, and what is left
    is C, cut at E - fraction_bits."""

    def build(instruction: Instruction, stream: np.random.PCG64) -> Tiles:
        core, decisive = instruction.core, getattr(instruction, side if instruction.core.group == 1 else "scale")
        lowest = CODINGS[decisive].min_exponent
        other = -20 - lowest if lowest < -100 else 0  # the other side's exponent
        elements = ["subnormal", (other, other + 1)] if core.group == 1 else ["finite"] * 2
        scales: list[Range] = ["subnormal", (other, other + 1)] if core.group > 1 else [(0, 1)] * 2
        if side == "b":
            elements, scales = elements[::-1], scales[::-1]
        a, b, own, others = _drawn(instruction, stream, *elements, *scales)
        _cancel(instruction, a, b)
        top = lowest + other
        c = _draw(stream, CODINGS["f32"], instruction.shape, (top - core.fraction_bits - 4, top - 3))
        return _tiles(instruction, a, b, c, own, others)

    return build


def _floor(instruction: Instruction, stream: np.random.PCG64) -> Tiles:
    """C is zero; one large product, a multiple of float32's smallest subnormal, and tiny ones of the other sign around
    the last bit that is kept while E is at its lowest: one that counts takes the result one step down."""
    block, scaled = instruction.core.scale_block, instruction.scale is not None
    left, right = CODINGS[instruction.a], CODINGS[instruction.b]
    if instruction.core.group > 1:  # the first block is large
        a, b, own, other = _drawn(instruction, stream, "finite", "finite", (-94, -88), (-94, -88), signed=False)
        if instruction.scale == "ue8m0":
            own[:, 0], other[:, 0] = (CODINGS["ue8m0"].code(-exponent) for exponent in (74, 73))
        a[:, block:] |= 1 << left.bits - 1
    elif instruction.a == instruction.b == "e2m1":  # their range is too small for that: carries
        a, b, own, other = _drawn(instruction, stream, "finite", "finite", (-78, -77), (-79, -78), signed=False)
    else:
        low: Range = (-7, 0) if scaled else (-81, -75)
        on_b = "subnormal" if instruction.b == "e2m1" else low
        a, b, own, other = _drawn(instruction, stream, low, on_b, (-75, -74), (-74, -73), signed=False)
        if scaled:
            a[:, 1::2] = a[:, 1::2] % left.binade + 1  # subnormals
        a *= torch.from_numpy(stream.random_raw(a.numel()) >> np.uint64(62) == 0).reshape(a.shape)
        a |= 1 << left.bits - 1
        a[:, 0] = left.code(0 if scaled else -74)
        b[:, 0] = right.code(0 if scaled else -75)
    return _tiles(instruction, a, b, torch.zeros(instruction.shape, dtype=torch.int64), own, other)


SETS: dict[str, Callable[[Instruction, np.random.PCG64], Tiles]] = {
    "all finite codes": _plain("finite", (-4, 4), (-30, 30)),
    "all finite codes and scales": _plain("finite", "finite", "finite"),
    "one binade": _plain((0, 1), (0, 1), (-2, 6)),
    "around the last bit kept": _plain((-14, 1), (-6, 6), (-24, 2)),
    "subnormals": _plain("subnormal", (-80, -60), (-140, -120)),
    "subnormal on the left": _subnormal("a"),
    "subnormal on the right": _subnormal("b"),
    "mostly zeros": _plain("sparse", "finite", "sparse"),
    "cancellation": _cancelling,
    "at the lowest exponent": _floor,
    "infinity and NaN": _plain("unusual", "unusual", "unusual"),
}


def tiles(instruction: Instruction, name: str) -> Tiles:
    return SETS[name](instruction, np.random.PCG64(zlib.crc32(f"{instruction.qualifier}: {name}".encode())))


def _drawn(
    instruction: Instruction,
    stream: np.random.PCG64,
    a: Range,
    b: Range,
    scale_a: Range,
    scale_b: Range,
    signed: bool = True,
) -> list[torch.Tensor]:
    """a, b and their scales; without scales, empty ones."""
    k, block = instruction.core.k, instruction.core.scale_block
    scale = CODINGS[instruction.scale or "ue8m0"]
    drawn = [
        _draw(stream, CODINGS[coding], (rows, k), values, signed)
        for coding, rows, values in zip((instruction.a, instruction.b), instruction.shape, (a, b), strict=True)
    ]
    return drawn + [
        _draw(stream, scale, (rows, 0 if block is None else k // block), values, signed=False)
        for rows, values in zip(instruction.shape, (scale_a, scale_b), strict=True)
    ]


def _cancel(instruction: Instruction, a: torch.Tensor, b: torch.Tensor) -> None:
    a[:, 1::2] = a[:, 0::2] ^ 1 << CODINGS[instruction.a].bits - 1
    b[:, 1::2] = b[:, 0::2]


def _tiles(instruction: Instruction, a, b, c, own, other) -> Tiles:
    return Tiles(a, b, c, None if instruction.scale is None else (own, other))


def _draw(
    stream: np.random.PCG64, coding: Coding, shape: tuple[int, int], values: Range, signed: bool = True
) -> torch.Tensor:
    words = stream.random_raw(shape[0] * shape[1]).reshape(shape)
    if isinstance(values, tuple):
        low, high = (coding.code(exponent) for exponent in values)
        high = max(low, high - 1)
    else:
        low, high = 0, max(1, coding.binade - 1) if values == "subnormal" else coding.max_code
    codes = low + (words >> np.uint64(16)) % np.uint64(high - low + 1)
    codes = codes.astype(np.int64)
    if values == "sparse":
        codes = np.where(words >> np.uint64(8) & np.uint64(7), 0, codes)
    if values == "unusual" and coding.last > coding.max_code:
        beyond = coding.max_code + 1 + codes % (coding.last - coding.max_code)
        codes = np.where(words & np.uint64(63), codes, beyond)
    if signed:
        codes = codes | (words >> np.uint64(7) & np.uint64(1)).astype(np.int64) << coding.bits - 1
    return torch.from_numpy(codes >> coding.dropped << coding.dropped)


def as_dtype(codes: torch.Tensor, coding: Coding) -> torch.Tensor:
    """The values in their own dtype; E2M1 stays codes, uint8."""
    integer = {8: torch.uint8, 4: torch.uint8, 16: torch.uint16, 32: torch.uint32}[coding.bits]
    return codes.to(integer).view(coding.dtype)


def values(codes: torch.Tensor, coding: Coding) -> torch.Tensor:
    """float32."""
    if coding is CODINGS["e2m1"]:
        return E2M1.values[codes]
    return as_dtype(codes, coding).float()


def ours(instruction: Instruction, given: Tiles, core: TensorCore | None = None) -> torch.Tensor:
    """`[M, N]` float32 of the reference, by the instruction's row or another."""
    scales = None
    if instruction.scale is not None and given.scales is not None:
        left, right = (values(codes, CODINGS[instruction.scale]) for codes in given.scales)
        scales = left, right
    a, b = values(given.a, CODINGS[instruction.a]), values(given.b, CODINGS[instruction.b])
    return matmul(core or instruction.core, a, b, c=values(given.c, CODINGS["f32"]), scales=scales)


def digest(outputs: torch.Tensor) -> bytes:
    return hashlib.blake2b(outputs.contiguous().numpy().tobytes(), digest_size=16).digest()


def sample(outputs: torch.Tensor) -> np.ndarray:
    """Bits of some outputs, as uint32."""
    bits = outputs.contiguous().view(torch.int32).flatten().numpy().view(np.uint32)
    return bits[:: len(bits) // SAMPLES][:SAMPLES]
