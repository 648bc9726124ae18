"""A layer whose right output is known in closed form and must be equal bit for bit, whatever the kernel.

Form (vLLM's test of its FlashInfer megakernel integration): a token holds a small number and, beside it, a sentinel
that pins the scale of its block; a few rows of w13, alike for all experts, pick the number; an expert writes one code
to one output channel; routing weights are powers of two. Everything else is zero. So

    out[t, channel(e)] += topk_weight * silu(gate) * up * code(e) * scale(channel(e)) * fc2_alpha(e)
    gate = gate value * gate code * fc1_alpha(e),  up = up value * up code(e) * fc1_alpha(e),  both after the clamp

Why nothing rounds, or always to the same value:

- Every sum inside a GEMM has one non-zero product, of at most 8 bits: no order, chunking or usual width of an
  accumulator shows in it.
- silu: gate is 10 or more (after the clamp too), so silu(gate) = gate * (1 - s) with 0 <= s < 5e-5, whatever table or
  library computes it. All later roundings are to 8 bits or fewer, and every exact value below fits them, so it is far
  from a tie (a relative 2^-9 at least) and the factor 1 - s is rounded away at the latest by the bf16 of a route.
- Tokens, SM90: amax is 7 * 2^j. float32(7 * float32(1/448)) is 2^-6, a power of two, so that every code is exact. The
  same for a static scale of 1, and for scales per 128. W4A4: the sentinel 6 gives a block the scale 1.
- SwiGLU outputs, SM90, amax scales: a block of 64 holds zeros and one value. Over the scale it is 448 (E5M2: 57344) to
  within 448 * 1e-6, hence that code, and code times scale is the value to within 2^-22. Static scale of 1: values are
  3 * 2^n (unclamped), E4M3 and E5M2 numbers below 448. W4A4: the value over 6 is an E4M3 number.
- Weights: scales of 1/2, 1 and 2 and alphas that are powers of two. With them a route has 7 significant bits, and the
  sum over slots has one term, or two in neighbouring slots that name one expert: 8 bits.

`build` checks all but the first for the numbers at hand and raises ValueError where one fails, as a clamp of 10 does
under W4A4: 10 * 10 is no multiple of 6.

What it sees: which token, slot, expert, rank, row, column and scale met which; gate and up exchanged; routing weights,
alphas, norms and clamps lost, applied twice, taken from a neighbour; a clamp before the alpha. What it cannot see: how
anything is rounded or summed (ties, chains, widths, saturation); an error of silu below 2^-9, or anywhere below 10;
whether routing weights come before or after fc2, since they are powers of two; the width of a requantization block,
which holds one value; a permutation of K or of the intermediate channels that is made on both operands; codes and
places that are zero here; magnitudes that are tiny, huge or NaN; w13 of one expert taken for another's, but for its
alpha. MXFP4 and bf16 have no alphas. With vLLM's own numbers (VLLM) gate and up are equal, so their exchange is
invisible too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from fp4ep.reference.formats import E2M1, E4M3, UE8M0, Format, encode, pack_e2m1, round_to
from fp4ep.reference.quantize import MX_BLOCK, NVFP4_BLOCK
from fp4ep.reference.scheme import ScaleSource, Scheme, Weights
from fp4ep.reference.types import MoEInputs, MoEWeights

from .grid_numbers import EXPERTS, FAMILIES, GEOMETRIES, SMALL, VLLM, Expert, Geometry, Numbers, family

__all__ = [
    "FAMILIES",
    "GEOMETRIES",
    "SMALL",
    "VLLM",
    "Geometry",
    "Grid",
    "Numbers",
    "build",
    "output_channel",
]


class Grid(NamedTuple):
    """A layer with its right outputs: `[T, H]` bf16, one for each rank, as inputs."""

    weights: MoEWeights
    inputs: list[MoEInputs]
    expected: list[torch.Tensor]


def build(
    geometry: Geometry,
    scheme: Scheme,
    ep_size: int = 1,
    tokens_per_rank: int | Sequence[int] = 4,
    *,
    numbers: Numbers | None = None,
    spread: int = 0,
    plain: bool = False,
    dense: bool = False,
    materialize: bool = False,
) -> Grid:
    """The layer for a scheme, its weights packed (bf16 for a bf16 scheme), and what must come out.

    tokens_per_rank: one number, or one for each rank (0 is fine). numbers: None takes those of the scheme's family.
    spread: by how many experts the ids of each token lie beyond those of the token before. 0: all tokens share top_k
    experts, num_experts / top_k apart, which keeps a CPU run short; slots rotate from token to token. Of every four
    tokens the second has a masked slot and the fourth names one expert in two neighbouring slots, unless `plain`.
    dense: bf16 weights for a backend that quantizes them; block scales are then its own, and alphas are left to schemes
    that take them beside such weights. materialize: w13 and scales are views of one expert's, repeated, and w2's zeros
    take no memory until they are written; True copies them into memory of their own, as a GPU or an in-place kernel
    needs (14 GB for the largest).

    Raises ValueError when the sizes are too small for the construction, when the scheme takes no dense weights, when it
    quantizes what travels back, or when a number is not exact under the scheme.
    """
    if scheme.wire_rule is not None:
        raise ValueError(f"scheme: {scheme} rounds what it sends back to {scheme.wire_rule.element} blocks")
    counts = [tokens_per_rank] * ep_size if isinstance(tokens_per_rank, int) else list(tokens_per_rank)
    _check_sizes(geometry, ep_size, counts)
    if dense and torch.bfloat16 not in scheme.dense_weights:
        raise ValueError(f"dense: {scheme} takes no bf16 weights")
    if dense and scheme.weights is Weights.NVFP4:
        raise ValueError(f"dense: under the block scale 448 of its quantizer {scheme} rounds 1.5 and 3")
    stored = Weights.BF16 if dense else scheme.weights
    numbers = numbers or FAMILIES[family(scheme)]
    maker = _Maker(geometry, scheme, numbers, stored, _columns(geometry, sum(counts)), _channels(geometry))
    weights = maker.weights()
    if materialize:
        given = {name: tensor for name, tensor in vars(weights).items() if tensor is not None}
        weights = MoEWeights(**{name: tensor.clone(memory_format=_PLAIN) for name, tensor in given.items()})
    inputs, expected, first = [], [], 0
    for count in counts:
        tokens = range(first, first + count)
        ids, shares = _routing(geometry, tokens, spread, plain)
        inputs.append(MoEInputs(maker.hidden_states(tokens), ids, shares))
        expected.append(maker.expected(tokens, ids, shares))
        first += count
    return Grid(weights, inputs, expected)


def output_channel(geometry: Geometry, expert: int) -> int:
    """Where in H the expert writes."""
    return expert * (geometry.hidden // geometry.num_experts)


_PLAIN = torch.contiguous_format
_TOKEN_WIDTH = 4  #: columns of a token: gate value, up value, sentinel, w13's sentinel
_CHANNEL_BLOCK = 64  #: intermediate channels that share a scale on SM90; an alignment of every scheme
_LEAST_GATE = 10  #: from here on silu(x) is x to within 5e-5


def _check_sizes(geometry: Geometry, ep_size: int, counts: list[int]) -> None:
    if len(counts) != ep_size or min(counts, default=-1) < 0 or geometry.num_experts % ep_size:
        raise ValueError(
            f"tokens_per_rank must be a number >= 0 for each of ep_size = {ep_size} ranks that divide the "
            f"{geometry.num_experts} experts, got {counts}"
        )
    for name, least in (
        ("hidden", max(geometry.num_experts, NVFP4_BLOCK * sum(counts))),
        ("intermediate", _CHANNEL_BLOCK * len(EXPERTS)),
        ("num_experts", geometry.top_k),
        ("top_k", 2),
    ):
        if getattr(geometry, name) < least:
            raise ValueError(f"{name} of {geometry} must be at least {least} for {sum(counts)} tokens")


def _columns(geometry: Geometry, tokens: int) -> torch.Tensor:
    """`[tokens]`: the first column of each token, in a block of 16 of its own, spread over H."""
    return NVFP4_BLOCK * (torch.arange(tokens) * (geometry.hidden // NVFP4_BLOCK) // max(tokens, 1)) + 3


def _channels(geometry: Geometry) -> torch.Tensor:
    """`[7]`: the intermediate channel that experts of each row of EXPERTS read, in a block of its own, spread over I.
    The next one is zero."""
    row = torch.arange(len(EXPERTS))
    return _CHANNEL_BLOCK * (row * (geometry.intermediate // _CHANNEL_BLOCK) // len(EXPERTS)) + 9 * row


def _routing(geometry: Geometry, tokens: range, spread: int, plain: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 and weights float32 `[T, top_k]`, weight 2^-(slot + 1)."""
    k, experts = geometry.top_k, geometry.num_experts
    ids = torch.zeros(len(tokens), k, dtype=torch.int64)
    for row, t in enumerate(tokens):
        for slot in range(k):
            ids[row, slot] = ((slot + t) % k * (experts // k) + spread * t) % experts
        if t % 4 == 1 and not plain:
            ids[row, t // 4 % k] = -1
        if t % 4 == 3 and not plain:
            ids[row, 1] = ids[row, 0]
    return ids, 2.0 ** -torch.arange(1.0, k + 1).repeat(len(tokens), 1)


@dataclass(frozen=True)
class _Blocks:
    """How many w13 rows (canonical, of gate and of up alike), w2 rows and columns of K share a weight scale."""

    w13_rows: int
    w2_rows: int
    k: int
    element: Format | None  #: None: float32


_BLOCKS = {
    Weights.NVFP4: _Blocks(1, 1, NVFP4_BLOCK, E4M3),
    Weights.NVFP4_BLOCK_SCALED: _Blocks(1, 1, NVFP4_BLOCK, E4M3),
    Weights.MXFP4: _Blocks(1, 1, MX_BLOCK, UE8M0),
    Weights.FP8_BLOCK_128: _Blocks(64, 128, 128, None),
    Weights.FP8_BLOCK_128_APART: _Blocks(128, 128, 128, None),
}
_FP8 = (Weights.FP8_PER_EXPERT, Weights.FP8_BLOCK_128, Weights.FP8_BLOCK_128_APART)
#: No scale for an expert as a whole.
_WITHOUT_ALPHAS = (Weights.MXFP4, Weights.BF16)


def _w2_scale(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """1/2, 1 or 2, another one in the next row and in the next column of scales."""
    return 2.0 ** ((row + column) % 3 - 1)


def _code(powers: torch.Tensor, element: Format) -> torch.Tensor:
    return (powers.log2() + element.bias).to(torch.uint8) if element is UE8M0 else encode(powers, element)


def _zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory until written. `torch.zeros` writes them."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).reshape(shape)


@dataclass(frozen=True)
class _Maker:
    geometry: Geometry
    scheme: Scheme
    numbers: Numbers
    stored: Weights  #: the scheme's, or BF16 for dense weights
    columns: torch.Tensor
    channels: torch.Tensor

    # --- tensors ---

    def hidden_states(self, tokens: range) -> torch.Tensor:
        x = torch.zeros(len(tokens), self.geometry.hidden)
        for row, t in enumerate(tokens):
            gate, up, sentinel = self.numbers.of_token(t)
            values = torch.tensor([gate, up if self.numbers.ups else 0.0, sentinel])
            self._check_staged(values)
            x[row, self.columns[t] : self.columns[t] + 3] = values
        return x.bfloat16()

    def weights(self) -> MoEWeights:
        """Only rows that are not all zeros are made in float32."""
        hidden, intermediate, num_experts = self.geometry.hidden, self.geometry.intermediate, self.geometry.num_experts
        sentinel = 7.0 if self.scheme.weights in _FP8 else 6.0  # where activations are zero: a dense block's amax
        picks = torch.zeros(2, len(EXPERTS), hidden)
        picks[0][:, self.columns] = self.numbers.gate_code
        picks[1][:, self.columns + bool(self.numbers.ups)] = torch.tensor([[self._up_code(e)] for e in EXPERTS])
        picks[:, :, self.columns + _TOKEN_WIDTH - 1] = sentinel
        payload = self._payload(picks.flatten(0, 1))
        w13 = torch.zeros(2 * intermediate, payload.shape[1], dtype=payload.dtype)
        w13[torch.cat([self.channels, intermediate + self.channels])] = payload

        experts = torch.arange(num_experts)
        kind = experts % len(EXPERTS)
        writes = torch.zeros(num_experts, intermediate)
        writes[experts, self.channels[kind]] = torch.tensor([e.code for e in EXPERTS])[kind]
        writes[experts, self.channels[kind] + 1] = sentinel
        payload = self._payload(writes)
        w2 = _zeros(num_experts, hidden, payload.shape[1], dtype=payload.dtype)
        w2[experts, output_channel(self.geometry, 1) * experts] = payload
        return MoEWeights(self._repeat(w13), w2, **self._expert_scales(kind), **self._block_scales(kind))

    def _up_code(self, expert: Expert) -> float:
        return float(expert.up_code if self.numbers.up_code is None else self.numbers.up_code)

    def _repeat(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(self.geometry.num_experts, *tensor.shape)

    def _payload(self, values: torch.Tensor) -> torch.Tensor:
        """Values to what the kernel takes: packed E2M1, FP8 codes as uint8, or bf16."""
        if self.stored is Weights.BF16:
            return values.bfloat16()
        if self.stored in _FP8:
            assert self.scheme.stage is not None
            return encode(values, self.scheme.stage.element)
        return pack_e2m1(encode(values, E2M1))

    def _per_expert(self, name: str) -> torch.Tensor:
        """`[7]` float32: a field of EXPERTS, 1 where nothing carries it."""
        block_scaled = self.scheme.weights is Weights.NVFP4_BLOCK_SCALED
        carried = block_scaled or (self.stored not in _WITHOUT_ALPHAS and name != "fc1_norm_const")
        return torch.tensor([getattr(e, name) if carried else 1.0 for e in EXPERTS])

    def _alphas(self, kind: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[E]`, for each leg: what undoes the norms is in them."""
        fc1, fc2, norm = (self._per_expert(name)[kind] for name in ("fc1_alpha", "fc2_alpha", "fc1_norm_const"))
        return {"w13": fc1 / self.scheme.input_norm_const, "w2": fc2 / norm}

    def _expert_scales(self, kind: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.stored is Weights.FP8_PER_EXPERT:
            return {f"{leg}_scale": alpha for leg, alpha in self._alphas(kind).items()}
        if self.stored is not Weights.NVFP4 and self.scheme.weights is not Weights.NVFP4_BLOCK_SCALED:
            return {}
        scales = {f"{leg}_global_scale": alpha for leg, alpha in self._alphas(kind).items()}
        if self.scheme.weights is Weights.NVFP4_BLOCK_SCALED:
            scales["fc1_norm_const"] = self._per_expert("fc1_norm_const")[kind]
        return scales

    def _block_scales(self, kind: torch.Tensor) -> dict[str, torch.Tensor]:
        """1 in w13's picking blocks and 2 in the others, `_w2_scale` in w2."""
        if (block := _BLOCKS.get(self.stored)) is None:
            return {}
        hidden, intermediate = self.geometry.hidden, self.geometry.intermediate
        halves = 1 if self.stored is Weights.FP8_BLOCK_128 else 2  # there a scale is that of gate and up alike
        w13 = torch.full((halves, intermediate // block.w13_rows, hidden // block.k), 2.0)
        w13[:, (self.channels // block.w13_rows)[:, None], self.columns // block.k] = 1.0
        w2 = _w2_scale(torch.arange(hidden // block.w2_rows)[:, None], torch.arange(intermediate // block.k))
        scales = {}
        for leg, scale in (("w13", w13.flatten(0, 1)), ("w2", w2)):
            if block.element is None:
                scales[f"{leg}_scale"] = self._alphas(kind)[leg][:, None, None] * scale
            else:
                scales[f"{leg}_scale"] = self._repeat(_code(scale, block.element))
        return scales

    # --- what must come out ---

    def expected(self, tokens: range, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(tokens), self.geometry.hidden, dtype=torch.float64)
        for row, t in enumerate(tokens):
            for slot, expert in enumerate(ids[row].tolist()):
                if expert < 0:
                    continue
                kind, share = expert % len(EXPERTS), float(shares[row, slot])
                y = self._swiglu(t, kind)
                self._check_requantized(y if self.scheme.combine.weighted else y * share, kind)
                term = share * y * self._written(expert, kind)
                out[row, output_channel(self.geometry, expert)] += term
                self._check_bf16(torch.tensor(term))
        self._check_bf16(out)
        return out.bfloat16()

    def _swiglu(self, token: int, kind: int) -> float:
        """silu(gate) * up, silu(gate) being gate."""
        limit, alpha = self.scheme.gate_up_clamp or math.inf, float(self._per_expert("fc1_alpha")[kind])
        gate, up, _ = self.numbers.of_token(token)
        gate = min(gate * self.numbers.gate_code * alpha, limit)
        if gate < _LEAST_GATE:
            raise ValueError(f"gate_up_clamp: gate must be at least {_LEAST_GATE}, where silu is exact, got {gate}")
        return gate * max(-limit, min(up * self._up_code(EXPERTS[kind]) * alpha, limit))

    def _written(self, expert: int, kind: int) -> float:
        """What the expert multiplies the SwiGLU output by: code, block scale and alpha of w2."""
        factor = EXPERTS[kind].code * float(self._per_expert("fc2_alpha")[kind])
        if block := _BLOCKS.get(self.stored):
            row = torch.tensor(output_channel(self.geometry, expert) // block.w2_rows)
            factor *= float(_w2_scale(row, self.channels[kind] // block.k))
        return factor

    def _check_staged(self, values: torch.Tensor) -> None:
        rule = self.scheme.stage
        if rule is None:
            return
        static = rule.source is ScaleSource.STATIC
        scale = self.scheme.fc1_activation_dequant_scale if static else float(values.abs().max()) / rule.element.max
        self._check_exact(values / scale, rule.element)
        if rule.scale is not None:
            self._check_exact(torch.tensor(scale * self.scheme.input_norm_const), rule.scale)

    def _check_requantized(self, value: float, kind: int) -> None:
        """Blocks of a float32 scale hold one magnitude, which is exact whatever it is."""
        rule, y = self.scheme.requantize, torch.tensor(abs(value))
        if rule is not None and rule.source is ScaleSource.STATIC:
            self._check_exact(y / self.scheme.fc2_activation_dequant_scale, rule.element)
        if rule is not None and rule.scale is not None:
            self._check_exact(y / rule.element.max * self._per_expert("fc1_norm_const")[kind], rule.scale)

    def _check_exact(self, values: torch.Tensor, element: Format) -> None:
        if not torch.equal(round_to(values, element), values):
            raise ValueError(f"numbers: {values.tolist()} is not exact in {element} under {self.scheme}")

    def _check_bf16(self, values: torch.Tensor) -> None:
        if not torch.equal(values.bfloat16().to(values.dtype), values):
            raise ValueError(f"numbers: {self.numbers} gives outputs that are no bf16 numbers under {self.scheme}")
