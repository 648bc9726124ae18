"""`fp4ep inspect`: exit status, what it prints, and where."""

import json

import checkpoints as make
import pytest
import torch

from fp4ep.parity.__main__ import main

LAYER = "model.layers.3.mlp.experts"


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output (its lines joined by single spaces) and standard error."""
    status = main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, " ".join(captured.out.split()), captured.err


def three_layers() -> make.Tensors:
    return {n: t for layer in (3, 4, 6) for n, t in make.modelopt(f"model.layers.{layer}.mlp.experts").items()}


def test_sound(capsys, tmp_path):
    status, out, _ = run(capsys, make.write(tmp_path, three_layers()))
    assert status == 0
    assert out.startswith(
        "layers convention experts hidden intermediate kernels 3-4, 6 ModelOpt NVFP4 4 256 128 cutedsl,"
    )
    assert "layers 3-4, 6 direction of global scales: decode" in out
    assert "largest weight: 1.5 (bound by the scales, median over experts)" in out
    assert out.endswith("3 layers: 0 errors, 0 warnings, 0 notes")


def test_warnings(capsys, tmp_path):
    tensors = three_layers()
    for layer in (3, 4, 6):
        tensors[f"model.layers.{layer}.mlp.experts.2.up_proj.weight_scale_2"] *= 5
        tensors[f"model.layers.{layer}.mlp.experts.1.down_proj.input_scale"] *= 0
    status, out, _ = run(capsys, make.write(tmp_path, tensors))
    assert status == 1
    assert out.count("warning gate and up differ vllm-project/vllm#54974") == 1
    assert out.count("differ in 1 of 4 experts, by up to 5") == 3
    assert "down input scale is 0" in out
    assert "; expert 1" in out
    assert out.endswith("3 layers: 0 errors, 6 warnings, 0 notes")


def test_findings_of_many_layers_are_cut_short(capsys, tmp_path):
    tensors = {}
    for layer in range(6):
        prefix = f"layers.{layer}.ffn.experts"
        tensors |= make.mxfp4(prefix)
        tensors[f"{prefix}.2.w3.scale"].view(torch.uint8)[0] = 255
    status, out, _ = run(capsys, make.write(tmp_path, tensors))
    assert status == 1
    assert out.count("NaN block scales: 8 of") == 3
    assert "and 3 more, in layers 3-5" in out


def test_notes_are_clean(capsys, tmp_path):
    tensors = {n: t for n, t in make.modelopt().items() if not n.endswith("input_scale")}
    status, out, _ = run(capsys, make.write(tmp_path, tensors))
    assert status == 0
    assert "note input scale missing" in out


def test_no_kernel_and_why(capsys, tmp_path):
    status, out, _ = run(capsys, make.write(tmp_path, make.gpt_oss()))
    assert status == 1
    assert "no kernel takes layer 3: flashinfer_moe_ep_cutedsl: expert bias; swigluoai" in out
    assert "flashinfer_moe_ep_sm90_bf16: takes bf16, not mxfp4; expert bias" in out


def test_many_experts(capsys, tmp_path):
    tensors = make.modelopt(e=20, h=128, i=128)
    for e in set(range(20)) - {7, 19}:
        tensors[f"{LAYER}.{e}.up_proj.weight_scale_2"] *= 3
    _, out, _ = run(capsys, make.write(tmp_path, tensors))
    assert "; experts 0-6, 8-18" in out


def test_json(capsys, tmp_path):
    tensors = make.modelopt()
    tensors[f"{LAYER}.2.down_proj.input_scale"] = torch.tensor(float("inf"))
    assert main(["inspect", "--json", str(make.write(tmp_path, tensors))]) == 1
    report = json.loads(capsys.readouterr().out)
    (finding,) = report["findings"]
    assert finding["level"] == "warning"
    assert finding["experts"] == [2]
    assert finding["reports"] == ["vllm-project/compressed-tensors#595", "vllm-project/vllm#45212"]
    (layer,) = report["layers"]
    assert layer["convention"] == "ModelOpt NVFP4"
    assert layer["backends"]["flashinfer_moe_ep_cutedsl"] == []


def test_layers(capsys, tmp_path):
    make.write(tmp_path, three_layers() | make.mxfp4("mtp.0.ffn.experts"))
    status, out, _ = run(capsys, tmp_path, "--layer", 4, "--layer", "mtp.0.ffn.experts")
    assert status == 1  # of two formats
    assert "4 ModelOpt NVFP4" in out
    assert "mtp.0.ffn.experts DeepSeek-V4 MXFP4" in out
    assert "warning several formats" in out
    assert out.endswith("2 layers: 0 errors, 1 warning, 0 notes")
    assert run(capsys, tmp_path, "--layer", 4)[0] == 0


def test_progress_stays_out_of_the_output(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    main(["inspect", "--json", str(make.write(tmp_path, make.modelopt()))])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["findings"] == []
    assert LAYER in captured.err


def test_names_are_not_markup(capsys, tmp_path):
    """Rich would take [bold] for a style."""
    _, out, _ = run(capsys, make.write(tmp_path, make.mxfp4("[bold].ffn.experts")))
    assert out.count("[bold].ffn.experts") == 2


@pytest.mark.parametrize(
    ("files", "arguments", "message"),
    [
        ({}, [], "has neither model.safetensors.index.json nor"),
        ({"a.safetensors": b"x"}, [], "a.safetensors: not a safetensors file"),
        ({"model.safetensors.index.json": b'{"weight_map": {}}'}, [], "no routed experts"),
        (None, ["--layer", "9"], "layer 9 has no routed experts"),
    ],
)
def test_bad_files_and_arguments(capsys, tmp_path, files, arguments, message):
    if files is None:
        make.write(tmp_path, make.modelopt())
    for name, content in (files or {}).items():
        (tmp_path / name).write_bytes(content)
    status, out, err = run(capsys, tmp_path, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("fp4ep inspect: ")
    assert message in err


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["a", "--format", "x"]], ids=str)
def test_usage(capsys, arguments):
    with pytest.raises(SystemExit) as raised:
        main(["inspect", *arguments])
    assert raised.value.code == 2
    assert "usage: fp4ep" in capsys.readouterr().err
