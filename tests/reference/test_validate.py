"""Every check of `validate.py`: the argument it names, what it allows, what it got, and that nothing ran before it."""

import ast
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from fp4ep.reference import moe, validate
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.scheme import Scheme, Weights
from fp4ep.reference.schemes import SCHEMES, find_scheme
from fp4ep.reference.types import MoEInputs, MoEWeights
from fp4ep.reference.validate import InputError, check_arguments

E, H, I, T, TOP_K = 4, 256, 128, 3, 2  # noqa: E741

FP8 = "sm90_fp8_fp8_bf16_pull_cutedsl"
NVFP4 = find_scheme("sm90_fp8_nvfp4_bf16_pull_cutedsl")
MXFP4 = find_scheme("sm90_fp8_mxfp4_bf16_pull_cutedsl")
PER_TENSOR = find_scheme(FP8)
E5M2 = find_scheme(FP8, kind="fp8_e5m2")
BLOCKWISE = find_scheme(FP8, fp8_scale_mode="blockwise")
BF16 = find_scheme("sm90_bf16_bf16_bf16_pull_cutedsl")
FP8_DTYPE = torch.float8_e4m3fn


@dataclass(frozen=True)
class Problem:
    weights: MoEWeights
    ranks: tuple[MoEInputs, ...]
    max_tokens_per_rank: int | None = None
    workspace: tuple[torch.Tensor, ...] | None = None


Mutation = Callable[[Problem], Problem]


@cache
def dense(hidden: int = H, intermediate: int = I) -> MoEWeights:
    shapes = (E, 2 * intermediate, hidden), (E, hidden, intermediate)
    return MoEWeights(*(torch.ones(shape, dtype=torch.bfloat16) for shape in shapes))


