"""A small recording whose outputs come from the reference itself."""

import pytest
import torch

from fp4ep.parity.recording import Case, RecordingWriter
from fp4ep.reference.formats import E4M3, decode
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.schemes import find_scheme
from fp4ep.reference.special import rcp_approx
from fp4ep.reference.tensor_core import HOPPER_E4M3, matmul
from fp4ep.reference.types import MoEInputs, MoEWeights

SOURCE = {"hardware": "a test", "compute_capability": "0.0", "flashinfer": "1.2.3", "torch": "4.5.6"}
E, H, I, T, TOP_K = 4, 256, 128, 3, 2  # noqa: E741


@pytest.fixture
def writer() -> RecordingWriter:
    """Four cases, to be changed and written: MoE by two schemes, a tensor-core chain, a special function."""
    writer = RecordingWriter("A small problem", SOURCE)
    w13 = writer.generate("w13", "normal", seed=1, shape=[E, 2 * I, H], scale=0.06)
    w2 = writer.generate("w2", "normal", seed=2, shape=[E, H, I], scale=0.08)
    x = writer.generate("hidden_states", "normal", seed=3, shape=[T, H], scale=1.0)
    ids = writer.store("topk_ids", torch.tensor([[0, 1], [3, 2], [1, -1]]))
    weights = writer.store("topk_weights", torch.tensor([[0.5, 0.25], [0.75, 0.125], [1.0, 1.0]]))
    for name, options, output in (
        ("sm90_fp8_nvfp4_bf16_pull_cutedsl", {"nvfp4_kperm": 64, "gate_up_clamp": 2.0}, "output.nvfp4"),
        ("sm90_bf16_bf16_bf16_pull_cutedsl", {}, "output.bf16"),
    ):
        found, _ = moe_forward(find_scheme(name, **options), MoEWeights(w13, w2), MoEInputs(x, ids, weights))
        writer.store(output, found, "xz")
        roles = {role: role for role in ("hidden_states", "topk_ids", "topk_weights", "w13", "w2")}
        writer.cases.append(Case("three tokens", "moe", name, roles | {"output": output}, options, launches=3))
    a, b = (writer.generate(n, "integers", seed=4 + i, shape=[8, 64], low=0, high=126) for i, n in enumerate("ab"))
    c = writer.store("c", torch.arange(64.0).reshape(8, 8) - 32)
    writer.store("d", matmul(HOPPER_E4M3, decode(a, E4M3), decode(b, E4M3), c=c))
    writer.cases.append(Case("a chain", "tensor_core", HOPPER_E4M3.name, {role: role for role in "abcd"}))
    argument = writer.store("argument", torch.linspace(-3, 3, 50))
    writer.store("value", rcp_approx(argument))
    roles = {"x": "argument", "y": "value"}
    writer.cases.append(Case("a few arguments", "special_function", "rcp.approx.ftz.f32", roles))
    return writer
