"""Rules of routing, one by one. A number that ends a name is that of a public bug: with it the test fails."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from routing_cases import adversarial, noise

from fp4ep.reference.routers import (
    REFUSED,
    ROUTERS,
    Bias,
    Groups,
    Renormalize,
    Router,
    Score,
    Shortfall,
    find_router,
    router_of_number,
)
from fp4ep.reference.routing import Routing, route

INF, NAN = torch.inf, torch.nan
#: Their ids come from the logits.
BY_LOGITS = [r for r in ROUTERS.values() if not r.hash_routing and r.score is not Score.UNIFORM]
SIGMOID_BIAS = [r for r in BY_LOGITS if r.bias is Bias.SELECTS and r.score in (Score.SIGMOID, Score.SIGMOID_TANH)]


def name_of(router: Router) -> str:
    return router.name


def run(router: Router | str, logits: object, top_k: int, bias: object = None, **rest: object) -> Routing:
    """Route, with all groups chosen where a router has groups: then they change nothing."""
    router = find_router(router) if isinstance(router, str) else router
    logits = torch.as_tensor(logits)
    if router.groups is not Groups.NONE:
        rest = {"num_expert_group": 1, "topk_group": 1, **rest}
    bias = None if bias is None or router.bias is Bias.NONE else torch.as_tensor(bias)
    return route(router, logits, router.top_k or top_k, bias=bias, **rest)  # type: ignore[arg-type]


def assert_sound(routing: Routing, experts: int) -> None:
    ids = routing.topk_ids.sort(-1).values
    assert ids.min() >= 0
    assert ids.max() < experts
    assert (ids[:, 1:] != ids[:, :-1]).all()


# --- weights


@pytest.mark.parametrize("router", SIGMOID_BIAS, ids=name_of)
def test_weight_is_the_score_and_not_biased_score_minus_bias_66(router):
    """sigmoid 2e-7 + 12 - 12 is 0 in float32."""
    logits = torch.full((1, 8), -15.4)
    score = run(router, logits, 1).scores[0, 0]
    assert 1e-7 < score < 3e-7
    assert (score + 12) - 12 == 0
    routing = run(router, logits, 4, bias=torch.full((8,), 12.0), routed_scaling_factor=2.5)
    assert routing.topk_weights.sum() == pytest.approx(2.5, rel=2**-7)  # bf16 weights
    assert (routing.topk_weights == routing.topk_weights[0, 0]).all()


def test_all_sigmoids_underflow_67():
    """0 / 0: what each rule of renormalization makes of it. Without epsilon it is NaN, in the reference as there."""
    logits, bias = torch.full((1, 8), -100.0), torch.zeros(8)
    assert run("vllm_topk_bias", logits, 4, bias=bias).topk_weights.isnan().all()
    assert run("vllm_grouped_sigmoid", logits, 4, bias=bias).topk_weights.isnan().all()
    for name in ("DeepSeekV3", "MiniMax2", "SigmoidRenorm", "fused_topk_deepseek", "vllm_sigmoid", "trace_DeepSeekV3"):
        assert (run(name, logits, 4, bias=bias).topk_weights == 0).all(), name


def test_the_two_forms_of_sigmoid_67():
    logits = torch.tensor([[-20.0, 0.0, 20.0, -8.0]])
    tanh = run("Sigmoid", logits, 4).scores[0]
    exp = run("vllm_sigmoid", logits, 4).scores[0]
    assert tanh[0] == 0
    assert float(exp[0]) == pytest.approx(2.0611537e-9, rel=1e-6)
    assert tanh[1:3].tolist() == exp[1:3].tolist() == [0.5, 1.0]
    assert tanh[3] != exp[3]


def test_ties_across_the_edge_in_a_float32_bias_68():
    logits = torch.full((1, 16), -50.0)
    bias = torch.full((16,), 11.2)
    bias[[5, 9]] = 11.25
    for router in SIGMOID_BIAS:
        routing = run(router, logits, 6, bias=bias)
        assert_sound(routing, 16)
        if router.bias_dtype is None:
            assert routing.topk_ids.tolist() == [[5, 9, 0, 1, 2, 3]], router.name
        else:  # 11.2 is 11.1875 there
            assert routing.topk_ids[0, :2].tolist() == [5, 9]


@pytest.mark.parametrize("router", SIGMOID_BIAS, ids=name_of)
def test_scores_below_a_marker_of_minus_one_69(router):
    routing = run(router, torch.zeros(1, 8), 3, bias=torch.full((8,), -2.0))
    assert routing.topk_ids.tolist() == [[0, 1, 2]]
    down = run(router, torch.zeros(1, 8), 3, bias=-2.0 - torch.arange(8.0))
    assert down.topk_ids.tolist() == [[0, 1, 2]]


def test_padding_rows_are_masked_69():
    routing = run("vllm_softmax", noise(3, 3, 8), 2, is_padding=torch.tensor([False, True, False]))
    assert routing.topk_ids[1].tolist() == [-1, -1]
    assert routing.topk_weights[1].tolist() == [0, 0]
    assert (routing.topk_ids[[0, 2]] >= 0).all()


def test_softmax_before_and_after_the_selection_71():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    exact = {"weight_dtype": torch.float32}
    default = run(find_router("Default", **exact), logits, 2).topk_weights[0]
    renormalize = run(find_router("Renormalize", **exact), logits, 2).topk_weights[0]
    naive = run("trace_RenormalizeNaive", logits, 2).topk_weights[0]
    assert default.tolist() == pytest.approx([0.6439142, 0.2368828], rel=1e-6)
    assert renormalize.tolist() == pytest.approx([0.7310586, 0.2689414], rel=1e-6)
    assert naive.tolist() == pytest.approx(renormalize.tolist(), rel=4 * 2**-23)
    assert run("vllm_softmax", logits, 2).topk_weights.sum() == pytest.approx(1, rel=2**-22)
    no_renorm = find_router("vllm_softmax", renormalize=Renormalize.NONE)
    assert run(no_renorm, logits, 2).topk_weights[0].tolist() == default.tolist()


def test_bf16_logits_are_read_as_bf16_71():
    logits = noise(4, 4, 16).bfloat16()
    for router in BY_LOGITS:
        if router.score_dtype is torch.float32:
            a, b = run(router, logits, 2), run(router, logits.float(), 2)
            assert torch.equal(a.topk_ids, b.topk_ids), router.name
            assert torch.equal(a.topk_weights, b.topk_weights), router.name


def test_renormalize_is_softmax_of_the_selected_only_72():
    logits = noise(5, 8, 64)
    routing = run(find_router("Renormalize", weight_dtype=torch.float32), logits, 8)
    top = logits.sort(-1, descending=True).values[:, :8]
    assert torch.equal(routing.topk_weights, torch.softmax(top.double(), -1).float())
    assert torch.equal(run("Renormalize", logits, 8).topk_weights, routing.topk_weights.bfloat16().float())


def test_forms_of_softplus_73():
    """log(1 + exp(x)) is 0 at -17, and log1p(exp(x)) is infinite at 89."""
    logits = torch.tensor([[-17.0, -10.0, 0.0, 20.5, 89.0]])
    table = {"token_ids": torch.tensor([0]), "expert_table": torch.arange(5)[None]}
    stable = run("hash_topk", logits, 5, **table).scores[0]
    plain = run("DeepseekV4", logits, 5).scores[0]
    assert plain[0] == 0
    assert float(stable[0]) ** 2 == pytest.approx(4.139938e-8, rel=1e-6)
    assert plain[1] != stable[1]
    assert plain[3:].tolist() == stable[3:].tolist() == torch.tensor([20.5, 89.0]).sqrt().tolist()


def test_sqrtsoftplus_is_not_a_sigmoid_73():
    logits, bias = noise(6, 64, 256), noise(8, 256) / 8
    a, b = (run(name, logits, 6, bias=bias).topk_ids.sort(-1).values for name in ("DeepseekV4", "vllm_sigmoid"))
    assert (a != b).any(-1).sum() > 20


def test_k_of_one_keeps_its_shape_and_normalizes_per_token_83():
    logits = noise(9, 5, 8)
    for router in BY_LOGITS:
        routing = run(router, logits, 1)
        assert routing.topk_ids.shape == routing.topk_weights.shape == (5, 1)
    for name in ("vllm_softmax", "vllm_sigmoid", "Renormalize", "trace_RenormalizeNaive", "vllm_topk_bias"):
        weights = run(name, logits, 1).topk_weights.flatten().tolist()
        assert weights == pytest.approx([1] * 5, rel=2**-23), name  # w * (1 / w) need not be 1


# --- selection


@pytest.mark.parametrize("router", BY_LOGITS, ids=name_of)
def test_equal_logits_go_to_the_lowest_ids_74(router):
    """Ties by id and not by a small number taken off the score, which changes the set where scores are close."""
    assert run(router, torch.ones(2, 40), 8).topk_ids.tolist() == [list(range(router.top_k or 8))] * 2
    # float32 neighbours: a bonus of 3e-7 per id would reorder them
    up = torch.tensor([0.5], dtype=torch.float32) + torch.arange(40) * 2.0**-20
    assert run(router, up[None].float(), 8).topk_ids[0, 0] == 39


@pytest.mark.parametrize("router", BY_LOGITS, ids=name_of)
def test_a_row_of_nan_goes_to_distinct_experts_76(router):
    logits = noise(10, 3, 128)
    logits[1] = NAN
    routing = run(router, logits, 4)
    assert_sound(routing, 128)
    assert routing.topk_ids[1].tolist() == [0, 1, 2, 3][: router.top_k]
    assert torch.equal(routing.topk_ids[[0, 2]], run(router, logits[[0, 2]], 4).topk_ids)


@pytest.mark.parametrize("router", BY_LOGITS, ids=name_of)
@pytest.mark.parametrize("bias", [0.0, -2.0, 12.0, -INF, INF, NAN])
def test_ids_are_in_range_for_any_input_77(router, bias):
    experts = 16
    logits = torch.cat([adversarial(experts), -adversarial(experts), torch.full((1, experts), INF)])
    for value in (torch.full((experts,), bias), torch.where(torch.arange(experts) == 3, bias, 0.0)):
        routing = run(router, logits, 8, bias=value)
        assert_sound(routing, experts)
        if router.groups is not Groups.NONE:
            assert_sound(run(router, logits, 8, bias=value, num_expert_group=4, topk_group=1), experts)


def test_fewer_live_experts_than_k_78():
    """Kernels that mask what they took by -inf take expert 0 again and again: [2, 0, 0]."""
    bias = torch.full((8,), -INF)
    bias[2] = 0
    for router in SIGMOID_BIAS:
        filled = run(router, torch.zeros(1, 8), 3, bias=bias)
        assert filled.topk_ids.tolist() == [[2, 0, 1]]
        masked = run(find_router(router.name, shortfall=Shortfall.MASK), torch.zeros(1, 8), 3, bias=bias)
        assert masked.topk_ids.tolist() == [[2, -1, -1]]
        assert masked.topk_weights[0, 1:].tolist() == [0, 0]
    weights = run(find_router("MiniMax2", shortfall=Shortfall.MASK), torch.zeros(1, 8), 3, bias=bias).topk_weights
    assert weights.tolist() == [[1, 0, 0]]


def test_groups_too_small_for_k_78():
    """One group of two experts, four slots: the rest of the slots is filled, or masked."""
    arguments = {"bias": torch.zeros(8), "num_expert_group": 4, "topk_group": 1}
    logits = torch.arange(8.0)[None]
    assert run("DeepSeekV3", logits, 4, **arguments).topk_ids.tolist() == [[7, 6, 0, 1]]
    masked = run(find_router("DeepSeekV3", shortfall=Shortfall.MASK), logits, 4, **arguments)
    assert masked.topk_ids.tolist() == [[7, 6, -1, -1]]


@pytest.mark.parametrize("router", BY_LOGITS, ids=name_of)
def test_experts_from_256_on_are_found_79(router):
    logits = noise(11, 1, 512).clamp(-3, 3)
    logits[0, 300], logits[0, 511] = 5, 6
    assert run(router, logits, 2).topk_ids.tolist() == [[511, 300][: router.top_k]]


def test_softmax_in_bf16_selects_other_experts_81():
    logits = noise(12, 2000, 128)
    float32 = run("vllm_softmax", logits, 8).topk_ids.sort(-1).values
    bf16 = run(find_router("vllm_softmax", score_dtype=torch.bfloat16), logits, 8).topk_ids.sort(-1).values
    assert 0.005 < (float32 != bf16).any(-1).double().mean() < 0.06


def test_bias_is_added_in_float32_82():
    """11.13 and 11.14 are both 11.125 in bf16. FlashInfer's grouped kernel rounds the bias, and so does its record."""
    logits, bias = torch.zeros(1, 2), torch.tensor([11.13, 11.14])
    for router in SIGMOID_BIAS:
        rounds = router.bias_dtype is torch.bfloat16
        assert rounds == (router.name == "DeepSeekV3")
        assert run(router, logits, 1, bias=bias).topk_ids.item() == (0 if rounds else 1), router.name
        assert run(router, logits, 1, bias=bias.bfloat16()).topk_ids.item() == 0


