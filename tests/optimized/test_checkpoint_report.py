"""What `inspect_checkpoint` tells of sound checkpoints, and of what lies beside the tensors."""

import json
from pathlib import Path

import checkpoints as make
import pytest
import torch
from checkpoints import E, H, I

from fp4ep.optimized.checkpoint_checks import Level
from fp4ep.optimized.inspect_checkpoint import Report, inspect_checkpoint


def inspect(folder: Path, *shards: make.Tensors) -> Report:
    return inspect_checkpoint(make.write(folder, *shards))


# --- sound checkpoints -----------------------------------------------------------------------------------------------

SOUND = {
    "ModelOpt NVFP4": make.modelopt,
    "compressed-tensors NVFP4": make.compressed_tensors,
    "ModelOpt NVFP4, fused experts": make.fused_modelopt,
    "DeepSeek-V4 MXFP4": make.mxfp4,
    "compressed-tensors MXFP4": make.compressed_tensors_mxfp4,
}


@pytest.mark.parametrize(("name", "tensors"), SOUND.items(), ids=SOUND)
def test_sound(tmp_path, name, tensors):
    report = inspect(tmp_path, *make.halves(tensors()))
    assert report.findings == ()
    assert report.level is Level.NOTE
    (layer,) = report.layers
    assert (layer.convention, layer.number, layer.experts) == (name, 3, E)
    assert (layer.hidden, layer.intermediate) == (H, I)
    json.dumps(report.as_json(), allow_nan=False)


NVFP4_KERNELS = {"flashinfer_moe_ep_cutedsl", "flashinfer_moe_ep_sm90_nvfp4"}
MXFP4_KERNELS = {"flashinfer_moe_ep_cutedsl", "flashinfer_moe_ep_mega_deep_gemm", "flashinfer_moe_ep_sm90_mxfp4"}


def kernels(report: Report) -> set[str]:
    return {name for name, reasons in report.layers[0].backends.items() if not reasons}


def test_kernels(tmp_path):
    assert kernels(inspect(tmp_path, make.modelopt())) == NVFP4_KERNELS
    report = inspect(tmp_path, make.mxfp4())
    assert kernels(report) == MXFP4_KERNELS
    reasons = report.layers[0].backends["flashinfer_moe_ep_sm90_nvfp4"]
    assert reasons == ("takes bf16 and nvfp4, not mxfp4",)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    assert kernels(inspect(tmp_path, make.mxfp4())) == MXFP4_KERNELS - {"flashinfer_moe_ep_mega_deep_gemm"}


def test_sizes_that_some_kernels_take(tmp_path):
    report = inspect(tmp_path, make.modelopt(h=192))
    assert kernels(report) == {"flashinfer_moe_ep_cutedsl"}
    reasons = report.layers[0].backends["flashinfer_moe_ep_sm90_nvfp4"]
    assert reasons == ("hidden size 192 is not a multiple of 128",)


@pytest.mark.parametrize(
    ("tensors", "amax", "inverted"),
    [(make.modelopt, 1.5, 2688**2 / 1.5), (make.compressed_tensors, 1.5, 2688**2 / 1.5), (make.mxfp4, 6.0, None)],
)
def test_magnitude(tmp_path, tensors, amax, inverted):
    """448 * 6 * scale_2: amax .5, 1, 1.5, 2 for gate and up, twice that for down; the lower median of twelve. The
    largest UE8M0 scale is 1."""
    (layer,) = inspect(tmp_path, tensors()).layers
    values = sorted([0.5, 1, 1.5, 2] * 2 + [1, 2, 3, 4])
    assert values[5] == 1.5
    assert layer.amax == pytest.approx(amax, rel=1e-6)
    assert layer.inverted_amax == (None if inverted is None else pytest.approx(2688**2 / values[6], rel=1e-6))


