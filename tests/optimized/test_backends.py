"""The backends' names and records, and the two checks that a configuration runs by name."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from fp4ep.optimized.backends import (
    FLASHINFER_MOE_EP_BACKENDS,
    FLASHINFER_MOE_EP_CUTEDSL,
    FLASHINFER_MOE_EP_DEEP_GEMM,
    FLASHINFER_MOE_EP_SM90_BACKENDS,
    bind_passthrough_all2all_backend,
    flashinfer_moe_ep_backend_spec,
    is_flashinfer_moe_ep_backend,
    validate_flashinfer_moe_ep_model,
)
from fp4ep.optimized.config import Deployment, FusedMoEParallelConfig
from fp4ep.optimized.kernel_layouts import KERNEL_LAYOUTS
from fp4ep.reference.schemes import SCHEMES

ALL = sorted(FLASHINFER_MOE_EP_BACKENDS | FLASHINFER_MOE_EP_SM90_BACKENDS)
SM90 = sorted(FLASHINFER_MOE_EP_SM90_BACKENDS)
OTHERS = ("auto", "deep_gemm_mega_moe", "flashinfer_moe_ep_mega_cutedsl", "flashinfer_cutedsl", "")

every_backend = pytest.mark.parametrize("name", ALL)


def test_row_01_vllm_has_two_names():
    assert FLASHINFER_MOE_EP_BACKENDS == {"flashinfer_moe_ep_cutedsl", "flashinfer_moe_ep_mega_deep_gemm"}
    assert SM90 == [f"flashinfer_moe_ep_sm90_{kind}" for kind in ("bf16", "fp8", "mxfp4", "nvfp4")]


def test_row_01_specs_of_vllms_backends():
    cutedsl, deep_gemm = map(flashinfer_moe_ep_backend_spec, (FLASHINFER_MOE_EP_CUTEDSL, FLASHINFER_MOE_EP_DEEP_GEMM))
    assert (cutedsl.kernel, cutedsl.weight_formats) == ("cutedsl", {"nvfp4", "mxfp4"})
    assert (deep_gemm.kernel, deep_gemm.weight_formats) == ("deep_gemm", {"mxfp4"})
    assert cutedsl.capabilities == deep_gemm.capabilities == {(10, 0), (10, 3)}
    assert (cutedsl.late_routing_weights, deep_gemm.late_routing_weights) == (True, False)
    assert (cutedsl.deepseek_v4_only, deep_gemm.deepseek_v4_only) == (False, True)
    assert (cutedsl.eplb, deep_gemm.eplb) == (True, False)
    assert (cutedsl.alphas, deep_gemm.alphas) == ("per forward", "none")
    assert cutedsl.topk_ids_dtype is deep_gemm.topk_ids_dtype is torch.int32


@pytest.mark.parametrize("name", SM90)
def test_row_01_sm90_kernels_weight_routes_before_fc2(name):
    spec = flashinfer_moe_ep_backend_spec(name)
    assert spec.capabilities == {(9, 0)}
    assert spec.topk_ids_dtype is torch.int64
    assert (spec.late_routing_weights, spec.deepseek_v4_only, spec.norm_consts) == (False, False, False)
    assert spec.eplb


@every_backend
def test_row_01_every_backend_has_a_record_a_layout_and_a_known_kernel(name):
    spec = flashinfer_moe_ep_backend_spec(name)
    assert is_flashinfer_moe_ep_backend(name)
    assert spec.kernel in KERNEL_LAYOUTS
    assert spec.kernel == "deep_gemm" or spec.registry_name in {scheme.name for scheme in SCHEMES}
    with pytest.raises(FrozenInstanceError):
        spec.kernel = "other"


@pytest.mark.parametrize("name", OTHERS)
def test_row_01_unknown_names_are_refused_with_the_sorted_list(name):
    assert not is_flashinfer_moe_ep_backend(name)
    with pytest.raises(ValueError, match="is not a FlashInfer MoE-EP backend; expected one of") as error:
        flashinfer_moe_ep_backend_spec(name)
    assert str(error.value) == f"{name!r} is not a FlashInfer MoE-EP backend; expected one of {ALL}"


@pytest.mark.parametrize("model", ["DeepseekV4ForCausalLM", "DeepSeekV4MTPModel", "DeepseekV41ForCausalLM"])
def test_row_07_deep_gemm_runs_deepseek_v4(model):
    validate_flashinfer_moe_ep_model(FLASHINFER_MOE_EP_DEEP_GEMM, ["Other", model])


@pytest.mark.parametrize("models", [[], ["DeepseekV3ForCausalLM"], ["deepseekv4forcausallm"]], ids=str)
def test_row_07_deep_gemm_refuses_other_models_and_lists_both(models):
    with pytest.raises(ValueError, match="only supported for DeepSeek-V4 models") as error:
        validate_flashinfer_moe_ep_model(FLASHINFER_MOE_EP_DEEP_GEMM, iter(models))
    assert str(error.value).endswith(
        f"(['DeepSeekV4MTPModel', 'DeepseekV41ForCausalLM', 'DeepseekV4ForCausalLM']), but the model is {models}."
    )


@pytest.mark.parametrize("name", [*OTHERS, FLASHINFER_MOE_EP_CUTEDSL, *SM90])
def test_row_07_other_backends_run_any_model(name):
    validate_flashinfer_moe_ep_model(name, ["Any"])


@every_backend
@pytest.mark.parametrize("kind", [FusedMoEParallelConfig, Deployment])
def test_row_07_binding_passthrough_is_idempotent(name, kind):
    config = kind()
    for _ in range(2):
        bind_passthrough_all2all_backend(name, config)
        assert config.all2all_backend == "passthrough"


@every_backend
def test_row_07_another_exchange_is_refused_and_left_alone(name):
    config = FusedMoEParallelConfig(all2all_backend="deepep_low_latency")
    with pytest.raises(ValueError, match="cannot be paired with all2all_backend='deepep_low_latency'"):
        bind_passthrough_all2all_backend(name, config)
    assert config.all2all_backend == "deepep_low_latency"


@pytest.mark.parametrize("name", OTHERS)
def test_row_07_other_backends_keep_their_exchange_but_not_passthrough(name):
    config = FusedMoEParallelConfig()
    bind_passthrough_all2all_backend(name, config)
    assert config.all2all_backend == "allgather_reducescatter"
    with pytest.raises(ValueError, match="only valid with a moe_backend that dispatches and combines itself"):
        bind_passthrough_all2all_backend(name, FusedMoEParallelConfig(all2all_backend="passthrough"))