def test_bias_selects_only():
    logits, bias = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 5.0])
    routing = run("vllm_sigmoid", logits, 2, bias=bias)
    assert routing.topk_ids.tolist() == [[2, 0]]
    assert routing.topk_weights[0, 0] < routing.topk_weights[0, 1]
    moved = run("trace_Default", logits, 2, bias=bias)  # a bias on the logits does change the weights
    assert moved.topk_weights[0, 0] > 0.9


def test_signed_zeros_and_nan_where_keys_are_bits():
    logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0]])
    assert run("TopK", logits, 3).topk_ids.tolist() == [[1, 3, 0]]
    assert run("vllm_cpu_softmax", logits, 3).topk_ids.tolist() == [[0, 1, 3]]
    nan = torch.tensor([[1.0, NAN, INF, -NAN]])
    assert run("TopK", nan, 4).topk_ids.tolist() == [[1, 2, 0, 3]]
    assert run("vllm_cpu_softmax", nan, 4).topk_ids.tolist() == [[1, 3, 2, 0]]
    assert run("DeepseekV4", nan, 4).topk_ids.tolist() == [[2, 0, 1, 3]]
    assert run("vllm_sigmoid", nan, 4).topk_ids.tolist() == [[2, 0, 1, 3]]
    assert run("vllm_sigmoid", nan, 4).topk_weights[0, 2:].tolist() == [0, 0]


