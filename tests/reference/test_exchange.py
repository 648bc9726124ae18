"""Dispatch against a plain loop; combine's order, its single rounding, and what it must not add."""

import math

import pytest
import torch

from fp4ep.reference.exchange import Rows, by_expert, combine, exchange_in_process, route_rows, route_terms
from fp4ep.reference.formats import E4M3, E5M2
from fp4ep.reference.scheme import Combine

Route = tuple[int, int, int, int]  # expert, source rank, token, slot


def plain_dispatch(topk_ids: list[torch.Tensor], num_experts: int) -> list[list[Route]]:
    received: list[list[Route]] = [[] for _ in topk_ids]
    for rank, ids in enumerate(topk_ids):
        for token, row in enumerate(ids.tolist()):
            for slot, expert in enumerate(row):
                if expert >= 0:
                    received[expert // (num_experts // len(topk_ids))].append((expert, rank, token, slot))
    return [sorted(routes) for routes in received]


def dispatch(topk_ids: list[torch.Tensor], num_experts: int) -> list[Rows]:
    """Send and sort, as `moe_forward` does; the payload is the token's number, the weight tells every slot apart."""
    sent = []
    for rank, ids in enumerate(topk_ids):
        payload = {"values": 100.0 * rank + torch.arange(len(ids), dtype=torch.float32)}
        weights = torch.arange(ids.numel(), dtype=torch.float32).reshape(ids.shape)
        sent.append(route_rows(rank, ids, weights, payload))
    owner = [rows["expert"] // (num_experts // len(topk_ids)) for rows in sent]
    return [by_expert(rows) for rows in exchange_in_process(sent, owner)]


def send_home(rows: list[Rows], outputs: list[torch.Tensor]) -> list[Rows]:
    routes = [{"values": o, "token": r["token"], "slot": r["slot"]} for r, o in zip(rows, outputs, strict=True)]
    return exchange_in_process(routes, [r["source_rank"] for r in rows])


def as_tuples(routes: Rows) -> list[Route]:
    columns = [routes[name] for name in ("expert", "source_rank", "token", "slot")]
    assert all(column.dtype is torch.int64 for column in columns)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("num_experts", "tokens", "top_k"),
    [(4, (7,), 2), (8, (5, 3), 3), (8, (0, 5, 0, 1), 8), (6, (4, 4, 4), 1), (16, (9, 0), 4), (2, (0, 0), 2)],
)
def test_dispatch_is_the_plain_loop(num_experts, tokens, top_k, dtype):
    """Random ids with masked slots (-1 and lower) and duplicates."""
    g = torch.Generator().manual_seed(num_experts * top_k)
    ids = [torch.randint(-3, num_experts, (count, top_k), generator=g).to(dtype) for count in tokens]
    found = dispatch(ids, num_experts)
    assert [as_tuples(routes) for routes in found] == plain_dispatch(ids, num_experts)
    for rows in found:
        assert torch.equal(rows["values"], 100.0 * rows["source_rank"] + rows["token"])
        assert torch.equal(rows["topk_weights"], (rows["token"] * top_k + rows["slot"]).float())


def test_dispatch_places_experts_linearly():
    """8 experts on 4 ranks, global ids (vllm-gaudi#1796 used them as local ids: all ranks but 0 dropped theirs)."""
    routes = dispatch([torch.tensor([[2, 3], [0, 5], [2, 7]])] + [torch.empty(0, 2, dtype=torch.int64)] * 3, 8)
    assert [sorted(table["expert"].tolist()) for table in routes] == [[0], [2, 2, 3], [5], [7]]


def test_dispatch_duplicates_are_two_routes():
    (routes,) = dispatch([torch.tensor([[1, 1, -1]])], 4)
    assert as_tuples(routes) == [(1, 0, 0, 0), (1, 0, 0, 1)]


def test_dispatch_skewed_to_one_rank():
    """Every id on rank 0: the other rank gets an empty table of the same form."""
    routes = dispatch([torch.zeros(3, 1, dtype=torch.int64), torch.ones(2, 1, dtype=torch.int64)], 4)
    assert [len(table["expert"]) for table in routes] == [5, 0]


def combine_terms(*terms: float, ids: list[int] | None = None, rule: Combine = Combine.LIVE_SLOTS) -> float:
    """One token, one channel."""
    topk_ids = torch.tensor([ids or list(range(len(terms)))])
    values, weights = torch.tensor(terms).bfloat16()[None, :, None], torch.ones(topk_ids.shape)
    return combine(values, topk_ids, rule, local_experts=8, topk_weights=weights).item()


IN_FLOAT32 = (Combine.LIVE_SLOTS, Combine.ALL_SLOTS, Combine.WEIGHTED)


@pytest.mark.parametrize("rule", Combine)
def test_combine_adds_in_slot_order(rule):
    """2^24 + 1 is 2^24 in float32. The caller's order decides, not that of the expert ids."""
    assert combine_terms(2.0**24, 1.0, -(2.0**24), rule=rule) == 0.0
    assert combine_terms(2.0**24, -(2.0**24), 1.0, rule=rule) == 1.0
    assert combine_terms(2.0**24, 1.0, -(2.0**24), ids=[2, 0, 1], rule=rule) == 0.0  # sorted by expert it would be 1


@pytest.mark.parametrize("rule", IN_FLOAT32)
@pytest.mark.parametrize(
    ("terms", "once", "each_time"),
    [
        pytest.param((1.0, 2**-8, 2**-8, 2**-8), 1.015625, 1.0, id="88 TensorRT-LLM#16778"),
        pytest.param((1.0, 2**-9, -1.0), 2**-9, 0.0, id="89 mlc-ai/TIRx-kernels#208"),
    ],
)
def test_combine_rounds_once(terms, once, each_time, rule):
    """Summing in bf16, rounded term by term, loses what the float32 sum keeps."""
    assert combine_terms(*terms, rule=rule) == once
    in_bf16 = torch.zeros((), dtype=torch.bfloat16)
    for term in terms:
        in_bf16 = in_bf16 + torch.tensor(term, dtype=torch.bfloat16)
    assert float(in_bf16) == each_time == combine_terms(*terms, rule=Combine.ON_ARRIVAL)


def test_combine_masked_slots():
    """A masked slot is skipped, even if NaN, or added with whatever it holds: by rule (vllm#46408 summed such)."""
    for stale in (5.0, math.nan):
        assert combine_terms(3.0, stale, ids=[0, -1]) == combine_terms(stale, 3.0, ids=[-9, 0]) == 3.0
        assert combine_terms(3.0, stale, ids=[0, -1], rule=Combine.ON_ARRIVAL) == 3.0
    assert combine_terms(3.0, 5.0, ids=[0, -1], rule=Combine.ALL_SLOTS) == 8.0
    assert math.isnan(combine_terms(math.nan, 3.0, ids=[-1, 0], rule=Combine.ALL_SLOTS))


def test_combine_signs_of_zero():
    """From +0 a lone -0 gives +0; from the first slot it stays -0. Nothing live gives +0."""
    assert math.copysign(1, combine_terms(-0.0, -0.0)) == 1
    assert math.copysign(1, combine_terms(-0.0, -0.0, rule=Combine.ALL_SLOTS)) == -1
    assert math.copysign(1, combine_terms(-0.0, 0.0, rule=Combine.ALL_SLOTS)) == 1
    assert math.copysign(1, combine_terms(-0.0, -0.0, rule=Combine.ON_ARRIVAL)) == 1
    assert math.copysign(1, combine_terms(-0.0, ids=[-1])) == 1


@pytest.mark.parametrize("rule", Combine)
@pytest.mark.parametrize("terms", [(-math.nan, 1.0), (math.inf, -math.inf)])
def test_combine_gives_the_canonical_nan(rule, terms):
    ids, weights = torch.tensor([[0, 1]]), torch.ones(1, 2)
    out = combine(torch.tensor(terms).bfloat16()[None, :, None], ids, rule, local_experts=2, topk_weights=weights)
    assert out.view(torch.int16).item() == 0x7FFF


def test_route_terms_overwrite_live_slots_only():
    """Two ranks with the same (token, slot) pairs: each gets its own rows, other places keep the workspace's."""
    ids = [torch.tensor([[0, 3, -1]]), torch.tensor([[3, -5, 1]])]
    routes = dispatch(ids, 4)
    outputs = [(table["expert"] + 10 * table["source_rank"]).bfloat16()[:, None] for table in routes]
    workspace = torch.full((1, 3, 1), 99.0, dtype=torch.bfloat16)
    terms = [route_terms(rows, workspace).flatten().tolist() for rows in send_home(routes, outputs)]
    assert terms == [[0.0, 3.0, 99.0], [13.0, 99.0, 11.0]]
    assert bool((workspace == 99).all())  # the caller's is left alone


@pytest.mark.parametrize("wire", [None, E4M3, E5M2], ids=str)
def test_grouped_sums_by_rank(wire):
    """A plain loop: slots of one rank in float32, rounded to the wire, ranks ascending, rounded to bf16."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(-2, 8, (20, 4), generator=g)
    terms = (torch.randn(20, 4, 64, generator=g) * 10.0 ** torch.randint(-3, 3, (20, 4, 1), generator=g)).bfloat16()
    found = combine(terms, ids, Combine.GROUPED, local_experts=2, wire=wire)
    for token in range(20):
        total = torch.zeros(64)
        for rank in range(4):
            mine = [slot for slot in range(4) if ids[token, slot] >= 0 and int(ids[token, slot]) // 2 == rank]
            part = torch.zeros(64)
            for slot in mine:
                part = part + terms[token, slot].float()
            if wire is None:
                part = part.bfloat16().float()
            else:
                for block in part.view(2, 32):
                    exponent = math.ceil(math.log2(float(block.abs().max()) / wire.max)) if mine else 0
                    block.copy_((block * 2.0**-exponent).to(wire.dtype).float() * 2.0**exponent)
            total = total + part
        assert torch.equal(found[token], total.bfloat16())
    everywhere = combine(terms, ids, Combine.GROUPED, local_experts=8)
    assert torch.equal(everywhere, combine(terms, ids, Combine.LIVE_SLOTS))  # one rank: nothing is rounded on its way
    assert not torch.equal(found, everywhere)


@pytest.mark.parametrize("rule", [rule for rule in Combine if rule is not Combine.GROUPED])
def test_combine_agrees_with_a_plain_loop(rule):
    """Random routing over 4 ranks: float32 additions one slot after the other, rounded to bf16 by the rule."""
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(-2, 8, (count, 4), generator=g) for count in (3, 0, 5, 2)]
    routes = dispatch(ids, 8)
    outputs = [torch.randn(len(table["expert"]), 16, generator=g).bfloat16() for table in routes]
    returned = send_home(routes, outputs)
    rows = {
        (source, token, slot): row
        for table, output in zip(routes, outputs, strict=True)
        for (_, source, token, slot), row in zip(as_tuples(table), output, strict=True)
    }
    weighted = rule is not Combine.WEIGHTED and rule.weighted  # without a format on the wire, so by bf16
    for rank in range(4):
        workspace = torch.randn(len(ids[rank]), 4, 16, generator=g).bfloat16()
        weights = torch.rand(ids[rank].shape, generator=g)
        terms = route_terms(returned[rank], workspace)
        found = combine(terms, ids[rank], rule, local_experts=1, topk_weights=weights)
        assert found.dtype is torch.bfloat16
        assert found.shape == (len(ids[rank]), 16)
        for token in range(len(ids[rank])):
            total = torch.zeros(16)
            if weighted:
                sent: dict[int, torch.Tensor] = {}
                for slot, expert in enumerate(ids[rank][token].tolist()):
                    if expert >= 0:
                        group = expert if rule is Combine.WEIGHTED_GROUPS else slot
                        exact = rows[rank, token, slot].double() * float(weights[token, slot])
                        sent[group] = (exact + sent.get(group, torch.zeros(16)).double()).float()
                for group in sorted(sent):
                    total = total + sent[group].bfloat16().float()
            for slot in range(0 if weighted else 4):
                if (rank, token, slot) in rows and rule is Combine.WEIGHTED:
                    exact = rows[rank, token, slot].double() * float(weights[token, slot]) + total.double()
                    total = exact.float()  # 8 + 24 bits and a sum of like magnitude: float64 has room
                elif (rank, token, slot) in rows:
                    total = total + rows[rank, token, slot].float()
                    total = total.bfloat16().float() if rule is Combine.ON_ARRIVAL else total
                elif rule is Combine.ALL_SLOTS:
                    total = total + workspace[token, slot].float()
            assert torch.equal(found[token], total.bfloat16())
