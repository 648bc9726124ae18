"""The layer as an ordinary emulation backend runs it: a scheme's quantizers and formats around float32 GEMMs of torch.

Operands are dequantized to float32, `torch.matmul` sums them in its own order, the exponential is `torch.sigmoid`'s.
Everything else is `emulation`: staging and dispatch are the kernel's bits and so is every later step on equal input,
but for fc1, activation and fc2.
"""

from collections.abc import Callable, Sequence

import torch

from fp4ep.reference.scheme import Scheme, Weights
from fp4ep.reference.types import Exactness, MoEInputs, MoEWeights, Trace

from .emulation import Arithmetic, Exchange, Operand, emulate, load_operand


def _linear(scheme: Scheme, leg: str, x: torch.Tensor, x_scale: torch.Tensor, operand: Operand) -> torch.Tensor:
    w, scale = _dequantize(scheme, operand)
    x = (x.unflatten(1, (x_scale.shape[1], -1)) * x_scale[..., None]).flatten(1)
    return torch.matmul(x, w.T) * scale


def dequantize(scheme: Scheme, weights: MoEWeights, leg: str, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert of `leg` ("w13" or "w2"): float32 `[N, K]`, and a float32 scalar that multiplies the whole product.

    Dense weights are quantized as the scheme's backend does. Together the two are the operand that the kernel
    multiplies, its own rounding included.
    """
    return _dequantize(scheme, load_operand(scheme, weights, leg, expert))


def _dequantize(scheme: Scheme, operand: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale = operand.values, operand.scale
    if scheme.weights in (Weights.FP8_PER_EXPERT, Weights.FP8_BLOCK_128):
        return (values.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1), torch.ones(())
    return values, scale.reshape(())


def _exactness(scheme: Scheme, stage: str) -> Exactness:
    """Their bits depend on torch's version and CPU: the member that promises least."""
    return Exactness.MODELLED_UNVERIFIED


_FLOAT32 = Arithmetic("fake_quant", _linear, torch.sigmoid, _exactness)


def fake_quant_forward(
    scheme: Scheme,
    weights: MoEWeights,
    inputs: Sequence[MoEInputs],
    *,
    ranks: Sequence[int],
    ep_size: int,
    exchange: Exchange,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """`emulate` with torch's float32.

    Each expert is one matmul over its routes in row order, so the same tokens over another number of ranks make the
    same GEMMs; another batch may not: torch's sum for a row can depend on the rows beside it.
    """
    return emulate(
        _FLOAT32, scheme, weights, inputs, ranks=ranks, ep_size=ep_size, exchange=exchange, progress=progress
    )
