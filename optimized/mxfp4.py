"""MXFP4 checkpoints: to the weights that a backend loads.

Numerics and decisions are those of vLLM 0.33.0 (`fused_moe/flashinfer_moe_ep.py`). The CuTe DSL kernel takes NVFP4, so
its MXFP4 weights go through bf16, without loss, and FlashInfer quantizes them again, with loss: NVFP4's E4M3 block
scales end at 2^-9, MXFP4's UE8M0 at 2^-127. vLLM gives all experts the global scale 1, so blocks with an exponent below
-6 lose more and more, and from -10 on everything. `rescaled_mxfp4_moe_ep_weights` is the way around that.
"""

import torch

from .backends import flashinfer_moe_ep_backend_spec
from .mega_kernel import FlashInferMoeEpEpilogue, FlashInferMoeEpWeights

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_CODES = (*_E2M1, *(-value for value in _E2M1))  # code 8 is -0
_BLOCK = 32
#: The least exponent of a global scale: smaller ones are subnormal in float32, which kernels read as zero.
_MIN_EXPONENT = -126


def _dequant_mxfp4_ue8m0_gran32(packed: torch.Tensor, scale: torch.Tensor, exponent: int = 0) -> torch.Tensor:
    """One expert. packed: `[N, K/2]` one-byte dtype, two E2M1 codes each, even column low. scale: `[N, K/32]` UE8M0, as
    uint8 or float8_e8m0fnu: 2^(byte - 127), 255 is NaN. Returns `[N, K]` bf16, the values times 2^-exponent.

    Exact wherever bf16 has the result's exponent; above it infinite. -0 stays.
    """
    raw = packed.view(torch.uint8)
    codes = torch.stack((raw & 0x0F, raw >> 4), dim=-1).flatten(-2).int()
    values = torch.tensor(_E2M1_CODES, dtype=torch.float64, device=raw.device)[codes]
    factors = scale.view(torch.float8_e8m0fnu).double() * 2.0**-exponent  # float64: no exponent is out of range
    return (values.unflatten(-1, (-1, _BLOCK)) * factors.unsqueeze(-1)).flatten(-2).to(torch.bfloat16)


def _dequant_mxfp4_experts(weight: torch.Tensor, scale: torch.Tensor, exponents: list[int] | None = None):
    """`[E, N, K/2]` and `[E, N, K/32]` to `[E, N, K]` bf16, expert by expert to bound the memory in between."""
    experts, rows, columns = weight.shape
    result = torch.empty(experts, rows, 2 * columns, dtype=torch.bfloat16, device=weight.device)
    for i, exponent in enumerate(exponents or [0] * experts):
        result[i] = _dequant_mxfp4_ue8m0_gran32(weight[i], scale[i], exponent)
    return result


def mxfp4_moe_ep_weights(
    moe_backend: str, w13: torch.Tensor, w2: torch.Tensor, w13_scale: torch.Tensor, w2_scale: torch.Tensor
) -> FlashInferMoeEpWeights:
    """An MXFP4 checkpoint's experts as the backend loads them.

    w13 `[E, 2I, H/2]`, w2 `[E, H, I/2]`, two codes per byte; scales per 32, UE8M0. DeepGEMM: the same four tensors,
    untouched. CuTe DSL: bf16 and no scales, see `rescaled_mxfp4_moe_ep_weights` for what that costs. SM90 MXFP4: the
    same memory as uint8.

    Raises ValueError for a backend that does not load MXFP4, and for shapes that do not fit.
    """
    spec = flashinfer_moe_ep_backend_spec(moe_backend)
    if "mxfp4" not in spec.weight_formats:
        raise ValueError(f"moe_backend: {moe_backend} does not load MXFP4 weights, only {sorted(spec.weight_formats)}")
    for name, weight, scale in (("w13", w13, w13_scale), ("w2", w2, w2_scale)):
        _check(name, weight, scale)
    if spec.kernel == "deep_gemm":
        return FlashInferMoeEpWeights(w13, w2, w13_scale, w2_scale)
    if spec.kernel == "cutedsl":
        return FlashInferMoeEpWeights(_dequant_mxfp4_experts(w13, w13_scale), _dequant_mxfp4_experts(w2, w2_scale))
    return FlashInferMoeEpWeights(*(t.view(torch.uint8) for t in (w13, w2, w13_scale, w2_scale)))


def rescaled_mxfp4_moe_ep_weights(
    w13: torch.Tensor, w2: torch.Tensor, w13_scale: torch.Tensor, w2_scale: torch.Tensor
) -> tuple[FlashInferMoeEpWeights, FlashInferMoeEpEpilogue]:
    """For the CuTe DSL kernel: `mxfp4_moe_ep_weights` with a power of two per expert taken out, and alphas that put it
    back. Not what vLLM does: it keeps 1, and small experts lose their weights.

    The power brings an expert's largest weight into [1024, 2048). Its block scale, a sixth of that, is below E4M3's
    448, and scales stay normal for 13 octaves below. Taking a power of two out is exact. What remains is the loss of
    changing grids, about 5 percent, in blocks of 16 whose largest code is not 6, 3 or 1.5: only those make amax / 6 a
    power of two. The epilogue's alphas must go with the weights: `[E]` float32 powers of two, not below 2^-126. NaN
    scales make NaN weights and do not count for the power.

    Raises ValueError for shapes that do not fit.
    """
    legs = []
    for name, weight, scale in (("w13", w13, w13_scale), ("w2", w2, w2_scale)):
        _check(name, weight, scale)
        exponents = [_exponent(weight[i], scale[i]) for i in range(weight.shape[0])]
        alpha = torch.tensor([2.0**e for e in exponents], dtype=torch.float32, device=weight.device)
        legs.append((_dequant_mxfp4_experts(weight, scale, exponents), alpha))
    (fc1, fc1_alpha), (fc2, fc2_alpha) = legs
    return FlashInferMoeEpWeights(fc1, fc2), FlashInferMoeEpEpilogue(fc1_alpha=fc1_alpha, fc2_alpha=fc2_alpha)


def _exponent(packed: torch.Tensor, scale: torch.Tensor) -> int:
    """e such that the largest |weight| of an expert is in [2^(e + 10), 2^(e + 11)); 0 for an expert of zeros."""
    # Halved thrice, 6 * 2^127 is in bf16's range, and so, as a subnormal, is the least: 2^-131.
    amax = _dequant_mxfp4_ue8m0_gran32(packed, scale, exponent=3).float().nan_to_num(0.0).abs().max()
    exponent = int(torch.frexp(amax).exponent) + 3
    return max(exponent - 11, _MIN_EXPONENT) if amax > 0 else 0


def _check(name: str, weight: torch.Tensor, scale: torch.Tensor) -> None:
    if weight.ndim != 3 or weight.element_size() != 1 or scale.element_size() != 1:
        raise ValueError(
            f"{name} must be [E, N, K/2] bytes with one-byte scales, got {weight.dtype} of shape "
            f"{tuple(weight.shape)} with scales of {scale.dtype}"
        )
    expected = (*weight.shape[:2], weight.shape[2] * 2 // _BLOCK)
    if weight.shape[2] * 2 % _BLOCK or scale.shape != expected:
        raise ValueError(f"{name}_scale must have shape {expected}, one per {_BLOCK} codes, got {tuple(scale.shape)}")
