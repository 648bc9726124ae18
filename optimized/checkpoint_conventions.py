"""How checkpoints name and store the FP4 weights of routed experts, as a table.

Sources: tensor names of nvidia/DeepSeek-R1-FP4 and other ModelOpt exports, of compressed-tensors'
`nvfp4-pack-quantized` and `mxfp4-pack-quantized`, of deepseek-ai/DeepSeek-V4, of openai/gpt-oss; what vLLM 0.33.0's
loaders do with them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby


class Part(Enum):
    """What a tensor is to its projection."""

    CODES = "weight"
    BLOCK_SCALE = "block scale"
    GLOBAL_SCALE = "global scale"
    INPUT_SCALE = "input scale"
    BIAS = "bias"


class GlobalScale(Enum):
    """Which way a global scale on disk points. amax: the largest magnitude of the dequantized weight."""

    DECODE = "amax / (6 * 448), a factor of dequantization"
    ENCODE = "(6 * 448) / amax, a factor of quantization: the reciprocal"


#: The three matrices of an expert, in the roles of the names' order: gate, up, down.
GATE, UP, DOWN, GATE_UP = "gate", "up", "down", "gate_up"
#: Names of a projection on disk.
PROJECTIONS = {
    "gate_proj": GATE,
    "up_proj": UP,
    "down_proj": DOWN,
    "w1": GATE,
    "w3": UP,
    "w2": DOWN,
    "gate_up_proj": GATE_UP,
}

_U8, _BYTES = frozenset({"U8"}), frozenset({"U8", "I8"})


@dataclass(frozen=True)
class Convention:
    """One way to store a layer.

    suffixes: what follows the projection's name, for each part; a part without one is not stored. weight_format:
    nvfp4 (E4M3 scale for each 16 values) or mxfp4 (UE8M0 for each 32). scale_dtypes: what a block scale is stored as;
    F32 UE8M0 scales are taken where every one is a power of two. fused: one tensor for all experts and gate above up,
    [E, 2I, ...], against one for each expert and projection. interleaved: rows of gate and up alternate. refused: why
    no megakernel takes such a layer (empty: some does).
    """

    name: str
    weight_format: str
    suffixes: Mapping[Part, str]
    scale_dtypes: frozenset[str]
    code_dtypes: frozenset[str] = _U8
    global_scale: GlobalScale | None = None
    fused: bool = False
    interleaved: bool = False
    refused: tuple[str, ...] = ()
    parts: Mapping[str, Part] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", {suffix: part for part, suffix in self.suffixes.items()})

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def block(self) -> int:
        return {"nvfp4": 16, "mxfp4": 32}[self.weight_format]

    def stored_as(self, part: Part) -> list[str]:
        """The dtypes that codes or block scales may have. E4M3 scales may be plain bytes where a global scale tells
        the convention."""
        plain = _U8 if self.global_scale else frozenset()
        return sorted(self.code_dtypes if part is Part.CODES else self.scale_dtypes | plain)

    def fits(self, tensors: Iterable[tuple[str, str]]) -> bool:
        """Whether (suffix, dtype) of a layer's tensors are stored this way. One tensor of a kind is enough: missing
        ones are another matter."""
        found = {(self.parts[suffix], dtype) for suffix, dtype in tensors if suffix in self.parts}
        parts = {part for part, _ in found}
        told_by_scale = Part.GLOBAL_SCALE in parts or any((Part.BLOCK_SCALE, d) in found for d in self.scale_dtypes)
        return {Part.CODES, Part.BLOCK_SCALE} <= parts and told_by_scale and self._packed(found)

    def _packed(self, found: set[tuple[Part, str]]) -> bool:
        return any((Part.CODES, dtype) in found for dtype in self.code_dtypes)


_E4M3 = frozenset({"F8_E4M3"})
_UE8M0 = frozenset({"U8", "F8_E8M0", "F32"})
_MODELOPT = {
    Part.CODES: "weight",
    Part.BLOCK_SCALE: "weight_scale",
    Part.GLOBAL_SCALE: "weight_scale_2",
    Part.INPUT_SCALE: "input_scale",
}
_COMPRESSED_TENSORS = {
    Part.CODES: "weight_packed",
    Part.BLOCK_SCALE: "weight_scale",
    Part.GLOBAL_SCALE: "weight_global_scale",
    Part.INPUT_SCALE: "input_global_scale",
}
_NO_GLOBAL = (Part.CODES, Part.BLOCK_SCALE)

#: The first that fits is taken: those that a global scale tells come before those without one.
CONVENTIONS = (
    Convention("ModelOpt NVFP4", "nvfp4", _MODELOPT, _E4M3, global_scale=GlobalScale.DECODE),
    Convention("compressed-tensors NVFP4", "nvfp4", _COMPRESSED_TENSORS, _E4M3, global_scale=GlobalScale.ENCODE),
    Convention(
        "ModelOpt NVFP4, fused experts",
        "nvfp4",
        {part: f"_{suffix}" if part is not Part.CODES else "" for part, suffix in _MODELOPT.items()},
        _E4M3,
        global_scale=GlobalScale.DECODE,
        fused=True,
    ),
    Convention("compressed-tensors MXFP4", "mxfp4", {p: _COMPRESSED_TENSORS[p] for p in _NO_GLOBAL}, _UE8M0),
    Convention(
        "DeepSeek-V4 MXFP4", "mxfp4", {Part.CODES: "weight", Part.BLOCK_SCALE: "scale"}, _UE8M0, code_dtypes=_BYTES
    ),
    Convention("MXFP4", "mxfp4", {p: _MODELOPT[p] for p in _NO_GLOBAL}, _UE8M0),
    Convention(
        "gpt-oss MXFP4",
        "mxfp4",
        {Part.CODES: "_blocks", Part.BLOCK_SCALE: "_scales", Part.BIAS: "_bias"},
        _UE8M0,
        fused=True,
        interleaved=True,
        refused=(
            "expert bias",
            "swigluoai activation (alpha 1.702, beta 1)",
            "rows of gate and up interleaved one by one",
        ),
    ),
)


@dataclass(frozen=True, order=True)
class Slot:
    """Where a tensor belongs in its layer. expert: None where one tensor holds all of them."""

    expert: int | None
    projection: str
    suffix: str


_PROJECTION = "|".join(sorted(PROJECTIONS, key=len, reverse=True))
#: `shared_experts` does not match: a name in front of `experts` ends with a dot.
_NAME = re.compile(
    rf"(?P<layer>(?:.*\.)?experts)\.(?:(?P<expert>\d+)\.(?P<each>{_PROJECTION})\.(?P<suffix>\w+)"
    rf"|(?P<all>gate_up_proj|down_proj)(?P<tail>|_\w+))"
)
_NUMBER = re.compile(r"(?:^|\.)(?:layers|blocks|block|h)\.(\d+)\.")


def parse_name(name: str) -> tuple[str, Slot] | None:
    """The layer (what precedes the expert's number, such as `model.layers.3.mlp.experts`) and the tensor's place in
    it. None for a tensor that is not a routed expert's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    expert = match["expert"]
    if expert is None:
        return match["layer"], Slot(None, PROJECTIONS[match["all"]], match["tail"])
    return match["layer"], Slot(int(expert), PROJECTIONS[match["each"]], match["suffix"])


def layer_number(layer: str) -> int | None:
    """The number in `layers.3`; None where a layer's name has none, as in `mtp.0.ffn.experts`."""
    match = _NUMBER.search(layer)
    return int(match[1]) if match else None


def in_words(numbers: Iterable[int]) -> str:
    """Ids in few characters: '0-3, 7'."""
    runs = groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0])
    ends = [(run[0], run[-1]) for run in ([n for _, n in run] for _, run in runs)]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
