"""wgmma probed: operands and accumulators where candidate rules for the tensor core part, and millions of random ones.

`build_probes` fills a RecordingWriter and gets every output from a `run` function: the instruction on a GPU, or any
with the same signature. Small probes store their outputs. Large ones are drawn by `parity/generate.py` and keep the
digest of each row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fp4ep.reference.tensor_core import HOPPER_BF16, HOPPER_E4M3, HOPPER_E5M2, HOPPER_FP16, TensorCore, matmul

from .metrics import bits
from .recording import Case, RecordingWriter, row_digests

SIZE = 64  #: M and N of a small probe: one wgmma m64n64; M and N are multiples of it

#: (core, a `[M, K]`, b `[N, K]`, c `[M, N]`) -> d `[M, N]` float32, everything on the CPU.
Run = Callable[[TensorCore, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_LAUNCHES = 3


@dataclass(frozen=True)
class Operand:
    """Operand format of a core: codes of 1.0, of the largest finite value and of one binade, and where they end."""

    dtype: torch.dtype
    one: int
    binade: int
    max_code: int
    lowest: int  #: exponent of the smallest subnormal
    unusual: tuple[int, ...]  #: codes of infinity and NaN, quiet and signalling, without sign

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def code(self, exponent: int) -> int:
        """Magnitude code of 2^exponent, a normal value."""
        return self.one + exponent * self.binade


OPERANDS = {
    HOPPER_E4M3: Operand(torch.float8_e4m3fn, 0x38, 0x08, 0x7E, -9, (0x7F,)),
    HOPPER_E5M2: Operand(torch.float8_e5m2, 0x3C, 0x04, 0x7B, -16, (0x7C, 0x7D, 0x7E, 0x7F)),
    HOPPER_BF16: Operand(torch.bfloat16, 0x3F80, 0x0080, 0x7F7F, -133, (0x7F80, 0x7F81, 0x7FC0, 0x7FFF)),
    HOPPER_FP16: Operand(torch.float16, 0x3C00, 0x0400, 0x7BFF, -24, (0x7C00, 0x7C01, 0x7E00, 0x7FFF)),
}

#: float32, for C.
_FLOAT = Operand(
    torch.float32, 0x3F800000, 0x800000, 0x7F7FFFFF, -149, (0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF)
)

#: A tensor to store, or a generator's name and its arguments.
Source = torch.Tensor | tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Probe:
    title: str
    a: Source
    b: Source
    c: Source
    digest: bool = False  #: keep digests of d's rows in its place


def build_probes(writer: RecordingWriter, run: Run, report: Callable[[str], None]) -> None:
    """A probe that fails is reported and left out; the others go on. Bits that the model has not are reported."""
    for core in OPERANDS:
        for probe in probes(core):
            title = f"{core}, {probe.title}"
            names = {role: f"{title}.{role}" for role in "abc"}
            a, b, c = (_put(writer, names[role], source) for role, source in zip("abc", _sources(probe), strict=True))
            try:
                d, *others = [run(core, a, b, c) for _ in range(_LAUNCHES)]
                if not all(torch.equal(bits(d), bits(other)) for other in others):
                    raise RuntimeError("launches differ")
            except Exception as error:
                report(f"LEFT OUT {title}: {error!r}")
                for name in names.values():
                    writer.specs.pop(name)
                    writer.stored.pop(name, None)
                continue
            role, kept = ("d_rows", row_digests(d)) if probe.digest else ("d", d)
            names[role] = f"{title}.{role}"
            writer.store(names[role], kept, "raw" if probe.digest else "xz")
            writer.cases.append(Case(probe.title, "tensor_core", core.name, names, launches=_LAUNCHES))
            differing = int((bits(d) != bits(matmul(core, a.float(), b.float(), c=c))).sum())
            report(f"{title}: {d.numel()} outputs, {int(d.isnan().sum())} NaN, {differing} not the model's")


def _sources(probe: Probe) -> tuple[Source, Source, Source]:
    return probe.a, probe.b, probe.c


def _put(writer: RecordingWriter, name: str, source: Source) -> torch.Tensor:
    if isinstance(source, torch.Tensor):
        return writer.store(name, source, "xz")
    generator, arguments = source
    return writer.generate(name, generator, **arguments)


def probes(core: TensorCore) -> Iterator[Probe]:
    """Every probe of a core, K in the title."""
    operand = OPERANDS[core]
    random = torch.Generator().manual_seed(61)
    for title, a, b, c in (
        *_signs(core, random),
        *_unusual(core, operand, random),
        *_gaps(core, operand, random),
        *_orders(core, random),
        *_accumulators(core, operand),
        *_ranges(core, operand, random),
    ):
        a, b = (x.to(operand.dtype) if isinstance(x, torch.Tensor) else x for x in (a, b))
        yield Probe(f"{title}, K = {_shape(a)[1]}", a, b, c)
    yield from _random(core, operand)


def _shape(source: Source) -> list[int]:
    return list(source.shape) if isinstance(source, torch.Tensor) else source[1]["shape"]


def _codes(operand: Operand, seed: int, rows: int, columns: int, low: int, high: int) -> Source:
    """low, high: magnitude codes."""
    return "codes", {"seed": seed, "shape": [rows, columns], "dtype": operand.name, "low": low, "high": high}


def _normal(operand: Operand, seed: int, rows: int, columns: int) -> Source:
    return "normal", {"seed": seed, "shape": [rows, columns], "scale": 1.0, "dtype": operand.name}


def _integers(random: torch.Generator, low: int, high: int, *size: int) -> torch.Tensor:
    return torch.randint(low, high + 1, size, generator=random)


# --- small probes: (title, a, b, c) with a and b as float32 values of the format ----------------------------------


def _signs(core: TensorCore, random: torch.Generator) -> Iterator[tuple]:
    """Every sign of zero, of terms, sums and C; sums that cancel, in all or all but one term."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 1.5, -1.5])
    a, b = (values[_integers(random, 0, 5, SIZE, core.k)] for _ in "ab")
    c = values[_integers(random, 0, 5, SIZE, SIZE)]
    yield "signs", a, b, c
    yield "signs of zero", a * 0, b, c * 0
    half = core.k // 2
    a, b = (torch.cat((x[:, :half], x[:, :half]), 1) for x in (a, b))
    a[:, half:] *= -1
    yield "cancellation", a, b, c * 0
    a[torch.arange(SIZE), _integers(random, 0, core.k - 1, SIZE)] *= 0.5
    yield "cancellation but for one term", a, b, c * 2.0**-12


