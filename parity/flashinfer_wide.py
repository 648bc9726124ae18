"""Record the wide corpus on FlashInfer's kernels, many at a time: each compiles anew, for seconds, on one core."""

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import torch

from fp4ep.optimized.flashinfer_sm90 import capacity_for, launch_megakernel
from fp4ep.reference.schemes import options_of

from .corpus import BF16, FP8, MXFP4, NVFP4, PUSH
from .corpus_wide import Entry, entries, knob_entries
from .pool import Failure, run_each
from .problem import Layer, Problem
from .recording import Case, RecordingWriter, alike, problem_layer, row_digests
from .sides import flashinfer_options

#: Worker processes at most; each has a CUDA context of its own.
_WORKERS = 14
#: Seconds that a case may take, compilation included.
_TIMEOUT = 150.0


@dataclass(frozen=True)
class _Answer:
    """What came back from a worker, as arrays: a tensor would travel as a handle that dies with the process.

    launches: the bits of every launch, int16, where they may differ; else none, and the digests stand for all.
    """

    digests: np.ndarray
    launches: tuple[np.ndarray, ...]
    nan: int


def record_wide(
    writer: RecordingWriter,
    report: Callable[[str], None],
    launch: Callable[..., list[torch.Tensor]] = launch_megakernel,
    todo: list[Entry] | None = None,
) -> None:
    """Fill the writer with every entry of `corpus_wide`, in order. A case that fails is reported as LEFT OUT, the
    others go on.

    launch: as `launch_megakernel`, a function of a module; todo: None for all entries, with FlashInfer's own knobs.
    """
    todo = [*entries(), *knob_entries(settings)] if todo is None else todo
    answers: dict[int, _Answer | Failure] = {}
    recorded: dict[str, dict[str, str]] = {}
    elements = written = 0
    for index, answer in run_each(partial(_launched, launch), todo, min(_WORKERS, os.cpu_count() or 1), _TIMEOUT):
        answers[index] = answer
        problem, config = todo[index].problem, todo[index].config
        what = f"{problem.scheme} {dict(problem.options)} {todo[index].title}"
        if isinstance(answer, Failure):
            report(f"LEFT OUT {what} {dict(config)}: {answer.reason}")
        else:
            elements += sum(problem.tokens) * problem.hidden
            report(f"{what}: {answer.nan} NaN; {len(answers)} of {len(todo)}, {elements:,} elements")
        while written in answers:  # in order, while others run
            ready = answers[written]
            if not isinstance(ready, Failure):
                _add(writer, todo[written], ready, recorded)
            written += 1


def _launched(launch: Callable[..., list[torch.Tensor]], entry: Entry) -> _Answer:
    """Three launches. Raises RuntimeError where they differ and may not."""
    layer = entry.problem.build()
    (inputs,) = layer.inputs
    capacity = capacity_for(len(inputs.hidden_states))
    told = _told(entry, layer)
    outputs = launch(layer.scheme.name, told, layer.weights, inputs, max_tokens_per_rank=capacity)
    if not (entry.on_arrival or alike(outputs)):
        raise RuntimeError(f"{len(outputs)} launches gave different bits")
    bits = tuple(output.view(torch.int16).numpy() for output in outputs * entry.on_arrival)
    return _Answer(row_digests(outputs[0]).numpy(), bits, int(outputs[0].isnan().sum()))


def _told(entry: Entry, layer: Layer) -> dict[str, Any]:
    return {**flashinfer_options(layer.scheme), **entry.config}


def _add(writer: RecordingWriter, entry: Entry, answer: _Answer, recorded: dict[str, dict[str, str]]) -> None:
    """recorded: a problem as JSON -> its tensors in the writer, by role."""
    problem = entry.problem.as_json()
    layer = problem_layer(problem)
    options = options_of(layer.scheme)
    rest = {name: value for name, value in _told(entry, layer).items() if name not in options}
    config = {"max_tokens_per_rank": capacity_for(len(layer.inputs[0].hidden_states)), "world_size": 1, **rest}
    key = json.dumps(problem)
    if key not in recorded:
        recorded[key] = writer.problem_roles(f"problem {len(recorded)}", entry.problem, layer)

    def add(title: str, role: str, output: torch.Tensor, encoding: str, launches: int) -> None:
        name = f"output.{len(writer.cases)}"
        writer.store(name, output, encoding)
        tensors = {**recorded[key], role: name}
        writer.cases.append(Case(title, "moe", layer.scheme.name, tensors, options, config, launches))

    if not answer.launches:
        add(entry.title, "output_rows", torch.from_numpy(answer.digests), "raw", 3)
    for n, bits in enumerate(answer.launches, 1):
        add(f"{entry.title}, launch {n}", "output", torch.from_numpy(bits).view(torch.bfloat16), "xz", 1)


# --- knobs that may not change bits --------------------------------------------------------------------------------

#: Where FlashInfer lists whole tactics for its tuner: scheme -> module, function.
_LISTED = {
    NVFP4: ("nvfp4_tuner", "hopper_nvfp4_candidates"),
    MXFP4: ("mxfp4_optimization", "hopper_mxfp4_candidates"),
}
#: Where it lists knobs only, of which settings are drawn.
_KNOBS = {FP8: "tuner", BF16: "tuner_bf16"}
_DRAWN = 36
#: Of its knobs "without effect on the output" one has an effect (`fp8_accum_mode`), of the others two have none.
_HELD = {"fp8_accum_mode": "1xacc"}
_FREE = ("token_back_mode", "load_balance_mode")


def settings(problem: Problem) -> Iterator[Mapping[str, Any]]:
    """Fields of FlashInfer's config that may not change bits: every tactic that its tuner would try for the problem's
    sizes or, for FP8 and bf16, draws from the knobs that its tuner varies."""
    shim = "flashinfer.moe_ep.kernel_src.sm90.pull_style_cutedsl_megakernel.shim"
    if problem.scheme in _LISTED:
        module, function = _LISTED[problem.scheme]
        sizes = {"hidden": problem.hidden, "intermediate": problem.intermediate, "num_experts": problem.num_experts}
        for knobs in getattr(import_module(f"{shim}.{module}"), function)(128, **sizes, world_size=1):
            yield {"knobs": knobs}
        if problem.scheme == NVFP4:
            tile = {"mma_tiler_mnk": (256, 16, 256)}
            yield from ({**tile, "nvfp4_fc1_k256_overlap": overlap} for overlap in (False, True))
        return
    if problem.scheme == PUSH:
        names = {"payload_dtype": ("fp8", "bf16"), "dedup_dispatch": (True, False), "fuse_fc1_epilogue": (False, True)}
        yield from (dict(zip(names, values, strict=True)) for values in product(*names.values()))
        return
    tuner = import_module(f"{shim}.{_KNOBS[problem.scheme]}")
    values = {**tuner.PERF_KNOBS, **{name: tuner.CORRECTNESS_KNOBS[name] for name in _FREE}}
    draw, found = random.Random(problem.seed), 0
    while found < _DRAWN:
        knobs = {name: draw.choice(choices) for name, choices in values.items()} | {
            name: value for name, value in _HELD.items() if name in values
        }
        if tuner.is_valid(knobs):
            found += 1
            yield {"knobs": knobs}
