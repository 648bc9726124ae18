"""The vocabulary of `faults.py`: what a mistake does to weights, tokens, a GEMM's rule or the tensors of a stage.

Each function returns one that takes the right thing and gives the wrong one. On weights without the field it is about
(dense ones have no scales) it does nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fp4ep.reference.activation import swiglu
from fp4ep.reference.exchange import Rows, combine
from fp4ep.reference.formats import E4M3, Format, encode
from fp4ep.reference.fp32 import floor_log2, power_of_two
from fp4ep.reference.quantize import Quantized, quantize_activation, quantize_fp8_per_expert
from fp4ep.reference.scheme import ActivationQuant, Apply, Combine, Gemm, Scheme
from fp4ep.reference.types import MoEInputs, MoEWeights
from fp4ep.reference.weights import load_operand

from .problem import Layer, tie_aligned

Tensor = torch.Tensor
OnWeights = Callable[[MoEWeights], MoEWeights]

# --- weights -----------------------------------------------------------------------------------------------------


def part(name: str, change: Callable[[Tensor], Tensor]) -> OnWeights:
    """One field changed, if there is one."""

    def changed(weights: MoEWeights) -> MoEWeights:
        tensor = getattr(weights, name)
        return weights if tensor is None else replace(weights, **{name: change(tensor)})

    return changed


def scales_moved(leg: str, rows: int = 0, columns: int = 0) -> OnWeights:
    """Each block takes the scale `rows` below and `columns` to the right, within its expert."""
    return part(f"{leg}_scale", lambda scale: scale.roll((-rows, -columns), (1, 2)) if scale.ndim == 3 else scale)


def from_expert(name: str, offset: int | None) -> OnWeights:
    """A field of expert e + offset for expert e; None: of expert 0 for all."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.numel() == 1:
            return tensor
        return tensor.roll(-offset, 0) if offset else tensor[:1].expand_as(tensor).clone()

    return part(name, change)


def nibbles_swapped(leg: str) -> OnWeights:
    return part(leg, lambda codes: codes << 4 | codes >> 4 if codes.dtype is torch.uint8 else codes)


def global_scale(leg: str, change: Callable[[Tensor], Tensor]) -> OnWeights:
    return part(f"{leg}_global_scale", change)


def global_scale_of(leg: str, other: str) -> OnWeights:
    """The global scale of the other leg."""
    return lambda weights: replace(weights, **{f"{leg}_global_scale": getattr(weights, f"{other}_global_scale")})


def one_ulp_up(scales: Tensor) -> Tensor:
    return scales.nextafter(torch.tensor(torch.inf))


def one_ulp_down(scales: Tensor) -> Tensor:
    return scales.nextafter(torch.tensor(0.0))


def pairs_exchanged(scales: Tensor) -> Tensor:
    """Experts 2i and 2i + 1 exchanged."""
    return scales if scales.numel() == 1 else scales[(torch.arange(len(scales)) ^ 1).clamp(max=len(scales) - 1)]


def rows_of_w13(order: Callable[[int], Tensor]) -> OnWeights:
    """Gate and up rows, and their scales where each row has its own, in the order given for 2I."""

    def changed(weights: MoEWeights) -> MoEWeights:
        index, scale = order(weights.w13.shape[1]), weights.w13_scale
        ordered = replace(weights, w13=weights.w13[:, index])
        own = scale is not None and scale.shape[1:2] == weights.w13.shape[1:2]
        return replace(ordered, w13_scale=scale[:, index]) if scale is not None and own else ordered

    return changed


