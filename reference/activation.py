"""SwiGLU as the kernels' epilogues compute it: every intermediate is a float32, in this order.

Source: FlashInfer 0.7.4, `moe_hopper_fp8/epilogue_fp8_common.py` and `moe_hopper_bf16/epilogue_bf16_common.py`,
and the PTX that the CuTe DSL emits for them; SM100: `moe_nvfp4_swapab/epilogue_refactor.py`; the push kernel:
`push_style_megamoe/src/a2a/sm90_push_a2a_ops.cu` and the SASS that CUDA 13.0 makes of it.
"""

import torch

from .fp32 import canonical_nan, flush, multiply_ftz
from .special import div_approx, ex2_approx, rcp_approx

_MINUS_LOG2_E = -1.44269502162933349609375  # float32 0xBFB8AA3B


def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_up_clamp: float | None,
    topk_weight: torch.Tensor | None,
    nan_clamps: bool = False,
) -> torch.Tensor:
    """silu(gate) * up * topk_weight.

    gate, up: `[routes, intermediate]` float32, already descaled. gate_up_clamp: a limit L > 0 or None; it acts first,
    gate to (-inf, L], up to [-L, L]. topk_weight: `[routes]` float32, one per route; None: not here. Returns
    float32.

    NaN passes through the clamp or, with nan_clamps, becomes L. A gate below about -87 gives exactly 0: the reciprocal
    of a value above 2^126 flushes. Without a clamp up * gate can overflow to infinity, and infinity times a flushed 0
    is NaN, as on the GPU.
    """
    if gate_up_clamp is not None:
        if nan_clamps:
            gate, up = (x.nan_to_num(gate_up_clamp, torch.inf, -torch.inf) for x in (gate, up))
        gate = gate.clamp(max=gate_up_clamp)
        up = up.clamp(-gate_up_clamp, gate_up_clamp)
    sigmoid = rcp_approx(ex2_approx(gate * _MINUS_LOG2_E) + 1.0)
    activated = up * gate * sigmoid
    return activated if topk_weight is None else activated * topk_weight[:, None]


def fast_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, rounded to bf16, as nvcc's -use_fast_math compiles it (`Swiglu.FAST_BF16`).

    gate, up: `[routes, intermediate]` float32 that holds bf16 values. Returns float32 that holds bf16 values. float32
    subnormals are zeros at every step. A gate below about -87 gives a zero, as in `swiglu`; minus infinity gives NaN.
    NaN is the canonical one.
    """
    silu = div_approx(gate, ex2_approx(flush(gate) * _MINUS_LOG2_E) + 1.0)
    return canonical_nan(multiply_ftz(silu, up).bfloat16()).float()
