"""The experts class over the real adapter and the reference kernel: vLLM's surface and decisions."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loaded_layers import BACKENDS, CUTEDSL, SM90_NVFP4, E, H, I, K, Loaded, quant
from moe_ep_layers import bits, label
from torch.nn import Module, Parameter

from fp4ep.optimized.backends import FLASHINFER_MOE_EP_CUTEDSL, flashinfer_moe_ep_backend_spec
from fp4ep.optimized.config import (
    Deployment,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    MoEActivation,
    RoutingMethodType,
    kFp8StaticTensorSym,
    kMxfp4Static,
    kNvfp4Dynamic,
    kNvfp4Static,
)
from fp4ep.optimized.experts import (
    FlashInferMoeEpExperts,
    TopKWeightAndReduceNoOP,
    epilogue_from_quant_config,
    run_experts,
)
from fp4ep.parity.reference_kernel import ReferenceKernel

STANDARD = FusedMoEActivationFormat.Standard
SM100 = Deployment(capability=(10, 0))

backends = pytest.mark.parametrize("backend", BACKENDS, ids=label)
containers = pytest.mark.parametrize("container", [Module, SimpleNamespace])


# Row 12


@pytest.mark.parametrize("wrap", [Parameter, torch.Tensor.clone])
def test_row_12_alphas_are_the_very_tensors(wrap):
    g1, g2 = wrap(torch.rand(E) + 1), wrap(torch.rand(E) + 1)
    epilogue = epilogue_from_quant_config(quant(g1, g2))
    assert epilogue.fc1_alpha is g1
    assert epilogue.fc2_alpha is g2
    assert (epilogue.input_norm_const, epilogue.fc1_norm_const) == (1.0, None)


def test_row_12_mxfp4_has_the_default_epilogue():
    assert epilogue_from_quant_config(quant(None, None)).is_default


@pytest.mark.parametrize("missing", ["g1_alphas", "g2_alphas"])
def test_row_12_one_alpha_without_the_other_is_refused(missing):
    with pytest.raises(ValueError, match=f"{missing} is None but the other is not"):
        epilogue_from_quant_config(replace(quant(torch.ones(E), torch.ones(E)), **{missing: None}))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_row_12_scales_are_checked_g1_first(bad):
    wrong = torch.tensor([1.0, bad])
    for g1, g2, name in ((wrong, wrong, "g1"), (wrong, torch.ones(2), "g1"), (torch.ones(2), wrong, "g2")):
        with pytest.raises(ValueError, match=f"{name}_alphas must contain finite positive scales"):
            epilogue_from_quant_config(quant(g1, g2))


@pytest.mark.parametrize("shape", [(), (E, 2), (E, 1)], ids=str)
def test_row_12_one_scale_per_expert(shape):
    for g1, g2 in ((torch.ones(shape), torch.ones(E)), (torch.ones(E), torch.ones(shape))):
        with pytest.raises(ValueError, match="the megakernel needs one weight global scale per expert"):
            epilogue_from_quant_config(quant(g1, g2))


@pytest.mark.parametrize("given", [torch.ones(E, 2)[:, 0], torch.ones(E, dtype=torch.float64)], ids=["strided", "f64"])
def test_row_12_other_layouts_become_contiguous_float32_copies(given):
    alpha = epilogue_from_quant_config(quant(given, torch.ones(E))).fc1_alpha
    assert alpha.dtype is torch.float32
    assert alpha.is_contiguous()
    assert alpha.data_ptr() != given.data_ptr()


# Row 16: predicates


def config(backend: str = FLASHINFER_MOE_EP_CUTEDSL, **changes: Any) -> FusedMoEConfig:
    sizes = {"num_experts": E, "experts_per_token": K, "hidden_dim": H, "intermediate_size": I, "max_num_tokens": 16}
    return FusedMoEConfig(moe_backend=backend, **sizes | changes)


def supported(moe: Any, weight_key=kNvfp4Static, activation_key=kNvfp4Dynamic, fmt=STANDARD, where=SM100):
    return FlashInferMoeEpExperts.is_supported_config(
        FlashInferMoeEpExperts, moe, weight_key, activation_key, fmt, where
    )


def test_row_16_predicates():
    cls = FlashInferMoeEpExperts
    assert cls.activation_format() is STANDARD
    assert [cls.is_monolithic(), cls._supports_no_act_and_mul(), cls._supports_current_device((9, 0))] == [False] * 3
    assert cls._supports_current_device((10, 3))
    schemes = (kNvfp4Static, kMxfp4Static, kNvfp4Dynamic, kFp8StaticTensorSym, None)
    assert [cls._supports_quant_scheme(key, None) for key in schemes] == [True, True, False, False, False]
    assert [a.value for a in MoEActivation if cls._supports_activation(a)] == ["silu"]
    assert cls._supports_activation("silu")


@pytest.mark.parametrize(("use_ep", "batched", "expected"), [(1, 0, True), (1, 1, False), (0, 0, False), (0, 1, False)])
def test_row_16_parallel_config_truth_table(use_ep, batched, expected):
    parallel = FusedMoEParallelConfig(use_ep=bool(use_ep), use_batched_activation_format=bool(batched))
    assert FlashInferMoeEpExperts._supports_parallel_config(parallel) is expected


def test_row_16_nvfp4_with_expert_parallelism_is_supported_and_without_is_not():
    assert supported(config()) == (True, None)
    without = config(moe_parallel_config=FusedMoEParallelConfig(use_ep=False))
    ok, reason = supported(without)
    assert not ok
    assert reason == f"kernel does not support parallel config {without.moe_parallel_config}"


def test_row_16_the_first_general_check_that_fails_is_the_reason(monkeypatch):
    """Everything is wrong at first; then, one by one in vLLM's order, put right."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    batched = FusedMoEActivationFormat.BatchedExperts
    wrong: dict[str, Any] = {
        "moe": config(
            "flashinfer_moe_ep_mega_deep_gemm",
            activation=MoEActivation.RELU2_NO_MUL,
            moe_parallel_config=FusedMoEParallelConfig(use_ep=False),
            is_lora_enabled=True,
            has_bias=True,
        ),
        "weight_key": kFp8StaticTensorSym,
        "activation_key": None,
        "fmt": batched,
        "where": Deployment(capability=(9, 0), batch_invariant=True, enable_eplb=True),
    }
    expected = []
    steps = (
        ("current device cuda", "where", lambda d: replace(d, capability=(10, 0))),
        ("no act_and_mul MLP layer", "moe", lambda m: replace(m, activation=MoEActivation.GELU)),
        ("MoEActivation.GELU activation", "moe", lambda m: replace(m, activation=MoEActivation.SILU)),
        (f"quantization scheme {kFp8StaticTensorSym}xNone", "weight_key", lambda _: kNvfp4Static),
        (
            f"parallel config {FusedMoEParallelConfig(use_ep=False)}",
            "moe",
            lambda m: replace(m, moe_parallel_config=FusedMoEParallelConfig()),
        ),
        ("('batched_experts',) activation format", "fmt", lambda _: STANDARD),
        ("batch invariance", "where", lambda d: replace(d, batch_invariant=False)),
        ("LoRA", "moe", lambda m: replace(m, is_lora_enabled=False)),
    )
    for reason, name, right in steps:
        expected.append((False, f"kernel does not support {reason}"))
        assert supported(**wrong) == expected[-1]
        wrong[name] = right(wrong[name])
    rest = "NVFP4 weights, A16 activations with NVFP4 weights, expert bias, routing method Unspecified, EPLB"
    assert supported(**wrong) == (False, f"kernel does not support {rest}")


