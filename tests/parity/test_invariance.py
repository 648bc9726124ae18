"""What must not change a bit of the reference: ranks, placement of experts, order and company of tokens, padding.

Every test compares outputs, staged tokens, and every stage of every route, by bytes; routes are named by their token
and slot, wherever they were computed. The last tests show changes that do move bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from fp4ep.parity.problem import Layer, Problem
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.quantize import quantize_fp8_block_128, quantize_fp8_per_expert
from fp4ep.reference.scheme import Combine, Scheme, Weights
from fp4ep.reference.schemes import SCHEMES, find_scheme, options_of
from fp4ep.reference.types import MoEInputs, MoEWeights
from fp4ep.reference.validate import InputError

TOKENS, EXPERTS, TOP_K = 16, 8, 4
ROUTE_STAGES = ("fc1", "activation", "requantize", "fc2")
NVFP4 = "sm90_fp8_nvfp4_bf16_pull_cutedsl"
FP8 = "sm90_fp8_fp8_bf16_pull_cutedsl"
BF16 = "sm90_bf16_bf16_bf16_pull_cutedsl"

#: Tokens of each rank: evenly, unevenly, ranks without tokens.
SPLITS = [(8, 8), (4,) * 4, (2,) * 8, (0, 5, 0, 11), (1, 0, 3, 0, 5, 0, 7, 0)]
_COLUMNS = ("hidden_states", "topk_ids", "topk_weights")


@dataclass(frozen=True)
class Facts:
    """Tokens counted over the ranks. by_token: rows of tokens; by_route: rows of live routes, by token, then slot."""

    by_token: dict[str, torch.Tensor]
    by_route: dict[str, torch.Tensor]
    token: torch.Tensor  #: of each route

    def of(self, tokens: Sequence[int]) -> "Facts":
        """Those of some tokens, in their order."""
        routes = torch.cat([torch.where(self.token == token)[0] for token in tokens])
        return Facts(_rows(self.by_token, torch.tensor(tokens)), _rows(self.by_route, routes), self.token[routes])

    def differing(self, other: "Facts") -> list[str]:
        """The tensors whose bytes differ."""
        pairs = [
            (name, mine[name], theirs[name])
            for mine, theirs in ((self.by_token, other.by_token), (self.by_route, other.by_route))
            for name in mine
        ]
        return [name for name, a, b in pairs if a.dtype != b.dtype or not torch.equal(_bytes(a), _bytes(b))]


def _rows(columns: dict[str, torch.Tensor], index: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: column[index] for name, column in columns.items()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def facts(layer: Layer, **options: Any) -> Facts:
    outputs, trace = moe_forward(layer.scheme, layer.weights, layer.inputs, **options)
    ranks = range(layer.ep_size)
    first = torch.tensor([0, *accumulate(len(x.hidden_states) for x in layer.inputs)])

    def joined(stage: str, name: str) -> torch.Tensor:
        return torch.cat([trace[stage, rank].tensors[name] for rank in ranks])

    token, slot = first[joined("dispatch", "source_rank")] + joined("dispatch", "token"), joined("dispatch", "slot")
    order = torch.argsort(token * 1000 + slot)
    names = [(stage, name) for stage in ROUTE_STAGES for name in trace[stage].tensors]
    by_route = {f"{stage} {name}": joined(stage, name)[order] for stage, name in names}
    by_token = {f"stage {name}": joined("stage", name) for name in ("values", "scales")}
    by_token |= {"terms": joined("combine", "terms"), "output": torch.cat(outputs)}
    return Facts(by_token, by_route | {"slot": slot[order]}, token[order])


def dealt(layer: Layer, split: Sequence[int]) -> Layer:
    """The tokens over other ranks, in order."""
    parts = [torch.cat([getattr(x, name) for x in layer.inputs]).split(list(split)) for name in _COLUMNS]
    return replace(layer, inputs=tuple(MoEInputs(*part) for part in zip(*parts, strict=True)))


def chosen(layer: Layer, tokens: Sequence[int | None]) -> Layer:
    """Some tokens of a layer of one rank. None: a row of padding, NaN and masked."""
    x, ids, weights = (getattr(layer.inputs[0], name)[torch.tensor([t or 0 for t in tokens])] for name in _COLUMNS)
    padding = torch.tensor([t is None for t in tokens])
    x[padding], ids[padding], weights[padding] = torch.nan, -1, torch.nan
    return replace(layer, inputs=(MoEInputs(x, ids, weights),))


def placed(layer: Layer, logical: Sequence[int]) -> Layer:
    """Physical expert p holds logical expert logical[p]; token t takes the replica that its number selects."""
    index = torch.tensor(logical)
    weights = {name: t if t is None else t[index] for name, t in vars(layer.weights).items()}
    inputs = []
    for x in layer.inputs:
        ids = x.topk_ids.clone()
        for token, slot in (x.topk_ids >= 0).nonzero().tolist():
            replicas = torch.where(index == x.topk_ids[token, slot])[0]
            ids[token, slot] = replicas[token % len(replicas)]
        inputs.append(replace(x, topk_ids=ids))
    return replace(layer, weights=MoEWeights(**weights), inputs=tuple(inputs))


def fp8_packed(layer: Layer) -> Layer:
    """Dense weights quantized beforehand: codes, and float32 scales per expert or per block."""
    scheme, parts = layer.scheme, {}
    for leg, halves in (("w13", 2), ("w2", 1)):
        experts = getattr(layer.weights, leg)
        if scheme.weights is Weights.FP8_BLOCK_128:
            made = [quantize_fp8_block_128(w, scheme.stage.element, halves) for w in experts]
        else:
            made = [quantize_fp8_per_expert(w, scheme.stage.element) for w in experts]
        parts[leg] = torch.stack([q.codes for q in made])
        scales = torch.stack([q.scales for q in made])
        parts[f"{leg}_scale"] = scales if scheme.weights is Weights.FP8_BLOCK_128 else scales.flatten()
    return replace(layer, weights=MoEWeights(**parts))


def spread(layer: Layer) -> Layer:
    """Every expert's w13 an octave above the last one's: no expert's scale passes for another's."""
    weights, octave = layer.weights, torch.arange(EXPERTS)
    factor = 2.0 ** (octave - 7)
    if layer.scheme.weights in (Weights.NVFP4, Weights.NVFP4_BLOCK_SCALED):
        return replace(layer, weights=replace(weights, w13_global_scale=weights.w13_global_scale * factor))
    if layer.scheme.weights is Weights.MXFP4:
        codes = weights.w13_scale + (octave - 7)[:, None, None]
        return replace(layer, weights=replace(weights, w13_scale=codes.to(torch.uint8)))
    return replace(layer, weights=replace(weights, w13=weights.w13 * factor[:, None, None].bfloat16()))


@dataclass(frozen=True)
class Base:
    layer: Layer
    facts: Facts


#: Records whose routes differ (how they are summed is left to `test_everything_at_once`), FP8 with dense weights; and
#: two with weights quantized before.
CASES = {str(scheme): (scheme, False) for scheme in SCHEMES if scheme.combine is not Combine.ON_ARRIVAL} | {
    f"{scheme}, quantized before": (scheme, True)
    for scheme in (find_scheme(FP8), find_scheme(FP8, fp8_scale_mode="blockwise"))
}


def base_of(scheme: Scheme, quantized: bool = False) -> Base:
    """One rank: outliers, masked slots and tokens, an expert named twice, a token of zeros."""
    problem = Problem(scheme.name, options_of(scheme), (TOKENS,), EXPERTS, TOP_K, values="outliers", routing="masked")
    layer = spread(problem.build())
    layer = fp8_packed(layer) if quantized else layer
    layer.inputs[0].topk_ids[0] = torch.tensor([5, 2, 5, 7])
    layer.inputs[0].hidden_states[3] = 0
    return Base(layer, facts(layer))


@pytest.fixture(scope="module", params=CASES)
def base(request: pytest.FixtureRequest) -> Base:
    return base_of(*CASES[request.param])


def by_ranks(scheme: Scheme) -> list[str]:
    """What depends on how tokens and experts are spread over ranks."""
    return ["output"] * (scheme.combine is Combine.WEIGHTED_GROUPS)


# --- nothing changes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "+".join(map(str, split)))
def test_number_of_ranks(base, split):
    differing = base.facts.differing(facts(dealt(base.layer, split)))
    assert differing == by_ranks(base.layer.scheme)  # and they do depend on it


@pytest.mark.parametrize(
    "logical",
    [
        pytest.param([3, 7, 0, 5, 1, 6, 2, 4], id="8 permuted"),
        pytest.param([5, 0, 1, 2, 3, 4, 5, 6, 7, 5, 2, 0], id="12 with replicas"),
        pytest.param([7, 6, 5, 4, 3, 2, 1, 0, *range(8)], id="16, each twice"),
    ],
)
def test_placement_of_experts(base, logical):
    """EPLB: physical experts over 4 ranks; tokens take one replica or another."""
    layer = dealt(placed(base.layer, logical), (4,) * 4)
    assert layer.weights.num_experts == len(logical)
    assert not torch.equal(layer.inputs[0].topk_ids, base.layer.inputs[0].topk_ids[:4])
    assert base.facts.differing(facts(layer)) == by_ranks(base.layer.scheme)


def test_rank_order(base):
    """The ranks' tokens change places, the experts stay."""
    layer = dealt(base.layer, (5, 11))
    layer = replace(layer, inputs=layer.inputs[::-1])
    order = [*range(5, 16), *range(5)]
    assert base.facts.of(order).differing(facts(layer)) == by_ranks(base.layer.scheme)