def test_groups_are_ranked_by_two_experts_or_by_one():
    """Group 0 has the best expert, group 1 the best two."""
    logits = torch.tensor([[3.0, -3.0, 2.0, 2.0]])
    arguments = {"num_expert_group": 2, "topk_group": 1}
    assert route(find_router("DeepSeekV3"), logits, 2, **arguments).topk_ids.tolist() == [[2, 3]]
    vllm = find_router("vllm_grouped_sigmoid")
    assert route(vllm, logits, 2, **arguments).topk_ids.tolist() == [[0, 1]]
    assert route(vllm, logits, 2, bias=torch.zeros(4), **arguments).topk_ids.tolist() == [[2, 3]]


def test_a_bias_per_token():
    logits, bias = torch.zeros(2, 4), torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0]]).float()
    assert run("DeepseekV4", logits, 1, bias=bias).topk_ids.tolist() == [[2], [1]]


def test_hash_routing_takes_ids_from_the_table():
    table = torch.tensor([[3, 1], [0, 2]])
    routing = run("DeepseekV4Hash", noise(13, 3, 4), 2, token_ids=torch.tensor([1, 0, 1]), expert_table=table)
    assert routing.topk_ids.tolist() == [[0, 2], [3, 1], [0, 2]]
    assert routing.topk_weights.sum(-1).tolist() == pytest.approx([1, 1, 1], rel=2**-22)
    with pytest.raises(ValueError, match=r"token_ids must be in \[0, 2\), got 2"):
        run("hash_topk", noise(13, 1, 4), 2, token_ids=torch.tensor([2]), expert_table=table)
    with pytest.raises(ValueError, match=r"expert_table must be in \[0, 3\), got 3"):
        run("hash_topk", noise(13, 1, 3), 2, token_ids=torch.tensor([0]), expert_table=table)