@cache
def packed(scheme: Scheme, hidden: int = H, intermediate: int = I) -> MoEWeights:
    legs = (2 * intermediate, hidden), (hidden, intermediate)
    if scheme.weights in (Weights.NVFP4, Weights.NVFP4_BLOCK_SCALED, Weights.MXFP4):
        block = 32 if scheme.weights is Weights.MXFP4 else 16
        payloads = [torch.zeros(E, n, k // 2, dtype=torch.uint8) for n, k in legs]
        scales = [torch.full((E, n, k // block), 56, dtype=torch.uint8) for n, k in legs]
    else:
        payloads = [torch.zeros(E, n, k, dtype=torch.uint8) for n, k in legs]
        per_expert = scheme.weights is Weights.FP8_PER_EXPERT
        scales = [torch.ones(E) if per_expert else torch.ones(E, n // 128, k // 128) for n, k in legs]
    return MoEWeights(*payloads, *scales)


def tokens(hidden: int = H, count: int = T, top_k: int = TOP_K) -> MoEInputs:
    ids = torch.arange(count * top_k).reshape(count, top_k) % E
    return MoEInputs(torch.ones(count, hidden, dtype=torch.bfloat16), ids, torch.ones(count, top_k))


def good(scheme: Scheme) -> Problem:
    """Dense weights where the scheme takes them."""
    return Problem(dense() if scheme.dense_weights else packed(scheme), (tokens(),))


def weights(**changes) -> Mutation:
    """Set fields of the weights; a callable value gets the old one."""

    def mutate(problem: Problem) -> Problem:
        new = {k: v(getattr(problem.weights, k)) if callable(v) else v for k, v in changes.items()}
        return replace(problem, weights=replace(problem.weights, **new))

    return mutate


def inputs(**changes) -> Mutation:
    """Set fields of the last rank's inputs; a callable value gets the old one."""

    def mutate(problem: Problem) -> Problem:
        last = problem.ranks[-1]
        new = {k: v(getattr(last, k)) if callable(v) else v for k, v in changes.items()}
        return replace(problem, ranks=(*problem.ranks[:-1], replace(last, **new)))

    return mutate


def sizes(scheme: Scheme, hidden: int = H, intermediate: int = I) -> Mutation:
    made = dense(hidden, intermediate) if scheme.dense_weights else packed(scheme, hidden, intermediate)
    return lambda problem: Problem(made, (tokens(hidden),))


def pack(scheme: Scheme, *then: Mutation) -> Mutation:
    """Quantized weights, then further mutations."""
    return chain(lambda problem: replace(problem, weights=packed(scheme)), *then)


def chain(*mutations: Mutation) -> Mutation:
    def mutate(problem: Problem) -> Problem:
        for step in mutations:
            problem = step(problem)
        return problem

    return mutate


def put(value: float, experts: int | list[int] = -1) -> Callable[[torch.Tensor], torch.Tensor]:
    """Overwrite the last element (of these experts, or of the tensor)."""

    def mutate(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(len(tensor), -1)[experts, -1] = value
        return tensor

    return mutate


def staged(dtype: torch.dtype = FP8_DTYPE, scales: torch.Tensor | None = None) -> Mutation:
    return inputs(hidden_states=lambda x: x.to(dtype), scales=scales)


def workspace(count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Mutation:
    return lambda problem: replace(problem, workspace=(torch.zeros(shape, dtype=dtype),) * count)


def ranks(count: int, last: MoEInputs | None = None) -> Mutation:
    return lambda problem: replace(problem, ranks=(*[tokens()] * (count - 1), last or tokens()))


def check(scheme: Scheme, problem: Problem) -> None:
    check_arguments(scheme, problem.weights, problem.ranks, problem.max_tokens_per_rank, problem.workspace)


NAN, INF = float("nan"), float("inf")
CODES, POSITIVE = "E4M3 codes 0..126 (finite, not negative)", "positive and finite"
NOT_POSITIVE = "zero, negative, NaN or infinity in experts [3]"
SCALE_ROWS = [("w13_scale", 0.0), ("w13_scale", -1.0), ("w2_scale", NAN), ("w2_scale", INF)]

# id, scheme, mutation, the argument, what is allowed, what it got
CASES: list[tuple[str, Scheme, Mutation, str, str, str]] = [
    # ranks and alignment
    ("no ranks", NVFP4, lambda p: replace(p, ranks=()), "inputs", "at least one rank", "an empty sequence"),
    ("3 ranks of 4 experts", NVFP4, ranks(3), "inputs", "divides the 4 experts", "got 3"),
    ("more ranks than experts", NVFP4, ranks(8), "inputs", "divides the 4 experts", "got 8"),
    ("nvfp4 hidden", NVFP4, sizes(NVFP4, hidden=192), "w13", "multiple of 128", "got 192"),
    ("mxfp4 hidden", MXFP4, sizes(MXFP4, hidden=192), "w13", "multiple of 128", "got 192"),
    ("per_tensor hidden", PER_TENSOR, sizes(PER_TENSOR, hidden=96), "w13", "multiple of 64", "got 96"),
    ("blockwise hidden", BLOCKWISE, sizes(BLOCKWISE, hidden=192), "w13", "multiple of 128", "got 192"),
    ("bf16 hidden", BF16, sizes(BF16, hidden=384), "w13", "multiple of 256", "got 384"),
    ("nvfp4 intermediate", NVFP4, sizes(NVFP4, intermediate=192), "w2", "multiple of 128", "got 192"),
    ("mxfp4 intermediate", MXFP4, sizes(MXFP4, intermediate=192), "w2", "multiple of 128", "got 192"),
    ("per_tensor intermediate", PER_TENSOR, sizes(PER_TENSOR, intermediate=96), "w2", "multiple of 64", "got 96"),
    ("blockwise intermediate", BLOCKWISE, sizes(BLOCKWISE, intermediate=192), "w2", "multiple of 128", "got 192"),
    ("bf16 intermediate", BF16, sizes(BF16, intermediate=96), "w2", "multiple of 64", "got 96"),
    # tokens
    ("hidden 1-D", NVFP4, inputs(hidden_states=lambda x: x[0]), "hidden_states", "[tokens, 256]", "got [256]"),
    ("hidden narrow", BF16, inputs(hidden_states=lambda x: x[:, :128]), "hidden_states", "[tokens, 256]", "[3, 128]"),
    ("hidden per rank", NVFP4, ranks(2, tokens(hidden=128)), "hidden_states (rank 1)", "[tokens, 256]", "[3, 128]"),
    ("hidden float32", NVFP4, inputs(hidden_states=torch.ones(T, H)), "hidden_states", "bfloat16, or", "torch.float32"),
    ("hidden fp16", BF16, inputs(hidden_states=lambda x: x.half()), "hidden_states", "be bfloat16, got", "float16"),
    ("staged for bf16", BF16, staged(scales=torch.ones(T, 1)), "hidden_states", "be bfloat16, got", "float8_e4m3fn"),
    ("hidden uint8 codes", NVFP4, staged(torch.uint8), "hidden_states", "or torch.float8_e4m3fn", "torch.uint8"),
    ("hidden e5m2", NVFP4, staged(torch.float8_e5m2), "hidden_states", "or torch.float8_e4m3fn", "torch.float8_e5m2"),
    ("hidden e4m3 for e5m2", E5M2, staged(), "hidden_states", "or torch.float8_e5m2", "torch.float8_e4m3fn"),
    ("scales beside bf16", NVFP4, inputs(scales=torch.ones(T, 1)), "scales", "None when hidden_states", "a tensor"),
    ("staged, no scales", NVFP4, staged(), "scales", "float32 [3, 1]", "got None"),
    ("staged, no scales, mxfp4", MXFP4, staged(), "scales", "float32 [3, 1]", "got None"),
    ("staged, no scales, blockwise", BLOCKWISE, staged(), "scales", "float32 [3, 2]", "got None"),
    ("staged, double", NVFP4, staged(scales=torch.ones(T, 1).double()), "scales", "float32 [3, 1]", "float64 [3, 1]"),
    ("staged, 1-D", NVFP4, staged(scales=torch.ones(T)), "scales", "float32 [3, 1]", "float32 [3]"),
    ("staged, negative", NVFP4, staged(scales=-torch.ones(T, 1)), "scales", "not negative", "negative values"),
    (
        "staged, one negative",
        BLOCKWISE,
        chain(ranks(2), staged(scales=put(-1e-30)(torch.full((T, 2), NAN)))),
        "scales (rank 1)",
        "not negative",
        "negative values",
    ),
    ("staged, per token", BLOCKWISE, staged(scales=torch.ones(T, 1)), "scales", "float32 [3, 2]", "float32 [3, 1]"),
    (
        "too many tokens",
        NVFP4,
        lambda p: replace(p, max_tokens_per_rank=T - 1),
        "hidden_states (rank 0)",
        "at most max_tokens_per_rank = 2",
        "got 3",
    ),
    ("workspaces", BF16, workspace(2, (T, TOP_K, H)), "workspace", "one tensor for each of 1 ranks", "got 2"),
    ("workspace shape", BF16, workspace(1, (T, H)), "workspace (rank 0)", "bfloat16 [3, 2, 256]", "bfloat16 [3, 256]"),
    (
        "workspace float32",
        BF16,
        workspace(1, (T, TOP_K, H), torch.float32),
        "workspace (rank 0)",
        "bfloat16 [3, 2, 256]",
        "float32 [3, 2, 256]",
    ),
    # routing
    ("ids float", NVFP4, inputs(topk_ids=lambda i: i.float()), "topk_ids", "int64 or int32", "torch.float32"),
    ("ids int16", BF16, inputs(topk_ids=lambda i: i.short()), "topk_ids", "int64 or int32", "torch.int16"),
    ("ids for 2 tokens", NVFP4, inputs(topk_ids=lambda i: i[:2]), "topk_ids", "[tokens, top_k] = [3, 2]", "[2, 2]"),
    ("ids 1-D", NVFP4, inputs(topk_ids=lambda i: i[:, 0]), "topk_ids", "be [tokens, top_k], got", "[3]"),
    ("ids 3-D", BF16, inputs(topk_ids=lambda i: i[:, :, None]), "topk_ids", "be [tokens, top_k], got", "[3, 2, 1]"),
    ("ids 0-D", BF16, inputs(topk_ids=lambda i: i[0, 0]), "topk_ids", "be [tokens, top_k], got", "[]"),
    ("top_k per rank", NVFP4, ranks(2, tokens(top_k=1)), "topk_ids (rank 1)", "[tokens, top_k] = [3, 2]", "[3, 1]"),
    ("top_k 0", NVFP4, lambda p: replace(p, ranks=(tokens(top_k=0),)), "topk_ids", "1 to 32 slots", "got 0"),
    ("top_k 33", NVFP4, lambda p: replace(p, ranks=(tokens(top_k=33),)), "topk_ids", "1 to 32 slots", "got 33"),
    ("id E", NVFP4, inputs(topk_ids=put(E)), "topk_ids", "below num_experts = 4 (negative: masked)", "got 4"),
    ("id E, rank 1", BF16, chain(ranks(2), inputs(topk_ids=put(99))), "topk_ids (rank 1)", "below num_experts", "99"),
    ("weights bf16", NVFP4, inputs(topk_weights=lambda w: w.bfloat16()), "topk_weights", "float32", "torch.bfloat16"),
    ("weights shape", NVFP4, inputs(topk_weights=lambda w: w[:, :1]), "topk_weights", "[3, 2]", "got [3, 1]"),
    # weights: shapes
    ("w13 2-D", BF16, weights(w13=lambda w: w[0]), "w13", "[experts, 2 * intermediate, hidden]", "[256, 256]"),
    ("w13 odd rows", BF16, weights(w13=lambda w: w[:, :255]), "w13", "[experts, 2 * intermediate", "[4, 255, 256]"),
    ("no experts", BF16, weights(w13=lambda w: w[:0], w2=lambda w: w[:0]), "w13", "none of them 0", "[0, 256, 256]"),
    ("no hidden", NVFP4, sizes(NVFP4, hidden=0), "w13", "none of them 0", "[4, 256, 0]"),
    ("no hidden, packed", MXFP4, sizes(MXFP4, hidden=0), "w13", "none of them 0", "[4, 256, 0]"),
    ("no intermediate", BF16, sizes(BF16, intermediate=0), "w13", "none of them 0", "[4, 0, 256]"),
    ("w2 transposed", BF16, weights(w2=lambda w: w.mT), "w2", "= [4, 256, 128]", "[4, 128, 256]"),
    ("w2 experts", NVFP4, weights(w2=lambda w: w[:2]), "w2", "= [4, 256, 128]", "[2, 256, 128]"),
    ("w2 packed K", MXFP4, weights(w2=lambda w: w[..., :32]), "w2", "intermediate / 2] = [4, 256, 64]", "[4, 256, 32]"),
    ("only w13_scale", NVFP4, pack(NVFP4, weights(w2_scale=None)), "w2_scale", "given together", "got None"),
    ("only w2_scale", MXFP4, weights(w13_scale=None), "w13_scale", "given together", "got None"),
    # dense weights
    (
        "mxfp4 from bf16",
        MXFP4,
        lambda p: replace(p, weights=dense()),
        "w13",
        "packed FP4 with scales",
        "torch.bfloat16",
    ),
    ("dense float32", BF16, weights(w13=lambda w: w.float()), "w13", "torch.bfloat16, or quantized", "torch.float32"),
    (
        "dense w2 fp64",
        NVFP4,
        weights(w2=lambda w: w.double()),
        "w2",
        "torch.bfloat16 or torch.float16",
        "torch.float64",
    ),
    ("dense global", NVFP4, weights(w13_global_scale=torch.ones(E)), "w13_global_scale", "None with dense", "tensor"),
    ("dense inf", NVFP4, weights(w13=put(-INF, 2)), "w13", "finite", "NaN or infinity in experts [2]"),
    ("dense NaN", NVFP4, weights(w2=put(NAN, [0, 3])), "w2", "finite", "NaN or infinity in experts [0, 3]"),
    # bf16 or quantized: said before anything about shapes
    ("kind first, dense", BF16, weights(w13=lambda w: w[0].float()), "w13", "torch.bfloat16, or", "torch.float32"),
    (
        "kind first, w2",
        NVFP4,
        weights(w13=lambda w: w[0], w2=lambda w: w.double()),
        "w2",
        "torch.bfloat16 or",
        "torch.float64",
    ),
    ("kind first, mxfp4", MXFP4, lambda p: replace(p, weights=dense(96)), "w13", "packed FP4", "torch.bfloat16"),
    ("kind first, packed", MXFP4, weights(w13=lambda w: w[0].char()), "w13", "torch.uint8 with scales", "torch.int8"),
    # quantized weights
    (
        "bf16 with scales",
        BF16,
        weights(w13_scale=torch.ones(E), w2_scale=torch.ones(E)),
        "w13_scale",
        "None: sm90_bf16_bf16_bf16_pull_cutedsl takes bf16 weights only",
        "a tensor",
    ),
    ("nvfp4 int8", NVFP4, pack(NVFP4, weights(w13=lambda w: w.char())), "w13", "torch.uint8 with scales", "torch.int8"),
    ("mxfp4 int8", MXFP4, weights(w2=lambda w: w.char()), "w2", "torch.uint8 with scales", "torch.int8"),
    (
        "e5m2 payload for e4m3",
        PER_TENSOR,
        pack(PER_TENSOR, weights(w13=lambda w: w.view(torch.float8_e5m2))),
        "w13",
        "torch.uint8 or torch.float8_e4m3fn with scales",
        "torch.float8_e5m2",
    ),
    (
        "nvfp4 scale dtype",
        NVFP4,
        pack(NVFP4, weights(w13_scale=lambda s: s.float())),
        "w13_scale",
        "torch.uint8 or torch.float8_e4m3fn [4, 256, 16]",
        "float32 [4, 256, 16]",
    ),
    (
        "nvfp4 scale per 32",
        NVFP4,
        pack(NVFP4, weights(w2_scale=lambda s: s[..., ::2])),
        "w2_scale",
        "[4, 256, 8]",
        "uint8 [4, 256, 4]",
    ),
    (
        "mxfp4 scale float32",
        MXFP4,
        weights(w13_scale=lambda s: s.float()),
        "w13_scale",
        "torch.uint8 [4, 256, 8]",
        "got float32 [4, 256, 8]",
    ),
    (
        "mxfp4 scale per 16",
        MXFP4,
        weights(w2_scale=lambda s: s.repeat(1, 1, 2)),
        "w2_scale",
        "torch.uint8 [4, 256, 4]",
        "[4, 256, 8]",
    ),
    (
        "fp8 scale double",
        PER_TENSOR,
        pack(PER_TENSOR, weights(w13_scale=lambda s: s.double())),
        "w13_scale",
        "torch.float32 [4]",
        "float64 [4]",
    ),
    (
        "fp8 scale per row",
        PER_TENSOR,
        pack(PER_TENSOR, weights(w2_scale=torch.ones(E, H))),
        "w2_scale",
        "torch.float32 [4]",
        "float32 [4, 256]",
    ),
    (
        "fp8 block scale per expert",
        BLOCKWISE,
        pack(BLOCKWISE, weights(w13_scale=torch.ones(E))),
        "w13_scale",
        "torch.float32 [4, 2, 2]",
        "float32 [4]",
    ),
    # values of scales
    ("nvfp4 NaN", NVFP4, pack(NVFP4, weights(w13_scale=put(127))), "w13_scale", CODES, "code 127 in experts [3]"),
    ("nvfp4 -0", NVFP4, pack(NVFP4, weights(w2_scale=put(128, 2))), "w2_scale", CODES, "code 128 in experts [2]"),
    (
        "nvfp4 negative",
        NVFP4,
        pack(NVFP4, weights(w2_scale=put(200, [0, 1]))),
        "w2_scale",
        CODES,
        "code 200 in experts [0, 1]",
    ),
    (
        "nvfp4 negative float8",
        NVFP4,
        pack(NVFP4, weights(w13_scale=lambda s: put(-1.0)(s.view(FP8_DTYPE).float()).to(FP8_DTYPE))),
        "w13_scale",
        CODES,
        "code 184 in experts [3]",
    ),
    *[
        (f"{scheme} {leg} {v}", scheme, pack(scheme, weights(**{leg: put(v)})), leg, POSITIVE, NOT_POSITIVE)
        for scheme in (PER_TENSOR, BLOCKWISE)
        for leg, v in SCALE_ROWS
    ],
    (
        "blockwise scales of two experts",
        BLOCKWISE,
        pack(BLOCKWISE, weights(w13_scale=put(-0.0, [0, 2]))),
        "w13_scale",
        POSITIVE,
        "zero, negative, NaN or infinity in experts [0, 2]",
    ),
    # global scales
    *[
        (f"{leg} {v}", NVFP4, pack(NVFP4, weights(**{leg: put(v)(torch.ones(E))})), leg, POSITIVE, NOT_POSITIVE)
        for leg, v in [(leg.replace("_scale", "_global_scale"), v) for leg, v in SCALE_ROWS]
    ],
    (
        "global scale double",
        NVFP4,
        pack(NVFP4, weights(w13_global_scale=torch.ones(E).double())),
        "w13_global_scale",
        "float32, a scalar or [4]",
        "float64 [4]",
    ),
    (
        "global scale of 3",
        NVFP4,
        pack(NVFP4, weights(w2_global_scale=torch.ones(3))),
        "w2_global_scale",
        "float32, a scalar or [4]",
        "float32 [3]",
    ),
    (
        "mxfp4 global scale",
        MXFP4,
        weights(w13_global_scale=torch.ones(E)),
        "w13_global_scale",
        "None: MXFP4 has no global scale",
        "a tensor",
    ),
    (
        "fp8 global scale",
        BLOCKWISE,
        pack(BLOCKWISE, weights(w2_global_scale=torch.ones(E))),
        "w2_global_scale",
        "None: FP8_BLOCK_128 has no global scale",
        "a tensor",
    ),
]


@pytest.mark.parametrize(
    ("scheme", "mutate", "argument", "allowed", "got"), [row[1:] for row in CASES], ids=[row[0] for row in CASES]
)
def test_check(monkeypatch, scheme, mutate, argument, allowed, got):
    for name in ("quantize_activation", "load_operand"):
        monkeypatch.setattr(moe, name, lambda *args, name=name: pytest.fail(f"{name} ran before the checks"))
    problem = mutate(good(scheme))
    with pytest.raises(InputError) as raised:
        moe_forward(
            scheme,
            problem.weights,
            problem.ranks,
            max_tokens_per_rank=problem.max_tokens_per_rank,
            workspace=problem.workspace,
        )
    message = str(raised.value)
    assert message.startswith(f"{argument} ")
    assert allowed in message
    assert message.endswith(got)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_good_problems_pass(scheme):
    """The table's starting points are valid, so its errors come from the mutations."""
    problem = good(scheme)
    check(scheme, replace(problem, max_tokens_per_rank=T))
    check(scheme, replace(problem, ranks=(tokens(count=0), *problem.ranks)))
    if scheme.packed_weights:
        check(scheme, pack(scheme)(problem))


@pytest.mark.parametrize(
    ("scheme", "mutate"),
    [
        (NVFP4, staged(scales=torch.ones(T, 1))),
        (NVFP4, staged(scales=torch.tensor([[NAN], [INF], [0.0]]))),  # only negative ones are refused
        (BLOCKWISE, staged(scales=torch.ones(T, 2))),
        (PER_TENSOR, staged()),
        (PER_TENSOR, staged(scales=torch.ones(T, 7))),  # a static scale: these are not used
        (NVFP4, pack(NVFP4, weights(w13_global_scale=torch.ones(()), w2_global_scale=torch.ones(E)))),
        (NVFP4, pack(NVFP4, weights(w13_scale=put(126), w2_scale=put(0)))),
        (NVFP4, pack(NVFP4, weights(w13_scale=lambda s: s.view(FP8_DTYPE)))),
        (BF16, inputs(topk_ids=lambda i: put(-5)(i.int()))),
        (BF16, lambda p: replace(p, ranks=(tokens(top_k=32),))),
        (BF16, workspace(1, (T, TOP_K, H))),
    ],
)
def test_good_variants_pass(scheme, mutate):
    check(scheme, mutate(good(scheme)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sm90", None, []), "scheme must be a Scheme (see find_scheme), got 'sm90'"),
        ((BF16, {}, []), "weights must be MoEWeights, got dict"),
        ((BF16, dense(), [{}]), "inputs must be MoEInputs or a sequence of them, got dict"),
        ((BF16, replace(dense(), w2=None), [tokens()]), "w2 must be a torch.Tensor, got NoneType"),
        ((BF16, dense(), [replace(tokens(), topk_ids=[[0]])]), "topk_ids must be a torch.Tensor, got list"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_types(arguments, message):
    with pytest.raises(InputError) as raised:
        moe_forward(*arguments)
    assert str(raised.value) == message


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dense_dtypes(dtype):
    """The quantizing backends take them; values that bf16 holds too give the same output."""
    for scheme in (NVFP4, find_scheme("sm90_fp8_fp8_bf16_pull_cutedsl")):
        given = dense()
        wide = replace(given, w13=given.w13.to(dtype), w2=given.w2.to(dtype))
        narrow = replace(given, w13=wide.w13.bfloat16(), w2=wide.w2.bfloat16())
        assert torch.equal(wide.w13.float(), narrow.w13.float())
        assert torch.equal(moe_forward(scheme, wide, tokens())[0], moe_forward(scheme, narrow, tokens())[0])


def test_every_check_has_a_row():
    """Each call of `_require` in the module is the one that raises in some row."""
    calls = {
        node.lineno: node.end_lineno
        for node in ast.walk(ast.parse(inspect.getsource(validate)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_require"
    }
    reached = set()
    for _, scheme, mutate, *_ in CASES:
        problem = mutate(good(scheme))
        with pytest.raises(InputError) as raised:
            check(scheme, problem)
        line = traceback.extract_tb(raised.value.__traceback__)[-2].lineno
        reached |= {first for first, last in calls.items() if first <= line <= last}
    assert reached == set(calls)
