"""What can be wrong with a layer of a checkpoint, as a table of checks over its counts.

Every check names the public bug report that it comes from, where there is one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from fp4ep.reference.formats import E4M3, UE8M0

from .checkpoint_conventions import GlobalScale, Part
from .checkpoint_facts import PROJECTIONS, LayerFacts
from .checkpoint_fold import fold_codes, gate_up_ratio


class Level(IntEnum):
    """NOTE: worth knowing. WARNING: some engine or mode gets wrong numbers. ERROR: does not load, or is wrong."""

    NOTE = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True)
class Finding:
    """One thing found in one layer. reports: public bug reports, as owner/repository#number."""

    level: Level
    check: str
    layer: str
    text: str
    experts: tuple[int, ...] = ()
    reports: tuple[str, ...] = ()


#: (text, experts) for everything found, with a level where it is not the check's own.
Found = Iterator[tuple[str, Sequence[int]] | tuple[str, Sequence[int], Level]]


@dataclass(frozen=True)
class Check:
    name: str
    level: Level
    find: Callable[[LayerFacts], Found]
    reports: tuple[str, ...] = ()

    def __call__(self, facts: LayerFacts) -> list[Finding]:
        found = []
        for text, experts, *level in self.find(facts):
            own = level[0] if level else self.level
            found.append(Finding(own, self.name, facts.layer.name, text, tuple(experts), self.reports))
        return found


#: Largest magnitudes of dequantized weights that are taken for plausible. With a global scale the wrong way round they
#: are 2688^2 over this.
PLAUSIBLE_AMAX = (1e-3, 1e2)
#: A share of unusual blocks that is taken for a mistake rather than a tail.
COMMON = 0.01
#: A global or input scale further from its layer's median than this factor is out of line.
OUTLIER = 1e3
#: UE8M0 codes up to 2^-9: requantized to NVFP4 with a global scale of 1, E4M3 subnormals or zero hold such blocks.
_LOST_IN_NVFP4 = range(0, 119)
_SIGNED = range(0x80, 0x100)
_SUBNORMAL = [code for code in range(0x100) if code & 0x78 == 0 and code & 0x07]


def _share(part: torch.Tensor, facts: LayerFacts) -> str:
    count = int(part.sum())
    return f"{count:,} of {facts.blocks:,} blocks ({count / max(facts.blocks, 1):.2%})"


# --- what is there ---------------------------------------------------------------------------------------------------


def _missing(facts: LayerFacts) -> Found:
    for (part, projection), experts in facts.missing.items():
        if part is not Part.INPUT_SCALE:
            yield f"{projection} {part.value} is missing", experts
    gaps = sorted(set(range(facts.experts[-1] + 1)) - set(facts.experts))
    if gaps:
        yield "no tensor at all of these experts", gaps


def _missing_input_scales(facts: LayerFacts) -> Found:
    if Part.INPUT_SCALE not in facts.convention.suffixes:
        return
    missing = {projection: e for (part, projection), e in facts.missing.items() if part is Part.INPUT_SCALE}
    if missing and bool(facts.input_scales.isnan().all()):
        yield "no input scales: fine for vLLM, which drops them; static modes cannot run", (), Level.NOTE
        return
    for projection, experts in missing.items():
        yield f"{projection} input scale is missing: experts that calibration never reached", experts


def _odd(facts: LayerFacts) -> Found:
    yield from facts.odd.items()


# --- block scales ----------------------------------------------------------------------------------------------------


def _is(facts: LayerFacts, weight_format: str) -> bool:
    return facts.convention.weight_format == weight_format


def _nan_blocks(facts: LayerFacts) -> Found:
    bad = facts.counts_of([0x7F, 0xFF] if _is(facts, "nvfp4") else [0xFF])
    if bool(bad.any()):
        yield f"NaN block scales: {_share(bad, facts)}", facts.ids(bad > 0)


def _signed_blocks(facts: LayerFacts) -> Found:
    bad = facts.counts_of(_SIGNED) if _is(facts, "nvfp4") else torch.zeros(1)
    if bool(bad.any()):
        yield f"block scales with the sign bit set: {_share(bad, facts)}; kernels use that bit", facts.ids(bad > 0)


