"""What convention a checkpoint follows, what is wrong with it, and which megakernels take it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .backends import (
    FLASHINFER_MOE_EP_ARCHITECTURES,
    FLASHINFER_MOE_EP_BACKENDS,
    FLASHINFER_MOE_EP_SM90_BACKENDS,
    FlashInferMoeEpBackendSpec,
    flashinfer_moe_ep_backend_spec,
)
from .checkpoint import Checkpoint, open_checkpoint
from .checkpoint_checks import CHECKS, Finding, Level, amax, plausible
from .checkpoint_conventions import CONVENTIONS, Convention, Part
from .checkpoint_facts import LayerFacts, examine, size_of
from .checkpoint_layer import CheckpointLayer

#: Called with (the layer at work, bytes read, bytes in all).
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class LayerReport:
    """One MoE layer. convention: None where none fits. evidence: what was told and how, by question. amax: the largest
    dequantized weight, as a bound from the scales, median over experts; inverted_amax: with global scales read the
    other way round; None where there are none. backends: for each FlashInfer MoE-EP backend why it cannot take the
    layer; empty: it can, as far as format and sizes decide."""

    layer: str
    number: int | None
    convention: str | None
    weight_format: str | None
    experts: int
    hidden: int
    intermediate: int
    amax: float | None
    inverted_amax: float | None
    evidence: Mapping[str, str]
    backends: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Report:
    """layers in the order of the checkpoint; findings by layer, then in the order of the checks."""

    path: str
    layers: tuple[LayerReport, ...]
    findings: tuple[Finding, ...]

    @property
    def level(self) -> Level:
        """The worst that was found; NOTE for nothing."""
        return max((f.level for f in self.findings), default=Level.NOTE)

    def as_json(self) -> dict[str, Any]:
        """JSON-compatible; levels by name."""
        findings = [asdict(f) | {"level": f.level.name.lower()} for f in self.findings]
        return {"path": self.path, "layers": [asdict(layer) for layer in self.layers], "findings": findings}


def inspect_checkpoint(
    path: str | Path, layers: Sequence[int | str] | None = None, progress: Progress | None = None
) -> Report:
    """Read the experts of some layers (None: all) once and report.

    layers: numbers, or names such as `mtp.0.ffn.experts`. Whole layers are read, one expert at a time. Raises
    ValueError for a missing or damaged file, an unknown layer, a checkpoint without routed experts.
    """
    checkpoint = open_checkpoint(path)
    if not checkpoint.layers:
        raise ValueError(f"{path}: no routed experts: no tensor is named like experts.0.gate_proj.weight")
    chosen = checkpoint.layers if layers is None else tuple(dict.fromkeys(map(checkpoint.layer, layers)))
    total, done = sum(map(size_of, chosen)), 0
    reports: list[LayerReport] = []
    findings: list[Finding] = []
    for layer in chosen:

        def advance(nbytes: int, name: str = layer.name) -> None:
            nonlocal done
            done += nbytes
            if progress:
                progress(name, done, total)

        report, found = _inspect_layer(checkpoint, layer, advance)
        reports.append(report)
        findings += found
    findings += _of_the_whole(reports)
    return Report(str(path), tuple(reports), tuple(findings))


def _inspect_layer(
    checkpoint: Checkpoint, layer: CheckpointLayer, advance: Callable[[int], None]
) -> tuple[LayerReport, list[Finding]]:
    convention = layer.convention
    if convention is None:
        return _unknown(layer)
    facts = examine(layer, convention, advance)
    findings = [finding for check in CHECKS for finding in check(facts)]
    findings += _beside_the_facts(checkpoint, facts)
    evidence = {
        "direction of global scales": _direction(facts),
        "gate and up": _gate_up_order(convention),
        "nibbles": "low nibble first by convention; the bytes do not tell",
        "scale layout": _scale_layout(facts),
    }
    backends = _backends(convention, facts.hidden, facts.intermediate, checkpoint.config)
    report = LayerReport(
        layer.name,
        layer.number,
        convention.name,
        convention.weight_format,
        len(facts.experts),
        facts.hidden,
        facts.intermediate,
        _median(amax(facts)),
        _median(amax(facts, inverted=True)) if convention.global_scale else None,
        evidence,
        backends,
    )
    return report, findings


def _unknown(layer: CheckpointLayer) -> tuple[LayerReport, list[Finding]]:
    kinds = ", ".join(f"{suffix or 'weight'} {dtype}" for suffix, dtype in sorted(layer.kinds))
    if {dtype for _, dtype in layer.kinds} <= {"BF16", "F16"}:
        found = Finding(Level.NOTE, "convention", layer.name, f"experts are not quantized: {kinds}")
    else:
        known = ", ".join(c.name for c in CONVENTIONS)
        found = Finding(Level.ERROR, "convention", layer.name, f"none of {known} fits; stored are {kinds}")
    reasons = {name: ("no known FP4 convention",) for name in _BACKENDS}
    return LayerReport(layer.name, layer.number, None, None, len(layer.experts), 0, 0, None, None, {}, reasons), [found]


def _beside_the_facts(checkpoint: Checkpoint, facts: LayerFacts) -> Iterator[Finding]:
    """Findings that need more than the layer's counts."""
    convention, name = facts.convention, facts.layer.name
    if convention.refused:
        reports = ("vllm-project/vllm#46641", "vllm-project/vllm#44893")
        text = f"no megakernel takes {convention.name}: {', '.join(convention.refused)}"
        yield Finding(Level.ERROR, "convention", name, text, (), reports)
    config = checkpoint.config
    nested = [config, *(v for v in config.values() if isinstance(v, dict))]
    counts = {d[key] for d in nested for key in _EXPERT_COUNTS if isinstance(d.get(key), int)}
    if counts and len(facts.experts) not in counts:
        told = " or ".join(map(str, sorted(counts)))
        text = f"{len(facts.experts)} experts, but config.json says {told}"
        yield Finding(Level.ERROR, "number of experts", name, text)
    sizes = set(_values(config, "group_size"))
    if sizes and convention.block not in sizes:
        text = f"blocks of {convention.block} by tensor names, but the configuration says group_size {sorted(sizes)}"
        yield Finding(Level.WARNING, "configuration", name, text)