def test_row_16_eplb_is_the_last_suffix():
    moe = config("flashinfer_moe_ep_mega_deep_gemm", routing_method=RoutingMethodType.DeepseekV4, has_bias=True)
    _, reason = supported(moe, kMxfp4Static, None, where=replace(SM100, enable_eplb=True))
    assert reason == "kernel does not support expert bias, EPLB"
    assert supported(replace(moe, has_bias=False), kMxfp4Static, None) == (True, None)


@backends
def test_row_16_sm90_backends_are_supported_by_their_records(backend):
    spec = flashinfer_moe_ep_backend_spec(backend[0])
    keys = {"nvfp4": (kNvfp4Static, kNvfp4Dynamic), "mxfp4": (kMxfp4Static, None), "bf16": (None, None)}
    capability = next(iter(spec.capabilities))
    for kind, (weight_key, activation_key) in keys.items():
        ok, reason = supported(config(backend[0]), weight_key, activation_key, where=Deployment(capability=capability))
        assert ok == (kind in spec.weight_formats), reason
    ok, reason = supported(config(backend[0]), where=Deployment(capability=(8, 0)))
    assert reason is not None
    assert reason.startswith("kernel does not support current device")


def test_row_16_vllms_own_objects_are_taken():
    """Other classes with the same attributes; enums by value."""
    theirs = SimpleNamespace(
        **{name: getattr(config(), name) for name in vars(config())} | {"activation": SimpleNamespace(value="silu")},
        is_act_and_mul=True,
    )
    theirs.routing_method = SimpleNamespace(name="DeepseekV4")
    assert supported(theirs, fmt=SimpleNamespace(value=("standard",))) == (True, None)
    assert supported(theirs, fmt=SimpleNamespace(value=("batched_experts",)))[0] is False


@pytest.mark.parametrize("name", ["max_num_tokens", "num_dispatchers"])
def test_row_16_the_constructor_refuses_batched_arguments(name):
    with pytest.raises(ValueError, match="should only be set for BatchedExperts activation format"):
        FlashInferMoeEpExperts(config(), quant(None, None), **{name: 1})


