"""Special values through the whole layer, scheme by scheme: each docstring states a policy, each test an identity.

"Equal" is equality of bits unless -0 may stand for +0, where it says so.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from fp4ep.reference.formats import E2M1, pack_e2m1
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.quantize import blocks, quantize_mx
from fp4ep.reference.scales import ScaleRule
from fp4ep.reference.scheme import Combine, ScaleSource, Scheme
from fp4ep.reference.schemes import find_scheme
from fp4ep.reference.types import MoEInputs, MoEWeights, Trace

E, H, I, T, TOP_K = 4, 256, 128, 6, 2  # noqa: E741
NAN, INF = float("nan"), float("inf")

NVFP4, FP8 = "sm90_fp8_nvfp4_bf16_pull_cutedsl", "sm90_fp8_fp8_bf16_pull_cutedsl"
SCHEMES = [
    find_scheme(NVFP4),
    find_scheme("sm90_fp8_mxfp4_bf16_pull_cutedsl"),
    find_scheme(FP8),
    find_scheme(FP8, kind="fp8_e5m2", fp8_accum_mode="2xacc"),
    find_scheme(FP8, fp8_scale_mode="blockwise"),
    find_scheme("sm90_bf16_bf16_bf16_pull_cutedsl"),
]
for_each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


@cache
def make_weights(scheme: Scheme) -> MoEWeights:
    """bf16 where the scheme takes it, else MXFP4."""
    g = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(shape, generator=g).bfloat16() / 16 for shape in ((E, 2 * I, H), (E, H, I)))
    if scheme.dense_weights:
        return MoEWeights(w13, w2)
    legs = [quantize_mx(w, E2M1, ScaleRule.FLOOR) for w in (w13, w2)]
    return MoEWeights(*(pack_e2m1(leg.codes) for leg in legs), *(leg.scales for leg in legs))


def make_inputs() -> MoEInputs:
    """Distinct experts and non-zero weights in every row."""
    g = torch.Generator().manual_seed(1)
    ids = torch.rand(T, E, generator=g).argsort(1)[:, :TOP_K]
    return MoEInputs(torch.randn(T, H, generator=g).bfloat16(), ids, torch.rand(T, TOP_K, generator=g) + 0.25)


def take(inputs: MoEInputs, tokens) -> MoEInputs:
    return MoEInputs(inputs.hidden_states[tokens], inputs.topk_ids[tokens], inputs.topk_weights[tokens])


def with_rows(rows: dict[int, torch.Tensor]) -> MoEInputs:
    """`make_inputs` with these tokens' hidden states."""
    inputs = make_inputs()
    for token, row in rows.items():
        inputs.hidden_states[token] = row
    return inputs


def run(scheme: Scheme, inputs, weights: MoEWeights | None = None) -> torch.Tensor | list[torch.Tensor]:
    return moe_forward(scheme, weights or make_weights(scheme), inputs)[0]


@cache
def plain(scheme: Scheme) -> torch.Tensor:
    return run(scheme, make_inputs())


def trace(scheme: Scheme, inputs: MoEInputs) -> Trace:
    return moe_forward(scheme, make_weights(scheme), inputs)[1]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))


def is_plus_zero(x: torch.Tensor) -> bool:
    return not bool(x.view(torch.int16).any())


def assert_others_unaffected(scheme: Scheme, tokens, out: torch.Tensor) -> None:
    """Every token but these has the output it has without special values around."""
    others = [t for t in range(T) if t not in tokens]
    assert same_bits(out[others], plain(scheme)[others])


# --- activations -------------------------------------------------------------------------------------------------


@for_each_scheme
def test_zero_tokens(scheme):
    """A row of zeros of either sign gives exactly +0; where the scale is the block's, it is the floor 1e-30."""
    inputs = with_rows({2: torch.zeros(H), 5: -torch.zeros(H)})
    out, stages = moe_forward(scheme, make_weights(scheme), inputs)
    assert is_plus_zero(out[[2, 5]])
    if scheme.stage is not None and scheme.stage.source is ScaleSource.AMAX:
        assert bool((stages["stage"].tensors["scales"][[2, 5]] == torch.tensor(1e-30)).all())
    assert_others_unaffected(scheme, (2, 5), out)


@for_each_scheme
def test_sign_of_zero_elements(scheme):
    """-0 and +0 inside a row contribute the same: nothing."""
    plus, minus = make_inputs(), make_inputs()
    plus.hidden_states[:, ::3] = 0.0
    minus.hidden_states[:, ::3] = -0.0
    assert same_bits(run(scheme, plus), run(scheme, minus))


TINY = [1e-31, 1e-38, 2.0**-133]  # below the scale floor, subnormal, the smallest bf16 subnormal


