"""What is refused, why and in which order; the small decisions before a kernel is built."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fp4ep.optimized.backends import (
    FLASHINFER_MOE_EP_BACKENDS,
    FLASHINFER_MOE_EP_CUTEDSL,
    FLASHINFER_MOE_EP_DEEP_GEMM,
    FLASHINFER_MOE_EP_SM90_BACKENDS,
    flashinfer_moe_ep_backend_spec,
)
from fp4ep.optimized.config import (
    Deployment,
    FusedMoEConfig,
    RoutingMethodType,
    kFp8StaticTensorSym,
    kMxfp4Static,
    kNvfp4Dynamic,
    kNvfp4Static,
)
from fp4ep.optimized.support import (
    apply_topk_in_fc1,
    flashinfer_moe_ep_unsupported_reasons,
    is_deepseek_v4,
    require_finite_positive_scales,
    supports_current_device,
    validate_flashinfer_moe_ep_layer,
)

V4 = RoutingMethodType.DeepseekV4
KEYS = {"nvfp4": (kNvfp4Static, kNvfp4Dynamic), "mxfp4": (kMxfp4Static, None), "bf16": (None, None)}
ALL = sorted(FLASHINFER_MOE_EP_BACKENDS | FLASHINFER_MOE_EP_SM90_BACKENDS)
SM90 = sorted(FLASHINFER_MOE_EP_SM90_BACKENDS)


def config(backend: str, **changes) -> FusedMoEConfig:
    sizes = {"num_experts": 8, "experts_per_token": 2, "hidden_dim": 256, "intermediate_size": 128}
    return FusedMoEConfig(moe_backend=backend, max_num_tokens=16, **{"routing_method": V4} | sizes | changes)


def keys_of(backend: str) -> tuple:
    formats = flashinfer_moe_ep_backend_spec(backend).weight_formats
    return next(keys for kind, keys in KEYS.items() if kind in formats)


EVERYTHING = {
    "skip_final_all_reduce": True,
    "in_dtype": torch.float16,
    "has_bias": True,
    "swiglu_alpha": 1.702,
    "routing_method": RoutingMethodType.Renormalize,
}
EVERYWHERE = Deployment(weight_transfer=True, enable_dbo=True, enable_eplb=True)
COMMON = ("skip_final_all_reduce", "activation dtype torch.float16", "expert bias", "custom SwiGLU alpha or beta")
RUNTIME = ("runtime weight transfer", "dual batch overlap")


def test_row_06_reasons_come_in_vllms_order():
    moe = config(FLASHINFER_MOE_EP_DEEP_GEMM, **EVERYTHING)
    reasons = flashinfer_moe_ep_unsupported_reasons(moe, kNvfp4Static, None, EVERYWHERE)
    a16 = "A16 activations with NVFP4 weights"
    assert reasons == ("NVFP4 weights", a16, *COMMON, "routing method Renormalize", *RUNTIME, "EPLB")
    other = flashinfer_moe_ep_unsupported_reasons(moe, kFp8StaticTensorSym, None, EVERYWHERE)
    assert other == (f"weight scheme {kFp8StaticTensorSym}", *COMMON, "routing method Renormalize", *RUNTIME, "EPLB")


@pytest.mark.parametrize("backend", [FLASHINFER_MOE_EP_CUTEDSL, *SM90])
def test_row_06_eplb_and_routing_are_reasons_for_deep_gemm_only(backend):
    moe = config(backend, **EVERYTHING)
    assert flashinfer_moe_ep_unsupported_reasons(moe, *keys_of(backend), EVERYWHERE) == (*COMMON, *RUNTIME)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("kind", KEYS)
def test_row_06_weight_formats_are_those_of_the_record(backend, kind):
    spec = flashinfer_moe_ep_backend_spec(backend)
    reasons = flashinfer_moe_ep_unsupported_reasons(config(backend), *KEYS[kind])
    if kind in spec.weight_formats:
        assert reasons == ()
    elif kind == "bf16" and backend in FLASHINFER_MOE_EP_BACKENDS:
        assert reasons == ("weight scheme None",)  # vLLM's text: it has no such format
    else:
        assert reasons == (f"{kind.upper()} weights",)


@pytest.mark.parametrize("backend", SM90)
def test_row_06_sm90_kernels_load_no_fp8_checkpoints(backend):
    reasons = flashinfer_moe_ep_unsupported_reasons(config(backend), kFp8StaticTensorSym, None)
    assert reasons == ("FP8 weights",)


@pytest.mark.parametrize("activation_key", [kNvfp4Dynamic, kFp8StaticTensorSym])
def test_row_06_any_activation_key_passes_with_nvfp4_but_none(activation_key):
    moe = config(FLASHINFER_MOE_EP_CUTEDSL)
    assert flashinfer_moe_ep_unsupported_reasons(moe, kNvfp4Static, activation_key) == ()
    a16 = flashinfer_moe_ep_unsupported_reasons(moe, kNvfp4Static, None)
    assert a16 == ("A16 activations with NVFP4 weights",)


@pytest.mark.parametrize("change", [{"swiglu_alpha": 1.0}, {"swiglu_beta": 0.0}], ids=str)
def test_row_06_either_swiglu_constant_is_a_reason_but_not_the_limit(change):
    moe = config(FLASHINFER_MOE_EP_CUTEDSL, swiglu_limit=7.0)
    assert flashinfer_moe_ep_unsupported_reasons(moe, *KEYS["mxfp4"]) == ()
    reasons = flashinfer_moe_ep_unsupported_reasons(replace(moe, **change), *KEYS["mxfp4"])
    assert reasons == ("custom SwiGLU alpha or beta",)


@pytest.mark.parametrize(
    ("deployment", "reason"),
    [
        (Deployment(weight_transfer=True), "runtime weight transfer"),
        (Deployment(enable_dbo=True), "dual batch overlap"),
        (Deployment(enable_eplb=True), "EPLB"),
    ],
    ids=str,
)
def test_row_04_a_deployment_replaces_the_global_configuration(deployment, reason):
    moe = config(FLASHINFER_MOE_EP_DEEP_GEMM)
    assert flashinfer_moe_ep_unsupported_reasons(moe, *KEYS["mxfp4"]) == ()
    assert flashinfer_moe_ep_unsupported_reasons(moe, *KEYS["mxfp4"], deployment) == (reason,)


def test_row_06_an_unknown_backend_raises_before_anything_is_collected():
    with pytest.raises(ValueError, match="'auto' is not a FlashInfer MoE-EP backend"):
        flashinfer_moe_ep_unsupported_reasons(SimpleNamespace(moe_backend="auto"), None, None)


def layer(placement: str) -> SimpleNamespace:
    return SimpleNamespace(
        expert_map_manager=SimpleNamespace(placement_strategy=placement), moe_config=SimpleNamespace(moe_backend="name")
    )


def test_row_07_only_linear_placement_passes():
    validate_flashinfer_moe_ep_layer(layer("linear"))
    with pytest.raises(ValueError, match="name requires contiguous linear expert placement"):
        validate_flashinfer_moe_ep_layer(layer("round_robin"))


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("routing", RoutingMethodType)
def test_row_08_routing_weights_go_before_fc2_for_deepseek_v4_or_on_request(routing, on_input):
    for method in (routing, int(routing), routing.name):
        moe = SimpleNamespace(routing_method=method)
        assert is_deepseek_v4(method) == (routing == 100)
        assert apply_topk_in_fc1(moe, apply_router_weight_on_input=on_input) is (on_input or routing == 100)
        assert apply_topk_in_fc1(moe) is (routing == 100)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.0])
@pytest.mark.parametrize("place", [0, 3])
def test_row_09_scales_must_be_finite_and_positive(value, place):
    scales = torch.ones(4)
    scales[place] = value
    with pytest.raises(ValueError, match=r"^any_name must contain finite positive scales$"):
        require_finite_positive_scales("any_name", scales)


def test_row_09_the_least_and_the_largest_scales_pass():
    require_finite_positive_scales("name", torch.tensor([2.0**-149, 3.4028234663852886e38]))
    require_finite_positive_scales("name", torch.empty(0))


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((10, 0), True), ((10, 3), True), ((9, 0), False), ((10, 1), False), ((12, 0), False)],
)
def test_row_16_devices_are_sm100_and_sm103(capability, expected):
    assert supports_current_device(capability) is expected
    assert supports_current_device(capability, frozenset({(9, 0)})) is (capability == (9, 0))


@pytest.mark.parametrize(
    ("available", "cuda", "expected"), [(False, None, False), (True, "13.0", True), (True, None, False)]
)
def test_row_16_without_a_capability_the_current_device_counts(monkeypatch, available, cuda, expected):
    """ROCm has capabilities of its own numbering."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert supports_current_device() is expected
