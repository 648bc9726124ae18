"""What one layer of a checkpoint holds, counted: histograms of block scales, scales of one number, what is missing.

Reads every tensor of the layer's experts once, an expert at a time. Judges nothing: `checkpoint_checks` does.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch

from .checkpoint_conventions import DOWN, GATE, GATE_UP, UP, Convention, Part
from .checkpoint_files import StoredTensor
from .checkpoint_layer import LEGS, CheckpointLayer, scalars, scale_bytes

PROJECTIONS = (GATE, UP, DOWN)
#: Called with the bytes of every tensor read.
Advance = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class LayerFacts:
    """Counts of one layer; first dimension experts (in the order of `experts`), second gate, up, down.

    hidden, intermediate: H and I as most down projections have them. scale_counts `[E, 3, 256]`: how often each byte is
    a block scale; float32 UE8M0 scales count by their exponent. zero_blocks `[E, 3]`: blocks whose codes are all zero;
    flushed_blocks: blocks with some other code and the scale zero. mantissas `[E, 3]`: float32 UE8M0 scales that are no
    powers of two. global_scales, input_scales `[E, 3]` float32, as on disk; NaN where there is none. missing: ids of
    the experts that lack a part of a projection. odd: tensors with a shape or dtype that does not fit, with the reason;
    their blocks are not counted. unread: scales of one number that are odd, so that none was read.
    """

    layer: CheckpointLayer
    convention: Convention
    experts: tuple[int, ...]
    hidden: int
    intermediate: int
    scale_counts: torch.Tensor
    zero_blocks: torch.Tensor
    flushed_blocks: torch.Tensor
    mantissas: torch.Tensor
    global_scales: torch.Tensor
    input_scales: torch.Tensor
    missing: Mapping[tuple[Part, str], list[int]] = field(default_factory=dict)
    odd: Mapping[str, list[int]] = field(default_factory=dict)
    unread: frozenset[Part] = frozenset()

    @property
    def blocks(self) -> int:
        return int(self.scale_counts.sum())

    def ids(self, mask: torch.Tensor) -> tuple[int, ...]:
        """Experts for which an `[E]` or `[E, ...]` mask holds somewhere."""
        some = mask.reshape(len(self.experts), -1).any(1)
        return tuple(self.experts[e] for e in some.nonzero().flatten().tolist())

    def counts_of(self, codes: range | list[int]) -> torch.Tensor:
        """`[E, 3]`: how many block scales have one of these bytes."""
        return self.scale_counts[..., list(codes)].sum(-1)


def size_of(layer: CheckpointLayer) -> int:
    """Bytes that `examine` reads."""
    if layer.convention is None:
        return 0
    read = [suffix for part, suffix in layer.convention.suffixes.items() if part is not Part.BIAS]
    return sum(layer.shards[name].nbytes for slot, name in layer.names.items() if slot.suffix in read)


def examine(layer: CheckpointLayer, convention: Convention, advance: Advance | None = None) -> LayerFacts:
    """Read a layer and count. Raises ValueError for a damaged file only."""
    experts = layer.experts
    hidden, intermediate = _sizes(layer, experts)
    counted = {
        n: torch.zeros(len(experts), 3, dtype=torch.long) for n in ("zero_blocks", "flushed_blocks", "mantissas")
    }
    scale_counts = torch.zeros(len(experts), 3, 256, dtype=torch.long)
    odd: defaultdict[str, list[int]] = defaultdict(list)
    reader = _Pieces(layer, convention, hidden, intermediate, advance, odd)
    for e, expert in enumerate(experts):
        for p, (codes, scales) in enumerate(reader.of_expert(expert)):
            if scales is not None:
                scales, counted["mantissas"][e, p] = scale_bytes(scales)
                scale_counts[e, p] = torch.bincount(scales.flatten(), minlength=256)
            if codes is not None:
                zero = _zero_blocks(codes, convention.block)
                counted["zero_blocks"][e, p] = zero.sum()
                if scales is not None and convention.weight_format == "nvfp4" and zero.shape == scales.shape:
                    counted["flushed_blocks"][e, p] = (~zero & (scales & 0x7F == 0)).sum()
    numbers, unread = {}, set()
    for name, part in (("global_scales", Part.GLOBAL_SCALE), ("input_scales", Part.INPUT_SCALE)):
        try:
            numbers[name] = _numbers(layer, part, advance)
        except ValueError as error:
            odd[str(error)] += experts
            unread.add(part)
            numbers[name] = torch.full((len(experts), 3), float("nan"))
    return LayerFacts(
        layer,
        convention,
        experts,
        hidden,
        intermediate,
        scale_counts,
        **counted,
        **numbers,
        missing=_missing(layer, convention),
        odd=dict(odd),
        unread=frozenset(unread),
    )


def _sizes(layer: CheckpointLayer, experts: tuple[int, ...]) -> tuple[int, int]:
    """H and I of most down projections; 0, 0 where there is none."""
    found: Counter[tuple[int, int]] = Counter()
    for expert, projection in dict.fromkeys(layer.slots(Part.CODES, "w2", experts)):
        tensor = layer.tensor(expert, projection, Part.CODES)
        if tensor is not None:
            rows, *columns = tensor.shape[expert is None :]
            found[rows, prod(columns) * 2] += 1
    return found.most_common(1)[0][0] if found else (0, 0)


def _missing(layer: CheckpointLayer, convention: Convention) -> dict[tuple[Part, str], list[int]]:
    missing: defaultdict[tuple[Part, str], list[int]] = defaultdict(list)
    for part in convention.suffixes:
        for leg in LEGS:
            for expert, projection in layer.slots(part, leg, layer.experts):
                if layer.tensor(expert, projection, part) is None:
                    missing[part, projection] += layer.experts if expert is None else [expert]
    return dict(missing)


def _numbers(layer: CheckpointLayer, part: Part, advance: Advance | None) -> torch.Tensor:
    every = range(layer.experts[-1] + 1)
    found = torch.cat([scalars(layer, part, leg, every, _reading(advance)) for leg in LEGS], dim=1)
    return found[list(layer.experts)]


def _reading(advance: Advance | None) -> Callable[[StoredTensor], torch.Tensor]:
    def read(tensor: StoredTensor) -> torch.Tensor:
        if advance:
            advance(tensor.nbytes)
        return tensor.read()

    return read


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Codes and block scales of one expert after the other."""

    layer: CheckpointLayer
    convention: Convention
    hidden: int
    intermediate: int
    advance: Advance | None
    odd: dict[str, list[int]]

    def of_expert(self, expert: int) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """(codes, block scales) of gate, up and down; None where one is missing or does not fit."""
        if not self.convention.fused:
            for projection in PROJECTIONS:
                codes, scales = (self._read(expert, expert, projection, p) for p in (Part.CODES, Part.BLOCK_SCALE))
                yield codes, scales
            return
        both = [self._read(None, expert, GATE_UP, p) for p in (Part.CODES, Part.BLOCK_SCALE)]
        for n in range(2):
            codes, scales = (None if t is None else self._half(t, n) for t in both)
            yield codes, scales
        codes, scales = (self._read(None, expert, DOWN, p) for p in (Part.CODES, Part.BLOCK_SCALE))
        yield codes, scales

    def _half(self, tensor: torch.Tensor, n: int) -> torch.Tensor:
        return tensor[n::2] if self.convention.interleaved else tensor.chunk(2)[n]

    def _read(self, key: int | None, expert: int, projection: str, part: Part) -> torch.Tensor | None:
        tensor = self.layer.tensor(key, projection, part)
        if tensor is None:
            return None
        if self.advance:
            self.advance(tensor.nbytes // (len(self.layer.experts) if key is None else 1))
        reason = self._misfit(tensor, key, projection, part)
        if reason:
            self.odd[reason].append(expert)
            return None
        if key is not None:
            return tensor.read()
        return tensor.read(slice(expert, expert + 1))[0].flatten(1)

    def _misfit(self, tensor: StoredTensor, key: int | None, projection: str, part: Part) -> str | None:
        """Why a tensor does not fit, without naming the expert; None where it does."""
        rows = {DOWN: self.hidden, GATE_UP: 2 * self.intermediate}.get(projection, self.intermediate)
        inner = self.intermediate if projection == DOWN else self.hidden
        columns = inner // (2 if part is Part.CODES else self.convention.block)
        shape = tensor.shape[key is None :]
        flat = (*shape[:1], prod(shape[1:])) if key is None else shape
        what = f"{projection} {part.value}"
        if tensor.dtype not in self.convention.stored_as(part):
            return f"{what} is {tensor.dtype}, not {' or '.join(self.convention.stored_as(part))}"
        if flat == (rows, columns):
            return None
        told = f"{what} is {list(shape)}, not {[rows, columns]} as H = {self.hidden}, I = {self.intermediate} demand"
        return told if part is Part.CODES else told + _layout_guess(shape, rows, columns, self.convention.block)


def _layout_guess(shape: tuple[int, ...], rows: int, columns: int, block: int) -> str:
    """What a scale tensor of another shape may be."""
    padded = (-(-rows // 128) * 128, -(-columns // 4) * 4)
    if len(shape) == 1 or prod(shape) == prod(padded):
        return ": padded to 128 x 4, as swizzled scales are"
    if len(shape) == 2 and shape[0] == rows and shape[1] and columns * block % shape[1] == 0:
        return f": blocks of {columns * block // shape[1]}, not {block}"
    return ""


def _zero_blocks(codes: torch.Tensor, block: int) -> torch.Tensor:
    """`[rows, columns]` bool: every code of the block is +0 or -0."""
    magnitude = codes.contiguous().view(torch.uint8).view(torch.int64) & 0x7777777777777777
    return (magnitude.unflatten(1, (-1, block // 16)) == 0).all(-1)
