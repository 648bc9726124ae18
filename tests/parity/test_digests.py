"""Outputs kept as digests of their rows: how they are made, and what replay says of them."""

import hashlib

import pytest
import torch

from fp4ep.optimized.engine_cpu import missing_for_engine
from fp4ep.parity import Recording, RecordingError, replay_cases
from fp4ep.parity.__main__ import main
from fp4ep.parity.recording import row_digests
from fp4ep.parity.replay import AUTO, FAST, REFERENCE, compare_rows


def quiet(case):
    return lambda share: None


def test_a_digest_is_blake2b_of_a_row():
    rows = torch.tensor([[1.0, -0.0], [0.0, float("nan")]]).bfloat16()
    expected = [hashlib.blake2b(bytes(row), digest_size=8).digest() for row in rows.view(torch.uint8).tolist()]
    assert [int(x).to_bytes(8, "little", signed=True) for x in row_digests(rows)] == expected


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 3, 4), (5,)])
def test_shapes(shape):
    digests = row_digests(torch.zeros(shape))
    assert digests.dtype is torch.int64
    assert digests.shape == shape[:1]
    assert len(set(digests.tolist())) <= 1  # rows alike


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_every_bit_counts(dtype):
    values = torch.zeros(4, 6).to(dtype)
    before = row_digests(values)
    for byte in range(6 * dtype.itemsize):
        changed = values.clone()
        changed.view(torch.uint8)[2, byte] ^= 0x80
        assert (row_digests(changed) != before).tolist() == [False, False, True, False]


def test_rows_that_differ():
    values = torch.arange(12.0).reshape(4, 3)
    digests = row_digests(values)
    assert compare_rows(values, digests) == (0, None)
    assert compare_rows(values[:0], digests[:0]) == (0, None)
    values[1, 2], values[3, 0] = -0.0, 7.0
    assert compare_rows(values, digests) == (6, "row 1: its digest is not the recorded one (2 of 4 rows)")
    with pytest.raises(ValueError, match=r"^found must have 4 rows as recorded, got \[2, 3\]"):
        compare_rows(values[:2], digests)


#: Of the small recording's cases, the role and the tensor of what the kernel gave.
GIVEN = (("output", "output.nvfp4"), ("output", "output.bf16"), ("d", "d"), ("y", "value"))


def as_digests(writer, path) -> Recording:
    writer.write(path)
    whole = Recording(path)
    for case, (role, name) in zip(writer.cases, GIVEN, strict=True):
        writer.store(f"{name}.rows", row_digests(whole[name]))
        case.tensors[f"{role}_rows"] = f"{name}.rows"
        del case.tensors[role]
    writer.write(path)
    return Recording(path)


@pytest.mark.parametrize("choice", [REFERENCE, AUTO, FAST])
def test_every_kind_is_replayed(tmp_path, writer, choice):
    """The engine has layers only."""
    if choice != REFERENCE and (reason := missing_for_engine()):
        pytest.skip(reason)
    recording = as_digests(writer, tmp_path / "small.safetensors")
    results = list(replay_cases(recording, recording.cases, quiet, choice))
    assert [(r.differing, r.first) for r in results] == [(0, None)] * 4
    layers = REFERENCE if choice == REFERENCE else FAST
    assert [r.by for r in results] == [layers, layers, REFERENCE, REFERENCE]
    assert [r.elements for r in results] == [3 * 256, 3 * 256, 64, 50]


def test_a_stored_output_is_the_references_task(tmp_path, writer):
    writer.write(tmp_path / "small.safetensors")
    recording = Recording(tmp_path / "small.safetensors")
    assert [r.by for r in replay_cases(recording, recording.cases, quiet)] == [REFERENCE] * 4


@pytest.mark.parametrize("index", range(4))
def test_a_wrong_digest_is_found(tmp_path, writer, index):
    as_digests(writer, tmp_path / "small.safetensors")
    name = f"{GIVEN[index][1]}.rows"
    wrong = writer.stored[name].clone()
    wrong[-1] ^= 1
    writer.store(name, wrong)
    writer.write(tmp_path / "small.safetensors")
    recording = Recording(tmp_path / "small.safetensors")
    results = list(replay_cases(recording, recording.cases, quiet, REFERENCE))
    width = (256, 256, 8, 1)[index]
    assert [r.differing for r in results] == [width * (n == index) for n in range(4)]
    assert results[index].first.startswith(f"row {len(wrong) - 1}: ")


def test_too_few_digests(tmp_path, writer):
    as_digests(writer, tmp_path / "small.safetensors")
    writer.store("output.bf16.rows", writer.stored["output.bf16.rows"][:2])
    writer.write(tmp_path / "small.safetensors")
    recording = Recording(tmp_path / "small.safetensors")
    with pytest.raises(RecordingError, match="found must have 2 rows as recorded"):
        list(replay_cases(recording, recording.cases, quiet, REFERENCE))


def test_the_command_says_what_ran(tmp_path, writer, capsys):
    if reason := missing_for_engine():
        pytest.skip(reason)
    path = tmp_path / "small.safetensors"
    as_digests(writer, path)
    assert main(["replay", str(path)]) == 0
    assert "2 cases, 1,536 elements, ran on the CPU engine, the others on the reference" in capsys.readouterr().out
    assert main(["replay", str(path), "--by", "reference"]) == 0
    assert "engine" not in capsys.readouterr().out


def test_without_numba(tmp_path, writer, monkeypatch, capsys):
    path = tmp_path / "small.safetensors"
    as_digests(writer, path)
    for module in ("replay", "__main__"):
        monkeypatch.setattr(f"fp4ep.parity.{module}.missing_for_engine", lambda: "numba is not installed")
    assert main(["replay", str(path)]) == 0
    assert "engine" not in capsys.readouterr().out
    assert main(["replay", str(path), "--by", "fast"]) == 2
    assert capsys.readouterr().err == "fp4ep replay: --by fast: numba is not installed\n"


def test_cases_that_differ_in_the_output_only_run_once(tmp_path, writer, monkeypatch):
    from fp4ep.parity import replay

    case = writer.cases[1]
    writer.cases[:] = [case, case, writer.cases[0], case]
    writer.write(tmp_path / "small.safetensors")
    recording, runs = Recording(tmp_path / "small.safetensors"), []
    original = replay._KINDS["moe"]
    monkeypatch.setitem(replay._KINDS, "moe", lambda *given: runs.append(1) or original(*given))
    assert [r.differing for r in replay_cases(recording, recording.cases, quiet)] == [0] * 4
    assert len(runs) == 3
