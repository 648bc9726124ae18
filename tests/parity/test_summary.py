"""The comparison in words: every number in the table, one verdict, the first difference, JSON that any parser reads."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import pytest
import torch
from rich.console import Console
from runs import NVFP4, black_box, change, fake_quant_run, reference_run

from fp4ep.parity import summary
from fp4ep.parity.compare import Comparison, compare
from fp4ep.parity.peers import peers_for
from fp4ep.parity.problem import Layer, Problem
from fp4ep.parity.run import Run
from fp4ep.parity.summary import as_json, beside, firsts, print_comparison, reasons, verdict
from fp4ep.reference.moe import Intervention
from fp4ep.reference.scheme import Evidence
from fp4ep.reference.types import Trace

pytestmark = pytest.mark.usefixtures("quick_gemms")

PROBLEM = Problem(NVFP4, {"nvfp4_kperm": 64}, tokens=(6, 4), hidden=128)
SOURCE = {"hardware": "a test", "torch": "1.2.3"}


class Kind(Enum):
    FACTOR = "a constant factor"


@dataclass(frozen=True)
class Diagnosis:
    kind: Any
    says: str


DIAGNOSES = [Diagnosis(Kind.FACTOR, "twice too large")]


def run(side: str = "reference", hook: Intervention | None = None, layer: Layer | None = None) -> Run:
    return replace(reference_run(PROBLEM, hook, layer), side=side, source=SOURCE)


def masked(*slots: tuple[int, int]) -> Layer:
    """The problem's layer, some slots of rank 0 masked."""
    layer = PROBLEM.build()
    ids = layer.inputs[0].topk_ids.clone()
    for token, slot in slots:
        ids[token, slot] = -1
    return replace(layer, inputs=(replace(layer.inputs[0], topk_ids=ids), *layer.inputs[1:]))


@pytest.fixture(scope="module")
def reference() -> Run:
    return run()


@pytest.fixture(scope="module")
def equal(reference) -> Comparison:
    return compare(reference, replace(reference, side="again"))


@pytest.fixture(scope="module")
def doubled(reference) -> Comparison:
    """fc1's up of three rows of rank 1, twice too large."""
    return compare(reference, run("doubled", change("fc1", "up", lambda up: up[:3].mul_(2), rank=1)))


@pytest.fixture(scope="module")
def bounded(reference) -> Comparison:
    return compare(reference, replace(fake_quant_run(PROBLEM), source=SOURCE))


def shown(comparison: Comparison, width: int = 160, diagnoses: Sequence[Diagnosis] = ()) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_comparison(comparison, diagnoses, console)
    return console.file.getvalue()


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.startswith(name + " "))


# --- the verdict -------------------------------------------------------------------------------------------------


def test_equal(equal):
    said = verdict(equal)
    assert said.mood.value == "equal"
    elements = sum(t.elements for t in equal.tensors)
    assert str(said) == (
        f"Every bit equal. {elements:,} elements in 13 tensors on 2 ranks: again gives the bits of reference."
    )
    assert firsts(equal) == []
    assert reasons(equal) == [(equal.tensors[0].allowance.rung, equal.tensors[0].allowance.because, ["every stage"])]


def test_bits_differ(doubled):
    said = verdict(doubled)
    assert said.mood.value == "outside"
    assert said.headline == "Bits differ, first in fc1.up"
    up = next(t for t in doubled.tensors if t.tensor == "up")
    assert up.outside == 3 * 128
    more = sum(t.outside > 0 for t in doubled.tensors) - 1
    where = f"384 of its {up.elements:,} elements, and elements of {more} other tensors"
    assert said.detail == f"Outside the tolerance: {where}."
    [(title, text)] = firsts(doubled)
    first = doubled.first
    assert title == "first difference"
    assert (first.source_rank, first.rank) == (0, 1)
    assert text == (
        f"fc1.up at rank 1, expert {first.expert}, token {first.token} of rank 0, slot {first.slot}, channel 0: "
        f"reference has {first.left:.9g} ({first.left_code}), doubled has {first.right:.9g} ({first.right_code}); "
        "8,388,608 ulps apart"
    )


def test_within_a_bound(bounded):
    said = verdict(bounded)
    differing = sum(t.differing for t in bounded.tensors)
    assert said.mood.value == "within"
    assert differing
    assert str(said).startswith(f"Within the tolerance. {differing:,} of ")
    assert [title for title, _ in firsts(bounded)] == ["first difference"]
    assert ["stage", "dispatch"] in [names for _, _, names in reasons(bounded)]


