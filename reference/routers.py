"""A router: everything that decides expert ids and routing weights, as one frozen record per method.

`routing.py` runs any of them. Nothing here computes. The rules are read from the sources that each record names; where
an implementation runs on a CPU, `checked_against` names it, and docs/routing.md says on how many rows it is equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum

import torch

from .scheme import Evidence


class Score(Enum):
    """What is made of the logits. Each function is computed once and rounded to float32, then to the score dtype."""

    SOFTMAX = "softmax over all experts"
    SIGMOID = "1 / (1 + exp(-x))"  #: 0 below -88.7, where exp(-x) is infinite
    #: FlashInfer's `sigmoid_accurate`: below -18.03 it is 0, where the sigmoid is up to 1.5e-8.
    SIGMOID_TANH = "0.5 * tanh(0.5 * x) + 0.5"
    SQRT_SOFTPLUS = "sqrt(max(x, 0) + log1p(exp(-|x|)))"
    #: Below -16.64 it is 0, where the other form is up to 2.4e-4.
    SQRT_SOFTPLUS_LOG = "sqrt(x if x > 20 else log(1 + exp(x)))"
    IDENTITY = "the logits"
    UNIFORM = "random numbers in [0, 1), whatever the logits: for benchmarks"


class NanScore(Enum):
    KEEP = "a NaN score stays, and is the weight where it is selected"
    ZERO = "a NaN or infinite score is 0"


class Bias(Enum):
    NONE = "there is none"
    SELECTS = "score + bias selects; the weight is the score alone"
    LOGITS = "added to the logits before anything else"


class Order(Enum):
    """Who comes first. Equal keys: the lower expert id, always."""

    NAN_FIRST = "largest first, NaN before +inf (torch.topk)"
    NAN_LOW = "largest first, NaN counts as -1e30"
    #: The unsigned image of the float's bits that radix sorts use.
    BITS = "+NaN, +inf, ..., +0, -0, ..., -inf, -NaN"


class Groups(Enum):
    """What a group of experts is ranked by; experts outside the topk_group best groups count as -inf."""

    NONE = "there are none"
    TOP2 = "the sum of its two largest keys"
    TOP2_OR_MAX = "the sum of its two largest keys with a bias, its largest key without"


class Weight(Enum):
    """What the weights of the selected experts are made of, before renormalization."""

    SCORE = "the score, without the bias"
    SIGMOID = "sigmoid of the selected logit"
    SIGMOID_TANH = "sigmoid of the selected logit, in the form of Score.SIGMOID_TANH"
    SOFTMAX = "softmax over the selected logits"
    SOFTMAX_ALL = "exp(x - logsumexp), over all logits"
    ONE = "1"


class Renormalize(Enum):
    """What the weights of one token are divided by. The sum is computed once and rounded to the score dtype."""

    NONE = "nothing"
    SUM = "sum"  #: 0 / 0 is NaN
    SUM_PLUS_EPSILON = "sum + epsilon"
    SUM_AT_LEAST_EPSILON = "max(sum, epsilon)"
    SUM_OR_ONE = "sum, or 1 where it is not positive"


class Scaling(Enum):
    """How the denominator and routed_scaling_factor come in. They differ by roundings."""

    REFUSED = "weight / denominator; whoever calls the router multiplies by the factor"
    WEIGHT_FIRST = "(weight * factor) / denominator"
    QUOTIENT = "(weight / denominator) * factor"
    FACTOR = "weight * (factor / denominator)"
    RECIPROCAL = "(weight * (1 / denominator)) * factor"


class Shortfall(Enum):
    """What fills the slots when fewer than top_k experts have a key above -inf.

    FlashInfer's and vLLM's CUDA kernels repeat the lowest id there, so that a token goes to one expert several times.
    No record does that: the ids of a token are distinct.
    """

    FILL = "the other experts, lowest id first, with their own weights (torch.topk over a mask)"
    MASK = "-1, weight 0"


@dataclass(frozen=True)
class Router:
    """One routing method of one implementation.

    score_dtype: None: that of the logits, so that bf16 logits give bf16 scores.
    bias_dtype: what the bias is rounded to before it is added; None: it is added as it is.
    weight_dtype: what weights are rounded to at the end. They are returned in float32 all the same.
    top_k: the only value there is, if there is only one.
    hash_routing: ids come from a table by token id; scores give the weights only.
    flashinfer, vllm: the method's number in the two RoutingMethodType enums. They part at 9.
    """

    name: str
    score: Score
    source: str
    nan_score: NanScore = NanScore.KEEP
    bias: Bias = Bias.NONE
    order: Order = Order.NAN_FIRST
    groups: Groups = Groups.NONE
    shortfall: Shortfall = Shortfall.FILL
    weight: Weight = Weight.SCORE
    renormalize: Renormalize = Renormalize.NONE
    epsilon: float = 1e-20
    scaling: Scaling = Scaling.REFUSED
    score_dtype: torch.dtype | None = torch.float32
    bias_dtype: torch.dtype | None = None
    weight_dtype: torch.dtype = torch.float32
    top_k: int | None = None
    hash_routing: bool = False
    flashinfer: int | None = None
    vllm: int | None = None
    evidence: Evidence = Evidence.MODELLED
    checked_against: str | None = None


_BF16 = torch.bfloat16

# FlashInfer's kernels: keys compared as bits, sigmoid by tanh, weights written in bf16.
_DEFAULT = Router(
    "Default",
    Score.SOFTMAX,
    "FlashInfer 0.7.4, trtllm_fused_moe_routing_runner.cu, RoutingCustomPolicy.cuh, RoutingKernelTopK.cuh",
    order=Order.BITS,
    weight_dtype=_BF16,
    flashinfer=0,
    vllm=0,
)
_SIGMOID = replace(_DEFAULT, name="Sigmoid", score=Score.SIGMOID_TANH, flashinfer=8, vllm=8)
_ON_LOGITS = replace(_DEFAULT, name="TopK", score=Score.IDENTITY, flashinfer=5, vllm=5)
_SIGMOID_BIAS = replace(
    _SIGMOID,
    name="MiniMax2",  # and DeepSeekV3 with n_group <= 1
    bias=Bias.SELECTS,
    renormalize=Renormalize.SUM_PLUS_EPSILON,
    scaling=Scaling.WEIGHT_FIRST,
    flashinfer=7,
    vllm=7,
)
_FLASHINFER = (
    _DEFAULT,
    replace(_ON_LOGITS, name="Renormalize", weight=Weight.SOFTMAX, flashinfer=1, vllm=1),
    replace(
        _SIGMOID_BIAS,
        name="DeepSeekV3",
        source="FlashInfer 0.7.4, trtllm_fused_moe_routing_deepseek.cu",
        groups=Groups.TOP2,
        bias_dtype=_BF16,  # routingMainKernel casts a float32 bias to the dtype of the weights
        flashinfer=2,
        vllm=2,
    ),
    replace(
        _ON_LOGITS,
        name="Llama4",
        source="FlashInfer 0.7.4, trtllm_fused_moe_routing_llama4.cu",
        weight=Weight.SIGMOID_TANH,
        top_k=1,
        flashinfer=3,
        vllm=3,
    ),
    # The runner takes it for Renormalize, which it equals but for roundings.
    replace(_ON_LOGITS, name="RenormalizeNaive", weight=Weight.SOFTMAX, flashinfer=4, vllm=4),
    _ON_LOGITS,
    replace(_SIGMOID, name="SigmoidRenorm", renormalize=Renormalize.SUM_AT_LEAST_EPSILON, flashinfer=6, vllm=6),
    _SIGMOID_BIAS,
    _SIGMOID,
    replace(_ON_LOGITS, name="TopKSigmoid", weight=Weight.SIGMOID_TANH, flashinfer=9, vllm=None),
    replace(
        _SIGMOID_BIAS,
        name="fused_topk_deepseek",
        source="FlashInfer 0.7.4, noAuxTcKernels.cu",
        groups=Groups.TOP2,
        weight_dtype=torch.float32,
        flashinfer=None,
        vllm=None,
    ),
    Router(
        "hash_topk",
        Score.SQRT_SOFTPLUS,
        "FlashInfer 0.7.4, hash_topk.cuh",
        renormalize=Renormalize.SUM,
        hash_routing=True,
        checked_against="FlashInfer _hash_topk_reference",
    ),
)

# FlashInfer's own references in torch, which its trace templates carry. They differ from the kernels in more than
# roundings: a bias on the logits, the factor for every method, TopK's weights.
_TRACE_DEFAULT = Router(
    "trace_Default",
    Score.SOFTMAX,
    "FlashInfer 0.7.4, trace/templates/moe.py",
    bias=Bias.LOGITS,
    scaling=Scaling.QUOTIENT,
    checked_against="FlashInfer _trtllm_fp8_block_scale_moe_default_routing_reference",
)


def _trace(name: str, function: str, **changes: object) -> Router:
    function = f"FlashInfer _trtllm_fp8_block_scale_moe_{function}_routing_reference"
    return replace(_TRACE_DEFAULT, name=f"trace_{name}", checked_against=function, **changes)  # type: ignore[arg-type]


_TRACES = (
    _TRACE_DEFAULT,
    _trace("Renormalize", "renormalize", score=Score.IDENTITY, weight=Weight.SOFTMAX),
    _trace(
        "DeepSeekV3",
        "ds",
        score=Score.SIGMOID,
        bias=Bias.SELECTS,
        groups=Groups.TOP2,
        renormalize=Renormalize.SUM_PLUS_EPSILON,
    ),
    _trace("Llama4", "llama4", score=Score.IDENTITY, weight=Weight.SIGMOID, top_k=1),
    _trace("RenormalizeNaive", "renormalize_naive", renormalize=Renormalize.SUM_PLUS_EPSILON),
    _trace("TopK", "topk", score=Score.IDENTITY, weight=Weight.ONE, renormalize=Renormalize.SUM),
    replace(
        _TRACE_DEFAULT,
        name="trace_fused_topk_deepseek",
        score=Score.SIGMOID,
        source="FlashInfer 0.7.4, trace/templates/sampling.py",
        bias=Bias.SELECTS,
        groups=Groups.TOP2,
        renormalize=Renormalize.SUM,
        checked_against="FlashInfer _fused_topk_deepseek_reference",
    ),
)

# What vLLM puts before kernels that take routed tokens.
_VLLM_CUDA = "vLLM, csrc/libtorch_stable/moe/topk_softmax_kernels.cu at 085c812b"
_VLLM_SOFTMAX = Router(
    "vllm_softmax",
    Score.SOFTMAX,
    _VLLM_CUDA,
    nan_score=NanScore.ZERO,
    bias=Bias.SELECTS,
    renormalize=Renormalize.SUM_OR_ONE,
    scaling=Scaling.RECIPROCAL,
)
_VLLM_GROUPED = Router(
    "vllm_grouped_softmax",
    Score.SOFTMAX,
    "vLLM 0.33.0, fused_moe/router/grouped_topk_router.py, grouped_topk",
    bias=Bias.SELECTS,
    groups=Groups.TOP2_OR_MAX,
    renormalize=Renormalize.SUM,
    scaling=Scaling.QUOTIENT,
    score_dtype=None,
    checked_against="vLLM grouped_topk",
)
_VLLM_TOPK_BIAS = replace(
    _VLLM_GROUPED,
    name="vllm_topk_bias",
    score=Score.SIGMOID,
    source="vLLM 0.33.0, fused_moe/router/fused_topk_bias_router.py, the torch part",
    groups=Groups.NONE,
    checked_against="vLLM fused_topk_bias",
)
_VLLM = (
    _VLLM_SOFTMAX,
    replace(_VLLM_SOFTMAX, name="vllm_sigmoid", score=Score.SIGMOID, scaling=Scaling.FACTOR),
    _VLLM_GROUPED,
    replace(_VLLM_GROUPED, name="vllm_grouped_sigmoid", score=Score.SIGMOID),
    replace(
        _VLLM_GROUPED,
        name="vllm_cpu_grouped_sigmoid",
        score=Score.SIGMOID,
        source="vLLM 0.33.0, fused_moe/router/cpu_router.py",
        score_dtype=torch.float32,
        checked_against="vLLM cpu_router._grouped_topk",
    ),
    _VLLM_TOPK_BIAS,
    Router(
        "vllm_cpu_softmax",
        Score.IDENTITY,
        "vLLM 0.33.0, fused_moe/router/cpu_router.py",
        weight=Weight.SOFTMAX_ALL,
        checked_against="vLLM cpu_router._softmax_topk",
    ),
    Router(
        "vllm_llama4",
        Score.IDENTITY,
        "vLLM 0.33.0, models/llama4.py",
        weight=Weight.SIGMOID,
        checked_against="vLLM Llama4MoE.custom_routing_function",
    ),
    Router(
        "DeepseekV4",
        Score.SQRT_SOFTPLUS_LOG,
        "vLLM 0.33.0, fused_moe/router/dsv4_topk.py",
        bias=Bias.SELECTS,
        order=Order.NAN_LOW,
        renormalize=Renormalize.SUM_OR_ONE,
        scaling=Scaling.FACTOR,
        vllm=100,
        checked_against="vLLM dsv4_topk, in Triton's interpreter",
    ),
    Router(
        "DeepseekV4Hash",
        Score.SQRT_SOFTPLUS_LOG,
        "vLLM, csrc/libtorch_stable/moe/topk_softplus_sqrt_kernels.cu at 0d890989",
        renormalize=Renormalize.SUM_OR_ONE,
        scaling=Scaling.FACTOR,
        hash_routing=True,
    ),
    Router(
        "Simulated",
        Score.UNIFORM,
        "vLLM 0.33.0, fused_moe/router/routing_simulator_router.py, uniform_random",
        weight=Weight.ONE,
        vllm=102,
    ),
)

ROUTERS: Mapping[str, Router] = {router.name: router for router in (*_FLASHINFER, *_TRACES, *_VLLM)}

#: Names of the two enums that are no method of their own, and why.
REFUSED: Mapping[str, str] = {
    "Unspecified": "says that no kernel with routing inside does what the model does; name what the model does."
    " It is 9 for vLLM and 10 for FlashInfer, where 9 is TopKSigmoid",
    "Custom": "is a function of the model; give its topk_ids and topk_weights to the layer",
}


def find_router(name: str, **changes: object) -> Router:
    """The router of that name, with fields of the record replaced.

    Raises ValueError naming what there is, also for a field that a router does not have.
    """
    if name in REFUSED:
        raise ValueError(f"router {name!r} {REFUSED[name]}")
    if name not in ROUTERS:
        raise ValueError(f"router must be one of {', '.join(sorted(ROUTERS))}; got {name!r}")
    known = [f.name for f in fields(Router)]
    if unknown := sorted(set(changes) - set(known)):
        raise ValueError(f"a router has no {', '.join(unknown)}; it has {', '.join(known)}")
    return replace(ROUTERS[name], **changes)  # type: ignore[arg-type]


def router_of_number(stack: str, number: int) -> Router:
    """The router that a RoutingMethodType number means to "flashinfer" or to "vllm".

    Both give FlashInfer's kernel for 0 to 8, since vLLM hands that number over. Raises ValueError for other numbers.
    """
    if stack not in ("flashinfer", "vllm"):
        raise ValueError(f"stack must be flashinfer or vllm, got {stack!r}")
    for router in ROUTERS.values():
        if getattr(router, stack) == number:
            return router
    raise ValueError(f"number: {stack} has no routing method {number} that can be computed from logits alone")
