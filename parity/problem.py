"""Problems: a layer and its tokens, made from a few numbers and two names, alike on every rank and machine."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fp4ep.reference.formats import E2M1, E4M3, Format
from fp4ep.reference.quantize import MX_BLOCK, NVFP4_BLOCK, quantize_mx, quantize_nvfp4
from fp4ep.reference.scales import ScaleRule
from fp4ep.reference.scheme import ScaleSource, Scheme, Weights
from fp4ep.reference.schemes import find_scheme
from fp4ep.reference.types import MoEInputs, MoEWeights

from .generate import integers, normal
from .recording import quantized_part


@dataclass(frozen=True)
class Layer:
    """A layer to run: the scheme, every expert's weights, and the tokens of each EP rank."""

    scheme: Scheme
    weights: MoEWeights
    inputs: tuple[MoEInputs, ...]

    @property
    def ep_size(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Problem:
    """What a layer is made from. Two problems that differ only in `tokens`, with the same sum, hold the same tokens.

    Raises ValueError on an unknown pattern or scheme, or sizes that make no layer; `build` then checks nothing more
    than `moe_forward` does.
    """

    scheme: str  #: FlashInfer's registry name
    options: Mapping[str, Any] = field(default_factory=dict)  #: further arguments of find_scheme
    tokens: tuple[int, ...] = (16,)  #: of each EP rank
    num_experts: int = 8
    top_k: int = 2
    hidden: int = 256
    intermediate: int = 128
    values: str = "normal"  #: a key of VALUES
    routing: str = "uniform"  #: a key of ROUTING
    padding: int = 0  #: rows behind each rank's tokens: NaN throughout, all slots masked
    seed: int = 0

    def __post_init__(self) -> None:
        find_scheme(self.scheme, **self.options)
        for name, known in (("values", VALUES), ("routing", ROUTING)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(known)}")
        if not self.tokens or min(self.tokens) < 0 or self.num_experts % len(self.tokens):
            raise ValueError(
                f"tokens must name a number >= 0 for each of 1 or more ranks, and the ranks divide the "
                f"{self.num_experts} experts, got {self.tokens}"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k must be 1 to num_experts = {self.num_experts}, got {self.top_k}")
        for name in ("hidden", "intermediate"):
            if getattr(self, name) < 64 or getattr(self, name) % 64:
                raise ValueError(f"{name} must be a positive multiple of 64, got {getattr(self, name)}")

    @property
    def ep_size(self) -> int:
        return len(self.tokens)

    def over(self, ep_size: int) -> "Problem":
        """The same tokens over another number of ranks, as evenly as they go."""
        total = sum(self.tokens)
        return replace(self, tokens=tuple(total * (r + 1) // ep_size - total * r // ep_size for r in range(ep_size)))

    def __str__(self) -> str:
        scheme = str(find_scheme(self.scheme, **self.options))
        tokens = "+".join(map(str, self.tokens))
        padding = f", {self.padding} rows of padding" * bool(self.padding)
        return (
            f"{scheme}: {tokens} tokens, {self.num_experts} experts, top-k {self.top_k}, H {self.hidden}, "
            f"I {self.intermediate}, {self.values} values, {self.routing} routing{padding}, seed {self.seed}"
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"options": dict(self.options), "tokens": list(self.tokens)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Problem":
        return cls(**{**saved, "tokens": tuple(saved["tokens"])})

    def build(self) -> Layer:
        scheme = find_scheme(self.scheme, **self.options)
        total = sum(self.tokens)
        x = VALUES[self.values](self, scheme, total)
        ids = ROUTING[self.routing](self, total)
        share = 1.0 + integers(self.seed * 100 + 3, ids.shape, 0, 255).float()
        weights = share / share.sum(1, keepdim=True)
        inputs, first = [], 0
        for count in self.tokens:
            rows = slice(first, first + count)
            inputs.append(_padded(x[rows], ids[rows], weights[rows], self.padding))
            first += count
        return Layer(scheme, _weights(self, scheme), tuple(inputs))


def _padded(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rows: int) -> MoEInputs:
    def behind(tensor: torch.Tensor, value: float) -> torch.Tensor:
        return torch.cat((tensor, torch.full((rows, tensor.shape[1]), value, dtype=tensor.dtype)))

    return MoEInputs(behind(x, float("nan")), behind(ids, -1), behind(weights, float("nan")))


# --- hidden states -----------------------------------------------------------------------------------------------


def _normal(problem: Problem, scheme: Scheme, tokens: int) -> torch.Tensor:
    return normal(problem.seed * 100, (tokens, problem.hidden), 1.0)


def _outliers(problem: Problem, scheme: Scheme, tokens: int) -> torch.Tensor:
    """One channel in 64 a hundred times larger."""
    x = _normal(problem, scheme, tokens)
    x[:, 7::64] *= 100
    return x


def _tiny(problem: Problem, scheme: Scheme, tokens: int) -> torch.Tensor:
    """Rows down to 1e-33, where scales meet their floor."""
    exponent = torch.linspace(-27, -33, max(tokens, 1), dtype=torch.float64)[:tokens, None]
    return (_normal(problem, scheme, tokens).double() * 10.0**exponent).bfloat16()


def _zeros(problem: Problem, scheme: Scheme, tokens: int) -> torch.Tensor:
    """Every other token zero, of both signs: blocks without an amax."""
    x = _normal(problem, scheme, tokens)
    x[::2] = torch.where(torch.arange(problem.hidden) % 2 == 0, 0.0, -0.0).bfloat16()
    return x


def _saturating(problem: Problem, scheme: Scheme, tokens: int) -> torch.Tensor:
    """Alternating signs of one magnitude: every code is the format's largest; a static scale overflows."""
    static = scheme.fc1_activation_dequant_scale
    magnitude = 1000.0 * static if scheme.stage and scheme.stage.source is ScaleSource.STATIC else 7.0
    sign = 1 - 2 * (integers(problem.seed * 100, (tokens, problem.hidden), 0, 1).float())
    return (sign * magnitude).bfloat16()


def _ties(problem: Problem, scheme: Scheme, tokens: int) -> torch.Tensor:
    """Midpoints between neighbouring codes of the staged format, under scales that are powers of two."""
    rule = scheme.stage
    element = rule.element if rule else E4M3
    x = tie_aligned(problem.seed * 100, (tokens, problem.hidden), element, (rule and rule.block) or problem.hidden)
    if rule and rule.source is ScaleSource.STATIC:
        return (x * scheme.fc1_activation_dequant_scale).bfloat16()
    exponent = integers(problem.seed * 100 + 9, (tokens, 1), 0, 8).float() - 12
    return (x * 2.0**exponent).bfloat16()


def tie_aligned(seed: int, shape: tuple[int, int], element: Format, block: int) -> torch.Tensor:
    """float32 `[rows, K]`: random midpoints between neighbouring codes, and the format's maximum once a block.

    So a scale made from the block's amax is a power of two, every other value is exactly at a tie, and random data's
    blindness to the tie rule is gone. UE8M0's own boundary is there too: the maximum is the value at which FLOOR, CEIL
    and RCEIL scales part.
    """
    values = element.values[: element.max_code + 1].double()
    midpoints = ((values[1:] + values[:-1]) / 2).float()
    pick = integers(seed, shape, 0, len(midpoints) - 1).long()
    sign = 1 - 2 * integers(seed + 1, shape, 0, 1).float()
    x = midpoints[pick] * sign
    x[:, ::block] = element.max
    return x


#: How hidden_states are made: (problem, scheme, tokens) -> `[tokens, hidden]` bf16.
VALUES: dict[str, Callable[[Problem, Scheme, int], torch.Tensor]] = {
    "normal": _normal,
    "outliers": _outliers,
    "tiny": _tiny,
    "zeros": _zeros,
    "saturating": _saturating,
    "ties": _ties,
}


# --- routing -----------------------------------------------------------------------------------------------------


def _top_k(problem: Problem, scores: torch.Tensor) -> torch.Tensor:
    """The experts of the largest scores; ties to the lower id."""
    return torch.argsort(scores, dim=1, descending=True, stable=True)[:, : problem.top_k].contiguous()


def _scores(problem: Problem, tokens: int, levels: int = 256) -> torch.Tensor:
    high = integers(problem.seed * 100 + 1, (tokens, problem.num_experts), 0, levels - 1).long()
    low = integers(problem.seed * 100 + 2, (tokens, problem.num_experts), 0, 255).long()
    return high * 256 + low if levels == 256 else high


def _uniform(problem: Problem, tokens: int) -> torch.Tensor:
    return _top_k(problem, _scores(problem, tokens))


def _skewed(problem: Problem, tokens: int) -> torch.Tensor:
    """One hot expert: every token goes there first."""
    scores = _scores(problem, tokens)
    scores[:, problem.num_experts // 2] = 1 << 20
    return _top_k(problem, scores)


def _empty_rank(problem: Problem, tokens: int) -> torch.Tensor:
    """The experts of the last rank (of a single one: the last expert) get nothing."""
    scores = _scores(problem, tokens)
    per_rank = problem.num_experts // problem.ep_size if problem.ep_size > 1 else 1
    scores[:, -per_rank:] = -1
    if problem.num_experts - per_rank < problem.top_k:
        raise ValueError(f"top_k: empty_rank routing leaves {problem.num_experts - per_rank} experts")
    return _top_k(problem, scores)


def _masked(problem: Problem, tokens: int) -> torch.Tensor:
    """A quarter of the slots masked, by -1 and -7, and every fifth token altogether."""
    ids = _uniform(problem, tokens)
    draw = integers(problem.seed * 100 + 4, ids.shape, 0, 7)
    ids[draw == 0], ids[draw == 1] = -1, -7
    ids[4::5] = -1
    return ids


def _duplicates(problem: Problem, tokens: int) -> torch.Tensor:
    """Every other token names its first expert again in its last slot."""
    ids = _uniform(problem, tokens)
    ids[::2, -1] = ids[::2, 0]
    return ids


def _score_ties(problem: Problem, tokens: int) -> torch.Tensor:
    """Router scores of three levels only: most tokens tie at the edge of the top-k."""
    return _top_k(problem, _scores(problem, tokens, levels=3))


#: How topk_ids are made: (problem, tokens) -> `[tokens, top_k]` int64.
ROUTING: dict[str, Callable[[Problem, int], torch.Tensor]] = {
    "uniform": _uniform,
    "skewed": _skewed,
    "empty_rank": _empty_rank,
    "masked": _masked,
    "duplicates": _duplicates,
    "score_ties": _score_ties,
}


# --- weights -----------------------------------------------------------------------------------------------------


def _weights(problem: Problem, scheme: Scheme) -> MoEWeights:
    """Dense normal weights, packed where the scheme's family is FP4; with "ties", on E2M1's own boundaries."""
    e, h, i = problem.num_experts, problem.hidden, problem.intermediate
    shapes = {"w13": (e, 2 * i, h), "w2": (e, h, i)}
    gain = 1e28 if problem.values == "tiny" else 1.0  # so that tiny inputs become ordinary values after fc1
    dense = {}
    for n, (leg, shape) in enumerate(shapes.items()):
        dense[leg] = normal(problem.seed * 100 + 20 + n, shape, (0.06 * gain, 0.08)[n])
        if problem.values == "ties":
            block = MX_BLOCK if scheme.weights is Weights.MXFP4 else NVFP4_BLOCK
            ties = tie_aligned(problem.seed * 100 + 30 + 2 * n, (shape[0] * shape[1], shape[2]), E2M1, block)
            dense[leg] = (ties / 64).bfloat16().reshape(shape)
    if scheme.weights is Weights.NVFP4:
        quantized = {leg: quantize_nvfp4(w) for leg, w in dense.items()}
    elif scheme.weights is Weights.MXFP4:
        quantized = {leg: quantize_mx(w, E2M1, ScaleRule.FLOOR) for leg, w in dense.items()}
    else:
        return MoEWeights(**dense)
    parts = {leg: quantized_part(q, "codes") for leg, q in quantized.items()}
    parts |= {f"{leg}_scale": q.scales for leg, q in quantized.items()}
    parts |= {f"{leg}_global_scale": q.global_scale for leg, q in quantized.items() if q.global_scale is not None}
    return MoEWeights(**parts)


# --- suites ------------------------------------------------------------------------------------------------------

#: Changes to an ordinary problem, each aimed at one kind of mistake.
CASES: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "outliers": {"values": "outliers"},
    "tiny values": {"values": "tiny"},
    "zero blocks": {"values": "zeros"},
    "saturating blocks": {"values": "saturating"},
    "values at ties": {"values": "ties"},
    "one hot expert": {"routing": "skewed"},
    "a rank without routes": {"routing": "empty_rank"},
    "masked slots": {"routing": "masked"},
    "duplicate ids": {"routing": "duplicates"},
    "tied router scores": {"routing": "score_ties"},
    "poisoned padding": {"padding": 5},
    "uneven ranks, one without tokens": {"tokens": (11, 0, 1, 4)},
}


def problems(scheme: str, options: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Problem]:
    """Every case of CASES for a scheme, by name. changes: fields of Problem for all of them."""
    return {name: Problem(scheme, options or {}, **{**changes, **case}) for name, case in CASES.items()}
