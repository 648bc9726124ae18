"""What an implementation that claims FLOAT32 may return, as an interval for every element of every stage.

An interval is the set of values that some honest implementation could give: any order of summation, any exponential
that is good to a few ulps, after any admissible result of the step before. Roundings are monotone, so a rounding maps
the ends of an interval to the ends of the next, exactly: where both ends round to one code that code is required, and
where they do not, the value before rounding lies too near a boundary to tell, and the element may flip. No constant
is tuned; the data decide how many elements may flip.

    fc1         exact product (float64) +- gamma_n * sum |x| |w|,   gamma_n = n u / (1 - n u), u = 2^-24, n = K + 8:
                K products and sums in any order (Higham, Accuracy and Stability, 3.1), 8 for dequantizing, scales
    activation  silu over the gate's interval (its minimum at -1.2784... included), times up, times weight; each widened
                by (10 + 2 |gate|) u: a few roundings, and exp of an argument that was rounded
    requantize  amax, scale and code by the scheme's own float32 operations on the ends
    fc2         as fc1, plus sum |w| * half the width of what it is given; then bf16 of both ends
    combine     the scheme's own sum on both ends; ON_ARRIVAL: gamma_k, u = 2^-8, for any order; GROUPED with an FP8
                wire: half a step of it for each rank's sum

NaN or infinity in the exact value means no claim: the interval is [NaN, NaN] and every value is admitted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fp4ep.reference.exchange import combine
from fp4ep.reference.formats import Format, decode, encode
from fp4ep.reference.quantize import MX_BLOCK, SCALE_FLOOR, SMALLEST_AMAX, TINY_AMAX, blocks
from fp4ep.reference.scheme import ActivationQuant, Apply, Combine, ScaleSource, Scheme, Weights
from fp4ep.reference.weights import Operand, load_operand

from .problem import Layer

_U = 2.0**-24
#: float32's underflow, for every term that may be flushed or rounded as a subnormal.
_ETA = 2.0**-126
#: Where silu has its only minimum, and that minimum.
_SILU_LOW = (-1.2784645427610738, -0.27846454276107374)


@dataclass(frozen=True)
class Interval:
    """low, high: float64, one shape; NaN where nothing is claimed."""

    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def around(cls, center: torch.Tensor, radius: torch.Tensor) -> "Interval":
        undefined = ~(torch.isfinite(center) & torch.isfinite(radius))
        low, high = (torch.where(undefined, torch.nan, end) for end in (center - radius, center + radius))
        return cls(low, high)

    @property
    def center(self) -> torch.Tensor:
        return self.low + (self.high - self.low) / 2

    @property
    def radius(self) -> torch.Tensor:
        return (self.high - self.low) / 2

    def __getitem__(self, index) -> "Interval":
        return Interval(self.low[index], self.high[index])

    def __mul__(self, other: "Interval") -> "Interval":
        ends = torch.stack([a * b for a in (self.low, self.high) for b in (other.low, other.high)])
        return Interval(ends.amin(0), ends.amax(0))

    def map(self, rounding) -> "Interval":
        """A monotone function of float32 on both ends, which are first moved outward to float32."""
        low, high = rounding(_outward(self.low, -torch.inf)), rounding(_outward(self.high, torch.inf))
        return Interval(low.double(), high.double())


def _outward(values: torch.Tensor, direction: float) -> torch.Tensor:
    rounded = values.float()
    beyond = rounded.double() < values if direction > 0 else rounded.double() > values
    return torch.where(beyond, torch.nextafter(rounded, torch.tensor(direction)), rounded)


#: Weights of the schemes without a bound -> what it would have to cover.
_UNBOUNDED = {
    Weights.NVFP4_BLOCK_SCALED: "the FP4 activations",
    Weights.FP8_BLOCK_128_APART: "the approximate divisions",
}


def layer_intervals(
    layer: Layer, received: Mapping[int, Mapping[str, torch.Tensor]]
) -> dict[tuple[str, str], dict[int, Interval]]:
    """(stage, tensor) -> rank -> interval. received: the dispatch rows of every rank, in whose order the rows are.

    Raises ValueError for schemes with FP4 activations (SM100) and for the push kernel's, whose bounds are not derived.
    """
    scheme = layer.scheme
    if scheme.weights in _UNBOUNDED:
        raise ValueError(f"scheme: no bound is derived for {_UNBOUNDED[scheme.weights]} of {scheme}; claim bits")
    found: dict[tuple[str, str], dict[int, Interval]] = {}
    for rank, rows in received.items():
        x = rows["values"].double() * _spread(rows["scales"].double(), rows["values"].shape[1])
        fc1 = _experts(layer, "w13", rows["expert"], Interval(x, x))
        half = fc1.low.shape[1] // 2
        gate, up = fc1[:, :half], fc1[:, half:]
        activated = _activation(scheme, gate, up, rows["topk_weights"].double())
        values, scales = requantize_interval(scheme, activated)
        spread = Interval(*(_spread(end, values.low.shape[1]) for end in (scales.low, scales.high)))
        fc2 = _experts(layer, "w2", rows["expert"], values * spread).map(lambda v: v.bfloat16())
        stages = {
            ("fc1", "gate"): gate,
            ("fc1", "up"): up,
            ("activation", "values"): activated,
            ("requantize", "values"): values,
            ("requantize", "scales"): scales,
            ("fc2", "values"): fc2,
        }
        for key, interval in stages.items():
            found.setdefault(key, {})[rank] = interval
    terms = _terms(layer, received, found["fc2", "values"])
    found["combine", "terms"] = terms
    found["combine", "values"] = {rank: _combine(layer, rank, interval) for rank, interval in terms.items()}
    return found


def _spread(scales: torch.Tensor, channels: int) -> torch.Tensor:
    """`[rows, blocks]` -> `[rows, channels]`."""
    return scales.repeat_interleave(channels // scales.shape[1], 1)


def _experts(layer: Layer, leg: str, expert: torch.Tensor, x: Interval) -> Interval:
    """`[routes, N]`: every expert's product with its rows."""
    rows = getattr(layer.weights, leg).shape[1]
    low = torch.empty(len(expert), rows, dtype=torch.float64)
    high = torch.empty_like(low)
    for e in expert.unique().tolist():
        mine = expert == e
        product = _product(x[mine], load_operand(layer.scheme, layer.weights, leg, e))
        low[mine], high[mine] = product.low, product.high
    return Interval(low, high)


