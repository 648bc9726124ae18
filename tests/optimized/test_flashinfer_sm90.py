"""The live kernel against the reference."""

import pytest
import torch

from fp4ep.optimized.flashinfer_sm90 import run_megakernel
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.schemes import find_scheme
from fp4ep.reference.types import MoEInputs, MoEWeights

NVFP4 = "sm90_fp8_nvfp4_bf16_pull_cutedsl"
E, H, I, T, TOP_K = 8, 512, 256, 8, 4  # noqa: E741


@pytest.mark.gpu
@pytest.mark.usefixtures("flashinfer_sm90")
def test_nvfp4_equals_the_reference():
    """Weights that the backend quantizes itself; one masked slot, one expert named twice."""
    g = torch.Generator().manual_seed(0)
    weights = MoEWeights(*(torch.randn(s, generator=g).bfloat16() / 16 for s in ((E, 2 * I, H), (E, H, I))))
    ids = torch.rand(T, E, generator=g).argsort(1)[:, :TOP_K].contiguous()
    ids[0, 1] = -1
    ids[1, 2] = ids[1, 0]
    inputs = MoEInputs(torch.randn(T, H, generator=g).bfloat16(), ids, torch.rand(T, TOP_K, generator=g))
    found = run_megakernel(NVFP4, {}, weights, inputs, max_tokens_per_rank=T)
    expected, _ = moe_forward(find_scheme(NVFP4), weights, inputs)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
