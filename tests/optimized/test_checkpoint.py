"""Loading FP4 experts from safetensors: conventions, one canonical form, laziness, and clear refusals."""

import checkpoints as make
import pytest
import torch
from checkpoints import SCALE_2, E, H, I

from fp4ep.optimized.checkpoint import LayerWeights, open_checkpoint
from fp4ep.optimized.checkpoint_conventions import CONVENTIONS, parse_name
from fp4ep.optimized.checkpoint_fold import fold_codes
from fp4ep.reference.formats import E2M1, E4M3, decode, unpack_e2m1
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.schemes import find_scheme
from fp4ep.reference.types import MoEInputs

LAYER = "model.layers.3.mlp.experts"


@pytest.fixture
def load(tmp_path):
    """Write tensors over two shards and load layer 3."""

    def load(tensors: make.Tensors, *arguments, **options) -> LayerWeights:
        make.write(tmp_path, *make.halves(tensors))
        return open_checkpoint(tmp_path).load_layer(3, *arguments, **options)

    return load


def expected_w13(tensors: make.Tensors, suffix: str, names=make.HF_NAMES, prefix: str = LAYER) -> torch.Tensor:
    pairs = [[tensors[f"{prefix}.{e}.{names[p]}.{suffix}"].view(torch.uint8) for p in ("gate", "up")] for e in range(E)]
    return torch.stack([torch.cat(pair) for pair in pairs])


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


# --- conventions ------------------------------------------------------------------------------------------------------


