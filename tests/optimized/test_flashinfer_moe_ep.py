"""The adapter over the reference: its surface, its state, and that what is written there takes effect."""

import gc
import warnings
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from moe_ep_layers import CAPACITY, EXPERTS, HIDDEN, SM90, TOP_K, MoeEpLayer, bits, label, moe_ep_layer
from moe_ep_ranks import TOKENS, gloo_rank

from fp4ep.optimized.config import EpGroup, RoutingMethodType
from fp4ep.optimized.eplb import permute_experts
from fp4ep.optimized.flashinfer_moe_ep import FlashInferMoeEp, FlashInferMoeEpEpilogue, FlashInferMoeEpWeights
from fp4ep.optimized.mega_kernel import KernelRequest
from fp4ep.parity.processes import rank_processes
from fp4ep.parity.reference_kernel import ReferenceKernel
from fp4ep.reference.moe import moe_forward

SM100 = ("flashinfer_moe_ep_cutedsl", {})
#: With a reference.
BACKENDS = (*SM90, SM100)
NVFP4 = "flashinfer_moe_ep_sm90_nvfp4"

backends = pytest.mark.parametrize("backend", BACKENDS, ids=label)


class FakeKernel:
    """Records what is asked of it; returns zeros."""

    def __init__(self, request: KernelRequest) -> None:
        self.request = request
        self.supports_output_view = True
        self.calls: list[tuple] = []
        self.destroyed = 0

    def forward(self, hidden_states, topk_ids, topk_weights, vectors, *, view):
        self.calls.append(("forward", hidden_states, topk_ids, topk_weights, vectors, view))
        return torch.zeros_like(hidden_states)

    def warmup(self, hidden_states, topk_ids, topk_weights, vectors):
        assert not torch.is_grad_enabled()
        self.calls.append(("warmup", hidden_states, topk_ids, topk_weights, vectors))

    def state(self):
        raise AssertionError("not asked for")

    def destroy(self):
        self.destroyed += 1


@pytest.fixture
def fake() -> tuple[FlashInferMoeEp, FakeKernel]:
    kernels = []
    adapter = moe_ep_layer(NVFP4).adapter(lambda request: kernels.append(FakeKernel(request)) or kernels[0])
    return adapter, kernels[0]


def test_row_05_weights_and_epilogue_have_vllms_defaults():
    w13, w2 = torch.empty(1), torch.empty(1)
    weights = FlashInferMoeEpWeights(w13, w2)
    assert (weights.w13, weights.w2, weights.w13_scale, weights.w2_scale) == (w13, w2, None, None)
    epilogue = FlashInferMoeEpEpilogue()
    assert vars(epilogue) == {
        "input_norm_const": 1.0,
        "fc1_alpha": None,
        "fc2_alpha": None,
        "fc1_norm_const": None,
    }
    assert epilogue.is_default
    assert not FlashInferMoeEpEpilogue(fc2_alpha=torch.ones(1)).is_default
    assert not FlashInferMoeEpEpilogue(input_norm_const=2.0).is_default


def test_row_13_properties(fake):
    adapter, _ = fake
    assert adapter.can_overlap_shared_experts is False
    assert adapter.output_is_reduced is True
    assert adapter.topk_indices_dtype is torch.int64  # SM90
    assert moe_ep_layer(*SM100).adapter(FakeKernel).topk_indices_dtype is torch.int32
    assert adapter.is_monolithic is False