def _flushed_blocks(facts: LayerFacts) -> Found:
    bad = facts.flushed_blocks
    if bool(bad.any()):
        yield f"scale zero over nonzero codes, the block's weights are lost: {_share(bad, facts)}", facts.ids(bad > 0)


def _subnormal_blocks(facts: LayerFacts) -> Found:
    bad = facts.counts_of(_SUBNORMAL) if _is(facts, "nvfp4") else torch.zeros(1)
    if bool(bad.any()):
        common = int(bad.sum()) > COMMON * facts.blocks
        text = f"subnormal E4M3 block scales, below 2^-6: {_share(bad, facts)}"
        hint = "; the global scale leaves E4M3's range unused" if common else ""
        yield text + hint, facts.ids(bad > 0) if common else (), Level.WARNING if common else Level.NOTE


def _zero_blocks(facts: LayerFacts) -> Found:
    bad = facts.zero_blocks
    if not bool(bad.any()):
        return
    whole = (bad > 0) & (bad == facts.scale_counts.sum(-1))
    for p, projection in enumerate(PROJECTIONS):
        if bool(whole[:, p].any()):
            yield f"{projection} is zero altogether", facts.ids(whole[:, p]), Level.WARNING
    yield f"blocks of zero codes only: {_share(bad, facts)}; libraries store different scales for them", ()


def _float_scales(facts: LayerFacts) -> Found:
    bad = facts.mantissas
    if bool(bad.any()):
        yield f"float32 scales that are no powers of two, so not UE8M0: {_share(bad, facts)}", facts.ids(bad > 0)
    elif _is(facts, "mxfp4") and any(
        (facts.convention.parts.get(s), d) == (Part.BLOCK_SCALE, "F32") for s, d in facts.layer.kinds
    ):
        yield "UE8M0 scales are stored as float32, all exactly", (), Level.NOTE


def _smallest_ue8m0(facts: LayerFacts) -> Found:
    bad = facts.counts_of([0]) if _is(facts, "mxfp4") else torch.zeros(1)
    if bool(bad.any()):
        yield f"UE8M0 byte 0, which is 2^-127, or 0 in some decoders: {_share(bad, facts)}", facts.ids(bad > 0)


def _small_ue8m0(facts: LayerFacts) -> Found:
    bad = facts.counts_of(_LOST_IN_NVFP4) if _is(facts, "mxfp4") else torch.zeros(1)
    if bool(bad.any()):
        common = int(bad.sum()) > COMMON * facts.blocks
        text = (
            "UE8M0 scales of 2^-9 and below, whose blocks flashinfer_moe_ep_cutedsl loses in part or in whole when it "
        )
        yield f"{text}requantizes to NVFP4: {_share(bad, facts)}", (), Level.WARNING if common else Level.NOTE


# --- global scales ---------------------------------------------------------------------------------------------------


def _bad_global_scales(facts: LayerFacts) -> Found:
    scales = facts.global_scales
    for p, projection in enumerate(PROJECTIONS):
        known = set(facts.missing.get((Part.GLOBAL_SCALE, projection), ()))
        bad = ~(scales[:, p].isfinite() & (scales[:, p] > 0))
        ids = [e for e in facts.ids(bad) if e not in known]
        if facts.convention.global_scale is not None and ids and Part.GLOBAL_SCALE not in facts.unread:
            values = sorted({f"{v:g}" for v in scales[bad, p].tolist()})
            yield f"{projection} global scale is {', '.join(values)}", ids


def _usable(scales: torch.Tensor) -> torch.Tensor:
    return scales.isfinite() & (scales > 0)


