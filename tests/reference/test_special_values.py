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
from fp4ep.reference.scheme import ScaleSource, Scheme
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


def set_row(inputs: MoEInputs, token: int, row: torch.Tensor) -> MoEInputs:
    x = inputs.hidden_states.clone()
    x[token] = row
    return replace(inputs, hidden_states=x)


def run(scheme: Scheme, inputs, weights: MoEWeights | None = None) -> torch.Tensor | list[torch.Tensor]:
    return moe_forward(scheme, weights or make_weights(scheme), inputs)[0]


def trace(scheme: Scheme, inputs: MoEInputs) -> Trace:
    return moe_forward(scheme, make_weights(scheme), inputs)[1]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))


def is_plus_zero(x: torch.Tensor) -> bool:
    return not bool(x.view(torch.int16).any())


def assert_only_this_row(scheme: Scheme, inputs: MoEInputs, token: int, out: torch.Tensor) -> None:
    """The other tokens' outputs are those of a run without this one."""
    others = [t for t in range(T) if t != token]
    assert same_bits(out[others], run(scheme, take(inputs, others)))


# --- activations -------------------------------------------------------------------------------------------------


@for_each_scheme
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_token(scheme, zero):
    """A row of zeros of either sign gives exactly +0; where the scale is the block's, it is the floor 1e-30."""
    inputs = set_row(make_inputs(), 2, torch.full((H,), zero))
    out, stages = moe_forward(scheme, make_weights(scheme), inputs)
    assert is_plus_zero(out[2])
    if scheme.stage is not None and scheme.stage.source is ScaleSource.AMAX:
        assert torch.equal(
            stages["stage"].tensors["scales"][2], torch.full_like(stages["stage"].tensors["scales"][2], 1e-30)
        )
    assert_only_this_row(scheme, inputs, 2, out)


@for_each_scheme
def test_sign_of_zero_elements(scheme):
    """-0 and +0 inside a row contribute the same: nothing."""
    inputs = make_inputs()
    x = inputs.hidden_states.clone()
    x[:, ::3] = 0.0
    plus = replace(inputs, hidden_states=x)
    x = x.clone()
    x[:, ::3] = -0.0
    assert same_bits(run(scheme, plus), run(scheme, replace(inputs, hidden_states=x)))


TINY = [1e-31, 1e-38, 2.0**-133]  # below the scale floor; near float32's smallest normal; bf16's smallest subnormal


@for_each_scheme
@pytest.mark.parametrize("tiny", TINY)
def test_tiny_row(scheme, tiny):
    """Tiny rows are no special case to the output: gate * up underflows float32, so it is +0, and never NaN."""
    inputs = set_row(make_inputs(), 4, torch.linspace(-1, 1, H).sign() * tiny)
    out = run(scheme, inputs)
    assert is_plus_zero(out[4])
    assert_only_this_row(scheme, inputs, 4, out)


def assert_digits_kept(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """codes * scales is values to E4M3's precision.

    Half a step of E4M3: 2^-4 relative for normal codes, 2^-10 scales for subnormal ones. Factor and scale are each one
    float32 rounding away from exact, a subnormal scale (2.9e-39, 2^21 steps) by 2^-22: together below 2^-20.
    """
    split = blocks(values.double(), values.shape[1] // scales.shape[1]).double()
    found = blocks(codes, split.shape[-1]).double() * scales.double()[..., None]
    bound = torch.maximum(split.abs() * 2**-4, scales.double()[..., None] * 2**-10) + split.abs() * 2**-20
    assert bool(((found - split).abs() <= bound).all())


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=str)
@pytest.mark.parametrize("tiny", TINY)
def test_tiny_row_keeps_its_digits(scheme, tiny):
    """FP4 kernels: below 448e-30 the factor is 448 / amax (bounded), so codes of a tiny row are as good as any."""
    row = (torch.linspace(-1, 1, H) * tiny).bfloat16()
    assert bool(row.any())
    staged = trace(scheme, set_row(make_inputs(), 0, row))["stage"].tensors
    assert_digits_kept(row[None].float(), staged["values"][:1], staged["scales"][:1])


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=str)
def test_tiny_swiglu_output_keeps_its_digits(scheme):
    """The same safe path before fc2: routing weights of 2^-110 leave SwiGLU outputs near 1e-33."""
    inputs = make_inputs()
    stages = trace(scheme, replace(inputs, topk_weights=torch.full((T, TOP_K), 2.0**-110)))
    activated, requantized = stages["activation"].tensors["values"], stages["requantize"].tensors
    assert 0 < float(activated.abs().max()) < 4.48e-28
    assert_digits_kept(activated, requantized["values"], requantized["scales"])


