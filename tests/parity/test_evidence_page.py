"""docs/evidence.md says what the recordings hold; the tables are made from them."""

import json
from pathlib import Path

import pytest

from fp4ep.parity import Recording, replay_cases, shipped_recordings
from fp4ep.parity.__main__ import main
from fp4ep.parity.evidence import PageError, check_page, elements_of, tables, write_page
from fp4ep.reference.special import EX2_SHA256, RCP_SHA256

PAGE = Path(__file__).parents[2] / "docs/evidence.md"
DATA = Path(__file__).parents[1] / "reference/data/special_h200.json"
EMPTY = "before\n<!-- made by fp4ep replay --page -->\n<!-- end of what is made -->\nbehind\n"


def test_the_page_has_the_tables_of_the_shipped_recordings(tmp_path):
    """With no element differing: `fp4ep replay` ends with an error where one does."""
    judged = [(recording, case, 0) for recording in map(Recording, shipped_recordings()) for case in recording.cases]
    made = tmp_path / "made.md"
    made.write_text(PAGE.read_text())
    write_page(made, judged)
    assert made.read_text() == PAGE.read_text()


def test_elements_are_those_of_a_replay(tmp_path, writer):
    writer.write(tmp_path / "small.safetensors")
    recording = Recording(tmp_path / "small.safetensors")
    results = replay_cases(recording, recording.cases, lambda case: lambda share: None)
    assert [elements_of(recording, case) for case in recording.cases] == [result.elements for result in results]


def test_the_command_writes_what_it_found(tmp_path, writer):
    output = writer.stored["d"].clone()
    output[3, 3] += 1
    writer.store("d", output)
    recorded, page = tmp_path / "small.safetensors", tmp_path / "page.md"
    writer.write(recorded)
    page.write_text(EMPTY)
    assert main(["replay", str(recorded), "--page", str(page)]) == 1
    text = page.read_text()
    assert text.startswith("before\n<!-- made")
    assert text.endswith("made -->\nbehind\n")
    assert "4 cases, 1,650 elements, 1 differing." in text
    assert "| `Hopper wgmma E4M3` | 1 | 64 | 1 |" in text
    row = "| 1 | 768 | 0 | 3 | 2 | 4 | 256 | 128 | 2 |  |  | 1 |"
    assert f"| `sm90_fp8_nvfp4_bf16_pull_cutedsl[nvfp4_kperm=64]` {row}" in text
    recording = Recording(recorded)
    differing = [0, 0, 1, 0]
    assert tables([(recording, c, n) for c, n in zip(recording.cases, differing, strict=True)]) in text


def test_a_page_without_marks_is_left_alone(tmp_path, writer, capsys):
    recorded, page = tmp_path / "small.safetensors", tmp_path / "page.md"
    writer.write(recorded)
    page.write_text("no marks")
    with pytest.raises(PageError, match="has no lines"):
        check_page(page)
    assert main(["replay", str(recorded), "--page", str(page)]) == 2
    assert "--page" in capsys.readouterr().err
    assert page.read_text() == "no marks"
    assert main(["replay", str(recorded), "--page", str(tmp_path / "absent.md")]) == 2


def test_special_functions_as_measured():
    """Every argument that the H200 tried, and both tables, by the rules of reference/special.py."""
    measured = json.loads(DATA.read_text())
    assert measured["equal"] is True
    assert measured["source"]["hardware"] == "NVIDIA H200"
    digests = {name: row["sha256"] for name, row in measured["tables"].items()}
    assert digests["ex2.approx.ftz.f32"] == EX2_SHA256
    assert digests["rcp.approx.ftz.f32"] == RCP_SHA256
    page, tried = PAGE.read_text(), dict.fromkeys((row["instruction"] for row in measured["comparisons"]), 0)
    for row in measured["comparisons"]:
        assert row["differing"] == 0
        assert f"| `{row['instruction']}` | {row['arguments']} | {row['tried']:,} | 0 |" in page
        tried[row["instruction"]] += row["tried"]
    assert len(tried) == 5
    assert min(tried.values()) >= 10**8
