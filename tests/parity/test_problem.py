"""Problems: the same on every rank and call, every pattern as it promises, and what does not fit is refused by name."""

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ep.parity import problem as module
from fp4ep.parity.generate import normal
from fp4ep.parity.metrics import bits
from fp4ep.parity.problem import CASES, ROUTING, VALUES, Layer, Problem, problems
from fp4ep.parity.recording import sha256
from fp4ep.reference.exchange import combine
from fp4ep.reference.formats import E2M1, Format
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.quantize import SCALE_FLOOR, quantize_activation, quantize_nvfp4
from fp4ep.reference.scales import ScaleRule, ue8m0_scale
from fp4ep.reference.scheme import ScaleSource, Scheme
from fp4ep.reference.schemes import SCHEMES, find_scheme, options_of

NVFP4 = "sm90_fp8_nvfp4_bf16_pull_cutedsl"
MXFP4 = "sm90_fp8_mxfp4_bf16_pull_cutedsl"
FP8 = "sm90_fp8_fp8_bf16_pull_cutedsl"
BF16 = "sm90_bf16_bf16_bf16_pull_cutedsl"
SM100 = "sm100_nvfp4_nvfp4_bf16_cutedsl"
PUSH = "sm90_fp8_fp8_bf16_push_cuda"
SMALL = Problem(NVFP4, hidden=64, intermediate=64)

#: A record for every staging rule: scales from the amax, static ones that are powers of two, and one that is not.
_RULES = {scheme.stage: scheme for scheme in reversed(SCHEMES)}
DYNAMIC = [s for rule, s in _RULES.items() if rule and rule.source is ScaleSource.AMAX and rule.scale is None]
STATIC = [
    find_scheme(FP8, kind=kind, fc1_activation_dequant_scale=scale)
    for kind in ("fp8_e4m3", "fp8_e5m2")
    for scale in (1.0, 2.0**-9, 8.0)
]
ODD = find_scheme(FP8, fc1_activation_dequant_scale=0.3)


def shown(scheme: Scheme) -> str:
    return f"{scheme} static {scheme.fc1_activation_dequant_scale}" if scheme in [*STATIC, ODD] else str(scheme)


def problem(scheme: Scheme, **fields: Any) -> Problem:
    return Problem(scheme.name, options_of(scheme), **fields)


def tensors(layer: Layer) -> dict[str, torch.Tensor]:
    """Every tensor; those of the tokens joined over the ranks."""
    weights = {name: t for name, t in vars(layer.weights).items() if t is not None}
    names = ("hidden_states", "topk_ids", "topk_weights")
    return weights | {name: torch.cat([getattr(x, name) for x in layer.inputs]) for name in names}


def digests(layer: Layer) -> dict[str, str]:
    return {name: sha256(tensor) for name, tensor in tensors(layer).items()}


# --- the same tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [NVFP4, MXFP4, FP8, BF16])
@pytest.mark.parametrize("values", VALUES)
def test_two_builds_are_alike(scheme, values):
    made = Problem(scheme, tokens=(3, 2), num_experts=2, values=values, routing="masked", padding=1, seed=4)
    assert digests(made.build()) == digests(made.build())


def test_a_seed_changes_every_tensor():
    one, two = (digests(replace(SMALL, seed=seed).build()) for seed in (0, 1))
    assert [name for name in one if one[name] == two[name]] == []


@settings(max_examples=40, deadline=None)
@given(
    values=st.sampled_from(list(VALUES)),
    routing=st.sampled_from(list(ROUTING)),
    tokens=st.sampled_from([1, 2, 4, 8]).flatmap(lambda ranks: st.tuples(*[st.integers(0, 6)] * ranks)),
)
def test_any_split_holds_the_same_tokens(values, routing, tokens):
    """Ranks without tokens, and no tokens at all, among them."""
    whole = replace(SMALL, values=values, routing=routing, top_k=3, tokens=(sum(tokens),))
    layer = replace(whole, tokens=tokens).build()
    assert tuple(len(x.hidden_states) for x in layer.inputs) == tokens
    assert layer.ep_size == len(tokens)
    assert digests(layer) == digests(whole.build())


