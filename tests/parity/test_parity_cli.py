"""`fp4ep parity`: what it runs, prints and returns, and how it fails."""

import json

import pytest
import torch

from fp4ep.parity import CASES, load_run, shipped_recordings
from fp4ep.parity.__main__ import main
from fp4ep.parity.summary import as_json

pytestmark = pytest.mark.usefixtures("quick_gemms")

SMALL = ["--tokens", "6"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(["parity", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_two_sides_that_agree(capsys):
    status, out, _ = run(capsys, "run", "--scheme", "nvfp4", "--ep", "4", "--right", "fake_quant", *SMALL)
    assert status == 0
    for words in ("reference against fake_quant", "Within the tolerance", "combine.values", "TensorRT-LLM"):
        assert words in out


def test_a_fault_is_found_located_and_named(capsys):
    status, out, _ = run(capsys, "run", "--scheme", "nvfp4", "--right", "fault:nibbles-swapped", *SMALL)
    assert status == 1
    assert "Bits differ, first in fc1.gate" in out
    assert "diagnosis, nibbles swapped: w13's nibbles swapped" in out


def test_json_is_the_whole_comparison(capsys):
    status, out, _ = run(capsys, "run", "--scheme", "bf16_bf16", "--right", "fake_quant", "--json", *SMALL)
    found = json.loads(out)
    assert status == 0
    assert found["passed"] is True
    assert found["scheme"]["name"] == "sm90_bf16_bf16_bf16_pull_cutedsl"
    assert found["problem"]["tokens"] == [6]
    assert {"case", *as_json.__annotations__} - {"comparison", "diagnoses", "return"} <= found.keys()


def test_options_sizes_and_patterns_reach_the_problem(capsys):
    arguments = ["--option", "nvfp4_kperm=0", "--option", "gate_up_clamp=null", "--hidden", "384", "--num-experts", "4"]
    arguments += ["--top-k", "3", "--values", "outliers", "--routing", "masked", "--padding", "2", "--seed", "5"]
    status, out, _ = run(capsys, "run", "--scheme", "nvfp4", *arguments, "--tokens", "2,3", "--ep", "2", "--json")
    problem = json.loads(out)["problem"]
    assert status == 0
    assert problem["options"] == {"nvfp4_kperm": 0, "gate_up_clamp": None}
    sizes = {"hidden": 384, "num_experts": 4, "top_k": 3, "padding": 2, "seed": 5, "tokens": [2, 3]}
    assert {name: problem[name] for name in sizes} == sizes
    assert (problem["values"], problem["routing"]) == ("outliers", "masked")


def test_all_cases_in_one_go(capsys):
    status, out, _ = run(capsys, "run", "--scheme", "bf16_bf16", "--case", "all", "--ep", "4", *SMALL)
    assert status == 0
    assert out.count("holds: ") == len(CASES)
    assert "holds: poisoned padding" in out


def test_a_recording_over_other_ranks(capsys):
    """A kernel's own output, from one rank, against the reference on four."""
    (path,) = (p for p in shipped_recordings() if p.stem == "h200_special_values")
    side = f"recording:{path}#1 tokens, top-k 1"
    status, out, _ = run(capsys, "run", "--right", side, "--ep", "4")
    assert status == 0
    assert "Every bit of combine.values equal" in out
    status, _, err = run(capsys, "run", "--right", f"recording:{path}#special")
    assert status == 2
    assert "must fit one case" in err


def test_saved_runs_are_compared_and_reported(capsys, tmp_path):
    folder = tmp_path / "run"
    arguments = ["--scheme", "mxfp4", "--right", "fault:e8m0-binade", "--ep", "2", *SMALL]
    status, told, _ = run(capsys, "run", *arguments, "--json", "--save", str(folder))
    assert status == 1
    left, right = folder / "left.safetensors", folder / "right.safetensors"
    assert load_run(left).side == "reference"
    status, again, _ = run(capsys, "compare", str(left), str(right), "--json")
    assert status == 1
    assert json.loads(again) | {"case": ""} == json.loads(told) | {"case": ""}
    status, out, err = run(capsys, "report", str(folder))
    assert status == 1
    assert f"wrote {folder / 'report.html'}" in err
    assert (folder / "report.html").stat().st_size > 10_000
    assert "diagnosis, a constant factor" in out
    page = tmp_path / "page.html"
    assert run(capsys, "report", str(left), str(left), "-o", str(page))[0] == 0
    assert "Every bit equal" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["run"], 2, "--scheme is needed"),
        (["run", "--scheme", "fp8"], 2, "--scheme: 'fp8' must fit one of"),
        (["run", "--scheme", "nvfp4", "--right", "nothing"], 2, "side: 'nothing' is not one of reference, fast, cuda"),
        (["run", "--scheme", "nvfp4", "--right", "fault:nothing"], 2, "no fault 'nothing'; there are"),
        (["run", "--scheme", "bf16_bf16", "--right", "fault:nibbles-swapped"], 2, "must be planted in NVFP4, MXFP4"),
        (["run", "--scheme", "nvfp4", "--left", "fake_quant"], 2, "left must claim bits"),
        (["run", "--scheme", "nvfp4", "--option", "kperm"], 2, "--option must be KNOB=VALUE"),
        (["run", "--scheme", "nvfp4", "--option", "nvfp4_kperm=7"], 2, "nvfp4_kperm: 7 is not one of"),
        (["run", "--scheme", "nvfp4", "--case", "none"], 2, "cases: none not among ordinary"),
        (["run", "--scheme", "nvfp4", "--tokens", "1,2,3", "--ep", "2"], 2, "--tokens must be one number or one for"),
        (["run", "--scheme", "nvfp4", "--ep", "3"], 2, "divide the 8 experts"),
        (["run", "--scheme", "nvfp4", "--case", "all", "--html", "x.html"], 2, "--html: one page shows one case"),
        (["run", "--scheme", "nvfp4", "--hidden", "100"], 2, "hidden must be a positive multiple of 64"),
        (["compare", "nowhere", "nowhere"], 2, "nowhere"),
        (["report", "a", "b", "c"], 2, "RUN must be one folder or two files"),
    ],
    ids=lambda x: " ".join(x[1:]) if isinstance(x, list) else "",
)
def test_what_is_wrong_is_said(capsys, arguments, status, words):
    found, out, err = run(capsys, *arguments)
    assert found == status
    assert words in err
    assert err.strip().startswith(f"fp4ep parity {arguments[0]}: ")
    assert not out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_side_that_cannot_run_here(capsys):
    status, _, err = run(capsys, "run", "--scheme", "nvfp4", "--right", "flashinfer")
    assert status == 3
    assert "flashinfer cannot run here: no CUDA device" in err


@pytest.mark.slow
def test_processes_of_its_own(capsys):
    status, out, _ = run(capsys, "run", "--scheme", "nvfp4", "--ep", "2", "--spawn", "--case", "masked slots", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["left"]["source"]["ranks"] == "spawned"
    assert found["ep_size"] == 2