def test_evidence(tmp_path):
    evidence = inspect(tmp_path, make.compressed_tensors()).layers[0].evidence
    assert evidence["direction of global scales"].startswith("encode ((6 * 448) / amax")
    assert evidence["direction of global scales"].endswith(
        "weight_global_scale; confirmed by the magnitude of the weights"
    )
    assert evidence["gate and up"] == "told apart by name"
    assert "do not tell" in evidence["nibbles"]
    assert "would have the same shape" in evidence["scale layout"]
    evidence = inspect(tmp_path, make.modelopt(h=192)).layers[0].evidence
    assert evidence["scale layout"] == "linear: a swizzled one would be padded"


# --- beside the tensors ----------------------------------------------------------------------------------------------


def test_gpt_oss_56_57(tmp_path):
    report = inspect(tmp_path, make.gpt_oss())
    (finding,) = report.findings
    assert finding.level is Level.ERROR
    assert "expert bias, swigluoai activation (alpha 1.702, beta 1), rows of gate and up interleaved" in finding.text
    assert finding.reports == ("vllm-project/vllm#46641", "vllm-project/vllm#44893")
    assert kernels(report) == set()
    assert (report.layers[0].hidden, report.layers[0].intermediate) == (H, I)
    assert "interleaved" in report.layers[0].evidence["gate and up"]


def test_unknown_convention(tmp_path):
    tensors = {n: t.to(torch.float8_e4m3fn) if n.endswith("weight") else t for n, t in make.modelopt().items()}
    (finding,) = inspect(tmp_path, tensors).findings
    assert finding.level is Level.ERROR
    assert "weight F8_E4M3" in finding.text


def test_bf16_experts_are_only_noted(tmp_path):
    tensors = {n: t.bfloat16() for n, t in make.modelopt().items() if n.endswith(".weight")}
    report = inspect(tmp_path, tensors)
    assert [f.text for f in report.findings] == ["experts are not quantized: weight BF16"]
    assert report.level is Level.NOTE


@pytest.mark.parametrize("config", ['{"n_routed_experts": 8}', '{"text_config": {"num_experts": 8}}'])
def test_experts_that_the_config_counts(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    (finding,) = inspect(tmp_path, make.modelopt()).findings
    assert finding.text == "4 experts, but config.json says 8"
    (tmp_path / "config.json").write_text(config.replace("8", "4"))
    assert inspect(tmp_path, make.modelopt()).findings == ()


def test_a_gap_in_the_experts(tmp_path):
    tensors = {n: t for n, t in make.modelopt().items() if ".experts.1." not in n}
    (finding,) = inspect(tmp_path, tensors).findings
    assert (finding.check, finding.experts) == ("missing tensors", (1,))


def test_group_size_of_the_configuration(tmp_path):
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}')
    assert inspect(tmp_path, make.modelopt()).findings == ()
    assert [f.check for f in inspect(tmp_path, make.mxfp4()).findings] == ["configuration"]


def test_layers_of_two_formats_share_a_workspace(tmp_path):
    report = inspect(tmp_path, make.modelopt() | make.mxfp4("layers.4.ffn.experts"))
    assert [f.check for f in report.findings] == ["several formats"]


# --- the run ---------------------------------------------------------------------------------------------------------


def test_only_the_chosen_layers_are_read(tmp_path):
    make.write(tmp_path, make.modelopt(), make.modelopt("model.layers.4.mlp.experts"))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"poison")
    report = inspect_checkpoint(tmp_path, [3])
    assert [layer.number for layer in report.layers] == [3]
    with pytest.raises(ValueError, match=r"00002-of-00002.safetensors: not a safetensors file"):
        inspect_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="layer 5 has no routed experts"):
        inspect_checkpoint(tmp_path, [5])


@pytest.mark.parametrize("tensors", SOUND.values(), ids=SOUND)
def test_progress_reaches_the_end(tmp_path, tensors):
    seen = []
    make.write(tmp_path, tensors())
    inspect_checkpoint(tmp_path, progress=lambda layer, done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_no_experts(tmp_path):
    with pytest.raises(ValueError, match="no routed experts"):
        inspect(tmp_path, {"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)})


def test_an_empty_report():
    report = Report("a", (), ())
    assert report.level is Level.NOTE
    assert report.as_json() == {"path": "a", "layers": [], "findings": []}