def test_tiny_row_under_the_scale_floor():
    """FP8 blockwise has no safe path: the scale stops at 1e-30, so 1e-31 becomes E4M3(0.1), and 1e-38 becomes 0."""
    blockwise = SCHEMES[4]
    for tiny, code in ((1e-31, 0.1015625), (1e-38, 0.0)):
        staged = trace(blockwise, set_row(make_inputs(), 0, torch.full((H,), tiny)))["stage"].tensors
        assert bool((staged["scales"][0] == torch.tensor(1e-30)).all())
        assert bool((staged["values"][0] == code).all())


@for_each_scheme
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nan_and_infinity(scheme, value):
    """One NaN or infinity in a row makes the whole output row NaN, and no other row."""
    inputs = make_inputs()
    row = inputs.hidden_states[3].clone()
    row[17] = value
    inputs = set_row(inputs, 3, row)
    out = run(scheme, inputs)
    assert bool(out[3].isnan().all())
    assert_only_this_row(scheme, inputs, 3, out)


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
    """A token without a live slot gives exactly +0, even when its row holds NaN."""
    inputs = set_row(make_inputs(), 1, torch.full((H,), NAN))
    ids = inputs.topk_ids.clone()
    ids[1] = -1
    inputs = replace(inputs, topk_ids=ids)
    out = run(scheme, inputs)
    assert is_plus_zero(out[1])
    assert_only_this_row(scheme, inputs, 1, out)


@for_each_scheme
def test_all_tokens_masked(scheme):
    inputs = make_inputs()
    out = run(scheme, replace(inputs, topk_ids=torch.full((T, TOP_K), -1)))
    assert out.shape == (T, H)
    assert is_plus_zero(out)


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
    assert torch.equal(run(scheme, negated), -run(scheme, inputs))


@for_each_scheme
def test_power_of_two_routing_weights(scheme):
    """Weights scaled by 2^-3 scale the output exactly: the scale before fc2 takes the factor, the codes do not change.

    With a static scale that scale must be given the factor too. Nothing here comes near underflow: amax scales are
    above 2^-20 and route outputs are bf16, with float32's exponents.
    """
    inputs = make_inputs()
    scaled = replace(inputs, topk_weights=inputs.topk_weights / 8)
    other = scheme
    if scheme.requantize is not None and scheme.requantize.source is ScaleSource.STATIC:
        assert not torch.equal(run(scheme, scaled), run(scheme, inputs) / 8)  # static: codes change
        other = replace(scheme, fc2_activation_dequant_scale=scheme.fc2_activation_dequant_scale / 8)
    assert torch.equal(run(other, scaled), run(scheme, inputs) / 8)


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
        for case in (fc1["gate"] > limit, fc1["up"] > limit, fc1["up"] < -limit):
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
    assert not same_bits(run(scheme, inputs), run(scheme, inputs, replace(weights, **swapped)))


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
    assert same_bits(torch.cat(out), run(scheme, inputs))


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
    assert same_bits(run(scheme, take(inputs, order)), run(scheme, inputs)[order])


@for_each_scheme
@pytest.mark.parametrize("ep_size", [1, 2])
def test_permuting_experts_changes_no_bit(scheme, ep_size):
    """Weights, scales and ids permuted together (vllm#34646: cached scales stayed behind)."""
    weights, inputs = make_weights(scheme), make_inputs()
    order = torch.tensor([2, 0, 3, 1])  # expert at each new place
    moved = MoEWeights(
        *(None if (w := getattr(weights, f)) is None else w[order] for f in weights.__dataclass_fields__)
    )
    renamed = replace(inputs, topk_ids=order.argsort()[inputs.topk_ids])
    parts = [take(renamed, tokens) for tokens in torch.arange(T).chunk(ep_size)]
    assert same_bits(torch.cat(run(scheme, parts, moved)), run(scheme, inputs))
