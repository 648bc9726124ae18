"""Diagnosis by replay: plant a mistake in the first stage that differs and see whether the right side's bits come out.

Tried are the faults of `faults.py` that act on a stage's tensors and, for fc1 and fc2, a table of mistakes with weights
and with accumulation, on a few routes of the first and the last expert that differ. Where the right side shows its
output only, whole layers of a few tokens are run. For a side that claims FLOAT32 the question is whether it lies
within the bound of the layer with the mistake.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import torch

from fp4ep.reference.exchange import Rows, concatenate, select
from fp4ep.reference.formats import E4M3, UE8M0, decode
from fp4ep.reference.gemm import expert_gemm
from fp4ep.reference.moe import moe_forward
from fp4ep.reference.scheme import Gemm, KOrder, Weights
from fp4ep.reference.types import Exactness, MoEInputs, MoEWeights, Stage, Trace
from fp4ep.reference.validate import InputError
from fp4ep.reference.weights import Operand, load_operand

from . import mistakes as m
from .compare import ROUTE_STAGES, STAGES, Comparison, Difference, compare, match_routes
from .faults import FAULTS, FP4, SCHEME_OF, Fault, Kind, planted
from .metrics import bits_differ, rel_l2
from .problem import Layer
from .run import REFERENCE, Claim, Run, outputs_as_trace
from .tolerance import Rung, derive

_LEG = {"fc1": "w13", "fc2": "w2"}
_GIVEN = {"fc1": "dispatch", "fc2": "requantize"}
_MADE = {"fc1": ("gate", "up"), "fc2": ("values",)}

#: At most so many routes of an expert are replayed, and bytes of a row of scales tried.
_ROUTES, _BYTES = 4, 8
#: A black box is replayed on so many tokens, and not at all when an expert's w13 has more elements.
_TOKENS, _SMALL = 8, 1 << 18


@dataclass(frozen=True)
class View:
    """The first stage that breaks the tolerance: rows of both sides paired, ranks one after another.

    left, right: the tensors that both show. outside: bool, the elements that break the tolerance. keys: rank and token
    of each row, for routes also expert, source_rank, slot.
    """

    comparison: Comparison
    first: Difference
    left: Rows
    right: Rows
    outside: Rows
    keys: Rows

    #: How near two tensors of a side that claims FLOAT32 are when they are one thing: it differs from an FP8 tensor
    #: core, which keeps 13 bits, by some 2^-10 of the norm.
    near: ClassVar[float] = 2.0**-6

    @classmethod
    def of(cls, comparison: Comparison, first: Difference) -> "View":
        judges = {t.tensor: t.allowance.judge for t in comparison.tensors if t.stage == first.stage}
        left, right, outside, keys = [], [], [], []
        for rank, ours, theirs, key, index in _pairs(comparison.left, comparison.right, first.stage):
            left.append({name: ours[name] for name in judges})
            right.append({name: theirs[name] for name in judges})
            outside.append({n: judge(rank, ours[n], theirs[n], index).outside for n, judge in judges.items()})
            keys.append(key)
        return cls(comparison, first, *map(concatenate, (left, right, outside, keys)))

    @property
    def stage(self) -> str:
        return self.first.stage

    @property
    def layer(self) -> Layer:
        return self.comparison.left.layer

    @property
    def exact(self) -> bool:
        """The tolerance of this stage is every bit."""
        return all(t.allowance.rung is Rung.BITS for t in self.comparison.tensors if t.stage == self.stage)

    def alike(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """One thing, as far as the tolerance lets us see."""
        if self.exact:
            return not bool(bits_differ(a, b).any())
        return rel_l2(a.float(), b.float()) < self.near

    @property
    def terms(self) -> torch.Tensor | None:
        """The left side's `combine` terms, if it shows them."""
        shown = self.comparison.left.stages("combine").values()
        return torch.cat([t["terms"] for t in shown]) if all("terms" in t for t in shown) else None

    @cached_property
    def wrong(self) -> Rows:
        """`outside` of the tensors that have such elements."""
        return {name: where for name, where in self.outside.items() if bool(where.any())}


