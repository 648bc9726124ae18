"""Reads some experts of one layer into stacked tensors, after checking that everything is there and fits."""

from collections.abc import Callable

import torch

from .checkpoint_conventions import Convention, Part, in_words
from .checkpoint_files import StoredTensor
from .checkpoint_layer import LEGS, CheckpointLayer, scalars, scale_bytes

#: Called with (bytes read, bytes in all) after every tensor.
Progress = Callable[[int, int], None]


class LayerReader:
    """Reads parts of some experts of a layer, stacked, after checking that all are there and fit."""

    def __init__(
        self, layer: CheckpointLayer, convention: Convention, experts: range, progress: Progress | None
    ) -> None:
        self.layer, self.convention, self.experts, self.progress = layer, convention, experts, progress
        self._require_all()
        (expert, projection), *_ = layer.slots(Part.CODES, "w2", experts)
        down = layer.tensor(expert, projection, Part.CODES)
        assert down is not None
        if len(down.shape) != 2 + convention.fused:
            raise ValueError(f"{down}: must have {2 + convention.fused} dimensions")
        self.hidden, self.intermediate = down.shape[-2], down.shape[-1] * 2
        self.done, self.total = 0, sum(self._nbytes(t) for t in self._all())

    # --- what there is ---

    def _all(self) -> list[StoredTensor]:
        parts = [part for part in self.convention.suffixes if part is not Part.BIAS]
        slots = [(part, *slot) for part in parts for leg in LEGS for slot in self.layer.slots(part, leg, self.experts)]
        found = [self.layer.tensor(expert, projection, part) for part, expert, projection in slots]
        return [tensor for tensor in found if tensor is not None]

    def _nbytes(self, tensor: StoredTensor) -> int:
        whole = not self.convention.fused or len(tensor.shape) < 2
        return tensor.nbytes if whole else tensor.nbytes // tensor.shape[0] * len(self.experts)

    def _require_all(self) -> None:
        missing: dict[str, list[int]] = {}
        for part, suffix in self.convention.suffixes.items():
            if part is Part.INPUT_SCALE:
                continue
            for leg in LEGS:
                for expert, projection in self.layer.slots(part, leg, self.experts):
                    if self.layer.tensor(expert, projection, part) is None:
                        ids = self.experts if expert is None else (expert,)
                        missing.setdefault(f"{projection} {suffix or part.value}", []).extend(ids)
        if missing:
            told = "; ".join(f"{name} of experts {in_words(ids)}" for name, ids in missing.items())
            raise ValueError(f"{self.layer.name} lacks tensors of {self.convention.name}: {told}")

    # --- what is read ---

    def read(self, tensor: StoredTensor, part: slice | None = None) -> torch.Tensor:
        found = tensor.read(part)
        self.done += self._nbytes(tensor)
        if self.progress:
            self.progress(self.done, self.total)
        return found

    def codes(self, leg: str) -> torch.Tensor:
        columns = {"w13": self.hidden, "w2": self.intermediate}[leg]
        return self._stack(Part.CODES, leg, columns // 2, lambda tensor, data: data.view(torch.uint8))

    def block_scales(self, leg: str) -> torch.Tensor:
        columns = {"w13": self.hidden, "w2": self.intermediate}[leg]
        codes = self._stack(Part.BLOCK_SCALE, leg, columns // self.convention.block, _scale_codes)
        return codes.view(torch.float8_e4m3fn) if self.convention.weight_format == "nvfp4" else codes

    def global_scales(self, leg: str) -> torch.Tensor:
        """`[E, projections]` float32 as on disk, finite and positive."""
        scales = scalars(self.layer, Part.GLOBAL_SCALE, leg, self.experts, self.read)
        bad = ~(scales.isfinite() & (1.0 / scales).isfinite() & (scales > 0)).all(1)
        if bool(bad.any()):
            ids = [self.experts[e] for e in bad.nonzero().flatten().tolist()]
            suffix = self.convention.suffixes[Part.GLOBAL_SCALE]
            raise ValueError(f"{self.layer.name}: {leg} {suffix} must be finite and positive; experts {in_words(ids)}")
        return scales

    def _stack(
        self, part: Part, leg: str, columns: int, convert: Callable[[StoredTensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """`[E, rows, columns]` uint8: one tensor per expert and projection, or a slice of a fused one."""
        rows = {"w13": self.intermediate, "w2": self.hidden}[leg]
        out = torch.empty(len(self.experts), len(LEGS[leg]) * rows, columns, dtype=torch.uint8)
        places = (place for expert in out for place in expert.split(rows))
        for expert, projection in self.layer.slots(part, leg, self.experts):
            tensor = self.layer.tensor(expert, projection, part)
            assert tensor is not None
            part_of = slice(self.experts.start, self.experts.stop) if expert is None else None
            place = out if expert is None else next(places)
            allowed = self.convention.stored_as(part)
            if tensor.dtype not in allowed:
                raise ValueError(f"{tensor}: {self.convention.name} stores a {part.value} as {' or '.join(allowed)}")
            wanted = (*([len(self.layer.experts)] if expert is None else []), *place.shape[-2:])
            if tensor.shape != wanted:
                raise ValueError(
                    f"{tensor}: the shape must be {list(wanted)}, as H = {self.hidden} and I = {self.intermediate} "
                    f"follow from the down projection"
                )
            place.copy_(convert(tensor, self.read(tensor, part_of)))
        return out


def _scale_codes(tensor: StoredTensor, data: torch.Tensor) -> torch.Tensor:
    codes, bad = scale_bytes(data)
    if bad:
        raise ValueError(f"{tensor}: {bad} scales are not positive powers of two, so not UE8M0")
    return codes
