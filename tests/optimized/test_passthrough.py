"""The stages around the experts, and the driver."""

import pytest
import torch
from loaded_layers import BACKENDS, SM90_NVFP4, E, H, Loaded
from moe_ep_layers import label

from fp4ep.optimized.config import FusedMoEActivationFormat
from fp4ep.optimized.experts import PassThroughPrepareAndFinalize, TopKWeightAndReduceNoOP, run_experts
from fp4ep.parity.reference_kernel import ReferenceKernel

pytestmark = pytest.mark.usefixtures("quick_gemms")

backends = pytest.mark.parametrize("backend", BACKENDS, ids=label)


def test_row_17_prepare_returns_the_same_tensor_and_four_nones():
    a1, routes = torch.ones(3, 4), torch.ones(3, 2)
    stages = PassThroughPrepareAndFinalize()
    prepared = stages.prepare(a1, routes, routes, E, None, True, None, defer_input_quant=False)
    assert prepared[0] is a1
    assert prepared[1:] == (None,) * 4
    assert torch.equal(a1, torch.ones(3, 4))  # routing weights on the input are not applied
    assert (stages.output_is_reduced(), stages.num_dispatchers(), stages.topk_indices_dtype()) == (True, 1, None)
    assert (stages.supports_async(), stages.supports_deferred_moe_finalize()) == (False, False)
    assert (stages.max_num_tokens_per_rank(), stages.activation_format) == (None, FusedMoEActivationFormat.Standard)


def test_row_17_finalize_copies_what_is_not_there_already():
    fused, routes = torch.arange(6.0).view(2, 3), torch.ones(2, 2)
    stages, reduce = PassThroughPrepareAndFinalize(), TopKWeightAndReduceNoOP()
    output = torch.zeros(2, 3)
    stages.finalize(output, fused, routes, routes, False, reduce)
    assert torch.equal(output, fused)
    for given, expected in ((None, fused), (fused, fused), (output, output)):
        assert reduce.apply(given, fused, routes, routes, False) is expected
    with pytest.raises(ValueError, match="output shape is expected to match the fused_expert_output shape"):
        reduce.apply(torch.zeros(3, 2), fused, routes, routes, False)


def test_row_17_the_same_buffer_is_not_copied(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_, **__: pytest.fail("copied"))
    fused = torch.ones(2, 3)
    PassThroughPrepareAndFinalize().finalize(fused, fused, fused, fused, False, TopKWeightAndReduceNoOP())


def test_row_17_all_noop_reductions_are_equal():
    assert TopKWeightAndReduceNoOP() == TopKWeightAndReduceNoOP()
    assert TopKWeightAndReduceNoOP() != object()
    assert len({TopKWeightAndReduceNoOP(), TopKWeightAndReduceNoOP()}) == 1


@backends
def test_divergence_c_a_rank_without_tokens_launches(backend):
    loaded = Loaded(backend).process()
    launched = []
    forward = ReferenceKernel.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceKernel, "forward", lambda *a, **k: launched.append(a[1].shape) or forward(*a, **k))
        output = loaded.run(tokens=0)
    assert launched == [(0, H)]
    assert (output.shape, output.dtype) == ((0, H), torch.bfloat16)


@pytest.mark.parametrize("name", ["topk_weights", "topk_ids"])
def test_row_17_the_driver_wants_a_row_of_routes_per_token(name):
    loaded = Loaded(SM90_NVFP4).process()
    given = dict(zip(("hidden_states", "topk_ids", "topk_weights"), loaded.made.inputs(), strict=True))
    for wrong in (given[name][:-1], given[name].flatten()):
        with pytest.raises(ValueError, match=rf"{name} must be \[12, top_k\], one row per token"):
            run_experts(loaded.experts, **given | {name: wrong})
