"""The recording format: round trips, what a damaged or foreign file says, and what is shipped."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp4ep.parity import recording
from fp4ep.parity.generate import integers, normal
from fp4ep.parity.recording import FORMAT, Recording, RecordingError, RecordingWriter, sha256
from fp4ep.parity.replay import shipped_recordings
from fp4ep.reference.formats import E2M1, pack_e2m1
from fp4ep.reference.quantize import quantize_mx, quantize_nvfp4
from fp4ep.reference.scales import ScaleRule

DTYPES = [
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int32,
    torch.int64,
    torch.uint8,
]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and sha256(a) == sha256(b)


def written(writer: RecordingWriter, folder: Path) -> Recording:
    path = folder / "made.safetensors"
    writer.write(path)
    return Recording(path)


def empty_writer() -> RecordingWriter:
    return RecordingWriter("A title", {"hardware": "a test"})


# --- round trips -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["raw", "xz"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5, 3, 2)], ids=str)
def test_stored(tmp_path, dtype, encoding, shape):
    """Random bits, NaN patterns of every kind among them."""
    g = torch.Generator().manual_seed(0)
    random = torch.randint(256, (*shape, dtype.itemsize), generator=g, dtype=torch.uint8)
    tensor = random.view(dtype).reshape(shape)
    writer = empty_writer()
    assert same_bits(writer.store("x", tensor, encoding), tensor)
    made = written(writer, tmp_path)
    assert same_bits(made["x"], tensor)
    assert made.specs["x"]["dtype"] == str(dtype).removeprefix("torch.")
    assert made.specs["x"]["shape"] == list(shape)


@pytest.mark.parametrize("encoding", ["raw", "xz"])
def test_stored_is_a_copy_of_a_view(tmp_path, encoding):
    base = torch.arange(24.0).reshape(4, 6)
    writer = empty_writer()
    writer.store("x", base.T[1:4:2], encoding)
    base.zero_()
    assert written(writer, tmp_path)["x"].tolist() == [[1.0, 7.0, 13.0, 19.0], [3.0, 9.0, 15.0, 21.0]]


def test_xz_is_smaller_for_regular_data(tmp_path):
    """By planes: the high bytes of small integers are all zero."""
    writer = empty_writer()
    writer.store("x", torch.arange(1000), "xz")
    assert writer.stored["x"].numel() < 8000 / 10


def test_generated(tmp_path):
    writer = empty_writer()
    returned = writer.generate("x", "normal", seed=3, shape=[4, 5], scale=0.5)
    writer.generate("codes", "integers", seed=4, shape=[7], low=1, high=9)
    made = written(writer, tmp_path)
    assert same_bits(made["x"], normal(3, [4, 5], 0.5))
    assert same_bits(made["x"], returned)
    assert same_bits(made["codes"], integers(4, [7], 1, 9))
    assert not writer.stored


def test_quantized(tmp_path):
    """Every rule and part, made again from a dense tensor that is itself generated."""
    writer = empty_writer()
    dense = writer.generate("w", "normal", seed=1, shape=[2, 8, 64], scale=1.0)
    parts = {"nvfp4": ("codes", "scales", "global_scale"), "mxfp4_floor": ("codes", "scales")}
    assert parts.keys() == recording.QUANTIZERS.keys()
    for rule, names in parts.items():
        for part in names:
            writer.quantize(f"{rule}.{part}", rule, "w", part, dense)
    made = written(writer, tmp_path)
    for rule, quantized in (
        ("nvfp4", quantize_nvfp4(dense)),
        ("mxfp4_floor", quantize_mx(dense, E2M1, ScaleRule.FLOOR)),
    ):
        assert same_bits(made[f"{rule}.codes"], pack_e2m1(quantized.codes))
        assert same_bits(made[f"{rule}.scales"], quantized.scales)
    assert same_bits(made["nvfp4.global_scale"], quantize_nvfp4(dense).global_scale)


def test_header_and_cases(tmp_path, writer):
    made = written(writer, tmp_path)
    assert made.title == "A small problem"
    assert made.source["flashinfer"] == "1.2.3"
    assert made.cases == writer.cases
    case = made.cases[0]
    assert case.options == {"nvfp4_kperm": 64, "gate_up_clamp": 2.0}
    assert (case.config, case.launches) == ({}, 3)
    roles = made.roles(case)
    assert roles.keys() == case.tensors.keys()
    assert same_bits(roles["hidden_states"], normal(3, [3, 256], 1.0))


def test_a_tensor_is_built_once_until_forgotten(tmp_path, writer):
    made = written(writer, tmp_path)
    first = made["w13"]
    assert made["w13"] is first
    made.forget()
    assert made["w13"] is not first
    assert same_bits(made["w13"], first)


# --- damage ------------------------------------------------------------------------------------------------------


def flip_last_bit(path: Path, name: str) -> None:
    """Of the bytes of one stored tensor, in a safetensors file: length, header, data."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    end = json.loads(content[8:start])[name]["data_offsets"][1]
    content[start + end - 1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("encoding", ["raw", "xz"])
def test_corrupted_tensor(tmp_path, encoding):
    writer = empty_writer()
    for name in ("good", "bad"):
        writer.store(name, torch.arange(100.0), encoding)
    made = written(writer, tmp_path)
    flip_last_bit(made.path, "bad")
    with pytest.raises(RecordingError) as raised:
        made["bad"]
    assert str(made.path) in str(raised.value)
    assert "'bad'" in str(raised.value)
    assert same_bits(made["good"], torch.arange(100.0))


@pytest.mark.parametrize("name", ["generated", "quantized"])
def test_tensor_that_no_longer_rebuilds(tmp_path, name):
    """As when a generator or a quantizer changed since."""
    writer = empty_writer()
    dense = writer.generate("generated", "normal", seed=0, shape=[4, 32], scale=1.0)
    writer.quantize("quantized", "nvfp4", "generated", "codes", dense)
    writer.specs[name]["sha256"] = "0" * 64
    with pytest.raises(RecordingError, match=rf"made\.safetensors: tensor '{name}' cannot be read"):
        written(writer, tmp_path)[name]


def test_quantized_from_a_dense_tensor_that_changed(tmp_path):
    writer = empty_writer()
    dense = writer.generate("w", "normal", seed=0, shape=[4, 32], scale=1.0)
    writer.quantize("q", "nvfp4", "w", "codes", dense)
    writer.specs["w"]["from"]["arguments"]["seed"] = 1
    with pytest.raises(RecordingError, match="tensor 'w' cannot be read"):
        written(writer, tmp_path)["q"]


def test_missing_tensor(tmp_path, writer):
    writer.cases.append(replace(writer.cases[0], tensors={"w13": "w31"}))
    made = written(writer, tmp_path)
    for read in (lambda: made["w31"], lambda: made.roles(made.cases[-1])):
        with pytest.raises(RecordingError, match=r"made\.safetensors: no tensor 'w31'"):
            read()


def not_stored(writer: RecordingWriter) -> None:
    del writer.stored["x"]
    writer.store("y", torch.zeros(1))


def change(**fields):
    return lambda writer: writer.specs["x"].update(fields)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(change(**{"from": {"kind": "downloaded"}}), id="kind"),
        pytest.param(change(**{"from": {"kind": "generated", "generator": "g"}}), id="generator"),
        pytest.param(change(**{"from": {"kind": "quantized", "rule": "r", "of": "x", "part": "codes"}}), id="rule"),
        pytest.param(
            change(**{"from": {"kind": "quantized", "rule": "nvfp4", "of": "x", "part": "codes"}}), id="itself"
        ),
        pytest.param(not_stored, id="not stored"),
        pytest.param(change(dtype="int32"), id="dtype"),
        pytest.param(change(shape=[2, 2]), id="shape"),
    ],
)
def test_tensor_that_is_not_what_the_header_says(tmp_path, damage):
    writer = empty_writer()
    writer.store("x", torch.arange(4.0))
    damage(writer)
    with pytest.raises(RecordingError, match=r"made\.safetensors: tensor 'x'"):
        written(writer, tmp_path)["x"]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)], ids=str)
