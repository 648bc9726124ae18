"""What can stand on either side of a comparison, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fp4ep.optimized.engine_cpu import fast_forward, missing_for_engine
from fp4ep.optimized.engine_cuda import cuda_forward, missing_for_cuda_engine
from fp4ep.optimized.fake_quant import fake_quant_forward
from fp4ep.optimized.flashinfer_sm90 import capacity_for, run_megakernel
from fp4ep.reference.exchange import Exchange
from fp4ep.reference.moe import Progress, moe_forward_ranks
from fp4ep.reference.scheme import Combine, Scheme
from fp4ep.reference.schemes import find_scheme, options_of
from fp4ep.reference.types import MoEInputs, MoEWeights, Trace

from .faults import FAULTS, Fault, planted
from .problem import Layer, evenly
from .recording import Case, Recording
from .replay import split_tokens
from .run import REFERENCE, Claim, outputs_as_trace


@dataclass(frozen=True)
class Place:
    """The EP ranks that this process runs, out of ep_size."""

    ranks: Sequence[int]
    ep_size: int
    exchange: Exchange


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Side:
    """One implementation. Rank processes get it by pickle, so its functions belong to a module.

    run: (layer, place, progress) -> the stages of place.ranks, ranks ascending within a stage. The layer has the inputs
    of every rank, but the weights of place.ranks' experts only unless `whole`.
    """

    name: str
    claim: Claim
    run: Callable[[Layer, Place, Progress | None], Trace]
    missing: Callable[[], str | None] = _nothing  #: why it cannot run here; None: it can
    whole: bool = False  #: wants the weights of all experts on every rank
    gpu: bool = False  #: wants a process for each rank, on a GPU that ranks may share
    packages: tuple[str, ...] = ()  #: whose versions matter, beside torch's
    layer: Callable[[int], Layer] | None = None  #: ep_size -> the only layer that it can run; None: any
    source: Mapping[str, str] | None = None  #: hardware and versions of what ran; None: those here


def local_layer(layer: Layer, place: Place) -> Layer:
    """The layer with copies of the weights of place.ranks' experts, and no others."""
    count = layer.weights.num_experts // place.ep_size
    mine = slice(place.ranks[0] * count, (place.ranks[-1] + 1) * count)
    own = vars(layer.weights.of_experts(mine)).items()
    return replace(layer, weights=MoEWeights(**{name: t.clone() for name, t in own if t is not None}))


# --- the sides ---------------------------------------------------------------------------------------------------


def _stages(forward: Callable[..., Trace], layer: Layer, place: Place, progress: Progress | None) -> Trace:
    return forward(
        layer.scheme,
        layer.weights,
        [layer.inputs[rank] for rank in place.ranks],
        ranks=place.ranks,
        ep_size=place.ep_size,
        exchange=place.exchange,
        progress=progress,
    )


