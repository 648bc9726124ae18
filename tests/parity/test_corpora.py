"""What the recording scripts declare, run with the reference in the kernel's place: no GPU is needed to try them."""

from pathlib import Path

import pytest
import torch

from fp4ep.optimized.config import EpGroup
from fp4ep.parity import (
    Recording,
    RecordingWriter,
    corpus_adapter,
    corpus_problems,
    corpus_ranks,
    replay_cases,
    shipped_recordings,
)
from fp4ep.parity.corpus_problems import PROBLEMS, build_problems
from fp4ep.parity.corpus_ranks import build_ranks
from fp4ep.parity.flashinfer_record import CORPORA, Kernels, record_corpus
from fp4ep.parity.reference_kernel import ReferenceKernel
from fp4ep.reference import find_scheme, moe_forward

pytestmark = pytest.mark.usefixtures("quick_gemms")

SOURCE = {"hardware": "a test", "flashinfer": "none"}


def reference(scheme, options, weights, inputs):
    known = {name: value for name, value in options.items() if name != "dedup_dispatch"}
    return moe_forward(find_scheme(scheme, **known), weights, inputs)[0]


def shipped(stem: str) -> Recording:
    (path,) = (path for path in shipped_recordings() if path.stem == stem)
    return Recording(path)


def replayed(path: Path) -> list[int]:
    recording = Recording(path)
    return [result.differing for result in replay_cases(recording, recording.cases, lambda case: lambda share: None)]


def test_problems_are_recorded(monkeypatch, tmp_path):
    """One of each kind; two launches that differ are refused, but not where routes are added on arrival."""
    some = [name for name in PROBLEMS if "ordinary, sm90_bf16" in name or "top-k 4, sm90_bf16" in name]
    monkeypatch.setattr(corpus_problems, "PROBLEMS", {name: PROBLEMS[name] for name in some})
    writer, said = RecordingWriter("a test", SOURCE), []
    build_problems(writer, lambda *given: [reference(*given[:4])] * 3, said.append)
    writer.write(tmp_path / "made.safetensors")
    assert [case.launches for case in writer.cases] == [3, 1, 1, 1]
    assert replayed(tmp_path / "made.safetensors") == [0, 0, 0, 0]
    assert set(writer.stored) == {f"output.{i}" for i in range(4)}  # inputs are rebuilt from the problem

    def unsteady(*given):
        output = reference(*given[:4])
        return [output, output + 1]

    writer = RecordingWriter("a test", SOURCE)
    build_problems(writer, unsteady, said.append)
    assert ["on arrival" in case.title for case in writer.cases] == [True, True]
    assert any(line.startswith("LEFT OUT") and "launches differ" in line for line in said)


def test_ranks_are_recorded(monkeypatch, tmp_path):
    """bf16 alone, on smaller experts."""
    monkeypatch.setattr(corpus_ranks, "CASES", [case for case in corpus_ranks.CASES if "bf16_bf16" in case[1]])
    for size, small in (("_HIDDEN", 256), ("_INTERMEDIATE", 128)):
        monkeypatch.setattr(corpus_ranks, size, small)
    writer, said = RecordingWriter("a test", SOURCE), []
    build_ranks(writer, lambda *given: [reference(*given[:4])] * 3, said.append)
    writer.write(tmp_path / "made.safetensors")
    assert [case.tokens_per_rank for case in writer.cases] == [[48, 17], [0, 64], [48, 17], [48, 17], [48, 17]]
    assert replayed(tmp_path / "made.safetensors") == [0] * 5


@pytest.mark.parametrize("stem", ["h200_problems", "h200_two_ranks"])
def test_the_scripts_declare_what_is_shipped(monkeypatch, stem):
    """Titles, schemes, options and every tensor but the outputs, by checksum; none is packed, for none is written."""
    there = shipped(stem)
    monkeypatch.setattr("fp4ep.parity.recording._pack", lambda tensor: tensor)
    writer = RecordingWriter("a test", SOURCE)

    def recorded(scheme, options, weights, inputs, capacity):
        zero = [torch.zeros_like(x.hidden_states) for x in (inputs if isinstance(inputs, list) else [inputs])]
        return [zero if isinstance(inputs, list) else zero[0]] * 3

    (build_ranks if stem == "h200_two_ranks" else build_problems)(writer, recorded, lambda line: None)
    assert [(c.title, c.scheme, c.options, c.config) for c in writer.cases] == [
        (c.title, c.scheme, c.options, c.config) for c in there.cases
    ]
    for name, spec in writer.specs.items():
        if not name.startswith("output."):
            assert spec["sha256"] == there.specs[name]["sha256"], name


def test_the_adapter_is_recorded(tmp_path):
    kernels = Kernels(adapted=ReferenceKernel, source=lambda: SOURCE)
    count = record_corpus("h200_adapter_1", tmp_path, EpGroup(1, 0), kernels, lambda line: None)
    assert replayed(tmp_path / "h200_adapter_1.safetensors") == [0] * count == [0] * len(corpus_adapter.problems(1))


def test_a_corpus_of_failures_is_not_written(monkeypatch, tmp_path):
    monkeypatch.setattr(corpus_problems, "PROBLEMS", dict([*PROBLEMS.items()][:1]))

    def launch(*given, **places):
        raise ValueError("planted")

    said: list[str] = []
    with pytest.raises(RuntimeError, match="h200_problems: every case failed"):
        record_corpus("h200_problems", tmp_path, EpGroup(1, 0), Kernels(launch, source=lambda: SOURCE), said.append)
    assert [line.startswith("LEFT OUT") and "planted" in line for line in said] == [True]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", shipped_recordings(), ids=lambda path: path.stem)
def test_every_shipped_recording_has_its_entry(path):
    """But the first, which was made by hand."""
    if path.stem == "h200_first":
        return
    recording = Recording(path)
    corpus = CORPORA[path.stem]
    assert corpus.title == recording.title
    assert {len(case.tokens_per_rank or [0]) for case in recording.cases} == {corpus.ep_size}


def test_an_adapter_whose_passes_differ_is_not_recorded():
    def run(backend, problem):
        output = torch.zeros(sum(problem.tokens), problem.hidden, dtype=torch.bfloat16)
        return {"eager": output, "captured": output, "experts moved in place": output + 1}

    with pytest.raises(RuntimeError, match=r"sm90_nvfp4 .*: experts moved in place differs from eager"):
        corpus_adapter.build_adapter(RecordingWriter("a test", SOURCE), 1, run, lambda line: None)
