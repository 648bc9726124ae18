"""What the adapter gives over live kernels, as a recording: eager, captured, and after experts changed places."""

from collections.abc import Callable
from typing import Any

import torch

from fp4ep.optimized.backends import FLASHINFER_MOE_EP_SM90_BACKENDS, flashinfer_moe_ep_backend_spec

from .corpus import BF16, FP8, MXFP4, NVFP4
from .problem import Problem
from .recording import Case, RecordingWriter, alike

#: (backend, problem) -> by name of a pass, the output of all ranks, `[T, H]`; every pass must give the same.
RunAdapter = Callable[[str, Problem], dict[str, torch.Tensor]]

#: Scheme's name -> the backend that runs it.
BACKENDS = {flashinfer_moe_ep_backend_spec(name).registry_name: name for name in FLASHINFER_MOE_EP_SM90_BACKENDS}
#: Physical expert p becomes what ORDER[p] was: within ranks, between two, and one stays.
ORDER = (5, 0, 2, 7, 1, 4, 6, 3)

_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (NVFP4, {}),
    (NVFP4, {"nvfp4_kperm": 32}),
    (MXFP4, {}),
    (FP8, {}),
    (FP8, {"fp8_scale_mode": "blockwise"}),
    (BF16, {}),
)
_TOKENS = {1: (20,), 2: (12, 7)}


def problems(ep_size: int) -> list[Problem]:
    # No masked slots: the bf16 kernel adds what an earlier launch left in them.
    return [Problem(scheme, options, tokens=_TOKENS[ep_size], num_experts=8) for scheme, options in _VARIANTS]


def build_adapter(writer: RecordingWriter, ep_size: int, run: RunAdapter, report: Callable[[str], None]) -> None:
    """One case for each problem. Raises RuntimeError where two passes differ."""
    for problem in problems(ep_size):
        backend = BACKENDS[problem.scheme]
        passes = run(backend, problem)
        first, *others = passes.values()
        for name, output in zip(list(passes)[1:], others, strict=True):
            if not alike([first, output]):
                raise RuntimeError(f"{backend} {problem.options}: {name} differs from {next(iter(passes))}")
        layer, index = problem.build(), len(writer.cases)
        roles = writer.problem_roles(str(index), problem, layer)
        writer.store(f"output.{index}", first, "xz")
        settings = {"world_size": ep_size, "tokens_per_rank": list(problem.tokens), "moe_backend": backend}
        title = f"adapter, {ep_size} rank{'s' * (ep_size > 1)}: {', '.join(passes)}"
        options, outputs = dict(problem.options), {**roles, "output": f"output.{index}"}
        writer.cases.append(Case(title, "moe", problem.scheme, outputs, options, settings, len(passes)))
        report(f"{backend} {options}: recorded")
