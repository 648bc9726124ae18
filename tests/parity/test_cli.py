"""`fp4ep replay`: exit status, what it prints, and where."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp4ep.parity.__main__ import main
from fp4ep.parity.recording import Recording, RecordingWriter

pytestmark = pytest.mark.usefixtures("quick_gemms")


@pytest.fixture
def small(tmp_path, writer) -> Path:
    path = tmp_path / "small.safetensors"
    writer.write(path)
    return path


@pytest.fixture
def differing(tmp_path, writer, small) -> Path:
    """`small` with the last bit of one recorded output flipped."""
    output = Recording(small)["output.nvfp4"].clone()
    output.view(torch.int16)[2, 100] ^= 1
    writer.store("output.nvfp4", output, "xz")
    path = tmp_path / "differing.safetensors"
    writer.write(path)
    return path


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output (its lines joined by single spaces) and standard error."""
    status = main(["replay", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, " ".join(captured.out.split()), captured.err


def test_equal(capsys, small):
    status, out, _ = run(capsys, small)
    assert status == 0
    assert out.endswith("4 cases, 1,650 elements, 0 differing")
    for text in (
        "three tokens",
        "nvfp4_kperm=64",
        "Hopper wgmma E4M3",
        "a test (0.0), flashinfer 1.2.3",
        "torch 4.5.6",
    ):
        assert text in out
    assert out.count("verified") == 4
    assert "first difference" not in out


def test_differing(capsys, small, differing):
    status, out, _ = run(capsys, small, differing)
    assert status == 1
    expected, recorded = (Recording(path)["output.nvfp4"][2, 100] for path in (small, differing))
    bits, other_bits = (f"0x{value.view(torch.int16).item() & 0xFFFF:x}" for value in (expected, recorded))
    assert (
        "first difference in differing: sm90_fp8_nvfp4_bf16_pull_cutedsl[nvfp4_kperm=64], three tokens: "
        f"[2, 100]: {expected.item()!r} ({bits}), recorded {recorded.item()!r} ({other_bits})"
    ) in out
    assert out.count("first difference") == out.count("DIFFERS") == 1
    assert out.count("verified") == 7
    assert out.endswith("8 cases, 3,300 elements, 1 differing")


def test_json(capsys, small, differing):
    status = main(["replay", "--json", str(differing), str(small)])
    results = json.loads(capsys.readouterr().out)
    assert status == 1
    assert [r["recording"] for r in results] == ["differing"] * 4 + ["small"] * 4
    assert [r["differing"] for r in results] == [1] + [0] * 7
    assert results[0]["first"].startswith("[2, 100]: ")
    assert results[0].pop("seconds") >= 0
    assert results[4].pop("seconds") >= 0
    del results[0]["first"]
    shared = {
        "case": "three tokens",
        "scheme": "sm90_fp8_nvfp4_bf16_pull_cutedsl[nvfp4_kperm=64]",
        "hardware": "a test (0.0)",
        "version": "flashinfer 1.2.3",
        "by": "reference",
        "elements": 768,
    }
    assert results[0] == {"recording": "differing", "differing": 1, "evidence": None, **shared}
    assert results[4] == {"recording": "small", "differing": 0, "evidence": "verified", "first": None, **shared}


def test_progress_stays_out_of_the_output(capsys, small, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    main(["replay", "--json", str(small)])
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 4
    assert "a few arguments" in captured.err  # the last case, whatever was too quick to be shown


@pytest.mark.parametrize(
    ("text", "cases"),
    [("nvfp4", 1), ("three", 2), ("gate_up_clamp", 1), ("a chain", 1), ("rcp.approx", 1), ("sm90_", 2)],
)
def test_match(capsys, small, text, cases):
    """By scheme, title or options."""
    status, out, _ = run(capsys, "--match", text, small)
    assert status == 0
    assert f"{cases} cases, " in out


def test_match_leaves_differences_out(capsys, differing):
    assert run(capsys, "--match", "bf16_bf16_bf16", differing)[0] == 0
    assert run(capsys, "--match", "nvfp4", differing)[0] == 1


def test_no_match(capsys, small):
    status, out, err = run(capsys, "--match", "tf32", small)
    assert (status, out) == (2, "")
    assert err == "fp4ep replay: --match 'tf32' leaves no case\n"


def test_shipped_recordings_are_the_default(capsys):
    status, out, _ = run(capsys, "--match", "_scaled_mm, K = 32")
    assert status == 0
    assert out.endswith("1 cases, 4,096 elements, 0 differing")


def test_missing_file(capsys, tmp_path, small):
    status, out, err = run(capsys, small, tmp_path / "missing.safetensors")
    assert (status, out) == (2, "")
    assert err.startswith("fp4ep replay: ")
    assert "missing.safetensors" in err


def test_not_a_recording(capsys, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    status, out, err = run(capsys, path)
    assert (status, out) == (2, "")
    assert err.startswith("fp4ep replay: ")
    assert "notes.txt: not an fp4ep recording" in err


def test_corrupted_recording(capsys, small, writer):
    writer.specs["w13"]["sha256"] = "0" * 64
    writer.write(small)
    status, out, err = run(capsys, small)
    assert (status, out) == (2, "")
    assert "small.safetensors: tensor 'w13' cannot be read" in err


@pytest.mark.parametrize("arguments", [[], ["play"], ["replay", "--tolerance", "1e-3"]], ids=str)
def test_bad_arguments(capsys, arguments):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert "usage: fp4ep" in capsys.readouterr().err


def test_titles_are_not_markup(capsys, tmp_path, writer: RecordingWriter):
    """Rich would take [bold] for a style."""
    writer.cases = [replace(writer.cases[2], title="K [bold] 64")]
    writer.store("d", torch.zeros(8, 8))
    path = tmp_path / "titles.safetensors"
    writer.write(path)
    status, out, _ = run(capsys, path)
    assert status == 1
    assert out.count("K [bold] 64") == 2  # in the table, and with the first difference


def change_case(**fields):
    return lambda writer: writer.cases.insert(0, replace(writer.cases.pop(0), **fields))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(change_case(scheme="sm120_fp4"), id="scheme"),
        pytest.param(change_case(kind="attention"), id="kind"),
        pytest.param(lambda writer: writer.store("output.nvfp4", torch.zeros(1, 256).bfloat16()), id="output shape"),
        pytest.param(lambda writer: writer.store("topk_ids", torch.full((3, 2), 4)), id="ids out of range"),
    ],
)
def test_recording_that_cannot_be_replayed(capsys, tmp_path, writer, damage):
    damage(writer)
    path = tmp_path / "damaged.safetensors"
    writer.write(path)
    status, out, err = run(capsys, path)
    assert (status, out) == (2, "")
    assert "damaged.safetensors" in err
