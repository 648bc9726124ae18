"""Saved runs: every bit comes back, a failed write leaves the older file, and a wrong file is refused by name."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fp4ep.parity import recording
from fp4ep.parity.problem import Layer, Problem
from fp4ep.parity.recording import Recording, RecordingWriter, sha256
from fp4ep.parity.run import Claim, Run, RunError, load_run, outputs_as_trace, save_run
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.quantize import quantize_fp8_per_expert
from fp4ep.reference.schemes import SCHEMES, find_scheme, options_of
from fp4ep.reference.types import MoEWeights

NVFP4 = "sm90_fp8_nvfp4_bf16_pull_cutedsl"
FP8 = "sm90_fp8_fp8_bf16_pull_cutedsl"
SOURCE = {"fp4ep": "0.1.0", "hardware": "a test"}
PROBLEM = Problem(NVFP4, tokens=(3, 0), num_experts=2, routing="masked", padding=1)


def run_of(problem: Problem) -> Run:
    layer = problem.build()
    _, trace = moe_forward(layer.scheme, layer.weights, layer.inputs)
    return Run("reference", Claim.BITS, layer, trace, problem, SOURCE)


@pytest.fixture(scope="module")
def run() -> Run:
    """Two ranks, one of them with padding only; masked slots."""
    return run_of(PROBLEM)


@pytest.fixture
def path(tmp_path: Path, run: Run) -> Path:
    path = tmp_path / "made.safetensors"
    save_run(run, path)
    return path


def contents(run: Run) -> dict[str, Any]:
    """Everything a run holds, tensors as dtype, shape and checksum."""
    owners = {"weights": vars(run.layer.weights)} | {f"inputs {r}": vars(x) for r, x in enumerate(run.layer.inputs)}
    owners |= {f"stage {n}": stage.tensors for n, stage in enumerate(run.trace)}
    tensors = {f"{owner} {name}": t for owner, tensors in owners.items() for name, t in tensors.items()}
    return {
        "tensors": {key: t if t is None else (t.dtype, t.shape, sha256(t)) for key, t in tensors.items()},
        "stages": [(stage.name, stage.rank, stage.exactness) for stage in run.trace],
        "scheme": run.scheme,
        "rest": (run.side, run.claim, run.problem, dict(run.source)),
    }


def reloaded(run: Run, folder: Path) -> Run:
    save_run(run, folder / "run.safetensors")
    return load_run(folder / "run.safetensors")


# --- round trips -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", {(s.weights, s.stage): s for s in reversed(SCHEMES)}.values(), ids=str)
def test_round_trip(tmp_path, scheme):
    """With the problem, and with the layer's tensors in its place."""
    problem = Problem(scheme.name, options_of(scheme), (2, 1), 2, values="outliers", routing="masked", padding=1)
    for made in (run_of(problem), replace(run_of(problem), problem=None)):
        assert contents(reloaded(made, tmp_path)) == contents(made)


def test_a_problem_takes_the_place_of_its_tensors(tmp_path, run):
    """Weights and inputs are built again; without a problem they are in the file."""
    names = []
    for made in (run, replace(run, problem=None)):
        save_run(made, tmp_path / "run")
        with safe_open(tmp_path / "run", "pt") as file:
            names.append({name for name in file.keys() if not name.startswith("stages/")})
    stored = {"hidden_states", "topk_ids", "topk_weights"}
    legs = {f"weights/{leg}{suffix}" for leg in ("w13", "w2") for suffix in ("", "_scale", "_global_scale")}
    assert names == [set(), legs | {f"inputs/{rank}/{name}" for rank in (0, 1) for name in stored}]


@pytest.mark.parametrize(
    "scheme", [*SCHEMES, find_scheme(FP8, fc2_activation_dequant_scale=0.1, gate_up_clamp=7)], ids=str
)
def test_scheme_comes_back(tmp_path, run, scheme):
    """By its name and options, where no problem says it."""
    layer = replace(run.layer, scheme=scheme)
    assert reloaded(replace(run, layer=layer, problem=None), tmp_path).scheme == scheme


def test_quantized_tokens_and_weights_come_back(tmp_path):
    """FP8 codes with scales per token, FP8 weights with a scale per expert: torch's float8 dtypes and float32."""
    problem = Problem(FP8, tokens=(2,), num_experts=2)
    layer = problem.build()
    scheme, x = layer.scheme, layer.inputs[0]
    parts: dict[str, torch.Tensor] = {}
    for leg in ("w13", "w2"):
        made = [quantize_fp8_per_expert(w, scheme.stage.element) for w in getattr(layer.weights, leg)]
        parts[leg] = torch.stack([q.codes for q in made]).view(torch.float8_e4m3fn)
        parts[f"{leg}_scale"] = torch.cat([q.scales for q in made]).flatten()
    x = replace(x, hidden_states=x.hidden_states.to(torch.float8_e4m3fn), scales=torch.rand(2, 1))
    layer = Layer(scheme, MoEWeights(**parts), (x,))
    _, trace = moe_forward(scheme, layer.weights, layer.inputs)
    made = Run("reference", Claim.BITS, layer, trace)
    assert contents(reloaded(made, tmp_path)) == contents(made)