def test_token_order(base):
    order = [5 * t % 16 for t in range(16)]
    assert base.facts.of(order).differing(facts(chosen(base.layer, order))) == []


@pytest.mark.parametrize("tokens", [[5], [13, 3, 7, 3]], ids=str)
def test_batch_composition(base, tokens):
    """A token alone, in other company, and beside itself."""
    assert base.facts.of(tokens).differing(facts(chosen(base.layer, tokens))) == []


def test_padding(base):
    """NaN rows before, between and behind: zeros come out, no route more, the tokens do not move."""
    rows = [None, *range(7), None, *range(7, 16), None]
    found = facts(chosen(base.layer, rows))
    assert base.facts.differing(found.of([*range(1, 8), *range(9, 18)])) == []
    assert int(_bytes(found.by_token["output"][[0, 8, 18]]).count_nonzero()) == 0
    assert len(found.token) == len(base.facts.token)


def test_capacity(base):
    assert base.facts.differing(facts(base.layer, max_tokens_per_rank=4096)) == []
    with pytest.raises(InputError, match=r"^hidden_states .* at most max_tokens_per_rank = 15 tokens, got 16"):
        facts(base.layer, max_tokens_per_rank=15)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_everything_at_once(scheme):
    """Other order, company, padding, ranks, experts with replicas, capacity: for every record."""
    base = base_of(scheme)
    rows = [11, 0, 4, None, 7, 15, 2, None, 9, 3, 1, 1]
    layer = dealt(placed(chosen(base.layer, rows), [5, 0, 1, 2, 3, 4, 5, 6, 7, 5, 2, 0]), (5, 0, 6, 1))
    found = facts(layer, max_tokens_per_rank=7).of([at for at, token in enumerate(rows) if token is not None])
    assert base.facts.of([token for token in rows if token is not None]).differing(found) == by_ranks(scheme)


