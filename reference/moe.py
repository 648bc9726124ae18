"""The whole layer, for any number of EP ranks: from staging to combine.

`moe_forward` runs every rank in this process. `moe_forward_ranks` runs some of them, with the exchange of rows between
ranks left to its caller.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from .activation import fast_swiglu, swiglu
from .exchange import Exchange, Rows, by_expert, combine, exchange_in_process, route_rows, route_terms
from .formats import E2M1, decode
from .fp32 import canonical_nan
from .gemm import expert_gemm
from .quantize import Quantized, quantize_activation
from .scheme import ActivationQuant, Apply, ScaleSource, Scheme, Swiglu
from .types import Exactness, MoEInputs, MoEWeights, Stage, Trace
from .validate import check_arguments
from .weights import expert_value, load_operand

#: Called after every expert GEMM with (rows done, rows in all), for a progress bar.
Progress = Callable[[int, int], None]
#: Called with every stage as it is made; the layer goes on with the stage it returns.
Intervention = Callable[[Stage], Stage]


def moe_forward(
    scheme: Scheme,
    weights: MoEWeights,
    inputs: MoEInputs | Sequence[MoEInputs],
    *,
    max_tokens_per_rank: int | None = None,
    workspace: Sequence[torch.Tensor] | None = None,
    progress: Progress | None = None,
    intervene: Intervention | None = None,
) -> tuple[torch.Tensor | list[torch.Tensor], Trace]:
    """Run one MoE layer as the scheme's kernel does.

    inputs: one rank's tokens, or a sequence with one entry per EP rank. Returns the output, `[T, H]` bf16 (a list of
    them for a sequence), and the trace of every stage. max_tokens_per_rank: the kernel's capacity, to be checked.
    workspace: per rank, the `[T, top_k, H]` bf16 route terms that an earlier launch left in the kernel's buffer (None:
    zeros, a fresh one); only Combine.ALL_SLOTS reads it. intervene: sees, and may replace, every stage: to plant a
    fault, or to go on from what a kernel computed. Experts run one at a time and GEMMs in bounded tiles, so the memory
    is the weights, one expert's operands in float32, and the trace.

    Raises InputError (a ValueError) before any work when an argument does not fit the scheme.
    """
    ranks = [inputs] if isinstance(inputs, MoEInputs) else list(inputs)
    check_arguments(scheme, weights, ranks, max_tokens_per_rank, workspace)
    trace = moe_forward_ranks(
        scheme,
        weights,
        ranks,
        ranks=range(len(ranks)),
        ep_size=len(ranks),
        exchange=exchange_in_process,
        workspace=workspace,
        progress=progress,
        intervene=intervene,
    )
    outputs = [trace["combine", rank].tensors["values"] for rank in range(len(ranks))]
    return outputs[0] if isinstance(inputs, MoEInputs) else outputs, trace


def moe_forward_ranks(
    scheme: Scheme,
    weights: MoEWeights,
    inputs: Sequence[MoEInputs],
    *,
    ranks: Sequence[int],
    ep_size: int,
    exchange: Exchange,
    workspace: Sequence[torch.Tensor] | None = None,
    progress: Progress | None = None,
    intervene: Intervention | None = None,
) -> Trace:
    """The stages of the EP ranks `ranks` out of ep_size, rows moving by `exchange`. Arguments are not checked.

    weights: of these ranks' experts, in order; inputs and workspace: one entry for each of these ranks.
    """
    local_experts = weights.num_experts // len(ranks)
    stages: list[Stage] = []

    def keep(name: str, tensors: Sequence[Rows]) -> list[Rows]:
        made = [Stage(name, rank, exactness(scheme, name), t) for rank, t in zip(ranks, tensors, strict=True)]
        made = [intervene(stage) for stage in made] if intervene else made
        stages.extend(made)
        return [stage.tensors for stage in made]

    staged = keep("stage", [_stage(scheme, x) for x in inputs])
    sent = [route_rows(rank, x.topk_ids, x.topk_weights, s) for rank, x, s in zip(ranks, inputs, staged, strict=True)]
    arrived = exchange(sent, [rows["expert"] // local_experts for rows in sent])
    received = keep("dispatch", [by_expert(rows) for rows in arrived])

    advance = _counter(2 * sum(len(rows["expert"]) for rows in received), progress)
    experts = partial(_experts, scheme, weights, ranks[0] * local_experts, advance)
    fc1 = keep("fc1", [_gate_and_up(scheme, experts("w13", rows, rows["expert"])) for rows in received])
    activation = keep("activation", [_activation(scheme, *pair) for pair in zip(fc1, received, strict=True)])
    expert = [rows["expert"] for rows in received]
    norms = [expert_value(weights.fc1_norm_const, e - ranks[0] * local_experts) for e in expert]
    activated = zip(activation, norms, strict=True)
    requantize = keep("requantize", [_requantize(scheme, rows["values"], norm) for rows, norm in activated])
    fc2 = keep("fc2", [{"values": experts("w2", *pair).bfloat16()} for pair in zip(requantize, expert, strict=True)])

    routes = [{**rows, **{n: table[n] for n in ("token", "slot")}} for rows, table in zip(fc2, received, strict=True)]
    returned = exchange(routes, [table["source_rank"] for table in received])
    if workspace is None:
        workspace = [torch.zeros(*x.topk_ids.shape, x.hidden_states.shape[1]).bfloat16() for x in inputs]
    terms = [route_terms(rows, before) for rows, before in zip(returned, workspace, strict=True)]
    summed = partial(combine, rule=scheme.combine, local_experts=local_experts, wire=scheme.wire)
    keep(
        "combine",
        [
            {"terms": t, "values": summed(t, x.topk_ids, topk_weights=x.topk_weights, wire_rule=scheme.wire_rule)}
            for t, x in zip(terms, inputs, strict=True)
        ],
    )
    return Trace(tuple(stages))


def _counter(total: int, progress: Progress | None) -> Callable[[int], None]:
    done = 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        if progress:
            progress(done, total)

    return advance


def _payload(quantized: Quantized, rule: ActivationQuant) -> Rows:
    """In the dtypes of `Stage`."""
    if rule.element is E2M1:
        values = decode(quantized.codes, E2M1).to(torch.float8_e4m3fn)
        return {"values": values, "scales": quantized.scales.view(torch.float8_e4m3fn)}
    assert rule.element.dtype is not None
    return {"values": quantized.codes.view(rule.element.dtype), "scales": quantized.scales}


def _stage(scheme: Scheme, inputs: MoEInputs) -> Rows:
    """Activation quantization on the sending rank."""
    x, scales = inputs.hidden_states, inputs.scales
    if scheme.stage is None:
        return {"values": x, "scales": torch.ones(len(x), 1)}
    static = scheme.fc1_activation_dequant_scale
    if x.dtype is torch.bfloat16:
        return _payload(quantize_activation(x, scheme.stage, static, scheme.input_norm_const), scheme.stage)
    if scales is None or scheme.stage.source is ScaleSource.STATIC:
        scales = torch.full((len(x), 1), static)
    return {"values": x, "scales": scales}


def _experts(
    scheme: Scheme, weights: MoEWeights, first: int, advance: Callable[[int], None], leg: str, rows: Rows, expert
) -> torch.Tensor:
    """One GEMM of every expert of one rank. rows: values and scales; expert: `[routes]`. Returns `[routes, N]`."""
    rule = scheme.fc1 if leg == "w13" else scheme.fc2
    parts = []
    for e in expert.unique().tolist() or [first]:  # without routes: empty rows of the right shape
        mine = expert == e
        operand = load_operand(scheme, weights, leg, e - first)
        parts.append(expert_gemm(rule, rows["values"][mine].float(), rows["scales"][mine].float(), operand))
        advance(int(mine.sum()))
    return torch.cat(parts)


def _gate_and_up(scheme: Scheme, fc1: torch.Tensor) -> Rows:
    if scheme.swiglu is Swiglu.FAST_BF16:
        fc1 = canonical_nan(fc1.bfloat16()).float()
    gate, up = fc1.chunk(2, dim=1)
    return {"gate": gate, "up": up}


def _activation(scheme: Scheme, fc1: Rows, received: Rows) -> Rows:
    if scheme.swiglu is Swiglu.FAST_BF16:
        return {"values": fast_swiglu(fc1["gate"], fc1["up"])}
    weight = None if scheme.combine.weighted else received["topk_weights"]
    return {"values": swiglu(fc1["gate"], fc1["up"], scheme.gate_up_clamp, weight, scheme.nan_clamps)}


def _requantize(scheme: Scheme, activated: torch.Tensor, norm: torch.Tensor) -> Rows:
    """norm: scalar, or one for each route."""
    if scheme.requantize is None:
        return {"values": activated.bfloat16(), "scales": torch.ones(len(activated), 1)}
    static = scheme.fc2_activation_dequant_scale
    quantized = quantize_activation(activated, scheme.requantize, static, norm.reshape(-1, 1))
    return _payload(quantized, scheme.requantize)


def exactness(scheme: Scheme, stage: str) -> Exactness:
    """How the numbers of a stage of the reference come about."""
    rule = {"stage": scheme.stage, "requantize": scheme.requantize, "combine": scheme.wire_rule}.get(stage)
    if stage == "activation" or (rule is not None and rule.apply is Apply.DIVIDE_APPROX):
        return Exactness.TABLED
    if stage not in ("fc1", "fc2"):
        return Exactness.EXACT
    core = (scheme.fc1 if stage == "fc1" else scheme.fc2).core
    return Exactness.MODELLED_VERIFIED if core.verified else Exactness.MODELLED_UNVERIFIED