def test_views_and_nan_payloads_come_back(tmp_path, run):
    """A transposed output with random bits; it is saved as a copy and stays as it is."""
    bits = torch.randint(-(1 << 15), 1 << 15, (256, 4), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    outputs = [bits.view(torch.bfloat16).T, bits.view(torch.bfloat16).T[:1]]
    black_box = replace(run, trace=outputs_as_trace(outputs))
    for saved, output in zip(reloaded(black_box, tmp_path).outputs(), outputs, strict=True):
        assert saved.is_contiguous()
        assert torch.equal(saved.view(torch.int16), output.contiguous().view(torch.int16))
    assert outputs[0].stride() == (1, 4)


def test_black_box(tmp_path, run):
    """Outputs only, under the caller's own word for the side."""
    box = Run("my kernel", Claim.FLOAT32, run.layer, outputs_as_trace(run.outputs()), PROBLEM, {"torch": "4.5.6"})
    found = reloaded(box, tmp_path)
    assert contents(found) == contents(box)
    assert (found.side, found.claim) == ("my kernel", Claim.FLOAT32)
    assert found.stages("fc1") == {}
    assert [stage.name for stage in found.trace] == ["combine", "combine"]
    for output, expected in zip(found.outputs(), run.outputs(), strict=True):
        assert torch.equal(output, expected)


def test_ranks_beyond_nine(tmp_path):
    """inputs/1 is not the beginning of inputs/10."""
    problem = Problem("sm90_bf16_bf16_bf16_pull_cutedsl", tokens=(1, 2) * 6, num_experts=12, intermediate=64)
    made = replace(run_of(problem), problem=None)
    assert contents(reloaded(made, tmp_path)) == contents(made)


def test_stages_and_outputs(run):
    assert list(run.stages("fc1")) == [0, 1]
    assert run.stages("fc1")[1] is run.trace["fc1", 1].tensors
    assert run.stages("no such stage") == {}
    assert [list(output.shape) for output in run.outputs()] == [[4, 256], [1, 256]]
    assert run.outputs()[0] is run.trace["combine", 0].tensors["values"]
    assert run.scheme is run.layer.scheme


# --- writing -----------------------------------------------------------------------------------------------------


def half_written(tensors: Any, path: Path, metadata: Any) -> None:
    Path(path).write_bytes(b"the first half")
    raise KeyboardInterrupt


def interrupted(*arguments: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("step", "fails"), [("save_file", half_written), ("os.replace", interrupted)], ids=["writing", "renaming"]
)
def test_a_failed_write_leaves_the_older_file_alone(monkeypatch, run, path, step, fails):
    before = path.read_bytes()
    other = replace(run, side="another")
    with monkeypatch.context() as patched:
        patched.setattr(f"fp4ep.parity.recording.{step}", fails)
        with pytest.raises(KeyboardInterrupt):
            save_run(other, path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    save_run(other, path)
    assert load_run(path).side == "another"


def test_a_failed_first_write_leaves_nothing(monkeypatch, tmp_path, run):
    monkeypatch.setattr("fp4ep.parity.recording.save_file", half_written)
    with pytest.raises(KeyboardInterrupt):
        save_run(run, tmp_path / "run.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_no_reader_sees_half_a_file(monkeypatch, run, path):
    """While the new file is written, the path holds the whole old one."""
    seen = []

    def save(*arguments: Any, **options: Any) -> None:
        seen.append(load_run(path).side)
        save_file(*arguments, **options)
        seen.append(load_run(path).side)

    monkeypatch.setattr(recording, "save_file", save)
    save_run(replace(run, side="another"), path)
    assert [*seen, load_run(path).side] == ["reference", "reference", "another"]


@pytest.mark.parametrize("name", ["run", "run.v2.safetensors", "run.partial"])
def test_any_name_will_do(tmp_path, run, name):
    save_run(run, str(tmp_path / name))
    assert [found.name for found in tmp_path.iterdir()] == [name]
    assert contents(load_run(str(tmp_path / name))) == contents(run)


def test_neighbours_do_not_meet(monkeypatch, tmp_path, run):
    """a.right is written while a.left is: neither takes the other's unfinished file."""

    def save_another_too(tensors: Any, path: Path, metadata: Any) -> None:
        save_file(tensors, path, metadata=metadata)
        monkeypatch.setattr(recording, "save_file", save_file)
        save_run(replace(run, side="right"), tmp_path / "a.right")

    monkeypatch.setattr(recording, "save_file", save_another_too)
    save_run(replace(run, side="left"), tmp_path / "a.left")
    assert [load_run(tmp_path / f"a.{side}").side for side in ("left", "right")] == ["left", "right"]


# --- files that are not runs -------------------------------------------------------------------------------------


def refused(path: Path, reason: str = "") -> None:
    """With RunError, which names the path; the reason comes last."""
    with pytest.raises(RunError, match=f"^{re.escape(str(path))}: .*{reason}"):
        load_run(path)


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> Path:
    """The file once more, its header and tensors changed."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["fp4ep"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    change(header, tensors)
    save_file(tensors, path, metadata={"fp4ep": json.dumps(header)})
    return path


def test_a_rewritten_file_loads(path, run):
    """So that the refusals below come from the change."""
    assert contents(load_run(rewritten(path, lambda header, tensors: None))) == contents(run)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_run(tmp_path / "nothing.safetensors")


def test_a_recording(tmp_path, writer: RecordingWriter):
    path = tmp_path / "recording.safetensors"
    writer.write(path)
    assert Recording(path).cases
    refused(path, "format 'fp4ep.recording'")


@pytest.mark.parametrize("left", [0, 4, 100, -1], ids=lambda count: f"{count} bytes")
def test_a_truncated_file(path, left):
    path.write_bytes(path.read_bytes()[:left])
    refused(path, "not an fp4ep run")


@pytest.mark.parametrize(
    "content", [b"# a text file\n", b"\x89PNG\r\n\x1a\n" + bytes(100), bytes(range(256)) * 9], ids=len
)
def test_a_file_of_another_format(tmp_path, content):
    (tmp_path / "other.txt").write_bytes(content)
    refused(tmp_path / "other.txt", "not an fp4ep run")


@pytest.mark.parametrize(
    "metadata", [None, {"title": "a model"}, {"fp4ep": "not JSON"}, {"fp4ep": "[]"}, {"fp4ep": "{}"}], ids=str
)
def test_a_safetensors_file_of_another_program(tmp_path, metadata):
    save_file({"x": torch.zeros(3)}, tmp_path / "model.safetensors", metadata=metadata)
    refused(tmp_path / "model.safetensors", "not an fp4ep run")


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version(path, version):
    refused(rewritten(path, lambda header, _: header.update(version=version)), rf"version {version!r}.* reads 1")


@pytest.mark.parametrize("key", ["format", "version", "side", "claim", "scheme", "problem", "source", "stages"])
def test_a_header_without_an_entry(path, key):
    refused(rewritten(path, lambda header, _: header.pop(key)), key)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"claim": "MIRACLES"}, "MIRACLES"),
        ({"scheme": {"name": "nvfp4", "options": {}}}, "no scheme 'nvfp4'"),
        ({"scheme": {"name": NVFP4, "options": {"kperm": 1}}}, "no such option"),
        ({"scheme": NVFP4}, ""),
        ({"problem": {**PROBLEM.as_json(), "top_k": 99}}, "top_k must be 1 to 2 of 2 experts"),
        ({"problem": {**PROBLEM.as_json(), "future": 1}}, "future"),
        ({"problem": {}}, ""),
        ({"stages": [["fc1", 0, "GUESSED", []]]}, "GUESSED"),
        ({"stages": [["fc1", 0]]}, ""),
        ({"stages": 3}, ""),
    ],
    ids=str,
)
def test_a_header_with_a_wrong_entry(path, entry, reason):
    refused(rewritten(path, lambda header, _: header.update(entry)), reason)


def without(prefix: str) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    def change(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


@pytest.mark.parametrize("prefix", ["weights/w13", "weights/", "inputs/1/topk_ids", "inputs/0/"])
def test_a_layer_without_some_tensors(tmp_path, run, prefix):
    save_run(replace(run, problem=None), tmp_path / "run")
    refused(rewritten(tmp_path / "run", without(prefix)), "missing .* argument")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(without("stages/1/fc1/"), "stages/1/fc1/gate", id="no tensors of a stage"),
        pytest.param(without("stages/0/combine/values"), "stages/0/combine/values", id="no output"),
        pytest.param(lambda header, _: header["stages"].pop(), "every rank of 2", id="a rank not listed"),
        pytest.param(lambda header, _: header.update(stages=[]), "every rank of 2", id="no stage listed"),
        pytest.param(lambda header, _: header["stages"].append(header["stages"][-1]), "every rank", id="a rank twice"),
        pytest.param(lambda header, _: header.update(ep_size=4), "over 4 ranks", id="ep_size of another problem"),
        pytest.param(lambda header, _: header["scheme"]["options"].update(nvfp4_kperm=0), "its scheme", id="scheme"),
        pytest.param(lambda header, _: header["problem"].update(padding=-1), "padding must be", id="padding below 0"),
    ],
)
def test_a_file_that_does_not_hold_what_it_says(path, change, reason):
    refused(rewritten(path, change), reason)


@pytest.mark.parametrize("ep_size", [1, 3])
def test_ep_size_of_another_layer(tmp_path, run, ep_size):
    """Where there is no problem to ask: fewer ranks or more than the file has tokens and stages of."""
    save_run(replace(run, problem=None), tmp_path / "run")
    refused(rewritten(tmp_path / "run", lambda header, _: header.update(ep_size=ep_size)))
