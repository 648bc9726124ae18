"""Every planted mistake is found, by its own check, naming experts and public report; sound layers have none."""

from collections.abc import Callable
from pathlib import Path

import checkpoints as make
import pytest
import torch
from checkpoints import SCALE_2, E, H, I

from fp4ep.optimized.checkpoint import open_checkpoint
from fp4ep.optimized.checkpoint_checks import CHECKS, Level
from fp4ep.optimized.checkpoint_facts import examine
from fp4ep.optimized.inspect_checkpoint import Report, inspect_checkpoint

LAYER = "model.layers.3.mlp.experts"
V4 = "layers.3.ffn.experts"


def inspect(folder: Path, *shards: make.Tensors) -> Report:
    return inspect_checkpoint(make.write(folder, *shards))


# --- planted mistakes ------------------------------------------------------------------------------------------------

Plant = Callable[[make.Tensors], None]


def put(expert: int, projection: str, suffix: str, value: float | torch.Tensor | None, prefix: str = LAYER) -> Plant:
    """Set a tensor, to a scalar of its shape or another tensor; None removes it."""

    def plant(tensors: make.Tensors) -> None:
        name = f"{prefix}.{expert}.{projection}.{suffix}"
        if value is None:
            del tensors[name]
        elif isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            tensors[name] = torch.full_like(tensors[name], value)

    return plant


def byte(expert: int, projection: str, suffix: str, value: int, count: int = 1, prefix: str = LAYER) -> Plant:
    """Overwrite the first bytes of a tensor's last row."""

    def plant(tensors: make.Tensors) -> None:
        tensors[f"{prefix}.{expert}.{projection}.{suffix}"].view(torch.uint8)[-1, :count] = value

    return plant


def both(*plants: Plant) -> Plant:
    def plant(tensors: make.Tensors) -> None:
        for each in plants:
            each(tensors)

    return plant


