"""Public bugs of the chain around the experts.

Public bugs are numbered as in the survey that tests/reference/test_bug_cases.py names; each shows the right value from
this code and the wrong one imitated. Those of routing are in test_routing.py, those of bookkeeping alone in
test_placement.py. Without a test, and why:

    91, 92   the order of a sum over ranks: a field of the scheme here (Combine), see test_exchange.py
    93, 94   races that garble a row: nothing here runs concurrently
    108      wrong counts under heavy skew: no input is known
    112      a test generator's bug
"""

from dataclasses import replace

import pytest
import torch
from bilinear_layers import (
    BF16,
    EXPERTS,
    GIVEN,
    HIDDEN,
    LARGE,
    NVFP4,
    RENORMALIZE,
    SCHEMES,
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

from fp4ep.reference.exchange import combine
from fp4ep.reference.layer import (
    LayerInputs,
    MoELayer,
    SharedExperts,
    WeightOn,
    moe_layer_forward,
)
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.placement import eplb, linear
from fp4ep.reference.quantize import quantize_activation
from fp4ep.reference.routing import find_router
from fp4ep.reference.scheme import Combine
from fp4ep.reference.types import MoEInputs, MoEWeights

pytestmark = pytest.mark.usefixtures("quick_gemms")

# --- G: weights applied once, and where --------------------------------------------------------------------------


def test_84_weighted_on_the_input_and_again_on_the_output():
    """vllm#43694: for a linear expert and a weight of 0.5 that is 0.25 for 0.5. Ours is bilinear: 0.125 for 0.25."""
    layer = MoELayer(BF16, GIVEN, 1, weight_on=WeightOn.INPUT)
    inputs = given([0.5])
    assert run(layer, experts(1), inputs) == [0.25]
    weighted = MoEInputs(tokens(0.5), torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[0.5]]))
    wrong, _ = moe_forward(BF16, experts(1), weighted)
    assert value_of(wrong) == [0.125]


