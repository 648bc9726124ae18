"""Layers whose output is known by hand: experts that give value * x^2, router logits that are the routing weights."""

from itertools import pairwise

import torch

from fp4ep.parity.generate import normal
from fp4ep.parity.problem import Problem
from fp4ep.reference.layer import (
    LayerInputs,
    MoELayer,
    SharedExperts,
    moe_layer_forward,
)
from fp4ep.reference.routing import find_router
from fp4ep.reference.scheme import Scheme
from fp4ep.reference.schemes import find_scheme, options_of
from fp4ep.reference.types import MoEWeights

BF16 = find_scheme("sm90_bf16_bf16_bf16_pull_cutedsl")
NVFP4 = find_scheme("sm90_fp8_nvfp4_bf16_pull_cutedsl")
SM100 = "sm100_nvfp4_nvfp4_bf16_cutedsl"
FP8 = "sm90_fp8_fp8_bf16_pull_cutedsl"
SCHEMES = [
    NVFP4,
    find_scheme("sm90_fp8_mxfp4_bf16_pull_cutedsl"),
    find_scheme(FP8, fp8_scale_mode="per_tensor", fc1_activation_dequant_scale=0.02),
    find_scheme(FP8, fp8_scale_mode="blockwise"),
    BF16,
    find_scheme(SM100),
    find_scheme(SM100, apply_routing_weights_before_fc2=False),
]
HIDDEN, WIDTH, EXPERTS = 256, 64, 8

#: The routing weight is the logit itself, in float32, so that tests can set it.
GIVEN = find_router("TopK", weight_dtype=torch.float32)
RENORMALIZE = find_router("Renormalize")
LARGE = 64.0  #: silu(64) is 64


def bilinear(*values: float, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 and w2 of a dense expert per value. A token that holds x in channel 0 and else zeros gives value * x^2 in
    every channel, exactly where bf16 holds it: the gate is 64 x, large enough for silu(gate) = gate."""
    w13 = torch.zeros(len(values), 2 * width, HIDDEN)
    w13[:, 0, 0], w13[:, width, 0] = LARGE, torch.tensor(values) / LARGE
    w2 = torch.zeros(len(values), HIDDEN, width)
    w2[:, :, 0] = 1
    return w13.bfloat16(), w2.bfloat16()


def experts(*values: float) -> MoEWeights:
    return MoEWeights(*bilinear(*values))


def shared_of(value: float) -> SharedExperts:
    w13, w2 = bilinear(value)
    return SharedExperts(w13[0], w2[0])


def tokens(*x: float) -> torch.Tensor:
    hidden = torch.zeros(len(x), HIDDEN)
    hidden[:, 0] = torch.tensor(x)
    return hidden.bfloat16()


def given(*rows: list[float], x: float = 1.0) -> LayerInputs:
    """Tokens with these routing weights, one for each expert."""
    return LayerInputs(tokens(*[x] * len(rows)), torch.tensor(rows))


def value_of(output: torch.Tensor) -> list[float]:
    """The one value of each row."""
    assert bool((output == output[:, :1]).all())
    return output[:, 0].tolist()


def run(layer: MoELayer, weights: MoEWeights, inputs: LayerInputs) -> list[float]:
    output, _ = moe_layer_forward(layer, weights, inputs)
    assert isinstance(output, torch.Tensor)
    return value_of(output)


def problem(scheme: Scheme, count: int = 12, hidden: int = HIDDEN) -> tuple[MoEWeights, LayerInputs]:
    made = Problem(scheme.name, options_of(scheme), (count,), EXPERTS, 2, hidden, 128).build()
    return made.weights, LayerInputs(made.inputs[0].hidden_states, normal(77, (count, EXPERTS), 1.0).float())


def spread(inputs: LayerInputs, counts: list[int]) -> list[LayerInputs]:
    ends = torch.tensor([0, *counts]).cumsum(0).tolist()
    return [LayerInputs(inputs.hidden_states[a:b], inputs.router_logits[a:b]) for a, b in pairwise(ends)]


def random_shared(tp_size: int = 1, width: int = 64) -> SharedExperts:
    return SharedExperts(normal(91, (2 * width, HIDDEN), 0.1), normal(92, (HIDDEN, width), 0.1), tp_size)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))
