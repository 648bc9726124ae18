"""Make recordings on live kernels: problems of the harness, or the shipped files again. `fp4ep record` runs it."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fp4ep.optimized.config import EpGroup
from fp4ep.optimized.flashinfer_moe_ep import FlashInferMoeEp
from fp4ep.optimized.flashinfer_sm90 import capacity_for, launch_megakernel, stop_runtime
from fp4ep.optimized.mega_kernel import KernelFactory
from fp4ep.reference.scheme import Combine
from fp4ep.reference.schemes import options_of
from fp4ep.reference.types import MoEInputs, MoEWeights

from .adapter import Batch, adapter_parts, batch_of, rebalance
from .corpus import build_large, build_special_values
from .corpus_adapter import ORDER, build_adapter
from .corpus_problems import build_problems
from .corpus_ranks import build_ranks
from .distributed import contact, shares_gpus
from .problem import Layer, Problem
from .recording import Case, RecordingWriter, alike
from .sides import flashinfer_options, missing_for_flashinfer_sm90

#: Called with a line about each case, on every rank.
Report = Callable[[str], None]


class UnsteadyError(RuntimeError):
    """Launches of a kernel that should be deterministic gave different bits. Raised on every rank alike."""


# --- what is recorded, and where ---------------------------------------------------------------------------------


_PACKAGES = {"flashinfer": "flashinfer-python", "cutlass_dsl": "nvidia-cutlass-dsl"}


def describe_machine() -> dict[str, str]:
    """What ran: for the `source` of a recording."""
    major, minor = torch.cuda.get_device_capability()
    driver = subprocess.check_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], text=True)
    ranks, gpus = started_ranks(), torch.cuda.device_count()
    return {
        "hardware": torch.cuda.get_device_name(),
        "compute_capability": f"{major}.{minor}",
        **{name: version(package) for name, package in _PACKAGES.items()},
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "driver": driver.split()[0],
    } | ({"placement": f"{ranks} ranks on {gpus} GPU{'s' * (gpus > 1)}"} if ranks > 1 else {})


def missing_to_record() -> str | None:
    """What keeps the ranks on this machine from recording; None: nothing."""
    if reason := missing_for_flashinfer_sm90():
        return reason
    for package in _PACKAGES.values():
        try:
            version(package)
        except PackageNotFoundError:
            return f"{package} is not installed"
    if not shutil.which("nvidia-smi"):
        return "nvidia-smi, which knows the driver's version, is not there"
    if started_ranks() > 1 and find_spec("nvshmem") is None:
        return "nvshmem4py, which several ranks need, is not installed"
    return None


@dataclass(frozen=True)
class Kernels:
    """What is recorded: FlashInfer's kernels, or others in their place.

    launch: `launch_megakernel`, or any with the same signature. adapted: the adapter's kernel; None: FlashInfer's, on
    the current device; another runs on the CPU, without a captured pass. missing: why these cannot run here; None:
    they can. source: what ran.
    """

    launch: Callable[..., list[torch.Tensor]] = launch_megakernel
    adapted: KernelFactory | None = None
    missing: Callable[[], str | None] = missing_to_record
    source: Callable[[], Mapping[str, str]] = describe_machine
    gpu: bool = True


FLASHINFER = Kernels()


def started_ranks() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def started_group(gpu: bool) -> Iterator[EpGroup]:
    """What torchrun started as one group, a GPU for each rank or shared by some; without torchrun, this process alone.

    All ranks leave it together. Where one leaves with an error nothing is ended, since that takes all of them: then end
    the process.
    """
    if started_ranks() == 1:
        yield EpGroup(1, 0)
        return
    shared = gpu and shares_gpus(int(os.environ["LOCAL_WORLD_SIZE"]))
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu and not shared else "gloo")
    yield EpGroup(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    stop_runtime()
    dist.destroy_process_group()


def _of_all_ranks(value: Any, group: EpGroup) -> list[Any]:
    if group.world_size == 1:
        return [value]
    gathered = [None] * group.world_size
    contact(dist.all_gather_object, gathered, value, group=group.device_group)
    return gathered


# --- problems of the harness -------------------------------------------------------------------------------------


def record_problems(path: Path, named: Mapping[str, Problem], group: EpGroup, kernels: Kernels, report: Report) -> int:
    """One recording of all problems, each over the whole group; rank 0 writes it when all are done. Returns the number
    of its cases.

    named: problems by name of the case, of one scheme and options. Every rank makes the call. Only outputs are stored.

    Raises UnsteadyError; ContactError when another rank does not answer; what the kernel raises passes through.
    """
    title = f"Problems of the harness: {'; '.join(named)}"
    writer = RecordingWriter(title, kernels.source()) if group.rank_in_group == 0 else None
    for name, problem in named.items():
        layer = problem.build()
        config, launches = _launch(layer, group, kernels)
        on_arrival, same = layer.scheme.combine is Combine.ON_ARRIVAL, alike(launches)
        if not (same or on_arrival):
            raise UnsteadyError(f"{name!r}: {len(launches)} launches of {layer.scheme} gave different bits")
        if writer:
            _add(writer, name, problem, layer, config, launches)
        bits = "the same bits" if same else "different bits, in some order of arrival each"
        report(f"{name}: {len(launches)} launches, {bits}, {int(launches[0].isnan().sum())} NaN")
    if writer is None:
        return 0
    writer.write(path)
    return len(writer.cases)


def _launch(layer: Layer, group: EpGroup, kernels: Kernels) -> tuple[dict[str, object], list[torch.Tensor]]:
    """What the kernel was told beside the scheme's own options, and the output of all ranks for each launch."""
    rank, size = group.rank_in_group, group.world_size
    counts = [len(inputs.hidden_states) for inputs in layer.inputs]
    capacity = capacity_for(max(counts))
    options = flashinfer_options(layer.scheme)
    places = {"ep_rank": rank, "ep_size": size}
    mine = kernels.launch(
        layer.scheme.name, options, layer.weights, layer.inputs[rank], max_tokens_per_rank=capacity, **places
    )
    launches = [torch.cat(ranks) for ranks in zip(*_of_all_ranks(mine, group), strict=True)]
    rest = {name: value for name, value in options.items() if name not in options_of(layer.scheme)}
    return {"max_tokens_per_rank": capacity, "world_size": size, "tokens_per_rank": counts, **rest}, launches