def test_row_13_warmup_is_one_zero_row_that_reaches_every_rank(fake):
    adapter, kernel = fake
    adapter.warmup()
    ((name, tokens, ids, weights, _),) = kernel.calls
    assert name == "warmup"
    assert tokens.shape == (1, HIDDEN)
    assert tokens.dtype is torch.bfloat16
    assert not tokens.any()
    assert ids.dtype is torch.int64
    assert ids.tolist() == [[0, EXPERTS // TOP_K]]
    assert weights.dtype is torch.float32
    assert weights.tolist() == [[1 / TOP_K] * TOP_K]


def test_row_13_zero_rows_launch(fake):
    adapter, kernel = fake
    tokens, ids, weights = (t[:0] for t in moe_ep_layer(NVFP4).inputs())
    assert adapter(tokens, ids, weights).shape == (0, HIDDEN)
    assert len(kernel.calls) == 1


def test_row_13_capacity_and_destroyed(fake):
    adapter, kernel = fake
    too_many = CAPACITY + 1
    tokens = torch.zeros(too_many, HIDDEN, dtype=torch.bfloat16)
    ids, weights = torch.zeros(too_many, TOP_K, dtype=torch.int64), torch.zeros(too_many, TOP_K)
    with pytest.raises(ValueError, match=f"got {too_many} tokens, but the workspace supports at most {CAPACITY}"):
        adapter(tokens, ids, weights)
    adapter.destroy()
    adapter.destroy()
    assert kernel.destroyed == 1
    for use in (lambda: adapter(tokens[:1], ids[:1], weights[:1]), adapter.kernel_weights, adapter.expert_weight_views):
        with pytest.raises(RuntimeError, match="was destroyed"):
            use()
    adapter.warmup()  # nothing
    assert kernel.calls == []


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("topk_ids", lambda x, i, w: (x, i.int(), w)),
        ("topk_weights", lambda x, i, w: (x, i, w.bfloat16())),
        ("hidden_states", lambda x, i, w: (x.float(), i, w)),
        ("hidden_states", lambda x, i, w: (x[:, 1:], i, w)),
        ("topk_ids", lambda x, i, w: (x, i[1:], w)),
        ("topk_weights", lambda x, i, w: (x, i, w[:, 1:])),
    ],
)
def test_row_20_signature_is_checked_before_a_launch(fake, argument, change):
    adapter, kernel = fake
    with pytest.raises(ValueError, match=f"^{argument} must be torch"):
        adapter(*change(*moe_ep_layer(NVFP4).inputs()))
    assert kernel.calls == []


@pytest.mark.parametrize("method", list(RoutingMethodType))
def test_row_13_only_deepseek_v4_borrows_the_workspace(method):
    layer = moe_ep_layer(NVFP4)
    kernels = []
    adapter = replace(layer, moe=replace(layer.moe, routing_method=method)).adapter(
        lambda request: kernels.append(FakeKernel(request)) or kernels[0]
    )
    adapter(*layer.inputs())
    assert kernels[0].calls[0][-1] is (method is RoutingMethodType.DeepseekV4)


@backends
def test_row_14_the_state_has_vllms_order_and_is_what_the_kernel_reads(backend):
    layer = moe_ep_layer(*backend)
    adapter = layer.adapter(ReferenceKernel)
    inputs = layer.inputs()
    assert torch.equal(bits(adapter(*inputs)), bits(layer.expected()))
    fc1, fc1_scale, fc2, fc2_scale = adapter.kernel_weights()
    assert fc1.shape[:2] == (EXPERTS, 2 * layer.moe.intermediate_size)
    assert fc2.shape[:2] == (EXPERTS, HIDDEN)
    views = adapter.expert_weight_views()
    scales = [t for t in (fc1_scale, fc2_scale) if t is not None]
    assert len(views) == 2 + len(scales) + len(adapter.kernel_alphas() or layer.epilogue.vectors)
    for view in views:
        assert view.is_contiguous()
        assert len(view) == EXPERTS
    for name, view in zip(("fc1", "fc2"), (fc1, fc2), strict=True):
        kept = view.clone()
        view.zero_()
        zeroed = adapter(*inputs)
        assert not zeroed.any(), name
        view.copy_(kept)
    assert torch.equal(bits(adapter(*inputs)), bits(layer.expected()))


@backends
def test_row_19_experts_permuted_in_place_with_their_ids_leave_every_bit(backend):
    layer = moe_ep_layer(*backend, tokens=TOKENS[1])
    before, after = layer.rebalanced(layer.adapter(ReferenceKernel))
    assert torch.equal(before, bits(layer.expected()))
    assert torch.equal(after, before)


@backends
def test_row_19_every_view_counts(backend):
    """One view left out of the move shows: the test above is not blind."""
    layer = moe_ep_layer(*backend, tokens=TOKENS[1])
    adapter = layer.adapter(ReferenceKernel)
    tokens, ids, weights = layer.inputs()
    before = adapter(tokens, ids, weights)
    moved = torch.where((ids == 0) | (ids == 1), 1 - ids, ids)
    views = adapter.expert_weight_views()
    unchanged = []
    for i in range(len(views)):
        others = views[:i] + views[i + 1 :]
        permute_experts(others, [1, 0, *range(2, EXPERTS)])
        unchanged.append(torch.equal(bits(adapter(tokens, moved, weights)), bits(before)))
        permute_experts(others, [1, 0, *range(2, EXPERTS)])
    # Alike for both experts: FP8's scale planes per tensor, which nothing reads, and here MXFP4's factors.
    assert unchanged == [torch.equal(view[0], view[1]) for view in views]
    assert not all(unchanged)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[-1]], ids=label)