def test_row_11_modelopt(load):
    tensors = make.modelopt()
    weights = load(tensors)
    assert weights.convention.name == "ModelOpt NVFP4"
    assert (weights.layer, weights.experts) == (LAYER, range(E))
    assert same(weights.w13, expected_w13(tensors, "weight"))
    assert same(weights.w13_scale, expected_w13(tensors, "weight_scale"))
    assert weights.w13_scale.dtype is torch.float8_e4m3fn
    assert same(weights.w2[2], tensors[f"{LAYER}.2.down_proj.weight"])
    assert same(weights.w2_scale[2], tensors[f"{LAYER}.2.down_proj.weight_scale"])
    assert weights.w2.shape == (E, H, I // 2)
    assert torch.equal(weights.w13_weight_scale_2, torch.tensor([SCALE_2 * (1 + e) for e in range(E)]))
    assert torch.equal(weights.w2_weight_scale_2, torch.tensor([2 * SCALE_2 * (1 + e) for e in range(E)]))
    assert torch.equal(weights.w13_input_scale, torch.full((E,), 0.01))
    assert torch.equal(weights.w2_input_scale, torch.tensor([0.02 * (1 + e) for e in range(E)]))


def test_w1_w3_w2_are_gate_up_down(load):
    weights = load(make.modelopt(names=make.DEEPSEEK_NAMES))
    assert same(weights.w13, load(make.modelopt()).w13)


def test_row_11_compressed_tensors_scales_are_inverted(load):
    """As vLLM: 1 / x in float32. The weights are those of the ModelOpt checkpoint."""
    tensors = make.compressed_tensors()
    weights, other = load(tensors), load(make.modelopt())
    assert weights.convention.name == "compressed-tensors NVFP4"
    assert same(weights.w13, other.w13)
    stored = torch.cat([tensors[f"{LAYER}.{e}.gate_proj.weight_global_scale"] for e in range(E)])
    assert torch.equal(weights.w13_weight_scale_2, 1 / stored)
    torch.testing.assert_close(weights.w2_weight_scale_2, other.w2_weight_scale_2, rtol=2**-22, atol=0)  # 2 divisions
    stored = torch.cat([tensors[f"{LAYER}.{e}.down_proj.input_global_scale"] for e in range(E)])
    assert torch.equal(weights.w2_input_norm, stored)
    assert torch.equal(weights.w2_input_scale, 1 / stored)


def test_fused_experts_equal_single_ones(load):
    weights, other = load(make.fused_modelopt()), load(make.modelopt())
    assert weights.convention.fused
    for name, tensor in vars(other).items():
        if isinstance(tensor, torch.Tensor):
            assert same(getattr(weights, name), tensor), name


def test_deepseek_v4(load):
    tensors = make.mxfp4()
    weights = load(tensors)
    assert weights.convention.name == "DeepSeek-V4 MXFP4"
    assert same(weights.w13, expected_w13(tensors, "weight", make.DEEPSEEK_NAMES, "layers.3.ffn.experts"))
    assert same(weights.w13_scale, expected_w13(tensors, "scale", make.DEEPSEEK_NAMES, "layers.3.ffn.experts"))
    assert weights.w13.dtype is weights.w13_scale.dtype is torch.uint8
    assert weights.w2_scale.shape == (E, H, I // 32)
    assert weights.w13_weight_scale_2 is weights.w13_input_scale is None


def test_compressed_tensors_mxfp4(load):
    weights = load(make.compressed_tensors_mxfp4())
    assert weights.convention.name == "compressed-tensors MXFP4"
    assert same(weights.w2_scale, load(make.mxfp4()).w2_scale)


def test_float32_ue8m0_scales_become_codes(load):
    tensors = make.mxfp4()
    exact = {n: t.float() if n.endswith("scale") else t for n, t in tensors.items()}
    assert same(load(exact).w13_scale, load(tensors).w13_scale)


@pytest.mark.parametrize("value", [1.5, 0.0, -1.0, float("inf"), float("nan"), 2.0**-130])
def test_float32_scales_with_a_mantissa_are_refused_41(load, value):
    tensors = make.mxfp4()
    name = "layers.3.ffn.experts.2.w3.scale"
    tensors[name] = tensors[name].float()
    tensors[name][1, 2] = value
    with pytest.raises(ValueError, match=f"{name}.*1 scales are not positive powers of two"):
        load(tensors)


def test_gpt_oss_is_refused_with_reasons(load):
    with pytest.raises(ValueError, match=r"gpt-oss MXFP4 is not supported: expert bias, swigluoai.*interleaved"):
        load(make.gpt_oss())


def test_no_convention(load):
    tensors = {n: t.bfloat16() if n.endswith("weight") else t for n, t in make.modelopt().items()}
    with pytest.raises(ValueError, match=r"stored in no known FP4 convention.*BF16"):
        load(tensors)


def test_mxfp4_by_modelopt_names_is_told_by_the_scales_dtype(load):
    tensors = make.mxfp4("model.layers.3.mlp.experts", make.HF_NAMES, ("weight", "weight_scale"))
    assert load({n: t.view(torch.uint8) for n, t in tensors.items()}).convention.name == "MXFP4"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp.experts.11.up_proj.weight", ("model.layers.3.mlp.experts", 11, "up", "weight")),
        ("layers.0.ffn.experts.7.w2.scale", ("layers.0.ffn.experts", 7, "down", "scale")),
        ("mtp.0.ffn.experts.7.w1.weight", ("mtp.0.ffn.experts", 7, "gate", "weight")),
        ("layers.1.moe.experts.0.w3.weight_packed", ("layers.1.moe.experts", 0, "up", "weight_packed")),
        ("a.experts.gate_up_proj_weight_scale", ("a.experts", None, "gate_up", "_weight_scale")),
        ("a.experts.down_proj", ("a.experts", None, "down", "")),
        ("model.layers.3.mlp.shared_experts.w1.weight", None),
        ("model.layers.3.mlp.shared_experts.0.w1.weight", None),
        ("model.layers.3.mlp.gate.weight", None),
    ],
)  # fmt: skip
def test_parse_name(name, expected):
    parsed = parse_name(name)
    assert expected == (parsed and (parsed[0], parsed[1].expert, parsed[1].projection, parsed[1].suffix))


