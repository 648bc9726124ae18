"""Weights that layout tests pack, byte for byte the same everywhere: drawn from SHAKE-256, not from a generator."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch

from fp4ep.reference.types import MoEWeights


@dataclass(frozen=True)
class Case:
    """kernel: key of KERNEL_LAYOUTS; options: of its pack. blockwise: scales of FP8 weights per 128 x 128."""

    kernel: str
    experts: int
    hidden: int
    intermediate: int
    options: dict[str, Any] = field(default_factory=dict)
    blockwise: bool = False

    def __str__(self) -> str:
        extra = "".join(f"-{name}{value}" for name, value in self.options.items()) + "-blockwise" * self.blockwise
        return f"{self.kernel}-E{self.experts}-H{self.hidden}-I{self.intermediate}{extra}"


#: 2880, 1600 and 96: sizes whose 128x4 blocked scales have padding in rows, columns or neither.
CASES = (
    Case("cutedsl", 2, 128, 64),
    Case("cutedsl", 3, 2880, 96),
    Case("cutedsl", 2, 192, 1600),
    Case("deep_gemm", 2, 256, 256),
    Case("deep_gemm", 3, 384, 640),
    *(Case("sm90_nvfp4", 2, 256, 128, {"kperm": kperm}) for kperm in (0, 32, 64)),
    Case("sm90_nvfp4", 5, 128, 384, {"kperm": 64}),
    Case("sm90_mxfp4", 3, 256, 128),
    Case("sm90_mxfp4", 5, 128, 384),
    Case("sm90_fp8", 2, 192, 64),
    Case("sm90_fp8", 3, 256, 128, blockwise=True),
    Case("sm90_bf16", 2, 256, 64),
)


def draw(name: str, *shape: int, below: int = 256) -> torch.Tensor:
    """uint8 of this shape, below `below`, from SHAKE-256 of the name."""
    count = torch.Size(shape).numel()
    stream = torch.frombuffer(bytearray(hashlib.shake_256(name.encode()).digest(count)), dtype=torch.uint8)
    return (stream % below if below < 256 else stream).reshape(shape)


def canonical(case: Case) -> MoEWeights:
    """The case's weights. MXFP4 is not rewritten yet: expert e's scales spread over 4e + 4, and codes of -0 are in."""
    experts, hidden, intermediate = case.experts, case.hidden, case.intermediate
    w13, w13_scale, w13_global = _leg(case, "w13", 2 * intermediate, hidden)
    w2, w2_scale, w2_global = _leg(case, "w2", hidden, intermediate)
    assert w13.shape[0] == experts
    return MoEWeights(w13, w2, w13_scale, w2_scale, w13_global, w2_global)


def _leg(case: Case, leg: str, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    name, experts = f"{case} {leg}", case.experts
    if case.kernel == "sm90_bf16":
        return draw(name, experts, rows, 2 * k).view(torch.bfloat16), None, None
    if case.kernel == "sm90_fp8":
        return _fp8(case, name, rows, k)
    packed = draw(name, experts, rows, k // 2)
    if case.kernel in ("deep_gemm", "sm90_mxfp4"):
        octaves = torch.arange(experts).to(torch.uint8)[:, None, None] * 4 + 4
        return packed, 100 + draw(name + "_scale", experts, rows, k // 32) % octaves, None
    scale = draw(name + "_scale", experts, rows, k // 16, below=127)
    if case.kernel == "cutedsl":
        return packed, scale, None
    return packed, scale, 2.0 ** -draw(name + "_global", experts, below=20).float() * 1.25


def _fp8(case: Case, name: str, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor, None]:
    """E4M3 codes without NaN, with the largest value in every scale block, so that quantizing gives them back."""
    codes = draw(name, case.experts, rows, k)
    codes = torch.where(codes & 127 == 127, codes & 0x80, codes)
    codes[:, ::64, ::128] = 0x7E
    shape = (rows // 128, k // 128) if case.blockwise else ()
    return codes, 2.0 ** -draw(name + "_scale", case.experts, *shape, below=8).float(), None


def digest(tensor: torch.Tensor) -> str:
    """dtype, shape and SHA-256 of a tensor's bytes."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"
