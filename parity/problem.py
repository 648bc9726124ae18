"""Problems: a layer and its tokens, made from a few numbers and two names, alike on every rank and machine."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fp4ep.reference.formats import E2M1, E4M3, Format
from fp4ep.reference.quantize import MX_BLOCK, NVFP4_BLOCK, quantize_activation, quantize_mx, quantize_nvfp4
from fp4ep.reference.scales import ScaleRule
from fp4ep.reference.scheme import ScaleSource, Scheme, Weights
from fp4ep.reference.schemes import SCHEMES, find_scheme
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


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def evenly(tokens: int, ep_size: int) -> list[int]:
    """How many tokens each rank gets when they are spread as evenly as they go."""
    return [tokens * (rank + 1) // ep_size - tokens * rank // ep_size for rank in range(ep_size)]


@dataclass(frozen=True)
class Problem:
    """What a layer is made from. Two problems that differ only in `tokens`, with the same sum, hold the same tokens.

    Raises ValueError on whatever makes no layer. What a scheme asks of the sizes beyond that is `moe_forward`'s to say.
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
    dense_weights: bool = False  #: bf16 weights where the scheme's family is FP4: the backend quantizes them
    quantize_input: bool = True  #: False: hidden_states are FP8 codes already, with their scales
    seed: int = 0

    def __post_init__(self) -> None:
        names = sorted({scheme.name for scheme in SCHEMES})
        if self.scheme not in names:
            raise ValueError(f"scheme: {self.scheme!r} is not one of {', '.join(names)}")
        if not isinstance(self.options, Mapping):
            raise ValueError(f"options must be a mapping of find_scheme's arguments, got {self.options!r}")
        find_scheme(self.scheme, **self.options)
        for name, known in (("values", VALUES), ("routing", ROUTING)):
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in known:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(known)}")
        for name, least in (("num_experts", 1), ("top_k", 1), ("padding", 0), ("seed", 0)):
            if not _whole(getattr(self, name), least):
                raise ValueError(f"{name} must be a whole number >= {least}, got {getattr(self, name)!r}")
        tokens = self.tokens
        fits = isinstance(tokens, tuple) and tokens and all(_whole(count, 0) for count in tokens)
        if not fits or self.num_experts % len(tokens):
            raise ValueError(
                f"tokens must be a tuple with a whole number >= 0 for each of 1 or more ranks that divide the "
                f"{self.num_experts} experts, got {tokens!r}"
            )
        least, most = _TOP_K.get(self.routing, (1, 1))
        if not least <= self.top_k <= self.num_experts // most:
            limits = f"{least} to {self.num_experts // most} of {self.num_experts} experts with {self.routing} routing"
            raise ValueError(f"top_k must be {limits}, got {self.top_k}")
        for name in ("hidden", "intermediate"):
            if not _whole(getattr(self, name), 64) or getattr(self, name) % 64:
                raise ValueError(f"{name} must be a positive multiple of 64, got {getattr(self, name)!r}")
        scheme = find_scheme(self.scheme, **self.options)
        if self.dense_weights and not scheme.dense_weights:
            raise ValueError(f"dense_weights: {scheme} takes none, got {self.dense_weights!r}")
        takes = scheme.quantized_inputs and scheme.stage is not None and scheme.stage.element.dtype is not None
        if not (self.quantize_input or takes):
            raise ValueError(f"quantize_input: {scheme} takes bf16 only, got {self.quantize_input!r}")

    @property
    def ep_size(self) -> int:
        return len(self.tokens)

    def over(self, ep_size: int) -> "Problem":
        """The same tokens over another number of ranks, as evenly as they go."""
        return replace(self, tokens=tuple(evenly(sum(self.tokens), ep_size)))

    def __str__(self) -> str:
        scheme = str(find_scheme(self.scheme, **self.options))
        tokens = "+".join(map(str, self.tokens))
        padding = f", {self.padding} rows of padding" * bool(self.padding)
        padding += ", bf16 weights" * self.dense_weights + ", quantized before" * (not self.quantize_input)
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
        if self.routing == "cancelling":
            weights[:, 0] = 2.0**18
            weights[:, -1] = -(2.0**18)
        inputs, first = [], 0
        for count in self.tokens:
            rows = slice(first, first + count)
            mine = _padded(x[rows], ids[rows], weights[rows], self.padding)
            inputs.append(mine if self.quantize_input else _quantized(self, scheme, mine))
            first += count
        return Layer(scheme, _weights(self, scheme), tuple(inputs))