def test_row_19_experts_move_between_ranks(backend, size, tmp_path):
    with rank_processes(gloo_rank, size, (backend, size), 60) as messages:
        found = {rank: outputs for rank, *outputs in messages}
    for rank in range(size):
        layer = moe_ep_layer(*backend, tokens=TOKENS[size], group=EpGroup(size, rank))
        expected = bits(layer.expected())
        for outputs in found[rank]:
            assert torch.equal(outputs, expected)


@pytest.mark.parametrize("order", [range(7), [0] * 7 + [8], [-1, *range(7)]])
def test_row_19_an_order_that_does_not_fit_moves_nothing(order):
    view = torch.arange(8.0)
    with pytest.raises(ValueError, match="order must hold 8"):
        permute_experts([view], list(order))
    with pytest.raises(ValueError, match="views must have 8"):
        permute_experts([view, torch.zeros(4)], list(range(8)))
    assert view.tolist() == list(range(8))


def test_row_19_replicas():
    view = torch.arange(4.0)
    permute_experts([view], [3, 3, 0, 1])
    assert view.tolist() == [3, 3, 0, 1]


def _with(layer: MoeEpLayer, **vectors: torch.Tensor | None) -> MoeEpLayer:
    return replace(layer, epilogue=replace(layer.epilogue, **vectors))


def test_row_20_a_layer_without_alphas_inherits_none():
    """Both layers share a workspace, as FlashInfer pools them; the kernel alone, given None, takes the other's."""
    first = moe_ep_layer(*SM100)
    second = _with(first, fc1_alpha=None, fc2_alpha=None)
    ones = {name: None for name in ("w13_global_scale", "w2_global_scale")}
    inputs = first.layer.inputs[0]
    expected, _ = moe_forward(first.layer.scheme, replace(first.layer.weights, **ones), inputs)
    shared = {}
    first_adapter, second_adapter = (
        x.adapter(lambda r: ReferenceKernel(r, workspaces=shared)) for x in (first, second)
    )
    assert torch.equal(bits(first_adapter(*first.inputs())), bits(first.expected()))
    assert torch.equal(bits(second_adapter(*second.inputs())), bits(expected))
    first_adapter(*first.inputs())
    inherited = second_adapter._kernel.forward(*second.inputs(), {}, view=False)
    assert torch.equal(bits(inherited), bits(first.expected()))
    assert not torch.equal(bits(inherited), bits(expected))


def test_row_20_alphas_are_read_at_every_call():
    layer = moe_ep_layer(*SM100)
    adapter = layer.adapter(ReferenceKernel)
    alpha = layer.epilogue.fc2_alpha
    before = adapter(*layer.inputs()).float()
    alpha *= 2
    assert torch.equal(adapter(*layer.inputs()).float(), 2 * before)
    assert [v.data_ptr() for v in adapter.expert_weight_views()[-2:]] == [
        layer.epilogue.fc1_alpha.data_ptr(),
        alpha.data_ptr(),
    ]


def test_row_22_capture_before_warmup_is_refused(fake, monkeypatch):
    adapter, kernel = fake
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"captured before warmup\(\)"):
        adapter(*moe_ep_layer(NVFP4).inputs())
    assert kernel.calls == []
    adapter.warmup()
    adapter(*moe_ep_layer(NVFP4).inputs())


def test_row_22_garbage_ends_a_single_rank_only():
    layer = moe_ep_layer(NVFP4)
    kernels: list[FakeKernel] = []

    def build(request: KernelRequest) -> FakeKernel:
        kernels.append(FakeKernel(request))
        return kernels[-1]

    layer.adapter(build)
    gc.collect()
    several = replace(layer, group=EpGroup(2, 0), moe=replace(layer.moe, num_experts=2 * EXPERTS))
    adapters = [several.adapter(build)]
    with pytest.warns(ResourceWarning, match="destroy"):
        adapters.clear()
    assert [kernel.destroyed for kernel in kernels] == [1, 0]


