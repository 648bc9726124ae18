"""The adapter and the experts class over FlashInfer's SM90 kernels on a GPU, against the reference on the CPU."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from moe_ep_layers import HIDDEN, SM90, bits, label, moe_ep_layer
from moe_ep_ranks import TOKENS

from fp4ep.optimized.config import FusedMoEConfig, FusedMoEQuantConfig, RoutingMethodType
from fp4ep.optimized.eplb import permute_experts, permute_topk_ids
from fp4ep.optimized.experts import FlashInferMoeEpExperts, run_experts
from fp4ep.optimized.flashinfer_moe_ep import FlashInferMoeEp, FlashInferMoeEpEpilogue, FlashInferMoeEpWeights
from fp4ep.optimized.kernel_layouts import KERNEL_LAYOUTS
from fp4ep.parity import Recording, replay_cases
from fp4ep.parity.adapter import rebalance
from fp4ep.parity.corpus_adapter import ORDER, problems
from fp4ep.parity.grid import GEOMETRIES, build
from fp4ep.parity.reference_kernel import canonical_weights, layout_options, prepared_weights
from fp4ep.reference.schemes import find_scheme

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("flashinfer_sm90")]
backends = pytest.mark.parametrize("backend", SM90, ids=label)
NVFP4 = SM90[0]
GPU = "cuda"


@backends
def test_row_14_layouts_are_flashinfers_byte_for_byte(backend):
    layer = moe_ep_layer(*backend, device=GPU)
    adapter = layer.adapter(None)
    request = moe_ep_layer(*backend).adapter(_Keep)._kernel.request
    weights = prepared_weights(layer.layer.scheme, canonical_weights(request))
    expected = KERNEL_LAYOUTS[request.spec.kernel].pack(weights, **layout_options(request))
    found = [*adapter.kernel_weights(), *(adapter.kernel_alphas() or (None, None))]
    for name, tensor, other in zip(vars(expected), found, vars(expected).values(), strict=True):
        assert (tensor is None) == (other is None), name
        if tensor is not None:
            assert tensor.shape == other.shape, name
            assert torch.equal(tensor.cpu().view(torch.uint8), other.view(torch.uint8)), name
    adapter.destroy()


class _Keep:
    supports_output_view = False

    def __init__(self, request):
        self.request = request

    def destroy(self):
        pass


@backends
@pytest.mark.parametrize("tokens", [1, 13, 32])
def test_row_13_equals_the_reference(backend, tokens):
    layer = moe_ep_layer(*backend, tokens=(tokens,), device=GPU)
    adapter = layer.adapter(None)
    adapter.warmup()
    x, ids, weights = layer.inputs()
    assert adapter(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)
    assert torch.equal(bits(adapter(x, ids, weights)), bits(layer.expected()))
    adapter.destroy()


@backends
def test_row_19_experts_permuted_in_place_with_their_ids_leave_every_bit(backend):
    layer = moe_ep_layer(*backend, tokens=TOKENS[1], device=GPU)
    adapter = layer.adapter(None)
    before, after = layer.rebalanced(adapter)
    adapter.destroy()
    assert torch.equal(before, bits(layer.expected()))
    assert torch.equal(after, before)


def test_row_20_a_layer_without_alphas_inherits_none():
    first, second = (moe_ep_layer(*NVFP4, alphas=alphas, device=GPU) for alphas in (True, False))
    adapters = [layer.adapter(None) for layer in (first, second)]
    for _ in range(2):
        for layer, adapter in zip((first, second), adapters, strict=True):
            assert torch.equal(bits(adapter(*layer.inputs())), bits(layer.expected()))
    assert not torch.equal(bits(first.expected()), bits(second.expected()))
    for adapter in adapters:
        adapter.destroy()


@pytest.mark.parametrize("method", [RoutingMethodType.Renormalize, RoutingMethodType.DeepseekV4])
@backends
def test_row_22_a_captured_forward_equals_the_eager_one(backend, method):
    """Captured once with one batch, replayed with others, and after experts changed places."""
    # No masked slots: the bf16 kernel adds what an earlier launch left there.
    layer = moe_ep_layer(*backend, tokens=(20,), routing="uniform", device=GPU)
    layer = type(layer)(**vars(layer) | {"moe": type(layer.moe)(**vars(layer.moe) | {"routing_method": method})})
    adapter = layer.adapter(None)
    adapter.warmup()
    tokens, ids, weights = layer.inputs()
    static = [tokens.clone(), ids.clone(), weights.clone()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        adapter(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = adapter(*static)
    for shift in (0, 7, 3):
        batch = [t.roll(shift, 0) for t in (tokens, ids, weights)]
        for fixed, new in zip(static, batch, strict=True):
            fixed.copy_(new)
        graph.replay()
        replayed = bits(output)
        assert torch.equal(replayed, bits(adapter(*batch)))
        assert torch.equal(replayed, bits(layer.expected()).roll(shift, 0))
    for fixed, new in zip(static, rebalance(adapter, (tokens, ids, weights), ORDER, layer.group), strict=True):
        fixed.copy_(new)
    graph.replay()
    assert torch.equal(bits(output), bits(layer.expected()))
    del graph
    adapter.destroy()


@backends
def test_rows_16_and_18_the_experts_class_and_its_layers_parameters(backend):
    """What EPLB permutes are the layer's parameters; int64 ids and bf16 weights are cast."""
    layer = moe_ep_layer(*backend, tokens=TOKENS[1], device=GPU)
    given = {"w13_weight": layer.weights.w13, "w2_weight": layer.weights.w2}
    given |= {"w13_weight_scale": layer.weights.w13_scale, "w2_weight_scale": layer.weights.w2_scale}
    given |= {"w13_weight_scale_2": layer.epilogue.fc1_alpha, "w2_weight_scale_2": layer.epilogue.fc2_alpha}
    module = torch.nn.Module()
    for name, tensor in given.items():
        if tensor is not None:
            setattr(module, name, torch.nn.Parameter(tensor, requires_grad=False))
    module.expert_map_manager = SimpleNamespace(placement_strategy="linear")
    module.moe_config, module.apply_router_weight_on_input = layer.moe, True
    alphas = (getattr(module, f"{leg}_weight_scale_2", None) for leg in ("w13", "w2"))
    quant = FusedMoEQuantConfig(*alphas)
    experts = FlashInferMoeEpExperts(layer.moe, quant, options=layer.options)
    experts.process_weights_after_loading(module)
    tokens, ids, weights = layer.inputs()
    assert torch.equal(bits(run_experts(experts, tokens, weights, ids.int())), bits(layer.expected()))
    permute_experts([p.data for p in module.parameters()], ORDER)
    moved = permute_topk_ids(ids, ORDER)
    assert torch.equal(bits(run_experts(experts, tokens, weights, moved)), bits(layer.expected()))
    halves = torch.full_like(weights, 0.5)
    as_bf16 = run_experts(experts, tokens, halves.bfloat16(), moved)
    assert torch.equal(bits(as_bf16), bits(run_experts(experts, tokens, halves, moved)))
    experts._adapter.destroy()


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_row_15_grid(geometry):
    """vLLM's construction at its four geometries, in closed form: no reference involved."""
    scheme = find_scheme("sm90_fp8_nvfp4_bf16_pull_cutedsl", gate_up_clamp=None)
    grid = build(geometry, scheme, tokens_per_rank=16, spread=1)
    moe = FusedMoEConfig(
        moe_backend=NVFP4[0],
        num_experts=geometry.num_experts,
        experts_per_token=geometry.top_k,
        hidden_dim=geometry.hidden,
        intermediate_size=geometry.intermediate,
        max_num_tokens=128,
    )
    w = grid.weights
    adapter = FlashInferMoeEp(
        moe,
        FlashInferMoeEpWeights(*map(_on_gpu, (w.w13, w.w2, w.w13_scale, w.w2_scale))),
        FlashInferMoeEpEpilogue(fc1_alpha=_on_gpu(w.w13_global_scale), fc2_alpha=_on_gpu(w.w2_global_scale)),
        apply_topk_in_fc1=True,
    )
    adapter.warmup()
    (inputs,), (expected,) = grid.inputs, grid.expected
    found = adapter(inputs.hidden_states.to(GPU), inputs.topk_ids.to(GPU), inputs.topk_weights.to(GPU))
    adapter.destroy()
    del adapter
    torch.cuda.empty_cache()
    assert expected.count_nonzero() > geometry.top_k
    assert torch.equal(found.cpu(), expected)


def _on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Whole, in memory of its own; what repeats one expert crosses the bus once."""
    if tensor.stride(0) == 0:
        return tensor[:1].to(GPU).expand(tensor.shape).contiguous()
    return tensor.to(GPU)


def test_row_19_experts_move_between_two_gpus(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device, two needed")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [*launcher, "-m", "fp4ep.parity", "record", tmp_path, "--only", "h200_adapter_2"]
    run = subprocess.run(script, timeout=400, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    recording = Recording(tmp_path / "h200_adapter_2.safetensors")
    results = list(replay_cases(recording, recording.cases, lambda case: lambda share: None))
    assert [result.differing for result in results] == [0] * len(problems(2))
