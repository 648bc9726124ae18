"""The load against hand counts, plain loops and the rows that dispatch really moves; and how reports show it."""

import base64
import io
import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from runs import NVFP4, reference_run

from fp4ep.parity import html, load_picture
from fp4ep.parity.__main__ import main
from fp4ep.parity.compare import compare
from fp4ep.parity.load import Load, Spread, load_of, load_of_layer
from fp4ep.parity.load_picture import load_pictures, notes, rank_columns
from fp4ep.parity.pictures import COOL
from fp4ep.parity.problem import problems
from fp4ep.parity.summary import as_json
from fp4ep.reference.exchange import exchange_in_process, route_rows


def ids(*rows: list[int], top_k: int = 2) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, top_k)


def by_loop(topk_ids: list[torch.Tensor], num_experts: int) -> dict[str, Counter]:
    """Counts by plain loops: routes by expert and by (sender, receiver), tokens by (sender, receiver)."""
    local = num_experts // len(topk_ids)
    found: dict[str, Counter] = {"experts": Counter(), "routes": Counter(), "tokens": Counter()}
    for sender, rows in enumerate(topk_ids):
        for row in rows.tolist():
            live = [expert for expert in row if expert >= 0]
            found["experts"].update(live)
            found["routes"].update((sender, expert // local) for expert in live)
            found["tokens"].update({(sender, expert // local) for expert in live})
    return found


def check(load: Load, topk_ids: list[torch.Tensor]) -> None:
    """Every count against plain loops."""
    found = by_loop(topk_ids, load.num_experts)
    ranks = range(load.ep_size)
    assert load.routes_per_expert == tuple(found["experts"][e] for e in range(load.num_experts))
    for table, counts in ((load.routes_between, found["routes"]), (load.tokens_between, found["tokens"])):
        assert table == tuple(tuple(counts[s, r] for r in ranks) for s in ranks)
    assert load.routes + load.masked_slots == sum(x.numel() for x in topk_ids)
    assert sum(load.routes_sent) == sum(load.ranks.counts) == load.routes


# --- counts ------------------------------------------------------------------------------------------------------


def test_by_hand():
    """Two ranks of two experts: a masked slot, an expert named twice, a token wholly on the other rank."""
    load = load_of([ids([0, 1], [2, 2], [3, -1]), ids([3, 0])], 4, 2)
    assert load == Load(
        num_experts=4,
        top_k=2,
        capacity=3,
        tokens=(3, 1),
        routes_per_expert=(2, 1, 2, 2),
        routes_between=((2, 3), (1, 1)),
        tokens_between=((1, 2), (1, 1)),
        masked_slots=1,
        duplicate_slots=1,
    )
    assert (load.routes, load.ep_size, load.local_experts) == (7, 2, 2)
    assert (load.routes_sent, load.ranks.counts, load.tokens_received) == ((5, 2), (3, 4), (2, 3))
    assert load.capacity_used == (1.0, 1 / 3)
    assert load.worst_case_routes == 2 * 3 * 2
    assert load.receive_used == (3 / 12, 4 / 12)
    assert (load.experts.busiest, load.experts.skew, load.experts.idle) == (0, 2 / 1.75, ())
    assert (load.ranks.busiest, load.ranks.skew, load.ranks.variation) == (1, 4 / 3.5, 0.5 / 3.5)
    assert str(load) == (
        "7 routes of 4 tokens, busiest expert 0 with 2 (1.14x the mean), busiest rank 1 with 4 (1.14x the mean), "
        "1 slot masked, 1 slot with an expert named before"
    )


def test_spread_by_hand():
    spread = Spread((2, 4, 0, 4, 5, 5, 7, 5))
    assert (spread.mean, spread.busiest, spread.idle) == (4.0, 6, (2,))
    assert spread.skew == 7 / 4
    assert spread.variation == (32 / 8) ** 0.5 / 4
    even, single = Spread((3, 3, 3)), Spread((0, 8))
    assert (even.skew, even.variation, even.busiest) == (1.0, 0.0, 0)
    assert (single.skew, single.variation, single.idle) == (2.0, 1.0, (0,))


@pytest.mark.parametrize("topk_ids", [[ids(), ids()], [ids([-1, -7]), ids()]], ids=["no tokens", "all masked"])
def test_nothing_to_route(topk_ids):
    load = load_of(topk_ids, 4, 2)
    assert (load.routes, load.masked_slots, load.duplicate_slots) == (0, sum(x.numel() for x in topk_ids), 0)
    for spread, takers in ((load.experts, 4), (load.ranks, 2)):
        assert (spread.mean, spread.skew, spread.variation) == (0.0, 1.0, 0.0)
        assert spread.idle == tuple(range(takers))
    assert load.receive_used == (0.0, 0.0)
    assert load.capacity_used == (float(bool(load.capacity)), 0.0)
    assert str(load).startswith(f"0 routes of {load.capacity} token")
    json.dumps(load.as_json(), allow_nan=False)


def test_capacity():
    rows = [ids([0, 1], [0, 2]), ids([3, 1])]
    load = load_of(rows, 8, 2, capacity=8)
    assert (load.capacity_used, load.worst_case_routes) == ((0.25, 0.125), 2 * 8 * 2)
    assert load_of([ids([0, 1], [0, 1]), ids()], 2, 2).worst_case_routes == 2 * 2 * 1  # one expert a rank: one route
    with pytest.raises(ValueError, match=r"^capacity must be at least the 2 tokens of a rank, got 1"):
        load_of(rows, 8, 2, capacity=1)


def test_duplicates_can_exceed_the_worst_case():
    """Each rank has one expert, so that distinct ids send a token there once; a duplicate sends it twice."""
    once, twice = (load_of([ids([0, other])] * 2, 2, 2) for other in (1, 0))
    assert once.receive_used == (1.0, 1.0)
    assert twice.receive_used == (2.0, 0.0)
    assert (twice.duplicate_slots, twice.tokens_received) == (2, (2, 0))


def test_negative_ids_of_any_size_and_both_dtypes():
    rows = ids([-1, 0], [-(2**31), 1])
    assert load_of([rows], 2, 1) == load_of([rows.int()], 2, 1)
    assert load_of([rows], 2, 1).routes_per_expert == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([ids([0, 8])], 8, 1), r"topk_ids \(rank 0\) must be below num_experts = 8, got 8"),
        (([ids([0, 1])], 8, 2), "topk_ids must be a sequence of one tensor for each of 2 ranks, got 1"),
        ((ids([0, 1]), 8, 1), "topk_ids must be a sequence"),
        (([ids([0, 1]).float()], 8, 1), r"topk_ids \(rank 0\) must be int64 or int32"),
        (([ids([0, 1]), ids([0], top_k=1)], 8, 2), r"topk_ids \(rank 1\) must be .* one top_k"),
        (([torch.zeros(2, 0, dtype=torch.int64)], 8, 1), "top_k >= 1"),
        (([ids([0, 1])], 0, 1), "num_experts must be at least 1"),
        (([ids([0, 1])] * 3, 8, 3), "ep_size must be at least 1 and divide the 8 experts, got 3"),
    ],
)
def test_what_does_not_fit(arguments, words):
    with pytest.raises(ValueError, match=words):
        load_of(*arguments)


# --- problems ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ep_size", [1, 4, 8])
@pytest.mark.parametrize("case", problems(NVFP4))
def test_cases(case, ep_size):
    (problem,) = problems(NVFP4, cases=[case], hidden=64, intermediate=64).values()
    layer = problem.over(ep_size).build()
    load = load_of_layer(layer)
    check(load, [x.topk_ids for x in layer.inputs])
    assert load.tokens == tuple(len(x.hidden_states) for x in layer.inputs)
    moved = exchange_in_process(*_sent(layer.inputs, load.local_experts))
    assert load.ranks.counts == tuple(len(rows["token"]) for rows in moved)


def _sent(inputs, local):
    rows = [route_rows(rank, x.topk_ids, x.topk_weights, {}) for rank, x in enumerate(inputs)]
    return rows, [sent["expert"] // local for sent in rows]


def load_of_case(case: str, ep_size: int = 4) -> Load:
    return load_of_layer(problems(NVFP4, cases=[case])[case].over(ep_size).build())


def test_one_hot_expert():
    load = load_of_case("one hot expert")
    assert load.experts.busiest == 4
    assert load.routes_per_expert[4] == 16  # every token, once
    assert load.experts.skew == 16 / (32 / 8)
    assert load.tokens_received[2] == 16
    assert load.ranks.busiest == 2


def test_a_rank_without_routes():
    load = load_of_case("a rank without routes")
    assert load.experts.idle == (4, 5, 6, 7)
    assert load.ranks.idle == (2, 3)
    assert load.tokens_received[2:] == (0, 0)
    assert "4 experts and 2 ranks without a route" in str(load)


def test_duplicates():
    load = load_of_case("duplicate ids")
    assert (load.duplicate_slots, load.routes) == (8, 32)  # every other of 16 tokens
    assert sum(load.tokens_received) < load.routes
    assert load_of_case("ordinary").duplicate_slots == 0


def test_masked():
    load = load_of_case("masked slots")
    layer = problems(NVFP4, cases=["masked slots"])["masked slots"].build()
    assert load.masked_slots == int((layer.inputs[0].topk_ids < 0).sum()) > 0
    assert load_of_case("poisoned padding").masked_slots == 4 * 5 * 2  # rows of padding, on four ranks


# --- public bugs -------------------------------------------------------------------------------------------------


def test_107_all_ids_on_one_rank():
    """FlashInfer issue 4637: a kernel hangs with every id in rank 0's range. The layer is defined, so is its load."""
    (problem,) = problems(NVFP4, cases=["a rank without routes"], tokens=(5, 4), hidden=128).values()
    run = reference_run(problem)
    load = load_of_layer(run.layer)
    assert load.routes_between == ((10, 0), (8, 0))
    assert (load.ranks.skew, load.ranks.idle, load.receive_used[0]) == (2.0, (1,), 18 / 20)
    assert [len(tensors["token"]) for tensors in run.stages("dispatch").values()] == [18, 0]
    assert all(torch.isfinite(output.float()).all() for output in run.outputs())


def test_108_counts_under_heavy_skew():
    """DeepEP issue 427: 16 ranks, 2304 tokens, receive counts wrong under heavy skew (9181 against 6888)."""
    generator = torch.Generator().manual_seed(427)
    popularity = 1.0 / torch.arange(1, 257) ** 1.5
    rows = [torch.multinomial(popularity.expand(2304, -1), 8, generator=generator) for _ in range(16)]
    load = load_of(rows, 256, 16)
    check(load, rows)
    assert load.ranks.skew > 8
    assert load.ranks.counts[0] > load.tokens_received[0]  # a token counts once on a rank, its routes each
    assert load.tokens_received[0] == sum(int((x < 16).any(1).sum()) for x in rows)
    assert load.receive_used[0] <= 1


def test_112_an_expert_without_an_allocation_gets_no_token():
    """TensorRT-LLM issue 14146: a test's generator gave one token to an expert that was to have none."""
    allocation = (7, 0, 3, 0, 0, 12, 1, 0)
    slots = torch.repeat_interleave(torch.arange(8), torch.tensor(allocation))
    load = load_of([slots[:13, None], slots[13:, None]], 8, 2)
    assert load.routes_per_expert == allocation
    assert load.experts.idle == (1, 3, 4, 7)
    for problem in problems(NVFP4, cases=["a rank without routes"], num_experts=64, top_k=8, tokens=(300,)).values():
        assert load_of_layer(problem.build()).routes_per_expert[32:] == (0,) * 32


# --- reports -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def equal():
    (problem,) = problems(NVFP4, cases=["duplicate ids"], tokens=(6, 0, 3, 4), hidden=128).values()
    run = reference_run(problem)
    return compare(run, replace(run, side="again"))


def test_json(equal):
    load = load_of_layer(equal.left.layer)
    told = as_json(equal, [])["load"]
    assert told == load.as_json() == json.loads(json.dumps(told, allow_nan=False))
    assert told["experts"]["counts"] == list(load.routes_per_expert)
    assert told["routes_between"] == [list(row) for row in load.routes_between]
    assert told["ranks"] | {"variation": 0} == {
        "counts": list(load.ranks.counts),
        "mean": load.routes / 4,
        "busiest": load.ranks.busiest,
        "skew": load.ranks.skew,
        "variation": 0,
        "idle": list(load.ranks.idle),
    }


def test_a_line_of_the_summary(capsys):
    arguments = ["--scheme", "bf16_bf16", "--ep", "2", "--routing", "skewed", "--tokens", "6"]
    assert main(["parity", "run", *arguments]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("load: "))
    assert line.startswith("load: 12 routes of 6 tokens, busiest expert 4 with 6 (4x the mean), busiest rank 1 with ")


def test_page(equal):
    pytest.importorskip("matplotlib", reason="matplotlib (fp4ep[report]) is not installed")
    load = load_of_layer(equal.left.layer)
    text = html.page(equal, [])
    assert f"<p>{load}.</p>" in text
    assert notes(load) in text
    for heading in ("<h2>Load</h2>", "<h3>Routes by expert</h3>", "<h3>Routes from rank to rank</h3>"):
        assert text.count(heading) == 1
    rows = dict(re.findall(r'<tr class=""><th scope="row" class="words">(rank \d)</th>(.*?)</tr>', text))
    for rank in range(4):
        cells = [column.cell(rank) for column in rank_columns(load)]
        assert cells[0] == f"rank {rank}"
        assert re.findall(r"<td[^>]*>([^<]*)</td>", rows[cells[0]]) == cells[1:]
        expected = (load.tokens[rank], load.routes_sent[rank], load.ranks.counts[rank], load.tokens_received[rank])
        assert [cells[n] for n in (1, 3, 4, 7)] == [str(n) for n in expected]


def texts(svg: str) -> Counter:
    return Counter(re.findall(r"<text[^>]*>([^<]+)</text>", svg))


def matrix_of(svg: str, size: int) -> list[list[str]]:
    """The numbers in the cells, by the place where they stand."""
    found = re.findall(r'middle;[^>]*? x="([\d.]+)" y="([\d.]+)"[^>]*>([\d,]+)</text>', svg)
    rows: dict[float, list[tuple[float, str]]] = {}
    for x, y, number in found:
        rows.setdefault(float(y), []).append((float(x), number))
    above, *cells = [[number for _, number in sorted(row)] for _, row in sorted(rows.items())]
    assert above == list(map(str, range(size)))
    return cells


def colours_of(svg: str) -> list[list[float]]:
    """The opacity of each cell."""
    from matplotlib.image import imread

    (png,) = re.findall(r'href="data:image/png;base64,([^"]*)"', svg)
    return imread(io.BytesIO(base64.b64decode(png)))[..., 3].tolist()


def test_pictures(equal):
    pytest.importorskip("matplotlib", reason="matplotlib (fp4ep[report]) is not installed")
    load = load_of_layer(equal.left.layer)
    bars, matrix = load_pictures(load)
    names = [f"rank {rank}: {n}" for rank, n in enumerate(load.ranks.counts)]
    assert not Counter([*names, *map(str, load.routes_per_expert)]) - texts(bars.svg)
    assert matrix_of(matrix.svg, 4) == [[str(n) for n in row] for row in load.routes_between]
    depths = [[load_picture.depth(n, max(map(max, load.routes_between))) for n in row] for row in load.routes_between]
    for drawn, meant in zip(colours_of(matrix.svg), depths, strict=True):
        assert drawn == pytest.approx(meant, abs=1 / 255)  # a pixel has eight bits
    assert matrix.caption.startswith(f"The more, the deeper; most, {max(map(max, load.routes_between))}, from rank ")


def test_how_many_pictures():
    pytest.importorskip("matplotlib", reason="matplotlib (fp4ep[report]) is not installed")
    generator = torch.Generator().manual_seed(1)
    rows = [torch.rand(32, 256, generator=generator).topk(8).indices for _ in range(64)]
    assert load_pictures(load_of([ids(), ids()], 8, 2)) == ()
    (alone,) = load_pictures(load_of(rows[:1], 256, 1))
    assert "rank 0" not in alone.svg
    bars, matrix = load_pictures(load_of(rows, 256, 64))
    assert matrix.wide
    assert len(matrix.svg) < 60_000  # one image: no number and no path for each of 4096 cells
    assert len(texts(bars.svg)) < 60


def test_numbers_of_the_matrix_are_readable():
    """Contrast as in WCAG 2 of the page's ink on the palest and the deepest cell, in light and dark."""

    def light(colour: list[float]) -> float:
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in colour]
        return sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    def rgb(code: str) -> list[float]:
        code = code if len(code) == 6 else "".join(c + c for c in code)
        return [int(code[n : n + 2], 16) / 255 for n in (0, 2, 4)]

    inks, panels = (re.findall(rf"--{name}: #(\w+)", html._STYLE) for name in ("ink", "panel"))
    assert len(inks) == len(panels) == 2
    for ink, panel in zip(inks, panels, strict=True):
        for routes in (1, 100):
            alpha = load_picture.depth(routes, 100)
            cell = [alpha * a + (1 - alpha) * b for a, b in zip(rgb(COOL[1][1:]), rgb(panel), strict=True)]
            low, high = sorted((light(rgb(ink)), light(cell)))
            assert (high + 0.05) / (low + 0.05) > 4.5
    assert load_picture.depth(0, 5) == 0 < load_picture.depth(1, 5) < load_picture.depth(5, 5)