@for_each_scheme
def test_tiny_rows(scheme):
    """Tiny rows are no special case to the output: gate * up underflows float32, so it is +0, and never NaN."""
    tokens = (0, 3, 4)
    signs = torch.linspace(-1, 1, H).sign()
    out = run(scheme, with_rows({token: signs * tiny for token, tiny in zip(tokens, TINY, strict=True)}))
    assert is_plus_zero(out[list(tokens)])
    assert_others_unaffected(scheme, tokens, out)


def assert_digits_kept(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """The scale is the block's own and not the floor, and codes * scales is values to E4M3's precision.

    Half a step of E4M3: 2^-4 relative for normal codes, 2^-10 scales for subnormal ones. Factor and scale are each one
    float32 rounding away from exact, a subnormal scale (2.9e-39, 2^21 steps) by 2^-22: together below 2^-20.
    """
    split = blocks(values.double(), values.shape[1] // scales.shape[1]).double()
    found = blocks(codes, split.shape[-1]).double() * scales.double()[..., None]
    amax = split.abs().amax(-1).clamp(min=1.3166e-36)  # about 448 / FLT_MAX, so that the factor stays finite
    assert bool((scales.double() <= amax / 448 * (1 + 2**-20)).all())
    bound = torch.maximum(split.abs() * 2**-4, scales.double()[..., None] * 2**-10) + split.abs() * 2**-20
    assert bool(((found - split).abs() <= bound).all())


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=str)
@pytest.mark.parametrize("tiny", TINY)
def test_tiny_row_keeps_its_digits(scheme, tiny):
    """FP4 kernels: below 448e-30 the factor is 448 / amax (bounded), so codes of a tiny row are as good as any."""
    row = (torch.linspace(-1, 1, H) * tiny).bfloat16()
    assert bool(row.any())
    staged = trace(scheme, with_rows({0: row}))["stage"].tensors
    assert_digits_kept(row[None].float(), staged["values"][:1].float(), staged["scales"][:1])


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=str)
def test_tiny_swiglu_output_keeps_its_digits(scheme):
    """The same safe path before fc2: routing weights of 2^-110 leave SwiGLU outputs near 1e-33."""
    inputs = make_inputs()
    stages = trace(scheme, replace(inputs, topk_weights=torch.full((T, TOP_K), 2.0**-110)))
    activated, requantized = stages["activation"].tensors["values"], stages["requantize"].tensors
    assert 0 < float(activated.abs().max()) < 4.48e-28
    assert_digits_kept(activated, requantized["values"].float(), requantized["scales"])


def test_tiny_row_under_the_scale_floor():
    """FP8 blockwise has no safe path: the scale stops at 1e-30, so 1e-31 becomes E4M3(0.1), and 1e-38 becomes 0."""
    blockwise = SCHEMES[4]
    for tiny, code in ((1e-31, 0.1015625), (1e-38, 0.0)):
        staged = trace(blockwise, with_rows({0: torch.full((H,), tiny)}))["stage"].tensors
        assert bool((staged["scales"][0] == torch.tensor(1e-30)).all())
        assert bool((staged["values"][0].float() == code).all())


@for_each_scheme
def test_nan_and_infinity(scheme):
    """One NaN or infinity in a row makes that whole output row the GPU's NaN, 0x7FFF, and no other row."""
    inputs = make_inputs()
    for token, value in ((0, NAN), (3, INF), (5, -INF)):
        inputs.hidden_states[token, 17] = value
    out = run(scheme, inputs)
    assert bool((out[[0, 3, 5]].view(torch.int16) == 0x7FFF).all())
    assert_others_unaffected(scheme, (0, 3, 5), out)


# --- routing -----------------------------------------------------------------------------------------------------


@for_each_scheme
def test_masked_slot(scheme):
    """Any negative id masks its slot, whatever it is and whatever its weight; the token is that of the other slot."""
    inputs = make_inputs()
    first = run(scheme, MoEInputs(inputs.hidden_states, inputs.topk_ids[:, :1], inputs.topk_weights[:, :1]))
    for masked, weight in ((-1, 1.0), (-77, NAN)):
        ids, weights = inputs.topk_ids.clone(), inputs.topk_weights.clone()
        ids[:, 1], weights[:, 1] = masked, weight
        assert same_bits(run(scheme, replace(inputs, topk_ids=ids, topk_weights=weights)), first)
        swapped = replace(inputs, topk_ids=ids.flip(1), topk_weights=weights.flip(1))
        assert same_bits(run(scheme, swapped), first)


@for_each_scheme
def test_fully_masked_token(scheme):
    """A token without a live slot gives exactly +0 (in a fresh workspace), even when its row holds NaN."""
    inputs = with_rows({1: torch.full((H,), NAN)})
    inputs.topk_ids[1] = -1
    out = run(scheme, inputs)
    assert is_plus_zero(out[1])
    assert_others_unaffected(scheme, (1,), out)