#: rank, left tensors, right tensors, keys, the left side's rows (None: all)
_Pair = tuple[int, Rows, Rows, Rows, torch.Tensor | None]


def _pairs(left: Run, right: Run, stage: str) -> Iterator[_Pair]:
    for rank, ours in left.stages(stage).items():
        theirs, index = right.stages(stage)[rank], None
        if stage in ROUTE_STAGES:
            table = left.stages("dispatch")[rank]
            rows = match_routes(table, right.stages("dispatch")[rank])
            ours, theirs, index = select(ours, rows.left), select(theirs, rows.right), rows.left
            keys = {name: table[name][index] for name in ("expert", "source_rank", "token", "slot")}
        else:
            keys = {"token": torch.arange(len(next(iter(ours.values()))))}
        yield rank, ours, theirs, keys | {"rank": torch.full_like(keys["token"], rank)}, index


def left_rows(view: View, stage: str) -> Rows:
    """Another of the left side's stages of routes, its rows in the view's order."""
    left, right = (run.stages("dispatch") for run in (view.comparison.left, view.comparison.right))
    tables = view.comparison.left.stages(stage)
    return concatenate([select(tables[rank], match_routes(left[rank], right[rank]).left) for rank in left])


def explanations(view: View) -> Iterator[tuple[Kind, str]]:
    """What was planted when the right side came out, and a sentence; one for each kind."""
    place, comparison = STAGES.index(view.stage), view.comparison
    found: list[tuple[Kind, str]] = []
    if all(comparison.left.stages(stage) for stage in STAGES[: place + 1]):
        found += _by_stage(view)
    if tuple(view.right) == _MADE.get(view.stage) and comparison.left.stages(_GIVEN[view.stage]):
        found += _by_product(view)
    if not found and place and not comparison.right.stages(STAGES[place - 1]):
        found += _by_output(view)
    yield from found


# --- a mistake in the tensors of a stage -------------------------------------------------------------------------


def _by_stage(view: View) -> Iterator[tuple[Kind, str]]:
    left, right, stage = view.comparison.left, view.comparison.right, view.stage
    before = STAGES[: STAGES.index(stage)]
    elements = sum(tensor.numel() for tensor in view.right.values())
    how = "bit for bit" if view.exact else f"to {view.near:.1%} of the norm"
    if all(view.alike(view.left[name], view.right[name]) for name in view.right):
        return
    for fault in FAULTS.values():
        if fault.stage != stage or fault.hook is None or view.layer.scheme.weights not in fault.families:
            continue
        stages = [s for s in left.trace if s.name != stage]
        for rank, now in left.stages(stage).items():
            at = m.At(view.layer, stage, rank, {name: left.stages(name)[rank] for name in before}, now)
            stages.append(Stage(stage, rank, Exactness.EXACT, now | fault.hook(at)))
        there = _pairs(replace(left, trace=Trace(tuple(stages))), right, stage)
        if all(view.alike(a[name], b[name]) for _, a, b, _, _ in there for name in view.right):
            yield fault.expects, f"{fault.says}: planted, it gives all {elements:,} elements of {stage} {how}"


# --- a mistake in a product --------------------------------------------------------------------------------------


_ORDERS = {
    "gate and up exchanged": m.halves_exchanged,
    "rows that alternate gate and up read as halves": m.interleaved,
    "halves read as rows that alternate gate and up": m.separated,
}