def test_simulated_routing_is_the_order_of_random_numbers():
    routing = run("Simulated", torch.full((50, 16), NAN), 4, generator=torch.Generator().manual_seed(3))
    numbers = torch.rand(50, 16, generator=torch.Generator().manual_seed(3))
    assert torch.equal(routing.topk_ids, torch.topk(numbers, 4).indices)
    assert (routing.topk_weights == 1).all()


# --- names, numbers, arguments


def test_names_of_the_two_enums():
    flashinfer = "Default Renormalize DeepSeekV3 Llama4 RenormalizeNaive TopK SigmoidRenorm MiniMax2 Sigmoid".split()
    for number, name in enumerate(flashinfer):
        assert router_of_number("flashinfer", number).name == router_of_number("vllm", number).name == name
    assert router_of_number("flashinfer", 9).name == "TopKSigmoid"
    assert router_of_number("vllm", 100).name == "DeepseekV4"
    assert router_of_number("vllm", 102).name == "Simulated"
    for stack, number in (("vllm", 9), ("flashinfer", 10), ("vllm", 101), ("flashinfer", 100)):
        with pytest.raises(ValueError, match="number"):
            router_of_number(stack, number)
    with pytest.raises(ValueError, match="stack"):
        router_of_number("sglang", 0)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_names_say_why(name):
    with pytest.raises(ValueError, match=name):
        find_router(name)


