"""What a processed layer holds is what the kernel reads, so that experts permuted in place stay whole."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loaded_layers import BACKENDS, CUTEDSL, SM90_NVFP4, Loaded, as_mxfp4_in_bf16, parameter, quant
from moe_ep_layers import SM90, bits, label
from torch.nn import Module, Parameter

from fp4ep.optimized import experts as experts_module
from fp4ep.optimized.config import Deployment
from fp4ep.optimized.experts import KERNEL_ALPHA_NAMES, KERNEL_WEIGHT_NAMES
from fp4ep.optimized.mega_kernel import KernelRequest
from fp4ep.parity.reference_kernel import ReferenceKernel

pytestmark = pytest.mark.usefixtures("quick_gemms")

backends = pytest.mark.parametrize("backend", BACKENDS, ids=label)
containers = pytest.mark.parametrize("container", [Module, SimpleNamespace])


# Row 18: what the layer holds is what the kernel reads


@containers
@backends
def test_row_18_parameters_become_the_kernels_memory(backend, container):
    loaded = Loaded(backend, container)
    before = loaded.parameters()
    for tensor in before.values():
        tensor.weight_loader = "theirs"
    state = loaded.process().experts._adapter.kernel_weights()
    for name, tensor in zip(KERNEL_WEIGHT_NAMES, state, strict=True):
        if tensor is None:
            assert getattr(loaded.layer, name) is None
            continue
        held = getattr(loaded.layer, name)
        assert isinstance(held, Parameter)
        assert (held.data_ptr(), held.shape, held.dtype) == (tensor.data_ptr(), tensor.shape, tensor.dtype)
        if name in before:
            assert held is before[name]  # the same object, so that its loader and whoever holds it follow
            assert held.weight_loader == "theirs"


@containers
@pytest.mark.parametrize("missing", [False, True])
def test_row_18_scales_that_are_none_or_missing_are_registered(missing, container):
    loaded = as_mxfp4_in_bf16(Loaded(CUTEDSL, container), missing).process()
    for name, tensor in zip(KERNEL_WEIGHT_NAMES, loaded.experts._adapter.kernel_weights(), strict=True):
        assert loaded.parameters()[name].data_ptr() == tensor.data_ptr()
        assert not loaded.parameters()[name].requires_grad
    # Alphas are not registered: the layer has none, and the kernel stages ones.
    assert not set(KERNEL_ALPHA_NAMES) & set(loaded.parameters())


def test_row_18_a_parameter_that_wants_a_gradient_can_be_rebound():
    layer = SimpleNamespace(name=Parameter(torch.ones(2)))
    experts_module.rebind_parameter(layer, "name", torch.zeros(3, dtype=torch.uint8))
    assert layer.name.dtype is torch.uint8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_row_12_alphas_of_the_layer_are_what_the_kernel_reads(dtype):
    loaded = Loaded(CUTEDSL)
    for name in KERNEL_ALPHA_NAMES:
        setattr(loaded.layer, name, parameter(getattr(loaded.layer, name).to(dtype)))
    loaded.quant = quant(loaded.layer.w13_weight_scale_2, loaded.layer.w2_weight_scale_2)
    loaded.experts = loaded.new()
    with warnings.catch_warnings(action="error"):
        loaded.process()
    staged = loaded.requests[0].epilogue
    for alpha, name in zip((staged.fc1_alpha, staged.fc2_alpha), KERNEL_ALPHA_NAMES, strict=True):
        assert alpha.data_ptr() == getattr(loaded.layer, name).data_ptr()
        assert (alpha is getattr(loaded.layer, name)) is (dtype is torch.float32)


def test_row_12_alphas_under_another_name_are_permuted_once():
    """The kernel's vectors are the layer's parameters already; a second name for them would permute them twice."""
    loaded = Loaded(CUTEDSL)
    for name in KERNEL_ALPHA_NAMES:
        setattr(loaded.layer, name + "_of_theirs", getattr(loaded.layer, name))
        delattr(loaded.layer, name)
    before = loaded.process().run()
    assert not set(KERNEL_ALPHA_NAMES) & set(loaded.parameters())
    loaded.permute(ORDER)
    assert torch.equal(bits(loaded.run(ORDER)), bits(before))


def test_row_12_alphas_that_eplb_cannot_reach_are_reported():
    def unreachable(**changes: Any) -> Loaded:
        loaded = Loaded(CUTEDSL)
        loaded.quant = quant(loaded.layer.w13_weight_scale_2.double(), loaded.layer.w2_weight_scale_2)
        loaded.layer.w13_weight_scale_2 = None
        loaded.experts = loaded.new(**changes)
        return loaded

    with pytest.warns(UserWarning, match="w13_weight_scale_2: the alphas had to be copied"):
        unreachable().process()
    strict = unreachable(deployment=Deployment(enable_eplb=True))
    with pytest.raises(ValueError, match="w13_weight_scale_2: the alphas had to be copied"):
        strict.process()
    assert strict.requests == []


@pytest.mark.parametrize("backend", [b for b in SM90 if "fp4" in b[0]], ids=label)
def test_row_18_alphas_in_the_weights_are_tied_as_the_kernel_keeps_them(backend):
    loaded = Loaded(backend)
    given = loaded.made.epilogue.fc1_alpha
    own = loaded.process().experts._adapter.kernel_alphas()
    for name, alpha in zip(KERNEL_ALPHA_NAMES, own, strict=True):
        assert loaded.parameters()[name].data_ptr() == alpha.data_ptr()
    if given is not None:
        assert torch.equal(loaded.layer.w13_weight_scale_2, 8 * given)


# Row 18: experts permuted in place, as EPLB does it, in the layer's parameters

ORDER = [3, 0, 7, 1, 6, 2, 5, 4]


@backends
def test_row_19_permuted_experts_give_the_same_bits(backend):
    loaded = Loaded(backend).process()
    before = loaded.run()
    loaded.permute(ORDER)
    assert torch.equal(bits(loaded.run(ORDER)), bits(before))
    assert not torch.equal(bits(loaded.run()), bits(before))


def test_row_19_permuted_experts_of_an_mxfp4_checkpoint_in_bf16():
    loaded = as_mxfp4_in_bf16(Loaded(CUTEDSL)).process()
    before = loaded.run()
    assert before.any()
    loaded.permute(ORDER)
    assert torch.equal(bits(loaded.run(ORDER)), bits(before))


def copying(layer: Any, name: str, tensor: torch.Tensor) -> None:
    """Before 0.33.0: into the old storage where that fits, else its `.data`, else a new parameter."""
    old = getattr(layer, name, None)
    if old is None:
        setattr(layer, name, Parameter(tensor, requires_grad=False))
    elif (old.shape, old.stride(), old.dtype) == (tensor.shape, tensor.stride(), tensor.dtype):
        old.data.copy_(tensor)
    else:
        old.data = tensor


def assigning(layer: Any, name: str, tensor: torch.Tensor) -> None:
    """vLLM 0.33.0."""
    getattr(layer, name).data = tensor


def without_alphas(layer: Any, name: str, tensor: torch.Tensor) -> None:
    if name not in KERNEL_ALPHA_NAMES:
        rebind(layer, name, tensor)


rebind = experts_module.rebind_parameter


@pytest.mark.parametrize(
    ("backend", "form"),
    [(CUTEDSL, copying), (SM90_NVFP4, copying), (SM90_NVFP4, without_alphas)],
    ids=["cutedsl-copying", "sm90-copying", "sm90-without_alphas"],
)
def test_row_18_the_defective_forms_mix_experts(backend, form, monkeypatch):
    """Right until the first rebalance."""
    monkeypatch.setattr(experts_module, "rebind_parameter", form)
    loaded = Loaded(backend).process()
    before = loaded.run()
    assert torch.equal(bits(before), bits(Loaded(backend).process().run()))
    loaded.permute(ORDER)
    assert not torch.equal(bits(loaded.run(ORDER)), bits(before))


def test_row_18_the_copying_form_leaves_w13_a_copy(monkeypatch):
    monkeypatch.setattr(experts_module, "rebind_parameter", copying)
    loaded = Loaded(CUTEDSL).process()
    state = loaded.experts._adapter.kernel_weights()
    assert torch.equal(loaded.layer.w13_weight, state[0])
    assert loaded.layer.w13_weight.data_ptr() != state[0].data_ptr()


def test_row_18_the_assigning_form_fails_on_none(monkeypatch):
    monkeypatch.setattr(experts_module, "rebind_parameter", assigning)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'data'"):
        as_mxfp4_in_bf16(Loaded(CUTEDSL)).process()


# Row 20


def test_row_20_a_layer_without_alphas_does_not_inherit_anothers():
    """Two layers of one geometry share a workspace; one has alphas, then one has none."""
    workspaces: dict = {}

    def shared(request: KernelRequest) -> ReferenceKernel:
        return ReferenceKernel(request, workspaces=workspaces)

    alone = as_mxfp4_in_bf16(Loaded(CUTEDSL)).process().run()
    with_alphas = Loaded(CUTEDSL, changes={"kernel": shared}).process()
    without = as_mxfp4_in_bf16(Loaded(CUTEDSL, changes={"kernel": shared})).process()
    with_alphas.run()
    assert torch.equal(bits(without.run()), bits(alone))
