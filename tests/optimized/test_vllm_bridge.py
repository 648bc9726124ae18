"""Our experts class in vLLM's place: over modules that stand for vLLM, and over vLLM itself where it is installed."""

import abc
import enum
import importlib.util
import itertools
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from moe_ep_layers import CAPACITY, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, MoeEpLayer, moe_ep_layer

from fp4ep.optimized import config, experts, mxfp4, support
from fp4ep.optimized.backends import FLASHINFER_MOE_EP_BACKENDS, FLASHINFER_MOE_EP_CUTEDSL
from fp4ep.optimized.config import EpGroup
from fp4ep.optimized.experts import FlashInferMoeEpExperts, run_experts
from fp4ep.optimized.vllm_bridge import register_with_vllm
from fp4ep.parity.reference_kernel import ReferenceKernel

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
HOOKED = f"{FUSED_MOE}.experts.flashinfer_moe_ep"
SM90_NVFP4 = "flashinfer_moe_ep_sm90_nvfp4"
SM90 = SimpleNamespace(major=9, minor=0)  # a capability


class Recorded(ReferenceKernel):
    """The reference; `launches` has the rows of every launch, `requests` what the kernels were built from."""

    launches: list[int]
    requests: list[Any]

    def __init__(self, request: Any) -> None:
        self.requests.append(request)
        super().__init__(request)

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        self.launches.append(len(hidden_states))
        return super().forward(hidden_states, *arguments, **options)


@pytest.fixture
def kernel():
    return type("Recorded", (Recorded,), {"launches": [], "requests": []})


class Platform:
    """What vLLM says about the device: an SM100, and otherwise the truth."""

    def __init__(self, truth: Any) -> None:
        self.truth = truth
        self.capability = SimpleNamespace(major=10, minor=0)
        self.device_name = support.current_device_name()

    def get_device_capability(self) -> Any:
        return self.capability

    def is_cpu(self) -> bool:
        return True  # as the tests' tensors are: vLLM's driver then allocates with torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.truth, name)


