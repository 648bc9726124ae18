"""From router logits to topk_ids and topk_weights: one function for every record in `routers.py`.

Functions and sums are computed in float64 and rounded once to float32; everything else is IEEE arithmetic in the score
dtype. So equal logits have equal scores wherever they stand, and a token's routing does not depend on its neighbours,
which does not hold for torch's own float32 kernels on a CPU.
"""

from dataclasses import dataclass

import torch

from .routers import (
    REFUSED,
    ROUTERS,
    Bias,
    Groups,
    NanScore,
    Order,
    Renormalize,
    Router,
    Scaling,
    Score,
    Shortfall,
    Weight,
    find_router,
    router_of_number,
)

__all__ = ["REFUSED", "ROUTERS", "Router", "Routing", "find_router", "route", "router_of_number"]


@dataclass(frozen=True)
class Routing:
    """topk_ids `[T, top_k]` int64 (-1: masked), topk_weights `[T, top_k]` float32, scores `[T, E]` float32, unbiased.

    Slots are in the order of selection. Live ids of a token are distinct and in [0, E) whatever the logits.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    scores: torch.Tensor


def route(
    router: Router,
    logits: torch.Tensor,
    top_k: int,
    *,
    bias: torch.Tensor | None = None,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    routed_scaling_factor: float = 1.0,
    token_ids: torch.Tensor | None = None,
    expert_table: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Routing:
    """Route tokens.

    logits: `[T, E]` float32, bf16 or fp16. bias: `[E]`, or `[T, E]` where tokens differ (DeepSeek-V4's image tokens),
    of the same dtypes. token_ids `[T]` and expert_table `[vocabulary, top_k]`, integers: hash routing. is_padding `[T]`
    bool: rows that get ids -1 and weights 0, whatever their logits. generator: simulated routing.

    NaN: a NaN logit gives a NaN score, which `router.nan_score` keeps or clears, and `router.order` says where it
    ranks; a kept one that is selected is a NaN weight, and with renormalization so are the token's others (but see
    Renormalize.SUM_OR_ONE). A row with +inf is NaN under softmax. A sum of 0 is NaN under Renormalize.SUM only.

    Raises ValueError naming the argument: wrong shape, dtype or range, or not what the router takes.
    """
    _check(router, logits, top_k, bias, num_expert_group, topk_group, routed_scaling_factor)
    _check_rest(router, logits, top_k, token_ids, expert_table, is_padding, generator)
    if bias is not None and router.bias_dtype is not None:
        bias = bias.to(router.bias_dtype)
    if bias is not None and router.bias is Bias.LOGITS:
        logits = logits.float() + bias.float()
    scores = _score(router.score, logits, generator).to(router.score_dtype or logits.dtype)
    if router.nan_score is NanScore.ZERO:
        scores = torch.where(scores.isfinite(), scores, 0)
    if expert_table is not None and token_ids is not None:
        ids = expert_table[token_ids].long()
        live = torch.ones_like(ids, dtype=torch.bool)
    else:
        ids, live = _select(router, scores, bias, top_k, num_expert_group, topk_group)
    weights = _renormalize(router, _weights(router, logits, scores, ids, live), routed_scaling_factor)
    weights = weights.to(router.weight_dtype).float()
    if is_padding is not None:
        live = live & ~is_padding[:, None]
    return Routing(torch.where(live, ids, -1), torch.where(live, weights, 0.0), scores.float())


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """float64 to float32; a NaN that was computed is positive, as on a GPU."""
    return torch.where(values.isnan(), torch.nan, values.float())


def _score(score: Score, logits: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    x = logits.double()
    match score:
        case Score.SOFTMAX:
            return _rounded(torch.softmax(x, dim=-1))
        case Score.SIGMOID:
            return _rounded(1 / (1 + _rounded(torch.exp(-x))))
        case Score.SIGMOID_TANH:
            return 0.5 * _rounded(torch.tanh(0.5 * x)) + 0.5
        case Score.SQRT_SOFTPLUS:
            log1p = _rounded(torch.log1p(_rounded(torch.exp(-x.abs())).double()))
            return _rounded((logits.float().clamp_min(0) + log1p).double().sqrt())
        case Score.SQRT_SOFTPLUS_LOG:
            log = _rounded(torch.log((1 + _rounded(torch.exp(x))).double()))
            return _rounded(torch.where(x > 20, x, log.double()).sqrt())
        case Score.IDENTITY:
            return logits.float()
        case Score.UNIFORM:
            return torch.rand(logits.shape, generator=generator)


def _order(keys: torch.Tensor, order: Order) -> torch.Tensor:
    """Positions along the last dimension, best first; equal keys in ascending order."""
    keys = keys.float()
    if order is Order.NAN_LOW:
        keys = torch.where(keys.isnan(), -1e30, keys)
    if order is Order.BITS:
        bits = keys.contiguous().view(torch.int32)
        keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.argsort(keys, dim=-1, descending=True, stable=True)


def _select(
    router: Router,
    scores: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    num_expert_group: int | None,
    topk_group: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids `[T, top_k]`, best first, and which of the slots are live."""
    added = bias if router.bias is Bias.SELECTS else None
    keys = scores if added is None else scores + added
    if num_expert_group is not None and topk_group is not None:
        grouped = keys.unflatten(-1, (num_expert_group, -1))
        two = added is not None or router.groups is Groups.TOP2
        best = grouped.gather(-1, _order(grouped, router.order)[..., : 2 if two else 1]).sum(-1)
        chosen = _order(best, router.order)[:, :topk_group]
        keep = torch.zeros(best.shape, dtype=torch.bool).scatter_(1, chosen, True)
        keys = torch.where(keep[..., None], grouped, -torch.inf).flatten(-2)
    ids = _order(keys, router.order)[:, :top_k]
    live = keys.gather(1, ids) != -torch.inf
    return ids, live | (router.shortfall is Shortfall.FILL)


