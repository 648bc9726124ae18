"""The whole layer, for any number of EP ranks in one process: from staging to combine."""

from collections.abc import Callable, Sequence

import torch

from .activation import swiglu
from .exchange import Routes, combine, dispatch, route_terms
from .formats import decode
from .gemm import expert_gemm
from .quantize import quantize_activation
from .scheme import ScaleSource, Scheme
from .types import Exactness, MoEInputs, MoEWeights, Stage, Trace
from .validate import check_arguments
from .weights import load_operand

#: Called after every expert with (routes done, routes in all), for a progress bar.
Progress = Callable[[int, int], None]


def moe_forward(
    scheme: Scheme,
    weights: MoEWeights,
    inputs: MoEInputs | Sequence[MoEInputs],
    *,
    max_tokens_per_rank: int | None = None,
    workspace: Sequence[torch.Tensor] | None = None,
    progress: Progress | None = None,
) -> tuple[torch.Tensor | list[torch.Tensor], Trace]:
    """Run one MoE layer as the scheme's kernel does.

    inputs: one rank's tokens, or a sequence with one entry per EP rank. Returns the output, `[T, H]` bf16 (a list of
    them for a sequence), and the trace of every stage. max_tokens_per_rank: the kernel's capacity, to be checked.
    workspace: per rank, the `[T, top_k, H]` bf16 route terms that an earlier launch left in the kernel's buffer (None:
    zeros, a fresh one); only Combine.ALL_SLOTS reads it. Experts run one at a time and GEMMs in bounded tiles, so the
    memory is the weights, one expert's operands in float32, and the trace.

    Raises InputError (a ValueError) before any work when an argument does not fit the scheme.
    """
    ranks = [inputs] if isinstance(inputs, MoEInputs) else list(inputs)
    check_arguments(scheme, weights, ranks, max_tokens_per_rank, workspace)
    stages: list[Stage] = []
    hidden = ranks[0].hidden_states.shape[1]

    staged = [_stage(scheme, rank_inputs) for rank_inputs in ranks]
    for rank, (values, scales) in enumerate(staged):
        stages.append(Stage("stage", rank, Exactness.EXACT, {"values": values, "scales": scales}))

    routes = dispatch([rank_inputs.topk_ids for rank_inputs in ranks], weights.num_experts)
    total, done = sum(map(len, routes)), 0
    outputs = []
    for rank, table in enumerate(routes):
        received = _received(table, staged, ranks)
        stages.append(Stage("dispatch", rank, Exactness.EXACT, received))
        collected: dict[str, list[dict[str, torch.Tensor]]] = {name: [] for name in _EXPERT_STAGES}
        first = rank * (weights.num_experts // len(ranks))
        for expert in table.expert.unique().tolist() or [first]:  # without routes: empty rows of the right shape
            mine = table.expert == expert
            for name, tensors in _expert(scheme, weights, expert, {k: v[mine] for k, v in received.items()}).items():
                collected[name].append(tensors)
            done += int(mine.sum())
            if progress:
                progress(done, total)
        merged = {name: _concatenate(parts) for name, parts in collected.items()}
        stages += [Stage(name, rank, _exactness(scheme, name), tensors) for name, tensors in merged.items()]
        outputs.append(merged["fc2"]["values"])

    combined = []
    for rank, rank_inputs in enumerate(ranks):
        ids = rank_inputs.topk_ids
        before = workspace[rank] if workspace is not None else torch.zeros(*ids.shape, hidden, dtype=torch.bfloat16)
        terms = route_terms(rank, routes, outputs, before)
        combined.append(combine(terms, ids, scheme.combine))
        stages.append(Stage("combine", rank, Exactness.EXACT, {"terms": terms, "values": combined[-1]}))
    return combined[0] if isinstance(inputs, MoEInputs) else combined, Trace(tuple(stages))


_EXPERT_STAGES = ("fc1", "activation", "requantize", "fc2")


def _stage(scheme: Scheme, inputs: MoEInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Activation quantization on the sending rank: operand values `[T, H]` float32 and scales `[T, blocks]`."""
    tokens = inputs.hidden_states.shape[0]
    if scheme.stage is None:
        return inputs.hidden_states.float(), torch.ones(tokens, 1)
    static = scheme.fc1_activation_dequant_scale
    if inputs.hidden_states.dtype is torch.bfloat16:
        quantized = quantize_activation(inputs.hidden_states, scheme.stage, static)
        return decode(quantized.codes, scheme.stage.element), quantized.scales
    scales = inputs.scales
    if scales is None or scheme.stage.source is ScaleSource.STATIC:
        scales = torch.full((tokens, 1), static)
    return decode(inputs.hidden_states, scheme.stage.element), scales


def _received(table: Routes, staged, ranks: list[MoEInputs]) -> dict[str, torch.Tensor]:
    """The rows that one rank holds after dispatch: payload, scales and routing, one row per route."""
    lengths = [len(r.hidden_states) for r in ranks]
    first = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    row = first[table.source_rank] + table.token
    return {
        "values": torch.cat([values for values, _ in staged])[row],
        "scales": torch.cat([scales for _, scales in staged])[row],
        "topk_weights": torch.cat([r.topk_weights for r in ranks])[row, table.slot],
        "source_rank": table.source_rank,
        "token": table.token,
        "slot": table.slot,
        "expert": table.expert,
    }


def _expert(
    scheme: Scheme, weights: MoEWeights, expert: int, rows: dict[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """One expert on its rows: fc1, SwiGLU, requantization, fc2."""
    fc1 = expert_gemm(scheme.fc1, rows["values"], rows["scales"], load_operand(scheme, weights, "w13", expert))
    gate, up = fc1.chunk(2, dim=1)
    activated = swiglu(gate, up, scheme.gate_up_clamp, rows["topk_weights"])
    if scheme.requantize is None:
        values, scales = activated.bfloat16().float(), torch.ones(len(activated), 1)
    else:
        quantized = quantize_activation(activated, scheme.requantize, scheme.fc2_activation_dequant_scale)
        values, scales = decode(quantized.codes, scheme.requantize.element), quantized.scales
    fc2 = expert_gemm(scheme.fc2, values, scales, load_operand(scheme, weights, "w2", expert))
    return {
        "fc1": {"gate": gate, "up": up},
        "activation": {"values": activated},
        "requantize": {"values": values, "scales": scales},
        "fc2": {"values": fc2.bfloat16()},
    }


def _concatenate(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _exactness(scheme: Scheme, stage: str) -> Exactness:
    if stage == "activation":
        return Exactness.TABLED
    if stage == "requantize":
        return Exactness.EXACT
    core = (scheme.fc1 if stage == "fc1" else scheme.fc2).core
    return Exactness.MODELLED_VERIFIED if core.verified else Exactness.MODELLED_UNVERIFIED
