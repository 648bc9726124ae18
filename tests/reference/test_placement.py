"""Placement: maps and their inverses, the replica rules, and the public bugs of expert bookkeeping (96 to 104).

A case's number is that of the survey that tests/reference/test_bug_cases.py names; each shows the right value from this
code and the wrong one imitated.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4ep.reference.placement import Placement, Replica, eplb, linear, redundant, round_robin

MAP = [2, 0, 1, 0, 3, 0]  #: slot -> logical expert: expert 0 in slots 1, 3 and 5


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any arrangement, uneven ones included."""
    experts = draw(st.integers(1, 9))
    extra = draw(st.lists(st.integers(0, experts - 1), max_size=6))
    slots = draw(st.permutations([*range(experts), *extra]))
    cuts = sorted(draw(st.lists(st.integers(0, len(slots)), max_size=3)))
    return Placement(experts, tuple(tuple(slots[a:b]) for a, b in zip([0, *cuts], [*cuts, len(slots)], strict=True)))


@pytest.mark.parametrize(
    ("place", "ranks"),
    [
        (linear(8, 4), ((0, 1), (2, 3), (4, 5), (6, 7))),
        (round_robin(8, 4), ((0, 4), (1, 5), (2, 6), (3, 7))),
        (linear(10, 4), ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))),  # vLLM: the remainder goes to the first ranks
        (round_robin(10, 4), ((0, 4, 8), (1, 5, 9), (2, 6), (3, 7))),
        (redundant(4, 2, 3), ((0, 1), (2, 3), (0, 1))),
        (eplb(MAP, 2, 4), ((2, 0, 1), (0, 3, 0))),
        (linear(3, 1), ((0, 1, 2),)),
    ],
)
def test_arrangements(place, ranks):
    assert place.ranks == ranks
    assert place.physical_to_logical.tolist() == [expert for rank in ranks for expert in rank]


def test_round_robin_routing_table():
    """vLLM's global_to_physical of `ExpertMapManager`: offset of the owner plus the index among its experts."""
    assert round_robin(10, 4).logical_to_physical[:, 0].tolist() == [0, 3, 6, 8, 1, 4, 7, 9, 2, 5]


def test_replica_table():
    place = eplb(MAP, 2, 4)
    assert place.replica_counts.tolist() == [3, 1, 1, 1]
    assert place.logical_to_physical.tolist() == [[1, 3, 5], [2, -1, -1], [0, -1, -1], [4, -1, -1]]


@given(placements())
def test_maps_invert_each_other(place):
    forward, back = place.physical_to_logical.tolist(), place.logical_to_physical.tolist()
    assert sorted(slot for row in back for slot in row if slot >= 0) == list(range(len(forward)))
    for expert, row in enumerate(back):
        held = [slot for slot in row if slot >= 0]
        assert held == sorted(held) == [slot for slot, logical in enumerate(forward) if logical == expert]
        assert row[len(held) :] == [-1] * (len(row) - len(held))
        assert place.replica_counts[expert] == len(held) >= 1


@given(placements(), st.sampled_from(Replica), st.integers(0, 6), st.integers(1, 4), st.integers(0, 99))
def test_a_route_reaches_its_expert(place, replica, tokens, top_k, seed):
    """Every live id goes to a slot that holds its expert, on one rank exactly; every other id goes nowhere."""
    ids = torch.randint(-2, place.num_experts + 2, (tokens, top_k), generator=torch.Generator().manual_seed(seed))
    physical = place.to_physical(ids, replica)
    live = (ids >= 0) & (ids < place.num_experts)
    assert physical.dtype is torch.int64
    assert torch.equal(physical >= 0, live)
    assert torch.equal(place.physical_to_logical[physical[live]], ids[live])
    local = torch.stack([place.local_ids(physical, rank) for rank in range(place.ep_size)])
    assert torch.equal((local >= 0).sum(0), live.long())
    for rank, experts in enumerate(place.ranks):
        mine = local[rank] >= 0
        assert [experts[i] for i in local[rank][mine].tolist()] == ids[mine].tolist()


def test_the_hash_against_integers():
    """Rows and slots by plain integer arithmetic, beyond 2^32 / 2654435769 tokens."""
    place = eplb(MAP, 2, 4)
    ids = torch.zeros(5000, 2, dtype=torch.int32)
    want = [[1, 3, 5][(token * 2654435769) % 2**32 % 3] for token in range(5000)]
    got = place.to_physical(ids)
    assert got[:, 0].tolist() == want
    assert torch.equal(got[:, 0], got[:, 1])  # the slots of a token agree
    assert torch.bincount(got[:, 0]).tolist() == [0, 1668, 0, 1664, 0, 1668]


def test_replica_rules_differ():
    place, ids = eplb(MAP, 2, 4), torch.zeros(4, 2, dtype=torch.int64)
    assert place.to_physical(ids, Replica.POSITION).tolist() == [[1, 3], [5, 1], [3, 5], [1, 3]]
    assert place.to_physical(ids, Replica.HASH).tolist() == [[1, 1], [1, 1], [5, 5], [5, 5]]
    assert place.to_physical(ids, Replica.FIRST).tolist() == [[1, 1]] * 4


