"""One global scale for gate and up.

The megakernels multiply both halves of fc1 by one number per expert, while a checkpoint stores two. Where they differ,
the ratio can move into the block scales of up, if E4M3 holds every product. Nothing here rounds.
"""

import warnings
from collections.abc import Sequence
from enum import StrEnum

import torch

from fp4ep.reference.formats import E4M3

from .checkpoint_conventions import GlobalScale, in_words


class GateUp(StrEnum):
    """What to do where the global scales of gate and up differ.

    STRICT folds the ratio into up's block scales, or raises. VLLM warns and uses the gate's for both, which makes up
    wrong by the ratio: vLLM 0.33.0, quantization/modelopt.py and compressed_tensors_moe_w4a4_nvfp4.py (column 0).
    """

    STRICT = "strict"
    VLLM = "vllm"


def fold_codes(numerator: float, denominator: float) -> torch.Tensor:
    """`[256]` int16: the E4M3 code of (value of this code) * numerator / denominator, exactly; -1 where E4M3 has none.

    numerator, denominator: positive float32 values. Zero stays zero with its sign; a NaN code gives -1.
    """
    # Products of a float32 and an E4M3 value are exact in float64; equality of products needs no division.
    values = E4M3.values.double()
    equal = (values * numerator)[:, None] == (values * denominator)[None, :]
    sign = torch.signbit(values)
    equal &= sign[:, None] == sign[None, :]
    return torch.where(equal.any(1), equal.int().argmax(1), -1).to(torch.int16)


def gate_up_ratio(pair: torch.Tensor, direction: GlobalScale) -> tuple[float, float]:
    """What up's block scales are multiplied with so that the gate's global scale serves both, as (numerator,
    denominator). pair: `[2]`, gate and up as on disk."""
    gate, up = pair.tolist()
    return (up, gate) if direction is GlobalScale.DECODE else (gate, up)


def one_global_scale(
    block_scales: torch.Tensor, pairs: torch.Tensor, direction: GlobalScale, experts: Sequence[int], mode: GateUp
) -> torch.Tensor:
    """The gate's global scales `[E]`, as on disk, after up's block scales are made to fit.

    block_scales: `[E, 2I, K/16]` E4M3 codes, gate rows first; the up rows are written in place (GateUp.STRICT).
    pairs: `[E, 2]` float32, positive and finite: gate, up. experts: their ids, for messages.
    Raises ValueError, naming experts and ratio, when a product is not an E4M3 value; nothing is written then.
    """
    differing = (pairs[:, 0] != pairs[:, 1]).nonzero().flatten().tolist()
    if differing and mode is GateUp.VLLM:
        ids = [experts[e] for e in differing]
        warnings.warn(
            f"global scales of gate and up differ in {len(ids)} of {len(experts)} experts (largest ratio "
            f"{_largest_ratio(pairs[differing]):g}): up is off by that, as in vLLM; experts {in_words(ids)}",
            stacklevel=3,
        )
        return pairs[:, 0].contiguous()
    rows = block_scales.view(torch.uint8)[:, block_scales.shape[1] // 2 :]
    folded, failed = {}, []
    for e in differing:
        codes = fold_codes(*gate_up_ratio(pairs[e], direction))[rows[e].int()]
        if bool((codes < 0).any()):
            failed.append(e)
        folded[e] = codes
    if failed:
        ids = [experts[e] for e in failed]
        raise ValueError(
            f"global scales of gate and up differ and their ratio (up to {_largest_ratio(pairs[failed]):g}) does not "
            f"fold into up's block scales exactly; gate_up='vllm' uses the gate's for both; experts {in_words(ids)}"
        )
    for e, codes in folded.items():
        rows[e] = codes.to(torch.uint8)
    return pairs[:, 0].contiguous()


def _largest_ratio(pairs: torch.Tensor) -> float:
    return float((pairs.amax(1) / pairs.amin(1)).max())
