"""Ranks in one process, in processes of their own and under torchrun give the same bits; when one fails, all end."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import rank_sides
import torch
import torch.distributed as dist

from fp4ep.parity import launch as launch_module
from fp4ep.parity import processes
from fp4ep.parity.distributed import from_bytes
from fp4ep.parity.launch import UnavailableError, launch, launch_each
from fp4ep.parity.problem import Problem
from fp4ep.parity.processes import RankError
from fp4ep.parity.recording import Recording
from fp4ep.parity.replay import shipped_recordings
from fp4ep.parity.run import Claim, Run
from fp4ep.parity.sides import SIDES, Place, Side, find_side, flashinfer_options, local_layer
from fp4ep.reference.schemes import SCHEMES
from fp4ep.reference.types import Trace
from fp4ep.reference.validate import InputError

NVFP4 = "sm90_fp8_nvfp4_bf16_pull_cutedsl"
FP8 = ("sm90_fp8_fp8_bf16_pull_cutedsl", {"fp8_scale_mode": "blockwise"})
BF16 = "sm90_bf16_bf16_bf16_pull_cutedsl"
TOKENS = (5, 0, 1, 3)
PROBLEMS = {
    "a rank without tokens": Problem(NVFP4, tokens=TOKENS),
    "masked": Problem(NVFP4, tokens=TOKENS, routing="masked"),
    "skewed": Problem(*FP8, tokens=TOKENS, routing="skewed"),
    "duplicates": Problem(*FP8, tokens=TOKENS, routing="duplicates", top_k=3),
    "a rank without routes": Problem(BF16, tokens=TOKENS, routing="empty_rank", padding=2),
}
REFERENCE = SIDES["reference"]
COMPARED = (REFERENCE, SIDES["fake_quant"], Side("rows", Claim.BITS, rank_sides.exchanged))
SMALL = rank_sides.PROBLEM
MOST = 30.0  # seconds until a failure must have ended everything


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """In this process: small tensors gain nothing from more, and on a busy machine lose much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_same(found: Trace, expected: Trace, stages: Iterable[str] | None = None) -> None:
    """Same stages, order, columns, dtypes, shapes and bits."""
    assert [(s.name, s.rank, s.exactness) for s in found] == [(s.name, s.rank, s.exactness) for s in expected]
    for one, other in zip(found, expected, strict=True):
        if stages is not None and one.name not in stages:
            continue
        assert list(one.tensors) == list(other.tensors)
        for name, tensor in one.tensors.items():
            same = other.tensors[name]
            place = f"{one.name} {name} on rank {one.rank}"
            assert (tensor.dtype, tensor.shape) == (same.dtype, same.shape), place
            assert torch.equal(*(t.contiguous().view(torch.uint8) for t in (tensor, same))), place


# --- one result --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_process() -> dict[str, list[Run]]:
    return dict(zip(PROBLEMS, launch_each(COMPARED, list(PROBLEMS.values())), strict=True))


@pytest.fixture(scope="module")
def progress() -> list[tuple[str, int, int]]:
    return []