def test_86_token_index_for_expanded_index():
    """flashinfer#2629: rows are looked up by token * k + slot; given the token, 3 with k = 2 finds token 3 // 2 = 1."""
    rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    layer = MoELayer(BF16, GIVEN, 2)
    inputs = LayerInputs(tokens(1, 2, 4, 8), torch.tensor(rows))
    _, trace = moe_layer_forward(layer, experts(1, 1), inputs)
    sent, route_ = trace["dispatch"].tensors, trace["route"].tensors
    expanded = sent["token"] * 2 + sent["slot"]
    assert torch.equal(sent["topk_weights"], route_["topk_weights"].flatten()[expanded])
    assert torch.equal(sent["values"][:, 0], inputs.hidden_states[expanded // 2, 0])
    of_token_3 = sent["token"] == 3
    assert sent["values"][of_token_3, 0].tolist() == [8, 8]
    wrong = sent["token"] // 2
    assert wrong[of_token_3].tolist() == [1, 1]
    assert inputs.hidden_states[wrong[of_token_3], 0].tolist() == [2, 2]


@pytest.mark.parametrize("ep_size", [1, 2])
def test_87_weights_from_biased_scores(ep_size):
    """PaddleFormers#3452: without EP only, the bias weighed. Scores 0.5 and 0.5, bias 0 and 1, experts 1 and 2."""
    layer = MoELayer(BF16, find_router("MiniMax2"), 2, bias=torch.tensor([0.0, 1.0]))
    inputs = [given([0.0, 0.0])] * ep_size
    outputs, trace = moe_layer_forward(layer, experts(1, 2), inputs)
    assert [value_of(output) for output in outputs] == [[1.5]] * ep_size
    scores, ids = (trace["route"].tensors[name] for name in ("scores", "topk_ids"))
    biased = (scores + layer.bias).gather(1, ids)
    weights = biased / biased.sum(1, keepdim=True)
    wrong, _ = moe_forward(BF16, experts(1, 2), MoEInputs(inputs[0].hidden_states, ids, weights))
    assert value_of(wrong) == [1.75]


# --- H: combine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "right", "wrong"),
    [([1, 2**-8, 2**-8, 2**-8], 1.015625, 1.0), ([1, 2**-9, -1], 2**-9, 0.0)],
    ids=["88", "89"],
)
def test_88_89_summed_in_bf16(values, right, wrong):
    """TensorRT-LLM#16778 and TIRx-kernels#208: routes summed in bf16, one by one, for one sum in float32."""
    layer = MoELayer(BF16, GIVEN, len(values))
    output, trace = moe_layer_forward(layer, experts(*[1] * len(values)), given(values))
    assert value_of(output) == [right]
    ids = trace["route"].tensors["topk_ids"]
    in_order = torch.argsort(ids, dim=1)
    terms = trace["combine"].tensors["terms"].gather(1, in_order[..., None].expand(-1, -1, HIDDEN))
    assert value_of(combine(terms, ids.gather(1, in_order), Combine.LIVE_SLOTS)) == [right]
    assert value_of(combine(terms, ids.gather(1, in_order), Combine.ON_ARRIVAL)) == [wrong]


# --- I: expert parallelism ---------------------------------------------------------------------------------------


def test_99_slots_that_nothing_was_written_to():
    """sglang#24850, vllm#46432: what earlier launches left in the receive buffer was summed. A quarter NaN."""
    weights, inputs = problem(NVFP4)
    layer = MoELayer(NVFP4, RENORMALIZE, 2)
    padded = replace(inputs, num_tokens=9)
    garbage = [torch.full((12, 2, HIDDEN), float("nan")).bfloat16()]
    clean, _ = moe_layer_forward(layer, weights, padded)
    output, trace = moe_layer_forward(layer, weights, padded, workspace=garbage)
    assert same(output, clean)
    assert not bool(output[9:].any())
    terms = trace["combine"].tensors["terms"]
    assert bool(terms[9:].isnan().all())
    wrong = combine(terms, trace["route"].tensors["topk_ids"], Combine.ALL_SLOTS)
    assert bool(wrong[9:].isnan().all())


def test_103_alphas_that_did_not_move():
    """vllm#34646: EPLB moved the weights and not the alphas made from their scales; sglang#17158: not the block scales.

    Experts 0 and 3 change places, with global scales 1 and 8 for fc2."""
    weights, inputs = problem(NVFP4)
    weights = replace(weights, w2_global_scale=2.0 ** torch.arange(EXPERTS).float())
    layer = MoELayer(NVFP4, RENORMALIZE, 1)
    swapped = [3, 1, 2, 0, 4, 5, 6, 7]
    place = eplb(swapped, 1, EXPERTS)
    before, trace = moe_layer_forward(layer, weights, inputs)
    after, _ = moe_layer_forward(replace(layer, placement=place), weights, inputs)
    assert same(before, after)

    ids = trace["route"].tensors["topk_ids"][:, 0]
    routes = MoEInputs(inputs.hidden_states, place.to_physical(ids[:, None]), torch.ones(len(ids), 1))
    moved = weights.of_experts(place.physical_to_logical)
    stale, _ = moe_forward(NVFP4, replace(moved, w2_global_scale=weights.w2_global_scale), routes)
    factor = torch.tensor([8.0, 1, 1, 1 / 8, 1, 1, 1, 1])[ids]
    assert {0, 3} <= set(ids.tolist())
    assert torch.equal(stale.float(), before.float() * factor[:, None])
    stale, _ = moe_forward(NVFP4, replace(moved, w2_scale=weights.w2_scale), routes)
    assert [not same(stale[t], before[t]) for t in range(len(ids))] == [int(e) in (0, 3) for e in ids]


@pytest.mark.parametrize("counts", [[0, 5, 0, 1], [0, 0, 6, 0], [0, 0, 0, 0]], ids=str)
def test_106_ranks_without_tokens(counts):
    """DeepEP#374, sglang#25397: a rank with 0 tokens was an error, a null pointer, a deadlock."""
    weights, inputs = problem(NVFP4, 6)
    layer = MoELayer(NVFP4, RENORMALIZE, 2, shared=random_shared())
    alone, _ = moe_layer_forward(layer, weights, inputs)
    outputs, _ = moe_layer_forward(layer, weights, spread(inputs, counts))
    assert [len(output) for output in outputs] == counts
    assert same(torch.cat(list(outputs)), alone[: sum(counts)])


def test_107_everything_to_one_rank():
    """flashinfer#4637: a kernel hung when all ids were in rank 0's range."""
    weights, inputs = problem(NVFP4)
    logits = inputs.router_logits.clone()
    logits[:, 2:] -= 1000
    inputs = replace(inputs, router_logits=logits)
    layer = MoELayer(NVFP4, RENORMALIZE, 2)
    outputs, trace = moe_layer_forward(layer, weights, spread(inputs, [3, 3, 3, 3]))
    assert [len(trace["dispatch", rank].tensors["expert"]) for rank in range(4)] == [24, 0, 0, 0]
    assert same(torch.cat(list(outputs)), moe_layer_forward(layer, weights, inputs)[0])


def test_109_scales_of_dispatched_fp8_thrown_away():
    """sglang#31529: codes arrived with scales, and the codes alone were quantized again: half of 896."""
    scheme = SCHEMES[3]
    x = torch.full((1, HIDDEN), 896.0).bfloat16()
    assert scheme.stage is not None
    quantized = quantize_activation(x, scheme.stage)
    codes = quantized.codes.view(torch.float8_e4m3fn)
    ids, one = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)

    def staged(inputs: MoEInputs) -> float:
        stage = moe_forward(scheme, weights, inputs)[1]["stage"].tensors
        return float(stage["values"][0, 0].float() * stage["scales"][0, 0])

    w13, w2 = bilinear(1, width=128)
    weights = MoEWeights(w13, w2)
    assert staged(MoEInputs(codes, ids, one, quantized.scales)) == 896
    assert staged(MoEInputs(codes.bfloat16(), ids, one)) == 448