def _add(
    writer: RecordingWriter,
    name: str,
    problem: Problem,
    layer: Layer,
    config: dict[str, object],
    launches: Sequence[torch.Tensor],
) -> None:
    roles = writer.problem_roles(name, problem, layer)
    apart = layer.scheme.combine is Combine.ON_ARRIVAL
    for launch, output in enumerate(launches if apart else launches[:1]):
        stored = f"output.{len(writer.cases)}"
        writer.store(stored, output, "xz")
        title = f"problem: {name}" + f", launch {launch + 1}" * apart
        repeats = 1 if apart else len(launches)
        tensors, options = {**roles, "output": stored}, options_of(layer.scheme)
        writer.cases.append(Case(title, "moe", layer.scheme.name, tensors, options, config, repeats))


# --- the shipped recordings --------------------------------------------------------------------------------------


#: Fills the writer, on every rank of the group together.
Build = Callable[[RecordingWriter, EpGroup, Kernels, Report], None]


@dataclass(frozen=True)
class Corpus:
    """One shipped recording: how many ranks make it, how, and with which modules beside FlashInfer's."""

    ep_size: int
    title: str
    build: Build
    modules: tuple[str, ...] = ()


def record_corpus(name: str, folder: Path, group: EpGroup, kernels: Kernels, report: Report) -> int:
    """Make the shipped recording of that name again, in the folder; rank 0 writes it. Returns the number of its cases.

    name: a key of CORPORA with the group's size. Every rank makes the call. A case that fails on one GPU is reported
    as LEFT OUT; the file then lacks it. Raises RuntimeError where no case is left or, with several ranks, one fails.
    """
    corpus = CORPORA[name]
    writer = RecordingWriter(corpus.title, kernels.source())
    corpus.build(writer, group, kernels, report)
    if not writer.cases:
        raise RuntimeError(f"{name}: every case failed")
    if group.rank_in_group == 0:
        writer.write(folder / f"{name}.safetensors")
    return len(writer.cases)


def _special_values(build: Callable, writer: RecordingWriter, group: EpGroup, kernels: Kernels, report: Report) -> None:
    def run(scheme, options, weights, inputs, capacity, previous):
        launches = kernels.launch(
            scheme, options, weights, inputs, max_tokens_per_rank=capacity, previous_topk_ids=previous
        )
        if not alike(launches):
            raise UnsteadyError(f"{scheme}: {len(launches)} launches gave different bits")
        return launches[0]

    build(writer, run, report)


