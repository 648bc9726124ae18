"""The sizes and the small numbers of the exact grid, as data. What they are for, and why these: `grid.py`."""

from dataclasses import dataclass, replace

from fp4ep.reference.formats import E2M1
from fp4ep.reference.scheme import Scheme


@dataclass(frozen=True)
class Geometry:
    """Sizes of a layer."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int

    def __str__(self) -> str:
        return f"H{self.hidden}-I{self.intermediate}-E{self.num_experts}-k{self.top_k}"


#: Those of vLLM's test.
GEOMETRIES = (
    Geometry(7168, 3072, 384, 6),
    Geometry(4096, 2048, 256, 6),
    Geometry(4096, 2048, 128, 4),
    Geometry(7168, 4096, 128, 4),
)
#: Small, and fit for every scheme.
SMALL = Geometry(256, 512, 8, 4)


@dataclass(frozen=True)
class Expert:
    """What is particular to an expert. Alphas and norm count where the scheme has such scales."""

    code: float  #: of its w2
    up_code: float
    fc1_alpha: float
    fc2_alpha: float  #: where the scheme has norms, over `fc1_norm_const`
    fc1_norm_const: float


#: Expert e has row e mod 7: neither ranks nor strides, powers of two times 3, bring a row back early.
EXPERTS = (
    Expert(0.5, 1.0, 1.0, 1.0, 1.0),
    Expert(1.0, -1.0, 2.0, 2.0, 0.5),
    Expert(1.5, 2.0, 2.0, 0.5, 2.0),
    Expert(2.0, -2.0, 1.0, 4.0, 1.0),
    Expert(3.0, 1.0, 2.0, 0.25, 0.25),
    Expert(4.0, -1.0, 1.0, 8.0, 2.0),
    Expert(6.0, 2.0, 1.0, 0.125, 0.5),
)


@dataclass(frozen=True)
class Numbers:
    """The small numbers of tokens and of w13. Token t takes the entry t modulo the length."""

    gate: float  #: the token's value that gate picks
    ups: tuple[float, ...]  #: the one that up picks, in the next column; empty: up picks gate's
    sentinels: tuple[float, ...]  #: the token's largest value, which nothing picks
    gate_code: float
    up_code: float | None = None  #: of every expert, instead of `Expert.up_code`

    def of_token(self, token: int) -> tuple[float, float, float]:
        """Gate, up and sentinel."""
        ups = self.ups or (self.gate,)
        return self.gate, ups[token % len(ups)], self.sentinels[token % len(self.sentinels)]


FP8 = Numbers(gate=4, ups=(1.5, 3, 6), sentinels=(7, 14, 28), gate_code=4)
W4A4 = replace(FP8, sentinels=(6,))
#: vLLM's: gate = up = 12, without alphas silu(12) * 12 = 144.
VLLM = Numbers(gate=2, ups=(), sentinels=(6,), gate_code=6, up_code=6)

FAMILIES = {"fp8": FP8, "w4a4": W4A4}


def family(scheme: Scheme) -> str:
    """The key in FAMILIES: "w4a4" where activations are E2M1, else "fp8" (FP8 or bf16 activations)."""
    return "w4a4" if scheme.stage is not None and scheme.stage.element is E2M1 else "fp8"