def missing_for_flashinfer_sm90() -> str | None:
    """What keeps FlashInfer's SM90 megakernels from running here; None: nothing."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"compute capability {'.'.join(map(str, capability))}, not 9.0"
    if find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    return None


def _flashinfer(layer: Layer, place: Place, progress: Progress | None) -> Trace:
    (rank,) = place.ranks
    tokens = max(len(inputs.hidden_states) for inputs in layer.inputs)
    output = run_megakernel(
        layer.scheme.name,
        flashinfer_options(layer.scheme),
        layer.weights,
        layer.inputs[rank],
        max_tokens_per_rank=capacity_for(tokens),
        launches=1 if layer.scheme.combine is Combine.ON_ARRIVAL else 3,
        ep_rank=rank,
        ep_size=place.ep_size,
    )
    return outputs_as_trace([output], place.ranks)


def flashinfer_options(scheme: Scheme) -> dict[str, Any]:
    """Fields of FlashInfer's config that make it run this scheme (0.7.4).

    It knows a K tile as part of a launch geometry only, and takes "2xacc" from `knobs` or beside a geometry only.
    """
    options = options_of(scheme)
    if scheme.combine is Combine.GROUPED:
        options["token_back_mode"] = "reuse_dispatch_warps"
    if options.pop("mma_tiler_k", 128) == 256:
        options |= {"swap_ab": False, "pingpong": False, "mma_tiler_mnk": (64, 128, 256)}
    elif options.get("fp8_accum_mode") == "2xacc":
        options["knobs"] = {"fp8_accum_mode": "2xacc"}
    return options


SIDES: dict[str, Side] = {
    side.name: side
    for side in (
        Side(REFERENCE, Claim.BITS, partial(_stages, moe_forward_ranks)),
        Side("fast", Claim.BITS, partial(_stages, fast_forward), missing_for_engine, packages=("numba",)),
        Side(
            "cuda",
            Claim.BITS,
            partial(_stages, cuda_forward),
            missing_for_cuda_engine,
            gpu=True,
            packages=("triton",),
        ),
        Side("fake_quant", Claim.FLOAT32, partial(_stages, fake_quant_forward)),
        Side(
            "flashinfer",
            Claim.BITS,
            _flashinfer,
            missing_for_flashinfer_sm90,
            whole=True,
            gpu=True,
            packages=("flashinfer-python", "nvidia-cutlass-dsl"),
        ),
    )
}


# --- recordings --------------------------------------------------------------------------------------------------


def recorded_side(path: str | Path, match: str = "") -> Side:
    """The one moe case of a recording whose "scheme title options" contains `match`: its output, on its own layer.

    Over other than the recorded number of ranks the tokens are spread as evenly as they go: that changes no bit. Raises
    ValueError unless one case fits (those that need an earlier launch on the same buffers do not count, nor those whose
    output is kept as digests), RecordingError for what is no recording.
    """
    recording = Recording(path)
    layers = [case for case in recording.cases if case.kind == "moe" and "output" in case.tensors]
    cases = [case for case in layers if "previous_topk_ids" not in case.tensors]
    found = [case for case in cases if match in _describe(case)]
    if len(found) != 1:
        listed = "".join(f"\n  {_describe(case)}" for case in found or cases)
        raise ValueError(f"match: {match!r} must fit one case of {path}, fits {len(found)} of{listed}")
    (case,) = found
    return Side(
        name=f"{RECORDING}{Path(path).stem}#{case.title}",
        claim=Claim.BITS,
        run=partial(_recorded_output, recording[case.tensors["output"]]),
        layer=partial(_recorded_layer, recording.path, case),
        source=recording.source,
    )


def _describe(case: Case) -> str:
    return f"{case.scheme} {case.title} {case.options}"


def _recorded_output(output: torch.Tensor, layer: Layer, place: Place, progress: Progress | None) -> Trace:
    parts = output.split([len(inputs.hidden_states) for inputs in layer.inputs])
    return outputs_as_trace([parts[rank] for rank in place.ranks], place.ranks)


def _recorded_layer(path: Path, case: Case, ep_size: int) -> Layer:
    roles = Recording(path).roles(case)
    inputs = MoEInputs(**{field.name: roles[field.name] for field in fields(MoEInputs) if field.name in roles})
    weights = MoEWeights(**{field.name: roles[field.name] for field in fields(MoEWeights) if field.name in roles})
    counts = case.tokens_per_rank
    scheme = find_scheme(case.scheme, **case.options)
    if counts is None or len(counts) != ep_size:
        if scheme.combine is Combine.GROUPED:
            raise ValueError(f"ep_size: {case.title!r} was summed by rank, over {len(counts or [0])}, got {ep_size}")
        counts = evenly(len(inputs.hidden_states), ep_size)
    return Layer(scheme, weights, tuple(split_tokens(inputs, counts)))


# --- faults ------------------------------------------------------------------------------------------------------


def _faulty(fault: Fault, layer: Layer, place: Place, progress: Progress | None) -> Trace:
    """The reference with the fault in it; which experts' weights are wrong may depend on those of other ranks."""
    wrong, intervene = planted(fault, layer)
    return _stages(partial(moe_forward_ranks, intervene=intervene), local_layer(wrong, place), place, progress)


#: `find_side` takes fault:NAME, a key of FAULTS.
FAULT = "fault:"

#: `find_side` takes recording:FILE or, where the file has several cases, recording:FILE#TEXT.
RECORDING = "recording:"


def find_side(text: str) -> Side:
    """The side of that name. Raises ValueError listing what there is."""
    if text.startswith(RECORDING):
        path, _, match = text.removeprefix(RECORDING).partition("#")
        return recorded_side(path, match)
    if text.startswith(FAULT):
        name = text.removeprefix(FAULT)
        if name not in FAULTS:
            raise ValueError(f"side: no fault {name!r}; there are {', '.join(FAULTS)}")
        return Side(text, Claim.BITS, partial(_faulty, FAULTS[name]), whole=True)
    if text not in SIDES:
        names = ", ".join((*SIDES, f"{FAULT}NAME", f"{RECORDING}FILE", f"{RECORDING}FILE#TEXT"))
        raise ValueError(f"side: {text!r} is not one of {names}")
    return SIDES[text]
