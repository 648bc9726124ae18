"""Checkpoint files: laziness, shards and indices, and clear refusals."""

import json
import re

import checkpoints as make
import pytest
import torch
from checkpoints import H, I
from safetensors.torch import save_file

from fp4ep.optimized.checkpoint import LayerWeights, open_checkpoint
from fp4ep.optimized.checkpoint_files import StoredTensor

LAYER = "model.layers.3.mlp.experts"


@pytest.fixture
def load(tmp_path):
    """Write tensors over two shards and load layer 3."""

    def load(tensors: make.Tensors, *arguments, **options) -> LayerWeights:
        make.write(tmp_path, *make.halves(tensors))
        return open_checkpoint(tmp_path).load_layer(3, *arguments, **options)

    return load


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


# --- laziness ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of the tensors read."""
    names: list[str] = []
    read = StoredTensor.read

    def counting(self, part=None):
        names.append(self.name)
        return read(self, part)

    monkeypatch.setattr(StoredTensor, "read", counting)
    return names


def test_other_shards_are_not_touched(tmp_path, reads):
    other = make.modelopt("model.layers.4.mlp.experts")
    make.write(tmp_path, make.modelopt(), other)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"poison")
    checkpoint = open_checkpoint(tmp_path)
    assert [layer.number for layer in checkpoint.layers] == [3, 4]
    assert reads == []
    checkpoint.load_layer(3)
    with pytest.raises(ValueError, match=r"00002-of-00002.safetensors: not a safetensors file"):
        checkpoint.load_layer(4)


def test_a_truncated_shard_is_named(tmp_path):
    make.write(tmp_path, make.modelopt())
    file = tmp_path / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"00001.safetensors: tensor '.*' cannot be read"):
        open_checkpoint(tmp_path).load_layer(3)


@pytest.mark.parametrize("make_tensors", [make.modelopt, make.fused_modelopt, make.compressed_tensors, make.mxfp4])
def test_only_the_experts_of_a_rank_are_read(tmp_path, reads, make_tensors):
    make.write(tmp_path, make_tensors())
    checkpoint = open_checkpoint(tmp_path)
    every = checkpoint.load_layer(3)
    reads.clear()
    seen = []
    rank = checkpoint.load_layer(3, experts=range(2, 4), progress=lambda done, total: seen.append((done, total)))
    assert rank.experts == range(2, 4)
    for name, tensor in vars(rank).items():
        if isinstance(tensor, torch.Tensor):
            assert same(tensor, getattr(every, name)[2:4]), name
    assert {int(m[1]) for m in map(re.compile(r".*experts\.(\d+)\.").match, reads) if m} <= {2, 3}
    assert len(reads) == len(set(reads)) == len(seen)
    (done, total) = seen[-1]
    assert done == total
    payload = 2 * (3 * H * I // 2)  # experts, codes
    assert total > payload
    assert total < 1.2 * payload
    assert seen == sorted(seen)


def test_progress_counts_bytes(tmp_path):
    tensors = make.modelopt()
    make.write(tmp_path, *make.halves(tensors))
    seen = []
    open_checkpoint(tmp_path).load_layer(3, progress=lambda done, total: seen.append((done, total)))
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    assert {total for _, total in seen} == {size}
    assert seen[-1][0] == size
    assert len(seen) == len(tensors)


# --- files ------------------------------------------------------------------------------------------------------------


def test_without_an_index(tmp_path):
    make.write(tmp_path, *make.halves(make.modelopt()), index=False)
    assert same(open_checkpoint(tmp_path).load_layer(3).w2[0], make.modelopt()[f"{LAYER}.0.down_proj.weight"])


def test_one_file(tmp_path):
    save_file(make.modelopt(), tmp_path / "a.safetensors")
    assert len(open_checkpoint(tmp_path / "a.safetensors").layers) == 1


def test_a_name_in_two_files(tmp_path):
    make.write(tmp_path, make.modelopt(), make.modelopt(), index=False)
    with pytest.raises(ValueError, match=r"is in two files, .*00001.*00002"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "has neither model.safetensors.index.json nor a .safetensors file"),
        (lambda folder: folder.rmdir(), "does not exist"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "not a safetensors index"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "not a safetensors index"),
        (lambda folder: (folder / "a.safetensors").write_bytes(b"\xff" * 40), "not a safetensors file"),
        (lambda folder: (folder / "a.safetensors").write_bytes(b""), "not a safetensors file"),
    ],
    ids=["empty", "missing", "index without a map", "index not JSON", "huge header", "empty file"],
)
def test_bad_paths(tmp_path, prepare, message):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    prepare(folder)
    with pytest.raises(ValueError, match=re.escape(message)):
        open_checkpoint(folder)


