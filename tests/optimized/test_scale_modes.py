"""Static and dynamic activation scales: what each engine makes of one checkpoint."""

import checkpoints as make
import pytest
import torch
from checkpoints import E

from fp4ep.optimized.checkpoint import Checkpoint, open_checkpoint
from fp4ep.optimized.scale_modes import ScaleMode, epilogue_for

LAYER = "model.layers.3.mlp.experts"
STATIC_MODES = (ScaleMode.STATIC, ScaleMode.STATIC_MAX, ScaleMode.STATIC_SGLANG)


@pytest.fixture
def checkpoint(tmp_path):
    def checkpoint(tensors: make.Tensors) -> Checkpoint:
        make.write(tmp_path, tensors)
        return open_checkpoint(tmp_path)

    return checkpoint


def with_scalars(tensors: make.Tensors, suffix: str, **values: list[float]) -> make.Tensors:
    """values: for each projection, one number per expert."""
    names = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
    for leg, numbers in values.items():
        for e, number in enumerate(numbers):
            for name in names[leg]:
                tensors[f"{LAYER}.{e}.{name}.{suffix}"] = torch.tensor(number)
    return tensors


def vllms_vectors() -> make.Tensors:
    """Those of the tests of vLLM's first integration, for compressed-tensors."""
    tensors = make.compressed_tensors(e=2)
    tensors = with_scalars(tensors, "weight_global_scale", w13=[2.0, 4.0], w2=[5.0, 10.0])
    return with_scalars(tensors, "input_global_scale", w13=[135.0] * 2, w2=[143.0] * 2)


def float32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_row_21_static_vectors(checkpoint):
    epilogue = epilogue_for(ScaleMode.STATIC, checkpoint(vllms_vectors()).load_layer(3))
    assert epilogue.input_norm_const == 135.0
    assert torch.equal(epilogue.fc1_alpha, float32(1 / 270, 1 / 540))
    assert torch.equal(epilogue.fc2_alpha, float32(1 / 715, 1 / 1430))
    assert torch.equal(epilogue.fc1_norm_const, float32(143, 143))


def test_row_21_static_vectors_the_other_way_round(checkpoint):
    """ModelOpt stores the reciprocals of all four."""
    tensors = with_scalars(make.modelopt(e=2), "weight_scale_2", w13=[1 / 2, 1 / 4], w2=[1 / 5, 1 / 10])
    tensors = with_scalars(tensors, "input_scale", w13=[1 / 135] * 2, w2=[1 / 143] * 2)
    epilogue = epilogue_for(ScaleMode.STATIC, checkpoint(tensors).load_layer(3))
    assert epilogue.input_norm_const == 135.0
    assert torch.equal(epilogue.fc1_alpha, float32(1 / 270, 1 / 540))
    assert torch.equal(epilogue.fc2_alpha, float32(1 / 715, 1 / 1430))
    assert torch.equal(epilogue.fc1_norm_const, float32(143, 143))


def test_row_21_dynamic_passes_the_tensors_on(checkpoint):
    """Copies would go stale when experts move (vllm-project/vllm#34646, 103)."""
    weights = checkpoint(vllms_vectors()).load_layer(3)
    epilogue = epilogue_for(ScaleMode.DYNAMIC, weights)
    assert epilogue.fc1_alpha is weights.w13_weight_scale_2
    assert epilogue.fc2_alpha is weights.w2_weight_scale_2
    assert (epilogue.input_norm_const, epilogue.fc1_norm_const) == (1.0, None)


@pytest.mark.parametrize("mode", STATIC_MODES)
def test_row_21_alpha_times_norm_is_the_weights_scale(checkpoint, mode):
    """What the kernel needs for outputs in the model's units, to the two roundings of a reciprocal and a product."""
    layer = checkpoint(make.modelopt())
    weights = layer.load_layer(3)
    epilogue = epilogue_for(mode, weights, layer.input_scales(3))
    close = {"rtol": 2**-22, "atol": 0.0}
    torch.testing.assert_close(epilogue.fc1_alpha * epilogue.input_norm_const, weights.w13_weight_scale_2, **close)
    torch.testing.assert_close(epilogue.fc2_alpha * epilogue.fc1_norm_const, weights.w2_weight_scale_2, **close)


def test_mxfp4_has_no_alphas(checkpoint):
    weights = checkpoint(make.mxfp4()).load_layer(3)
    assert epilogue_for(ScaleMode.DYNAMIC, weights).is_default
    with pytest.raises(ValueError, match="mode must be DYNAMIC for DeepSeek-V4 MXFP4"):
        epilogue_for(ScaleMode.STATIC, weights)


