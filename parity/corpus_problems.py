"""The problems of `problem.py` as a recording: every case by every arithmetic, and sums in order of arrival."""

from collections.abc import Callable
from typing import Any

import torch

from fp4ep.reference.types import MoEInputs, MoEWeights

from .corpus import BF16, FP8, MXFP4, NVFP4
from .problem import CASES, Problem
from .recording import Case, RecordingWriter, alike

#: (scheme name, kernel options, weights, inputs, max_tokens_per_rank) -> the output of each of three launches.
RunLaunches = Callable[[str, dict, MoEWeights, MoEInputs, int], list[torch.Tensor]]

_STATIC: dict[str, Any] = {"fc1_activation_dequant_scale": 2.0**-6, "fc2_activation_dequant_scale": 2.0**-5}
_BLOCKWISE: dict[str, Any] = {"fp8_scale_mode": "blockwise"}
_REDUCED: dict[str, Any] = {"enable_in_kernel_fc2_reduce": True}
_CAPACITY = 32

PROBLEMS: dict[str, Problem] = {
    f"problem: {name}, {scheme} {options}": Problem(scheme, options, **case)
    for scheme, options in ((NVFP4, {}), (MXFP4, {}), (FP8, _STATIC), (FP8, _BLOCKWISE), (BF16, {}))
    for name, case in CASES.items()
    if "tokens" not in case  # made for several ranks
} | {
    f"problem: routes added on arrival, top-k {top_k}, {scheme} {options}": Problem(
        scheme, options | _REDUCED, top_k=top_k, num_experts=16, routing="masked" if top_k == 4 else "uniform"
    )
    for scheme, options in ((FP8, _STATIC), (FP8, _BLOCKWISE), (BF16, {}))
    for top_k in (4, 8)
}


def build_problems(writer: RecordingWriter, run: RunLaunches, report: Callable[[str], None]) -> None:
    """A failing case is reported and left out; the others go on."""
    for title, problem in PROBLEMS.items():
        layer = problem.build()
        (inputs,) = layer.inputs
        reduced = "enable_in_kernel_fc2_reduce" in problem.options
        try:
            launches = run(problem.scheme, dict(problem.options), layer.weights, inputs, _CAPACITY)
            same = alike(launches)
            if not (same or reduced):
                raise RuntimeError("launches differ")
        except Exception as error:
            report(f"LEFT OUT {title}: {error!r}")
            continue
        roles = writer.problem_roles(title, problem, layer)
        for launch, output in enumerate(launches if reduced else launches[:1]):
            name = f"output.{len(writer.cases)}"
            writer.store(name, output, "xz")
            short = title.split(", sm90")[0] + f", launch {launch + 1}" * reduced
            settings: dict[str, object] = {"max_tokens_per_rank": _CAPACITY, "world_size": 1}
            repeats = 1 if reduced else len(launches)
            case = Case(
                short, "moe", problem.scheme, {**roles, "output": name}, dict(problem.options), settings, repeats
            )
            writer.cases.append(case)
        report(f"{title}: recorded, launches {'same' if same else 'differ'}, {int(launches[0].isnan().sum())} NaN")
