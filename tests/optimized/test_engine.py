"""The CPU engine's layer: the reference's bits at every stage, on every SM90 scheme, problem and recording."""

from dataclasses import fields, replace
from functools import cache

import pytest
import torch

from fp4ep.optimized import engine_cpu
from fp4ep.optimized.emulation import NOT_EMULATED
from fp4ep.optimized.engine_cpu import fast_forward, missing_for_engine
from fp4ep.parity.order_set import reachable
from fp4ep.parity.problem import Layer, problems
from fp4ep.parity.recording import Recording
from fp4ep.parity.replay import compare_bits, shipped_recordings, split_tokens
from fp4ep.parity.sides import SIDES
from fp4ep.reference.exchange import exchange_in_process
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.scheme import Combine, Scheme
from fp4ep.reference.schemes import SCHEMES as ALL_SCHEMES
from fp4ep.reference.schemes import find_scheme, options_of
from fp4ep.reference.types import MoEInputs, MoEWeights, Trace

needs_numba = pytest.mark.skipif(missing_for_engine() is not None, reason=str(missing_for_engine()))

SCHEMES = [scheme for scheme in ALL_SCHEMES if scheme.weights not in NOT_EMULATED]
NVFP4 = SCHEMES[0]
MXFP4 = find_scheme("sm90_fp8_mxfp4_bf16_pull_cutedsl")
#: The first of the schemes that read weights and quantize alike.
FIRST = list({(s.weights, s.stage): s for s in reversed(SCHEMES)}.values())
NAN, INF = float("nan"), float("inf")


def run(at: Layer, workspace: list[torch.Tensor] | None = None) -> Trace:
    place = {"ranks": range(at.ep_size), "ep_size": at.ep_size, "exchange": exchange_in_process}
    return fast_forward(at.scheme, at.weights, at.inputs, **place, workspace=workspace)


@cache
def layer(scheme: Scheme, case: str, ep_size: int | None = None) -> Layer:
    problem = problems(scheme.name, options_of(scheme), num_experts=4, tokens=(8,))[case]
    return (problem.over(ep_size) if ep_size else problem).build()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.contiguous().view(integer)


def assert_same_trace(found: Trace, expected: Trace) -> None:
    """Every tensor of every stage, NaN included, and what it claims."""
    assert [(s.name, s.rank, s.exactness) for s in found] == [(s.name, s.rank, s.exactness) for s in expected]
    for mine, other in zip(found, expected, strict=True):
        assert list(mine.tensors) == list(other.tensors)
        for name, tensor in mine.tensors.items():
            wanted = other.tensors[name]
            assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape), (mine.name, name)
            assert torch.equal(bits(tensor), bits(wanted)), (mine.name, mine.rank, name)


@needs_numba
@pytest.mark.parametrize("case", ["values at ties", "masked slots"])
@pytest.mark.parametrize("scheme", FIRST, ids=str)
def test_every_stage_is_the_references(scheme, case):
    at = layer(scheme, case)
    assert_same_trace(run(at), moe_forward(scheme, at.weights, at.inputs)[1])


@needs_numba
@pytest.mark.parametrize("scheme", FIRST, ids=str)
def test_special_values(scheme):
    """NaN and infinity in tokens and in routing weights, and rows at the edges of the formats."""
    at = layer(scheme, "values at ties")
    x, weights = at.inputs[0].hidden_states.clone(), at.inputs[0].topk_weights.clone()
    x[0, 3], x[1, 5], x[2, 7], x[3, :] = NAN, INF, -INF, 0.0
    x[4] *= 1e-30
    x[5] *= 1e30
    x[6] = torch.where(torch.arange(x.shape[1]) % 2 == 0, 2.0**-133, -0.0)
    weights[7, 0] = NAN
    at = replace(at, inputs=(replace(at.inputs[0], hidden_states=x, topk_weights=weights),))
    assert_same_trace(run(at), moe_forward(scheme, at.weights, at.inputs)[1])


@needs_numba
@pytest.mark.parametrize("scheme", FIRST, ids=str)
def test_any_number_of_ranks_is_one(scheme):
    def outputs(ep_size: int) -> torch.Tensor:
        trace = run(layer(scheme, "masked slots", ep_size))
        return torch.cat([s.tensors["values"] for s in trace if s.name == "combine"])

    assert torch.equal(bits(outputs(2)), bits(outputs(1)))
    assert torch.equal(bits(outputs(4)), bits(outputs(1)))