def halves_exchanged(rows: int) -> Tensor:
    return torch.arange(rows).roll(rows // 2)


def interleaved(rows: int) -> Tensor:
    """g0, u0, g1, u1, ... where halves are expected."""
    return torch.arange(rows).reshape(2, -1).T.flatten()


def separated(rows: int) -> Tensor:
    """Halves where g0, u0, g1, u1, ... is expected."""
    return torch.arange(rows).reshape(-1, 2).T.flatten()


def one_code(name: str, place: tuple[int, ...], step: int) -> OnWeights:
    """One scale byte `step` codes up."""

    def change(codes: Tensor) -> Tensor:
        wrong = codes.clone()
        wrong[place] += step
        return wrong

    return part(name, change)


def quantized_per_expert(layer: Layer) -> Layer:
    """Dense weights as FP8 codes with one scale per expert: the same layer, but the scales can be touched."""
    assert layer.scheme.stage is not None
    element = layer.scheme.stage.element
    parts: dict[str, Tensor] = {}
    for leg in ("w13", "w2"):
        experts = [quantize_fp8_per_expert(w, element) for w in getattr(layer.weights, leg)]
        parts |= {
            leg: torch.stack([q.codes for q in experts]),
            f"{leg}_scale": torch.cat([q.scales[0] for q in experts]),
        }
    return replace(layer, weights=MoEWeights(**parts))


def wide(rule: Gemm) -> Gemm:
    """Every instruction keeps 25 bits below its largest product, and float32 results."""
    return replace(rule, core=replace(rule.core, fraction_bits=25, output_bits=23))


# --- tokens ------------------------------------------------------------------------------------------------------


def ids(change: Callable[[Tensor, int, int, int], Tensor]) -> Callable[[MoEInputs, int, int, int], MoEInputs]:
    """change: (topk_ids, rank, experts, ranks) -> topk_ids."""
    return lambda inputs, *sizes: replace(inputs, topk_ids=change(inputs.topk_ids, *sizes))


def repeats_masked(topk_ids: Tensor, rank: int, experts: int, ranks: int) -> Tensor:
    same = topk_ids[:, :, None] == topk_ids[:, None]
    return torch.where(same.tril(-1).any(2), -1, topk_ids)


# --- stages ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class At:
    """A stage of one rank of a layer as it is made. before: the tensors of the rank's earlier stages."""

    layer: Layer
    stage: str
    rank: int
    before: Mapping[str, Rows]
    now: Rows

    @property
    def scheme(self) -> Scheme:
        return self.layer.scheme

    @property
    def inputs(self) -> MoEInputs:
        return self.layer.inputs[self.rank]


#: The tensors of the stage that are wrong.
Hook = Callable[[At], Rows]

#: E4M3 with its upper half binade left out: what a quantizer made for AMD's older FP8 puts in.
E4M3_240 = replace(E4M3, max_code=0x77)


def unquantized(at: At) -> tuple[Tensor, ActivationQuant, float]:
    """What the quantizing stage `at` is given, its rule and its static scale."""
    if at.stage == "stage":
        values, rule, static = at.inputs.hidden_states, at.scheme.stage, at.scheme.fc1_activation_dequant_scale
    else:
        values, rule, static = (
            at.before["activation"]["values"],
            at.scheme.requantize,
            at.scheme.fc2_activation_dequant_scale,
        )
    assert rule is not None
    return values.float(), rule, static


def before_rounding(values: Tensor, scales: Tensor, rule: ActivationQuant) -> Tensor:
    """float32: each value as it is when it is rounded to a code; the tiny path left aside."""
    scale = scales.repeat_interleave(values.shape[1] // scales.shape[1], 1)
    return values.float() / scale if rule.apply is Apply.DIVIDE else values.float() * (1 / scale)


def tied(values: Tensor, element: Format) -> Tensor:
    """Where a value is exactly halfway between two neighbouring codes."""
    finite = element.values[: element.max_code + 1]
    middle = (finite[1:] + finite[:-1]) / 2  # exact
    place = torch.searchsorted(middle, values.abs().contiguous()).clamp(max=len(middle) - 1)
    return middle[place] == values.abs()


def _rows(element: Format, quantized: Quantized) -> Rows:
    assert element.dtype is not None
    return {"values": quantized.codes.view(element.dtype), "scales": quantized.scales}


def quantized(**changes: Any) -> Hook:
    """By the stage's rule with fields of it changed."""

    def hook(at: At) -> Rows:
        values, rule, static = unquantized(at)
        return _rows(rule.element, quantize_activation(values, replace(rule, **changes), static))

    return hook


def rounded(change: Callable[[Tensor, Format], Tensor]) -> Hook:
    """Values changed just before they are rounded."""

    def hook(at: At) -> Rows:
        values, rule, _ = unquantized(at)
        changed = change(before_rounding(values, at.now["scales"], rule), rule.element)
        codes = encode(changed, rule.element, rule.overflow)
        return _rows(rule.element, Quantized(codes, at.now["scales"]))

    return hook


def up_from_ties(values: Tensor, element: Format) -> Tensor:
    return torch.where(tied(values, element), values.nextafter(values.sign() * torch.inf), values)


def through_bf16(values: Tensor, element: Format) -> Tensor:
    return values.bfloat16().float()


def only(name: str, change: Callable[[Tensor], Tensor]) -> Hook:
    """One tensor of the stage changed."""
    return lambda at: {name: change(at.now[name])}


def exponent_only(scales: Tensor) -> Tensor:
    return power_of_two(floor_log2(scales)).float()


def zero_over_zero(at: At) -> Rows:
    values = at.now["values"].float()
    empty = (values == 0).all(1, keepdim=True)
    wrong = torch.where(empty, torch.nan, values).to(at.now["values"].dtype)
    return {"values": wrong, "scales": torch.where(empty, 0.0, at.now["scales"])}


def nan_from_below(at: At) -> Rows:
    """A row's scale is the amax over itself and the row below it, which may be padding."""
    below = at.now["scales"].isnan().any(1).roll(-1, 0)
    below[-1:] = False
    values = torch.where(below[:, None], torch.nan, at.now["values"].float())
    return {
        "values": values.to(at.now["values"].dtype),
        "scales": at.now["scales"].masked_fill(below[:, None], torch.nan),
    }


def of_next_row(at: At) -> Rows:
    """Quantized rows of the route behind, among those that a rank received."""
    return {name: at.now[name].roll(-1, 0) for name in ("values", "scales")}


def weight_at_token_index(at: At) -> Rows:
    """Entry `token` of the flattened weights, where token * top_k + slot is meant."""
    flat = [inputs.topk_weights.flatten() for inputs in at.layer.inputs]
    places = zip(at.now["source_rank"].tolist(), at.now["token"].tolist(), strict=True)
    return {"topk_weights": torch.tensor([float(flat[rank][token]) for rank, token in places])}


def up_by_gate_scale(at: At) -> Rows:
    """As if up's own global scale were 9/8, 10/8, ... of gate's, by expert."""
    own = (9 + at.before["dispatch"]["expert"]) / 8
    return {"up": at.now["up"] / own[:, None]}


def activated(change: Callable[[Tensor, Tensor, float | None, Tensor], Tensor]) -> Hook:
    """change: (gate, up, clamp, routing weight) -> values, in place of `swiglu`."""

    def hook(at: At) -> Rows:
        fc1, weight = at.before["fc1"], at.before["dispatch"]["topk_weights"]
        return {"values": change(fc1["gate"], fc1["up"], at.scheme.gate_up_clamp, weight)}

    return hook


def clamp_after_silu(gate: Tensor, up: Tensor, limit: float | None, weight: Tensor) -> Tensor:
    silu = swiglu(gate, torch.ones_like(up), None, torch.ones_like(weight)).clamp(max=limit)
    return silu * up.clamp(-limit, limit) * weight[:, None] if limit else silu * up * weight[:, None]


def gpt_oss(gate: Tensor, up: Tensor, limit: float | None, weight: Tensor) -> Tensor:
    """(up + 1) * gate * sigmoid(1.702 gate)."""
    return (up + 1) * gate * _sigmoid(1.702 * gate) * weight[:, None]


def library_exp(gate: Tensor, up: Tensor, limit: float | None, weight: Tensor) -> Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return up * gate * _sigmoid(gate) * weight[:, None]


def _sigmoid(values: Tensor) -> Tensor:
    """Rounded from float64, so that it is the same on every CPU."""
    return torch.sigmoid(values.double()).float()


def clamp_before_scales(at: At) -> Rows:
    """The limit meets gate and up before the expert's scale has been multiplied in."""
    expert, fc1, limit = at.before["dispatch"]["expert"], at.before["fc1"], at.scheme.gate_up_clamp
    values = at.now["values"].clone()
    for e in expert.unique().tolist():
        mine = expert == e
        scale = load_operand(at.scheme, at.layer.weights, "w13", e).scale[0, 0]
        rows = (fc1["gate"][mine], fc1["up"][mine])
        values[mine] = swiglu(*rows, limit and limit * float(scale), at.before["dispatch"]["topk_weights"][mine])
    return {"values": values}


# --- combine -----------------------------------------------------------------------------------------------------


def summed(
    layer: Layer,
    terms: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    rule: Combine,
    counts: Mapping[int, int] | None = None,
) -> Tensor:
    """`combine` with slots taken several times or not at all. counts: how often, by slot (negative: from the end)."""
    times = {slot % terms.shape[1]: count for slot, count in (counts or {}).items()}
    slots = [slot for slot in range(terms.shape[1]) for _ in range(times.get(slot, 1))]
    if not slots:
        return torch.zeros_like(terms[:, 0])
    local = layer.weights.num_experts // layer.ep_size
    return combine(terms[:, slots], topk_ids[:, slots], rule, local, layer.scheme.wire, topk_weights[:, slots])


def sums(rule: Combine | None = None, counts: Mapping[int, int] | None = None) -> Hook:
    """The output by another rule (None: the scheme's), or with slots counted otherwise."""

    def hook(at: At) -> Rows:
        ids, weights = at.inputs.topk_ids, at.inputs.topk_weights
        return {"values": summed(at.layer, at.now["terms"], ids, weights, rule or at.scheme.combine, counts)}

    return hook


def terms_changed(change: Callable[[Tensor, Tensor], Tensor]) -> Hook:
    """change: (terms, topk_ids) -> terms; every slot of them is summed."""

    def hook(at: At) -> Rows:
        terms = change(at.now["terms"].clone(), at.inputs.topk_ids)
        return {"terms": terms, "values": combine(terms, at.inputs.topk_ids, Combine.ALL_SLOTS)}

    return hook


def stale(terms: Tensor, topk_ids: Tensor) -> Tensor:
    """Masked slots hold what the token before has in its first."""
    return torch.where((topk_ids < 0)[..., None], terms.roll(1, 0)[:, :1], terms)


def unwritten(terms: Tensor, topk_ids: Tensor) -> Tensor:
    return terms.masked_fill((topk_ids < 0)[..., None], torch.nan)


def one_row_scrambled(terms: Tensor, topk_ids: Tensor) -> Tensor:
    """The row of the middle token's first slot begins 8 channels late."""
    row = slice(len(terms) // 2, len(terms) // 2 + 1)
    terms[row, :1] = terms[row, :1].roll(8, 2)
    return terms


# --- layers ------------------------------------------------------------------------------------------------------


def ties_after_swiglu(layer: Layer) -> Layer:
    """FP8 with one scale per expert: every SwiGLU output is a midpoint of codes, times the static scale.

    Tokens are (1, 1/16, 0, ...). Gate rows give 32, whose sigmoid is 1; an up row gives a code and the half step above
    it, in exact binary fractions; the routing weight is scale / 32.
    """
    weights, inputs = layer.weights, layer.inputs[0]
    experts, rows, _ = weights.w13.shape
    middle = tie_aligned(1, (experts, rows // 2), E4M3, rows // 2).abs().clamp(min=2.0**-5, max=400.0)
    step = power_of_two(floor_log2(middle)).float()
    w13 = torch.zeros_like(weights.w13)
    w13[:, : rows // 2, 0] = 32
    w13[:, rows // 2 :, 0] = (middle - step / 16).bfloat16()
    w13[:, rows // 2 :, 1] = step.bfloat16()
    w13[:, 0, 2] = 448  # times 0: it makes the expert's scale 1
    x = torch.zeros_like(inputs.hidden_states)
    x[:, 0], x[:, 1] = 1, 1 / 16
    share = torch.full_like(inputs.topk_weights, layer.scheme.fc2_activation_dequant_scale / 32)
    return replace(
        layer, weights=replace(weights, w13=w13), inputs=(replace(inputs, hidden_states=x, topk_weights=share),)
    )