def test_conventions_are_told_apart():
    """No two fit the same complete layer in their order of the table by accident: every one is found by its own."""
    for convention in CONVENTIONS:
        dtype = {"codes": sorted(convention.code_dtypes)[0], "scale": sorted(convention.scale_dtypes)[0]}
        kinds = [
            (suffix, {"weight": dtype["codes"], "block scale": dtype["scale"]}.get(part.value, "F32"))
            for part, suffix in convention.suffixes.items()
        ]
        assert next(c for c in CONVENTIONS if c.fused is convention.fused and c.fits(kinds)) is convention


# --- gate and up ------------------------------------------------------------------------------------------------------


def with_pairs(pairs: list[tuple[float, float]], scale: float = 1.0, kind: str = "modelopt") -> make.Tensors:
    tensors = {"modelopt": make.modelopt, "compressed_tensors": make.compressed_tensors}[kind](e=len(pairs))
    suffix = {"modelopt": "weight_scale_2", "compressed_tensors": "weight_global_scale"}[kind]
    for e, pair in enumerate(pairs):
        for projection, value in zip(("gate_proj", "up_proj"), pair, strict=True):
            tensors[f"{LAYER}.{e}.{projection}.{suffix}"] = torch.tensor(value)
            block = tensors[f"{LAYER}.{e}.{projection}.weight_scale"]
            tensors[f"{LAYER}.{e}.{projection}.weight_scale"] = torch.full(block.shape, scale).to(block.dtype)
    return tensors


def test_row_11_folding_23(load):
    """vllm-project/vllm#54974; vLLM's own vectors for it."""
    weights = load(with_pairs([(2, 4), (4, 4)]))
    gate, up = weights.w13_scale.float().chunk(2, dim=1)
    assert bool((gate == 1).all())
    assert bool((up[0] == 2).all())
    assert bool((up[1] == 1).all())
    assert weights.w13_weight_scale_2.tolist() == [2, 4]


def test_folding_inverse_scales_23(load):
    """Encode direction: up/gate of the decode scales is 3, exactly, though 1/6 and 1/2 have no float32."""
    weights = load(with_pairs([(6, 2), (2, 2)], kind="compressed_tensors"))
    assert bool((weights.w13_scale.float()[0, I:] == 3).all())
    assert weights.w13_weight_scale_2.tolist() == [torch.tensor(1 / 6).item(), 0.5]


@pytest.mark.parametrize(("pair", "scale"), [((1, 1.1), 1.0), ((1, 2), 256.0), ((2, 1), 2.0**-9)], ids=str)
def test_row_11_inexact_folding_raises_23(load, pair, scale):
    """No such product, beyond 448, below the smallest subnormal."""
    with pytest.raises(ValueError, match=r"does not fold into up's block scales exactly.*experts 1$"):
        load(with_pairs([(1, 1), pair], scale))


def test_row_11_vllm_mode_warns_and_takes_the_gates_23(load):
    tensors = with_pairs([(1, 1), (1, 1.5), (3, 1)])
    with pytest.warns(UserWarning, match=r"2 of 3 experts \(largest ratio 3\).*experts 1-2$"):
        weights = load(tensors, gate_up="vllm")
    assert weights.w13_weight_scale_2.tolist() == [1, 1, 3]
    assert same(weights.w13_scale, load(with_pairs([(1, 1)] * 3)).w13_scale)


def test_fold_codes_23():
    """Codes of twice and half the value: signed zeros stay, NaN, 448 and the odd subnormals have none."""
    double, half = fold_codes(2, 1).tolist(), fold_codes(0.1, 0.2).tolist()
    assert [double[code] for code in (0x00, 0x80, 0x38, 0xB8, 0x7E, 0x7F, 0xFF)] == [0, 0x80, 0x40, 0xC0, -1, -1, -1]
    assert [half[code] for code in (0x00, 0x80, 0x38, 0xB8, 0x08, 0x01, 0x03)] == [0, 0x80, 0x30, 0xB0, 0x04, -1, -1]


