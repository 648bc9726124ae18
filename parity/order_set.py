"""Sums in order of arrival: is a bf16 output one that FlashInfer's in-kernel top-k reduction can give?

With `in_kernel_fc2_reduce` a token's output starts from +0 and every live route adds its bf16 term to it in memory
(PTX `red.add.noftz.v2.bf16x2`, or `cp.reduce.async.bulk.add.noftz.bf16` in the dispatch warps). Each addition rounds,
so from three live routes on the result depends on the order of arrival, which nothing fixes and which may differ from
element to element. An output is right where *some* order gives it.
Source: FlashInfer 0.7.4, `shim/hopper_fp8.py` (`run`), `moe_hopper_fp8/epilogue_fp8.py`.
"""

from collections.abc import Iterator

import numpy as np
import torch

#: Most live slots of a token. To search one element takes a core 0.1 ms with 8 live slots, 1 ms with 10, 10 ms with 12.
MAX_LIVE = 12


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a + b of bf16 tensors, rounded to bf16 once, to nearest even; subnormals kept. Shapes broadcast.

    To float32 and then to bf16 are two roundings that equal one. Either float32 holds the sum exactly. Or the sum
    spans more than 24 bits; each addend has 8, so the smaller is below 2^-7 of the larger one's last place. Rounding
    is monotone and float32 holds the larger plus and minus 2^-7 of that place, so the float32 sum does not leave
    that range; the nearest tie of bf16 is a quarter of a place away or more, and both ways give the larger.
    Both formats have the same exponents: subnormal sums are exact, and what overflows float32 overflows bf16.
    (float64 would gain nothing: torch narrows it to bf16 through float32, so 1 + 2^-8 + 2^-40 becomes 1.)
    """
    return (a.float() + b.float()).bfloat16()


def reachable(output: torch.Tensor, terms: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """Where some order of the live terms, added one by one to +0, gives the output's bits. Returns `[T, H]` bool.

    output: `[T, H]` bf16; terms: `[T, top_k, H]` bf16, routing weight inside; topk_ids: `[T, top_k]`, negative: masked,
    never added. -0 is never reachable, since +0 + -0 is +0. Any NaN is reachable where some order gives a NaN, and
    only there. Exact, also where it says no. Raises ValueError on shapes, dtypes and more than MAX_LIVE live slots.
    """
    groups = _by_live_slots(terms, topk_ids)
    if output.dtype != torch.bfloat16 or output.shape != terms.shape[::2]:
        raise ValueError(f"output must be bf16 {list(terms.shape[::2])}, got {output.dtype} {list(output.shape)}")
    found = torch.ones(output.shape, dtype=torch.bool)
    for tokens, rows in groups:
        wanted = output[tokens].flatten()
        left = _unexplained(wanted, rows, torch.arange(len(wanted)))
        hit = torch.ones(len(wanted), dtype=torch.bool).index_fill_(0, left, False)
        for element, total in _all_sums(rows[:, left]):
            element = left[element]
            hit[element[_same(total, wanted[element])]] = True
        found[tokens] = hit.view_as(found[tokens])
    return found


def spread(terms: torch.Tensor, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest sum over all orders, both `[T, H]` float32; NaN in both where some order gives NaN.

    Arguments and errors as for `reachable`. Searches every element to the end, see MAX_LIVE for what that costs.
    """
    groups = _by_live_slots(terms, topk_ids)
    low, high = torch.empty(terms.shape[::2]), torch.empty(terms.shape[::2])
    for tokens, rows in groups:
        least, most = torch.full(rows.shape[1:], torch.inf), torch.full(rows.shape[1:], -torch.inf)
        for element, total in _all_sums(rows):
            least.scatter_reduce_(0, element, total.float(), "amin")
            most.scatter_reduce_(0, element, total.float(), "amax")
        low[tokens], high[tokens] = least.view_as(low[tokens]), most.view_as(high[tokens])
    return low, high


def _by_live_slots(terms: torch.Tensor, topk_ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens with equally many live slots, and their elements' live terms, `[live, tokens * H]`."""
    if terms.dtype != torch.bfloat16 or terms.ndim != 3:
        raise ValueError(f"terms must be bf16 [T, top_k, H], got {terms.dtype} {list(terms.shape)}")
    if topk_ids.shape != terms.shape[:2]:
        raise ValueError(f"topk_ids must be {list(terms.shape[:2])}, got {list(topk_ids.shape)}")
    live = topk_ids >= 0
    counts = live.sum(1)
    groups = []
    for count in counts.unique().tolist():
        if count > MAX_LIVE:
            raise ValueError(f"topk_ids must have at most {MAX_LIVE} live slots per token, got {count}")
        tokens = (counts == count).nonzero()[:, 0]
        rows = terms[tokens][live[tokens]].view(len(tokens), count, terms.shape[2])
        groups.append((tokens, rows.movedim(1, 0).flatten(1)))
    return groups


def _unexplained(wanted: torch.Tensor, rows: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Those of the elements `left` that neither slot order nor luck gives: 2^live orders are tried, always the same.

    wanted: `[elements]` bf16; rows: `[live, elements]`. Cheaper than the search, and explains most right outputs.
    """
    luck = torch.Generator().manual_seed(0)
    for trial in range(2 ** len(rows)):
        total = torch.zeros_like(wanted)
        for slot in torch.randperm(len(rows), generator=luck).tolist() if trial else range(len(rows)):
            total = add(total, rows[slot])
        missed = ~_same(total, wanted)
        if not missed.all():
            wanted, rows, left = wanted[missed], rows[:, missed], left[missed]
        if not len(left):
            break
    return left


def _all_sums(rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every sum that some order gives, in chunks: elements `[sums]` int64, values `[sums]` bf16; no pair twice.

    rows: `[live, elements]`. One layer per addition. A state of a layer is one integer: which element, which slots are
    added already (a set), and the bits of the partial sum. Equal ones are united, hence no factorial.
    """
    count = len(rows)
    at_once = 2**22 // 3**count  # bounds a layer at some 10^6 states; 7 elements for the longest sums
    for start in range(0, rows.shape[1], at_once):
        part = rows[:, start : start + at_once]
        states = torch.arange(part.shape[1]) << 16 + count  # no slot, +0
        for _ in range(count):
            grown = []
            for slot in range(count):
                before = states[(states >> 16 + slot) & 1 == 0]
                total = add(before.short().view(torch.bfloat16), part[slot].index_select(0, before >> 16 + count))
                grown.append(before & -(1 << 16) | 1 << 16 + slot | total.view(torch.int16).long() & 0xFFFF)
            ordered = torch.from_numpy(np.sort(torch.cat(grown).numpy()))  # twice as fast as torch's
            states = torch.unique_consecutive(ordered)
        yield start + (states >> 16 + count), states.short().view(torch.bfloat16)


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.view(torch.int16) == b.view(torch.int16)) | (a.isnan() & b.isnan())
