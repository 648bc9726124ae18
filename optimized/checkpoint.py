"""FP4 experts from safetensors checkpoints, lazily: one MoE layer, and of it the experts of one EP rank, at a time."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from fp4ep.reference.types import MoEWeights

from .checkpoint_conventions import Convention, GlobalScale, Slot, layer_number, parse_name
from .checkpoint_files import Shards, StoredTensor, find_shards, read_json
from .checkpoint_fold import GateUp, one_global_scale
from .checkpoint_layer import LEGS, CheckpointLayer, checked_experts, input_scales, require_convention
from .checkpoint_reader import LayerReader, Progress


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The experts of one layer in canonical order and scale, whatever the checkpoint's convention.

    experts: their ids in the layer. w13 `[E, 2I, H/2]` (gate rows first) and w2 `[E, H, I/2]`, uint8, two E2M1 codes
    per byte, even column low. w13_scale, w2_scale: `[E, rows, columns/16]` torch.float8_e4m3fn, or `[E, rows,
    columns/32]` uint8 UE8M0 codes. w13_weight_scale_2, w2_weight_scale_2: `[E]` float32 factors of dequantization, None
    for MXFP4. w13_input_scale, w2_input_scale: `[E]` float32, amax / (6 * 448) of the activations, NaN for an expert
    without; None where the checkpoint has none. w13_input_norm, w2_input_norm: their reciprocals, as stored where the
    checkpoint stores those.
    """

    convention: Convention
    layer: str
    experts: range
    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    w13_weight_scale_2: torch.Tensor | None = None
    w2_weight_scale_2: torch.Tensor | None = None
    w13_input_scale: torch.Tensor | None = None
    w2_input_scale: torch.Tensor | None = None
    w13_input_norm: torch.Tensor | None = None
    w2_input_norm: torch.Tensor | None = None

    def moe_weights(self) -> MoEWeights:
        """The weights as the reference takes them. Input scales are the scheme's business and not in them."""
        return MoEWeights(
            self.w13, self.w2, self.w13_scale, self.w2_scale, self.w13_weight_scale_2, self.w2_weight_scale_2
        )

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The weights under vLLM's parameter names, without gradients. They share memory with this object.

        Names and values are those of vLLM 0.33.0 just before its experts class processes them: w13_weight,
        w13_weight_scale, w13_weight_scale_2 `[E]`, w13_input_scale and the same of w2; what is None is left out.
        """
        names = {"w13_weight": self.w13, "w2_weight": self.w2}
        suffixes = ("weight_scale", "weight_scale_2", "input_scale")
        stored = {"weight_scale": "scale"}
        names |= {f"{leg}_{s}": getattr(self, f"{leg}_{stored.get(s, s)}") for leg in LEGS for s in suffixes}
        return {n: torch.nn.Parameter(t, requires_grad=False) for n, t in names.items() if t is not None}

    def fill(self, layer: torch.nn.Module) -> None:
        """Register `parameters()` on a module, over those of the same name."""
        for name, parameter in self.parameters().items():
            layer.register_parameter(name, parameter)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint's MoE layers. Make one with `open_checkpoint`."""

    path: Path
    layers: tuple[CheckpointLayer, ...]
    shards: Shards

    @cached_property
    def config(self) -> dict:
        """config.json and hf_quant_config.json beside the shards, joined; empty without them."""
        folder = self.path if self.path.is_dir() else self.path.parent
        return read_json(folder / "config.json") | read_json(folder / "hf_quant_config.json")

    def layer(self, layer: int | str) -> CheckpointLayer:
        """By number, or by name such as `mtp.0.ffn.experts`. Raises ValueError naming those that there are."""
        for found in self.layers:
            if layer in (found.number, found.name):
                return found
        known = ", ".join(str(x.number) if x.number is not None else x.name for x in self.layers)
        raise ValueError(f"layer {layer!r} has no routed experts in {self.path}; layers that have: {known or 'none'}")

    def load_layer(
        self,
        layer: int | str,
        experts: range | None = None,
        gate_up: GateUp | str = GateUp.STRICT,
        progress: Progress | None = None,
    ) -> LayerWeights:
        """Read the experts of one layer; only their tensors are touched.

        experts: ids in the layer, a range of step 1, such as one EP rank's (None: all). gate_up: see `GateUp`.
        Global scales are turned into factors of dequantization, compressed-tensors' by a float32 division of 1, as in
        vLLM 0.33.0. Block scales pass as they are, NaN included; float32 UE8M0 scales become codes.

        Raises ValueError: an unknown layer or expert, a convention that no kernel takes (with its reasons), one message
        listing all missing tensors, a shape that does not fit, a global weight scale that is not finite and positive
        (naming experts), float32 UE8M0 scales that are no powers of two, scales of gate and up that do not fold.
        """
        found = self.layer(layer)
        mode = GateUp(gate_up)
        convention = require_convention(found)
        ids = checked_experts(found, experts)
        reader = LayerReader(found, convention, ids, progress)
        w13_scale = reader.block_scales("w13")
        global_scales = {}
        if convention.global_scale is not None:
            pairs = reader.global_scales("w13")
            gate = one_global_scale(w13_scale, pairs, convention.global_scale, ids, mode)
            global_scales = {"w13_weight_scale_2": gate, "w2_weight_scale_2": reader.global_scales("w2")[:, 0]}
            global_scales = {n: _decode_direction(t, convention).contiguous() for n, t in global_scales.items()}
        return LayerWeights(
            convention,
            found.name,
            ids,
            reader.codes("w13"),
            reader.codes("w2"),
            w13_scale,
            reader.block_scales("w2"),
            **global_scales,
            **input_scales(found, ids, reader.read),
        )

    def input_scales(self, layer: int | str) -> dict[str, torch.Tensor]:
        """The input scales of ALL experts of a layer, fields of `LayerWeights` by name; empty where there are none.

        A static input scale shared by all experts has to come from these and not from one rank's
        (vllm-project/vllm#48355).
        """
        found = self.layer(layer)
        require_convention(found)
        return input_scales(found, checked_experts(found, None), StoredTensor.read)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The MoE layers of a safetensors file, or of a folder of them with or without model.safetensors.index.json.

    No tensor is read, and with an index no shard is opened. Raises ValueError for a missing or damaged file.
    """
    path = Path(path)
    shards = find_shards(path)
    layers: dict[str, dict[Slot, str]] = {}
    for name in shards:
        parsed = parse_name(name)
        if parsed:
            layers.setdefault(parsed[0], {})[parsed[1]] = name
    found = [CheckpointLayer(name, layer_number(name), names, shards) for name, names in layers.items()]
    return Checkpoint(path, tuple(sorted(found, key=lambda x: (x.number is None, x.number or 0, x.name))), shards)


def _decode_direction(scales: torch.Tensor, convention: Convention) -> torch.Tensor:
    return 1.0 / scales if convention.global_scale is GlobalScale.ENCODE else scales