def test_row_16_workspaces_are_empty_and_the_output_is_tokens_by_hidden():
    experts = FlashInferMoeEpExperts(config(), quant(None, None))
    assert experts.workspace_shapes(16, 256, 256, 2, 8, 8, None, MoEActivation.SILU) == ((0,), (0,), (16, 256))
    assert experts.expects_unquantized_inputs
    assert experts.finalize_weight_and_reduce_impl() == TopKWeightAndReduceNoOP()


# Row 16: processing and applying


@containers
@backends
def test_row_16_a_processed_layer_computes_the_reference(backend, container):
    loaded = Loaded(backend, container).process()
    request = loaded.requests[0]
    assert not request.apply_topk_in_fc1
    if request.spec.late_routing_weights:
        loaded.layer.apply_router_weight_on_input = True  # the expected output weights before fc2
        loaded = rebuilt(loaded)
        assert loaded.requests[-1].apply_topk_in_fc1
    assert torch.equal(bits(loaded.run()), bits(loaded.made.expected()))


def rebuilt(loaded: Loaded) -> Loaded:
    """The same layer, loaded again."""
    again = Loaded(loaded.backend, loaded.container)
    again.layer.apply_router_weight_on_input = loaded.layer.apply_router_weight_on_input
    return again.process()


def test_row_16_apply_takes_vllms_fifteen_arguments_and_ignores_most():
    loaded = Loaded(SM90_NVFP4).process()
    hidden_states, topk_ids, topk_weights = loaded.made.inputs()
    output, junk = torch.empty_like(hidden_states), torch.full((3,), float("nan"))
    result = loaded.experts.apply(
        output, hidden_states, junk, junk, topk_weights, topk_ids, MoEActivation.GELU, -1, junk, junk, junk, junk, junk,
        junk, True,
    )  # fmt: skip
    assert result is None
    assert torch.equal(bits(output), bits(loaded.run()))


@pytest.mark.parametrize("ids", [torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", [CUTEDSL, SM90_NVFP4], ids=label)
def test_row_16_ids_take_the_kernels_dtype_and_weights_float32(backend, weights, ids):
    loaded = Loaded(backend).process()
    hidden_states, topk_ids, topk_weights = loaded.made.inputs()
    topk_weights = topk_weights.bfloat16().float()  # exact in all three
    expected = run_experts(loaded.experts, hidden_states, topk_weights, topk_ids)
    assert torch.equal(run_experts(loaded.experts, hidden_states, topk_weights.to(weights), topk_ids.to(ids)), expected)
    with pytest.raises(ValueError, match=r"topk_(ids|weights) must be"):  # what the casts are for
        loaded.experts._adapter(hidden_states, topk_ids.to(ids), topk_weights.to(weights))


def test_row_16_unprocessed_experts_raise():
    with pytest.raises(RuntimeError, match="FlashInfer MoE-EP weights have not been processed"):
        Loaded(SM90_NVFP4).run()


def test_row_16_weights_are_processed_once():
    loaded = Loaded(SM90_NVFP4).process()
    with pytest.raises(RuntimeError, match="have been processed, and are in the kernel's layout"):
        loaded.process()


def test_row_16_placement_is_checked_before_anything_is_built():
    loaded = Loaded(SM90_NVFP4)
    loaded.layer.expert_map_manager.placement_strategy = "round_robin"
    with pytest.raises(ValueError, match="flashinfer_moe_ep_sm90_nvfp4 requires contiguous linear expert placement"):
        loaded.process()
    assert loaded.requests == []


@pytest.mark.parametrize("step", ["warmup", "state"])
def test_row_16_a_failure_leaves_the_experts_unprocessed(step, monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    loaded = Loaded(SM90_NVFP4)
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceKernel, step, fail)
        with pytest.raises(RuntimeError, match="planted"):
            loaded.process()
    with pytest.raises(RuntimeError, match="have not been processed"):
        loaded.run()
    loaded.process()  # and nothing of the layer was touched


def test_row_16_the_group_and_the_options_reach_the_kernel():
    loaded = Loaded(("flashinfer_moe_ep_sm90_nvfp4", {"nvfp4_kperm": 32})).process()
    assert loaded.requests[0].options == {"nvfp4_kperm": 32}
    group = SimpleNamespace(world_size=1, rank_in_group=0, device_group="theirs")
    again = Loaded(SM90_NVFP4, changes={"ep_group": group}).process()
    assert again.requests[0].ep_group is group


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("routing", [RoutingMethodType.Renormalize, RoutingMethodType.DeepseekV4])
def test_row_08_the_flag_reaches_the_kernel(routing, on_input):
    loaded = Loaded(SM90_NVFP4)
    loaded.made = replace(loaded.made, moe=replace(loaded.made.moe, routing_method=routing))
    loaded.layer.apply_router_weight_on_input = on_input
    loaded.experts = loaded.new()
    loaded.process()
    assert loaded.requests[0].apply_topk_in_fc1 is (on_input or routing is RoutingMethodType.DeepseekV4)
