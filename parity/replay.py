"""Replay recordings through the reference and count the bits that differ."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path

import torch

from fp4ep.reference.formats import E4M3, E5M2, decode
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.scheme import Combine, Evidence, Scheme
from fp4ep.reference.schemes import find_scheme
from fp4ep.reference.special import ex2_approx, rcp_approx
from fp4ep.reference.tensor_core import HOPPER_BF16, HOPPER_E4M3, HOPPER_E5M2, matmul
from fp4ep.reference.types import MoEInputs, MoEWeights, Trace

from . import metrics
from .order_set import reachable
from .recording import Case, Recording, RecordingError

#: Instruction and operand format behind the name of a tensor_core case.
TENSOR_CORES = {core.name: core for core in (HOPPER_E4M3, HOPPER_E5M2, HOPPER_BF16)}
SPECIAL_FUNCTIONS = {"ex2.approx.ftz.f32": ex2_approx, "rcp.approx.ftz.f32": rcp_approx}
_OPERANDS = {HOPPER_E4M3: E4M3, HOPPER_E5M2: E5M2}

#: Called with the share of the case that is done, 0 to 1.
Progress = Callable[[float], None]


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    recording: str
    case: str
    scheme: str
    hardware: str
    version: str
    elements: int
    differing: int
    first: str | None  #: where the first difference is, with both values and both bit patterns
    evidence: Evidence | None  #: None when bits differ
    seconds: float

    def as_json(self) -> dict:
        return asdict(self) | {"evidence": self.evidence and self.evidence.value}


def shipped_recordings() -> list[Path]:
    """The recordings in the package, in order of name."""
    folder = Path(str(files("fp4ep.parity").joinpath("recordings")))
    return sorted(folder.glob("*.safetensors"))


def replay_cases(recording: Recording, cases: Iterable[Case], progress: Callable[[Case], Progress]) -> Iterator[Result]:
    """Run each case through the reference. Yields one Result per case, in order.

    Raises RecordingError when a case cannot be run: an unknown scheme or kind, tensors that do not fit it.
    """
    source = recording.source
    for case in cases:
        start = time.perf_counter()
        tensors = recording.roles(case)
        library = "flashinfer" if case.kind == "moe" else "torch"
        try:
            scheme, found, expected = _KINDS[case.kind](case, tensors, progress(case))
            differing, first = compare_bits(found, expected)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{recording.path}: case {case.title!r} cannot be run: {error}") from error
        yield Result(
            recording=recording.path.stem,
            case=case.title,
            scheme=scheme,
            hardware=f"{source.get('hardware')} ({source.get('compute_capability')})",
            version=f"{library} {source.get(library, 'of unknown version')}",
            elements=found.numel(),
            differing=differing,
            first=first,
            evidence=None if differing else Evidence.VERIFIED,
            seconds=time.perf_counter() - start,
        )


def run_moe(
    scheme: Scheme,
    tensors: Mapping[str, torch.Tensor],
    progress: Progress = lambda share: None,
    tokens_per_rank: Sequence[int] | None = None,
) -> Trace:
    """The reference's stages for the tensors of a moe case, by role (see `Case`); its `output` is not looked at.

    tokens_per_rank: how the tokens are spread over EP ranks; None: all on one.
    """
    rest = {role: tensor for role, tensor in tensors.items() if role != "output"}
    previous_ids, workspace = rest.pop("previous_topk_ids", None), None
    inputs = MoEInputs(**{field.name: rest.pop(field.name) for field in fields(MoEInputs) if field.name in rest})
    weights = MoEWeights(**rest)
    if previous_ids is not None:
        _, trace = moe_forward(scheme, weights, replace(inputs, topk_ids=previous_ids))
        workspace = [trace["combine"].tensors["terms"]]
    ranks = split_tokens(inputs, tokens_per_rank or [len(inputs.hidden_states)])
    _, trace = moe_forward(
        scheme, weights, ranks, workspace=workspace, progress=lambda done, total: progress(done / max(total, 1))
    )
    return trace


def split_tokens(inputs: MoEInputs, tokens_per_rank: Sequence[int]) -> list[MoEInputs]:
    """Consecutive tokens to consecutive ranks. Raises ValueError when the counts are not those of the tokens."""
    if sum(tokens_per_rank) != len(inputs.hidden_states):
        raise ValueError(f"tokens_per_rank must sum to {len(inputs.hidden_states)}, got {list(tokens_per_rank)}")
    columns = {name: t.split(list(tokens_per_rank)) for name, t in vars(inputs).items() if t is not None}
    return [MoEInputs(**{name: parts[r] for name, parts in columns.items()}) for r in range(len(tokens_per_rank))]


def _replay_moe(case: Case, tensors: dict[str, torch.Tensor], progress: Progress):
    scheme = find_scheme(case.scheme, **case.options)
    trace = run_moe(scheme, tensors, progress, case.tokens_per_rank)
    terms, found = (torch.cat([s.tensors[n] for s in trace if s.name == "combine"]) for n in ("terms", "values"))
    expected = tensors["output"]
    if scheme.combine is Combine.ON_ARRIVAL:  # equal means: some order of the terms gives it
        found = torch.where(reachable(expected, terms, tensors["topk_ids"]), expected, found)
    return str(scheme), found, expected


def _replay_tensor_core(case: Case, tensors: dict[str, torch.Tensor], progress: Progress):
    core = TENSOR_CORES[case.scheme]
    a, b = (decode(tensors[x], _OPERANDS[core]) if core in _OPERANDS else tensors[x].float() for x in "ab")
    found = matmul(core, a, b, c=tensors.get("c"))
    progress(1.0)
    return core.name, found, tensors["d"]


def _replay_special_function(case: Case, tensors: dict[str, torch.Tensor], progress: Progress):
    found = SPECIAL_FUNCTIONS[case.scheme](tensors["x"])
    progress(1.0)
    return case.scheme, found, tensors["y"]


_KINDS = {"moe": _replay_moe, "tensor_core": _replay_tensor_core, "special_function": _replay_special_function}


def compare_bits(found: torch.Tensor, expected: torch.Tensor) -> tuple[int, str | None]:
    """Number of elements whose bits differ, and a description of the first. Raises ValueError on shape or dtype."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise ValueError(
            f"found must be {expected.dtype} {list(expected.shape)} as recorded, got {found.dtype} {list(found.shape)}"
        )
    found_bits, expected_bits = metrics.bits(found), metrics.bits(expected)
    differs = found_bits != expected_bits
    if not differs.any():
        return 0, None
    place = tuple(differs.nonzero()[0].tolist())
    shown = [
        f"{float(values[place])!r} (0x{int(bits[place]) & (1 << 8 * values.element_size()) - 1:x})"
        for values, bits in ((found, found_bits), (expected, expected_bits))
    ]
    return int(differs.sum()), f"{list(place)}: {shown[0]}, recorded {shown[1]}"