@given(
    tokens=st.lists(st.integers(0, 1000), min_size=1, max_size=4),
    ep_size=st.sampled_from([n for n in range(1, 25) if 24 % n == 0]),
)
def test_over_splits_evenly(tokens, ep_size):
    whole = replace(SMALL, tokens=tuple(tokens), num_experts=24)
    split = whole.over(ep_size)
    assert split.ep_size == ep_size
    assert sum(split.tokens) == sum(tokens)
    assert max(split.tokens) - min(split.tokens) <= 1
    assert replace(split, tokens=whole.tokens) == whole


@pytest.mark.parametrize("ep_size", [0, -1, 3, 16])
def test_over_a_number_of_ranks_that_does_not_divide_the_experts(ep_size):
    with pytest.raises(
        ValueError, match=r"^tokens must be a tuple with a whole number >= 0 for each .* divide the 8 experts"
    ):
        SMALL.over(ep_size)


# --- hidden states -----------------------------------------------------------------------------------------------


def hidden_states(scheme: Scheme, values: str, tokens: int = 16) -> torch.Tensor:
    return tensors(problem(scheme, values=values, tokens=(tokens,)).build())["hidden_states"]


def midpoints(element: Format) -> torch.Tensor:
    """float64, ascending: entry c is halfway between codes c and c + 1."""
    values = element.values[: element.max_code + 1].double()
    return (values[1:] + values[:-1]) / 2