@pytest.mark.parametrize("encoding", ["raw", "xz"])
def test_empty_tensor(tmp_path, encoding, shape):
    writer = empty_writer()
    writer.store("x", torch.zeros(shape), encoding)
    assert written(writer, tmp_path)["x"].shape == shape


# --- files that are not recordings -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_other_version(tmp_path, version):
    writer = empty_writer()
    writer.header["version"] = version
    with pytest.raises(RecordingError, match=rf"made\.safetensors: recording version {version!r}; .* reads 1$"):
        written(writer, tmp_path)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"title": "another program's"},
        {"fp4ep": "not JSON"},
        {"fp4ep": "{}"},
        {"fp4ep": json.dumps({"format": "another", "version": 1})},
        {"fp4ep": "[]"},
        {"fp4ep": json.dumps({"format": FORMAT})},
        {"fp4ep": json.dumps({"format": FORMAT, "version": 1})},
    ],
    ids=str,
)
def test_safetensors_file_that_is_not_a_recording(tmp_path, metadata):
    path = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(3)}, path, metadata=metadata)
    with pytest.raises(RecordingError, match=r"other\.safetensors: not an fp4ep recording"):
        Recording(path)


@pytest.mark.parametrize("content", [b"", b"# a text file\n", b"\x89PNG\r\n\x1a\n" + bytes(100)], ids=str)
def test_file_of_another_format(tmp_path, content):
    path = tmp_path / "other.txt"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=r"other\.txt: not an fp4ep recording"):
        Recording(path)


