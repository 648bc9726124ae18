"""`fp4ep record`, with the reference in the kernel's place, alone and under torchrun: what it writes, how it fails."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fp4ep.parity import CASES, Recording, corpus_problems, record_command, replay_cases
from fp4ep.parity.__main__ import main
from fp4ep.parity.flashinfer_record import CORPORA, Kernels, missing_to_record
from fp4ep.parity.reference_kernel import ReferenceKernel
from fp4ep.parity.sides import flashinfer_options
from fp4ep.reference import find_scheme, moe_forward
from fp4ep.reference.schemes import options_of

pytestmark = pytest.mark.usefixtures("quick_gemms")

SOURCE = {"hardware": "a test", "compute_capability": "0.0", "flashinfer": "1.2.3", "driver": "4.5.6"}
SMALL = ["--tokens", "3"]
BF16_REDUCED = ["--scheme", "bf16_bf16", "--option", "enable_in_kernel_fc2_reduce=true", "--top-k", "4"]


def launch(scheme, options, weights, inputs, *, max_tokens_per_rank, previous_topk_ids=None, ep_rank=0, ep_size=1):
    """Of FlashInfer's options those that are the scheme's."""
    assert len(inputs.hidden_states) <= max_tokens_per_rank
    known = {name: value for name, value in options.items() if name not in ("knobs", "swap_ab", "pingpong")}
    output, _ = moe_forward(find_scheme(scheme, **known), weights, inputs)
    return [output] * 3


KERNELS = Kernels(launch, ReferenceKernel, lambda: None, lambda: SOURCE, gpu=False)


def record(*arguments: object, kernels: Kernels = KERNELS) -> int:
    parser = argparse.ArgumentParser()
    record_command.add_parser(parser.add_subparsers(dest="command"))
    return record_command.main(parser.parse_args(["record", *map(str, arguments)]), kernels)


def replayed(path: Path) -> list[int]:
    recording = Recording(path)
    return [result.differing for result in replay_cases(recording, recording.cases, lambda case: lambda share: None)]


# --- what is written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "bf16_bf16", "fp8_fp8_bf16_pull"])
def test_a_problem_is_recorded(scheme, tmp_path, capsys):
    path = tmp_path / "made.safetensors"
    assert record(path, "--scheme", scheme, "--case", "masked slots", *SMALL) == 0
    recording = Recording(path)
    (case,) = recording.cases
    assert (case.title, case.launches) == ("problem: masked slots", 3)
    assert case.config == {"max_tokens_per_rank": 8, "world_size": 1, "tokens_per_rank": [3]}
    assert recording.source == SOURCE
    assert recording.specs["output.0"]["from"] == {"kind": "stored", "encoding": "xz"}
    assert {spec["from"]["kind"] for name, spec in recording.specs.items() if name != "output.0"} == {"problem"}
    out = capsys.readouterr().out
    assert "masked slots: 3 launches, the same bits, 0 NaN" in out
    assert f"wrote {path}: 1 case; compare with `fp4ep replay {path}`" in out
    assert main(["replay", str(path)]) == 0


def test_all_cases_sizes_options_and_knobs(tmp_path):
    path = tmp_path / "made.safetensors"
    arguments = ["--option", "nvfp4_kperm=0", "--num-experts", "4", "--top-k", "2", "--hidden", "128", "--seed", "5"]
    few = ["ordinary", "poisoned padding", "uneven ranks, one without tokens"]
    assert record(path, "--scheme", "nvfp4", *arguments, *SMALL, "--case", *few) == 0
    recording = Recording(path)
    assert [case.title for case in recording.cases] == [f"problem: {name}" for name in few]
    assert [case.config["tokens_per_rank"] for case in recording.cases] == [[3], [8], [3]]
    assert all(case.options == {"nvfp4_kperm": 0, "gate_up_clamp": 10.0} for case in recording.cases)
    assert recording[recording.cases[0].tensors["w13"]].shape == (4, 256, 64)
    assert replayed(path) == [0] * 3


def test_what_flashinfer_was_told_beside(tmp_path):
    """A K tile is a launch geometry to FlashInfer, and both are in the file."""
    told = []

    def watched(scheme, options, weights, inputs, **places):
        told.append(options)
        return [torch.zeros_like(inputs.hidden_states)] * 3

    path = tmp_path / "made.safetensors"
    arguments = ["--option", "fp8_accum_mode=2xacc", "--option", "mma_tiler_k=256"]
    assert record(path, "--scheme", "fp8_fp8_bf16_pull", *arguments, *SMALL, kernels=Kernels(watched, **REST)) == 0
    (case,) = Recording(path).cases
    scheme = find_scheme(case.scheme, **case.options)
    assert case.options == options_of(scheme)
    assert case.options["mma_tiler_k"] == 256
    assert told == [flashinfer_options(scheme)]
    assert case.config["mma_tiler_mnk"] == [64, 128, 256]


REST = {"missing": lambda: None, "source": lambda: SOURCE, "gpu": False}


def test_all_is_every_case(tmp_path):
    def zeros(scheme, options, weights, inputs, **places):
        return [torch.zeros_like(inputs.hidden_states)] * 3

    path = tmp_path / "made.safetensors"
    assert record(path, "--scheme", "bf16_bf16", "--case", "all", *SMALL, kernels=Kernels(zeros, **REST)) == 0
    assert [case.title for case in Recording(path).cases] == [f"problem: {name}" for name in CASES]
    assert Recording(path).title == f"Problems of the harness: {'; '.join(CASES)}"


def unsteady(*given, **places):
    """The third launch differs in one bit."""
    output, *_ = launch(*given, **places)
    other = output.clone()
    other.view(torch.int16)[1, 7] ^= 0x40  # more than another order of addition changes
    return [output, output, other]


def test_launches_that_differ_are_refused(tmp_path, capsys):
    """The first case is steady: nothing of it is written either, and an older file stays."""
    calls = []

    def second(*given, **places):
        calls.append(given)
        return (launch if len(calls) == 1 else unsteady)(*given, **places)

    path = tmp_path / "made.safetensors"
    path.write_text("older")
    arguments = ["--scheme", "bf16_bf16", "--case", "ordinary", "masked slots", *SMALL]
    assert record(path, *arguments, kernels=Kernels(second, **REST)) == 1
    assert (
        "'masked slots': 3 launches of sm90_bf16_bf16_bf16_pull_cutedsl gave different bits" in capsys.readouterr().err
    )
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


def test_sums_on_arrival_may_differ(tmp_path, capsys):
    """Each launch is a case; replay finds the one that no order of addition gives."""
    path = tmp_path / "made.safetensors"
    assert record(path, *BF16_REDUCED, *SMALL, kernels=Kernels(unsteady, **REST)) == 0
    cases = Recording(path).cases
    assert [case.title for case in cases] == [f"problem: ordinary, launch {n}" for n in (1, 2, 3)]
    assert [case.launches for case in cases] == [1, 1, 1]
    assert "3 launches, different bits, in some order of arrival each" in capsys.readouterr().out
    assert replayed(path) == [0, 0, 1]


def test_shipped_recordings_are_made_again(monkeypatch, tmp_path, capsys):
    some = [name for name in corpus_problems.PROBLEMS if "ordinary, sm90_bf16" in name]
    monkeypatch.setattr(corpus_problems, "PROBLEMS", {name: corpus_problems.PROBLEMS[name] for name in some})
    assert record(tmp_path, "--only", "h200_problems", "h200_adapter_1") == 0
    out = capsys.readouterr().out
    assert f"wrote {tmp_path / 'h200_problems.safetensors'}: 1 case\n" in out
    assert {path.stem for path in tmp_path.iterdir()} == {"h200_problems", "h200_adapter_1"}
    assert all(set(replayed(path)) == {0} for path in tmp_path.iterdir())


def test_a_case_left_out_shows_in_the_status(monkeypatch, tmp_path, capsys):
    some = [
        name
        for name in corpus_problems.PROBLEMS
        if ("sm90_bf16" in name and "top-k 4" in name) or "ordinary, sm90_bf16" in name
    ]
    monkeypatch.setattr(corpus_problems, "PROBLEMS", {name: corpus_problems.PROBLEMS[name] for name in some})
    assert record(tmp_path, "--only", "h200_problems", kernels=Kernels(unsteady, **REST)) == 1
    out = capsys.readouterr().out
    assert "LEFT OUT problem: ordinary" in out
    assert "h200_problems.safetensors: 3 cases" in out


# --- how it fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["FOLDER", "--only", "h200_first"], "--only: h200_first not among h200_adapter_1, h200_special"),
        (
            ["FOLDER", "--only", "h200_two_ranks"],
            "--only h200_two_ranks: start with torchrun --nproc-per-node 2; here is 1",
        ),
        (["FOLDER", "--seed", "0", "--case", "all"], "--case, --seed: only with --scheme"),
        (["nowhere"], "FOLDER: nowhere is not a folder; a file takes --scheme"),
        (["FOLDER", "--scheme", "nvfp4"], "is a folder"),
        (["nowhere/x", "--scheme", "nvfp4"], "FILE: nowhere is not a folder"),
        (["FILE", "--scheme", "nvfp4", "--only", "h200_large"], "--only: not with --scheme"),
        (["FILE", "--scheme", "nvfp4", "--ep", "2"], "--ep 2: start with torchrun --nproc-per-node 2; here is 1 rank"),
        (["FILE", "--scheme", "fp8"], "--scheme: 'fp8' must fit one of"),
        (["FILE", "--scheme", "sm100"], "--scheme: sm100_nvfp4_nvfp4_bf16_cutedsl cannot be launched, only sm90_fp8"),
        (["FILE", "--scheme", "nvfp4", "--option", "kperm"], "--option must be KNOB=VALUE"),
        (["FILE", "--scheme", "nvfp4", "--option", "nvfp4_kperm=7"], "nvfp4_kperm: 7 is not one of"),
        (["FILE", "--scheme", "nvfp4", "--case", "ordinary", "none"], "cases: none not among ordinary"),
        (["FILE", "--scheme", "nvfp4", "--tokens", "1,2"], "--tokens must be one number or one for each of 1 ranks"),
        (["FILE", "--scheme", "nvfp4", "--hidden", "100"], "hidden must be a positive multiple of 64"),
        (
            ["FILE", *BF16_REDUCED[:-1], "14", "--num-experts", "16"],
            "--top-k: orders of arrival can be judged up to 12",
        ),
    ],
    ids=lambda x: " ".join(x[1:]) if isinstance(x, list) else "",
)
def test_what_is_wrong_is_said(arguments, says, tmp_path, capsys):
    """Before any kernel runs."""

    def never(*given, **places):
        raise AssertionError("a kernel ran")

    places = {"FOLDER": tmp_path, "FILE": tmp_path / "made.safetensors"}
    assert record(*[places.get(a, a) for a in arguments], kernels=Kernels(never, **REST)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("fp4ep record: ")
    assert says in captured.err
    assert not captured.out
    assert not list(tmp_path.iterdir())


def test_a_rank_without_tokens_is_refused(monkeypatch, tmp_path, capsys):
    """As rank 0 of two finds it, before it meets the other."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    absent = Kernels(launch, ReferenceKernel, lambda: "no kernels", lambda: SOURCE, gpu=False)  # the next to be refused
    assert record(tmp_path / "made.safetensors", *BF16_REDUCED, "--tokens", "5,0", kernels=absent) == 2
    err = capsys.readouterr().err
    assert err.startswith("fp4ep record: --tokens: 'ordinary' leaves a rank without tokens; there FlashInfer")
    assert not list(tmp_path.iterdir())


