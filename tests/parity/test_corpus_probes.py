"""The probes of the tensor core, with the model in the instruction's place: what they hold and what they tell apart."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fp4ep.parity import Recording, corpus_probes, replay_cases
from fp4ep.parity.corpus_probes import OPERANDS, Probe, build_probes, probes
from fp4ep.parity.generate import GENERATORS
from fp4ep.parity.metrics import bits
from fp4ep.parity.recording import RecordingWriter
from fp4ep.reference.tensor_core import TensorCore, matmul

CORES = list(OPERANDS)
SOURCE = {"hardware": "a test", "compute_capability": "0.0", "torch": "1.2.3"}


@pytest.fixture
def one_core(monkeypatch):
    """A core with a few of its small probes and four random ones of 64 x 64 outputs: the whole takes long to pack."""
    core, all_probes = CORES[0], corpus_probes.probes
    monkeypatch.setattr(corpus_probes, "OPERANDS", {core: OPERANDS[core]})
    monkeypatch.setattr(corpus_probes, "_CHAINS", {1: (64, 64)})
    monkeypatch.setattr(
        corpus_probes, "probes", lambda core: [p for p in all_probes(core) if p.digest or "C" in p.title]
    )
    return core


def model(core: TensorCore, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return matmul(core, a.float(), b.float(), c=c)


def drawn(core: TensorCore) -> Iterator[tuple[Probe, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Small probes, with their tensors."""
    for probe in probes(core):
        if not probe.digest:
            tensors = (
                x if isinstance(x, torch.Tensor) else GENERATORS[x[0]](**x[1]) for x in (probe.a, probe.b, probe.c)
            )
            yield probe, *tensors


# --- what is recorded --------------------------------------------------------------------------------------------


def test_a_recording_that_replays(one_core, tmp_path):
    writer, lines = RecordingWriter("Probes", SOURCE), []
    build_probes(writer, model, lines.append)
    assert lines
    assert all(line.endswith(" 0 not the model's") for line in lines)
    writer.write(tmp_path / "probes.safetensors")
    recording = Recording(tmp_path / "probes.safetensors")
    assert [case.title for case in recording.cases] == [probe.title for probe in corpus_probes.probes(one_core)]
    assert {case.launches for case in recording.cases} == {3}
    results = list(replay_cases(recording, recording.cases, lambda case: lambda share: None))
    assert {result.differing for result in results} == {0}
    assert sum("d_rows" in case.tensors for case in recording.cases) == 4  # digests only


def test_bits_that_are_not_the_models_are_reported_and_kept(one_core, tmp_path):
    def one_bit(core, a, b, c):
        d = model(core, a, b, c)
        d.view(torch.int32)[5, 6] ^= 1
        return d

    writer, lines = RecordingWriter("Probes", SOURCE), []
    build_probes(writer, one_bit, lines.append)
    assert all(line.endswith(" 1 not the model's") for line in lines)
    writer.write(tmp_path / "probes.safetensors")
    recording = Recording(tmp_path / "probes.safetensors")
    for case, result in zip(
        recording.cases, replay_cases(recording, recording.cases, lambda case: lambda share: None), strict=True
    ):
        assert result.differing == (64 if "d_rows" in case.tensors else 1)


def test_probes_that_fail_are_left_out(one_core):
    calls = []

    def breaks(core, a, b, c):
        calls.append(c)
        if len(calls) == 2:
            raise RuntimeError("planted")
        return model(core, a, b, c) + (len(calls) == 5)  # the third launch of the second probe

    writer, lines = RecordingWriter("Probes", SOURCE), []
    build_probes(writer, breaks, lines.append)
    first, second, *rest = [f"{one_core}, {probe.title}" for probe in corpus_probes.probes(one_core)]
    assert lines[0] == f"LEFT OUT {first}: RuntimeError('planted')"
    assert lines[1] == f"LEFT OUT {second}: RuntimeError('launches differ')"
    assert len(writer.cases) == len(rest)
    assert not [name for name in {**writer.specs, **writer.stored} if name.startswith((first, second))]


@pytest.mark.parametrize("core", CORES, ids=str)
def test_a_million_random_outputs(core):
    rows = [probe for probe in probes(core) if probe.digest]
    assert sum(probe.c[1]["shape"][0] * probe.c[1]["shape"][1] for probe in rows) > 3 << 20
    assert {probe.a[1]["shape"][1] // core.k for probe in rows} == {1, 2, 4, 16, 64}
    seeds = [source[1]["seed"] for probe in rows for source in (probe.a, probe.b, probe.c)]
    assert len(set(seeds)) == len(seeds)


# --- what the probes hold ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", CORES, ids=str)
def test_operands_are_values_of_the_format(core, monkeypatch):
    """Nothing is rounded on the way into the format."""
    exact = []
    convert = torch.Tensor.to

    def watched(self, *args, **kwargs):
        result = convert(self, *args, **kwargs)
        if args and args[0] is OPERANDS[core].dtype and self.dtype is torch.float32:
            exact.append(torch.equal(result.float(), self))
        return result

    monkeypatch.setattr(torch.Tensor, "to", watched)
    list(probes(core))
    assert len(exact) > 20
    assert all(exact)


@pytest.mark.parametrize("core", CORES, ids=str)
def test_every_kind_of_value_appears(core):
    a, c, d = ([], [], [])
    for _, *tensors in drawn(core):
        a.append(tensors[0].float().flatten())
        c.append(tensors[2].flatten())
        d.append(model(core, *tensors).flatten())
    for values in (torch.cat(a), torch.cat(c)):
        assert bool(values.isnan().any())
        assert bool(((values == 0) & values.signbit()).any())
    assert bool(((torch.cat(a).abs() < 2.0**core.min_exponent) & (torch.cat(a) != 0)).any())
    assert bool(((torch.cat(c).abs() < 2.0**-126) & (torch.cat(c) != 0)).any())
    assert bool((bits(torch.cat(c)) & 1).any())
    for values in (torch.cat(c), torch.cat(d)):
        assert {float("inf"), float("-inf")} <= set(values[values.isinf()].tolist())


@pytest.mark.parametrize("core", CORES, ids=str)
def test_orders(core):
    """One sum inside an instruction, several across two."""
    sums = {probe.title[:17]: model(core, *rest).diag() for probe, *rest in drawn(core) if "orders" in probe.title}
    assert len(sums["64 orders of one "].unique()) == 1
    assert len(sums["64 orders over tw"].unique()) > 1


# --- what the probes tell apart ----------------------------------------------------------------------------------

OTHERS = {
    "one bit less below the largest": lambda core: replace(core, fraction_bits=core.fraction_bits - 1),
    "one bit more below the largest": lambda core: replace(core, fraction_bits=core.fraction_bits + 1),
    "one bit less in the result": lambda core: replace(core, output_bits=core.output_bits - 1),
    "subnormals normalised": lambda core: replace(core, min_exponent=core.min_exponent - 1),
    "half the elements": lambda core: replace(core, k=core.k // 2),
    "twice the elements": lambda core: replace(core, k=core.k * 2),
}


@pytest.mark.parametrize("core", CORES, ids=str)
@pytest.mark.parametrize("other", OTHERS)
def test_another_rule_gives_other_bits(core, other):
    """In at least one small probe each."""
    changed = OTHERS[other](core)
    assert any(
        not torch.equal(bits(model(core, *tensors)), bits(model(changed, *tensors)))
        for _, *tensors in drawn(core)
        if tensors[0].shape[1] % changed.k == 0
    )