def _weights(
    router: Router, logits: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, live: torch.Tensor
) -> torch.Tensor:
    """Weights `[T, top_k]` before renormalization; 0 where a slot is not live."""
    selected = logits.gather(1, ids)
    match router.weight:
        case Weight.SCORE:
            weights = scores.gather(1, ids)
        case Weight.SIGMOID:
            weights = _score(Score.SIGMOID, selected)
        case Weight.SIGMOID_TANH:
            weights = _score(Score.SIGMOID_TANH, selected)
        case Weight.SOFTMAX:
            weights = _score(Score.SOFTMAX, torch.where(live, selected, -torch.inf))
        case Weight.SOFTMAX_ALL:
            total = torch.logsumexp(logits.double(), dim=-1, keepdim=True)
            weights = _rounded(torch.exp(selected - total))
        case Weight.ONE:
            weights = torch.ones(ids.shape)
    return torch.where(live, weights, 0)


def _renormalize(router: Router, weights: torch.Tensor, factor: float) -> torch.Tensor:
    total = weights.double().sum(-1, keepdim=True).float().to(weights.dtype)
    match router.renormalize:
        case Renormalize.NONE:
            denominator = torch.ones_like(total)
        case Renormalize.SUM:
            denominator = total
        case Renormalize.SUM_PLUS_EPSILON:
            denominator = total + router.epsilon
        case Renormalize.SUM_AT_LEAST_EPSILON:
            denominator = total.clamp_min(router.epsilon)
        case Renormalize.SUM_OR_ONE:
            denominator = torch.where(total > 0, total, 1)
    match router.scaling:
        case Scaling.REFUSED:
            return weights / denominator
        case Scaling.WEIGHT_FIRST:
            return weights * factor / denominator
        case Scaling.QUOTIENT:
            return weights / denominator * factor
        case Scaling.FACTOR:
            return weights * (torch.tensor(factor, dtype=weights.dtype) / denominator)
        case Scaling.RECIPROCAL:
            return weights * (torch.ones_like(denominator) / denominator) * factor


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _check(
    router: Router,
    logits: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None,
    num_expert_group: int | None,
    topk_group: int | None,
    factor: float,
) -> None:
    if logits.ndim != 2 or logits.dtype not in _FLOATS:
        raise ValueError(
            f"logits must be [tokens, experts], float32, bf16 or fp16; got {list(logits.shape)} {logits.dtype}"
        )
    tokens, experts = logits.shape
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be from 1 to the {experts} experts, got {top_k}")
    if router.top_k not in (None, top_k):
        raise ValueError(f"top_k must be {router.top_k} for router {router.name}, got {top_k}")
    if bias is not None and router.bias is Bias.NONE:
        raise ValueError(f"bias: router {router.name} has none")
    if bias is not None and (bias.shape not in ((experts,), (tokens, experts)) or bias.dtype not in _FLOATS):
        raise ValueError(
            f"bias must be [{experts}] or [{tokens}, {experts}], float32, bf16 or fp16;"
            f" got {list(bias.shape)} {bias.dtype}"
        )
    if router.groups is Groups.NONE and (num_expert_group is not None or topk_group is not None):
        raise ValueError(f"num_expert_group, topk_group: router {router.name} has no groups")
    if router.groups is not Groups.NONE:
        if num_expert_group is None or topk_group is None:
            raise ValueError(f"num_expert_group and topk_group must be given for router {router.name}")
        if num_expert_group < 1 or experts % num_expert_group:
            raise ValueError(f"num_expert_group must divide the {experts} experts, got {num_expert_group}")
        if not 1 <= topk_group <= num_expert_group:
            raise ValueError(f"topk_group must be from 1 to num_expert_group {num_expert_group}, got {topk_group}")
    if factor != 1.0 and router.scaling is Scaling.REFUSED:
        raise ValueError(f"routed_scaling_factor: router {router.name} does not apply it; multiply the layer's output")


