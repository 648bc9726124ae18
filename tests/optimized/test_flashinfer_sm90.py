"""The live kernel against the reference, and what FlashInfer is asked for on each of two ranks.

As a script, started by torchrun: one of two ranks of the live kernel.
"""

import os
import subprocess
import sys
from dataclasses import make_dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fp4ep.optimized.flashinfer_sm90 import launch_megakernel, run_megakernel, stop_runtime
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.schemes import find_scheme
from fp4ep.reference.types import MoEInputs, MoEWeights

NVFP4 = "sm90_fp8_nvfp4_bf16_pull_cutedsl"
PUSH = "sm90_fp8_fp8_bf16_push_cuda"
E, H, I, T, TOP_K = 8, 512, 256, 8, 4  # noqa: E741


def layer(*tokens: int) -> tuple[MoEWeights, list[MoEInputs]]:
    """Weights that the backend quantizes itself, and tokens per rank; one masked slot, one expert named twice."""
    g = torch.Generator().manual_seed(0)
    weights = MoEWeights(*(torch.randn(s, generator=g).bfloat16() / 16 for s in ((E, 2 * I, H), (E, H, I))))
    inputs = []
    for t in tokens:
        ids = torch.rand(t, E, generator=g).argsort(1)[:, :TOP_K].contiguous()
        if t:
            ids[0, 1] = -1
            ids[1, 2] = ids[1, 0]
        inputs.append(MoEInputs(torch.randn(t, H, generator=g).bfloat16(), ids, torch.rand(t, TOP_K, generator=g)))
    return weights, inputs


@pytest.mark.gpu
@pytest.mark.usefixtures("flashinfer_sm90")
def test_nvfp4_equals_the_reference():
    weights, (inputs,) = layer(T)
    found = run_megakernel(NVFP4, {}, weights, inputs, max_tokens_per_rank=T)
    expected, _ = moe_forward(find_scheme(NVFP4), weights, inputs)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.usefixtures("flashinfer_sm90")
def test_two_ranks_equal_the_reference():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device, two needed")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run([*launcher, __file__], timeout=300, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """FlashInfer replaced by a layer that returns zeros and a record of what it was asked for."""
    record = SimpleNamespace(started=0, stopped=0, destroyed=0, launched=[])

    class Layer:
        def __init__(self, **arguments):
            record.layer = arguments

        def __call__(self, tensors):
            record.launched.append(tensors)
            return torch.zeros_like(tensors.hidden_states)

        def destroy(self):
            record.destroyed += 1

    def start(bootstrap, requirements):
        record.started += 1
        return "handle"

    def stop(handle):
        record.stopped += 1

    moe_ep = {
        "MoEEpLayer": Layer,
        "MoEEpTensors": make_dataclass("MoEEpTensors", ("hidden_states", "topk_ids", "topk_weights", "scales")),
        "Sm90_Fp8_Nvfp4_Bf16_PullCutedsl_MegaMoeConfig": SimpleNamespace,
        "Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig": SimpleNamespace,
    }
    plain = ("BootstrapConfig", "FleetParams", "MegaConfig", "MoEWeightPack")
    runtime = {"bootstrap_moe_ep_runtime": start, "finalize_moe_ep_runtime": stop, "NVSHMEM": "", "TORCH_DIST": ""}
    contents: dict[str, dict] = {
        "flashinfer": {},
        "flashinfer.fused_moe": {},
        "flashinfer.fused_moe.prepare": {},
        "flashinfer.moe_ep": moe_ep | dict.fromkeys(plain, SimpleNamespace),
        "flashinfer.moe_ep.core.runtime": runtime,
        "flashinfer.moe_ep.backends.mega.kernel.sm90.fp8_nvfp4_bf16_pull_cutedsl": {"Nvfp4WeightPack": SimpleNamespace},
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent in contents:
            setattr(sys.modules[parent], child, module)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setenv("MEGA_NO_DIST", "")  # restored afterwards
    monkeypatch.delenv("MEGA_NO_DIST")
    return record


@pytest.mark.parametrize("tokens", [T, 0])
def test_a_rank_of_two_brings_its_experts_and_global_ids(asked, tokens):
    weights, (_, mine) = layer(T, tokens)
    scales = {"w13_scale": torch.rand(E, 2), "w2_scale": torch.rand(E, 2)}
    scales |= {"w13_global_scale": torch.rand(E), "w2_global_scale": torch.rand(1)}
    packed = MoEWeights(weights.w13, weights.w2, **scales)
    for _ in range(2):
        outputs = launch_megakernel(NVFP4, {}, packed, mine, max_tokens_per_rank=16, ep_rank=1, ep_size=2)
    assert [output.shape for output in outputs] == [(tokens, H)] * 3
    assert vars(asked.layer["bootstrap"]) == {"world_size": 2, "rank": 1, "device": 1}
    fleet = {"num_experts": E, "max_tokens_per_rank": 16, "token_hidden_size": H}
    assert vars(asked.layer["fleet_params"]) == fleet
    pack = asked.layer["weights"]
    given = {name: tensor for name, tensor in vars(packed).items() if tensor is not None}
    for name, tensor in given.items():
        assert torch.equal(getattr(pack, name), tensor if tensor.numel() == 1 else tensor[E // 2 :])
    assert torch.equal(asked.launched[-1].topk_ids, mine.topk_ids)
    assert os.environ["MEGA_NO_DIST"] == "0"
    assert (asked.started, asked.destroyed) == (1, 2)  # NVSHMEM outlives the layers
    stop_runtime()
    stop_runtime()
    assert asked.stopped == 1


def test_one_rank_needs_no_runtime(asked):
    weights, (inputs,) = layer(T)
    run_megakernel(NVFP4, {}, weights, inputs, max_tokens_per_rank=T, previous_topk_ids=inputs.topk_ids.flip(0))
    assert os.environ["MEGA_NO_DIST"] == "1"
    assert (asked.started, asked.destroyed, len(asked.launched)) == (0, 1, 4)
    assert torch.equal(asked.layer["weights"].w13, weights.w13)
    assert torch.equal(asked.launched[0].topk_ids, inputs.topk_ids.flip(0))


@pytest.mark.parametrize(("name", "dtype"), [(NVFP4, torch.int64), (PUSH, torch.int32)])
def test_ids_are_what_the_kernel_takes(asked, name, dtype):
    weights, (inputs,) = layer(T)
    run_megakernel(name, {}, weights, inputs, max_tokens_per_rank=T, previous_topk_ids=inputs.topk_ids.flip(0))
    assert [tensors.topk_ids.dtype for tensors in asked.launched] == [dtype] * 4
    assert torch.equal(asked.launched[0].topk_ids.long(), inputs.topk_ids.flip(0))
    assert torch.equal(asked.launched[-1].topk_ids.long(), inputs.topk_ids)


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    for tokens in ((5, 3), (0, 8)):
        weights, inputs = layer(*tokens)
        found = run_megakernel(NVFP4, {}, weights, inputs[rank], max_tokens_per_rank=T, ep_rank=rank, ep_size=size)
        expected, _ = moe_forward(find_scheme(NVFP4), weights, inputs)
        assert torch.equal(found.view(torch.int16), expected[rank].view(torch.int16)), f"rank {rank}, tokens {tokens}"
    stop_runtime()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