@dataclass
class Vllm:
    """vLLM as the tests need it. config: its current configuration."""

    hooked: ModuleType
    config: SimpleNamespace
    platform: Platform

    def experts_cls(self) -> type:
        """What the NVFP4 oracle chooses for the CuTe DSL backend."""
        return self.hooked.FlashInferMoeEpExperts

    def moe(self, **changes: Any) -> Any:
        values = {
            "num_experts": EXPERTS,
            "experts_per_token": TOP_K,
            "hidden_dim": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "max_num_tokens": CAPACITY,
            "moe_backend": FLASHINFER_MOE_EP_CUTEDSL,
        } | changes
        return SimpleNamespace(**vars(config.FusedMoEConfig(**values)), is_act_and_mul=True)

    def quant(self, g1_alphas: torch.Tensor, g2_alphas: torch.Tensor) -> Any:
        return SimpleNamespace(g1_alphas=g1_alphas, g2_alphas=g2_alphas, a2_scale=None)

    def run(self, chosen: Any, layer: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The order of vLLM's modular driver, its early return included."""
        assert chosen.activation_format() == self.standard
        tokens = chosen.moe_problem_size(x, layer.w13_weight, layer.w2_weight, ids)[1]
        output = x.new_empty(x.shape)
        if not tokens:
            return output
        nothing = dict.fromkeys(("activation", "expert_map", "a1q_scale", "a2_scale", "expert_tokens_meta"))
        spaces = {"w1": layer.w13_weight, "w2": layer.w2_weight, "workspace13": x, "workspace2": x}
        counts = {"global_num_experts": EXPERTS, "apply_router_weight_on_input": False}
        routing = {"topk_weights": weights, "topk_ids": ids}
        chosen.apply(output=output, hidden_states=x, **routing, **spaces, **counts, **nothing)
        return chosen.finalize_weight_and_reduce_impl().apply(output, output, weights, ids, False)

    @property
    def standard(self) -> Any:
        return sys.modules[f"{FUSED_MOE}.modular_kernel"].FusedMoEActivationFormat.Standard


class RealVllm(Vllm):
    def experts_cls(self) -> type:
        from vllm.model_executor.layers.fused_moe.oracle import nvfp4

        (chosen,) = nvfp4.backend_to_kernel_cls(nvfp4.map_nvfp4_backend(FLASHINFER_MOE_EP_CUTEDSL))
        return chosen

    def moe(self, **changes: Any) -> Any:
        from vllm.model_executor.layers.fused_moe import config as theirs
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation

        values = vars(super().moe(**changes))
        parallel = values.pop("moe_parallel_config")
        batched = parallel.use_batched_activation_format  # in vLLM a property: of the exchange, where there is one
        sizes = ("tp_size", "pcp_size", "dp_size", "ep_size", "sp_size")
        del values["is_act_and_mul"]
        values |= {
            "num_local_experts": EXPERTS,
            "num_logical_experts": EXPERTS,
            "device": "cpu",
            "activation": MoEActivation(values["activation"].value),
            "routing_method": theirs.RoutingMethodType[values["routing_method"].name],
            "moe_parallel_config": theirs.FusedMoEParallelConfig(
                **dict.fromkeys(sizes, 1) | {"dp_size": 1 + batched},
                **dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0),
                use_ep=parallel.use_ep,
                all2all_backend="deepep_low_latency" if batched else "passthrough",
                enable_eplb=False,
            ),
        }
        return theirs.FusedMoEConfig(**values)

    def quant(self, g1_alphas: torch.Tensor, g2_alphas: torch.Tensor) -> Any:
        from vllm.model_executor.layers.fused_moe.config import nvfp4_moe_quant_config

        unused = dict.fromkeys(("a1_gscale", "a2_gscale", "w1_scale", "w2_scale"), torch.ones(1))
        return nvfp4_moe_quant_config(g1_alphas=g1_alphas, g2_alphas=g2_alphas, **unused)

    def run(self, chosen: Any, layer: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        from vllm.model_executor.layers.fused_moe import modular_kernel as mk
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.prepare_finalize.passthrough import PassThroughPrepareAndFinalize

        driver = mk.FusedMoEKernel(PassThroughPrepareAndFinalize(), chosen)
        matrices = (layer.w13_weight, layer.w2_weight)
        return driver.apply(x, *matrices, weights, ids, MoEActivation.SILU, EXPERTS, None, False)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As much of vLLM as the bridge imports. Returns the module that it hooks."""

    class FusedMoEActivationFormat(enum.Enum):
        Standard = ("standard",)
        BatchedExperts = ("batched_experts",)

    class FusedMoEExpertsModular(abc.ABC):
        def __init__(self, moe_config, quant_config, max_num_tokens=None, num_dispatchers=None):
            if max_num_tokens is not None or num_dispatchers is not None:
                raise ValueError("max_num_tokens and num_dispatchers should only be set for BatchedExperts")
            self.activation_config = "made by vLLM"

        def moe_problem_size(self, a1, w1, w2, topk_ids):
            return w1.shape[0], a1.shape[0], w1.shape[1], a1.shape[1], topk_ids.shape[1]

        @abc.abstractmethod
        def apply(self): ...

        @abc.abstractmethod
        def workspace_shapes(self): ...

        @abc.abstractmethod
        def finalize_weight_and_reduce_impl(self): ...

    class TopKWeightAndReduceNoOP:
        def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input):
            return fused_expert_output

    contents = {
        f"{FUSED_MOE}.modular_kernel": (FusedMoEActivationFormat, FusedMoEExpertsModular),
        f"{FUSED_MOE}.topk_weight_and_reduce": (TopKWeightAndReduceNoOP,),
        HOOKED: (type("FlashInferMoeEpExperts", (FusedMoEExpertsModular,), {}),),
        "vllm.config": (),
        "vllm.distributed": (),
        "vllm.envs": (),
        "vllm.platforms": (),
    }
    names = {".".join(name.split(".")[: i + 1]) for name in contents for i in range(name.count(".") + 1)}
    for name in sorted(names):
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
        for cls in contents.get(name, ()):
            setattr(module, cls.__name__, cls)
    sys.modules["vllm"].__version__ = "0.0"
    return sys.modules[HOOKED]


@pytest.fixture(params=["stand-in", "vLLM"])
def vllm(request, monkeypatch):
    """Either, with an SM100 and a configuration that asks for nothing special."""
    real = request.param == "vLLM"
    if not real:
        hooked = stand_in(monkeypatch)
    elif importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    else:
        hooked = importlib.import_module(HOOKED)
    parallel = SimpleNamespace(enable_dbo=False, enable_eplb=False, all2all_backend="passthrough")
    current = SimpleNamespace(weight_transfer_config=None, parallel_config=parallel)
    platform = Platform(sys.modules["vllm.platforms"].current_platform if real else None)
    group = SimpleNamespace(world_size=1, rank_in_group=0, device_group="vLLM's group", other="attribute")
    for name, attribute, value in (
        ("vllm.config", "get_current_vllm_config", lambda: current),
        ("vllm.distributed", "get_ep_group", lambda: group),
        ("vllm.envs", "VLLM_BATCH_INVARIANT", False),
        ("vllm.platforms", "current_platform", platform),
    ):
        monkeypatch.setattr(sys.modules[name], attribute, value, raising=False)
    if real:  # what vLLM's own class looks up, to be compared with
        theirs = sys.modules[f"{FUSED_MOE}.flashinfer_moe_ep"]
        monkeypatch.setattr(theirs, "get_current_vllm_config", lambda: current)
        for module in (theirs, sys.modules[f"{FUSED_MOE}.modular_kernel"]):
            monkeypatch.setattr(module, "current_platform", platform)
    return (RealVllm if real else Vllm)(hooked, current, platform)


def loaded(layer: MoeEpLayer) -> torch.nn.Module:
    """The layer as vLLM has it after loading."""
    module = torch.nn.Module()
    values = {"w13_weight": layer.weights.w13, "w2_weight": layer.weights.w2}
    values |= {"w13_weight_scale": layer.weights.w13_scale, "w2_weight_scale": layer.weights.w2_scale}
    values |= {"w13_weight_scale_2": layer.epilogue.fc1_alpha, "w2_weight_scale_2": layer.epilogue.fc2_alpha}
    for name, value in values.items():
        setattr(module, name, torch.nn.Parameter(value.clone(), requires_grad=False))
    module.expert_map_manager = SimpleNamespace(placement_strategy="linear")
    module.apply_router_weight_on_input = False
    return module


def build(vllm: Vllm, layer: MoeEpLayer) -> tuple[Any, torch.nn.Module]:
    """The experts that vLLM chooses for the layer, processed, and the layer."""
    cls, module = vllm.experts_cls(), loaded(layer)
    moe = vllm.moe(routing_method=layer.moe.routing_method, swiglu_limit=layer.moe.swiglu_limit)
    assert cls.is_supported_config(cls, moe, config.kNvfp4Static, config.kNvfp4Dynamic, vllm.standard) == (True, None)
    chosen = cls(moe_config=moe, quant_config=vllm.quant(module.w13_weight_scale_2, module.w2_weight_scale_2))
    reductions = sys.modules[f"{FUSED_MOE}.topk_weight_and_reduce"]
    assert isinstance(chosen.finalize_weight_and_reduce_impl(), reductions.TopKWeightAndReduceNoOP)
    chosen.process_weights_after_loading(module)
    return chosen, module


# --- registration -----------------------------------------------------------------------------------------------------


def test_without_vllm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(RuntimeError, match="vLLM is not installed: pip install vllm"):
        register_with_vllm()


def test_a_vllm_without_these_experts_is_named(monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setitem(sys.modules, HOOKED, None)
    with pytest.raises(RuntimeError, match=r"vLLM 0\.0 lacks the FlashInfer MoE-EP experts of 0\.33\.0"):
        register_with_vllm()


def test_the_oracle_chooses_ours_until_undone(vllm):
    theirs = vllm.experts_cls()
    with register_with_vllm() as registration:
        assert vllm.experts_cls() is registration.experts_cls
        assert issubclass(vllm.experts_cls(), FlashInferMoeEpExperts)
        assert issubclass(vllm.experts_cls(), sys.modules[f"{FUSED_MOE}.modular_kernel"].FusedMoEExpertsModular)
        assert not vllm.experts_cls().__abstractmethods__
    assert vllm.experts_cls() is theirs
    registration.undo()
    assert vllm.experts_cls() is theirs


def test_an_error_in_the_block_undoes_too(vllm):
    theirs = vllm.experts_cls()
    with pytest.raises(KeyError), register_with_vllm():
        raise KeyError
    assert vllm.experts_cls() is theirs


def test_registrations_are_undone_latest_first(vllm):
    theirs = vllm.experts_cls()
    first, second = register_with_vllm(), register_with_vllm()
    with pytest.raises(RuntimeError, match="undo that first"):
        first.undo()
    assert vllm.experts_cls() is second.experts_cls
    second.undo()
    first.undo()
    assert vllm.experts_cls() is theirs


@pytest.mark.parametrize(
    ("backends", "wrong"),
    [
        ({"auto": SM90_NVFP4}, "'auto' is not a backend of vLLM's"),
        ({FLASHINFER_MOE_EP_CUTEDSL: "sm90"}, "'sm90' is not a FlashInfer MoE-EP backend"),
    ],
)
def test_backends_are_checked_first(vllm, backends, wrong):
    theirs = vllm.experts_cls()
    with pytest.raises(ValueError, match=wrong):
        register_with_vllm(backends=backends)
    assert vllm.experts_cls() is theirs


# --- what is read from vLLM -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "name", "value", "reason"),
    [
        ("config", "weight_transfer_config", object(), "runtime weight transfer"),
        ("parallel", "enable_dbo", True, "dual batch overlap"),
        (
            "platform",
            "capability",
            SimpleNamespace(major=9, minor=0),
            f"current device {support.current_device_name()}",
        ),
        ("envs", "VLLM_BATCH_INVARIANT", True, "batch invariance"),
    ],
)
def test_the_deployment_is_vllms(vllm, monkeypatch, where, name, value, reason):
    objects = {"config": vllm.config, "parallel": vllm.config.parallel_config, "platform": vllm.platform}
    monkeypatch.setattr(objects.get(where) or sys.modules["vllm.envs"], name, value)
    with register_with_vllm():
        cls = vllm.experts_cls()
        answer = cls.is_supported_config(
            cls, vllm.moe(), config.kNvfp4Static, config.kNvfp4Dynamic, cls.activation_format()
        )
    assert answer == (False, f"kernel does not support {reason}")


def test_eplb_and_the_group_reach_the_layer(vllm, kernel):
    vllm.config.parallel_config.enable_eplb = True
    with register_with_vllm(kernel=kernel):
        chosen, _ = build(vllm, moe_ep_layer(FLASHINFER_MOE_EP_CUTEDSL))
    assert chosen.deployment == config.Deployment(
        enable_eplb=True, capability=(10, 0), all2all_backend="passthrough", batch_invariant=False
    )
    assert kernel.requests[0].ep_group == EpGroup(1, 0, "vLLM's group")


def test_sizes_for_batched_formats_are_refused(vllm):
    with register_with_vllm(), pytest.raises(ValueError, match="should only be set for BatchedExperts"):
        vllm.experts_cls()(
            moe_config=vllm.moe(), quant_config=vllm.quant(torch.ones(8), torch.ones(8)), max_num_tokens=1
        )


# --- what vLLM's driver makes of it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("instead", [None, SM90_NVFP4])
def test_the_driver_runs_the_layer(vllm, kernel, instead):
    """Bit for bit what our own class and driver give."""
    layer = moe_ep_layer(instead or FLASHINFER_MOE_EP_CUTEDSL)
    if instead:
        vllm.platform.capability = SM90
    x, ids, weights = layer.inputs()
    with register_with_vllm(kernel=kernel, backends={FLASHINFER_MOE_EP_CUTEDSL: instead} if instead else None):
        chosen, module = build(vllm, layer)
        output = vllm.run(chosen, module, x, ids.to(torch.int64), weights)
    assert kernel.requests[0].moe.moe_backend == layer.moe.moe_backend
    own_layer = loaded(layer)
    quant = config.FusedMoEQuantConfig(own_layer.w13_weight_scale_2, own_layer.w2_weight_scale_2)
    own = FlashInferMoeEpExperts(layer.moe, quant, kernel=ReferenceKernel)
    own.process_weights_after_loading(own_layer)
    expected = run_experts(own, x, weights, ids)
    assert output.any()
    assert torch.equal(output.view(torch.int16), expected.view(torch.int16))


def test_the_callers_configuration_keeps_its_backend(vllm, kernel):
    vllm.platform.capability = SM90
    moe = vllm.moe()
    with register_with_vllm(kernel=kernel, backends={FLASHINFER_MOE_EP_CUTEDSL: SM90_NVFP4}):
        chosen = vllm.experts_cls()(moe_config=moe, quant_config=vllm.quant(torch.ones(8), torch.ones(8)))
    assert chosen.moe_config.moe_backend == SM90_NVFP4
    assert moe.moe_backend == FLASHINFER_MOE_EP_CUTEDSL


def test_without_tokens_it_launches_all_the_same(vllm, kernel):
    layer = moe_ep_layer(FLASHINFER_MOE_EP_CUTEDSL)
    x, ids, weights = (t[:0] for t in layer.inputs())
    with register_with_vllm(kernel=kernel):
        chosen, module = build(vllm, layer)
        kernel.launches.clear()
        output = vllm.run(chosen, module, x, ids, weights)
    assert output.shape == (0, HIDDEN)
    assert kernel.launches == [0]


def test_with_tokens_it_launches_once(vllm, kernel):
    layer = moe_ep_layer(FLASHINFER_MOE_EP_CUTEDSL)
    x, ids, weights = layer.inputs()
    with register_with_vllm(kernel=kernel):
        chosen, module = build(vllm, layer)
        kernel.launches.clear()
        vllm.run(chosen, module, x, ids, weights)
    assert kernel.launches == [len(x)]


# --- the same decisions as vLLM's own class ---------------------------------------------------------------------------


@pytest.mark.parametrize("vllm", ["vLLM"], indirect=True)
@pytest.mark.parametrize("backend", sorted(FLASHINFER_MOE_EP_BACKENDS))
def test_vllm_decides_alike(vllm, backend):
    """is_supported_config, its texts, and the reasons, over vLLM's own objects."""
    from vllm.model_executor.layers.fused_moe.flashinfer_moe_ep import flashinfer_moe_ep_unsupported_reasons
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    theirs = vllm.experts_cls()
    schemes = ((None, None), (keys.kNvfp4Static, keys.kNvfp4Dynamic), (keys.kNvfp4Static, None))
    schemes += ((keys.kMxfp4Static, None), (keys.kFp8StaticTensorSym, None))
    flags = ({}, {"is_lora_enabled": True}, {"has_bias": True, "swiglu_alpha": 1.7}, {"in_dtype": torch.float16})
    routing = (config.RoutingMethodType.Renormalize, config.RoutingMethodType.DeepseekV4)
    answers = set()
    for changes, method, use_ep, batched, form, eplb, (weight, activation) in itertools.product(
        flags, routing, (True, False), (False, True), FusedMoEActivationFormat, (False, True), schemes
    ):
        parallel = config.FusedMoEParallelConfig(use_ep=use_ep, use_batched_activation_format=batched)
        moe = vllm.moe(moe_backend=backend, routing_method=method, moe_parallel_config=parallel, **changes)
        vllm.config.parallel_config.enable_eplb = eplb
        expected = theirs.is_supported_config(theirs, moe, weight, activation, form)
        with register_with_vllm() as registration:
            ours = registration.experts_cls
            assert ours.is_supported_config(ours, moe, weight, activation, form) == expected
        where = config.Deployment(enable_eplb=eplb)
        reasons = support.flashinfer_moe_ep_unsupported_reasons(moe, weight, activation, where)
        assert reasons == flashinfer_moe_ep_unsupported_reasons(moe, weight, activation)
        answers.add(expected)
    assert len(answers) > 10
    assert (True, None) in answers


@pytest.mark.parametrize("vllm", ["vLLM"], indirect=True)
def test_vllm_decodes_mxfp4_alike(vllm):
    """Every byte under every scale, NaN's bits included."""
    from vllm.model_executor.layers.fused_moe.flashinfer_moe_ep import _dequant_mxfp4_ue8m0_gran32

    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    ours, theirs = (f(packed, scale) for f in (mxfp4._dequant_mxfp4_ue8m0_gran32, _dequant_mxfp4_ue8m0_gran32))
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


@pytest.mark.parametrize("vllm", ["vLLM"], indirect=True)
def test_vllm_has_the_same_names(vllm):
    from vllm.config import kernel as theirs
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType

    assert theirs.FLASHINFER_MOE_EP_BACKENDS == FLASHINFER_MOE_EP_BACKENDS
    assert vllm.hooked.KERNEL_WEIGHT_NAMES == experts.KERNEL_WEIGHT_NAMES
    for one, other in ((MoEActivation, config.MoEActivation), (RoutingMethodType, config.RoutingMethodType)):
        assert {m.name: m.value for m in one} == {m.name: m.value for m in other}