def everywhere(suffix: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Plant:
    def plant(tensors: make.Tensors) -> None:
        for name in [n for n in tensors if n.endswith(suffix)]:
            changed = change(tensors.pop(name))
            if changed is not None:
                tensors[name] = changed

    return plant


def mixed_scales() -> Plant:
    """Block scales of a quantizer without a global scale."""
    tiny = torch.full((I, H // 16), 0.0039).to(torch.float8_e4m3fn)
    return both(*(put(2, p, "weight_scale", tiny.clone()) for p in ("gate_proj", "up_proj")))


E_, W_, N_ = Level.ERROR, Level.WARNING, Level.NOTE
NAN = float("nan")
INF = float("inf")

PLANTED = [
    # (bug case, checkpoint, plant, check, level, experts, in the text, a report)
    ("17", "m", put(2, "down_proj", "input_scale", INF), "input scale not finite and positive", W_, [2], "inf", "#595"),
    (
        "17",
        "c",
        put(2, "up_proj", "input_global_scale", INF),
        "input scale not finite and positive",
        W_,
        [2],
        "inf",
        "#595",
    ),
    (
        "18",
        "m",
        put(2, "down_proj", "input_scale", 0.0),
        "input scale not finite and positive",
        W_,
        [2],
        "is 0",
        "#45212",
    ),
    (
        "18",
        "m",
        put(2, "down_proj", "input_scale", NAN),
        "input scale not finite and positive",
        W_,
        [2],
        "nan",
        "#45212",
    ),
    ("18", "m", put(2, "down_proj", "input_scale", None), "input scale missing", W_, [2], "down input scale", "#45212"),
    ("18", "m", put(2, "down_proj", "input_scale", 1e-38), "input scale out of line", W_, [2], "1e-38", "#45212"),
    (
        "18",
        "m",
        everywhere("input_scale", lambda t: None),
        "input scale missing",
        N_,
        [],
        "vLLM, which drops",
        "#45212",
    ),
    (
        "21",
        "m",
        everywhere("weight_scale_2", lambda t: 1 / t),
        "direction of global scales",
        E_,
        [],
        "reciprocals",
        "#35733",
    ),
    (
        "21",
        "c",
        everywhere("weight_global_scale", lambda t: 1 / t),
        "direction of global scales",
        E_,
        [],
        "reciprocals",
        "#35733",
    ),
    (
        "22",
        "m",
        everywhere("up_proj.weight_scale_2", lambda t: None),
        "missing tensors",
        E_,
        [0, 1, 2, 3],
        "up global scale",
        "#48371",
    ),
    (
        "23",
        "m",
        put(2, "up_proj", "weight_scale_2", 30 * SCALE_2),
        "gate and up differ",
        W_,
        [2],
        "by up to 10",
        "#54974",
    ),
    (
        "23",
        "c",
        everywhere("0.up_proj.weight_global_scale", lambda t: t / 1.1),
        "gate and up differ",
        W_,
        [0],
        "does not fold",
        "#54974",
    ),
    ("26", "m", mixed_scales(), "subnormal block scale", W_, [2], "subnormal E4M3", "#34577"),
    ("26 few", "m", byte(2, "up_proj", "weight_scale", 0x01), "subnormal block scale", N_, [], "1 of", "#37464"),
    ("31", "m", byte(2, "up_proj", "weight", 0x80, 8), "zero blocks", N_, [], "1 of", "#4598"),
    ("31", "m", byte(2, "up_proj", "weight_scale", 0x00), "scale zero over nonzero codes", W_, [2], "lost", "#4598"),
    ("31 -0", "m", byte(2, "up_proj", "weight_scale", 0x80), "scale zero over nonzero codes", W_, [2], "lost", "#4598"),
    ("zero expert", "m", put(2, "up_proj", "weight", 0), "zero blocks", W_, [2], "up is zero altogether", "#4598"),
    ("signed", "m", byte(2, "up_proj", "weight_scale", 0xB8), "negative block scale", E_, [2], "sign bit", "#34577"),
    ("-0", "m", byte(2, "up_proj", "weight_scale", 0x80), "negative block scale", E_, [2], "sign bit", "#34577"),
    ("44", "m", byte(2, "up_proj", "weight_scale", 0x7F), "NaN block scale", E_, [2], "1 of", "#4725"),
    ("44", "d", byte(2, "w3", "scale", 0xFF, prefix=V4), "NaN block scale", E_, [2], "1 of", "#4725"),
    ("37", "d", byte(2, "w3", "scale", 0x00, prefix=V4), "UE8M0 byte 0", W_, [2], "2^-127", "#222"),
    (
        "MXFP4 to NVFP4",
        "d",
        everywhere("scale", lambda t: torch.full_like(t, 2.0**-9)),
        "UE8M0 below NVFP4's range",
        W_,
        [],
        "100.00%",
        "",
    ),
    (
        "41",
        "d",
        put(2, "w3", "scale", torch.full((I, H // 32), 1.5), V4),
        "float32 UE8M0 scale",
        E_,
        [2],
        "no powers of two",
        "#39193",
    ),
    ("41 exact", "d", everywhere("scale", lambda t: t.float()), "float32 UE8M0 scale", N_, [], "all exactly", "#39193"),
    (
        "47",
        "m",
        put(2, "up_proj", "weight_scale", make.e4m3(I + 128, H // 16)),
        "shapes and dtypes",
        E_,
        [2],
        "[256, 16], not [128, 16]",
        "#35497",
    ),
    (
        "48",
        "m",
        put(2, "up_proj", "weight_scale", make.e4m3(I, H // 32)),
        "shapes and dtypes",
        E_,
        [2],
        "blocks of 32, not 16",
        "#2898",
    ),
    (
        "46",
        "m",
        put(2, "up_proj", "weight_scale", make.e4m3(I * H // 16)),
        "shapes and dtypes",
        E_,
        [2],
        "as swizzled scales are",
        "#35497",
    ),
    (
        "dtype",
        "m",
        put(2, "up_proj", "weight_scale", torch.ones(I, H // 16)),
        "shapes and dtypes",
        E_,
        [2],
        "F32, not F8_E4M3 or U8",
        "#35497",
    ),
    (
        "vector",
        "m",
        put(2, "up_proj", "weight_scale_2", torch.ones(2)),
        "shapes and dtypes",
        E_,
        [0, 1, 2, 3],
        "must be one number",
        "#35497",
    ),
    ("weight", "m", put(2, "up_proj", "weight", None), "missing tensors", E_, [2], "up weight is missing", "#48372"),
    ("102", "m", put(2, "up_proj", "input_scale", 0.04), "input scales differ", N_, [], "from 0.01 to 0.04", "#48355"),
    (
        "scale_2",
        "m",
        put(2, "up_proj", "weight_scale_2", 0.0),
        "global scale not finite and positive",
        E_,
        [2],
        "up global scale is 0",
        "",
    ),
    (
        "scale_2",
        "c",
        put(2, "up_proj", "weight_global_scale", INF),
        "global scale not finite and positive",
        E_,
        [2],
        "is inf",
        "",
    ),
    ("scale_2", "m", put(2, "down_proj", "weight_scale_2", 1e-30), "global scale out of line", W_, [2], "1e-30", ""),
]
#: What else a planted mistake of a check may set off, rightly.
ALSO = {
    "negative block scale": {"scale zero over nonzero codes"},  # the scale -0
    "UE8M0 byte 0": {"UE8M0 below NVFP4's range"},
    "direction of global scales": {"UE8M0 below NVFP4's range"},
    "scale zero over nonzero codes": {"negative block scale"},  # the scale -0
    "global scale out of line": {"gate and up differ"},
    "gate and up differ": {"global scale out of line"},
}
BASES = {"m": make.modelopt, "c": make.compressed_tensors, "d": make.mxfp4}


@pytest.mark.parametrize(
    ("base", "plant", "check", "level", "experts", "text", "report"),
    [row[1:] for row in PLANTED],
    ids=[f"{row[0]}, {row[3]}" for row in PLANTED],
)
def test_planted(tmp_path, base, plant, check, level, experts, text, report):
    tensors = BASES[base]()
    plant(tensors)
    findings = inspect(tmp_path, tensors).findings
    found = [f for f in findings if f.check == check and text in f.text]
    assert len(found) == 1, findings
    assert {f.check for f in findings} - {check} <= ALSO.get(check, set())
    (finding,) = found
    assert finding.level is level
    assert list(finding.experts) == experts
    assert any(r.endswith(report) for r in finding.reports) or not report
    assert finding.layer.endswith("ffn.experts" if base == "d" else "mlp.experts")


def test_every_check_is_planted():
    planted = {row[3] for row in PLANTED} | {"sizes", "one number for all experts"}
    assert planted == {check.name for check in CHECKS}


def test_interleaved_rows_are_parted_56(tmp_path):
    """Rows 0, 2, ... of gpt-oss are the gate's."""
    tensors = make.gpt_oss()
    tensors[f"{LAYER}.gate_up_proj_scales"][:, 0::2] = 0x70
    tensors[f"{LAYER}.gate_up_proj_scales"][:, 1::2] = 0x71
    layer = open_checkpoint(make.write(tmp_path, tensors)).layers[0]
    counts = examine(layer, layer.convention).scale_counts
    assert counts[:, 0, 0x70].tolist() == counts[:, 1, 0x71].tolist() == [I * H // 32] * E


def test_no_bit_of_the_scales_is_counted_twice_or_left_out(tmp_path):
    """The histogram is that of the bytes on disk."""
    tensors = make.modelopt()
    layer = open_checkpoint(make.write(tmp_path, tensors)).layers[0]
    facts = examine(layer, layer.convention)
    for e in range(E):
        for p, projection in enumerate(("gate_proj", "up_proj", "down_proj")):
            scales = tensors[f"{LAYER}.{e}.{projection}.weight_scale"].view(torch.uint8)
            assert facts.scale_counts[e, p].tolist() == [int((scales == b).sum()) for b in range(256)]
    assert facts.blocks == E * 3 * H * I // 16


@pytest.mark.parametrize("size", [2880, 1600])
def test_sizes_47_48_49(tmp_path, size):
    report = inspect(tmp_path, make.modelopt(e=1, h=size, i=64))
    findings = {f.text: f for f in report.findings}
    assert any(f"hidden size {size} is not a multiple of 128" in text for text in findings)
    assert any("intermediate size 64 is not a multiple of 128" in text for text in findings)
    assert {f.level for f in findings.values()} == {Level.WARNING}
    assert "flashinfer-ai/flashinfer#2898" in next(iter(findings.values())).reports


def test_one_number_for_all_experts_126(tmp_path):
    tensors = make.fused_modelopt()
    tensors[f"{LAYER}.down_proj_weight_scale_2"] = torch.tensor([SCALE_2])
    (finding,) = inspect(tmp_path, tensors).findings
    assert finding.text == "down global scale is one number for all 4 experts"
    assert finding.reports[0] == "vllm-project/vllm#57016"


def test_fused_experts_find_the_same(tmp_path):
    tensors = make.fused_modelopt()
    tensors[f"{LAYER}.gate_up_proj_weight_scale_2"][2, 1] *= 3
    tensors[f"{LAYER}.gate_up_proj_weight_scale"].view(torch.uint8)[1, I:, 0] = 0x7F
    tensors[f"{LAYER}.down_proj"][3] = 0
    found = {f.check: (f.text, f.experts) for f in inspect(tmp_path, tensors).findings}
    assert found["gate and up differ"][1] == (2,)
    assert found["NaN block scale"] == (f"NaN block scales: {I} of 24,576 blocks (0.52%)", (1,))
    tensors = make.fused_modelopt()
    del tensors[f"{LAYER}.down_proj_weight_scale_2"]
    (finding,) = inspect(tmp_path, tensors).findings
    assert finding.text == "down global scale is missing"


def test_gate_and_up_that_fold_are_said_to(tmp_path):
    tensors = make.modelopt()
    for e in range(E):
        tensors[f"{LAYER}.{e}.up_proj.weight_scale_2"] *= 0.5
    (finding,) = inspect(tmp_path, tensors).findings
    assert finding.text.startswith("global scales of gate and up differ in 4 of 4 experts, by up to 2")
    assert finding.text.endswith("folds into up's block scales exactly")
    open_checkpoint(tmp_path).load_layer(3)  # and do