@for_each_scheme
def test_all_tokens_masked(scheme):
    inputs = make_inputs()
    out = run(scheme, replace(inputs, topk_ids=torch.full((T, TOP_K), -1)))
    assert out.shape == (T, H)
    assert is_plus_zero(out)


@for_each_scheme
def test_workspace_of_an_earlier_launch(scheme):
    """FP4 and FP8 kernels skip masked slots; the bf16 kernel adds what lies there. Live slots are overwritten."""
    inputs = make_inputs()
    inputs.topk_ids[2, 1] = inputs.topk_ids[3] = -1
    fresh = run(scheme, inputs)
    dirty = torch.full((T, TOP_K, H), 3.0, dtype=torch.bfloat16)
    out = moe_forward(scheme, make_weights(scheme), inputs, workspace=[dirty])[0]
    if scheme.combine is Combine.LIVE_SLOTS:
        assert same_bits(out, fresh)
        return
    assert same_bits(out[[0, 1, 4, 5]], fresh[[0, 1, 4, 5]])
    assert same_bits(out[2], (fresh[2].float() + 3.0).bfloat16())
    assert bool((out[3] == 6.0).all())


@for_each_scheme
def test_duplicate_experts(scheme):
    """An expert named twice computes two independent routes: the sum of both, rounded once."""
    inputs = make_inputs()
    ids = inputs.topk_ids[:, :1]
    a, b = (
        run(scheme, MoEInputs(inputs.hidden_states, ids, inputs.topk_weights[:, slot, None])) for slot in range(TOP_K)
    )
    both = run(scheme, replace(inputs, topk_ids=ids.expand(-1, TOP_K)))
    assert same_bits(both, (a.float() + b.float()).bfloat16())


@for_each_scheme
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_routing_weight(scheme, zero):
    """Weight 0 of either sign adds what a masked slot adds, as long as the expert's output is finite."""
    inputs = make_inputs()
    weights, ids = inputs.topk_weights.clone(), inputs.topk_ids.clone()
    weights[:, 1], ids[:, 1] = zero, -1
    masked = replace(inputs, topk_ids=ids)
    assert same_bits(run(scheme, replace(inputs, topk_weights=weights)), run(scheme, masked))


@for_each_scheme
def test_negative_routing_weights(scheme):
    """Negated weights negate the output exactly (+0 stays +0): every rounding is symmetric, truncation goes to zero."""
    inputs = make_inputs()
    negated = replace(inputs, topk_weights=-inputs.topk_weights)
    assert torch.equal(run(scheme, negated), -plain(scheme))


@for_each_scheme
def test_power_of_two_routing_weights(scheme):
    """Weights scaled by 2^-3 scale the output exactly: the scale before fc2 takes the factor, the codes do not change.

    A static scale must be given the factor, too. Exact because nothing here comes near underflow.
    """
    inputs = make_inputs()
    scaled = replace(inputs, topk_weights=inputs.topk_weights / 8)
    other = scheme
    if scheme.requantize is not None and scheme.requantize.source is ScaleSource.STATIC:
        assert not torch.equal(run(scheme, scaled), plain(scheme) / 8)  # static: codes change
        other = replace(scheme, fc2_activation_dequant_scale=scheme.fc2_activation_dequant_scale / 8)
    assert torch.equal(run(other, scaled), plain(scheme) / 8)


@for_each_scheme
def test_expert_without_tokens(scheme):
    """It is not computed: its weights change nothing."""
    weights, inputs = make_weights(scheme), make_inputs()
    inputs = replace(inputs, topk_ids=inputs.topk_ids % (E - 1))
    w13 = weights.w13.clone()
    w13[E - 1] = w13[0]
    assert not torch.equal(w13, weights.w13)
    assert same_bits(run(scheme, inputs), run(scheme, inputs, replace(weights, w13=w13)))


# --- clamp, gate and up, K order ---------------------------------------------------------------------------------


