"""Runs: the stages that one implementation made of a layer, on every EP rank; saved as one safetensors file.

The header's metadata has one entry, `fp4ep`, a JSON object:

    format    "fp4ep.run"
    version   1
    side      what ran: "reference", "fake_quant", "flashinfer", a recording's name, or the caller's own word
    claim     a member of `Claim` by name: what the side promises to compute
    scheme    {"name": ..., "options": {...}}, the arguments of find_scheme
    problem   the fields of a `Problem`, or null when the layer came from elsewhere; then its tensors are in the file
    ep_size   number of ranks
    source    versions and hardware of what ran
    stages    [[name, rank, exactness, [tensor, ...]], ...] in order

Tensors are named `stages/<rank>/<stage>/<tensor>`, `weights/<field>` and `inputs/<rank>/<field>`. Readers refuse a
version they do not know.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from fp4ep.reference.scheme import Scheme
from fp4ep.reference.schemes import find_scheme, options_of
from fp4ep.reference.types import Exactness, MoEInputs, MoEWeights, Stage, Trace

from .problem import Layer, Problem
from .recording import write_safetensors

FORMAT = "fp4ep.run"
VERSION = 1
#: The side whose trace tolerances are derived around.
REFERENCE = "reference"


class RunError(ValueError):
    """A file is not a run, is of another version, or does not hold what it says."""


class Claim(Enum):
    """What a side promises; a tolerance is derived from it."""

    #: The scheme's own arithmetic: every bit of every stage.
    BITS = "bits"
    #: The scheme's quantizers, formats and order of combine; but GEMMs summed in float32 or better, in any order, from
    #: dequantized operands, and library exponentials in place of ex2.approx and rcp.approx.
    FLOAT32 = "float32"


@dataclass(frozen=True)
class Run:
    """trace: of all ranks, ranks ascending within a stage; of a black box the `combine` values only."""

    side: str
    claim: Claim
    layer: Layer
    trace: Trace
    problem: Problem | None = None  #: what `layer` was built from, if a Problem
    source: Mapping[str, str] = field(default_factory=dict)

    @property
    def scheme(self) -> Scheme:
        return self.layer.scheme

    def outputs(self) -> list[torch.Tensor]:
        """The output of every rank, `[T, H]` bf16."""
        return [self.trace["combine", rank].tensors["values"] for rank in range(self.layer.ep_size)]

    def stages(self, name: str) -> dict[int, dict[str, torch.Tensor]]:
        """rank -> tensors of that stage; empty when the side shows nothing of it."""
        return {stage.rank: stage.tensors for stage in self.trace if stage.name == name}


def outputs_as_trace(outputs: Sequence[torch.Tensor], ranks: Sequence[int] | None = None) -> Trace:
    """The trace of a black box: one output for each of `ranks`; None: ranks 0, 1, ..."""
    pairs = zip(range(len(outputs)) if ranks is None else ranks, outputs, strict=True)
    return Trace(tuple(Stage("combine", rank, Exactness.EXACT, {"values": out}) for rank, out in pairs))


def save_run(run: Run, path: str | Path) -> None:
    """Write the file at once: under another name first, so that no reader ever sees half of it."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "side": run.side,
        "claim": run.claim.name,
        "scheme": {"name": run.scheme.name, "options": options_of(run.scheme)},
        "problem": run.problem and run.problem.as_json(),
        "ep_size": run.layer.ep_size,
        "source": dict(run.source),
        "stages": [[stage.name, stage.rank, stage.exactness.name, list(stage.tensors)] for stage in run.trace],
    }
    tensors = {
        f"stages/{stage.rank}/{stage.name}/{name}": tensor
        for stage in run.trace
        for name, tensor in stage.tensors.items()
    }
    if run.problem is None:
        owners = {"weights": run.layer.weights} | {f"inputs/{r}": x for r, x in enumerate(run.layer.inputs)}
        for prefix, owner in owners.items():
            tensors |= {f"{prefix}/{name}": tensor for name, tensor in vars(owner).items() if tensor is not None}
    own = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    write_safetensors(own, path, header)


def load_run(path: str | Path) -> Run:
    """Raises RunError when the file is not a run of a known version, FileNotFoundError as usual."""
    path = Path(path)
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {})["fp4ep"])
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']!r}")
            if header["version"] != VERSION:
                raise ValueError(f"version {header['version']!r}; this fp4ep reads {VERSION}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        scheme = find_scheme(header["scheme"]["name"], **header["scheme"]["options"])
        problem = header["problem"] and Problem.from_json(header["problem"])
        layer = problem.build() if problem else _layer(scheme, header["ep_size"], tensors)
        stages = tuple(
            Stage(name, rank, Exactness[exactness], {n: tensors[f"stages/{rank}/{name}/{n}"] for n in names})
            for name, rank, exactness, names in header["stages"]
        )
        if (layer.scheme, layer.ep_size) != (scheme, header["ep_size"]):
            raise ValueError(f"its problem is {problem}, its scheme {scheme} over {header['ep_size']} ranks")
        shown: dict[str, list[int]] = {"combine": []}
        for stage in stages:
            shown.setdefault(stage.name, []).append(stage.rank)
        if any(sorted(ranks) != list(range(layer.ep_size)) for ranks in shown.values()):
            raise ValueError(f"its stages must be of every rank of {layer.ep_size}, got {shown}")
        return Run(header["side"], Claim[header["claim"]], layer, Trace(stages), problem, header["source"])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path}: not an fp4ep run ({error!r})") from error


def _under(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _layer(scheme: Scheme, ep_size: int, tensors: Mapping[str, torch.Tensor]) -> Layer:
    inputs = tuple(MoEInputs(**_under(tensors, f"inputs/{rank}/")) for rank in range(ep_size))
    return Layer(scheme, MoEWeights(**_under(tensors, "weights/")), inputs)