def _products(leg: str, other: str) -> Iterator[Fault]:
    """Mistakes with one leg."""
    stage = {"w13": "fc1", "w2": "fc2"}[leg]
    make = partial(Fault, leg, source="", stage=stage, families=FP4)
    wrong = partial(make, expects=Kind.BLOCK_SCALES)
    for n in (32, 128, 64, 16, 8, 1):
        for to, where in ((n, "below"), (-n, "above")):
            yield wrong(f"{leg}'s block scales of the row {n} {where}", weights=m.scales_moved(leg, rows=to))
    for n in (1, 2, 4):
        for to, where in ((n, "right"), (-n, "left")):
            yield wrong(f"{leg}'s block scales {n} to the {where}", weights=m.scales_moved(leg, columns=to))
    yield make(f"{leg}'s nibbles swapped", expects=Kind.NIBBLES, weights=m.nibbles_swapped(leg))
    one = partial(make, expects=Kind.GLOBAL_SCALE, families=(Weights.NVFP4,))
    yield one(f"{leg}'s global scale left out", weights=m.global_scale(leg, torch.ones_like))
    yield one(f"{leg}'s global scale inverted", weights=m.global_scale(leg, torch.reciprocal))
    yield one(f"{leg}'s global scale is {other}'s", weights=m.global_scale_of(leg, other))
    yield one(f"{leg}'s global scale one ulp up", weights=m.global_scale(leg, m.one_ulp_up))
    yield one(f"{leg}'s global scale one ulp down", weights=m.global_scale(leg, m.one_ulp_down))
    binade = partial(make, expects=Kind.FACTOR, families=(Weights.MXFP4,))
    yield binade(f"{leg}'s E8M0 scales one binade too high", weights=m.part(f"{leg}_scale", lambda codes: codes + 1))
    yield binade(f"{leg}'s E8M0 scales one binade too low", weights=m.part(f"{leg}_scale", lambda codes: codes - 1))
    every = partial(make, families=tuple(SCHEME_OF))
    for says, order in _ORDERS.items() if leg == "w13" else ():
        yield every(says, expects=Kind.GATE_UP, weights=m.rows_of_w13(order))
    for name, what in ((leg, "payload"), (f"{leg}_scale", "scales"), (f"{leg}_global_scale", "global scale")):
        for offset, whose in ((1, "the expert behind"), (-1, "the expert before"), (None, "expert 0")):
            says = f"{leg}'s {what} of {whose}"
            yield every(says, expects=Kind.EXPERT, weights=m.from_expert(name, offset))
    for k_order in KOrder:
        yield every(f"K order {k_order.value}", expects=Kind.GEMM, gemm=partial(_with, k_order=k_order))
    for chunk in (None, 32, 64, 128, 256):
        says = f"promoted every {chunk} of K" if chunk else "one chain over all of K"
        yield every(says, expects=Kind.GEMM, gemm=partial(_with, chunk=chunk))
    yield every("an accumulator of 25 bits", expects=Kind.GEMM, gemm=m.wide)


def _with(rule: Gemm, **changes) -> Gemm:
    return replace(rule, **changes)


PRODUCTS: tuple[Fault, ...] = (*_products("w13", "w2"), *_products("w2", "w13"))

#: The experts that a replay takes along: 0, the one before, the one itself, the one behind.
_HERE = 2