@for_each_scheme
def test_clamp_acts_on_gate_above_and_up_on_both_sides(scheme):
    """The fc1 outputs do not change; SwiGLU outputs differ only where gate > L or |up| > L, and there they do."""
    inputs = make_inputs()
    inputs = replace(inputs, hidden_states=inputs.hidden_states * 16)
    stages = {limit: trace(replace(scheme, gate_up_clamp=limit), inputs) for limit in (None, 2.0, 10.0)}
    fc1 = stages[None]["fc1"].tensors
    for limit in (2.0, 10.0):
        assert torch.equal(stages[limit]["fc1"].tensors["gate"], fc1["gate"])
        changed = stages[limit]["activation"].tensors["values"] != stages[None]["activation"].tensors["values"]
        beyond = (fc1["gate"] > limit) | (fc1["up"].abs() > limit)
        inside = fc1["gate"] <= limit
        for case in (fc1["gate"] > limit, inside & (fc1["up"] > limit), inside & (fc1["up"] < -limit)):
            assert bool((changed & case).any())
        assert not bool((changed & ~beyond).any())
    outputs = [stages[limit]["combine"].tensors["values"] for limit in (None, 2.0, 10.0)]
    assert not any(torch.equal(outputs[i], outputs[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


@for_each_scheme
def test_64_the_clamp_is_not_ignored(scheme):
    """ROCm/aiter#4526: one path ignored the limit for SiLU, so limits 1 and 100 gave identical bytes."""
    inputs = make_inputs()
    outputs = [run(replace(scheme, gate_up_clamp=limit), inputs) for limit in (1.0, 100.0)]
    assert not same_bits(*outputs)


@for_each_scheme
def test_gate_and_up_are_not_interchangeable(scheme):
    """w13 holds gate rows, then up rows; silu(up) * gate is another function."""
    weights, inputs = make_weights(scheme), make_inputs()
    swapped = {
        name: getattr(weights, name).roll(I, dims=1)
        for name in ("w13", "w13_scale")
        if getattr(weights, name) is not None
    }
    assert not same_bits(plain(scheme), run(scheme, inputs, replace(weights, **swapped)))


@for_each_scheme
def test_gate_rows_come_first(scheme):
    """Gate rows of 2^-8, up rows of 3 * 2^-8 and a token of ones: gate 1, up 3, to the nearest integer."""
    rows = torch.tensor([2.0**-8, 3 * 2.0**-8]).repeat_interleave(I)
    w13 = rows[None, :, None].expand(E, -1, H).contiguous().bfloat16()
    weights = make_weights(scheme)
    if scheme.dense_weights:
        weights = replace(weights, w13=w13)
    else:
        leg = quantize_mx(w13, E2M1, ScaleRule.FLOOR)
        weights = replace(weights, w13=pack_e2m1(leg.codes), w13_scale=leg.scales)
    inputs = replace(make_inputs(), hidden_states=torch.ones(T, H, dtype=torch.bfloat16))
    fc1 = moe_forward(scheme, weights, inputs)[1]["fc1"].tensors
    assert bool((fc1["gate"].round() == 1).all())
    assert bool((fc1["up"].round() == 3).all())


def test_kperm():
    """kperm 32 moves elements inside one instruction, which has no order: equal to 0. kperm 64 moves them across."""
    inputs = make_inputs()
    out = {kperm: run(find_scheme(NVFP4, nvfp4_kperm=kperm), inputs) for kperm in (0, 32, 64)}
    assert same_bits(out[0], out[32])
    assert not same_bits(out[0], out[64])


# --- ranks and permutations --------------------------------------------------------------------------------------


@for_each_scheme
@pytest.mark.parametrize("counts", [(6,), (3, 3), (6, 0), (0, 5, 0, 1), (2, 1, 0, 3)], ids=str)
def test_ranks_change_no_bit(scheme, counts):
    """1, 2 or 4 ranks, some without tokens (DeepEP#374 and others): the tokens' outputs are those of one rank."""
    inputs = make_inputs()
    parts = [take(inputs, tokens) for tokens in torch.arange(T).split(counts)]
    out = run(scheme, parts)
    assert [len(part) for part in out] == list(counts)
    assert same_bits(torch.cat(out), plain(scheme))


@for_each_scheme
def test_no_tokens(scheme):
    """T = 0, on one rank or on all: an empty output of the right shape."""
    empty = take(make_inputs(), slice(0, 0))
    for out in (run(scheme, empty), *run(scheme, [empty, empty])):
        assert out.shape == (0, H)
        assert out.dtype is torch.bfloat16


@for_each_scheme
def test_permuting_tokens_permutes_outputs(scheme):
    inputs, order = make_inputs(), torch.tensor([4, 0, 5, 2, 1, 3])
    assert same_bits(run(scheme, take(inputs, order)), plain(scheme)[order])


@for_each_scheme
@pytest.mark.parametrize("ep_size", [1, 2])
def test_permuting_experts_changes_no_bit(scheme, ep_size):
    """Weights, scales and ids permuted together (vllm#34646: cached scales stayed behind)."""
    weights, inputs = make_weights(scheme), make_inputs()
    order = torch.tensor([2, 0, 3, 1])  # expert at each new place
    fields = {name: value for name, value in vars(weights).items() if value is not None}
    moved = MoEWeights(**{name: value[order] for name, value in fields.items()})
    renamed = replace(inputs, topk_ids=order.argsort()[inputs.topk_ids])
    parts = [take(renamed, tokens) for tokens in torch.arange(T).chunk(ep_size)]
    assert same_bits(torch.cat(run(scheme, parts, moved)), plain(scheme))