# --- experts that differ ---------------------------------------------------------------------------------------------


def differing() -> make.Tensors:
    """w13 input scales .1, .2 on rank 0 of 2 and .4, .3 on rank 1; weight_scale_2 1."""
    tensors = with_scalars(make.modelopt(), "weight_scale_2", w13=[1.0] * E, w2=[1.0] * E)
    return with_scalars(tensors, "input_scale", w13=[0.1, 0.2, 0.4, 0.3], w2=[0.5, 1.0, 2.0, 4.0])


def test_row_21_static_needs_one_number(checkpoint):
    layer = checkpoint(differing())
    with pytest.raises(ValueError, match=r"one number for experts 2-3,.*from 0.3 to 0.4"):
        epilogue_for(ScaleMode.STATIC, layer.load_layer(3, range(2, 4)))
    assert epilogue_for(ScaleMode.STATIC, layer.load_layer(3, range(2, 3))).input_norm_const == float(1 / float32(0.4))


def test_the_maximum_is_that_of_the_layer_102(checkpoint):
    """vllm-project/vllm#48355: rank maxima .2 and .4 would make a moved expert wrong by 2."""
    layer = checkpoint(differing())
    for rank in (range(0, 2), range(2, 4)):
        epilogue = epilogue_for(ScaleMode.STATIC_MAX, layer.load_layer(3, rank), layer.input_scales(3))
        assert epilogue.input_norm_const == float(1 / float32(0.4))
        assert torch.equal(epilogue.fc1_alpha, float32(0.4, 0.4))
    with pytest.raises(ValueError, match="all_input_scales must be those of all experts"):
        epilogue_for(ScaleMode.STATIC_MAX, layer.load_layer(3, range(0, 2)))


def test_row_21_sglangs_rule(checkpoint):
    """The norm is the largest of 1 / input_scale, alphas are each expert's own: inconsistent by .2 / .1."""
    layer = checkpoint(differing())
    epilogue = epilogue_for(ScaleMode.STATIC_SGLANG, layer.load_layer(3, range(0, 2)))
    assert epilogue.input_norm_const == float(1 / float32(0.1))
    assert torch.equal(epilogue.fc1_alpha, float32(0.1, 0.2))


@pytest.mark.parametrize("mode", STATIC_MODES)
def test_a_rank_gets_its_own_scales_101(checkpoint, mode):
    """sgl-project/sglang#21602: the first entries of a global vector are silently wrong on every rank but the first."""
    tensors = with_scalars(differing(), "input_scale", w13=[0.1] * E)
    layer = checkpoint(tensors)
    epilogue = epilogue_for(mode, layer.load_layer(3, range(2, 4)), layer.input_scales(3))
    assert torch.equal(epilogue.fc1_norm_const, 1 / float32(2.0, 4.0))
    assert torch.equal(epilogue.fc2_alpha, float32(2.0, 4.0))


@pytest.mark.parametrize("mode", STATIC_MODES)
@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -1.0, 1e-44, None])
@pytest.mark.parametrize("leg", ["gate_proj", "down_proj"])
def test_experts_that_calibration_never_reached_17_18(checkpoint, mode, value, leg):
    """vllm-project/compressed-tensors#595 and vllm-project/vllm#45212: refused by expert; DYNAMIC does without."""
    tensors = make.modelopt()
    name = f"{LAYER}.2.{leg}.input_scale"
    if value is None:
        del tensors[name]
    else:
        tensors[name] = torch.tensor(value)
        tensors[name.replace("gate", "up")] = torch.tensor(value)
    layer = checkpoint(tensors)
    with pytest.raises(ValueError, match=r"_input_scale must be finite and positive;.*experts 2$"):
        epilogue_for(mode, layer.load_layer(3), layer.input_scales(3))
    assert epilogue_for(ScaleMode.DYNAMIC, layer.load_layer(3)).input_norm_const == 1.0


@pytest.mark.parametrize("mode", STATIC_MODES)
def test_no_input_scales(checkpoint, mode):
    layer = checkpoint({n: t for n, t in make.modelopt().items() if not n.endswith("input_scale")})
    with pytest.raises(ValueError, match="input_scale is missing in the checkpoint for all experts"):
        epilogue_for(mode, layer.load_layer(3), layer.input_scales(3))