def _problems(writer: RecordingWriter, group: EpGroup, kernels: Kernels, report: Report) -> None:
    def run(scheme, options, weights, inputs, capacity):
        return kernels.launch(scheme, options, weights, inputs, max_tokens_per_rank=capacity)

    build_problems(writer, run, report)


def _wide(writer: RecordingWriter, group: EpGroup, kernels: Kernels, report: Report) -> None:
    from .flashinfer_wide import record_wide

    record_wide(writer, report, kernels.launch)


def _probes(writer: RecordingWriter, group: EpGroup, kernels: Kernels, report: Report) -> None:
    from .triton_probe import record_chains  # which needs Triton

    record_chains(writer, report)


def _tensor_core(writer: RecordingWriter, group: EpGroup, kernels: Kernels, report: Report) -> None:
    from .triton_probe import record_probes  # which needs Triton

    record_probes(writer, report)


def _ranks(writer: RecordingWriter, group: EpGroup, kernels: Kernels, report: Report) -> None:
    rank, size = group.rank_in_group, group.world_size

    def run(scheme: str, options: dict, weights: MoEWeights, inputs: list[MoEInputs], capacity: int):
        places = {"max_tokens_per_rank": capacity, "ep_rank": rank, "ep_size": size}
        mine = kernels.launch(scheme, options, weights, inputs[rank], **places)
        return [list(outputs) for outputs in zip(*_of_all_ranks(mine, group), strict=True)]

    build_ranks(writer, run, report)
    stop_runtime()


def _adapter(writer: RecordingWriter, group: EpGroup, kernels: Kernels, report: Report) -> None:
    rank, size = group.rank_in_group, group.world_size
    device = "cuda" if kernels.adapted is None else "cpu"
    adapters = []  # the last one destroyed ends NVSHMEM

    def run(backend: str, problem: Problem) -> dict[str, torch.Tensor]:
        layer = problem.build()
        parts = adapter_parts(layer, backend, group, device=device)
        options: dict = {
            "apply_topk_in_fc1": True,
            "ep_group": group,
            "kernel": kernels.adapted,
            "options": problem.options,
        }
        adapter = FlashInferMoeEp(*parts, **options)
        adapters.append(adapter)
        adapter.warmup()
        batch = batch_of(layer, backend, rank, device=device)
        passes = {"eager": adapter(*batch).cpu()}
        if device == "cuda" and size == 1:
            passes["captured"] = _captured(adapter, batch)
        passes["experts moved in place"] = adapter(*rebalance(adapter, batch, ORDER, group)).cpu()
        return {name: torch.cat(_of_all_ranks(output, group)) for name, output in passes.items()}

    build_adapter(writer, size, run, report)
    for adapter in adapters:
        adapter.destroy()


def _captured(adapter: FlashInferMoeEp, batch: Batch) -> torch.Tensor:
    """Captured with a batch of zeros, replayed with this one."""
    fixed = [torch.zeros_like(tensor) for tensor in batch]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = adapter(fixed[0], fixed[1], fixed[2])
    for place, tensor in zip(fixed, batch, strict=True):
        place.copy_(tensor)
    graph.replay()
    return output.cpu()


#: Name of the file -> how it is made.
CORPORA: dict[str, Corpus] = {
    "h200_adapter_1": Corpus(1, "The adapter over live kernels, 1 EP rank", _adapter),
    "h200_special_values": Corpus(
        1,
        "Special values, routing, scales, clamps and knobs, small problems",
        partial(_special_values, build_special_values),
    ),
    "h200_large": Corpus(1, "H 7168 and I 2048: a DeepSeek-V3 expert's shape", partial(_special_values, build_large)),
    "h200_problems": Corpus(1, "The harness's own problems, rounding ties and poisoned padding among them", _problems),
    "h200_tensor_core": Corpus(
        1,
        "wgmma chains with an accumulator operand (Triton's tl.dot), ex2.approx and rcp.approx",
        _tensor_core,
        ("triton",),
    ),
    "h200_wide": Corpus(1, "Every SM90 scheme over sizes, routings, values, clamps and knobs", _wide),
    "h200_probes": Corpus(
        1, "wgmma probed: small cases and millions of random outputs of each operand format", _probes, ("triton",)
    ),
    "h200_two_ranks": Corpus(2, "Two EP ranks: every scheme, uneven and missing tokens, opt-in variants", _ranks),
    "h200_adapter_2": Corpus(2, "The adapter over live kernels, 2 EP ranks", _adapter),
}
