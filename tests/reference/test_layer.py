"""The chain around the experts: where factors round, what is added once, and what must not move a bit."""

from dataclasses import replace

import pytest
import torch
from bilinear_layers import (
    BF16,
    EXPERTS,
    FP8,
    GIVEN,
    HIDDEN,
    LARGE,
    NVFP4,
    RENORMALIZE,
    SCHEMES,
    SM100,
    WIDTH,
    bilinear,
    experts,
    given,
    problem,
    random_shared,
    run,
    same,
    shared_of,
    spread,
    tokens,
    value_of,
)

from fp4ep.parity.generate import normal
from fp4ep.parity.problem import evenly
from fp4ep.reference.layer import (
    LayerInputs,
    MoELayer,
    ScalingPlace,
    SharedExperts,
    WeightOn,
    moe_layer_forward,
    shared_experts,
)
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.placement import Placement, Replica, eplb, linear, redundant, round_robin
from fp4ep.reference.routing import find_router, route
from fp4ep.reference.schemes import find_scheme
from fp4ep.reference.types import Exactness, MoEInputs, Stage
from fp4ep.reference.validate import InputError

pytestmark = pytest.mark.usefixtures("quick_gemms")

# --- the chain ---------------------------------------------------------------------------------------------------


def test_the_chain_is_route_place_moe_forward():
    """Against the same steps by hand, and the stages in their order."""
    weights, inputs = problem(NVFP4)
    layer = MoELayer(NVFP4, RENORMALIZE, 2, placement=redundant(EXPERTS, 4, 2))
    ranks = spread(inputs, [7, 5])
    outputs, trace = moe_layer_forward(layer, weights, ranks)

    routing = [route(RENORMALIZE, x.router_logits, 2) for x in ranks]
    slots = torch.tensor([*range(8), *range(4)])
    where = {e: [s for s in range(12) if slots[s] == e] for e in range(8)}
    by_hand = []
    for x, r in zip(ranks, routing, strict=True):
        ids = [
            [where[e][(t * 2654435769) % 2**32 % len(where[e])] for e in row]
            for t, row in enumerate(r.topk_ids.tolist())
        ]
        by_hand.append(MoEInputs(x.hidden_states, torch.tensor(ids), r.topk_weights))
    expected, inner = moe_forward(NVFP4, weights.of_experts(slots), by_hand)
    assert all(same(a, b) for a, b in zip(outputs, expected, strict=True))
    names = [(stage.name, stage.rank) for stage in trace]
    assert names == [("route", 0), ("route", 1), *((stage.name, stage.rank) for stage in inner)]
    for rank, r in enumerate(routing):
        got = trace["route", rank].tensors
        assert list(got) == ["topk_ids", "topk_weights", "scores"]
        assert all(torch.equal(got[name], getattr(r, name)) for name in got)


def test_the_replica_rule_is_the_layers():
    """The redundant slots, 8 to 11, are never the first of their expert."""
    weights, inputs = problem(BF16)
    layer = MoELayer(BF16, RENORMALIZE, 2, placement=redundant(EXPERTS, 4, 1))
    used = {}
    for replica in Replica:
        _, trace = moe_layer_forward(replace(layer, replica=replica), weights, inputs)
        used[replica] = int(trace["dispatch"].tensors["expert"].max())
    assert used[Replica.FIRST] < EXPERTS <= min(used[Replica.HASH], used[Replica.POSITION])


def test_one_rank_and_a_list_of_one():
    weights, inputs = problem(BF16)
    layer = MoELayer(BF16, RENORMALIZE, 2)
    alone, _ = moe_layer_forward(layer, weights, inputs)
    listed, _ = moe_layer_forward(layer, weights, [inputs])
    assert isinstance(listed, list)
    assert same(alone, listed[0])


def test_interventions_see_every_stage_and_may_replace_it():
    seen = []

    def only_expert_1(stage: Stage) -> Stage:
        seen.append(stage.name)
        if stage.name != "route":
            return stage
        return replace(stage, tensors={**stage.tensors, "topk_ids": torch.ones(1, 1, dtype=torch.int64)})

    layer = MoELayer(BF16, GIVEN, 1, shared=shared_of(5))
    output, _ = moe_layer_forward(layer, experts(1, 2), given([1.0, 0.5]), intervene=only_expert_1)
    assert value_of(output) == [7]
    assert (seen[0], seen[1], seen[-1]) == ("route", "stage", "output")


