"""The exact grid: the reference gives its closed form bit for bit, and what it claims to see and not to see."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from fp4ep.optimized.eplb import permute_topk_ids
from fp4ep.parity.grid import (
    FAMILIES,
    GEOMETRIES,
    SMALL,
    VLLM,
    Geometry,
    Grid,
    build,
    output_channel,
)
from fp4ep.reference import SCHEMES, Scheme, find_scheme, moe, moe_forward
from fp4ep.reference.moe import Intervention
from fp4ep.reference.scheme import KOrder
from fp4ep.reference.types import Stage
from fp4ep.reference.weights import Operand

NVFP4 = find_scheme("sm90_fp8_nvfp4_bf16_pull_cutedsl")
BLOCKWISE = find_scheme("sm90_fp8_fp8_bf16_pull_cutedsl", fp8_scale_mode="blockwise")
PER_TENSOR = find_scheme("sm90_fp8_fp8_bf16_pull_cutedsl")
BF16 = find_scheme("sm90_bf16_bf16_bf16_pull_cutedsl")
EARLY, LATE = (
    find_scheme("sm100_nvfp4_nvfp4_bf16_cutedsl", apply_routing_weights_before_fc2=early) for early in (True, False)
)
#: EP size -> tokens of each rank.
TOKENS = {1: (4,), 2: (3, 5), 4: (4, 0, 2, 3)}


def equal(scheme: Scheme, layer: Grid, intervene: Intervention | None = None) -> bool:
    """Whether the reference gives the expected outputs, signs of zeros included."""
    found, _ = moe_forward(scheme, layer.weights, layer.inputs, intervene=intervene)
    pairs = list(zip(found, layer.expected, strict=True))
    assert all(bool(y.any()) == bool(len(y)) for y in layer.expected)
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in pairs)


@pytest.mark.parametrize("ep_size", TOKENS)
@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme.wire_rule is None], ids=str)
def test_row_15_small(scheme, ep_size):
    assert equal(scheme, build(SMALL, scheme, ep_size, TOKENS[ep_size], spread=1))


def test_what_is_rounded_on_its_way_back_is_refused():
    scheme = find_scheme("sm90_fp8_fp8_bf16_push_cuda")
    with pytest.raises(ValueError, match=r"^scheme: sm90_fp8_fp8_bf16_push_cuda.* rounds what it sends back to E4M3"):
        build(SMALL, scheme)


@pytest.mark.parametrize(
    "scheme",
    [
        *(replace(NVFP4, gate_up_clamp=limit) for limit in (None, 12.0, 16.0)),
        *(replace(scheme, gate_up_clamp=12.0) for scheme in (EARLY, LATE, PER_TENSOR, BLOCKWISE, BF16)),
        replace(EARLY, input_norm_const=0.25),
        replace(PER_TENSOR, fc1_activation_dequant_scale=2.0, fc2_activation_dequant_scale=0.5),
        find_scheme(PER_TENSOR.name, fp8_scale_mode="blockwise", grouped_token_back=True),
    ],
    ids=lambda s: f"{s}-{s.gate_up_clamp}",
)
def test_options(scheme):
    small = replace(SMALL, hidden=max(SMALL.hidden, scheme.hidden_multiple))
    assert equal(scheme, build(small, scheme, 2, TOKENS[2], spread=1))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("scheme", [EARLY, LATE], ids=["early", "late"])
def test_vllms_numbers(scheme, dense, plain):
    assert equal(scheme, build(SMALL, scheme, 4, numbers=VLLM, spread=1, dense=dense, plain=plain))


@pytest.mark.parametrize("scheme", [EARLY, LATE, PER_TENSOR, BLOCKWISE], ids=str)
def test_dense(scheme):
    """Weights that the backend quantizes, to the codes of the packed ones."""
    layer = build(SMALL, scheme, 2, spread=1, dense=True)
    assert layer.weights.w13.dtype is torch.bfloat16
    assert equal(scheme, layer)


def test_by_hand():
    """Expert 2, which token 0 has in slot 1 and, its code being 1.5, its up code 2, its alphas 2 and 1/2, writes
    channel 64: gate 32, up 6, clamped 10 * 6; w2's scale in row 64 and block (128 + 18) / 16 = 9 is 2^(73 % 3 - 1)."""
    (out,) = build(SMALL, NVFP4).expected
    assert output_channel(SMALL, 2) == 64
    assert float(out[0, 64]) == 0.25 * 60 * 1.5 * 1 * 0.5
    # vLLM's: weight * code * 144 without alphas and scales, as for expert 0, whose scale is 1/2.
    (out,) = build(SMALL, LATE, numbers=VLLM).expected
    assert float(out[0, 0]) == 0.5 * 0.5 * 144 * 0.5
    # Expert 6 in slots 0 and 1 of token 3, by weight 3/4; negative and clamped up of expert 1.
    (out,) = build(SMALL, NVFP4, spread=1).expected
    ids = build(SMALL, NVFP4, spread=1).inputs[0].topk_ids
    assert ids.tolist() == [[0, 2, 4, 6], [-1, 5, 7, 1], [6, 0, 2, 4], [1, 1, 5, 7]]
    up = -1.5 * 2  # token 3 has the value of token 0
    assert float(out[3, 32]) == 0.75 * 10 * up * 1 * 2 * 2.0 ** ((32 + (64 + 9) // 16) % 3 - 1)
    up = 10  # 6 * 2 * 2, clamped
    assert float(out[2, 64]) == 0.125 * 10 * up * 1.5 * 0.5


@pytest.mark.parametrize("scheme", [NVFP4, EARLY, BLOCKWISE, BF16], ids=str)
def test_experts_move(scheme):
    layer = build(SMALL, scheme, 2, spread=1)
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    moved = layer._replace(weights=layer.weights.of_experts(order))
    inputs = [replace(x, topk_ids=permute_topk_ids(x.topk_ids, order.tolist())) for x in layer.inputs]
    assert any(bool((x.topk_ids == -1).any()) for x in inputs)
    assert equal(scheme, moved._replace(inputs=inputs))
    assert not equal(scheme, moved)


# --- what it sees ------------------------------------------------------------------------------------------------


def weight(name: str, change: Callable) -> Callable[[Grid], Grid]:
    return lambda layer: layer._replace(
        weights=replace(layer.weights, **{name: change(getattr(layer.weights, name)).contiguous()})
    )


def tokens(**changes: Callable) -> Callable[[Grid], Grid]:
    return lambda layer: layer._replace(
        inputs=[replace(x, **{n: change(getattr(x, n)) for n, change in changes.items()}) for x in layer.inputs]
    )


FAULTS: dict[str, Callable[[Grid], Grid]] = {
    "gate and up exchanged": weight("w13", lambda w: w.roll(w.shape[1] // 2, 1)),
    "rows of w13 moved": weight("w13", lambda w: w.roll(1, 1)),
    "rows of w2 moved": weight("w2", lambda w: w.roll(1, 1)),
    "columns of w13 moved": weight("w13", lambda w: w.roll(1, 2)),
    "columns of w2 moved": weight("w2", lambda w: w.roll(1, 2)),
    "nibbles of w13 swapped": weight("w13", lambda w: w << 4 | w >> 4),
    "nibbles of w2 swapped": weight("w2", lambda w: w << 4 | w >> 4),
    "scale rows of w13 moved": weight("w13_scale", lambda s: s.roll(1, 1)),
    "scale rows of w2 moved": weight("w2_scale", lambda s: s.roll(1, 1)),
    "scale columns of w13 moved": weight("w13_scale", lambda s: s.roll(1, 2)),
    "scale columns of w2 moved": weight("w2_scale", lambda s: s.roll(1, 2)),
    "fc1 alpha lost": weight("w13_global_scale", torch.ones_like),
    "fc2 alpha lost": weight("w2_global_scale", torch.ones_like),
    "fc1 alpha of the next expert": weight("w13_global_scale", lambda s: s.roll(-1)),
    "fc2 alpha of the next expert": weight("w2_global_scale", lambda s: s.roll(-1)),
    "alphas of the first rank on every rank": weight("w2_global_scale", lambda s: s[:4].repeat(2)),
    "experts of the other rank": lambda layer: layer._replace(
        weights=layer.weights.of_experts(torch.arange(8).roll(4))
    ),
    "the next expert": tokens(topk_ids=lambda ids: torch.where(ids < 0, ids, (ids + 1) % 8)),
    "masked slots live": tokens(topk_ids=lambda ids: ids.clamp(min=0)),
    "a route lost": tokens(topk_ids=lambda ids: ids.index_fill(1, torch.tensor([3]), -1)),
    "routing weights lost": tokens(topk_weights=torch.ones_like),
    "routing weights twice": tokens(topk_weights=torch.square),
    "routing weights of another slot": tokens(topk_weights=lambda w: w.roll(1, 1)),
    "routing of another token": tokens(topk_ids=lambda ids: ids.roll(1, 0)),
    "values of another token": tokens(hidden_states=lambda x: x.roll(1, 0)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scheme", [NVFP4, EARLY], ids=["sm90", "sm100"])
def test_sees(scheme, fault):
    layer = build(SMALL, scheme, 2, spread=1)
    assert not equal(scheme, FAULTS[fault](layer))


@pytest.mark.parametrize("name", ["w13_scale", "w2_scale"])
@pytest.mark.parametrize("scheme", [PER_TENSOR, BLOCKWISE], ids=str)
def test_sees_scales_of_the_next_expert(scheme, name):
    layer = build(SMALL, scheme, 2, spread=1)
    assert not equal(scheme, weight(name, lambda s: s.roll(1, 0))(layer))


def test_sees_norms_of_the_next_expert():
    layer = build(SMALL, EARLY, 2, spread=1)
    assert not equal(EARLY, weight("fc1_norm_const", lambda s: s.roll(1))(layer))


@pytest.mark.parametrize("limit", [None, 11.0])
def test_sees_another_clamp(limit):
    assert not equal(replace(NVFP4, gate_up_clamp=limit), build(SMALL, NVFP4))


@pytest.mark.parametrize("stage", ["stage", "requantize"])
def test_sees_scales_of_another_row(stage):
    def intervene(made: Stage) -> Stage:
        if made.name != stage:
            return made
        return replace(made, tensors={**made.tensors, "scales": made.tensors["scales"].roll(1, 0)})

    assert equal(NVFP4, build(SMALL, NVFP4), intervene=lambda made: made)
    assert not equal(NVFP4, build(SMALL, NVFP4), intervene=intervene)


# --- and what it does not ------------------------------------------------------------------------------------------


def test_does_not_see_gate_and_up_exchanged_in_vllms_numbers():
    layer = build(SMALL, LATE, 2, numbers=VLLM)
    assert equal(LATE, weight("w13", lambda w: w.roll(w.shape[1] // 2, 1))(layer))


@pytest.mark.parametrize(
    ("scheme", "blind"),
    [
        (NVFP4, replace(NVFP4, fc1=replace(NVFP4.fc1, k_order=KOrder.NATURAL))),
        (NVFP4, replace(NVFP4, fc1=replace(NVFP4.fc1, core=replace(NVFP4.fc1.core, fraction_bits=7, output_bits=7)))),
        (NVFP4, replace(NVFP4, requantize=replace(NVFP4.requantize, block=128), fc2=replace(NVFP4.fc2, chunk=128))),
        (NVFP4, replace(NVFP4, requantize=replace(NVFP4.requantize, apply=NVFP4.stage.apply))),
        (EARLY, LATE),
    ],
    ids=["order", "width", "block", "division", "weights"],
)
def test_does_not_see(scheme, blind):
    """At an I where blocks of 128 hold one value too."""
    assert equal(blind, build(replace(SMALL, intermediate=1024), scheme, 2, spread=1))


# --- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "changes", "says"),
    [
        (NVFP4, {"ep_size": 3}, r"tokens_per_rank must be a number >= 0 for each of ep_size = 3 ranks"),
        (NVFP4, {"tokens_per_rank": (2, 2)}, r"tokens_per_rank .* ep_size = 1 .*, got \[2, 2\]"),
        (NVFP4, {"tokens_per_rank": -1}, r"tokens_per_rank .*, got \[-1\]"),
        (NVFP4, {"tokens_per_rank": 17}, r"hidden of H256-I512-E8-k4 must be at least 272 for 17 tokens"),
        (NVFP4, {"geometry": replace(SMALL, intermediate=256)}, r"intermediate of .* at least 448"),
        (NVFP4, {"geometry": replace(SMALL, top_k=1)}, r"top_k of .* at least 2"),
        (NVFP4, {"dense": True}, r"dense: .* rounds"),
        (find_scheme("sm90_fp8_mxfp4_bf16_pull_cutedsl"), {"dense": True}, r"dense: .* takes no bf16 weights"),
        (replace(NVFP4, gate_up_clamp=7.0), {}, r"gate_up_clamp: gate must be at least 10, .* got 7"),
        (replace(EARLY, gate_up_clamp=10.0), {"tokens_per_rank": 8, "spread": 1}, r"numbers: .* not exact in E4M3"),
        (replace(PER_TENSOR, fc1_activation_dequant_scale=3.0), {}, r"numbers: .* not exact in E4M3"),
        (replace(PER_TENSOR, fc2_activation_dequant_scale=0.1), {}, r"numbers: .* not exact in E4M3"),
        (NVFP4, {"numbers": VLLM}, r"numbers: \[149.33.*\] is not exact in E4M3"),
        (replace(EARLY, input_norm_const=0.3), {}, r"numbers: .* is not exact in E4M3"),
        (BF16, {"numbers": replace(FAMILIES["fp8"], ups=(1.9921875,))}, r"numbers: .* no bf16 numbers"),
    ],
)
def test_refused(scheme, changes, says):
    with pytest.raises(ValueError, match=says):
        build(**{"geometry": SMALL, "scheme": scheme, **changes})


def test_memory():
    """Seen as large, but not there: 384 experts of 66 million weights."""
    lazy = build(GEOMETRIES[0], NVFP4).weights
    assert lazy.w13.shape == (384, 6144, 3584)
    assert {name: t.stride(0) for name, t in vars(lazy).items() if t is not None and name != "w2" and t.ndim > 1} == {
        "w13": 0,
        "w13_scale": 0,
        "w2_scale": 0,
    }
    small, real = (build(SMALL, NVFP4, materialize=make).weights for make in (False, True))
    for name, tensor in vars(real).items():
        if tensor is not None:
            assert tensor.is_contiguous()
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert torch.equal(tensor, getattr(small, name))


# --- full sizes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Live(Operand):
    """Some rows of an operand; the others are zeros."""

    rows: torch.Tensor | None = None
    size: int = 0


@pytest.fixture
def skips_zeros(monkeypatch) -> None:
    """Rows of w13 and w2 that are all zeros make +0 outputs, so they are not multiplied: 100 times fewer products."""
    load, gemm = moe.load_operand, moe.expert_gemm

    def load_live(scheme, weights, leg, expert):
        payload = getattr(weights, leg)
        rows = payload[expert].any(1).nonzero().flatten()
        mine = weights.of_experts(slice(expert, expert + 1))
        mine = replace(mine, **{name: getattr(mine, name)[:, rows] for name in (leg, f"{leg}_scale")})
        return _Live(**vars(load(scheme, mine, leg, 0)), rows=rows, size=payload.shape[1])

    def gemm_live(rule, x, x_scale, operand):
        out = torch.zeros(len(x), operand.size)
        out[:, operand.rows] = gemm(rule, x, x_scale, operand)
        return out

    monkeypatch.setattr(moe, "load_operand", load_live)
    monkeypatch.setattr(moe, "expert_gemm", gemm_live)


@pytest.mark.usefixtures("skips_zeros")
@pytest.mark.parametrize("scheme", [NVFP4, LATE], ids=["sm90", "sm100"])
def test_skipped_rows_are_the_zeros(scheme, monkeypatch):
    layer = build(SMALL, scheme, 2, spread=1)
    _, live = moe_forward(scheme, layer.weights, layer.inputs)
    monkeypatch.undo()
    _, full = moe_forward(scheme, layer.weights, layer.inputs)
    for found, expected in zip(live, full, strict=True):
        for name, tensor in expected.tensors.items():
            same = tensor.contiguous().view(torch.uint8), found.tensors[name].contiguous().view(torch.uint8)
            assert torch.equal(*same), (expected.name, name)


@pytest.mark.slow
@pytest.mark.usefixtures("skips_zeros")
@pytest.mark.parametrize("ep_size", TOKENS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_row_15_full_sizes(geometry, ep_size):
    layer = build(geometry, NVFP4, ep_size, TOKENS[ep_size])
    reached = torch.cat([x.topk_ids for x in layer.inputs]).unique() // (geometry.num_experts // ep_size)
    assert set(range(ep_size)) <= set(reached.tolist())
    assert equal(NVFP4, layer)


@pytest.mark.slow
@pytest.mark.usefixtures("skips_zeros")
@pytest.mark.parametrize("ep_size", [2, 4])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_row_15_vllms_test(geometry, ep_size):
    """As vLLM runs it on SM100: its numbers, 4 tokens on each rank. Its weights are bf16, these are packed."""
    assert equal(LATE, build(geometry, LATE, ep_size, numbers=VLLM, plain=True))


@pytest.mark.slow
def test_a_full_size_with_its_zeros():
    """Nothing skipped, two experts."""
    geometry = Geometry(4096, 2048, 128, 2)
    assert equal(NVFP4, build(geometry, NVFP4, 2, (1, 3)))