def _unusual(core: TensorCore, operand: Operand, random: torch.Generator) -> Iterator[tuple]:
    """Tables of 64 values by 64: what they multiply to, what they add to, in two terms or in C."""
    magnitudes = [0, 1, operand.binade - 1, operand.binade, operand.one, operand.max_code, *operand.unusual]
    values = _table(operand, magnitudes, random)
    ones = torch.ones(SIZE).to(operand.dtype)
    zero = torch.zeros(SIZE, SIZE)
    yield "products of unusual values", _row(core, values), _row(core, values), zero
    yield "sums of unusual values", _row(core, values, ones), _row(core, ones, values), zero
    magnitudes = [0, 1, _FLOAT.binade - 1, _FLOAT.binade, _FLOAT.one, _FLOAT.max_code, *_FLOAT.unusual]
    c = _table(_FLOAT, magnitudes, random).expand(SIZE, SIZE).contiguous()
    yield "unusual values and C", _row(core, values), _row(core, ones), c
    yield "unusual C of two instructions", *(torch.cat((_row(core, x), _row(core, x)), 1) for x in (ones, ones)), c


def _table(operand: Operand, magnitudes: list[int], random: torch.Generator) -> torch.Tensor:
    """`[64]`: the given codes with either sign, and others drawn from the finite ones."""
    sign = 1 << 8 * operand.dtype.itemsize - 1
    rest = _integers(random, 0, operand.max_code, SIZE // 2 - len(magnitudes))
    codes = torch.cat((torch.tensor(magnitudes), rest))
    integer = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[operand.dtype.itemsize]
    return torch.cat((codes, codes + sign)).to(integer).view(operand.dtype)


def _row(core: TensorCore, *columns: torch.Tensor) -> torch.Tensor:
    """`[64, k]`: these columns, then zeros."""
    rows = torch.zeros(SIZE, core.k).to(columns[0].dtype)
    for index, column in enumerate(columns):
        rows[:, index] = column
    return rows


def _gaps(core: TensorCore, operand: Operand, random: torch.Generator) -> Iterator[tuple]:
    """Terms at the last bits kept, `fraction_bits` below the largest, from 2 above to 3 below; C in every part."""
    bits_kept, k = core.fraction_bits, core.k

    def small(half: int) -> torch.Tensor:
        """Significands of the format times 2^-(half + -1, 0 or 1): two of them multiplied straddle the last bit."""
        low = -half - 1 - operand.lowest
        fraction = _integers(random, 0, min(low, operand.binade.bit_length() - 1), SIZE, k)
        value = 1 + (torch.rand(SIZE, k, generator=random) * 2.0**fraction).floor() * 2.0**-fraction
        return value * 2.0 ** (-half - _integers(random, -1, 1, SIZE, k)) * (2 * _integers(random, 0, 1, SIZE, k) - 1)

    for title, share in (("one small product", 1), ("small products", 2), ("many small products", k)):
        # E4M3's smallest product is 2^-18: the large one is 2^0 to 2^7.
        a, b = small((bits_kept + 1) // 2).to(operand.dtype).float(), small(bits_kept // 2).to(operand.dtype).float()
        a *= _integers(random, 0, k - 1, SIZE, k) < share
        for x in (a, b):
            x[:, 0] = torch.tensor([1.0, -1.0, 1.5, -1.75])[_integers(random, 0, 3, SIZE)]
        yield f"{title} beside a large one", a, b, torch.zeros(SIZE, SIZE)
        gaps = -(bits_kept + _integers(random, -2, 3, SIZE, SIZE))
        low_bits = (1 + torch.rand(SIZE, SIZE, generator=random)) * (2 * _integers(random, 0, 1, SIZE, SIZE) - 1)
        yield f"{title} and a small C beside a large one", a, b, low_bits * 2.0**gaps
        a, b = a.clone(), b.clone()
        a[:, 0] = 0
        yield f"{title} beside a large C", a, b, low_bits * 2.0 ** _integers(random, -1, 2, SIZE, SIZE)


def _orders(core: TensorCore, random: torch.Generator) -> Iterator[tuple]:
    """Row i of a and of b have their K elements in the same, the i-th order, so the diagonal of d is one sum in 64
    orders."""
    for instructions in (1, 2):
        k = core.k * instructions
        small = _integers(random, 0, 3, 1, k) > 0
        exponents = -_integers(random, 0, 1, 2, k) - small * (core.fraction_bits // 2)
        values = (2.0**exponents * (1 + _integers(random, 0, 3, 2, k) / 4)).float()
        values[0] *= 2 * _integers(random, 0, 1, k) - 1
        orders = torch.stack([torch.randperm(k, generator=random) for _ in range(SIZE)])
        title = "64 orders of one instruction" if instructions == 1 else "64 orders over two instructions"
        yield title, values[0][orders], values[1][orders], torch.full((SIZE, SIZE), 2.0**-9)


def _accumulators(core: TensorCore, operand: Operand) -> Iterator[tuple]:
    """C beside products that are all zero, of every exponent and subnormal; beside the smallest products."""
    k = core.k
    finite = _codes(operand, 70, SIZE, k, 0, operand.max_code)
    zeros = _codes(operand, 71, SIZE, k, 0, 0)
    every = _codes(_FLOAT, 72, SIZE, SIZE, 0, _FLOAT.max_code)
    subnormal = _codes(_FLOAT, 73, SIZE, SIZE, 0, _FLOAT.binade + 3)
    tiny = [_codes(operand, seed, SIZE, k, 0, 1) for seed in (74, 75)]
    yield "C alone", zeros, finite, every
    yield "C alone, subnormal", zeros, finite, subnormal
    yield "C and the smallest products", *tiny, every
    yield "subnormal C and the smallest products", *tiny, subnormal
    yield "a chain from C alone", *(_codes(operand, 76, SIZE, 4 * k, 0, 0) for _ in "ab"), every


def _ranges(core: TensorCore, operand: Operand, random: torch.Generator) -> Iterator[tuple]:
    """Operands from the ends of the format; for bf16, products and sums from the ends of float32."""

    def pair(seed: int, low: int, high: int, instructions: int = 1) -> list[Source]:
        return [_codes(operand, seed + i, SIZE, core.k * instructions, low, high) for i in (0, 1)]

    def c(low: int, high: int) -> Source:
        return _codes(_FLOAT, 80, SIZE, SIZE, low, high)

    subnormal, large = pair(81, 0, operand.binade), pair(83, operand.max_code - 2 * operand.binade, operand.max_code, 4)
    near = c(_FLOAT.code(-20), _FLOAT.code(4))
    smallest = 2 * operand.lowest  # exponent of the smallest product
    like_products = c(_FLOAT.code(max(smallest - 14, -126)), _FLOAT.code(max(smallest + 14, -100)))
    yield "subnormal operands", *subnormal, c(0, 0)
    yield "subnormal operands and others", subnormal[0], pair(85, 0, operand.max_code)[1], near
    yield "subnormal operands and C", *subnormal, like_products
    yield "the largest operands", *large, near
    yield "the largest operands and C", *large, c(_FLOAT.code(100), _FLOAT.max_code)
    if core is HOPPER_BF16:
        yield "sums that underflow", *pair(87, operand.code(-78), operand.code(-58)), c(0, _FLOAT.code(-120))
        yield "products that underflow", *pair(89, operand.code(-85), operand.code(-64)), c(0, 0)
        for low in (55, 59, 62):
            both = pair(91, operand.code(low), operand.code(64))
            yield f"sums that overflow, from 2^{2 * low}", *both, c(_FLOAT.code(120), _FLOAT.max_code)
        yield "chains that overflow", *pair(93, operand.code(61), operand.code(63), 8), c(0, 0)
        yield "products that overflow", *pair(95, operand.code(60), operand.code(70)), c(0, 0)
        a, b = (2.0 ** _integers(random, 60, 66, SIZE, core.k // 2) for _ in "ab")
        a, b = torch.cat((a, -a), 1), torch.cat((b, b), 1)
        a[:, 0] *= 1 + 2.0**-7
        yield "products that overflow and cancel", a, b, c(0, _FLOAT.max_code)


# --- large probes ------------------------------------------------------------------------------------------------

#: Instructions of a chain -> M and N.
_CHAINS = {1: (512, 1024), 2: (256, 1024), 4: (64, 1024), 16: (64, 256), 64: (64, 128)}


def _random(core: TensorCore, operand: Operand) -> Iterator[Probe]:
    """More than three million outputs of four distributions."""
    reach = min(core.fraction_bits // 2 + 2, -core.min_exponent)
    windows = {
        "all finite codes": (0, operand.max_code),
        "one binade": (operand.one, operand.code(1) - 1),
        f"{reach + 2} binades": (operand.code(-reach), operand.code(2) - 1),
    }
    seed = 1000
    for title, window in {**windows, "normal": None}.items():
        for instructions, (m, n) in _CHAINS.items():
            seed += 10
            k = core.k * instructions
            a, b = (
                _normal(operand, seed + i, rows, k) if window is None else _codes(operand, seed + i, rows, k, *window)
                for i, rows in enumerate((m, n))
            )
            top = 127 if core is HOPPER_BF16 and title == "all finite codes" else 8
            c = _codes(_FLOAT, seed + 2, m, n, _FLOAT.code(-24), _FLOAT.code(top))
            yield Probe(f"random, {title}, K = {k}", a, b, c, digest=True)