def scaled(scheme: Scheme, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Staging's blocks, float64 `[T, blocks, block]`, and the float32 scale of each, as float64 `[T, blocks, 1]`."""
    rule = scheme.stage
    assert rule is not None
    blocks = x.double().unflatten(1, (-1, rule.block or x.shape[1]))
    if rule.source is ScaleSource.STATIC:
        return blocks, torch.full((*blocks.shape[:2], 1), scheme.fc1_activation_dequant_scale).double()
    amax = blocks.abs().amax(-1, keepdim=True).float().numpy()
    return blocks, torch.from_numpy(amax * (np.float32(1) / np.float32(rule.element.max))).double()


def tied(values: torch.Tensor, scale: torch.Tensor, element: Format) -> torch.Tensor:
    """Which values are a midpoint times their scale; in float64 both sides are exact."""
    return (values.abs()[..., None] == midpoints(element) * scale[..., None]).any(-1)


def rounded(quotient: torch.Tensor, element: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes without sign: ties to the even one, away from zero, towards zero."""
    away, inward = (torch.searchsorted(midpoints(element), quotient.abs(), right=right) for right in (True, False))
    return torch.where(away % 2 == 0, away, inward), away, inward


def staged_codes(scheme: Scheme, x: torch.Tensor) -> torch.Tensor:
    """int64 `[T, H]`, without sign."""
    assert scheme.stage
    return quantize_activation(x, scheme.stage, scheme.fc1_activation_dequant_scale).codes.long() & 0x7F


@pytest.mark.parametrize("scheme", DYNAMIC + STATIC, ids=shown)
def test_ties(scheme):
    """Every value but a block's maximum is a midpoint, every midpoint occurs, and half the codes show the tie rule."""
    element = scheme.stage.element
    x = hidden_states(scheme, "ties")
    blocks, scale = scaled(scheme, x)
    assert bool((torch.frexp(scale).mantissa == 0.5).all())
    top = torch.arange(blocks.shape[-1]) == 0
    assert bool((blocks[..., 0] == element.max * scale[..., 0]).all())
    assert torch.equal(tied(blocks, scale, element), ~top.expand(blocks.shape))
    assert torch.equal((blocks / scale)[..., ~top].abs().unique(), midpoints(element))
    even, away, inward = rounded(blocks / scale, element)
    assert torch.equal(staged_codes(scheme, x), even.flatten(1))
    for other in (away, inward):
        assert 0.4 < float((other != even).float().mean()) < 0.6


@pytest.mark.parametrize("scheme", [*DYNAMIC, ODD], ids=shown)
def test_random_data_is_blind_to_ties(scheme):
    """None of 16,384 values is a tie, and the division's own rounding makes ties of one in 300 at most.

    (With a static scale that is a power of two one in 16 is a tie in E4M3: bf16 itself has few digits.)
    """
    element = scheme.stage.element
    x = hidden_states(scheme, "normal", tokens=64)
    blocks, scale = scaled(scheme, x)
    assert not bool(tied(blocks, scale, element).any())
    even, away, inward = rounded(blocks.float() / scale.float(), element)
    assert int((away != inward).sum()) <= even.numel() / 300
    assert int((staged_codes(scheme, x) != even.flatten(1)).sum()) <= (scheme is ODD)  # a product, not this quotient


def test_outliers():
    x, plain = (hidden_states(find_scheme(BF16), values) for values in ("outliers", "normal"))
    channel = torch.arange(256) % 64 == 7
    assert torch.equal(x[:, ~channel], plain[:, ~channel])
    assert torch.equal(x[:, channel], plain[:, channel] * 100)
    assert torch.equal(plain, normal(0, (16, 256), 1.0))


@pytest.mark.parametrize("scheme", DYNAMIC, ids=shown)
def test_tiny(scheme):
    """Down to 1e-33: amax * float32(1/max) is below the floor for some tokens, and fc1 makes them ordinary."""
    layer = problem(scheme, values="tiny").build()
    x = layer.inputs[0].hidden_states
    scale = scaled(scheme, x)[1]
    assert bool((scale[-1] < SCALE_FLOOR / 100).all())
    assert bool((scale > SCALE_FLOOR).any()) == (scheme.stage.element.max < 1000)  # E5M2: the floor catches every row
    assert bool((x[-1] != 0).all())
    output, trace = moe_forward(scheme, layer.weights, layer.inputs[0])
    gate = trace["fc1"].tensors["gate"].abs()
    assert float(gate.max()) > 1
    assert bool(torch.isfinite(gate).all())
    assert bool((output != 0).any())


def test_zeros():
    x = hidden_states(find_scheme(BF16), "zeros")
    bits = x.view(torch.int16)
    assert bits[::2].unique().tolist() == [-(1 << 15), 0]  # -0 and +0
    assert torch.equal(x[1::2], hidden_states(find_scheme(BF16), "normal")[1::2])


@pytest.mark.parametrize("scheme", DYNAMIC, ids=shown)
def test_saturating(scheme):
    """Every code is the format's largest, of either sign."""
    x = hidden_states(scheme, "saturating")
    assert staged_codes(scheme, x).unique().tolist() == [scheme.stage.element.max_code]
    assert x.unique().tolist() == [-7.0, 7.0]


@pytest.mark.parametrize("scheme", STATIC, ids=shown)
def test_saturating_overflows_a_static_scale(scheme):
    """The cast gives NaN or infinity: codes above the largest finite one."""
    assert bool((staged_codes(scheme, hidden_states(scheme, "saturating")) > scheme.stage.element.max_code).any())


@pytest.mark.parametrize("norm", [1.0, 0.25, 16.0])
def test_values_under_a_norm_constant(norm):
    """FP4 codes under E4M3 scales: ties under a scale of 1, every code and scale the largest, scales down to zero."""
    scheme = find_scheme(SM100, input_norm_const=norm)
    staged = {
        values: quantize_activation(hidden_states(scheme, values), scheme.stage, norm_const=norm) for values in VALUES
    }
    assert staged["saturating"].codes.unique().tolist() == [7, 15]
    assert staged["saturating"].scales.unique().tolist() == [126]
    assert float(hidden_states(scheme, "saturating").abs().max()) == 2 * 2688 / norm
    assert staged["ties"].scales.unique().tolist() == [56]
    blocks = (hidden_states(scheme, "ties").float() * norm).unflatten(1, (-1, 16))[..., 1:]
    assert torch.equal(blocks.abs().unique(), midpoints(scheme.stage.element))
    tiny = staged["tiny"].scales
    assert 0.05 < float((tiny == 0).float().mean()) < 0.5
    assert 0.05 < float(((tiny > 0) & (tiny < 8)).float().mean()) < 0.5  # subnormal
    assert bool((staged["zeros"].scales[::2] == 0).all())
    assert staged["zeros"].codes[::2].unique().tolist() == [0, 8]


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("scheme", [*DYNAMIC, STATIC[0], STATIC[3]], ids=shown)
def test_values_leave_something_to_compare(values, scheme):
    """Codes that are neither zero nor NaN, for most of what is not zero by intention."""
    codes = staged_codes(scheme, hidden_states(scheme, values))
    assert float(((codes > 0) & (codes <= scheme.stage.element.max_code)).float().mean()) > 0.4


# --- routing -----------------------------------------------------------------------------------------------------


def topk_ids(routing: str, **fields: Any) -> torch.Tensor:
    return tensors(replace(SMALL, routing=routing, **fields).build())["topk_ids"]


@pytest.mark.parametrize("routing", ROUTING)
def test_routing(routing):
    """int64 ids of experts there are, distinct but where they repeat by intention; positive weights that share one
    whole, but for `cancelling`."""
    made = tensors(replace(SMALL, routing=routing, tokens=(40, 24), top_k=3).build())
    ids, weights = made["topk_ids"], made["topk_weights"]
    assert (ids.dtype, ids.shape, ids.max().item() < 8) == (torch.int64, (64, 3), True)
    assert bool((ids >= 0).all()) == (routing != "masked")
    live = [[e for e in row if e >= 0] for row in ids.tolist()]
    assert all(len(set(row)) == len(row) for row in live) == (routing not in ("duplicates", "cancelling"))
    assert len(weights.unique()) > 50
    if routing == "cancelling":
        assert bool((weights[:, 0] == 2.0**18).all())
        assert bool((weights[:, -1] == -(2.0**18)).all())
        assert bool((ids[:, 0] == ids[:, -1]).all())
        return
    assert bool((weights > 0).all())
    assert bool(((weights.sum(1) - 1).abs() < 1e-6).all())


def test_uniform():
    assert topk_ids("uniform", tokens=(200,)).unique(return_counts=True)[1].min() > 200 * 2 / 8 / 2


def test_skewed():
    """Every token's first route is to one expert, the others are spread."""
    ids = topk_ids("skewed", tokens=(100,), top_k=3)
    assert ids[:, 0].unique().tolist() == [4]
    assert ids[:, 1:].unique().tolist() == [0, 1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_empty_rank(ranks):
    """The last of several ranks gets nothing, whatever their number."""
    assert topk_ids("empty_rank", tokens=(100,) * ranks).unique().tolist() == [0, 1, 2, 3]


def test_cancelling_shows_the_order_of_the_sum():
    """Slots summed the other way round give other bits, which they do not for ordinary routing."""
    changed = {}
    for name in ("cancelling", "uniform"):
        layer = replace(SMALL, scheme=BF16, hidden=256, routing=name, top_k=4).build()
        output, trace = moe_forward(layer.scheme, layer.weights, layer.inputs[0])
        terms, ids = trace["combine"].tensors["terms"], layer.inputs[0].topk_ids
        other = combine(terms.flip(1), ids.flip(1), layer.scheme.combine)
        changed[name] = int((bits(output) != bits(other)).sum())
    assert changed["cancelling"] > 50 > changed["uniform"]


def test_masked():
    """A quarter of 600 slots (5 standard deviations: 53), by both ids; of every fifth token all."""
    ids = topk_ids("masked", tokens=(375,))
    fifth = torch.arange(375) % 5 == 4
    assert bool((ids[fifth] == -1).all())
    assert sorted(ids[~fifth].unique().tolist()) == [-7, -1, *range(8)]
    assert 97 < int((ids[~fifth] < 0).sum()) < 203


def test_duplicates():
    ids = topk_ids("duplicates", top_k=3)
    assert torch.equal(ids[::2, 0], ids[::2, 2])
    assert all(len(set(row)) == 3 for row in ids[1::2].tolist())


def test_score_ties(monkeypatch):
    """The chosen experts by a plain sort; and for most tokens the last one chosen ties with the first one left."""
    seen: list[torch.Tensor] = []
    top_k = module._top_k

    def spy(problem: Problem, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores)
        return top_k(problem, scores)

    monkeypatch.setattr(module, "_top_k", spy)
    ids = topk_ids("score_ties", tokens=(100,), top_k=3).tolist()
    at_the_edge = 0
    for row, scores in zip(ids, seen[0].tolist(), strict=True):
        order = sorted(range(8), key=lambda e: (-scores[e], e))
        assert row == order[:3]
        at_the_edge += scores[order[2]] == scores[order[3]]
    assert at_the_edge > 50


# --- weights -----------------------------------------------------------------------------------------------------


def quantized_weights(monkeypatch: pytest.MonkeyPatch, scheme: str, quantizer: str) -> list[tuple[torch.Tensor, Any]]:
    """Dense weights and what the problem's quantizer made of them, w13 then w2."""
    calls = []
    quantize = getattr(module, quantizer)

    def spy(weights: torch.Tensor, *rest: Any) -> Any:
        calls.append((weights, quantize(weights, *rest)))
        return calls[-1][1]

    monkeypatch.setattr(module, quantizer, spy)
    Problem(scheme, values="ties", num_experts=2).build()
    assert len(calls) == 2
    return calls


def test_nvfp4_weights_at_ties(monkeypatch):
    """code = E2M1(value / (scale * global_scale)): that product is a power of two, the quotient a midpoint or 6."""
    for dense, made in quantized_weights(monkeypatch, NVFP4, "quantize_nvfp4"):
        blocks = dense.double().unflatten(-1, (-1, 16))
        scale = made.scales.view(torch.float8_e4m3fn).float() * made.global_scale[:, None, None]
        quotient = blocks / scale.double()[..., None]
        assert scale.unique().tolist() == [2**-6]
        assert bool((quotient[..., 0] == 6).all())
        assert quotient[..., 1:].abs().unique().tolist() == [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
        even = rounded(quotient, E2M1)[0]
        assert torch.equal(made.codes.long() & 7, even.flatten(-2))


def test_mxfp4_weights_at_ties(monkeypatch):
    """Block maxima at 6 * 2^n: CEIL is another scale there, RCEIL one float32 above; under FLOOR the rest are ties."""
    for dense, made in quantized_weights(monkeypatch, MXFP4, "quantize_mx"):
        blocks = dense.double().unflatten(-1, (-1, 32))
        quotient = blocks / 2.0 ** (made.scales.double() - 127)[..., None]
        assert bool((quotient[..., 0] == 6).all())
        assert quotient[..., 1:].abs().unique().tolist() == [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
        amax = blocks.abs().amax(-1).float()
        above = torch.nextafter(amax, torch.tensor(torch.inf))
        for rule, step, step_above in (
            (ScaleRule.FLOOR, 0, 0),
            (ScaleRule.EVEN, 0, 0),
            (ScaleRule.RCEIL, 0, 1),
            (ScaleRule.CEIL, 1, 1),
        ):
            assert torch.equal(ue8m0_scale(amax, E2M1, rule), made.scales + step)
            assert torch.equal(ue8m0_scale(above, E2M1, rule), made.scales + step_above)


@pytest.mark.parametrize(
    ("scheme", "suffixes"),
    [(NVFP4, ("", "_scale", "_global_scale")), (MXFP4, ("", "_scale")), (FP8, ("",)), (BF16, ("",))],
)
def test_weights(scheme, suffixes):
    """FP4 packed, the others dense; experts differ."""
    weights = {name: t for name, t in vars(Problem(scheme).build().weights).items() if t is not None}
    assert set(weights) == {leg + suffix for leg in ("w13", "w2") for suffix in suffixes}
    for name, tensor in weights.items():
        assert len({sha256(expert) for expert in tensor}) > (1 if "global" in name else 7)
    dense = normal(20, (8, 256, 256), 0.06)
    if scheme == NVFP4:
        assert torch.equal(quantize_nvfp4(dense).scales, weights["w13_scale"])
    elif scheme != MXFP4:
        assert torch.equal(dense, weights["w13"])


# --- padding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_padding(scheme):
    """NaN rows with all slots masked, behind each rank's tokens: outputs of zeros; the tokens' outputs do not move."""
    plain = problem(scheme, tokens=(3, 0, 5, 1), num_experts=4).build()
    padded = problem(scheme, tokens=(3, 0, 5, 1), num_experts=4, padding=2).build()
    for x, y in zip(plain.inputs, padded.inputs, strict=True):
        tokens = len(x.hidden_states)
        assert len(y.hidden_states) == tokens + 2
        assert bool(y.hidden_states[tokens:].isnan().all())
        assert bool(y.topk_weights[tokens:].isnan().all())
        assert bool((y.topk_ids[tokens:] == -1).all())
    outputs, expected = (moe_forward(scheme, layer.weights, layer.inputs)[0] for layer in (padded, plain))
    for found, real in zip(outputs, expected, strict=True):
        assert torch.equal(found[: len(real)].view(torch.int16), real.view(torch.int16))
        assert found[len(real) :].view(torch.int16).unique().tolist() == [0]


# --- suites, names, errors ---------------------------------------------------------------------------------------


def test_problems():
    suite = problems(MXFP4, {"gate_up_clamp": 7.0}, tokens=(8, 8), seed=3)
    assert suite.keys() == CASES.keys()
    assert suite["ordinary"] == Problem(MXFP4, {"gate_up_clamp": 7.0}, tokens=(8, 8), seed=3)
    assert suite["uneven ranks, one without tokens"].tokens == (11, 0, 1, 4)  # a case wins over the caller
    for name, case in CASES.items():
        assert suite[name] == replace(suite["ordinary"], **case)
    assert {case.values for case in suite.values()} == set(VALUES)
    assert {case.routing for case in suite.values()} == set(ROUTING)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_case_survives_json(scheme):
    for made in problems(scheme.name, options_of(scheme), tokens=(8, 8), seed=5).values():
        assert Problem.from_json(json.loads(json.dumps(made.as_json()))) == made


def test_str():
    options = {"kind": "fp8_e5m2"}
    made = Problem(FP8, options, tokens=(3, 0), top_k=4, padding=2, values="ties", routing="masked", seed=9)
    assert str(made) == (
        f"{find_scheme(FP8, **options)}: 3+0 tokens, 8 experts, top-k 4, H 256, I 128, ties values, masked routing, "
        "2 rows of padding, seed 9"
    )
    assert "padding" not in str(replace(made, padding=0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheme": "nvfp4"}, f"scheme: 'nvfp4' is not one of {SM100}, {BF16}, {FP8}, {PUSH}, {MXFP4}, {NVFP4}"),
        ({"options": {"nvfp4_kperm": 7}}, "nvfp4_kperm: 7 is not one of [64, 0, 32]"),
        ({"options": {"kperm": 64}}, f"kperm: {NVFP4}[nvfp4_kperm=64] has no such option"),
        ({"options": {"gate_up_clamp": -1}}, "gate_up_clamp must be a positive finite number or None, got -1"),
        ({"values": "gaussian"}, f"values: 'gaussian' is not one of {', '.join(VALUES)}"),
        ({"routing": None}, f"routing: None is not one of {', '.join(ROUTING)}"),
        ({"tokens": ()}, "tokens must be a tuple with a whole number >= 0 for each of 1 or more ranks"),
        ({"tokens": (4, -1)}, "tokens must be a tuple with a whole number >= 0 for each of 1 or more ranks"),
        ({"tokens": (4, 4, 4)}, "ranks that divide the 8 experts, got (4, 4, 4)"),
        ({"tokens": (1,) * 16}, "ranks that divide the 8 experts"),
        ({"top_k": 0}, "top_k must be a whole number >= 1, got 0"),
        ({"top_k": 9}, "top_k must be 1 to 8 of 8 experts with uniform routing, got 9"),
        ({"num_experts": 1}, "top_k must be 1 to 1 of 1 experts with uniform routing, got 2"),
        ({"num_experts": 0}, "num_experts must be a whole number >= 1, got 0"),
        ({"padding": -1}, "padding must be a whole number >= 0, got -1"),
        ({"hidden": 0}, "hidden must be a positive multiple of 64, got 0"),
        ({"hidden": 100}, "hidden must be a positive multiple of 64, got 100"),
        ({"hidden": -64}, "hidden must be a positive multiple of 64, got -64"),
        ({"intermediate": 32}, "intermediate must be a positive multiple of 64, got 32"),
    ],
    ids=str,
)
def test_what_makes_no_layer(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Problem(**{"scheme": NVFP4, **fields})


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"tokens": 16}, "tokens"),
        ({"tokens": (2.5,)}, "tokens"),
        ({"num_experts": 8.0}, "num_experts"),
        ({"top_k": 1.0}, "top_k"),
        ({"hidden": 128.0}, "hidden"),
        ({"hidden": "256"}, "hidden"),
        ({"values": ["ties"]}, "values"),
        ({"options": None}, "options"),
        ({"scheme": "nvfp4"}, "scheme"),
        ({"routing": "empty_rank", "tokens": (2, 2), "num_experts": 2}, "top_k"),
    ],
    ids=str,
)
def test_what_makes_no_layer_is_named_first(fields, name):
    with pytest.raises(ValueError, match=f"^{name}"):
        Problem(**{"scheme": NVFP4, **fields})