@dataclass(frozen=True)
class _Routes:
    """Some routes of one expert, which is number `_HERE` of `weights`.

    received: their dispatch rows; given: what the product is made of; left, right: the product, `[routes, N]`.
    """

    view: View
    weights: MoEWeights
    received: Rows
    given: Rows
    left: torch.Tensor
    right: torch.Tensor
    outside: torch.Tensor

    @classmethod
    def of(cls, view: View, expert: int) -> "_Routes":
        mine = view.keys["expert"] == expert
        left, right, outside = (torch.cat(list(t.values()), 1) for t in (view.left, view.right, view.outside))
        mixed = outside.any(1)
        chosen = torch.cat([(mine & mixed).nonzero()[:, 0], (mine & ~mixed).nonzero()[:, 0]])[:_ROUTES]
        weights = _experts(view.layer.weights, [0, expert - 1, expert, expert + 1])
        received, given = (select(left_rows(view, stage), chosen) for stage in ("dispatch", _GIVEN[view.stage]))
        return cls(view, weights, received, given, left[chosen], right[chosen], outside[chosen])

    @property
    def leg(self) -> str:
        return _LEG[self.view.stage]

    @property
    def rule(self) -> Gemm:
        return getattr(self.view.layer.scheme, self.view.stage)

    def product(self, fault: Fault, channels: torch.Tensor) -> torch.Tensor:
        """`[routes, channels]`, with the mistake in it."""
        weights = fault.weights(self.weights) if fault.weights else self.weights
        rule = fault.gemm(self.rule) if fault.gemm else self.rule
        if self.view.layer.scheme.weights is Weights.NVFP4 and weights.quantized:  # no row depends on another
            rows = {name: getattr(weights, name)[:, channels] for name in (self.leg, f"{self.leg}_scale")}
            weights, channels = replace(weights, **rows), torch.arange(len(channels))
        operand = load_operand(self.view.layer.scheme, weights, self.leg, _HERE)
        scale = operand.scale if len(operand.scale) == 1 else operand.scale[channels]
        few = Operand(operand.values[channels], scale)
        return expert_gemm(rule, self.given["values"].float(), self.given["scales"], few).to(self.right.dtype)

    def reproduced(self, fault: Fault) -> bool:
        """On a few channels first: most mistakes are soon ruled out."""
        if not self.view.exact:
            return self.admitted(fault)
        differing = self.outside.any(0).nonzero()[:, 0]
        every = torch.arange(self.right.shape[1])
        return all(
            not bool(bits_differ(self.product(fault, channels), self.right[:, channels]).any())
            for channels in (differing[:16], every[:: max(len(every) // 16, 1)], every)
        )

    def admitted(self, fault: Fault) -> bool:
        """The right side lies within the bound of the layer with the mistake; of sums the bound knows no order."""
        if fault.weights is None:
            return False
        here, one = torch.full((len(self.right),), _HERE), torch.zeros(len(self.right), dtype=torch.int64)
        hidden = torch.zeros(len(self.right), self.weights.w2.shape[1], dtype=torch.bfloat16)
        inputs = MoEInputs(hidden, here[:, None], self.received["topk_weights"][:, None])
        layer = Layer(self.view.layer.scheme, fault.weights(self.weights), (inputs,))
        keys = {"expert": here, "source_rank": one, "token": torch.arange(len(here)), "slot": one}
        trace = Trace((Stage("dispatch", 0, Exactness.EXACT, self.received | keys),))
        allowance = derive(Run(REFERENCE, Claim.BITS, layer, trace), replace(self.view.comparison.right, layer=layer))
        parts = zip(self.view.right, self.right.chunk(len(self.view.right), 1), strict=True)
        judged = (allowance(self.view.stage, name).judge(0, part, part, None) for name, part in parts)
        return not any(bool(verdict.outside.any()) for verdict in judged)


def _experts(weights: MoEWeights, wanted: list[int]) -> MoEWeights:
    """Copies of some experts, ids taken modulo their number."""
    count = weights.num_experts
    return weights.of_experts(torch.tensor([e % count for e in wanted]))


def _by_product(view: View) -> Iterator[tuple[Kind, str]]:
    """Mistakes that explain the first and the last expert that differ."""
    wrong = torch.cat(list(view.outside.values()), 1).any(1)
    experts = view.keys["expert"][wrong].unique().tolist()
    experts = sorted({experts[0], experts[-1]})
    routes = [_Routes.of(view, expert) for expert in experts]
    rows, elements = (sum(f(sample.right) for sample in routes) for f in (len, torch.numel))
    how = "bit for bit" if view.exact else "within the derived bound"
    where = f"{rows} routes of expert{'s' * (len(experts) > 1)} {' and '.join(map(str, experts))}"
    seen = set()
    for fault in (*PRODUCTS, *_one_byte(routes[0])):
        fits = fault.stage == view.stage and view.layer.scheme.weights in fault.families
        if fits and fault.expects not in seen and all(sample.reproduced(fault) for sample in routes):
            seen.add(fault.expects)
            yield fault.expects, f"{fault.says}: replayed on {where}, it gives their {elements:,} elements {how}"


def _one_byte(routes: _Routes) -> Iterator[Fault]:
    """Where a single channel differs: those block scales of its row which, one code up or down, explain most."""
    channels = routes.outside.any(0).nonzero()[:, 0].tolist()
    name = f"{routes.leg}_scale"
    codes: torch.Tensor | None = getattr(routes.weights, name)
    if codes is None or codes.dtype is not torch.uint8 or len(channels) != 1:
        return
    (channel,) = channels
    operand = load_operand(routes.view.layer.scheme, routes.weights, routes.leg, _HERE)
    x, scales = routes.given["values"].double(), routes.given["scales"].double()
    x = x * scales.repeat_interleave(x.shape[1] // scales.shape[1], 1)
    parts = (x * operand.values[channel].double() * operand.scale[0, 0]).unflatten(1, (codes.shape[2], -1)).sum(2)
    row, element = codes[_HERE, channel].int(), E4M3 if routes.view.layer.scheme.weights is Weights.NVFP4 else UE8M0
    change = (routes.right - routes.left)[:, channel].double()
    tries = []
    for step in (-1, 1):
        stepped = (row + step).clamp(0, element.max_code).byte()
        gain = (decode(stepped, element) / decode(row.byte(), element)).double() - 1
        missed = (parts * gain - change[:, None]).norm(dim=0).nan_to_num(torch.inf)
        tries += [(error, block, step) for block, error in enumerate(missed.tolist())]
    for _, block, step in sorted(tries)[:_BYTES]:
        says = f"{routes.leg}'s scale byte of row {channel}, block {block}, one {'up' if step > 0 else 'down'}"
        wrong = m.one_code(name, (_HERE, channel, block), step)
        yield Fault(name, says, "", routes.view.stage, Kind.BLOCK_SCALES, FP4, weights=wrong)


# --- a mistake in a black box ------------------------------------------------------------------------------------


def _by_output(view: View) -> Iterator[tuple[Kind, str]]:
    """The first mistake that gives the output of the first differing token, and of others beside it."""
    layer, rank, token = view.layer, view.first.rank, view.first.token
    if view.stage != "combine" or token is None or layer.weights.w13[0].numel() > _SMALL:
        return
    others = [t for t in range(len(layer.inputs[rank].hidden_states)) if t != token]
    tries = [_some_tokens(view, rank, tokens) for tokens in ([token], [token, *others[: _TOKENS - 1]])]
    how = "bit for bit" if view.exact else "within the derived bound"
    for fault in (*PRODUCTS, *(fault for fault in FAULTS.values() if fault.hook or fault.inputs)):
        if layer.scheme.weights in fault.families and all(_gives(fault, *few) for few in tries):
            where = f"replayed on {min(len(others) + 1, _TOKENS)} tokens"
            yield fault.expects, f"{fault.says} ({fault.stage}): {where}, it gives their output {how}"
            return


def _some_tokens(view: View, rank: int, tokens: list[int]) -> tuple[Layer, Run]:
    """A layer of these tokens on one rank, with the experts they need and their neighbours; the right side's output."""
    given = {name: t[tokens] for name, t in vars(view.layer.inputs[rank]).items() if t is not None}
    ids, count = given["topk_ids"], view.layer.weights.num_experts
    near = {int(e) + n for e in ids.unique() if e >= 0 for n in (-1, 0, 1)}
    kept = sorted({0, count - 1, *(e % count for e in near)})  # in order, so that neighbours stay neighbours
    place = torch.zeros(count, dtype=torch.int64).index_put((torch.tensor(kept),), torch.arange(len(kept)))
    given["topk_ids"] = torch.where(ids >= 0, place[ids.clamp(min=0).long()], ids.long())
    layer = Layer(view.layer.scheme, _experts(view.layer.weights, kept), (MoEInputs(**given),))
    output = view.comparison.right.stages("combine")[rank]["values"][tokens]
    return layer, replace(view.comparison.right, layer=layer, trace=outputs_as_trace([output]), problem=None)


def _gives(fault: Fault, layer: Layer, right: Run) -> bool:
    wrong, intervene = planted(fault, layer)
    try:
        _, trace = moe_forward(wrong.scheme, wrong.weights, wrong.inputs, intervene=intervene)
    except InputError:  # not even a kernel would take it
        return False
    left = Run(REFERENCE, Claim.BITS, replace(wrong, inputs=layer.inputs), trace)
    return compare(left, right).passed