def test_outside_a_bound(reference):
    honest = fake_quant_run(PROBLEM)
    planted = change("combine", "values", lambda x: x[1, 7].mul_(1.5).add_(1), rank=1)
    wrong = replace(honest, trace=Trace(tuple(planted(stage) for stage in honest.trace)))
    found = compare(reference, wrong)
    assert verdict(found).headline == "Outside the bound, first in combine.values"
    assert [title for title, _ in firsts(found)] == ["first outside the tolerance", "first difference, allowed"]
    assert firsts(found)[0][1].startswith("combine.values at rank 1, token 1, channel 7: reference has ")
    assert [b.accepts for b in beside(found) if b.accepts is not None] == [0] * 6


def test_nan(reference):
    found = compare(reference, run("other", change("fc2", "values", lambda x: x[1, 5].fill_(torch.nan))))
    [(_, text)] = firsts(found)
    assert text.endswith("other has nan (0x7fc0); one of them is NaN")
    assert row(shown(found), "fc2.values")[5:7] == ["NaN", "nan"]


def test_routes(reference):
    found = compare(reference, run("other", layer=masked((0, 1), (3, 0))))
    assert str(verdict(found)) == "Routes are lost or added at dispatch. 2 rows in reference only."
    assert verdict(compare(found.right, reference)).detail == "2 rows in reference only."
    [(_, text)] = firsts(found)
    assert text.endswith("is in reference only")
    assert "row of token " in text
    assert "routes: 2 rows in reference only" in shown(found)


def test_no_tokens():
    empty = replace(PROBLEM, tokens=(0, 0))
    said = verdict(compare(reference_run(empty), reference_run(empty)))
    assert (said.mood.value, said.headline) == ("empty", "Nothing to compare")


def test_black_box(reference):
    assert verdict(compare(reference, black_box(reference))).headline == "Every bit of combine.values equal"
    found = compare(reference, black_box(run(hook=change("combine", "values", lambda x: x[2, 3].add_(1), rank=1))))
    assert str(verdict(found)) == (
        "Bits differ, first in combine.values. Outside the tolerance: 1 of its 1,280 elements."
    )
    assert row(shown(found), "combine.values")[1:6] == ["1,280", "1", "0", "1", f"{found.first.ulps:,}"]
    assert "fc1" not in shown(found).split("tolerance of")[0]


# --- other projects ----------------------------------------------------------------------------------------------


def test_bits_against_other_projects(doubled):
    """Everything with a bound is infinitely wider than bits, but for bits; and takes what ours forbids, counted."""
    peers = peers_for(PROBLEM.build().scheme.weights)
    expected, given = (torch.cat(side.outputs()).double() for side in (doubled.left, doubled.right))
    differ = expected != given
    for found, peer in zip(beside(doubled), peers, strict=True):
        assert found.peer is peer
        if peer.atol is None:
            assert found.wider is found.accepts is None
            continue
        bound = peer.atol + peer.rtol * expected.abs()
        assert found.wider == (float("inf") if peer.atol or peer.rtol else 1.0)
        assert found.accepts == int((differ & ((expected - given).abs() <= bound)).sum())
    assert any(found.accepts for found in beside(doubled))


