"""How static activation scales of a checkpoint enter the kernel's epilogue: one named mode for each serving engine.

The kernel quantizes activations as if they were multiplied by a norm constant, and the alpha has to divide by it again:
alpha * norm = weight_scale_2. vLLM leaves the norm at 1 and drops the checkpoint's input scales, SGLang uses them, so
one checkpoint gives different numbers.
"""

from collections.abc import Mapping
from enum import Enum

import torch

from .checkpoint import LayerWeights
from .checkpoint_conventions import in_words
from .mega_kernel import FlashInferMoeEpEpilogue


class ScaleMode(Enum):
    """Which input scales count. input_norm_const is ONE number for all experts, fc1_norm_const one for each."""

    DYNAMIC = "none: both norms are 1, alphas are weight_scale_2 itself (vLLM 0.33.0)"
    STATIC = "the checkpoint's; those of w13 must be one number for all experts of the rank"
    STATIC_MAX = "the checkpoint's; for w13 the largest of ALL experts of the layer, in norm and alphas alike"
    STATIC_SGLANG = "the checkpoint's; norm from the smallest w13 scale, alphas from each expert's (SGLang #31470)"


def epilogue_for(
    mode: ScaleMode, weights: LayerWeights, all_input_scales: Mapping[str, torch.Tensor] | None = None
) -> FlashInferMoeEpEpilogue:
    """The epilogue of one rank's experts.

    all_input_scales: `Checkpoint.input_scales` of the layer, for STATIC_MAX only: a maximum over one rank's experts
    would differ from rank to rank, and would be wrong once experts move (vllm-project/vllm#48355).

    DYNAMIC passes the tensors of weights on, not copies. Static modes multiply in float32: fc1_alpha =
    w13_weight_scale_2 * w13_input_scale, fc2_alpha = w2_weight_scale_2 * w2_input_scale, input_norm_const and
    fc1_norm_const the reciprocals, as stored where the checkpoint stores those. With STATIC_SGLANG and input scales
    that differ, fc1 of an expert is off by the ratio of its scale to the smallest: SGLang's result, not the model's.

    MXFP4 weights have no global scales: DYNAMIC gives the default epilogue.

    Raises ValueError, naming expert ids, for an input scale that a static mode needs and that is missing, zero,
    negative or not finite (vllm-project/vllm#45212, vllm-project/compressed-tensors#595), and for w13 scales that
    differ (STATIC).
    """
    if mode is ScaleMode.DYNAMIC:
        return FlashInferMoeEpEpilogue(fc1_alpha=weights.w13_weight_scale_2, fc2_alpha=weights.w2_weight_scale_2)
    alpha1, alpha2 = weights.w13_weight_scale_2, weights.w2_weight_scale_2
    if alpha1 is None or alpha2 is None:
        raise ValueError(
            f"mode must be DYNAMIC for {weights.convention.name}, which has no global scales, got {mode.name}"
        )
    ids = weights.experts
    scale2, norm2 = _checked("w2", weights.w2_input_scale, weights.w2_input_norm, ids)
    if mode is ScaleMode.STATIC_MAX:
        if all_input_scales is None:
            raise ValueError("all_input_scales must be those of all experts of the layer for STATIC_MAX, got None")
        every = all_input_scales.get("w13_input_scale")
        wide = range(0 if every is None else len(every))
        scale1, norm1 = _checked("w13", every, all_input_scales.get("w13_input_norm"), wide)
        scale1, norm1 = scale1.amax(), norm1.amin()
    else:
        scale1, norm1 = _checked("w13", weights.w13_input_scale, weights.w13_input_norm, ids)
        if mode is ScaleMode.STATIC and bool((scale1 != scale1[0]).any()):
            low, high = float(scale1.amin()), float(scale1.amax())
            raise ValueError(
                f"w13_input_scale must be one number for experts {in_words(ids)}, which share input_norm_const; it "
                f"goes from {low:g} to {high:g}. STATIC_MAX takes the largest of the layer"
            )
        norm1 = norm1.amax()
    return FlashInferMoeEpEpilogue(
        input_norm_const=float(norm1), fc1_alpha=alpha1 * scale1, fc2_alpha=alpha2 * scale2, fc1_norm_const=norm2
    )


def _checked(
    leg: str, scale: torch.Tensor | None, norm: torch.Tensor | None, experts: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and reciprocal, finite and positive."""
    if scale is None or norm is None:
        raise ValueError(f"{leg}_input_scale is missing in the checkpoint for all experts: DYNAMIC does without")
    bad = ~(scale.isfinite() & norm.isfinite() & (scale > 0) & (norm > 0))
    if bool(bad.any()):
        ids = [experts[e] for e in bad.nonzero().flatten().tolist()]
        raise ValueError(
            f"{leg}_input_scale must be finite and positive; it is missing, zero or not finite in experts "
            f"{in_words(ids)}"
        )
    return scale, norm