def test_folding_keeps_the_weights_values_23(load):
    """Metamorphic: what is dequantized does not change by a bit."""
    tensors = make.modelopt()
    for e in range(E):
        tensors[f"{LAYER}.{e}.up_proj.weight_scale_2"] = tensors[f"{LAYER}.{e}.gate_proj.weight_scale_2"] / 2
    weights = load(tensors)
    for e in range(E):
        at = f"{LAYER}.{e}.up_proj"
        scale, scale_2 = tensors[f"{at}.weight_scale"], tensors[f"{at}.weight_scale_2"]
        values = decode(unpack_e2m1(tensors[f"{at}.weight"]), E2M1).unflatten(1, (-1, 16))
        before = values * scale.float()[..., None] * scale_2
        values = decode(unpack_e2m1(weights.w13[e, I:]), E2M1).unflatten(1, (-1, 16))
        after = values * decode(weights.w13_scale[e, I:], E4M3)[..., None] * weights.w13_weight_scale_2[e]
        assert torch.equal(before, after)


def test_unknown_mode(load):
    with pytest.raises(ValueError, match="average"):
        load(make.modelopt(), gate_up="average")


# --- onwards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "scheme"),
    [
        (make.modelopt, "sm90_fp8_nvfp4_bf16_pull_cutedsl"),
        (make.compressed_tensors, "sm90_fp8_nvfp4_bf16_pull_cutedsl"),
        (make.mxfp4, "sm90_fp8_mxfp4_bf16_pull_cutedsl"),
    ],
    ids=["ModelOpt", "compressed-tensors", "DeepSeek-V4"],
)
def test_the_reference_takes_them(load, tensors, scheme):
    """And gets the checkpoint's values: one column of the gate, which the NVFP4 kernel rounds to E4M3 per value."""
    stored = tensors()
    weights = load(stored).moe_weights()
    x = torch.zeros(1, H, dtype=torch.bfloat16)
    x[0, 5] = 1
    inputs = MoEInputs(x, torch.tensor([[2]]), torch.ones(1, 1))
    _, trace = moe_forward(find_scheme(scheme), weights, [inputs])
    gate = trace["fc1"].tensors["gate"][0]
    names = make.DEEPSEEK_NAMES if tensors is make.mxfp4 else make.HF_NAMES
    prefix = "layers.3.ffn.experts" if tensors is make.mxfp4 else LAYER
    of = {n.rpartition(".")[2]: t for n, t in stored.items() if n.startswith(f"{prefix}.2.{names['gate']}.")}
    code = unpack_e2m1(next(t for s, t in of.items() if s in ("weight", "weight_packed")).view(torch.uint8))[:, 5]
    block = next(t for s, t in of.items() if s in ("weight_scale", "scale"))
    factor = of.get("weight_scale_2", 1 / of["weight_global_scale"] if "weight_global_scale" in of else 1)
    column = decode(code, E2M1) * block[:, 5 * block.shape[1] // H].float() * factor
    # Half a step of E4M3's three bits, or three float32 roundings.
    torch.testing.assert_close(gate, column, rtol=2**-20 if tensors is make.mxfp4 else 2**-4, atol=0)


def test_parameters_have_vllms_names(load):
    weights = load(make.modelopt())
    layer = torch.nn.Module()
    weights.fill(layer)
    names = {f"{leg}_{s}" for leg in ("w13", "w2") for s in ("weight", "weight_scale", "weight_scale_2", "input_scale")}
    parameters = dict(layer.named_parameters())
    assert set(parameters) == names
    assert not any(p.requires_grad for p in parameters.values())
    assert parameters["w13_weight_scale_2"].shape == (E,)
    assert parameters["w2_weight_scale"].data_ptr() == weights.w2_scale.data_ptr()
    layer = torch.nn.Module()
    load(make.mxfp4()).fill(layer)
    assert len(dict(layer.named_parameters())) == 4


def test_config(tmp_path):
    make.write(tmp_path, make.modelopt())
    (tmp_path / "config.json").write_text('{"model_type": "a"}')
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == {"model_type": "a", "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not JSON"):
        _ = open_checkpoint(tmp_path).config