def test_bounds_against_other_projects(bounded):
    """The median of another's bound over half of the interval's width."""
    radius = summary._radius(next(t for t in bounded.tensors if t.stage == "combine" and t.tensor == "values"))
    expected = torch.cat(bounded.left.outputs()).double()
    peer, found = next((b.peer, b) for b in beside(bounded) if b.peer.project == "SGLang")
    ratio = ((peer.atol + peer.rtol * expected.abs()) / radius).flatten().sort().values
    assert found.wider == pytest.approx(float(ratio[(len(ratio) - 1) // 2]), rel=1e-6)
    assert 1 < found.wider < 1e6
    assert found.accepts == 0
    exact = next(b for b in beside(bounded) if b.peer.atol == 0 == b.peer.rtol)
    assert exact.wider == 0


@pytest.mark.parametrize(
    ("ratio", "text"), [(None, "-"), (float("inf"), "infinitely"), (12345.6, "12,346x"), (2.345, "2.3x"), (0.0, "0x")]
)
def test_wider(ratio, text):
    assert summary.wider(ratio) == text


# --- a terminal --------------------------------------------------------------------------------------------------


def test_ladder(doubled):
    text = shown(doubled)
    headings = "stage.tensor elements differing allowed outside max ulps rel-L2 headroom holds asserted evidence"
    assert headings in " ".join(text.split())
    for t in doubled.tensors:
        found = row(text, f"{t.stage}.{t.tensor}")
        assert found[1:6] == [f"{n:,}" for n in (t.elements, t.differing, t.allowed, t.outside, t.max_ulps)]
        assert found[8:] == [t.holds.value, "bits", "-" if t.outside else "verified"]
    assert str(verdict(doubled)) in text


def test_ladder_of_bounds(bounded):
    found = row(shown(bounded), "fc1.gate")
    gate = next(t for t in bounded.tensors if t.tensor == "gate")
    assert found[-5:] == [f"{gate.headroom:.0%}", "used", "bound", "bound", "bounded"]
    assert row(shown(bounded), "stage.values")[-3:] == ["bits", "bits", "verified"]


def test_evidence_of_a_modelled_scheme(equal):
    modelled = replace(equal.left.scheme, evidence=Evidence.MODELLED)
    left = replace(equal.left, layer=replace(equal.left.layer, scheme=modelled))
    assert row(shown(replace(equal, left=left)), "fc1.gate")[-1] == "modelled"


def test_everything_is_said(doubled):
    text = shown(doubled, diagnoses=DIAGNOSES)
    for part in (
        f"reference against doubled: {PROBLEM}",
        f"first difference: {firsts(doubled)[0][1]}",
        "diagnosis, a constant factor: twice too large",
        "tolerance of every stage: bits: both sides claim the scheme's own arithmetic",
        "TensorRT-LLM quantize_utils",
        summary.CAVEAT,
    ):
        assert part in text
    output = next(t for t in doubled.tensors if t.stage == "combine" and t.tensor == "values")
    assert f"elements that ours forbids and its bound takes, of {output.outside:,}" in text


@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize("which", ["equal", "doubled", "bounded"])
def test_widths(request, width, which):
    """Columns go, rows do not wrap: one line per tensor and per test of another project."""
    comparison = request.getfixturevalue(which)
    text = shown(comparison, width)
    assert all(
        sum(line.startswith(f"{t.stage}.{t.tensor}") for line in text.splitlines()) == 1 for t in comparison.tensors
    )
    table = text.splitlines()[1 : 2 + len(comparison.tensors)]
    assert all(len(line) <= width for line in table)
    assert table[0].split()[:3] == ["stage.tensor", "elements", "differing"]
    assert ("evidence" in text) == (width == 160)
    if width >= 80:
        assert "…" not in text
    lines = [
        line for line in text.splitlines() if line.startswith(("FlashInfer ", "vLLM ", "SGLang ", "TensorRT-LLM "))
    ]
    assert len(lines) == len(beside(comparison))


def test_a_terminal_too_narrow(doubled):
    assert all(t.stage in shown(doubled, 20) for t in doubled.tensors)


def test_names_are_not_markup(equal):
    hostile = replace(equal, right=replace(equal.right, side="[bold]x[/bold]"))
    assert "reference against [bold]x[/bold]" in shown(hostile)
    diagnosis = Diagnosis("[red]kind", "[/] says")
    assert "diagnosis, [red]kind: [/] says" in shown(equal, diagnoses=[diagnosis])


def test_cells_are_not_markup():
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(summary._table(console, [summary.Column("test", str)], ["[bold]x[/bold]"]))
    assert "[bold]x[/bold]" in console.file.getvalue()


# --- machines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["equal", "doubled", "bounded"])
def test_json(request, which):
    comparison = request.getfixturevalue(which)
    found = as_json(comparison, DIAGNOSES)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    documented = set(as_json.__doc__.replace(",", " ").split())
    assert found.keys() <= documented
    assert found["tensors"][0].keys() <= documented
    assert (found["format"], found["version"]) == ("fp4ep.comparison", 1)
    assert found["passed"] is comparison.passed
    assert found["verdict"] == str(verdict(comparison))
    assert found["diagnoses"] == [{"kind": "FACTOR", "says": "twice too large"}]
    assert found["right"] == {
        "side": comparison.right.side,
        "claim": comparison.right.claim.value,
        "source": SOURCE,
    }
    assert Problem.from_json(found["problem"]) == PROBLEM
    for line, t in zip(found["tensors"], comparison.tensors, strict=True):
        assert (line["stage"], line["tensor"], line["differing"]) == (t.stage, t.tensor, t.differing)
        assert line["per_rank"] == {str(rank): n for rank, n in t.per_rank.items()}
    assert len(found["peers"]) == len(beside(comparison))
    assert (found["first"] is None) == (comparison.first is None)


def test_json_has_no_nan(reference):
    found = as_json(compare(reference, run("other", change("fc2", "values", lambda x: x[1, 5].fill_(torch.nan)))), [])
    json.dumps(found, allow_nan=False)
    fc2 = next(line for line in found["tensors"] if line["stage"] == "fc2")
    assert (fc2["max_ulps"], fc2["rel_l2"], found["first"]["right"]) == ("nan", "nan", "nan")
    assert found["tensors"][0]["sqnr_db"] == "inf"
    assert [peer["wider"] for peer in found["peers"]].count("inf") == 5


def test_json_of_a_black_box(reference):
    found = as_json(compare(reference, black_box(reference)), [])
    json.dumps(found, allow_nan=False)
    assert [line["stage"] for line in found["tensors"]] == ["combine"]