SPREAD = [2, 0, 7, 1, 5, 4, 6, 3, 0, 5, 0, 2]  #: slot -> expert: 0 three times, 2 and 5 twice
PLACEMENTS: list[tuple[Placement, Replica]] = [
    *((make(EXPERTS, ranks), Replica.HASH) for make in (linear, round_robin) for ranks in (2, 4)),
    *((eplb(SPREAD, ranks, EXPERTS), rule) for ranks in (1, 4) for rule in (Replica.HASH, Replica.POSITION)),
    (eplb(SPREAD, 2, EXPERTS), Replica.FIRST),
    (redundant(EXPERTS, 8, 4), Replica.HASH),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_placement_and_ranks_change_no_bit(scheme):
    """Linear, round-robin and EPLB with replicas, over 1, 2 and 4 ranks; with groups, bias, scaling, shared experts."""
    weights, inputs = problem(scheme)
    layer = MoELayer(
        scheme,
        find_router("DeepSeekV3"),
        3,
        bias=normal(78, (1, EXPERTS), 0.2).float()[0],
        num_expert_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        shared=random_shared(),
    )
    wanted, _ = moe_layer_forward(layer, weights, inputs)
    used = set()
    for placement, replica in PLACEMENTS:
        ranks = spread(inputs, evenly(len(inputs.hidden_states), placement.ep_size))
        outputs, trace = moe_layer_forward(replace(layer, placement=placement, replica=replica), weights, ranks)
        assert same(torch.cat(list(outputs)), wanted), (placement, replica)
        slots = torch.cat([trace["dispatch", rank].tensors["expert"] for rank in range(placement.ep_size)])
        used.add(tuple(torch.bincount(slots, minlength=placement.num_physical_experts).tolist()))
    assert len(used) >= 6  # the routes did go to different slots


def test_placement_shows_where_ranks_round():
    """The exception: grouped token-back rounds each rank's sum, so which experts share a rank is in the bits."""
    scheme = find_scheme(FP8, fp8_scale_mode="blockwise", grouped_token_back=True)
    weights, inputs = problem(scheme, hidden=512)
    ranks = spread(inputs, [6, 6])
    layer = MoELayer(scheme, RENORMALIZE, 4)
    outputs = [
        torch.cat(list(moe_layer_forward(replace(layer, placement=make(EXPERTS, 2)), weights, ranks)[0]))
        for make in (linear, round_robin)
    ]
    assert not same(*outputs)


# --- routed_scaling_factor ---------------------------------------------------------------------------------------

SCALED = replace(GIVEN, scaling=find_router("DeepSeekV3").scaling)


@pytest.mark.parametrize(
    ("place", "alone", "with_shared"),
    [
        (ScalingPlace.WEIGHTS, 5.09375, 5.125),  # 2.5 + bf16(2.59765625)
        (ScalingPlace.OUTPUT, 5.0625, 5.0625),  # bf16(2.5 * 2.03125), a tie; then + 2^-6, a tie again
        (ScalingPlace.ADDITION, 5.0625, 5.09375),  # bf16(5.078125 + 2^-6), exact
    ],
)
def test_where_the_factor_rounds(place, alone, with_shared):
    """Experts of 1 and 1.0390625, whose bf16 sum is 2.03125; factor 2.5; shared experts of 2^-6."""
    layer = MoELayer(BF16, SCALED, 2, routed_scaling_factor=2.5, scaling_place=place)
    weights, inputs = experts(1, 1.0390625), given([1.0, 1.0])
    assert run(layer, weights, inputs) == [alone]
    assert run(replace(layer, shared=shared_of(2**-6)), weights, inputs) == [with_shared]


def test_the_factor_is_float32():
    """2.4765625, a tie of bf16, rounds to the even 2.46875, one unit of float32 more to 2.484375."""
    layer = MoELayer(BF16, GIVEN, 1, scaling_place=ScalingPlace.OUTPUT)
    above = torch.nextafter(torch.tensor(2.4765625), torch.tensor(3.0)).item()
    for factor, wanted in ((2.4765625, 2.46875), (2.4765625 + 1e-9, 2.46875), (above, 2.484375)):
        assert run(replace(layer, routed_scaling_factor=factor), experts(1), given([1.0])) == [wanted]


def test_the_factor_never_reaches_shared_experts():
    for place in ScalingPlace:
        layer = MoELayer(BF16, SCALED, 1, routed_scaling_factor=4.0, scaling_place=place, shared=shared_of(5))
        assert run(layer, experts(1, 2), given([1.0, 0.5])) == [9]


def test_a_router_that_cannot_scale_refuses():
    layer = MoELayer(BF16, GIVEN, 1, routed_scaling_factor=2.5)
    with pytest.raises(ValueError, match="routed_scaling_factor: router TopK does not apply it"):
        moe_layer_forward(layer, experts(1), given([1.0]))
    assert run(replace(layer, scaling_place=ScalingPlace.OUTPUT), experts(1), given([1.0])) == [2.5]


def test_the_output_stage_is_there_when_something_is_added():
    weights, inputs = experts(1), given([1.0])
    plain = MoELayer(BF16, GIVEN, 1)
    scaled = replace(plain, routed_scaling_factor=2.5, scaling_place=ScalingPlace.OUTPUT)
    stages = {}
    for name, layer in (("plain", plain), ("scaled", scaled), ("shared", replace(scaled, shared=shared_of(5)))):
        output, trace = moe_layer_forward(layer, weights, inputs)
        stages[name] = {s.name: s for s in trace}
        last = stages[name].get("output", stages[name]["combine"])
        assert same(last.tensors["values"], output)
    assert "output" not in stages["plain"]
    assert (list(stages["scaled"]["output"].tensors), stages["scaled"]["output"].exactness) == (
        ["values"],
        Exactness.EXACT,
    )
    shared = stages["shared"]["output"]
    assert (list(shared.tensors), shared.exactness) == (["values", "shared"], Exactness.MODELLED_UNVERIFIED)
    assert value_of(shared.tensors["shared"]) == [5]


# --- apply_router_weight_on_input --------------------------------------------------------------------------------


def test_weight_on_the_input_is_not_weight_on_the_activation():
    """A bilinear expert of 1 and a weight of 0.5."""
    inputs = given([0.5, -1.0])
    layer = MoELayer(BF16, GIVEN, 1)
    found = {on: run(replace(layer, weight_on=on), experts(1, 2), inputs) for on in WeightOn}
    assert found == {WeightOn.SCHEME: [0.5], WeightOn.ACTIVATION: [0.5], WeightOn.INPUT: [0.25]}


def test_weight_on_the_input_rounds_weight_and_product():
    """0.1 is 0.10009765625 in bf16; times 1.0078125 that rounds to 0.10107421875, 0.1 itself to 0.1005859375."""
    layer = MoELayer(BF16, GIVEN, 1, weight_on=WeightOn.INPUT)
    _, trace = moe_layer_forward(layer, experts(1), given([0.1], x=1.0078125))
    assert trace["stage"].tensors["values"][0, 0].item() == 0.10107421875
    assert trace["dispatch"].tensors["topk_weights"].tolist() == [1.0]
    assert trace["route"].tensors["topk_weights"].tolist() == [[pytest.approx(0.1)]]


def test_shared_experts_see_the_unweighted_input():
    layer = MoELayer(BF16, GIVEN, 1, weight_on=WeightOn.INPUT, shared=shared_of(5))
    assert run(layer, experts(1), given([0.5])) == [5.25]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_weight_on_the_input_runs_everywhere(scheme):
    """With top-1 and a weight of exactly 1 it changes nothing; else it is moe_forward on weighted tokens."""
    weights, inputs = problem(scheme)
    layer = MoELayer(scheme, find_router("Llama4"), 1, weight_on=WeightOn.INPUT)
    output, trace = moe_layer_forward(layer, weights, inputs)
    routes = trace["route"].tensors
    x = inputs.hidden_states * routes["topk_weights"].bfloat16()
    wanted, _ = moe_forward(scheme, weights, MoEInputs(x, routes["topk_ids"], torch.ones(len(x), 1)))
    assert same(output, wanted)


# --- shared experts ----------------------------------------------------------------------------------------------


def test_shared_experts_against_double_precision():
    """Every rounding to bf16 where it is documented; the sums in double precision, so one unit of bf16 may differ
    where a sum is next to a tie."""
    shared, x = random_shared(), normal(90, (9, HIDDEN), 1.0)
    gate, up = (x.double() @ shared.w13.double().T).bfloat16().chunk(2, dim=1)
    silu = torch.nn.functional.silu(gate.double()).bfloat16()
    wanted = ((silu * up).double() @ shared.w2.double().T).bfloat16()
    got = shared_experts(shared, x)
    steps = (got.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
    assert int(steps.max()) <= 1
    assert float((steps == 0).float().mean()) > 0.99
    through = (torch.nn.functional.silu(gate.float()) * up.float()).double()  # without the two roundings between
    assert not same((through @ shared.w2.double().T).bfloat16(), wanted)


def test_shared_experts_do_not_know_their_neighbours():
    shared, x = random_shared(), normal(90, (9, HIDDEN), 1.0)
    rows = torch.cat([shared_experts(shared, x[row : row + 1]) for row in range(9)])
    assert same(rows, shared_experts(shared, x))


def test_sharding_rounds_each_part_and_their_sum_once():
    """1, 2^-9 and -1 leave 2^-9 in one sum, but 1 + 2^-9 is 1 in bf16: of two parts the first holds both, of four each
    holds one, and the parts are summed before rounding."""
    w13, w2 = (w[0] for w in bilinear(1))
    for channel, value in ((16, 2**-9), (32, -1)):
        w13[channel, 0], w13[WIDTH + channel, 0] = LARGE, value / LARGE
        w2[:, channel] = 1
    found = [value_of(shared_experts(SharedExperts(w13, w2, tp_size), tokens(1.0))) for tp_size in (1, 2, 4)]
    assert found == [[2**-9], [0], [2**-9]]


def test_sharding_shows_in_the_bits():
    x = normal(90, (9, HIDDEN), 1.0)
    assert not same(shared_experts(random_shared(2), x), shared_experts(random_shared(1), x))


def test_nan_is_canonical():
    """Of a token, and only of that token."""
    x = tokens(1.0, float("nan"), 1.0)
    layer = MoELayer(BF16, GIVEN, 1, shared=shared_of(5))
    output, _ = moe_layer_forward(layer, experts(1), LayerInputs(x, torch.ones(3, 1)))
    assert (output[1].view(torch.int16) == 0x7FFF).all()
    assert value_of(output[::2]) == [6, 6]


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_on": WeightOn.INPUT, "top_k": 2}, "top_k must be 1 with WeightOn.INPUT"),
        (
            {"weight_on": WeightOn.ACTIVATION, "scheme": find_scheme(SM100, apply_routing_weights_before_fc2=False)},
            "weight_on must be SCHEME or INPUT, got ACTIVATION, but sm100.* weights routes after fc2",
        ),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor must be finite, got nan"),
        ({"placement": linear(4, 1)}, "placement must be of the 2 experts, got 4"),
        ({"placement": linear(2, 2)}, "placement must be over the 1 ranks of inputs, got 2"),
        ({"shared": SharedExperts(torch.zeros(64, HIDDEN), torch.zeros(HIDDEN, 32))}, "shared.w13 must be a bfloat16"),
        ({"shared": SharedExperts(shared_of(1).w13[:-2], shared_of(1).w2)}, r"shared.w13 must be \[128, 256\]"),
        ({"shared": SharedExperts(shared_of(1).w13, shared_of(1).w2[:-1])}, r"shared.w2 must be \[256, I\]"),
        (
            {"shared": replace(shared_of(1), tp_size=3)},
            "shared.tp_size must be >= 1, with 16 . tp_size dividing I = 64",
        ),
        ({"shared": replace(shared_of(1), tp_size=0)}, "shared.tp_size must be >= 1"),
        ({"top_k": 3}, "top_k must be from 1 to the 2 experts, got 3"),
    ],
)
def test_a_layer_that_does_not_fit(changes, message):
    def no_stage_of_an_expert(stage: Stage) -> Stage:
        assert stage.name == "route"
        return stage

    layer = replace(MoELayer(BF16, GIVEN, 1), **changes)
    with pytest.raises(ValueError, match=message):
        moe_layer_forward(layer, experts(1, 2), given([1.0, 0.5]), intervene=no_stage_of_an_expert)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "inputs must be at least one rank"),
        ([given([1.0, 1.0])] * 3, "inputs must be at most 2 ranks"),
        (LayerInputs(tokens(1.0).float(), torch.ones(1, 2)), r"hidden_states \(rank 0\) must be bfloat16"),
        ([given([1.0, 1.0]), given([1.0])], r"router_logits \(rank 1\) must be \[1, 2\], got \[1, 1\]"),
        (replace(given([1.0, 1.0]), num_tokens=2), r"num_tokens \(rank 0\) must be None or 0 to 1, got 2"),
        ([MoEInputs(tokens(1.0), torch.zeros(1, 1), torch.ones(1, 1))], "inputs .* must be LayerInputs or a sequence"),
    ],
)
def test_inputs_that_do_not_fit(inputs, message):
    with pytest.raises(InputError, match=message):
        moe_layer_forward(MoELayer(BF16, GIVEN, 1), experts(1, 2), inputs)


def test_ranks_need_equally_many_slots():
    layer = MoELayer(BF16, GIVEN, 1)
    with pytest.raises(InputError, match=r"equally many slots on every rank, .* got \[2, 1\]"):
        moe_layer_forward(layer, experts(1, 2, 3), [given([1.0, 0, 0])] * 2)
    padded = replace(layer, placement=redundant(3, 1, 2))
    outputs, _ = moe_layer_forward(padded, experts(1, 2, 3), [given([1.0, 0, 0])] * 2)
    assert [value_of(output) for output in outputs] == [[1], [1]]
