"""The wide corpus: what it declares is what is shipped, the reference agrees with its digests, and how it is made."""

import pytest
from engine_launch import launch

from fp4ep.optimized.engine_cpu import missing_for_engine
from fp4ep.parity import Recording, RecordingWriter, replay_cases, shipped_recordings
from fp4ep.parity.corpus import BF16, FP8, NVFP4
from fp4ep.parity.corpus_wide import Entry, entries, knob_entries, work_of
from fp4ep.parity.flashinfer_wide import record_wide
from fp4ep.parity.problem import Problem
from fp4ep.parity.recording import Case
from fp4ep.parity.replay import FAST, REFERENCE
from fp4ep.reference.schemes import SCHEMES, find_scheme

(SHIPPED,) = (Recording(path) for path in shipped_recordings() if path.stem == "h200_wide")


def problem_of(case: Case) -> Problem:
    return Problem.from_json(SHIPPED.specs[case.tensors["hidden_states"]]["from"]["problem"])


def quiet(case: Case):
    return lambda share: None


# --- what is shipped ---------------------------------------------------------------------------------------------


def test_every_entry_is_shipped_in_order():
    """Those with launches of their own three times; behind them the settings that FlashInfer's tuner listed."""
    declared = [(entry.title, entry.problem) for entry in entries() for _ in range(3 if entry.on_arrival else 1)]
    there = [(case.title.split(", launch ")[0], problem_of(case)) for case in SHIPPED.cases]
    assert there[: len(declared)] == declared
    assert {title.split(" ")[0] for title, _ in there[len(declared) :]} == {"knobs,"}


def test_knobs_that_are_shipped():
    """Each problem under at least eight settings; no two are the same."""
    settings: dict[str, list] = {}
    for case in SHIPPED.cases:
        if case.title.startswith("knobs"):
            settings.setdefault(str(find_scheme(case.scheme, **case.options)), []).append(case.config)
    problems = [entry.problem for entry in knob_entries(lambda problem: [{}])]
    assert settings.keys() == {str(find_scheme(problem.scheme, **problem.options)) for problem in problems}
    for scheme, told in settings.items():
        assert len(told) >= 8, scheme
        assert all(one not in told[n + 1 :] for n, one in enumerate(told)), scheme


def test_every_sm90_scheme_is_there():
    recorded = {str(find_scheme(case.scheme, **case.options)) for case in SHIPPED.cases}
    assert {str(scheme) for scheme in SCHEMES if scheme.name.startswith("sm90")} <= recorded


def test_ends_of_the_ranges():
    problems = [problem_of(case) for case in SHIPPED.cases]
    for name, ends in {
        "tokens": ((0,), (1024,)),
        "top_k": (1, 8),
        "num_experts": (1, 64),
        "hidden": (64, 4096),
        "intermediate": (64, 7168),
    }.items():
        found = {getattr(problem, name) for problem in problems}
        assert (min(found), max(found)) == ends, name


#: Of each scheme the least work with at least eight tokens.
SAMPLE = {
    str(find_scheme(case.scheme, **case.options)): case
    for case in sorted(SHIPPED.cases, key=lambda case: -work_of(problem_of(case)))
    if sum(problem_of(case).tokens) >= 8 and "output_rows" in case.tensors
}


@pytest.mark.parametrize("case", SAMPLE.values(), ids=SAMPLE)
def test_the_reference_agrees_with_the_digests(case):
    (result,) = replay_cases(SHIPPED, [case], quiet, REFERENCE)
    assert (result.differing, result.first, result.by) == (0, None, REFERENCE)
    assert result.elements >= 8 * 64


# --- how it is made ----------------------------------------------------------------------------------------------


def small(scheme: str, tokens: int, **options) -> Problem:
    return Problem(scheme, options, tokens=(tokens,), num_experts=4, hidden=256, intermediate=128)


@pytest.mark.skipif(missing_for_engine() is not None, reason=str(missing_for_engine()))
def test_recorded_in_order_whatever_fails(tmp_path):
    todo = [
        Entry("a", small(NVFP4, 5)),
        Entry("ends its process", small(NVFP4, 1)),
        Entry("unsteady", small(BF16, 3)),
        Entry("on arrival", small(FP8, 3, enable_in_kernel_fc2_reduce=True)),
        *(Entry(f"knobs {n}", small(BF16, 4), {"knobs": {"group_hint": n}}) for n in (64, 128)),
        Entry("no tokens", small(BF16, 0)),
    ]
    writer, said = RecordingWriter("a test", {"hardware": "a test", "flashinfer": "none"}), []
    record_wide(writer, said.append, launch, todo)
    left_out = [line for line in said if line.startswith("LEFT OUT")]
    assert len(said) == len(todo)
    assert any("ends its process" in line and "ended with status 9" in line for line in left_out)
    assert any("unsteady" in line and "launches gave different bits" in line for line in left_out)
    assert len(left_out) == 2
    arrivals = [f"on arrival, launch {n}" for n in (1, 2, 3)]
    assert [case.title for case in writer.cases] == ["a", *arrivals, "knobs 64", "knobs 128", "no tokens"]
    assert [case.launches for case in writer.cases] == [3, 1, 1, 1, 3, 3, 3]
    assert [case.config.get("knobs") for case in writer.cases][4:6] == [{"group_hint": 64}, {"group_hint": 128}]
    assert writer.cases[4].tensors["w13"] == writer.cases[5].tensors["w13"]  # one problem, stored once
    path = tmp_path / "made.safetensors"
    writer.write(path)
    recording = Recording(path)
    results = list(replay_cases(recording, recording.cases, quiet))
    assert [r.differing for r in results[:3]] == [0, 0, 0]
    assert results[3].differing > 0  # launch 3 is no sum of the terms in any order
    assert [r.differing for r in results[4:]] == [0, 0, 0]
    assert [r.by for r in results] == [FAST, *[REFERENCE] * 3, FAST, FAST, FAST]
