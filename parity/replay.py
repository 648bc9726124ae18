"""Replay recordings through the reference, or the CPU engine, and count the bits that differ."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path

import torch

from fp4ep.optimized.emulation import NOT_EMULATED
from fp4ep.optimized.engine_cpu import fast_forward, missing_for_engine
from fp4ep.reference.exchange import exchange_in_process
from fp4ep.reference.formats import E4M3, E5M2, decode
from fp4ep.reference.moe import moe_forward, moe_forward_ranks
from fp4ep.reference.scheme import Combine, Evidence, Scheme
from fp4ep.reference.schemes import find_scheme
from fp4ep.reference.special import ex2_approx, rcp_approx
from fp4ep.reference.tensor_core import HOPPER_BF16, HOPPER_E4M3, HOPPER_E5M2, HOPPER_FP16, matmul
from fp4ep.reference.types import MoEInputs, MoEWeights, Trace
from fp4ep.reference.validate import check_arguments

from . import metrics
from .order_set import reachable
from .recording import GIVEN, Case, Recording, RecordingError, row_digests

#: Instruction and operand format behind the name of a tensor_core case.
TENSOR_CORES = {core.name: core for core in (HOPPER_E4M3, HOPPER_E5M2, HOPPER_BF16, HOPPER_FP16)}
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
    by: str  #: what ran it here, "reference" or "fast"
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


#: What runs a layer: the reference; the CPU engine; or, by AUTO, the engine for outputs kept as digests, if it has the
#: scheme and can run here, and the reference for the others.
REFERENCE, FAST, AUTO = "reference", "fast", "auto"


@dataclass(frozen=True)
class _Ran:
    """What a case gave here, by a scheme of that name. terms: summed on arrival, in some order."""

    scheme: str
    values: torch.Tensor
    terms: torch.Tensor | None = None


def replay_cases(
    recording: Recording, cases: Iterable[Case], progress: Callable[[Case], Progress], choice: str = AUTO
) -> Iterator[Result]:
    """Run each case through `choice`, one of REFERENCE, FAST and AUTO. Yields one Result per case, in order.

    Cases in succession that differ in what the kernel gave only are run once. Raises RecordingError when a case cannot
    be run: an unknown scheme or kind, tensors that do not fit it.
    """
    source = recording.source
    last: tuple[object, _Ran | None] = (None, None)
    for case in cases:
        start = time.perf_counter()
        tensors = recording.roles(case)
        library = "flashinfer" if case.kind == "moe" else "torch"
        try:
            by = _runner(case, choice)
            given = {role: name for role, name in case.tensors.items() if not role.startswith(GIVEN[case.kind])}
            work = (case.kind, case.scheme, given, case.options, case.tokens_per_rank, by)
            ran = last[1] if work == last[0] else None
            ran = ran or _KINDS[case.kind](case, tensors, progress(case), by == FAST)
            differing, first = _compared(ran, tensors, GIVEN[case.kind])
        except (KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{recording.path}: case {case.title!r} cannot be run: {error}") from error
        last = (work, ran)
        yield Result(
            recording=recording.path.stem,
            case=case.title,
            scheme=ran.scheme,
            hardware=f"{source.get('hardware')} ({source.get('compute_capability')})",
            version=f"{library} {source.get(library, 'of unknown version')}",
            by=by,
            elements=ran.values.numel(),
            differing=differing,
            first=first,
            evidence=None if differing else Evidence.VERIFIED,
            seconds=time.perf_counter() - start,
        )


def _runner(case: Case, choice: str) -> str:
    if case.kind != "moe":
        return REFERENCE
    if choice != AUTO:
        return choice
    emulated = find_scheme(case.scheme, **case.options).weights not in NOT_EMULATED
    return FAST if emulated and "output_rows" in case.tensors and missing_for_engine() is None else REFERENCE


def run_moe(
    scheme: Scheme,
    tensors: Mapping[str, torch.Tensor],
    progress: Progress = lambda share: None,
    tokens_per_rank: Sequence[int] | None = None,
    fast: bool = False,
) -> Trace:
    """The reference's stages for the tensors of a moe case, by role (see `Case`); its output is not looked at.

    tokens_per_rank: how the tokens are spread over EP ranks; None: all on one. fast: the CPU engine's stages instead.
    """
    rest = {role: tensor for role, tensor in tensors.items() if not role.startswith("output")}
    previous_ids, workspace = rest.pop("previous_topk_ids", None), None
    inputs = MoEInputs(**{field.name: rest.pop(field.name) for field in fields(MoEInputs) if field.name in rest})
    weights = MoEWeights(**rest)
    if previous_ids is not None:
        _, trace = moe_forward(scheme, weights, replace(inputs, topk_ids=previous_ids))
        workspace = [trace["combine"].tensors["terms"]]
    ranks = split_tokens(inputs, tokens_per_rank or [len(inputs.hidden_states)])
    check_arguments(scheme, weights, ranks, None, workspace)
    forward = fast_forward if fast else moe_forward_ranks
    return forward(
        scheme,
        weights,
        ranks,
        ranks=range(len(ranks)),
        ep_size=len(ranks),
        exchange=exchange_in_process,
        workspace=workspace,
        progress=lambda done, total: progress(done / max(total, 1)),
    )


def split_tokens(inputs: MoEInputs, tokens_per_rank: Sequence[int]) -> list[MoEInputs]:
    """Consecutive tokens to consecutive ranks. Raises ValueError when the counts are not those of the tokens."""
    if sum(tokens_per_rank) != len(inputs.hidden_states):
        raise ValueError(f"tokens_per_rank must sum to {len(inputs.hidden_states)}, got {list(tokens_per_rank)}")
    columns = {name: t.split(list(tokens_per_rank)) for name, t in vars(inputs).items() if t is not None}
    return [MoEInputs(**{name: parts[r] for name, parts in columns.items()}) for r in range(len(tokens_per_rank))]


def _replay_moe(case: Case, tensors: dict[str, torch.Tensor], progress: Progress, fast: bool) -> _Ran:
    scheme = find_scheme(case.scheme, **case.options)
    trace = run_moe(scheme, tensors, progress, case.tokens_per_rank, fast)
    terms, values = (torch.cat([s.tensors[n] for s in trace if s.name == "combine"]) for n in ("terms", "values"))
    return _Ran(str(scheme), values, terms if scheme.combine is Combine.ON_ARRIVAL else None)


def _replay_tensor_core(case: Case, tensors: dict[str, torch.Tensor], progress: Progress, fast: bool) -> _Ran:
    core = TENSOR_CORES[case.scheme]
    a, b = (decode(tensors[x], _OPERANDS[core]) if core in _OPERANDS else tensors[x].float() for x in "ab")
    values = matmul(core, a, b, c=tensors.get("c"))
    progress(1.0)
    return _Ran(core.name, values)


def _replay_special_function(case: Case, tensors: dict[str, torch.Tensor], progress: Progress, fast: bool) -> _Ran:
    values = SPECIAL_FUNCTIONS[case.scheme](tensors["x"])
    progress(1.0)
    return _Ran(case.scheme, values)


_KINDS = {"moe": _replay_moe, "tensor_core": _replay_tensor_core, "special_function": _replay_special_function}


def _compared(ran: _Ran, tensors: Mapping[str, torch.Tensor], role: str) -> tuple[int, str | None]:
    if role not in tensors:
        return compare_rows(ran.values, tensors[f"{role}_rows"])
    found, expected = ran.values, tensors[role]
    if ran.terms is not None:  # equal means: some order of the terms gives it
        found = torch.where(reachable(expected, ran.terms, tensors["topk_ids"]), expected, found)
    return compare_bits(found, expected)


def compare_rows(found: torch.Tensor, digests: torch.Tensor) -> tuple[int, str | None]:
    """Number of elements in rows whose digests differ, and which row is the first. Raises ValueError on another number
    of rows."""
    if len(found) != len(digests):
        raise ValueError(f"found must have {len(digests)} rows as recorded, got {list(found.shape)}")
    (differing,) = (row_digests(found) != digests).nonzero(as_tuple=True)
    if not len(differing):
        return 0, None
    of_rows = f"its digest is not the recorded one ({len(differing)} of {len(found)} rows)"
    return len(differing) * found[0].numel(), f"row {int(differing[0])}: {of_rows}"


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
