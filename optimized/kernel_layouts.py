"""Canonical expert weights to each kernel's own layout and back, byte for byte.

`KERNEL_LAYOUTS[kernel].pack(weights)` gives what vLLM's `kernel_weights()` returns for that kernel; `unpack` is its
inverse. Nothing rounds: the weights are quantized already, and the only arithmetic is an exact multiplication of the
per-expert scale by a power of two.

| kernel     | weight `[E, N, K]` or `[E, N, K/2]`        | scale                                       | alpha        |
|------------|--------------------------------------------|---------------------------------------------|--------------|
| cutedsl    | E2M1, gate/up by 16                        | E4M3, 128x4 blocked `[E, S]`                | none         |
| deep_gemm  | E2M1, gate/up by 8                         | UE8M0, int32 `[E, K/128, N]`                | none         |
| sm90_nvfp4 | E2M1, kperm, gate/up by 8, fp4_fp8 shuffle | E4M3, folded `[E, N/64, K/128, 32, 16]`     | 8 * global   |
| sm90_mxfp4 | E2M1, gate/up by 8, fp4_fp8 shuffle        | offsets, folded `[E, N/64, K/128, 16, 16]`  | 2^(base-122) |
| sm90_fp8   | FP8, gate/up by 8                          | per tensor: unit UE8M0 codes, 128x4 blocked | its scale    |
|            |                                            | blockwise: float32 `[E, N/128, K/128]`      | none         |
| sm90_bf16  | bf16, gate/up by 8                         | none                                        | none         |

The kernels of SM90 and cutedsl take transposed views of these weights, deep_gemm one of its scales: vLLM's
`_expert_major_bytes` undoes that. Sources: FlashInfer 0.7.4, `moe_ep/backends/mega/kernel/*/*/weights.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fp4ep.reference.types import MoEWeights

from . import layouts_sm90, layouts_sm100
from .layouts import (
    deinterleave_fp4_fp8,
    deinterleave_gate_up,
    interleave_fp4_fp8,
    interleave_gate_up,
    require,
    require_multiple,
    require_none,
)


@dataclass(frozen=True)
class KernelState:
    """A kernel's own weights: contiguous, expert-major, one-byte dtypes as uint8.

    Scales are None where the kernel has none. Alphas are the float32 `[E]` decode vectors that lie in the kernel's
    weights, else None: cutedsl is given its alphas per forward.
    """

    fc1_weight: torch.Tensor
    fc1_scale: torch.Tensor | None
    fc2_weight: torch.Tensor
    fc2_scale: torch.Tensor | None
    fc1_alpha: torch.Tensor | None = None
    fc2_alpha: torch.Tensor | None = None


@dataclass(frozen=True)
class Leg:
    """One GEMM's tensors on either side. vector: float32, one per expert: the global scale, or the kernel's alpha."""

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    vector: torch.Tensor | None = None


@dataclass(frozen=True)
class Place:
    """Which leg of which weights: E experts, N rows by K elements. names: of weight, scale and vector, for messages."""

    experts: int
    rows: int
    k: int
    gate_up: bool  #: fc1, whose rows are gate and up
    names: tuple[str, str, str]


@dataclass(frozen=True)
class KernelLayout:
    """How one kernel lays out its weights. The leg functions take `(leg, place, **options)`."""

    pack_leg: Callable[..., Leg]
    unpack_leg: Callable[..., Leg]
    per_byte: int = 1  #: codes in a byte, of the weights
    hidden_multiple: int = 1
    intermediate_multiple: int = 1

    def pack(self, weights: MoEWeights, **options: Any) -> KernelState:
        """The kernel's weights from local experts in canonical order. Nothing of the input is written to.

        weights: quantized already, see `MoEWeights`; for sm90_mxfp4 also rewritten (`mxfp4_rewrite`). A tensor whose
        layout is the canonical one (fc2's weight, except in the FP4 kernels of SM90) is not copied: the state holds
        the same storage.

        options: for sm90_nvfp4 `kperm` (0, 32 or 64; default 64, FlashInfer's).

        Raises ValueError, naming the tensor, for a shape or dtype that does not fit, for a missing or superfluous
        scale, and where the decode vector would overflow.
        """
        require_none("fc1_norm_const", weights.fc1_norm_const, "no kernel's weights hold it")
        if weights.w2.ndim != 3:
            raise ValueError(f"w2 must have shape [E, H, I / {self.per_byte}], got {tuple(weights.w2.shape)}")
        experts, hidden, last = weights.w2.shape
        places = self._places(experts, hidden, last * self.per_byte, MOE_WEIGHTS_NAMES)
        given = (
            Leg(weights.w13, weights.w13_scale, weights.w13_global_scale),
            Leg(weights.w2, weights.w2_scale, weights.w2_global_scale),
        )
        fc1, fc2 = (self.pack_leg(leg, place, **options) for leg, place in zip(given, places, strict=True))
        return KernelState(fc1.weight, fc1.scale, fc2.weight, fc2.scale, fc1.vector, fc2.vector)

    def unpack(self, state: KernelState, *, hidden: int, intermediate: int, **options: Any) -> MoEWeights:
        """The canonical weights whose `pack` is this state, with the options it was packed with.

        hidden, intermediate: H and I, in elements. Codes and block scales come back as uint8. What pads a scale is not
        read. Raises ValueError, naming the tensor, for what no `pack` gives.
        """
        places = self._places(state.fc1_weight.shape[0], hidden, intermediate, KERNEL_STATE_NAMES)
        given = (
            Leg(state.fc1_weight, state.fc1_scale, state.fc1_alpha),
            Leg(state.fc2_weight, state.fc2_scale, state.fc2_alpha),
        )
        w13, w2 = (self.unpack_leg(leg, place, **options) for leg, place in zip(given, places, strict=True))
        return MoEWeights(w13.weight, w2.weight, w13.scale, w2.scale, w13.vector, w2.vector)

    def _places(self, experts: int, hidden: int, intermediate: int, names: tuple) -> tuple[Place, Place]:
        require_multiple("hidden", hidden, self.hidden_multiple)
        require_multiple("intermediate", intermediate, self.intermediate_multiple)
        return (
            Place(experts, 2 * intermediate, hidden, True, names[0]),
            Place(experts, hidden, intermediate, False, names[1]),
        )


MOE_WEIGHTS_NAMES = (("w13", "w13_scale", "w13_global_scale"), ("w2", "w2_scale", "w2_global_scale"))
KERNEL_STATE_NAMES = (("fc1_weight", "fc1_scale", "fc1_alpha"), ("fc2_weight", "fc2_scale", "fc2_alpha"))

_E2M1 = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
_E4M3 = (torch.uint8, torch.float8_e4m3fn)
_UE8M0 = (torch.uint8, torch.float8_e8m0fnu)
_FP8 = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def _weight(leg: Leg, place: Place, dtypes: tuple[torch.dtype, ...], per_byte: int = 1) -> torch.Tensor:
    """The leg's weight, checked, as bytes if its codes are bytes."""
    shape = (place.experts, place.rows, place.k // per_byte)
    weight = require(place.names[0], leg.weight, shape, dtypes)
    return weight.view(torch.uint8) if weight.dtype.itemsize == 1 else weight


def _scale(leg: Leg, place: Place, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    scale = require(place.names[1], leg.scale, (place.experts, *shape), dtypes)
    return scale.view(torch.uint8) if scale.dtype.itemsize == 1 else scale


def _interleave(place: Place, block: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [interleave_gate_up(tensor, block) if place.gate_up else tensor.contiguous() for tensor in tensors]


def _deinterleave(place: Place, block: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [deinterleave_gate_up(tensor, block) if place.gate_up else tensor.contiguous() for tensor in tensors]


# --- SM100 -------------------------------------------------------------------------------------------------------


def _pack_cutedsl(leg: Leg, place: Place) -> Leg:
    require_none(place.names[2], leg.vector, "the kernel takes it with every forward, as fc1_alpha and fc2_alpha")
    weight = _weight(leg, place, _E2M1, 2)
    scale = _scale(leg, place, (place.rows, place.k // 16), _E4M3)
    weight, scale = _interleave(place, 16, weight, scale)
    return Leg(weight, layouts_sm100.block_scales(scale))


def _unpack_cutedsl(leg: Leg, place: Place) -> Leg:
    require_none(place.names[2], leg.vector, "the kernel's weights hold none")
    weight = _weight(leg, place, (torch.uint8,), 2)
    cols = place.k // 16
    blocked = _scale(leg, place, (layouts_sm100.blocked_scale_size(place.rows, cols),), (torch.uint8,))
    return Leg(*_deinterleave(place, 16, weight, layouts_sm100.unblock_scales(blocked, place.rows, cols)))


def _pack_deep_gemm(leg: Leg, place: Place) -> Leg:
    require_none(place.names[2], leg.vector, "MXFP4 has no global scale")
    weight = _weight(leg, place, _E2M1, 2)
    scale = _scale(leg, place, (place.rows, place.k // 32), _UE8M0)
    weight, scale = _interleave(place, 8, weight, scale)
    return Leg(weight, layouts_sm100.pack_scales_deep_gemm(scale))


def _unpack_deep_gemm(leg: Leg, place: Place) -> Leg:
    require_none(place.names[2], leg.vector, "the kernel's weights hold none")
    weight = _weight(leg, place, (torch.uint8,), 2)
    if place.k == 128 and leg.scale is not None and leg.scale.shape[1:] == (place.rows, 1):
        leg = replace(leg, scale=leg.scale.mT)  # vLLM does not see that DeepGEMM's tensor is a transposed view
    packed = _scale(leg, place, (place.k // 128, place.rows), (torch.int32,))
    return Leg(*_deinterleave(place, 8, weight, layouts_sm100.unpack_scales_deep_gemm(packed)))


# --- SM90 --------------------------------------------------------------------------------------------------------


def _pack_sm90_nvfp4(leg: Leg, place: Place, kperm: int = 64) -> Leg:
    weight = _weight(leg, place, _E2M1, 2)
    scale = _scale(leg, place, (place.rows, place.k // 16), _E4M3)
    alpha = _nvfp4_alpha(leg, place, weight.device)
    weight = layouts_sm90.kperm_payload(weight, kperm)
    if place.gate_up:
        weight, scale = (layouts_sm90.kperm_gate_up(t, kperm) for t in (weight, scale))
    weight, scale = _interleave(place, 8, weight, scale)
    if kperm:
        scale = layouts_sm90.swap_kperm_scales(scale)
    return Leg(interleave_fp4_fp8(weight), layouts_sm90.fold_scales(scale, 16), alpha)


def _unpack_sm90_nvfp4(leg: Leg, place: Place, kperm: int = 64) -> Leg:
    weight = deinterleave_fp4_fp8(_weight(leg, place, (torch.uint8,), 2))
    folded = _scale(leg, place, (place.rows // 64, place.k // 128, 32, 16), (torch.uint8,))
    alpha = require(place.names[2], leg.vector, (place.experts,), (torch.float32,))
    if not bool((alpha.isfinite() & (alpha * 0.125 * 8 == alpha)).all()):
        raise ValueError(f"{place.names[2]} must be finite, and 8 times a float32")
    scale = layouts_sm90.unfold_scales(folded, 16)
    if kperm:
        scale = layouts_sm90.swap_kperm_scales(scale)
    weight, scale = _deinterleave(place, 8, weight, scale)
    if place.gate_up:
        weight, scale = (layouts_sm90.unkperm_gate_up(t, kperm) for t in (weight, scale))
    return Leg(layouts_sm90.unkperm_payload(weight, kperm), scale, alpha * 0.125)


def _nvfp4_alpha(leg: Leg, place: Place, device: torch.device) -> torch.Tensor:
    """8 * global scale: the kernel multiplies by E4M3(code * block_scale / 8). Exact, or ValueError."""
    name, scale = place.names[2], leg.vector
    if scale is None:
        scale = torch.ones((), device=device)
    if scale.dtype is not torch.float32 or scale.numel() not in (1, place.experts):
        raise ValueError(
            f"{name} must be float32, one number or one per expert ({place.experts}), "
            f"got {scale.dtype} {tuple(scale.shape)}"
        )
    alpha = (scale * 8).reshape(-1).expand(place.experts).contiguous()
    if not bool(alpha.isfinite().all()):
        raise ValueError(f"{name} must be finite, also times 8, which is what the kernel keeps")
    return alpha


def _pack_sm90_mxfp4(leg: Leg, place: Place) -> Leg:
    require_none(place.names[2], leg.vector, "MXFP4 has no global scale")
    weight = _weight(leg, place, _E2M1, 2)
    scale = _scale(leg, place, (place.rows, place.k // 32), _UE8M0)
    name = place.names[1]
    base = scale.flatten(1).amin(1).int()
    if bool((scale.flatten(1).amax(1).int() - base > layouts_sm90.MXFP4_OCTAVES).any()):
        raise ValueError(f"{name} spans more than {layouts_sm90.MXFP4_OCTAVES} octaves in an expert: rewrite it first")
    if bool((base >= 250).any()):
        raise ValueError(f"{name}: the decode factor 2^(smallest scale code - 122) overflows from code 250 on")
    offset = scale - (base - 1)[:, None, None].to(torch.uint8)  # modulo 256, so base 0 is no exception
    weight, offset = _interleave(place, 8, weight, offset)
    alpha = (base + 5 << 23).view(torch.float32)  # 2^(base - 122) by its bits
    return Leg(interleave_fp4_fp8(weight), layouts_sm90.fold_scales(offset, 32), alpha)


def _unpack_sm90_mxfp4(leg: Leg, place: Place) -> Leg:
    weight = deinterleave_fp4_fp8(_weight(leg, place, (torch.uint8,), 2))
    folded = _scale(leg, place, (place.rows // 64, place.k // 128, 16, 16), (torch.uint8,))
    alpha = require(place.names[2], leg.vector, (place.experts,), (torch.float32,))
    bits = alpha.contiguous().view(torch.int32)
    base = (bits >> 23) - 5
    if bool((((bits & 0x7FFFFF) != 0) | (base < 0) | (base >= 250)).any()):
        raise ValueError(f"{place.names[2]} must be powers of two from 2^-122 to 2^127")
    offset = layouts_sm90.unfold_scales(folded, 32)
    smallest, largest = offset.flatten(1).amin(1), offset.flatten(1).amax(1)
    if bool(((smallest != 1) | (largest > 1 + layouts_sm90.MXFP4_OCTAVES)).any()):
        raise ValueError(f"{place.names[1]} must hold offsets from 1, the smallest of every expert, to 12")
    scale = offset + (base - 1)[:, None, None].to(torch.uint8)
    return Leg(*_deinterleave(place, 8, weight, scale))


def _pack_sm90_fp8(leg: Leg, place: Place) -> Leg:
    require_none(place.names[2], leg.vector, "the FP8 scale is all there is")
    weight = _interleave(place, 8, _weight(leg, place, _FP8))[0]
    if leg.scale is not None and leg.scale.ndim == 3:
        return Leg(weight, _block_128(leg, place).contiguous())
    alpha = _scale(leg, place, (), (torch.float32,)).contiguous()
    return Leg(weight, _unit_scales(place, weight.device), alpha)


def _unpack_sm90_fp8(leg: Leg, place: Place) -> Leg:
    weight = _deinterleave(place, 8, _weight(leg, place, (torch.uint8,)))[0]
    if leg.vector is None:
        return Leg(weight, _block_128(leg, place))
    alpha = require(place.names[2], leg.vector, (place.experts,), (torch.float32,))
    unit = _unit_scales(place, weight.device)
    if not torch.equal(require(place.names[1], leg.scale, tuple(unit.shape), (torch.uint8,)), unit):
        raise ValueError(f"{place.names[1]} must hold codes 127 (1.0) only: per tensor, the kernel does not read it")
    return Leg(weight, alpha)


def _block_128(leg: Leg, place: Place) -> torch.Tensor:
    """Scales per 128 x 128 block, canonically in the kernel's own row order, so they stay as they are."""
    for size in (place.rows, place.k):
        require_multiple(f"rows and columns of {place.names[0]}", size, 128)
    return _scale(leg, place, (place.rows // 128, place.k // 128), (torch.float32,))


def _unit_scales(place: Place, device: torch.device) -> torch.Tensor:
    """The placeholder beside per-tensor FP8 weights: UE8M0 1.0 for every 32 K, blocked, padding zero."""
    ones = torch.full((1, place.rows, -(-place.k // 32)), 127, dtype=torch.uint8, device=device)
    return layouts_sm100.block_scales(ones).repeat(place.experts, 1)


def _pack_sm90_bf16(leg: Leg, place: Place) -> Leg:
    for name, tensor in zip(place.names[1:], (leg.scale, leg.vector), strict=True):
        require_none(name, tensor, "bf16 weights have no scale")
    return Leg(_interleave(place, 8, _weight(leg, place, (torch.bfloat16,)))[0])


def _unpack_sm90_bf16(leg: Leg, place: Place) -> Leg:
    for name, tensor in zip(place.names[1:], (leg.scale, leg.vector), strict=True):
        require_none(name, tensor, "bf16 weights have no scale")
    return Leg(_deinterleave(place, 8, _weight(leg, place, (torch.bfloat16,)))[0])


#: By the kernel's name in a backend's spec. The multiples are what the layout needs; a kernel may ask for more.
KERNEL_LAYOUTS: dict[str, KernelLayout] = {
    "cutedsl": KernelLayout(_pack_cutedsl, _unpack_cutedsl, 2, 16, 16),
    "deep_gemm": KernelLayout(_pack_deep_gemm, _unpack_deep_gemm, 2, 128, 128),
    "sm90_nvfp4": KernelLayout(_pack_sm90_nvfp4, _unpack_sm90_nvfp4, 2, 128, 128),
    "sm90_mxfp4": KernelLayout(_pack_sm90_mxfp4, _unpack_sm90_mxfp4, 2, 128, 128),
    "sm90_fp8": KernelLayout(_pack_sm90_fp8, _unpack_sm90_fp8, 1, 1, 8),
    "sm90_bf16": KernelLayout(_pack_sm90_bf16, _unpack_sm90_bf16, 1, 1, 8),
}
