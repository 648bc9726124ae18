"""Runs of small problems, for tests of what compares them."""

from dataclasses import replace

import torch

from fp4ep.optimized.fake_quant import fake_quant_forward
from fp4ep.parity.problem import Layer, Problem
from fp4ep.parity.run import REFERENCE, Claim, Run, outputs_as_trace
from fp4ep.reference.exchange import exchange_in_process
from fp4ep.reference.moe import Intervention, moe_forward
from fp4ep.reference.types import Stage

NVFP4 = "sm90_fp8_nvfp4_bf16_pull_cutedsl"


def reference_run(problem: Problem, intervene: Intervention | None = None, layer: Layer | None = None) -> Run:
    """layer: what is really computed, where that is not the problem's own."""
    built = problem.build()
    used = layer or built
    _, trace = moe_forward(used.scheme, used.weights, used.inputs, intervene=intervene)
    return Run(REFERENCE, Claim.BITS, built, trace, problem)


def fake_quant_run(problem: Problem) -> Run:
    built = problem.build()
    ranks = range(built.ep_size)
    trace = fake_quant_forward(
        built.scheme,
        built.weights,
        built.inputs,
        ranks=ranks,
        ep_size=built.ep_size,
        exchange=exchange_in_process,
    )
    return Run("fake_quant", Claim.FLOAT32, built, trace, problem)


def black_box(run: Run) -> Run:
    """The same run, showing its outputs only."""
    return replace(run, side="black box", trace=outputs_as_trace(run.outputs()))


def change(stage: str, tensor: str, edit, rank: int = 0) -> Intervention:
    """edit: called with a copy of that tensor, which it changes in place."""

    def intervene(made: Stage) -> Stage:
        if (made.name, made.rank) != (stage, rank):
            return made
        changed = made.tensors[tensor].clone()
        edit(changed)
        return replace(made, tensors={**made.tensors, tensor: changed})

    return intervene


def next_code(values: torch.Tensor, place: tuple[int, ...]) -> None:
    """Move one element of a one-byte float tensor to the next code of larger magnitude, or from the largest down."""
    codes = values.view(torch.uint8)
    codes[place] += -1 if int(codes[place]) & 0x7F == 0x7E else 1