def _padded(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rows: int) -> MoEInputs:
    def behind(tensor: torch.Tensor, value: float) -> torch.Tensor:
        return torch.cat((tensor, torch.full((rows, tensor.shape[1]), value, dtype=tensor.dtype)))

    return MoEInputs(behind(x, float("nan")), behind(ids, -1), behind(weights, float("nan")))


def _quantized(problem: Problem, scheme: Scheme, inputs: MoEInputs) -> MoEInputs:
    """The tokens as the scheme's own stage leaves them. Under a static scale a plane of UE8M0 scales goes along, which
    nothing uses."""
    rule = scheme.stage
    assert rule is not None
    assert rule.element.dtype is not None
    quantized = quantize_activation(inputs.hidden_states.float(), rule, scheme.fc1_activation_dequant_scale)
    scales = quantized.scales
    if rule.source is ScaleSource.STATIC:
        shape = (len(inputs.hidden_states), problem.hidden // 32)
        scales = integers(problem.seed * 100 + 5, shape, 100, 150).view(torch.float8_e8m0fnu)
    return replace(inputs, hidden_states=quantized.codes.view(rule.element.dtype), scales=scales)


# --- hidden states -----------------------------------------------------------------------------------------------


def _normal(problem: Problem, scheme: Scheme, tokens: int) -> torch.Tensor:
    return normal(problem.seed * 100, (tokens, problem.hidden), 1.0)


def _outliers(problem: Problem, scheme: Scheme, tokens: int) -> torch.Tensor:
    """One channel in 64 a hundred times larger."""
    x = _normal(problem, scheme, tokens)
    x[:, 7::64] *= 100
    return x


def _static(scheme: Scheme) -> float | None:
    """The static scale of staging, if there is one; where scales have a format, the reciprocal of the norm constant."""
    if scheme.stage is None:
        return None
    if scheme.stage.scale is not None:
        return 1 / scheme.input_norm_const
    return scheme.fc1_activation_dequant_scale if scheme.stage.source is ScaleSource.STATIC else None


def _tiny(problem: Problem, scheme: Scheme, tokens: int) -> torch.Tensor:
    """Rows down to 1e-33, where scales meet their floor; under a static scale or norm constant down to the subnormals
    of the format, of codes or of scales."""
    static = _static(scheme)
    first, last = (-27, -33) if static is None else (0, -3)
    exponent = torch.linspace(first, last, max(tokens, 1), dtype=torch.float64)[:tokens, None]
    return (_normal(problem, scheme, tokens).double() * (static or 1.0) * 10.0**exponent).bfloat16()


def _zeros(problem: Problem, scheme: Scheme, tokens: int) -> torch.Tensor:
    """Every other token zero, of both signs: blocks without an amax."""
    x = _normal(problem, scheme, tokens)
    x[::2] = torch.where(torch.arange(problem.hidden) % 2 == 0, 0.0, -0.0).bfloat16()
    return x


def _saturating(problem: Problem, scheme: Scheme, tokens: int) -> torch.Tensor:
    """One magnitude: every code is the format's largest. Under a static scale or norm constant so is every scale, and
    every fourth token is twice as large."""
    static = _static(scheme)
    sign = 1 - 2 * integers(problem.seed * 100, (tokens, problem.hidden), 0, 1).float()
    if static is None or scheme.stage is None:
        return (sign * 7.0).bfloat16()
    largest = scheme.stage.element.max * (scheme.stage.scale.max if scheme.stage.scale else 1.0)
    magnitude = torch.full((tokens, 1), largest * static)
    magnitude[3::4] *= 2
    return (sign * magnitude).bfloat16()


def _ties(problem: Problem, scheme: Scheme, tokens: int) -> torch.Tensor:
    """Midpoints between neighbouring codes of the staged format, under scales that are powers of two."""
    rule = scheme.stage
    element = rule.element if rule else E4M3
    x = tie_aligned(problem.seed * 100, (tokens, problem.hidden), element, (rule and rule.block) or problem.hidden)
    if (static := _static(scheme)) is not None:  # at ties where it is a power of two
        return (x * static).bfloat16()
    exponent = integers(problem.seed * 100 + 9, (tokens, 1), 0, 8).float() - 12
    return (x * 2.0**exponent).bfloat16()


def tie_aligned(seed: int, shape: tuple[int, int], element: Format, block: int) -> torch.Tensor:
    """float32 `[rows, K]`: random midpoints between neighbouring codes, and the format's maximum once a block.

    So a scale made from the block's amax is a power of two, every other value is exactly at a tie, and random data's
    blindness to the tie rule is gone. UE8M0's own boundary is there too: at the maximum CEIL parts from the other
    rules, and one step above it RCEIL does.
    """
    values = element.values[: element.max_code + 1].double()
    midpoints = ((values[1:] + values[:-1]) / 2).float()
    pick = integers(seed, shape, 0, len(midpoints) - 1).long()
    sign = 1 - 2 * integers(seed + 50, shape, 0, 1).float()
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
    """The second half of the experts gets nothing: so the last rank, of however many."""
    scores = _scores(problem, tokens)
    scores[:, problem.num_experts // 2 :] = -1
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


def _cancelling(problem: Problem, tokens: int) -> torch.Tensor:
    """First and last slot name one expert, with weights of 2^18 and -2^18: the sum shows in which order it was made."""
    ids = _uniform(problem, tokens)
    ids[:, -1] = ids[:, 0]
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
    "cancelling": _cancelling,
    "score_ties": _score_ties,
}
#: Routing -> least top_k, and how many experts there must be for each slot; (1, 1) where not named.
_TOP_K = {"empty_rank": (1, 2), "duplicates": (2, 1), "cancelling": (3, 1)}


# --- weights -----------------------------------------------------------------------------------------------------


#: Format and block in which packed weights lie at ties; others in the format of the tokens.
_TIED = {
    Weights.NVFP4: (E2M1, NVFP4_BLOCK),
    Weights.NVFP4_BLOCK_SCALED: (E2M1, NVFP4_BLOCK),
    Weights.MXFP4: (E2M1, MX_BLOCK),
}


def _weights(problem: Problem, scheme: Scheme) -> MoEWeights:
    """Dense normal weights, packed where the scheme's family is FP4; with "ties", on the boundaries of its format."""
    e, h, i = problem.num_experts, problem.hidden, problem.intermediate
    shapes = {"w13": (e, 2 * i, h), "w2": (e, h, i)}
    tiny = problem.values == "tiny" and _static(scheme) is None
    gain = 1e28 if tiny else 1.0  # so that tiny inputs become ordinary values after fc1
    dense = {}
    for n, (leg, shape) in enumerate(shapes.items()):
        dense[leg] = normal(problem.seed * 100 + 20 + n, shape, (0.06 * gain, 0.08)[n])
        if problem.values == "ties":
            element, block = _TIED.get(scheme.weights, (scheme.stage.element if scheme.stage else E4M3, 128))
            ties = tie_aligned(problem.seed * 100 + 30 + n, (shape[0] * shape[1], shape[2]), element, block)
            dense[leg] = (ties * 2.0 ** -(math.frexp(element.max)[1] + 3)).bfloat16().reshape(shape)
    if problem.dense_weights:
        return MoEWeights(**dense)
    if scheme.weights in (Weights.NVFP4, Weights.NVFP4_BLOCK_SCALED):
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
    "routes that cancel": {"routing": "cancelling", "top_k": 4},
    "tied router scores": {"routing": "score_ties"},
    "poisoned padding": {"padding": 5},
    "uneven ranks, one without tokens": {"tokens": (11, 0, 1, 4)},
}


def problems(
    scheme: str, options: Mapping[str, Any] | None = None, cases: Iterable[str] | None = None, **changes: Any
) -> dict[str, Problem]:
    """Problems for a scheme by name of the case. cases: keys of CASES, None for all; changes: fields of Problem for all
    of them, unless a case is made by that field. Raises ValueError on an unknown case, and as Problem does."""
    chosen = list(CASES if cases is None else cases)
    if unknown := [name for name in chosen if name not in CASES]:
        raise ValueError(f"cases: {', '.join(unknown)} not among {', '.join(CASES)}")
    return {name: Problem(scheme, options or {}, **{**changes, **CASES[name]}) for name in chosen}