@needs_numba
def test_without_routes():
    at = layer(NVFP4, "values at ties")
    masked = replace(at.inputs[0], topk_ids=torch.full_like(at.inputs[0].topk_ids, -1))
    at = replace(at, inputs=(masked,))
    assert_same_trace(run(at), moe_forward(NVFP4, at.weights, at.inputs)[1])


@needs_numba
@pytest.mark.parametrize("top", [139, 160, 255])
def test_mxfp4_scales_that_wrap(top):
    """Every code under every scale from 0 to the expert's largest; from 128 below it on the kernel's table wraps."""
    g = torch.Generator().manual_seed(top)
    legs = [torch.randint(0, 256, (2, n, k // 2), generator=g, dtype=torch.uint8) for n, k in ((256, 128), (128, 128))]
    scales = [torch.randint(0, top + 1, (2, n, 4), generator=g, dtype=torch.uint8) for n in (256, 128)]
    for scale in scales:
        scale[:, 0, 0] = top
        scale[:, 1, 0] = 0
    x = torch.randn(16, 128, generator=g).bfloat16() * 2.0**-100
    inputs = MoEInputs(x, torch.arange(32).reshape(16, 2) % 2, torch.ones(16, 2))
    weights = MoEWeights(*legs, *scales)
    assert_same_trace(run(Layer(MXFP4, weights, (inputs,))), moe_forward(MXFP4, weights, [inputs])[1])


def recorded_cases() -> list:
    return [
        pytest.param(path, index, id=f"{path.stem}-{index}-{case.title}")
        for path in shipped_recordings()
        if path.stem not in ("h200_large", "h200_problems")  # which take long
        for index, case in enumerate(Recording(path).cases)
        if case.kind == "moe" and "output" in case.tensors  # those kept as digests are the engine's own in a replay
    ]


@cache
def recording(path) -> Recording:
    return Recording(path)


@needs_numba
@pytest.mark.parametrize(("path", "index"), recorded_cases())
def test_recorded_output(path, index):
    """What the H200 gave, bit for bit; where it adds routes on arrival, some order of the terms gives it."""
    case = recording(path).cases[index]
    roles = recording(path).roles(case)
    scheme = find_scheme(case.scheme, **case.options)
    inputs = MoEInputs(**{f.name: roles[f.name] for f in fields(MoEInputs) if f.name in roles})
    weights = MoEWeights(**{f.name: roles[f.name] for f in fields(MoEWeights) if f.name in roles})
    workspace = None
    if (previous := roles.get("previous_topk_ids")) is not None:
        earlier = run(Layer(scheme, weights, (replace(inputs, topk_ids=previous),)))
        workspace = [earlier["combine"].tensors["terms"]]
    ranks = split_tokens(inputs, case.tokens_per_rank or [len(inputs.hidden_states)])
    trace = run(Layer(scheme, weights, tuple(ranks)), workspace)
    terms, found = (torch.cat([s.tensors[n] for s in trace if s.name == "combine"]) for n in ("terms", "values"))
    if scheme.combine is Combine.ON_ARRIVAL:
        found = torch.where(reachable(roles["output"], terms, roles["topk_ids"]), roles["output"], found)
    assert compare_bits(found, roles["output"]) == (0, None)


@needs_numba
def test_a_token_alone_gives_what_it_gives_in_a_batch():
    at = layer(NVFP4, "values at ties")
    x = at.inputs[0]
    one = [MoEInputs(*(t[i : i + 1] for t in (x.hidden_states, x.topk_ids, x.topk_weights))) for i in range(8)]
    rows = [run(replace(at, inputs=(each,)))["combine"].tensors["values"] for each in one]
    assert torch.equal(bits(torch.cat(rows)), bits(run(at)["combine"].tensors["values"]))


# --- what it refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", NOT_EMULATED)
def test_what_it_lacks_is_refused(weights):
    scheme = next(s for s in ALL_SCHEMES if s.weights is weights)
    at = layer(NVFP4, "values at ties")
    what = f"^scheme: the engine has no {NOT_EMULATED[weights]} and cannot run {scheme.name}"
    with pytest.raises(ValueError, match=what):
        run(replace(at, scheme=scheme))


def test_without_numba_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(engine_cpu, "find_spec", lambda name: None)
    engine_cpu._kernels.cache_clear()
    reason = SIDES["fast"].missing()
    assert reason == "numba is not installed: pip install 'fp4ep[engine]'"
    with pytest.raises(RuntimeError, match="fp4ep"):
        run(layer(NVFP4, "values at ties"))