def test_unknown_names():
    with pytest.raises(ValueError, match="router must be one of DeepSeekV3"):
        find_router("deepseek")
    with pytest.raises(ValueError, match="a router has no topk; it has name"):
        find_router("TopK", topk=2)


LOGITS = torch.zeros(2, 8)
GROUPS = {"num_expert_group": 2, "topk_group": 1}


@pytest.mark.parametrize(
    ("name", "logits", "top_k", "arguments", "message"),
    [
        ("Default", torch.zeros(8), 2, {}, "logits must be"),
        ("Default", LOGITS.long(), 2, {}, "logits must be"),
        ("Default", LOGITS.double(), 2, {}, "logits must be"),
        ("Default", LOGITS, 0, {}, "top_k must be from 1 to the 8"),
        ("Default", LOGITS, 9, {}, "top_k must be from 1 to the 8"),
        ("Llama4", LOGITS, 2, {}, "top_k must be 1"),
        ("Default", LOGITS, 2, {"bias": torch.zeros(8)}, "bias: router Default has none"),
        ("MiniMax2", LOGITS, 2, {"bias": torch.zeros(7)}, "bias must be"),
        ("MiniMax2", LOGITS, 2, {"bias": torch.zeros(8).double()}, "bias must be"),
        ("MiniMax2", LOGITS, 2, GROUPS, "has no groups"),
        ("DeepSeekV3", LOGITS, 2, {}, "num_expert_group and topk_group must be given"),
        ("DeepSeekV3", LOGITS, 2, {**GROUPS, "num_expert_group": 3}, "num_expert_group must divide"),
        ("DeepSeekV3", LOGITS, 2, {**GROUPS, "topk_group": 3}, "topk_group must be from 1"),
        ("Renormalize", LOGITS, 2, {"routed_scaling_factor": 2.5}, "does not apply it"),
        ("Default", LOGITS, 2, {"token_ids": torch.zeros(2).long()}, "no hash routing"),
        ("hash_topk", LOGITS, 2, {}, "must be given"),
        ("Default", LOGITS, 2, {"is_padding": torch.zeros(2)}, "is_padding must be"),
        ("Default", LOGITS, 2, {"generator": torch.Generator()}, "draws no random numbers"),
    ],
)
def test_wrong_arguments_are_named(name, logits, top_k, arguments, message):
    with pytest.raises(ValueError, match=message):
        route(find_router(name), logits, top_k, **arguments)


def test_no_tokens():
    for router in BY_LOGITS:
        assert run(router, torch.zeros(0, 8), 2).topk_ids.shape == (0, router.top_k or 2)