def _gate_up(facts: LayerFacts) -> Found:
    pairs = facts.global_scales[:, :2]
    differ = _usable(pairs).all(1) & (pairs[:, 0] != pairs[:, 1])
    if not bool(differ.any()) or facts.convention.global_scale is None:
        return
    ratio = float((pairs.amax(1) / pairs.amin(1))[differ].max())
    stuck = [facts.experts[e] for e in differ.nonzero().flatten().tolist() if not _folds(facts, e)]
    outcome = f"does not fold exactly in {len(stuck)}" if stuck else "folds into up's block scales exactly"
    yield (
        f"global scales of gate and up differ in {int(differ.sum())} of {len(facts.experts)} experts, by up to "
        f"{ratio:g}: kernels take one, vLLM the gate's; the ratio {outcome}",
        facts.ids(differ),
    )


def _folds(facts: LayerFacts, e: int) -> bool:
    direction = facts.convention.global_scale
    assert direction is not None
    codes = fold_codes(*gate_up_ratio(facts.global_scales[e, :2], direction))
    return not bool((codes < 0)[facts.scale_counts[e, 1] > 0].any())


def amax(facts: LayerFacts, inverted: bool = False) -> torch.Tensor:
    """`[E, 3]`: an upper bound of the largest dequantized weight, 6 times the largest block scale times the global
    scale; NaN where one is unknown. inverted: with the global scale the other way round than the convention says."""
    values = (E4M3 if _is(facts, "nvfp4") else UE8M0).values.nan_to_num(0.0).clamp(min=0)
    largest = torch.where(facts.scale_counts > 0, values, 0.0).amax(-1)
    bound = torch.where(largest > 0, 6 * largest, float("nan"))
    if facts.convention.global_scale is None:
        return bound
    divide = (facts.convention.global_scale is GlobalScale.ENCODE) != inverted
    factor = 1 / facts.global_scales if divide else facts.global_scales
    return bound * torch.where(_usable(facts.global_scales), factor, float("nan"))


def plausible(values: torch.Tensor) -> bool:
    low, high = PLAUSIBLE_AMAX
    return low <= float(values.nanmedian()) <= high


def _magnitude(facts: LayerFacts) -> Found:
    found = amax(facts)
    if bool(found.isnan().all()) or plausible(found):
        return
    text = f"dequantized weights reach {float(found.nanmedian()):.2g} (median over experts)"
    if facts.convention.global_scale is not None and plausible(amax(facts, inverted=True)):
        other = float(amax(facts, inverted=True).nanmedian())
        yield f"global scales look like the reciprocals of what the names say: {text}, inverted {other:.2g}", ()
    else:
        yield f"{text}, out of the usual {PLAUSIBLE_AMAX[0]:g} to {PLAUSIBLE_AMAX[1]:g}", (), Level.WARNING


def _outliers(scales: torch.Tensor) -> torch.Tensor:
    """`[E, P]`: usable scales far from the median of their projection."""
    known = torch.where(_usable(scales), scales, float("nan"))
    ratio = known / known.nanmedian(0, keepdim=True).values
    return (ratio > OUTLIER) | (ratio < 1 / OUTLIER)


def _out_of_line(what: str, scales: torch.Tensor, facts: LayerFacts) -> Found:
    bad = _outliers(scales)
    if bool(bad.any()):
        values = ", ".join(f"{v:.2g}" for v in scales[bad].tolist()[:4])
        yield f"{what} scales far from the median of the layer, as uninitialized memory is: {values}", facts.ids(bad)


def _global_outliers(facts: LayerFacts) -> Found:
    return _out_of_line("global", facts.global_scales, facts)


# --- input scales ----------------------------------------------------------------------------------------------------


def _bad_input_scales(facts: LayerFacts) -> Found:
    scales = facts.input_scales
    for p, projection in enumerate(PROJECTIONS):
        known = set(facts.missing.get((Part.INPUT_SCALE, projection), ()))
        bad = ~_usable(scales[:, p])
        ids = [e for e in facts.ids(bad) if e not in known]
        if Part.INPUT_SCALE in facts.convention.suffixes and ids and Part.INPUT_SCALE not in facts.unread:
            values = sorted({f"{v:g}" for e, v in zip(facts.experts, scales[:, p].tolist(), strict=True) if e in ids})
            yield f"{projection} input scale is {', '.join(values)}: vLLM drops it, static modes give NaN or 0", ids