def _changed(layer: MoeEpLayer, **changes) -> MoeEpLayer:
    moe = {name: value for name, value in changes.items() if hasattr(layer.moe, name)}
    weights = {name: value for name, value in changes.items() if hasattr(layer.weights, name)}
    epilogue = {name: value for name, value in changes.items() if hasattr(layer.epilogue, name)}
    return replace(
        layer,
        moe=replace(layer.moe, **moe),
        weights=replace(layer.weights, **weights),
        epilogue=replace(layer.epilogue, **epilogue),
    )


E8 = torch.ones(EXPERTS)


@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        (NVFP4, {"moe_backend": "flashinfer_moe_ep"}, "is not a FlashInfer MoE-EP backend; expected one of"),
        (NVFP4, {"experts_per_token": 9}, "experts_per_token must be 1 to num_experts 8, got 9"),
        (NVFP4, {"hidden_dim": 192}, "hidden_dim must be a multiple of 128"),
        (NVFP4, {"intermediate_size": 192}, "intermediate_size must be a multiple of 128"),
        (NVFP4, {"num_experts": 16}, r"w13 must have shape \(16, 256, 128\)"),
        (
            NVFP4,
            {"w2": torch.zeros(8, 256, 128, dtype=torch.uint8)},
            r"w2 must have shape \(8, 256, 64\) for quantized",
        ),
        (NVFP4, {"w2_scale": None}, "w13_scale and w2_scale must be given both or neither"),
        (NVFP4, {"w13_scale": None, "w2_scale": None}, "w13 must have shape .* for weights without scales"),
        (NVFP4, {"w2_scale": torch.zeros(8, 128, 8)}, r"w2_scale must have shape \(8, 256"),
        (NVFP4, {"fc1_alpha": E8[:4]}, r"fc1_alpha must be float32 of shape \(8,\), one per local expert"),
        (NVFP4, {"fc2_alpha": E8.double()}, r"fc2_alpha must be float32 of shape \(8,\)"),
        (NVFP4, {"fc2_alpha": E8 * torch.nan}, "fc2_alpha must contain finite positive scales"),
        (NVFP4, {"fc1_norm_const": E8}, "fc1_norm_const must be None"),
        (NVFP4, {"input_norm_const": 2.0}, "input_norm_const must be 1"),
        ("flashinfer_moe_ep_sm90_mxfp4", {"fc1_alpha": E8}, "fc1_alpha must be None"),
        ("flashinfer_moe_ep_sm90_bf16", {"fc2_alpha": E8}, "fc2_alpha must be None"),
    ],
)
def test_row_22_what_does_not_fit_is_refused_before_a_kernel_is_built(backend, changes, message):
    layer = _changed(moe_ep_layer(backend), **changes)
    with pytest.raises(ValueError, match=message):
        layer.adapter(lambda request: pytest.fail("built"))


def test_row_22_ranks_must_divide_the_experts():
    layer = replace(moe_ep_layer(NVFP4), group=EpGroup(3, 0))
    with pytest.raises(ValueError, match="num_experts must be a multiple of the EP size 3, got 8"):
        layer.adapter(lambda request: pytest.fail("built"))


def test_row_22_without_a_gpu_flashinfer_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        moe_ep_layer(NVFP4).adapter(None)


def test_a_backend_without_a_scheme_is_refused_by_the_reference():
    layer = moe_ep_layer("flashinfer_moe_ep_sm90_mxfp4")
    layer = replace(layer, moe=replace(layer.moe, moe_backend="flashinfer_moe_ep_mega_deep_gemm"))
    with pytest.raises(ValueError, match=r"no reference for flashinfer_moe_ep_mega_deep_gemm .* there is sm100"):
        layer.adapter(ReferenceKernel)


def test_no_warning_without_cause():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = moe_ep_layer(NVFP4)
        adapter = layer.adapter(ReferenceKernel)
        adapter.warmup()
        adapter(*layer.inputs())
        adapter.destroy()
        del adapter
        gc.collect()


def _options() -> Mapping[str, int]:
    return {"nvfp4_kperm": 16}


def test_options_reach_the_kernel():
    with pytest.raises(ValueError, match="nvfp4_kperm: 16 is not one of"):
        replace(moe_ep_layer(NVFP4), options=_options()).adapter(ReferenceKernel)