def test_a_kernel_that_fails(tmp_path, capsys):
    def fails(*given, **places):
        raise ZeroDivisionError("planted")

    path = tmp_path / "made.safetensors"
    assert record(path, "--scheme", "nvfp4", *SMALL, kernels=Kernels(fails, **REST)) == 3
    err = capsys.readouterr().err
    assert err.endswith("fp4ep record: rank 0 failed: ZeroDivisionError: planted; nothing is written\n")
    assert "in fails" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [[], ["--only", "h200_tensor_core"], ["--scheme", "nvfp4"]])
def test_without_a_gpu(arguments, tmp_path, capsys):
    """The whole command, as `fp4ep` runs it."""
    target = tmp_path / "made.safetensors" if "--scheme" in arguments else tmp_path
    assert main(["record", str(target), *arguments]) == 3
    assert capsys.readouterr().err == "fp4ep record: cannot run here: no CUDA device\n"


def test_without_a_package(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("fp4ep.parity.flashinfer_record.missing_for_flashinfer_sm90", lambda: None)
    monkeypatch.setattr("fp4ep.parity.flashinfer_record._PACKAGES", {"cutlass_dsl": "no-such-package"})
    assert missing_to_record() == "no-such-package is not installed"
    monkeypatch.setattr("fp4ep.parity.flashinfer_record._PACKAGES", {"torch": "torch"})
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert missing_to_record() == "nvidia-smi, which knows the driver's version, is not there"
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("fp4ep.parity.flashinfer_record.find_spec", lambda name: None)
    assert missing_to_record() == "nvshmem4py, which several ranks need, is not installed"
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(record_command, "find_spec", lambda name: None)
    assert record(tmp_path, "--only", "h200_tensor_core") == 3
    assert "cannot run here: triton is not installed" in capsys.readouterr().err


# --- under torchrun ----------------------------------------------------------------------------------------------

_ON_RANKS = """
import atexit
import os
import sys
import time
from pathlib import Path
import test_record
from fp4ep.parity import corpus_adapter, corpus_ranks
from fp4ep.parity.distributed import DistributedExchange
from fp4ep.parity.flashinfer_record import Kernels
from fp4ep.parity.problem import Layer
from fp4ep.parity.reference_kernel import ReferenceKernel
from fp4ep.parity.sides import Place, local_layer
from fp4ep.reference import find_scheme
from fp4ep.reference.moe import moe_forward_ranks

corpus_ranks.CASES = corpus_ranks.CASES[4:5]  # one arithmetic, on smaller experts
corpus_ranks._HIDDEN, corpus_ranks._INTERMEDIATE = 256, 128
corpus_adapter._VARIANTS = corpus_adapter._VARIANTS[::5]  # the first and the last
act, *arguments = sys.argv[1:]


def launch(scheme, options, weights, inputs, *, max_tokens_per_rank, ep_rank, ep_size):
    exchange = DistributedExchange()
    place = Place((ep_rank,), ep_size, exchange)
    known = {name: value for name, value in options.items() if name != "token_back_mode"}
    layer = local_layer(Layer(find_scheme(scheme, **known), weights, (inputs,) * ep_size), place)
    if act == "fail" and ep_rank == 1:
        atexit.register(time.sleep, 3600)  # as what ends NVSHMEM would, without the other ranks
        raise ZeroDivisionError("planted")
    if act == "die" and ep_rank == 1:
        os._exit(7)
    trace = moe_forward_ranks(
        layer.scheme, layer.weights, [inputs], ranks=place.ranks, ep_size=ep_size, exchange=exchange
    )
    output = trace["combine", ep_rank].tensors["values"]
    return [output, output, output + (act == "differ" and ep_rank == 1)]


sys.exit(test_record.record(*arguments, kernels=Kernels(launch, ReferenceKernel, **test_record.REST)))
"""


@pytest.fixture
def on_two_ranks(tmp_path):
    """Runs the command in two processes, with a kernel that does what is named on rank 1."""
    script = tmp_path / "script.py"
    script.write_text(_ON_RANKS)
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

    def run(act: str, *arguments: object) -> tuple[subprocess.CompletedProcess[str], float]:
        start = time.monotonic()
        command: Sequence[object] = ["--standalone", "--nproc-per-node=2", script, act, *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        ended = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *map(str, command)],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
        return ended, time.monotonic() - start

    return run


@pytest.mark.slow
def test_two_ranks_record_a_problem(on_two_ranks, tmp_path):
    """Routes summed by rank, uneven tokens; rank 0 alone says something."""
    path = tmp_path / "made.safetensors"
    arguments = [
        "--scheme",
        "fp8_fp8_bf16_pull",
        "--option",
        "fp8_scale_mode=blockwise",
        "--option",
        "grouped_token_back=true",
    ]
    arguments += ["--ep", "2", "--tokens", "4,1", "--hidden", "512", "--case", "ordinary", "masked slots"]
    ended, _ = on_two_ranks("work", path, *arguments)
    assert ended.returncode == 0, ended.stderr
    assert [line.split("s  ")[-1] for line in ended.stdout.splitlines()] == [
        "ordinary: 3 launches, the same bits, 0 NaN",
        "masked slots: 3 launches, the same bits, 0 NaN",
        f"wrote {path}: 2 cases; compare with `fp4ep replay {path}`",
    ]
    case, _ = Recording(path).cases
    assert case.tokens_per_rank == [4, 1]
    assert case.config["token_back_mode"] == "reuse_dispatch_warps"
    assert case.config["max_tokens_per_rank"] == 8
    assert replayed(path) == [0, 0]


@pytest.mark.slow
def test_two_ranks_make_the_shipped_recordings_again(on_two_ranks, tmp_path):
    ended, _ = on_two_ranks("work", tmp_path)
    assert ended.returncode == 0, ended.stderr
    made = {name for name, corpus in CORPORA.items() if corpus.ep_size == 2}
    assert {path.stem for path in tmp_path.glob("*.safetensors")} == made
    assert replayed(tmp_path / "h200_two_ranks.safetensors") == [0, 0]
    assert replayed(tmp_path / "h200_adapter_2.safetensors") == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "arguments", "says", "unsaid"),
    [
        ("fail", ["--scheme", "nvfp4"], "fp4ep record: rank 1 failed: ZeroDivisionError: planted; nothing", "rank 0"),
        ("die", ["--scheme", "nvfp4"], "exitcode  : 7", "is written\nfp4ep"),
        ("differ", ["--scheme", "nvfp4"], "'ordinary': 3 launches of sm90_fp8_nvfp4", "rank 1"),
        ("work", ["--scheme", "nvfp4", "--ep", "4"], "--ep 4: start with torchrun --nproc-per-node 4; here are 2", ""),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else x[:8],
)
def test_two_ranks_end_together(act, arguments, says, unsaid, on_two_ranks, tmp_path):
    """One message, no file, and soon."""
    target = tmp_path / "made.safetensors" if "--scheme" in arguments else tmp_path
    ended, seconds = on_two_ranks(act, target, *arguments)
    assert ended.returncode != 0
    assert ended.stderr.count(says) == 1
    assert not unsaid or unsaid not in ended.stderr
    assert ended.stderr.count("fp4ep record: ") == (act != "die")
    assert not list(tmp_path.glob("*.safetensors*"))
    assert seconds < 60