def _check_rest(
    router: Router,
    logits: torch.Tensor,
    top_k: int,
    token_ids: torch.Tensor | None,
    expert_table: torch.Tensor | None,
    is_padding: torch.Tensor | None,
    generator: torch.Generator | None,
) -> None:
    tokens, experts = logits.shape
    if not router.hash_routing and (token_ids is not None or expert_table is not None):
        raise ValueError(f"token_ids, expert_table: router {router.name} has no hash routing")
    if router.hash_routing:
        if token_ids is None or expert_table is None:
            raise ValueError(f"token_ids and expert_table must be given for router {router.name}")
        if expert_table.ndim != 2 or expert_table.shape[1] != top_k or expert_table.is_floating_point():
            raise ValueError(
                f"expert_table must be [vocabulary, {top_k}] integers,"
                f" got {list(expert_table.shape)} {expert_table.dtype}"
            )
        if token_ids.shape != (tokens,) or token_ids.is_floating_point():
            raise ValueError(f"token_ids must be [{tokens}] integers, got {list(token_ids.shape)} {token_ids.dtype}")
        _check_range("token_ids", token_ids, len(expert_table))
        _check_range("expert_table", expert_table, experts)
    if is_padding is not None and (is_padding.shape != (tokens,) or is_padding.dtype != torch.bool):
        raise ValueError(f"is_padding must be [{tokens}] bool, got {list(is_padding.shape)} {is_padding.dtype}")
    if generator is not None and router.score is not Score.UNIFORM:
        raise ValueError(f"generator: router {router.name} draws no random numbers")


def _check_range(name: str, values: torch.Tensor, end: int) -> None:
    bad = values[(values < 0) | (values >= end)]
    if bad.numel():
        raise ValueError(f"{name} must be in [0, {end}), got {int(bad[0])}")
