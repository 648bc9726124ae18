"""The layer as an emulation backend runs it: quantizers, formats, weights and combine of a scheme around given GEMMs.

Each step rounds where the kernel has it, so every step is the kernel's bits on equal input but for what the caller
brings: the GEMM of one expert, and the sigmoid. `fake_quant` brings torch's float32, `engine_cpu` the tensor core.
Nothing here comes from the reference's arithmetic: casts are torch's, constants are written again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from fp4ep.reference.formats import Overflow
from fp4ep.reference.scheme import ActivationQuant, Apply, Combine, Place, ScaleSource, Scheme, TensorCore, Weights
from fp4ep.reference.types import Exactness, MoEInputs, MoEWeights, Stage, Trace

#: Columns of equal length, one row per token or route.
Rows = dict[str, torch.Tensor]
#: The rows of each rank here and, per row, the rank it goes to -> what each receives, by sender ascending, order kept.
Exchange = Callable[[Sequence[Rows], Sequence[torch.Tensor]], list[Rows]]

#: Weights of the schemes that are not emulated -> what the emulation lacks.
NOT_EMULATED = {
    Weights.NVFP4_BLOCK_SCALED: "FP4 activations",
    Weights.FP8_BLOCK_128_APART: "approximate division",
}

_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_CODES = torch.cat((_MAGNITUDES, -_MAGNITUDES))
#: `[256, 2]`: the two E2M1 values of a byte, low nibble first.
_PAIRS = torch.cartesian_prod(_CODES, _CODES).flip(1)
#: Half way from E4M3's largest value, 448, to the 480 that it lacks.
_E4M3_LIMIT = 464.0


@dataclass(frozen=True)
class Operand:
    """One expert's leg as the tensor core reads it. values: `[N, K]` float32; scale: `[1 or N, blocks]` float32."""

    values: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Arithmetic:
    """What an emulation brings.

    name: of the emulation, for messages. linear: (scheme, leg, x `[rows, K]` float32, x_scale `[rows, blocks]`,
    operand) -> `[rows, N]` float32, descaled. sigmoid: float32 -> float32. exactness: of fc1, fc2 and activation.
    experts: in place of `linear`, all rows of a rank at once: (scheme, weights, leg, x `[rows, K]` as it travels,
    x_scale, each row's expert by its place in weights, ascending).
    """

    name: str
    linear: Callable[[Scheme, str, torch.Tensor, torch.Tensor, Operand], torch.Tensor]
    sigmoid: Callable[[torch.Tensor], torch.Tensor]
    exactness: Callable[[Scheme, str], Exactness]
    experts: Callable[[Scheme, MoEWeights, str, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None


def emulate(
    arithmetic: Arithmetic,
    scheme: Scheme,
    weights: MoEWeights,
    inputs: Sequence[MoEInputs],
    *,
    ranks: Sequence[int],
    ep_size: int,
    exchange: Exchange,
    workspace: Sequence[torch.Tensor] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """The stages of the EP ranks `ranks` out of ep_size: tensors, dtypes and row order of `Stage`, on the CPU.

    weights: of these ranks' experts, in order; inputs: one entry for each of these ranks; workspace: for each of them
    the `[T, top_k, H]` bf16 terms that an earlier launch left behind, None: zeros (Combine.ALL_SLOTS alone reads it);
    progress: called after every expert GEMM with (rows done, rows in all). Arguments are not checked. NaN and infinity
    follow IEEE; the output's NaN is 0x7FFF. Raises ValueError for schemes with FP4 activations (SM100) and for the push
    kernel's.
    """
    if scheme.weights in NOT_EMULATED:
        raise ValueError(f"scheme: {arithmetic.name} has no {NOT_EMULATED[scheme.weights]} and cannot run {scheme}")
    per_rank = weights.num_experts // len(ranks)
    stages: list[Stage] = []
    done = 0

    def keep(name: str, tables: list[Rows]) -> list[Rows]:
        brought = name in ("fc1", "activation", "fc2")
        exactness = arithmetic.exactness(scheme, name) if brought else Exactness.EXACT
        stages.extend(Stage(name, rank, exactness, rows) for rank, rows in zip(ranks, tables, strict=True))
        return tables

    def linear(leg: str, rows: Rows, expert: torch.Tensor) -> torch.Tensor:
        nonlocal done
        if arithmetic.experts:
            place = expert - ranks[0] * per_rank
            out = arithmetic.experts(scheme, weights, leg, rows["values"], rows["scales"], place)
            done += len(out)
            if progress:
                progress(done, total)
            return out
        out = torch.empty(len(expert), getattr(weights, leg).shape[1])
        for e in expert.unique().tolist():
            mine = expert == e
            operand = load_operand(scheme, weights, leg, e - ranks[0] * per_rank)
            x = rows["values"][mine].float()
            out[mine] = arithmetic.linear(scheme, leg, x, rows["scales"][mine], operand)
            done += len(x)
            if progress:
                progress(done, total)
        return out

    if workspace is None:
        workspace = [torch.zeros(*x.topk_ids.shape, x.hidden_states.shape[1]).bfloat16() for x in inputs]

    staged = keep("stage", [_stage(scheme, x) for x in inputs])
    sent = [_routes(*each) for each in zip(ranks, inputs, staged, strict=True)]
    arrived = exchange(sent, [rows["expert"] // per_rank for rows in sent])
    received = keep("dispatch", [_pick(rows, rows["expert"].argsort(stable=True)) for rows in arrived])
    total = 2 * sum(len(rows["expert"]) for rows in received)
    pairs = [linear("w13", rows, rows["expert"]).chunk(2, dim=1) for rows in received]
    fc1 = keep("fc1", [{"gate": gate, "up": up} for gate, up in pairs])
    activated = keep("activation", [_activation(arithmetic, scheme, *each) for each in zip(fc1, received, strict=True)])
    static = scheme.fc2_activation_dequant_scale
    requantized = keep("requantize", [quantize(rows["values"], scheme.requantize, static) for rows in activated])
    returning = zip(requantized, received, strict=True)
    fc2 = keep("fc2", [{"values": linear("w2", rows, table["expert"]).bfloat16()} for rows, table in returning])
    routes = [rows | {n: table[n] for n in ("token", "slot")} for rows, table in zip(fc2, received, strict=True)]
    returned = exchange(routes, [table["source_rank"] for table in received])
    home = zip(returned, inputs, workspace, strict=True)
    keep("combine", [combine(scheme, per_rank, *each) for each in home])
    return Trace(tuple(stages))


def _pick(rows: Rows, index: torch.Tensor) -> Rows:
    return {name: column[index] for name, column in rows.items()}


def _routes(rank: int, inputs: MoEInputs, staged: Rows) -> Rows:
    """One row for each (token, slot) that names an expert."""
    token, slot = (inputs.topk_ids >= 0).nonzero().unbind(1)
    routing = {"topk_weights": inputs.topk_weights[token, slot], "expert": inputs.topk_ids[token, slot].long()}
    return _pick(staged, token) | routing | {"source_rank": torch.full_like(token, rank), "token": token, "slot": slot}


def _stage(scheme: Scheme, inputs: MoEInputs) -> Rows:
    x, rule, static = inputs.hidden_states, scheme.stage, scheme.fc1_activation_dequant_scale
    if rule is None or x.dtype is torch.bfloat16:
        return quantize(x, rule, static)
    given = inputs.scales if rule.source is ScaleSource.AMAX else None
    return {"values": x, "scales": torch.full((len(x), 1), static) if given is None else given}


def quantize(values: torch.Tensor, rule: ActivationQuant | None, static: float) -> Rows:
    """`[rows, K]` to operand values and scales `[rows, blocks]` by the scheme's rule; without one, to bf16."""
    if rule is None:
        return {"values": values.bfloat16(), "scales": torch.ones(len(values), 1)}
    dtype = _dtype(rule)
    largest = torch.finfo(dtype).max
    split = values.float().unflatten(1, (-1, rule.block or values.shape[1]))
    amax = split.abs().amax(2, keepdim=True)
    if rule.source is ScaleSource.STATIC:
        scale = torch.full_like(amax, static)
    else:
        scale = (amax * (1 / largest)).clamp(min=1e-30)  # times a float32 reciprocal, not divided
    if rule.apply is Apply.DIVIDE:
        applied = split / scale
    else:
        applied = split * (1 / scale if rule.apply is Apply.RECIPROCAL else 1 / static)
    if rule.tiny_path and rule.source is ScaleSource.AMAX:
        factor = torch.full_like(amax, largest) / amax.clamp(min=1.3165537626040637e-36)
        tiny = (amax > 0) & (amax < 4.48e-28)
        scale, applied = torch.where(tiny, 1 / factor, scale), torch.where(tiny, split * factor, applied)
    saturate = rule.overflow is Overflow.SATURATE
    return {"values": cast(applied.flatten(1), dtype, saturate), "scales": scale[..., 0]}


def _dtype(rule: ActivationQuant | None) -> torch.dtype:
    assert rule is not None
    assert rule.element.dtype is not None
    return rule.element.dtype


def cast(values: torch.Tensor, dtype: torch.dtype, saturate: bool) -> torch.Tensor:
    """float32 to FP8, to nearest even. NaN and beyond the largest value: positive NaN and the largest value (saturate),
    or as CUDA's cast has it: NaN, and NaN in E4M3 or infinity in E5M2, signs kept.
    """
    if saturate:
        largest = torch.finfo(dtype).max
        return values.clamp(-largest, largest).where(~values.isnan(), torch.nan).to(dtype)
    if dtype is torch.float8_e4m3fn:  # torch's cast on the CPU may saturate
        values = values.where(values.abs() <= _E4M3_LIMIT, torch.full_like(values, torch.nan).copysign(values))
    return values.to(dtype)


def _activation(arithmetic: Arithmetic, scheme: Scheme, fc1: Rows, received: Rows) -> Rows:
    gate, up, limit = fc1["gate"], fc1["up"], scheme.gate_up_clamp
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return {"values": up * gate * arithmetic.sigmoid(gate) * received["topk_weights"][:, None]}


def combine(
    scheme: Scheme, local_experts: int, returned: Rows, inputs: MoEInputs, workspace: torch.Tensor | None = None
) -> Rows:
    """Slots ascending, in float32 and rounded once, or in bf16. A masked slot is +0, no change to a sum from +0, or
    under Combine.ALL_SLOTS what the workspace holds.
    """
    ids, rule = inputs.topk_ids, scheme.combine
    shape = (*ids.shape, inputs.hidden_states.shape[1])
    terms = torch.zeros(shape, dtype=torch.bfloat16) if workspace is None else workspace.clone()
    terms[returned["token"], returned["slot"]] = returned["values"]
    summed = terms if rule is Combine.ALL_SLOTS else terms.where((ids >= 0)[..., None], 0.0)
    slots = list((summed if rule is Combine.ON_ARRIVAL else summed.float()).unbind(1))
    start = [] if rule is Combine.ALL_SLOTS else [torch.zeros_like(slots[0])]
    if rule is Combine.GROUPED:
        owners = ids.div(local_experts, rounding_mode="floor")
        parts = [terms.float().where((owners == r)[..., None], 0.0).unbind(1) for r in owners.unique() if r >= 0]
        slots = [_sent(reduce(torch.add, [*start, *part]), scheme) for part in parts]
    values = reduce(torch.add, start + slots).bfloat16()
    nan = torch.tensor(0x7FFF, dtype=torch.int16).view(torch.bfloat16)
    return {"terms": terms, "values": values.where(~values.isnan(), nan)}


def _sent(part: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """One rank's sums as they arrive: bf16, or FP8 with a power of two for each 32, the smallest that covers amax."""
    if scheme.wire is None or scheme.wire.dtype is None:
        return part.bfloat16().float()
    split = part.unflatten(1, (-1, 32))
    scale = split.abs().amax(-1, keepdim=True) * (1 / torch.tensor(torch.finfo(scheme.wire.dtype).max))
    mantissa, exponent = torch.frexp(scale)
    power = _power_of_two(exponent - (mantissa == 0.5).int())
    return ((split / power).to(scheme.wire.dtype).float() * power).flatten(1)


# --- weights -----------------------------------------------------------------------------------------------------


def load_operand(scheme: Scheme, weights: MoEWeights, leg: str, expert: int) -> Operand:
    """One expert of `leg` ("w13" or "w2"), by its place in `weights`; dense weights quantized as the backend does."""
    w, scales = getattr(weights, leg)[expert], getattr(weights, leg + "_scale")
    scale = None if scales is None else scales[expert]
    if scheme.weights is Weights.BF16:
        return Operand(w.float(), torch.ones(1, 1))
    if scheme.weights is Weights.MXFP4:
        assert scale is not None
        return _mxfp4(w, scale)
    if scheme.weights is Weights.NVFP4:
        spread = getattr(weights, leg + "_global_scale")
        spread = torch.ones(1) if spread is None else spread.reshape(-1)
        return _nvfp4(w, scale, spread.expand(weights.num_experts)[expert])
    whole = scheme.weights is Weights.FP8_PER_EXPERT
    return _fp8(w, scale, _dtype(scheme.stage), parts=2 if leg == "w13" else 1, whole=whole)


def _nvfp4(w: torch.Tensor, scale: torch.Tensor | None, spread: torch.Tensor) -> Operand:
    """E4M3(code * scale / 8) and 8 * spread, the global scale; dense weights make their own."""
    if scale is None:
        split = w.float().unflatten(1, (-1, 16))
        amax = split.abs().amax(2, keepdim=True)
        spread = (amax.max() * (1 / 2688)).clamp(min=1e-30)
        decoded = (amax / (6 * spread)).to(torch.float8_e4m3fn).float()
        scaled = split / (decoded * spread).clamp(min=1e-30)
        step = _e2m1_step(scaled)
        values = ((scaled / step).round() * step).clamp(-6, 6)
    else:
        values = _PAIRS.to(w.device)[w.int()].flatten(1).unflatten(1, (-1, 16))
        decoded = scale.view(torch.float8_e4m3fn).float()[..., None]
    return Operand((values * decoded / 8).to(torch.float8_e4m3fn).float().flatten(1), (8 * spread).reshape(1, 1))


def _e2m1_step(values: torch.Tensor) -> torch.Tensor:
    """The distance of neighbours: 0.5, from 2 on 1, from 4 on 2."""
    return 0.5 * (1 + (values.abs() >= 2) + 2 * (values.abs() >= 4))


def _mxfp4(w: torch.Tensor, scale: torch.Tensor) -> Operand:
    """code * 2^(scale - lowest - 5) and 2^(lowest - 122), where lowest is the expert's smallest scale, once those more
    than 11 octaves below its largest are raised to that.

    Values of raised blocks are rounded to E2M1, ties away from zero. From 128 octaves on the preprocessing's 2^-octaves
    wraps (`_wrapped`).
    """
    values = _PAIRS.to(w.device)[w.int()].flatten(1).unflatten(1, (-1, 32))
    missing = (int(scale.max()) - 11 - scale.int()).clamp(min=0)[..., None]
    raised = scale.int()[..., None] + missing
    lowest = int(raised.min())
    rounded = values * _power_of_two(-missing)
    step = _e2m1_step(rounded)
    rounded = (rounded.abs() / step + 0.5).floor() * step * rounded.sign()
    if int(missing.max()) >= 128:
        rounded = torch.where(missing >= 128, _wrapped(values, missing), rounded)
    spread = torch.tensor([[2.0 ** (lowest - 122)]], dtype=torch.float64).float()
    return Operand((rounded * _power_of_two(raised - lowest - 5)).flatten(1), spread)


def _wrapped(values: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
    """E2M1 values that 128 or more octaves too many make of `values`, in floats whose sign and exponent wrap together.

    At 128 the factor is -inf: zeros become NaN, whose bits read as -6, other values infinity, read as 4. From 129 on
    the factor is -2^(256 - missing), and of the product's exponent the two lowest bits are read, of its fraction one.
    """
    fraction, exponent = torch.frexp(values.abs())  # [0.5, 1) * 2^exponent
    code = ((256 + exponent - missing) & 3) * 2 + (fraction == 0.75)
    code = torch.where(missing == 128, torch.where(values == 0, 7, 6), code.where(values != 0, 0))
    return _MAGNITUDES.to(code.device)[code] * torch.where(values < 0, 1.0, -1.0)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """float32, exact; exponents below -127 count as -127."""
    return (exponent.clamp(min=-127) + 127).to(torch.uint8).view(torch.float8_e8m0fnu).float()


def _fp8(w: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype, parts: int, whole: bool) -> Operand:
    """Codes as they are; one scale for the whole leg, or for each 128 rows and 128 K, repeated for each row.

    parts: 2 for w13, whose blocks hold 64 gate rows and the 64 up rows beside them; 1 for w2.
    """
    (rows, columns), floor = (w.shape, 1e-12) if whole else ((128, 128), 1e-30)
    order = torch.arange(len(w)).view(parts, -1, rows // parts).transpose(0, 1).flatten()
    split = (w.float() if scale is None else w.view(dtype).float())[order].unflatten(1, (-1, columns))
    split = split.unflatten(0, (-1, rows))  # [N / rows, rows, K / columns, columns]
    if scale is None:
        scale = (split.abs().amax((1, 3)) * (1 / torch.finfo(dtype).max)).clamp(min=floor)
        split = (split / scale[:, None, :, None]).to(dtype).float()
    back = order.argsort()
    scale = scale.reshape(len(split), -1)
    return Operand(split.view(w.shape)[back], scale if whole else scale.repeat_interleave(rows, 0)[back])


# --- what both engines need, beside their GEMMs ----------------------------------------------------------------------


def placed(scale: torch.Tensor, side: Place, place: Place) -> torch.Tensor:
    """The scale, or ones where it has no part: products with 1 are exact."""
    return scale if place in (side, Place.BOTH) else torch.ones_like(scale)


def check_shapes(core: TensorCore, x: torch.Tensor, w: torch.Tensor, c: torch.Tensor | None) -> None:
    """Raises ValueError unless a chain of the core's instructions can multiply x by w, starting from c."""
    if w.ndim != 2 or x.ndim != 2 or w.shape[1] != x.shape[1] or w.shape[1] % core.k:
        shapes = f"{tuple(x.shape)} and {tuple(w.shape)}"
        raise ValueError(f"x and w must be [M, K] and [N, K] with K a multiple of {core.k} ({core}), got {shapes}")
    if c is not None and c.shape != (len(x), len(w)):
        raise ValueError(f"c must be [M, N] = {(len(x), len(w))}, got {tuple(c.shape)}")


def engine_exactness(scheme: Scheme, stage: str) -> Exactness:
    if stage == "activation":
        return Exactness.TABLED
    core = (scheme.fc1 if stage == "fc1" else scheme.fc2).core
    return Exactness.MODELLED_VERIFIED if core.verified else Exactness.MODELLED_UNVERIFIED
