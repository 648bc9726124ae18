"""Comparison of two runs: what is counted, which difference is first, and what cannot be compared."""

from dataclasses import replace

import pytest
import torch
from runs import NVFP4, black_box, change, fake_quant_run, next_code, reference_run

from fp4ep.parity.compare import STAGES, Holds, compare, match_routes
from fp4ep.parity.problem import Problem

PROBLEM = Problem(NVFP4, tokens=(7, 4), routing="masked", seed=3)


@pytest.fixture(scope="module")
def expected():
    return reference_run(PROBLEM)


def by_name(comparison):
    return {(t.stage, t.tensor): t for t in comparison.tensors}


def test_equal_runs(expected):
    found = compare(expected, reference_run(PROBLEM))
    assert found.passed
    assert found.first is found.first_outside is None
    assert [stage for stage in STAGES if any(t.stage == stage for t in found.tensors)] == list(STAGES)
    assert all(t.holds is Holds.BITS and t.differing == t.outside == t.allowed == 0 for t in found.tensors)
    assert by_name(found)["combine", "values"].elements == 11 * 256
    assert found.missing_routes == found.extra_routes == 0


def test_one_code_of_one_route(expected):
    """Everything about the place is said, and the stages after it follow."""
    rank, row, channel = 1, 2, 70
    hook = change("requantize", "values", lambda v: next_code(v, (row, channel)), rank)
    found = compare(expected, reference_run(PROBLEM, hook))
    table = expected.trace["dispatch", rank].tensors
    first = found.first
    assert (first.stage, first.tensor, first.rank, first.channel, first.block) == ("requantize", "values", 1, 70, 1)
    for name in ("expert", "source_rank", "token", "slot"):
        assert getattr(first, name) == int(table[name][row])
    assert first.ulps == 1
    code = int(expected.trace["requantize", rank].tensors["values"][row, channel].view(torch.uint8))
    assert first.left_code == f"0x{code:02x}"
    assert first == found.first_outside
    assert not found.passed
    counted = by_name(found)["requantize", "values"]
    assert (counted.differing, counted.outside, counted.max_ulps, counted.holds) == (1, 1, 1, Holds.NONE)
    assert counted.per_rank == {0: 0, 1: 1}
    assert {e for e, n in counted.per_expert.items() if n} == {first.expert}
    assert by_name(found)["fc1", "up"].differing == 0
    assert by_name(found)["fc2", "values"].per_rank[0] == 0 < by_name(found)["fc2", "values"].per_rank[1]
    for word in ("requantize.values", "rank 1", "channel 70", "block 1", "1 ulp apart", first.left_code):
        assert word in str(first)


def test_a_scale_has_a_block_and_no_channel(expected):
    hook = change("requantize", "scales", lambda s: s[0, 1].mul_(2))
    first = compare(expected, reference_run(PROBLEM, hook)).first
    assert (first.tensor, first.block, first.channel) == ("scales", 1, None)


def test_the_terms_of_a_token_have_slots(expected):
    live = (PROBLEM.build().inputs[0].topk_ids >= 0).nonzero()[0].tolist()
    hook = change("combine", "terms", lambda t: t[live[0], live[1], 5].neg_())
    first = compare(expected, reference_run(PROBLEM, hook)).first
    assert (first.stage, first.tensor, first.token, first.slot, first.channel) == ("combine", "terms", *live, 5)


def test_nan_on_one_side(expected):
    hook = change("fc1", "gate", lambda g: g[0, 0].fill_(torch.nan))
    found = compare(expected, reference_run(PROBLEM, hook))
    assert (found.first.stage, found.first.tensor) == ("fc1", "gate")
    assert "one of them NaN" in str(found.first)
    assert by_name(found)["fc1", "gate"].differing == 1


def test_lost_and_added_routes(expected):
    """A route that is missing on one rank and turns up on the other; only common rows are compared."""
    layer = PROBLEM.build()
    ids = layer.inputs[0].topk_ids.clone()
    token, slot = (int(i) for i in (ids >= 0).nonzero()[0])
    before = int(ids[token, slot])
    ids[token, slot] = (before + 4) % 8  # on the other rank
    moved = replace(layer, inputs=(replace(layer.inputs[0], topk_ids=ids), layer.inputs[1]))
    found = compare(expected, reference_run(PROBLEM, layer=moved))
    assert (found.missing_routes, found.extra_routes) == (1, 1)
    owner = min(before, (before + 4) % 8) // 4
    assert (found.first.stage, found.first.tensor, found.first.rank) == ("dispatch", "routes", owner)
    assert not found.passed
    assert by_name(found)["fc2", "values"].differing == 0
    assert by_name(found)["combine", "values"].differing > 0


def test_match_routes_pairs_by_key():
    def table(*keys):
        return dict(zip(("expert", "source_rank", "token", "slot"), torch.tensor(keys).T, strict=True))

    found = match_routes(
        table((0, 0, 0, 0), (0, 0, 1, 0), (3, 1, 0, 1)), table((3, 1, 0, 1), (0, 0, 0, 0), (5, 0, 1, 0))
    )
    assert (found.left.tolist(), found.right.tolist()) == ([0, 2], [1, 0])
    assert (found.only_left.tolist(), found.only_right.tolist()) == ([1], [2])


def test_a_black_box_is_compared_at_its_output(expected):
    hook = change("fc2", "values", lambda v: v[0, 3].neg_())
    found = compare(expected, black_box(reference_run(PROBLEM, hook)))
    assert {t.stage for t in found.tensors} == {"combine"}
    assert (found.first.stage, found.first.channel) == ("combine", 3)


def test_no_tokens_at_all():
    problem = replace(PROBLEM, tokens=(0, 0))
    found = compare(reference_run(problem), reference_run(problem))
    assert found.passed
    assert all(t.elements == 0 for t in found.tensors)


def test_what_cannot_be_compared(expected):
    with pytest.raises(ValueError, match="one scheme and ep_size"):
        compare(expected, reference_run(replace(PROBLEM, tokens=(11,))))
    with pytest.raises(ValueError, match="the same tokens, got other hidden_states"):
        compare(expected, reference_run(replace(PROBLEM, seed=4)))
    with pytest.raises(ValueError, match="left must claim bits, got fake_quant"):
        compare(fake_quant_run(PROBLEM), expected)
    with pytest.raises(ValueError, match="left must be the reference"):
        compare(replace(expected, side="flashinfer"), fake_quant_run(PROBLEM))
    one_scale = [
        replace(made, tensors={**made.tensors, "scales": made.tensors["scales"][:, :1]})
        if made.name == "requantize"
        else made
        for made in expected.trace
    ]
    halved = replace(expected, trace=replace(expected.trace, stages=tuple(one_scale)))
    with pytest.raises(ValueError, match=r"right's requantize\.scales \(rank 0\) must be torch\.float32 \[\d+, 2\]"):
        compare(expected, halved)
    with pytest.raises(ValueError, match="a stage in common"):
        compare(expected, replace(expected, trace=replace(expected.trace, stages=())))
