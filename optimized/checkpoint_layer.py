"""One MoE layer of a checkpoint: which tensors it has, and the scales of one number per expert."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .checkpoint_conventions import CONVENTIONS, DOWN, GATE, GATE_UP, UP, Convention, GlobalScale, Part, Slot
from .checkpoint_files import Shards, StoredTensor

#: The projections of each leg, in the order of its rows.
LEGS = {"w13": (GATE, UP), "w2": (DOWN,)}


@dataclass(frozen=True, eq=False)
class CheckpointLayer:
    """One MoE layer: where its tensors are. number: None where the name has none, as in `mtp.0.ffn.experts`."""

    name: str
    number: int | None
    names: Mapping[Slot, str]
    shards: Shards

    @cached_property
    def experts(self) -> tuple[int, ...]:
        """Ids that some tensor names; with fused experts those of the weights' first dimension."""
        ids = {slot.expert for slot in self.names if slot.expert is not None}
        if not ids and self.convention is not None:
            codes = self.tensor(None, DOWN, Part.CODES) or self.tensor(None, GATE_UP, Part.CODES)
            ids = set(range(codes.shape[0])) if codes else set()
        return tuple(sorted(ids))

    @cached_property
    def kinds(self) -> dict[tuple[str, str], StoredTensor]:
        """One tensor for each (suffix, dtype) that there is; reads the headers of this layer's shards."""
        return {(slot.suffix, self.shards[name].dtype): self.shards[name] for slot, name in self.names.items()}

    @cached_property
    def convention(self) -> Convention | None:
        """None where no convention in the table fits: the experts are not FP4, or their scales are missing."""
        fused = any(slot.expert is None for slot in self.names)
        return next((c for c in CONVENTIONS if c.fused is fused and c.fits(self.kinds)), None)

    def tensor(self, expert: int | None, projection: str, part: Part) -> StoredTensor | None:
        """The tensor of one part of one projection; expert None for fused experts. None where it is missing."""
        assert self.convention is not None
        suffix = self.convention.suffixes.get(part)
        name = None if suffix is None else self.names.get(Slot(expert, projection, suffix))
        return None if name is None else self.shards[name]

    def slots(self, part: Part, leg: str, experts: Sequence[int]) -> list[tuple[int | None, str]]:
        """(expert, projection) of the tensors that make up one leg's part."""
        assert self.convention is not None
        if self.convention.fused:
            return [(None, GATE_UP if leg == "w13" else DOWN)]
        return [(expert, projection) for expert in experts for projection in LEGS[leg]]


def require_convention(layer: CheckpointLayer) -> Convention:
    """The layer's convention. Raises ValueError where none fits, or no kernel takes it, with the reasons."""
    convention = layer.convention
    if convention is None:
        known = ", ".join(c.name for c in CONVENTIONS)
        kinds = ", ".join(map(str, layer.kinds.values()))
        raise ValueError(f"{layer.name}: stored in no known FP4 convention ({known}); it has {kinds}")
    if convention.refused:
        raise ValueError(f"{layer.name}: {convention.name} is not supported: {', '.join(convention.refused)}")
    return convention


def checked_experts(layer: CheckpointLayer, experts: range | None) -> range:
    """The range, or all experts for None. Raises ValueError for ids that the layer lacks."""
    known = layer.experts
    if experts is None:
        return range(known[-1] + 1)
    if not isinstance(experts, range) or experts.step != 1 or not experts:
        raise ValueError(f"experts must be a non-empty range of step 1, got {experts!r}")
    if experts[0] < 0 or experts[-1] > known[-1]:
        raise ValueError(f"experts must be within 0..{known[-1]} of {layer.name}, got {experts!r}")
    return experts


def scale_bytes(scales: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Block scales as uint8 codes, and how many are none. float32 scales become UE8M0 codes by their exponent; those
    that are not powers of two of 2^-126 or more are none: a kernel that keeps the exponent would take 1.5 for 1
    (sgl-project/sglang#39193)."""
    if scales.dtype.itemsize == 1:
        return scales.view(torch.uint8), 0
    bits = scales.float().view(torch.int32)
    bad = (bits & 0x807FFFFF != 0) | (bits == 0) | (bits == 0x7F800000)
    return (bits >> 23 & 0xFF).to(torch.uint8), int(bad.sum())


def scalars(
    layer: CheckpointLayer,
    part: Part,
    leg: str,
    experts: range,
    read: Callable[[StoredTensor], torch.Tensor] = StoredTensor.read,
) -> torch.Tensor:
    """`[E, projections]` float32 as on disk: scales of one number per expert and projection; NaN where one is missing.

    Fused experts may store `[E, projections]`, `[E]`, or one number for all. Raises ValueError for any other shape.
    """
    projections = LEGS[leg]
    out = torch.full((len(experts), len(projections)), float("nan"))
    for i, (expert, projection) in enumerate(layer.slots(part, leg, experts)):
        tensor = layer.tensor(expert, projection, part)
        if tensor is None:
            continue
        every = len(layer.experts)
        if expert is not None and tensor.shape in ((), (1,)):
            out.view(-1)[i] = read(tensor).float().item()
        elif expert is None and tensor.shape in ((), (1,), (every,), (every, 1), (every, len(projections))):
            found = read(tensor).float().reshape(1 if len(tensor.shape) == 0 else tensor.shape[0], -1)
            out.copy_(found if len(found) == 1 else found[experts.start : experts.stop])
        else:
            raise ValueError(f"{tensor}: must be one number{' for each expert' if expert is None else ''}")
    return out


def input_scales(
    layer: CheckpointLayer, experts: range, read: Callable[[StoredTensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`[E]` input scales of both legs in both directions, by `LayerWeights`' names; empty where no expert has one.

    Gate and up see the same tokens, so theirs are one; where they differ, the larger amax counts.
    """
    assert layer.convention is not None
    inverted = layer.convention.global_scale is GlobalScale.ENCODE
    found: dict[str, torch.Tensor] = {}
    for leg in LEGS:
        stored = scalars(layer, Part.INPUT_SCALE, leg, experts, read)
        if bool(stored.isnan().all()):
            continue
        one = stored.amin(1) if inverted else stored.amax(1)
        scale, norm = (1.0 / one, one) if inverted else (one, 1.0 / one)
        found |= {f"{leg}_input_scale": scale, f"{leg}_input_norm": norm}
    return found