@pytest.mark.parametrize("scheme", [NVFP4, BF16])
def test_batch_composition_of_many(scheme):
    """A hundred routes of one expert, more than a GEMM's tile of 32 rows, against tokens from either end."""
    layer = Problem(scheme, tokens=(100,), num_experts=2, routing="skewed").build()
    tokens = [99, 0, 31, 32, 64]
    assert facts(layer).of(tokens).differing(facts(chosen(layer, tokens))) == []


# --- something changes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", sorted({scheme.combine for scheme in SCHEMES}, key=lambda rule: rule.name))
def test_slot_order_moves_bits(rule):
    """The same eight terms in another order of slots give other sums: combine follows the caller's order.

    Two large terms cancel, side by side or with the small ones in between. (Random terms would not show it: bf16 values
    of like magnitude add exactly in float32.)
    """
    scheme = next(scheme for scheme in SCHEMES if scheme.combine is rule)
    layer = Problem(scheme.name, options_of(scheme), tokens=(4,), top_k=8).build()
    x, w2 = layer.inputs[0], layer.weights.w2_global_scale
    (layer.weights.w2 if w2 is None else w2)[0] *= 2.0 ** (18 if scheme.wire_rule is None else 22)  # E4M3 shows less
    x.topk_ids[:] = torch.tensor([0, *range(1, 7), 0])
    x.topk_weights[:, 7] = -x.topk_weights[:, 0]
    rolled = replace(x, topk_ids=x.topk_ids.roll(1, 1), topk_weights=x.topk_weights.roll(1, 1))
    apart, together = (facts(replace(layer, inputs=(inputs,))).by_token for inputs in (x, rolled))
    assert torch.equal(_bytes(apart["terms"].roll(1, 1)), _bytes(together["terms"]))
    assert float((apart["output"] != together["output"]).float().mean()) > 0.5


@pytest.mark.parametrize("name", [name for name, t in vars(Problem(NVFP4).build().weights).items() if t is not None])
def test_every_weight_tensor_is_placed(name):
    """Experts exchanged in one tensor only: noticed. So `test_placement_of_experts` would notice one left behind."""
    layer = spread(Problem(NVFP4, values="outliers").build())
    moved = replace(layer.weights, **{name: getattr(layer.weights, name).roll(1, 0)})
    differing = facts(layer).differing(facts(replace(layer, weights=moved)))
    assert "output" in differing
    assert ("fc1 gate" in differing) == name.startswith("w13")


def test_one_bit_is_noticed(base):
    """In any tensor that is compared."""
    for part in ("by_token", "by_route"):
        for name, tensor in getattr(base.facts, part).items():
            assert tensor.numel()
            other = tensor.clone()
            _bytes(other).flatten()[-1] ^= 1
            changed = replace(base.facts, **{part: getattr(base.facts, part) | {name: other}})
            assert base.facts.differing(changed) == changed.differing(base.facts) == [name]