#: Keys of config.json for the number of routed experts.
_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


def _values(config: Any, key: str) -> list[int]:
    """Every integer under a key, at any depth."""
    if isinstance(config, list):
        return [v for item in config for v in _values(item, key)]
    if not isinstance(config, dict):
        return []
    own = [config[key]] if isinstance(config.get(key), int) else []
    return own + [v for item in config.values() for v in _values(item, key)]


def _of_the_whole(reports: Sequence[LayerReport]) -> list[Finding]:
    formats = sorted({r.weight_format for r in reports if r.weight_format})
    if len(formats) < 2:
        return []
    text = (
        f"layers are {' and '.join(formats)}: layers of one size share a workspace, and with it the alphas of the last"
    )
    return [Finding(Level.WARNING, "several formats", "", text)]


# --- evidence --------------------------------------------------------------------------------------------------------


def _direction(facts: LayerFacts) -> str:
    direction = facts.convention.global_scale
    if direction is None:
        return "no global scale"
    suffix = facts.convention.suffixes[Part.GLOBAL_SCALE].lstrip("_")
    found, inverted = amax(facts), amax(facts, inverted=True)
    outcome = {
        (True, False): "confirmed by the magnitude of the weights",
        (True, True): "undecided by the magnitude of the weights",
        (False, True): "CONTRADICTED by the magnitude of the weights",
        (False, False): "undecided: the weights' magnitude is unusual either way",
    }[plausible(found), plausible(inverted)]
    outcome = "nothing to check it with" if bool(found.isnan().all()) else outcome
    return f"{direction.name.lower()} ({direction.value}) by the name {suffix}; {outcome}"


def _median(values: torch.Tensor) -> float | None:
    return None if bool(values.isnan().all()) else float(values.nanmedian())


def _gate_up_order(convention: Convention) -> str:
    if convention.interleaved:
        return "rows interleaved one by one, by convention"
    if convention.fused:
        return "gate rows first, then up, by the name gate_up_proj; the bytes do not tell"
    return "told apart by name"


def _scale_layout(facts: LayerFacts) -> str:
    if any("scale is" in text for text in facts.odd):
        return "does not fit a linear one, see the findings"
    block = facts.convention.block
    sizes = ((facts.intermediate, facts.hidden // block), (facts.hidden, facts.intermediate // block))
    if any(rows % 128 or columns % 4 for rows, columns in sizes):
        return "linear: a swizzled one would be padded"
    return "linear by convention; swizzled scales of these sizes would have the same shape"


# --- backends --------------------------------------------------------------------------------------------------------

_BACKENDS = (*sorted(FLASHINFER_MOE_EP_BACKENDS), *sorted(FLASHINFER_MOE_EP_SM90_BACKENDS))


def _backends(convention: Convention, hidden: int, intermediate: int, config: dict) -> dict[str, tuple[str, ...]]:
    specs = {name: flashinfer_moe_ep_backend_spec(name) for name in _BACKENDS}
    return {name: tuple(_reasons(spec, convention, hidden, intermediate, config)) for name, spec in specs.items()}


def _reasons(
    spec: FlashInferMoeEpBackendSpec, convention: Convention, hidden: int, intermediate: int, config: dict
) -> Iterator[str]:
    if convention.weight_format not in spec.weight_formats:
        yield f"takes {' and '.join(sorted(spec.weight_formats))}, not {convention.weight_format}"
    yield from convention.refused
    for name, size, multiple in (
        ("hidden", hidden, spec.hidden_alignment),
        ("intermediate", intermediate, spec.alignment),
    ):
        if size % multiple:
            yield f"{name} size {size} is not a multiple of {multiple}"
    architectures = config.get("architectures")
    if spec.deepseek_v4_only and architectures and FLASHINFER_MOE_EP_ARCHITECTURES.isdisjoint(architectures):
        yield f"DeepSeek-V4 models only, not {', '.join(architectures)}"