def test_index_names_a_missing_file_or_tensor(tmp_path):
    make.write(tmp_path, *make.halves(make.modelopt()))
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][f"{LAYER}.0.up_proj.weight"] = "model-00002-of-00002.safetensors"
    content["weight_map"][f"{LAYER}.0.up_proj.weight_scale"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"the index puts tensor .*0.up_proj.* here, but the file lacks it"):
        open_checkpoint(tmp_path).load_layer(3)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"00002-of-00002.safetensors: the file is missing"):
        open_checkpoint(tmp_path).load_layer(3)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_all_missing_tensors_in_one_message(load):
    tensors = make.modelopt()
    del tensors[f"{LAYER}.1.up_proj.weight"]
    del tensors[f"{LAYER}.1.up_proj.weight_scale_2"]
    del tensors[f"{LAYER}.2.down_proj.weight_scale"]
    missing = "up weight of experts 1; down weight_scale of experts 2; up weight_scale_2 of experts 1"
    with pytest.raises(ValueError, match=f"lacks tensors of ModelOpt NVFP4: {missing}"):
        load(tensors)
    assert load(tensors, experts=range(3, 4)).experts == range(3, 4)


def test_global_scales_left_out_altogether_22(load):
    """huggingface/transformers#48372: weights without their global scales."""
    tensors = {n: t for n, t in make.modelopt().items() if not n.endswith("weight_scale_2")}
    with pytest.raises(ValueError, match="gate weight_scale_2 of experts 0-3; up weight_scale_2 of experts 0-3; down"):
        load(tensors)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), 1e-44])
@pytest.mark.parametrize("projection", ["up_proj", "down_proj"])
def test_a_global_scale_that_is_no_scale(load, value, projection):
    tensors = make.modelopt()
    tensors[f"{LAYER}.2.{projection}.weight_scale_2"] = torch.tensor(value)
    with pytest.raises(ValueError, match=r"weight_scale_2 must be finite and positive; experts 2$"):
        load(tensors)


def test_input_scale_missing_for_some_experts_18(load):
    """vllm-project/vllm#45212: never an uninitialized or zero number."""
    tensors = make.modelopt()
    del tensors[f"{LAYER}.2.up_proj.input_scale"]
    assert load(tensors).w13_input_scale.isnan().tolist() == [False, False, True, False]
    assert not bool(load(tensors).w2_input_scale.isnan().any())


def test_no_input_scales(load):
    weights = load({n: t for n, t in make.modelopt().items() if not n.endswith("input_scale")})
    assert weights.w13_input_scale is weights.w2_input_norm is None


@pytest.mark.parametrize("rows", [I - 1, 128 + I], ids=["short", "padded, 47"])
def test_scale_rows(load, rows):
    """vllm-project/vllm#35497: padded scales."""
    tensors = make.modelopt()
    tensors[f"{LAYER}.1.up_proj.weight_scale"] = make.e4m3(rows, H // 16)
    with pytest.raises(ValueError, match=rf"1.up_proj.weight_scale.*\[{rows}, 16\]: the shape must be \[128, 16\]"):
        load(tensors)


def test_scale_columns_of_another_block_size_48(load):
    tensors = {
        n: make.e4m3(I, H // 32) if n.endswith("up_proj.weight_scale") else t for n, t in make.modelopt().items()
    }
    with pytest.raises(ValueError, match=r"the shape must be \[128, 16\]"):
        load(tensors)


def test_scale_dtype(load):
    """float32 NVFP4 block scales would be cut to their exponent."""
    tensors = make.modelopt()
    name = f"{LAYER}.1.up_proj.weight_scale"
    tensors[name] = tensors[name].float()
    with pytest.raises(ValueError, match="ModelOpt NVFP4 stores a block scale as F8_E4M3 or U8"):
        load(tensors)


def test_e4m3_scales_as_bytes(load):
    tensors = {n: t.view(torch.uint8) if n.endswith("weight_scale") else t for n, t in make.modelopt().items()}
    assert same(load(tensors).w13_scale, load(make.modelopt()).w13_scale)


def test_a_vector_where_a_number_belongs(load):
    tensors = make.modelopt()
    tensors[f"{LAYER}.1.up_proj.weight_scale_2"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"1.up_proj.weight_scale_2 F32 \[2\]: must be one number"):
        load(tensors)


@pytest.mark.parametrize("experts", [range(0, 5), range(-1, 2), range(0), range(0, 4, 2), [0, 1]], ids=str)
def test_bad_experts(load, experts):
    with pytest.raises(ValueError, match="experts must be"):
        load(make.modelopt(), experts=experts)


def test_unknown_layer(tmp_path):
    make.write(tmp_path, make.modelopt() | make.mxfp4("mtp.0.ffn.experts"))
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"layer 2 has no routed experts.*: 3, mtp.0.ffn.experts"):
        checkpoint.load_layer(2)
    assert checkpoint.load_layer("mtp.0.ffn.experts").convention.name == "DeepSeek-V4 MXFP4"