def _input_outliers(facts: LayerFacts) -> Found:
    return _out_of_line("input", facts.input_scales, facts)


def _several_input_scales(facts: LayerFacts) -> Found:
    scales = facts.input_scales[:, :2]
    known = scales[_usable(scales)]
    if known.numel() and bool((known != known[0]).any()):
        low, high = float(known.amin()), float(known.amax())
        yield f"fc1 input scales go from {low:g} to {high:g}; kernels take one for all experts, and of all ranks", ()


# --- sizes and fused numbers -----------------------------------------------------------------------------------------


def _sizes(facts: LayerFacts) -> Found:
    for name, size in (("hidden", facts.hidden), ("intermediate", facts.intermediate)):
        if size % 128:
            yield f"{name} size {size} is not a multiple of 128: scales are padded in kernel layouts", ()


def _one_number_for_all(facts: LayerFacts) -> Found:
    if not facts.convention.fused or len(facts.experts) == 1:
        return
    for slot in facts.layer.names:
        part = facts.convention.parts.get(slot.suffix)
        tensor = facts.layer.shards[facts.layer.names[slot]]
        if part in (Part.GLOBAL_SCALE, Part.INPUT_SCALE) and tensor.shape in ((), (1,)):
            yield f"{slot.projection} {part.value} is one number for all {len(facts.experts)} experts", ()


_W, _E, _N = Level.WARNING, Level.ERROR, Level.NOTE
CHECKS = (
    Check("missing tensors", _E, _missing, ("huggingface/transformers#48371", "huggingface/transformers#48372")),
    Check(
        "shapes and dtypes",
        _E,
        _odd,
        ("vllm-project/vllm#35497", "flashinfer-ai/flashinfer#2898", "flashinfer-ai/flashinfer#2848"),
    ),
    Check("direction of global scales", _E, _magnitude, ("vllm-project/vllm#35733",)),
    Check("global scale not finite and positive", _E, _bad_global_scales),
    Check("global scale out of line", _W, _global_outliers),
    Check(
        "gate and up differ",
        _W,
        _gate_up,
        ("vllm-project/vllm#54974", "vllm-project/vllm#34675", "lightseekorg/tokenspeed#543"),
    ),
    Check("NaN block scale", _E, _nan_blocks, ("pytorch/ao#4725",)),
    Check("negative block scale", _E, _signed_blocks, ("vllm-project/vllm#34577",)),
    Check("scale zero over nonzero codes", _W, _flushed_blocks, ("pytorch/ao#4598",)),
    Check("subnormal block scale", _N, _subnormal_blocks, ("vllm-project/vllm#34577", "vllm-project/vllm#37464")),
    Check("zero blocks", _N, _zero_blocks, ("pytorch/ao#4598",)),
    Check(
        "float32 UE8M0 scale",
        _E,
        _float_scales,
        ("sgl-project/sglang#39193", "vllm-project/vllm#51372", "vllm-project/vllm#53680"),
    ),
    Check("UE8M0 byte 0", _W, _smallest_ue8m0, ("1CatAI/1Cat-vLLM#222",)),
    Check("UE8M0 below NVFP4's range", _N, _small_ue8m0),
    Check("input scale missing", _W, _missing_input_scales, ("vllm-project/vllm#45212",)),
    Check(
        "input scale not finite and positive",
        _W,
        _bad_input_scales,
        ("vllm-project/compressed-tensors#595", "vllm-project/vllm#45212"),
    ),
    Check("input scale out of line", _W, _input_outliers, ("vllm-project/vllm#45212",)),
    Check("input scales differ", _N, _several_input_scales, ("vllm-project/vllm#48355",)),
    Check(
        "sizes",
        _W,
        _sizes,
        ("vllm-project/vllm#35497", "flashinfer-ai/flashinfer#2898", "flashinfer-ai/flashinfer#4653"),
    ),
    Check(
        "one number for all experts", _W, _one_number_for_all, ("vllm-project/vllm#57016", "vllm-project/vllm#46641")
    ),
)