def _product(x: Interval, weight: Operand) -> Interval:
    k = x.low.shape[1]
    w = weight.values.double() * _spread(weight.scale.double(), k)
    n = k + 8
    gamma = n * _U / (1 - n * _U)
    center, radius = x.center, x.radius
    given = radius @ w.abs().T
    absolute = center.abs() @ w.abs().T + given
    flushed = _ETA * ((center.abs() + radius).sum(1)[:, None] + w.abs().sum(1)[None] + k)
    return Interval.around(center @ w.T, given + gamma * absolute + flushed)


def _activation(scheme: Scheme, gate: Interval, up: Interval, weight: torch.Tensor) -> Interval:
    limit = scheme.gate_up_clamp
    if limit is not None:
        gate = Interval(gate.low.clamp(max=limit), gate.high.clamp(max=limit))
        up = Interval(up.low.clamp(-limit, limit), up.high.clamp(-limit, limit))
    ends = torch.stack([g * torch.sigmoid(g) for g in (gate.low, gate.high)])
    place, lowest = _SILU_LOW
    low = torch.where((gate.low < place) & (gate.high > place), lowest, ends.amin(0))
    exact = Interval(low, ends.amax(0)) * up * Interval(weight[:, None], weight[:, None])
    largest = torch.maximum(gate.low.abs(), gate.high.abs())
    relative = (10 + 2 * largest) * _U
    flushed = _ETA * (1 + largest * torch.maximum(up.low.abs(), up.high.abs()) * (1 + weight.abs()[:, None]))
    wider = [end.abs() * relative + flushed for end in (exact.low, exact.high)]
    low, high = exact.low - wider[0], exact.high + wider[1]
    undefined = ~(torch.isfinite(low) & torch.isfinite(high) & (high.abs().maximum(low.abs()) < 3e38))
    return Interval(*(torch.where(undefined, torch.nan, end) for end in (low, high)))


