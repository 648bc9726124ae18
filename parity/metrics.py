"""Distances between two tensors. Pure functions; NaN policy in each."""

import torch

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: ulp distance of a NaN from anything that is not the same NaN.
NAN_ULPS = 1 << 32


def bits(values: torch.Tensor) -> torch.Tensor:
    """The bit patterns as integers of the same width (uint8 for one byte)."""
    return values.contiguous().view(_INTEGER[values.element_size()])


def hex_code(value: torch.Tensor) -> str:
    """The bits of one element, `0x` and all their digits."""
    size = value.element_size()
    return f"0x{int(bits(value.reshape(1))) & (1 << 8 * size) - 1:0{2 * size}x}"


def bits_differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """bool of the common shape: where bits differ. NaN equals only the same NaN; -0 is not +0.

    Raises ValueError when shape or dtype is not the same.
    """
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError(
            f"left and right must be of one shape and dtype, got {left.dtype} {list(left.shape)} and "
            f"{right.dtype} {list(right.shape)}"
        )
    return bits(left) != bits(right)


def ulp_distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """int64: representable values between the two, of their own dtype (for FP8: steps between codes).

    -0 and +0 are 1 apart. A NaN against anything but the same NaN: NAN_ULPS. Integers: their difference.
    """
    if not left.is_floating_point():
        return (left.long() - right.long()).abs()
    width = 8 * left.element_size()
    ordered = []
    for values in (left, right):
        pattern = bits(values).long() & ((1 << width) - 1)
        negative = pattern >> (width - 1) == 1
        ordered.append(torch.where(negative, (1 << (width - 1)) - 1 - pattern, pattern))
    distance = (ordered[0] - ordered[1]).abs()
    nan = torch.isnan(left.float()) | torch.isnan(right.float())
    return torch.where(nan & (distance != 0), NAN_ULPS, distance)


def rel_l2(left: torch.Tensor, right: torch.Tensor) -> float:
    """|left - right| / |left|, Euclidean norms in float64. 0 when the two are equal, else inf for left = 0."""
    error, norm = _norms(left, right)
    return 0.0 if error == 0 else error / norm if norm else float("inf")


def sqnr_db(left: torch.Tensor, right: torch.Tensor) -> float:
    """Signal to noise in dB, 20 log10(|left| / |left - right|): infinite when equal."""
    ratio = rel_l2(left, right)
    return float("inf") if ratio == 0 else -20 * float(torch.tensor(ratio, dtype=torch.float64).log10())


def calc_diff(left: torch.Tensor, right: torch.Tensor) -> float:
    """DeepGEMM's measure, 1 - 2 <l, r> / (|l|^2 + |r|^2) in float64: sees a wrong scale, which cosine does not."""
    x, y = left.double().flatten(), right.double().flatten()
    both = float(x @ x + y @ y)
    return 0.0 if both == 0 else 1 - 2 * float(x @ y) / both


def _norms(left: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """Elements that are equal or NaN on both sides count nothing, so that inf - inf does not spoil the sum."""
    x, y = left.double(), right.double()
    same = (x == y) | (torch.isnan(x) & torch.isnan(y))
    return float(torch.where(same, 0.0, x - y).norm()), float(torch.where(torch.isfinite(x), x, 0.0).norm())