def test_an_expert_map_covers_the_experts_once():
    for place in (linear(10, 4), round_robin(10, 4)):
        maps = [place.expert_map(rank) for rank in range(4)]
        assert {m.dtype for m in maps} == {torch.int32}
        assert torch.equal((torch.stack(maps) >= 0).sum(0), torch.ones(10, dtype=torch.int64))
    assert linear(8, 4).expert_map(1).tolist() == [-1, -1, 0, 1, -1, -1, -1, -1]
    assert round_robin(8, 4).expert_map(1).tolist() == [-1, 0, -1, -1, -1, 1, -1, -1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement(2, ((0, 1), (2,))), r"ranks must hold logical experts 0 to 1, got \[2\]"),
        (lambda: Placement(2, ((0, -1, 1),)), r"got \[-1\]"),
        (lambda: Placement(4, ((0, 1), (0, 3))), r"every logical expert, \[2\] have no slot"),
        (lambda: Placement(0, ((),)), "num_experts and the number of ranks must be positive"),
        (lambda: Placement(1, ()), "must be positive, got 1 and 0"),
        (lambda: linear(4, 5), "ep_size must be 1 to num_experts = 4, got 5"),
        (lambda: round_robin(4, 0), "ep_size must be 1 to num_experts = 4, got 0"),
        (lambda: eplb([0, 1, 0], 2, 2), "multiple of ep_size = 2 slots, got 3"),
        (lambda: eplb([0, 1], 0, 2), "multiple of ep_size = 0"),
        (lambda: eplb(MAP, 2, 4).expert_map(0), "placement without replicas"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- I: bookkeeping of expert parallelism ------------------------------------------------------------------------


def test_96_global_ids_used_as_local():
    """vllm-gaudi#1796: 8 experts, EP 4. Compared with local ids, rank 0 is right and the others drop every route."""
    ids, place = tensor(2, 3, 0, 5, 2, 7)[:, None], linear(8, 4)
    right = [int((place.local_ids(place.to_physical(ids), rank) >= 0).sum()) for rank in range(4)]
    wrong = [int(((ids // 2 == rank) & (ids < 2)).sum()) for rank in range(4)]
    assert right == [1, 3, 1, 1]
    assert wrong == [1, 0, 0, 0]


def test_97_minus_one_indexes_the_last_entry():
    """vllm#46408: id -1 read the last entry of the map [-1, -1, 0, 1] and became local expert 1."""
    place = linear(4, 2)
    assert place.expert_map(1).tolist() == [-1, -1, 0, 1]
    assert int(place.expert_map(1)[-1]) == 1
    assert place.local_ids(place.to_physical(tensor(-1)[:, None]), 1).tolist() == [[-1]]


def test_98_both_sentinels():
    """vllm#47733: masked is -1 in one stack and num_experts in another; a quarter of the entries are."""
    place = linear(8, 2)
    ids = torch.arange(32).reshape(8, 4) % 8
    ids[::2, 1], ids[1::2, 3] = -1, 8
    masked = (ids == -1) | (ids == 8)
    assert int(masked.sum()) * 4 == masked.numel()
    physical = place.to_physical(ids)
    assert torch.equal(physical, torch.where(masked, -1, ids))
    # Wrong: without the check, 8 is beyond the map and -1 is its last entry, expert 7.
    with pytest.raises(IndexError):
        place.logical_to_physical[ids]
    assert place.logical_to_physical[-1].tolist() == [7]


def test_101_a_slice_of_global_scales():
    """sglang#21602: scales of all 8 experts beside local weights; `[:local]` has the shape and, from rank 1 on, the
    scales of other experts."""
    scales, place = torch.arange(8.0) + 1, linear(8, 4)
    right = [scales[list(place.ranks[rank])].tolist() for rank in range(4)]
    assert right == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert [scales[:2].tolist() == mine for mine in right] == [True, False, False, False]


def test_102_a_scale_of_the_rank_not_of_the_layer():
    """vllm#48355: the largest input scale of a rank, folded into its experts' alphas, is wrong once one moves."""
    input_scale = torch.tensor([0.1, 0.2, 0.4, 0.3])
    before, after = linear(4, 2), eplb([2, 1, 0, 3], 2, 4)
    folded = torch.cat([input_scale[list(rank)].amax().expand(2) for rank in before.ranks])  # by expert, as loaded
    wanted = torch.cat([input_scale[list(rank)].amax().expand(2) for rank in after.ranks])  # by slot
    assert folded.tolist() == pytest.approx([0.2, 0.2, 0.4, 0.4])
    moved = folded[after.physical_to_logical]
    assert float(moved[1] / wanted[1]) == 0.5  # expert 1 stays on a rank whose maximum is now 0.4
    layer = input_scale.amax().expand(4)
    assert torch.equal(layer[after.physical_to_logical], layer)


def test_104_a_map_past_the_end():
    """vllm-ascend#4793: 256 experts and 16 redundant over 16 ranks; with 16 slots a rank, the last map ends beyond."""
    place = redundant(256, 16, 16)
    assert {len(rank) for rank in place.ranks} == {17}
    assert place.first_slots[-1] == place.num_physical_experts == 272
    assert place.ranks[15] == (255, *range(16))
    starts = [rank * (256 // 16) for rank in range(16)]  # wrong: the stride of logical experts, 17 slots each
    assert place.physical_to_logical[starts[15] : starts[15] + 17].tolist() == [*range(240, 256), 0]
    with pytest.raises(ValueError, match="multiple of ep_size"):
        eplb([*range(256), *range(15)], 16, 256)