def requantize_interval(scheme: Scheme, activated: Interval) -> tuple[Interval, Interval]:
    """Intervals of the operand values and of their scales."""
    rule = scheme.requantize
    ones = torch.ones(len(activated.low), 1, dtype=torch.float64)
    if rule is None:
        return activated.map(lambda v: v.bfloat16()), Interval(ones, ones)
    if rule.source is ScaleSource.STATIC:
        scale = torch.tensor(scheme.fc2_activation_dequant_scale)
        codes = activated.map(lambda v: _round(_apply(rule, v, scale), rule.element))
        return codes, Interval(ones * float(scale), ones * float(scale))
    low, high = (blocks(_outward(end, d), rule.block or end.shape[1]) for end, d in
                 ((activated.low, -torch.inf), (activated.high, torch.inf)))  # fmt: skip
    inside = (low <= 0) & (high >= 0)
    nearest = torch.where(inside, 0.0, torch.minimum(low.abs(), high.abs())).amax(-1)
    farthest = torch.maximum(low.abs(), high.abs()).amax(-1)
    small, large = ((a * rule.element.reciprocal_max).clamp(min=SCALE_FLOOR) for a in (nearest, farthest))
    tiny = rule.tiny_path & (nearest < TINY_AMAX)
    if rule.tiny_path:
        small, large = (
            torch.where(tiny, a.clamp(min=SMALLEST_AMAX) * rule.element.reciprocal_max, s)
            for a, s in ((nearest, small), (farthest, large))
        )
    slack = torch.where(tiny, 2.0**-20, 0.0)[..., None]  # the tiny path rounds twice more, by another formula
    shrink, grow = small[..., None] * (1 - slack), large[..., None] * (1 + slack)
    ends = (
        _round(_apply(rule, low, torch.where(low < 0, shrink, grow)), rule.element),
        _round(_apply(rule, high, torch.where(high < 0, grow, shrink)), rule.element),
    )
    # A block that may or may not be all zero: its scale jumps to the floor.
    jump = (nearest == 0) & (farthest > 0)
    undefined = torch.isnan(farthest)
    scales = [
        torch.where(undefined, torch.nan, torch.where(jump, edge, s[..., 0]))
        for edge, s in ((0.0, shrink), (torch.maximum(grow[..., 0], torch.tensor(SCALE_FLOOR)), grow))
    ]
    values = [
        torch.where(undefined[..., None], torch.nan, torch.where(jump[..., None], edge, v)).flatten(-2)
        for edge, v in zip((-rule.element.max, rule.element.max), ends, strict=True)
    ]
    return Interval(*(v.double() for v in values)), Interval(*(s.double() for s in scales))


def _apply(rule: ActivationQuant, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if rule.apply is Apply.DIVIDE:
        return values / scale
    return values * (1 / scale)


def _round(values: torch.Tensor, element: Format) -> torch.Tensor:
    """Saturating: no requantization of a scheme does otherwise."""
    return torch.where(torch.isnan(values), torch.nan, decode(encode(values, element), element))


def _combine(layer: Layer, rank: int, terms: Interval) -> Interval:
    ids, scheme = layer.inputs[rank].topk_ids, layer.scheme
    local = layer.weights.num_experts // layer.ep_size
    if scheme.wire is not None:
        return _summed_by_rank(terms, ids, local, scheme.wire).map(lambda t: t.bfloat16())
    if scheme.combine is not Combine.ON_ARRIVAL:
        return terms.map(lambda t: combine(t.bfloat16(), ids, scheme.combine, local))
    return _sum(terms, 2.0**-8)


def _sum(terms: Interval, unit: float) -> Interval:
    """Over the slots in any order, every addition rounded to `unit`."""
    gamma = terms.low.shape[1] * unit / (1 - terms.low.shape[1] * unit)
    absolute = (terms.center.abs() + terms.radius).sum(1)
    return Interval.around(terms.center.sum(1), terms.radius.sum(1) + gamma * absolute)


def _summed_by_rank(terms: Interval, topk_ids: torch.Tensor, local: int, wire: Format) -> Interval:
    """Each rank's sum moves by half a step of the wire at most: relative to itself, or to the block's maximum."""
    owner = torch.where(topk_ids >= 0, topk_ids // local, -1)
    total = Interval(torch.zeros_like(terms.low[:, 0]), torch.zeros_like(terms.low[:, 0]))
    for rank in owner[owner >= 0].unique().tolist():
        mine = (owner == rank)[..., None]
        part = _sum(Interval(*(torch.where(mine, end, 0.0) for end in (terms.low, terms.high))), _U)
        largest = part.center.abs() + part.radius
        # A scale is below 2 amax / max, a subnormal's half step 2^(min_exponent - mantissa_bits - 1) of it.
        amax = _spread(blocks(largest, MX_BLOCK).double().amax(-1), largest.shape[1])
        subnormal = amax * 2.0 ** (wire.min_exponent - wire.mantissa_bits) / wire.max
        moved = largest * 2.0 ** (-wire.mantissa_bits - 1) + subnormal
        sent = Interval.around(part.center, part.radius + moved)
        total = Interval(total.low + sent.low, total.high + sent.high)
    return Interval.around(
        total.center, total.radius + 2 * topk_ids.shape[1] * _U * (total.center.abs() + total.radius)
    )


def _terms(layer: Layer, received, fc2: Mapping[int, Interval]) -> dict[int, Interval]:
    """Route outputs at home: `[T, top_k, H]`, masked slots 0, as in a fresh workspace."""
    terms = {}
    for rank, inputs in enumerate(layer.inputs):
        ends = []
        for end in ("low", "high"):
            home = torch.zeros(*inputs.topk_ids.shape, inputs.hidden_states.shape[1], dtype=torch.float64)
            for owner, rows in received.items():
                mine = rows["source_rank"] == rank
                home[rows["token"][mine], rows["slot"][mine]] = getattr(fc2[owner], end)[mine]
            ends.append(home)
        terms[rank] = Interval(*ends)
    return terms
