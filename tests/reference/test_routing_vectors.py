"""Routing equals FlashInfer's and vLLM's own references, as routing_vectors.py recorded them.

Ids: every one. Weights: every bit where scores are bf16; else within a bound from the peer's float32 arithmetic, since
the bits of exp and of a sum depend on library and processor. docs/routing.md is made by
FP4EP_WRITE_DOCS=1 pytest tests/reference/test_routing_vectors.py
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from routing_cases import CASES, RANDOM_ROWS, VECTORS, Case

from fp4ep.reference.routers import (
    REFUSED,
    ROUTERS,
    Bias,
    Groups,
    NanScore,
    Renormalize,
    Router,
    Scaling,
    Score,
    Weight,
)
from fp4ep.reference.routing import Routing, find_router

DOC = Path(__file__).parents[2] / "docs" / "routing.md"
U = 2.0**-24  # unit roundoff of float32
BEGIN, END = "<!-- made by a test: begin -->\n", "<!-- made by a test: end -->\n"


@dataclass(frozen=True)
class Seen:
    ids: torch.Tensor
    weights: torch.Tensor
    as_is: int
    ours: Routing

    @property
    def equal_bits(self) -> torch.Tensor:
        both_nan = self.weights.isnan() & self.ours.topk_weights.isnan()
        return (self.weights.view(torch.int32) == self.ours.topk_weights.view(torch.int32)) | both_nan


@pytest.fixture(scope="module")
def seen() -> dict[str, Seen]:
    with np.load(VECTORS) as file:
        return {
            name: Seen(
                torch.from_numpy(file[f"{name}: ids"].astype(np.int64)),
                torch.from_numpy(file[f"{name}: weights"]),
                int(file[f"{name}: as is"]),
                case.route(),
            )
            for name, case in CASES.items()
        }


def relative_error(router: Router, case: Case, ours: Routing) -> torch.Tensor:
    """Bound on |peer - ours| / |ours| for weights before renormalization, `[T, top_k]`.

    exp, log and log1p within 2u, other operations within u, on both sides; a float32 below the normal range has an
    absolute error of 2^-149 per operation. Softmax: exp(d) has u * |d| from the rounding of d = x - max besides, and a
    sum of n terms (n - 1)u; the |d| of its terms weigh exp(-|d|), so at most 1/e each.
    """
    x = case.logits.double()
    picked = x.gather(1, ours.topk_ids)
    score = ours.scores.gather(1, ours.topk_ids).double()
    kind = {Weight.SIGMOID: Score.SIGMOID, Weight.SCORE: router.score}.get(router.weight)
    if kind is Score.SIGMOID:
        value = torch.sigmoid(picked) if router.weight is Weight.SIGMOID else score
        return 7 * (U + 2.0**-149 / value)
    if kind is Score.SQRT_SOFTPLUS:
        return 6 * (U + 2.0**-149 / score**2)
    if kind is Score.SQRT_SOFTPLUS_LOG:  # numpy's exp and log within 4 ulp; a last bit of 1 + exp(x) more or less
        return 12 * U + 2 * U / score**2
    if router.weight is Weight.ONE:
        return torch.zeros_like(score)
    terms, among = (case.top_k, picked) if router.weight is Weight.SOFTMAX else (case.experts, x)
    if router.bias is Bias.LOGITS:
        among = among + 2  # bias_of("noise") is within 1
    largest = among.max(-1, keepdim=True).values
    units = (picked - largest).abs() + 2 + 1.4 * terms + 6
    if router.weight is Weight.SOFTMAX_ALL:  # exp(x - logsumexp): both are rounded at their own size
        units = units + 2 * largest.abs() + 10
    value = score if kind is Score.SOFTMAX else ours.topk_weights.double()
    return units * (U + 2.0**-149 / value)


def bound(router: Router, case: Case, ours: Routing) -> torch.Tensor:
    error = relative_error(router, case, ours)
    if router.renormalize is not Renormalize.NONE:  # the sum's error is a mean of its terms' errors
        weights = ours.topk_weights.double()
        mean = (error * weights).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
        error = error + mean.nan_to_num(0) + (case.top_k + 4) * U
    return (error + 4 * U) * ours.topk_weights.abs() + 4 * 2.0**-149


@pytest.mark.parametrize("name", CASES)
def test_equals_the_peer(seen, name):
    case, s = CASES[name], seen[name]
    router = find_router(case.router, **case.changes)
    assert torch.equal(s.ours.topk_ids, s.ids)
    assert torch.equal(s.ours.topk_weights.isnan(), s.weights.isnan())
    if router.score_dtype is None and case.dtype is torch.bfloat16:
        assert s.equal_bits.all()
        return
    difference = (s.ours.topk_weights.double() - s.weights.double()).abs()
    limit = bound(router, case, s.ours)
    ok = (difference <= limit) | s.weights.isnan() | s.equal_bits
    assert ok.all(), f"{int((~ok).sum())} weights differ by more than the bound"


def test_the_bound_is_narrow_on_random_rows(seen):
    """It would see one operation in bf16, or a sum without one of its terms."""
    for name, case in CASES.items():
        router = find_router(case.router, **case.changes)
        if router.score is not Score.SQRT_SOFTPLUS_LOG and case.experts < 512:
            ours = seen[name].ours
            wide = bound(router, case, ours) / ours.topk_weights.abs()
            assert wide[:RANDOM_ROWS].max() < 2.0**-13, name


def test_cases_cover_every_checked_router():
    assert {case.router for case in CASES.values()} == {r.name for r in ROUTERS.values() if r.checked_against}


def table(seen: dict[str, Seen]) -> str:
    lines = [
        "| router | numbers | score | selected by | order | weight | source | evidence |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for router in ROUTERS.values():
        numbers = ", ".join("-" if n is None else str(n) for n in (router.flashinfer, router.vllm))
        lines.append(
            f"| `{router.name}` | {numbers} | {score_text(router)} | {key_text(router)} | {order_text(router)} "
            f"| {weight_text(router)} | {router.source} | {evidence_text(router, seen)} |"
        )
    for name, reason in REFUSED.items():
        lines.append(f"| `{name}` | | refused: {reason} | | | | | |")
    return "\n".join(lines) + "\n"


def score_text(router: Router) -> str:
    dtype = ", in the logits' dtype" if router.score_dtype is None else ""
    zero = "; 0 for NaN and infinity" if router.nan_score is NanScore.ZERO else ""
    return router.score.value.replace("|", "\\|") + dtype + zero


def key_text(router: Router) -> str:
    if router.hash_routing:
        return "expert_table[token_id]"
    bias = {Bias.NONE: "score", Bias.SELECTS: "score + bias", Bias.LOGITS: "score, bias on the logits"}[router.bias]
    rounded = ", bias rounded to bf16" if router.bias_dtype is torch.bfloat16 else ""
    groups = "" if router.groups is Groups.NONE else f"; groups by {router.groups.value}"
    return bias + rounded + groups


def order_text(router: Router) -> str:
    return "the table's" if router.hash_routing else router.order.name


def weight_text(router: Router) -> str:
    parts = [router.weight.value.removesuffix(", without the bias")]
    if router.renormalize is not Renormalize.NONE:
        value = router.renormalize.value.replace("epsilon", f"{router.epsilon:g}")
        parts.append(f"denominator {value}")
    if router.scaling is Scaling.REFUSED:
        parts.append("no factor")
    elif router.renormalize is Renormalize.NONE:
        parts.append("times the factor")
    else:
        parts.append(router.scaling.value)
    return "; ".join(parts) + ("; to bf16" if router.weight_dtype is torch.bfloat16 else "")


def evidence_text(router: Router, seen: dict[str, Seen]) -> str:
    mine = [s for name, s in seen.items() if CASES[name].router == router.name]
    if not mine:
        return "modelled: read, not run"
    rows = sum(len(s.ids) for s in mine)
    bits, all_bits = sum(int(s.equal_bits.sum()) for s in mine), sum(s.weights.numel() for s in mine)
    weights = "all weights in every bit" if bits == all_bits else f"{bits:,} of {all_bits:,} weights in every bit"
    return f"equal to {router.checked_against}: ids on {rows:,} of {rows:,} rows, {weights}"


def test_the_page_has_the_table(seen):
    page = DOC.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    made, _, after = rest.partition(END)
    if os.environ.get("FP4EP_WRITE_DOCS"):
        made = table(seen)
        DOC.write_text(before + BEGIN + made + END + after, encoding="utf-8")
    assert made == table(seen)


def test_the_page_counts_the_cases():
    page = " ".join(DOC.read_text(encoding="utf-8").split())
    adversarial_rows = len(next(iter(CASES.values())).logits) - RANDOM_ROWS
    assert f"{RANDOM_ROWS} rows of random logits and {adversarial_rows} adversarial ones" in page
    assert f"in {len(CASES)} combinations" in page
    assert VECTORS.stat().st_size < 200_000


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert names["routing"].topk_ids.shape == (4, 8)
    assert names["unrounded"].bias_dtype is None