# --- invariants


@st.composite
def problems(draw: st.DrawFn) -> tuple[Router, torch.Tensor, int, dict]:
    router = draw(st.sampled_from(BY_LOGITS))
    size, groups = draw(st.sampled_from([(3, 4), (2, 3), (8, 1), (1, 6), (5, 2)]))
    tokens, experts = draw(st.integers(1, 4)), size * groups
    value = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, -100.0]))
    row = st.lists(value, min_size=experts, max_size=experts)
    rest: dict = {}
    if router.groups is not Groups.NONE:
        rest = {"num_expert_group": groups, "topk_group": draw(st.integers(1, groups))}
    if router.bias is not Bias.NONE and draw(st.booleans()):
        rest["bias"] = torch.tensor(draw(row))
    logits = torch.tensor([draw(row) for _ in range(tokens)])
    return router, logits, router.top_k or draw(st.integers(1, experts)), rest


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@given(problems())
@settings(deadline=None, max_examples=300)
def test_any_input_is_routed_soundly(problem):
    router, logits, top_k, rest = problem
    assert_sound(route(router, logits, top_k, **rest), logits.shape[1])


@given(problems())
@settings(deadline=None, max_examples=100)
def test_a_token_does_not_depend_on_its_neighbours(problem):
    router, logits, top_k, rest = problem
    together = route(router, logits, top_k, **rest)
    for i in range(len(logits)):
        alone = route(router, logits[i : i + 1], top_k, **rest)
        assert torch.equal(alone.topk_ids[0], together.topk_ids[i])
        assert same(alone.topk_weights[0], together.topk_weights[i])


@given(problems())
@settings(deadline=None, max_examples=100)
def test_weights_descend_without_a_bias(problem):
    router, logits, top_k, rest = problem
    rest.pop("bias", None)
    weights = route(router, logits, top_k, **rest).topk_weights
    assume(router.groups is Groups.NONE or rest["topk_group"] * logits.shape[1] >= top_k * rest["num_expert_group"])
    assume(not weights.isnan().any())
    assume(not logits.isinf().any())
    assert (weights[:, 1:] <= weights[:, :-1]).all()


@st.composite
def untied(draw: st.DrawFn) -> tuple[Router, torch.Tensor, torch.Tensor | None, int]:
    """Router, logits `[1, 12]`, bias and number of groups; no two keys are equal."""
    router = draw(st.sampled_from(BY_LOGITS))
    logits = torch.tensor([draw(st.permutations(range(12)))]).float() / 4 - 1.5
    bias = None
    if router.bias is not Bias.NONE and draw(st.booleans()):
        bias = torch.tensor(draw(st.permutations(range(12)))).float() / 1024
    groups = 1 if router.groups is Groups.NONE else draw(st.sampled_from([1, 2, 3, 4]))
    return router, logits, bias, groups


@given(untied(), st.data())
@settings(deadline=None, max_examples=200)
def test_renamed_experts_are_routed_alike(problem, data):
    """Groups move as a whole, experts within their group."""
    router, logits, bias, groups = problem
    inner = torch.tensor(data.draw(st.permutations(range(12 // groups))))
    outer = torch.tensor(data.draw(st.permutations(range(groups))))
    order = torch.arange(12).unflatten(0, (groups, -1))[outer][:, inner].flatten()
    top_k = router.top_k or data.draw(st.integers(1, 12 // groups))
    rest = {} if router.groups is Groups.NONE else {"num_expert_group": groups, "topk_group": 1}
    a = route(router, logits, top_k, bias=bias, **rest)
    keys = a.scores if bias is None or router.bias is Bias.LOGITS else a.scores + bias
    assume(len(keys.unique()) == 12)
    two = keys.unflatten(-1, (groups, -1)).sort(-1).values[..., -2:].sum(-1)
    assume(len(two.unique()) == groups)
    b = route(router, logits[:, order], top_k, bias=None if bias is None else bias[order], **rest)
    assert torch.equal(order[b.topk_ids], a.topk_ids)
    assert same(a.topk_weights, b.topk_weights)