def test_truncated_file(tmp_path, writer):
    path = written(writer, tmp_path).path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RecordingError, match="not an fp4ep recording"):
        Recording(path)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        Recording(tmp_path / "nothing.safetensors")


# --- writing -----------------------------------------------------------------------------------------------------


def interrupted_save(tensors, path, metadata):
    Path(path).write_bytes(b"the first half")
    raise KeyboardInterrupt


def interrupted_replace(source, target):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("step", "fails"), [("save_file", interrupted_save), ("os.replace", interrupted_replace)], ids=["save", "replace"]
)
def test_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, step, fails):
    old, new = empty_writer(), empty_writer()
    old.store("x", torch.zeros(3))
    new.store("x", torch.ones(3))
    path = written(old, tmp_path).path
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(f"fp4ep.parity.recording.{step}", fails)
        with pytest.raises(KeyboardInterrupt):
            new.write(path)
    assert path.read_bytes() == before
    new.write(path)
    assert Recording(path)["x"].tolist() == [1.0, 1.0, 1.0]
    assert list(tmp_path.iterdir()) == [path]


# --- what is shipped ---------------------------------------------------------------------------------------------


def test_shipped_recordings_open():
    paths = shipped_recordings()
    assert paths
    for path in paths:
        made = Recording(path)
        assert made.title
        assert made.cases
        assert {"hardware", "compute_capability", "flashinfer", "torch"} <= made.source.keys()
        assert {name for case in made.cases for name in case.tensors.values()} <= made.specs.keys()


def test_shipped_recordings_are_alone_in_the_folder():
    """But for their description: no stray file, such as one left by an interrupted write."""
    paths = shipped_recordings()
    found = {path.name for path in paths[0].parent.iterdir()}
    assert found - {"README.md"} == {path.name for path in paths}


def test_shipped_recordings_are_small():
    """They are package data: every installation carries them."""
    assert sum(path.stat().st_size for path in shipped_recordings()) < 20_000_000