def test_111_replicas_that_behave_like_ranks():
    """transformers#40031: data-parallel copies that hold every expert kept only those that a rank would hold."""
    layer, inputs = MoELayer(BF16, GIVEN, 2), given([1.0, 1.0])
    assert run(layer, experts(1, 2), inputs) == [3]
    place, ids = linear(2, 2), torch.tensor([[0, 1]])
    wrong = []
    for rank in range(2):
        own = torch.where(place.local_ids(place.to_physical(ids), rank) >= 0, ids, -1)
        output, _ = moe_forward(BF16, experts(1, 2), MoEInputs(tokens(1.0), own, torch.ones(1, 2)))
        wrong += value_of(output)
    assert wrong == [1, 2]


# --- J: shared experts and reductions ----------------------------------------------------------------------------


def test_113_replicated_shared_output_summed_over_ranks():
    """sglang#26845, vllm#49378: routed parts of 1 and 2 from two ranks, shared 5: 8, and 13 when each rank adds it."""
    layer = MoELayer(BF16, GIVEN, 2, shared=shared_of(5))
    none = LayerInputs(tokens(), torch.empty(0, 2))
    outputs, trace = moe_layer_forward(layer, experts(1, 2), [given([1.0, 1.0]), none])
    assert value_of(outputs[0]) == [8]
    parts = trace["combine", 0].tensors["terms"][0, :, 0].tolist()
    shared = trace["output", 0].tensors["shared"][0, 0].item()
    assert (sorted(parts), shared) == ([1, 2], 5)
    assert sum(part + shared for part in parts) == 13


def test_114_sharded_shared_output_never_reduced():
    """tpu-inference#3435: a rank's part of the shared output, 2 of 5, was taken for all of it."""
    w13, w2 = (w[0] for w in bilinear(2))
    w13[32, 0], w13[96, 0] = LARGE, 3 / LARGE
    w2[:, 32] = 1
    layer = MoELayer(BF16, GIVEN, 2, shared=SharedExperts(w13, w2, tp_size=2))
    inputs = given([1.0, 1.0])
    assert run(layer, experts(1, 2), inputs) == [8]
    first = SharedExperts(torch.cat((w13[:32], w13[64:96])), w2[:, :32])
    assert run(replace(layer, shared=first), experts(1, 2), inputs) == [5]


def test_116_the_fault_is_in_the_shared_experts():
    """sglang#33107: the routed part was right by replay. Stage by stage, the first that differs is the last."""
    weights, inputs = problem(NVFP4)
    shared = random_shared()
    swapped = replace(shared, w13=torch.cat(shared.w13.chunk(2)[::-1]))
    layer = MoELayer(NVFP4, RENORMALIZE, 2, shared=shared)
    _, right = moe_layer_forward(layer, weights, inputs)
    _, wrong = moe_layer_forward(replace(layer, shared=swapped), weights, inputs)
    differ = [
        a.name
        for a, b in zip(right, wrong, strict=True)
        if not all(torch.equal(a.tensors[n].float(), b.tensors[n].float()) for n in a.tensors)
    ]
    assert differ == ["output"]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_117_padding_rows_are_zero(scheme):
    """sglang#30895: rows that a captured graph pads with were not zero before the collective."""
    weights, inputs = problem(scheme)
    layer = MoELayer(scheme, RENORMALIZE, 2, shared=random_shared(), routed_scaling_factor=1.0)
    garbage = inputs.hidden_states.clone()
    garbage[9:] = float("nan")
    logits = inputs.router_logits.clone()
    logits[9:] = float("nan")
    padded = LayerInputs(garbage, logits, num_tokens=9)
    output, trace = moe_layer_forward(layer, weights, padded)
    assert (output[9:].view(torch.int16) == 0).all()
    assert trace["route"].tensors["topk_ids"][9:].tolist() == [[-1, -1]] * 3
    alone, _ = moe_layer_forward(layer, weights, spread(inputs, [9])[0])
    assert same(output[:9], alone)
    wrong, _ = moe_layer_forward(layer, weights, inputs)
    assert bool(wrong[9:].any(1).all())