@pytest.fixture(scope="module")
def spawned(progress) -> dict[str, list[Run]]:
    """Four processes for all problems."""
    runs = launch_each(COMPARED, list(PROBLEMS.values()), how="spawned", progress=lambda *call: progress.append(call))
    return dict(zip(PROBLEMS, runs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_four_processes_equal_one(name, in_process, spawned):
    for found, expected in zip(spawned[name], in_process[name], strict=True):
        # float32 sums may depend on the number of threads
        library = ("stage", "dispatch") if found.side == "fake_quant" else None
        assert_same(found.trace, expected.trace, library)
        assert found.problem == expected.problem == PROBLEMS[name]
        assert torch.equal(found.layer.weights.w13, expected.layer.weights.w13)


@pytest.mark.slow
def test_the_problems_are_what_they_say(spawned):
    received = {name: spawned[name][0].stages("dispatch") for name in PROBLEMS}
    assert len(received["a rank without routes"][3]["expert"]) == 0
    assert len(spawned["a rank without tokens"][0].stages("stage")[1]["values"]) == 0
    routes = {name: sum(len(table["expert"]) for table in tables.values()) for name, tables in received.items()}
    assert routes["masked"] < sum(TOKENS) * 2 == routes["skewed"]
    assert len({spawned[name][0].scheme.name for name in PROBLEMS}) == 3


@pytest.mark.slow
def test_progress_is_that_of_rank_0(spawned, progress):
    routes = [2 * len(runs[0].stages("dispatch")[0]["expert"]) for runs in spawned.values()]
    ends = [done for side, done, total in progress if side == "reference" and done == total]
    assert ends == [count for count in routes if count]
    assert {side for side, _, _ in progress} == {"reference", "fake_quant"}


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory) -> tuple[list[Run], subprocess.CompletedProcess[str], float]:
    """Two processes: what the reference made, then how they ended after rank 1 failed, and the seconds that took."""
    folder = tmp_path_factory.mktemp("torchrun")
    options = ["--standalone", "--nproc-per-node=2", rank_sides.__file__, str(folder)]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    return from_bytes((folder / "runs").read_bytes()), ended, since_the_last_started(folder)


@pytest.mark.slow
def test_torchrun_equals_one_process(under_torchrun):
    (found,), _, _ = under_torchrun
    (expected,) = launch([REFERENCE], SMALL)
    assert_same(found.trace, expected.trace)
    assert found.source["ranks"] == "torchrun"


@pytest.mark.slow
def test_torchrun_ends_with_the_failing_rank(under_torchrun):
    """Only the rank at fault says something."""
    _, ended, seconds = under_torchrun
    assert ended.returncode != 0
    assert "RankError: rank 1 failed: ZeroDivisionError: planted" in ended.stderr
    assert "rank 0" not in ended.stderr
    assert seconds < MOST


@pytest.mark.gpu
def test_nccl_equals_one_process():
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    (expected,) = launch([REFERENCE], SMALL)
    (found,) = launch([replace(REFERENCE, gpu=True)], SMALL, how="spawned")
    assert_same(found.trace, expected.trace)


@pytest.mark.slow
def test_what_a_process_holds():
    """Its own experts' weights, unless a side wants all, and its share of the cores."""
    side = Side("facts", Claim.BITS, rank_sides.facts)
    runs = launch([side, replace(side, name="whole", whole=True)], SMALL, how="spawned")
    own, whole = ([int(rank["experts"]) for rank in run.stages("facts").values()] for run in runs)
    assert (own, whole) == ([4, 4], [8, 8])
    facts = runs[0].stages("facts").values()
    assert all(int(rank["threads"]) <= max(1, len(os.sched_getaffinity(0)) // 2) for rank in facts)
    assert len({int(rank["pid"]) for rank in facts} | {os.getpid()}) == 3


def test_a_layer_travels(tmp_path):
    """A layer that no Problem makes, float8 included, reaches the processes as it is."""
    layer = SMALL.build()
    fp8 = [x.hidden_states.float().to(torch.float8_e4m3fn) for x in layer.inputs]
    inputs = [replace(x, hidden_states=h, scales=torch.ones(len(h), 1)) for x, h in zip(layer.inputs, fp8, strict=True)]
    layer = replace(layer, inputs=tuple(inputs))
    (found,), (expected,) = (launch([REFERENCE], layer, how=how) for how in ("spawned", "in_process"))
    assert_same(found.trace, expected.trace)
    assert found.problem is None


# --- failures ----------------------------------------------------------------------------------------------------


def pids(folder: Path, with_server: bool = False) -> set[int]:
    """Of the ranks that got as far as their first exchange; and of the server that they were forked from."""
    found = [file.read_text().split() for file in folder.glob("*.pid")]
    return {int(pid) for pair in found for pid in (pair if with_server else pair[:1])}


def since_the_last_started(folder: Path) -> float:
    """Seconds."""
    return time.time() - max(file.stat().st_mtime for file in folder.glob("*.pid"))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + MOST
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def all_end(tmp_path) -> Iterator[None]:
    """After the test every rank is gone, less than MOST seconds after the last one started."""
    yield
    assert since_the_last_started(tmp_path) < MOST
    assert len(pids(tmp_path)) >= 2
    assert not [pid for pid in pids(tmp_path) if alive(pid)]


@pytest.mark.slow
@pytest.mark.usefixtures("all_end")
@pytest.mark.parametrize(
    ("act", "says"),
    [
        ("raise", "rank 2 failed: ZeroDivisionError: planted"),
        ("die", "rank 2 was killed by SIGKILL"),
        ("quit", "rank 2 exited with status 7 before it was done"),
        ("leave", "rank 2 exited with status 0 before it was done"),
    ],
)
def test_one_rank_ends_all(act, says, tmp_path):
    with pytest.raises(RankError) as raised:
        launch([rank_sides.side(act, 2, tmp_path)], PROBLEMS["skewed"], how="spawned")
    assert str(raised.value) == says
    assert raised.value.rank == 2
    if act == "raise":
        assert "in fail" in raised.value.__notes__[0]


@pytest.mark.slow
@pytest.mark.usefixtures("all_end")
def test_a_silent_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 1.0)
    with pytest.raises(RankError, match=r"rank 1 did not answer: rank 0 lost contact: .*[Tt]imed? ?out") as raised:
        launch([rank_sides.side("hang", 1, tmp_path)], SMALL, how="spawned", timeout=2)
    assert raised.value.rank == 1


@pytest.mark.slow
@pytest.mark.usefixtures("all_end")
def test_an_interrupt_ends_all(tmp_path):
    """Ctrl-C here, or anything else that leaves the loop over runs."""

    def interrupt(*call: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch([rank_sides.side("hang", 1, tmp_path)], SMALL, how="spawned", progress=interrupt)


@pytest.mark.slow
@pytest.mark.usefixtures("all_end")
def test_no_orphans(tmp_path):
    """The parent is killed: its ranks end, and the server that it started."""
    parent = multiprocessing.get_context("forkserver").Process(target=rank_sides.sleep, args=(tmp_path,))
    parent.start()
    wait_until(lambda: len(pids(tmp_path)) == 2)
    started = pids(tmp_path, with_server=True)
    assert len(started) == 3
    assert all(alive(pid) for pid in started)
    parent.kill()
    parent.join()
    wait_until(lambda: not any(alive(pid) for pid in started))


# --- what is refused, before any work ----------------------------------------------------------------------------


@pytest.fixture
def untouched(monkeypatch) -> None:
    """No side runs."""
    monkeypatch.setattr("fp4ep.parity.launch._checked", lambda problem: pytest.fail("work was done"))


ON_GPU = replace(REFERENCE, gpu=True)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("sides", "problems", "how", "error", "says"),
    [
        ([REFERENCE], [SMALL], "threads", ValueError, "how: 'threads' is not one of in_process, spawned, torchrun"),
        ([REFERENCE], [], None, ValueError, "problems must be some of one ep_size, got []"),
        ([REFERENCE], [SMALL, SMALL.over(4)], None, ValueError, "problems must be some of one ep_size, got [2, 4]"),
        ([ON_GPU], [SMALL], None, ValueError, "how: reference wants a process for each of 2 ranks"),
        ([REFERENCE], [SMALL], "torchrun", ValueError, "how: 'torchrun' needs MASTER_ADDR, MASTER_PORT, RANK, WORLD_S"),
        (
            [replace(REFERENCE, missing=lambda: "no luck")],
            [SMALL],
            None,
            UnavailableError,
            "reference cannot run here: no",
        ),
    ],
)
def test_refused(sides, problems, how, error, says, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(error) as raised:
        list(launch_each(sides, problems, how=how))
    assert says in str(raised.value)


@pytest.mark.usefixtures("untouched")
def test_refused_when_processes_and_ranks_differ(monkeypatch):
    """And torchrun is noticed without being named."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="ep_size: 2 ranks need as many processes, torchrun started 3"):
        launch([REFERENCE], SMALL)


@pytest.mark.usefixtures("untouched")
def test_refused_without_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UnavailableError, match="reference cannot run here: no CUDA device"):
        launch([ON_GPU], SMALL, how="spawned")


@pytest.mark.parametrize(
    ("gpus", "devices", "backend", "told"),
    [(2, ["cuda:0", "cuda:1"], "cpu:gloo,cuda:nccl", None), (1, ["cpu", "cpu"], "gloo", "1")],
)
def test_ranks_may_share_a_gpu(monkeypatch, gpus, devices, backend, told):
    """Then NCCL does not do, and FlashInfer is told."""
    monkeypatch.setenv("MEGA_SINGLE_GPU_GLOO", "")  # restored afterwards
    monkeypatch.delenv("MEGA_SINGLE_GPU_GLOO")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", (chosen := []).append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: groups.append(backend))
    monkeypatch.setattr("fp4ep.parity.launch.gather_traces", lambda trace: None)
    groups: list[str] = []
    places: list[Place] = []

    def run(layer, place, progress):
        places.append(place)

    job = launch_module._Job([replace(ON_GPU, run=run)], [SMALL], 1.0)
    for rank in range(2):
        shared = job.shares_gpus(2)
        launch_module._init_group(job, shared)
        list(launch_module._one_rank(job, rank, rank, shared, None))
    assert groups == [backend] * 2
    assert chosen == [rank % gpus for rank in range(2)]
    assert [place.exchange.device for place in places] == devices
    assert os.environ.get("MEGA_SINGLE_GPU_GLOO") == told


@pytest.mark.gpu
@pytest.mark.usefixtures("flashinfer_sm90")
def test_the_kernels_of_two_ranks_equal_the_reference():
    """On two GPUs or sharing one, in processes of their own."""
    problem = rank_sides.PROBLEM
    reference, kernel = launch([REFERENCE, SIDES["flashinfer"]], problem, how="spawned", timeout=120)
    for rank, tensors in kernel.stages("combine").items():
        expected = reference.stages("combine")[rank]["values"]
        assert torch.equal(tensors["values"].view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("how", ["in_process", "spawned"])
def test_arguments_that_do_not_fit(how):
    """The error is that of moe_forward, whatever the ranks run in."""
    layer = SMALL.build()
    wrong = replace(layer.inputs[1], topk_ids=layer.inputs[1].topk_ids + 8)
    with pytest.raises(InputError, match=r"topk_ids \(rank 1\) must be below num_experts = 8"):
        launch([REFERENCE], replace(layer, inputs=(layer.inputs[0], wrong)), how=how)


# --- sides -------------------------------------------------------------------------------------------------------


def test_a_sum_by_rank_is_no_sum_over_other_ranks():
    (path,) = (path for path in shipped_recordings() if path.stem == "h200_two_ranks")
    title = "two ranks, summed by rank, tokens 0 and 64"
    side = find_side(f"recording:{path}#{title} {{'fp8_scale_mode': 'blockwise', 'grouped_token_back': True}}")
    assert side.layer is not None
    assert [len(x.hidden_states) for x in side.layer(2).inputs] == [0, 64]
    with pytest.raises(ValueError, match=f"ep_size: '{title}' was summed by rank, over 2, got 4"):
        side.layer(4)


def test_sides_by_name():
    assert all(find_side(name) is side for name, side in SIDES.items())
    assert {name: side.claim for name, side in SIDES.items()} == {
        "reference": Claim.BITS,
        "fast": Claim.BITS,
        "cuda": Claim.BITS,
        "fake_quant": Claim.FLOAT32,
        "flashinfer": Claim.BITS,
    }
    with pytest.raises(
        ValueError,
        match="side: 'fastest' is not one of reference, fast, cuda, fake_quant, flashinfer, fault:NAME, recording:FILE",
    ):
        find_side("fastest")


def test_flashinfer_says_why_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match="flashinfer cannot run here: no CUDA device"):
        launch([SIDES["flashinfer"]], SMALL)


def test_flashinfer_options():
    """Nothing that FlashInfer's configs do not know, and 2xacc where it is listened to."""
    for scheme in SCHEMES:
        options = flashinfer_options(scheme)
        assert "mma_tiler_k" not in options
        tile = scheme.knobs.get("mma_tiler_k", (128,))[0]
        assert ("mma_tiler_mnk" in options) == (tile == 256)
        if scheme.knobs.get("fp8_accum_mode") == ("2xacc",):
            assert tile == 256 or options["knobs"] == {"fp8_accum_mode": "2xacc"}


def test_a_recording_is_a_side(tmp_path, writer):
    """On its own layer, split over the ranks; its versions, not ours."""
    path = tmp_path / "small.safetensors"
    writer.write(path)
    side = find_side(f"recording:{path}#nvfp4")
    assert side.name == "recording:small#three tokens"
    layer = side.layer(2)
    assert [len(x.hidden_states) for x in layer.inputs] == [1, 2]
    reference, recorded = launch([REFERENCE, side], layer)
    for found, expected in zip(recorded.outputs(), reference.outputs(), strict=True):
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert recorded.source == Recording(path).source
    assert [stage.name for stage in recorded.trace] == ["combine"] * 2


def test_a_recording_must_fit_one_case(tmp_path, writer):
    path = tmp_path / "small.safetensors"
    writer.write(path)
    with pytest.raises(
        ValueError, match=r"match: '' must fit one case of .*, fits 2 of\n  sm90_fp8_nvfp4.*\n  sm90_bf16"
    ):
        find_side(f"recording:{path}")
    with pytest.raises(ValueError, match=r"match: 'chain' must fit one case .* fits 0 of"):
        find_side(f"recording:{path}#chain")


def test_local_experts():
    """The weights of a rank's experts; a scale for all experts goes to every rank."""
    layer = SMALL.build()
    weights = replace(layer.weights, w13_global_scale=torch.ones(1))
    place = rank_sides.Place((1,), 2, lambda rows, to: list(rows))
    mine = local_layer(replace(layer, weights=weights), place).weights
    assert torch.equal(mine.w13, weights.w13[4:])
    assert torch.equal(mine.w2_global_scale, weights.w2_global_scale[4:])
    assert torch.equal(mine.w13_global_scale, weights.w13_global_scale)
    assert mine.w13.untyped_storage().nbytes() == mine.w13.nbytes
