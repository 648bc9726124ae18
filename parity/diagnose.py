"""What a difference looks like: causes in the terms of FP4 and mixtures of experts, each with its evidence.

Only the first stage that breaks the tolerance is looked at; everything before it holds. First mistakes are planted and
replayed (`hypotheses.py`), then patterns are looked for in the two sides' tensors (`RULES`). What `GENERAL` has to say
is weaker, and said when nothing else fits; where that does not fit either, nothing is said.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fp4ep.reference.scheme import Combine

from . import mistakes as m
from .compare import Comparison
from .faults import Kind
from .hypotheses import View, explanations, left_rows
from .metrics import bits, bits_differ, ulp_distance


@dataclass(frozen=True)
class Diagnosis:
    kind: Kind
    says: str


Found = Iterator[tuple[Kind, str]]
#: Looks for one pattern.
Rule = Callable[[View], Found]


def diagnose(comparison: Comparison) -> tuple[Diagnosis, ...]:
    """What may have gone wrong, the strongest evidence first, one for each kind.

    Empty when nothing breaks the tolerance, or nothing fits. Replays GEMMs of a few rows: a second on small layers,
    minutes on those of the largest models.
    """
    first = comparison.first_outside
    if first is None:
        return ()
    view = View.of(comparison, first)
    found: dict[Kind, str] = {}
    for rules in ((_routes,),) if first.tensor == "routes" else ((explanations, *RULES), GENERAL):
        for rule in rules:
            for kind, says in rule(view):
                found.setdefault(kind, says)
        if found:
            break
    return tuple(Diagnosis(kind, says) for kind, says in found.items())


def _of(some: int, total: int) -> str:
    return f"all {total:,}" if some == total else f"{some:,} of {total:,}"


def _few(items: list) -> str:
    return ", ".join(map(str, items[:6])) + ", ..." * (len(items) > 6)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Two dimensions: terms as one row for each slot, a number for each route as a row of one."""
    return tensor.flatten(0, 1) if tensor.ndim == 3 else tensor if tensor.ndim == 2 else tensor[:, None]


# --- routes ------------------------------------------------------------------------------------------------------


def _routes(view: View) -> Found:
    """Routes that one side lacks, told by where they are."""
    layer, experts = view.layer, view.layer.weights.num_experts
    ours, theirs = (
        {key for table in run.stages("dispatch").values() for key in _keys(table)}
        for run in (view.comparison.left, view.comparison.right)
    )
    missing, extra, local = sorted(ours - theirs), sorted(theirs - ours), experts // layer.ep_size
    #: How far each route's expert is from the id that was asked for.
    beyond = {key: key[0] - int(layer.inputs[key[1]].topk_ids[key[2], key[3]]) for key in extra}
    offsets = {offset % experts for offset in beyond.values()}
    says = ""
    if extra and not missing and all(offset > key[0] for key, offset in beyond.items()):
        says = f"the right side has {len(extra)} routes more, from masked slots"
        if set(beyond.values()) == {experts}:
            says += f", at expert id + {experts}: a negative id indexed from the end"
    elif missing and {key[1:] for key in missing} == {key[1:] for key in extra} and len(offsets) == 1:
        says = f"{_of(len(missing), len(ours))} routes go to expert id + {offsets.pop()}"
    elif missing and not extra:
        lost = {e // local for e, *_ in missing}
        if len(lost) < layer.ep_size and not any(e // local in lost for e, *_ in theirs):
            says = (
                f"none of {len(missing)} routes reaches EP rank {_few(sorted(lost))}: global ids taken for local ones?"
            )
        elif set(missing) == {key for key in ours if any((*key[:3], slot) in ours for slot in range(key[3]))}:
            says = f"the {len(missing)} missing routes are those to an expert that an earlier slot names too"
    if says:
        yield Kind.ROUTES, says


def _keys(table) -> Iterator[tuple[int, ...]]:
    return zip(*(table[name].tolist() for name in ("expert", "source_rank", "token", "slot")), strict=True)


# --- claims ------------------------------------------------------------------------------------------------------


def _claims_too_little(view: View) -> Found:
    """A tensor core that keeps 13 bits is no float32 sum, though it is what the scheme asks for."""
    if not any(bool(bits_differ(view.left[name], view.right[name]).any()) for name in view.right):
        yield (
            Kind.GEMM,
            f"{view.stage} is the left side's bit for bit, so not summed in float32: the claim should be bits",
        )


# --- NaN and zero ------------------------------------------------------------------------------------------------


def _nan(view: View) -> Found:
    for name in view.wrong:
        ours, theirs = (_rows(side[name]).float().isnan().any(1) for side in (view.left, view.right))
        rows = theirs & ~ours
        if not bool(rows.any()):
            continue
        says = f"{name} is NaN in {int(rows.sum()):,} of {len(rows):,} rows on the right only"
        masked = [(x.topk_ids < 0).all(1) & x.hidden_states.float().isnan().any(1) for x in view.layer.inputs]
        padding = int(torch.cat(masked).sum())
        if padding:
            yield Kind.PADDING, f"{says}, and {padding} rows of padding hold NaN"
        else:
            yield Kind.NAN, f"{says}: 0 / 0, or memory never written"
        return


def _zero(view: View) -> Found:
    if view.stage in ("fc2", "combine") and "values" in view.right:
        left, right = (_rows(side["values"]) for side in (view.left, view.right))
        empty = (right == 0).all(1) & (left != 0).any(1)
        if bool(empty.any()):
            tokens = view.keys["token"][empty].unique().tolist()
            says = f"{int(empty.sum()):,} of {len(empty):,} rows are zero on the right only"
            yield Kind.ZERO, f"{says} (tokens {_few(tokens)})"


# --- factors -----------------------------------------------------------------------------------------------------

#: Relative error of the quotient of two numbers of a dtype, each rounded a few times.
_QUOTIENT = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-7}


def _factor(view: View) -> Found:
    """right = c * left, c one number for the tensor or for each expert."""
    for name in view.wrong:
        left, right = (_rows(side[name]) for side in (view.left, view.right))
        if left.dtype not in _QUOTIENT or (left.shape[1] == 1 and name != "scales"):
            continue
        group = view.keys.get("expert", torch.zeros(len(left), dtype=torch.int64))
        factors = {int(g): _quotient(view, left[group == g], right[group == g]) for g in group.unique()}
        changed = {g: c for g, c in factors.items() if c is not None and c != 1.0}
        if None in factors.values() or not changed:
            continue
        named = {g: _name(view, c, g, _QUOTIENT[left.dtype]) for g, c in changed.items()}
        told = [f"{c:.6g} ({named[g]})" if named[g] else f"{c:.6g}" for g, c in changed.items()]
        what = told[0] if len(set(told)) == 1 else f"one number for each expert: {_few(told)}"
        if len(set(named.values())) == 1 and named[next(iter(named))]:
            what = named[next(iter(named))]
        equal = [n for n in view.left if n not in view.wrong]
        kind = Kind.GLOBAL_SCALE if all("global" in text for text in named.values()) else Kind.FACTOR
        count = sum(int((group == g).sum()) for g in changed) * left.shape[1]
        says = f"{name} is left * {what} in {_of(count, left.numel())} elements"
        yield kind, says + f"; {' and '.join(equal)} hold" * bool(equal)
        return


def _quotient(view: View, left: torch.Tensor, right: torch.Tensor) -> float | None:
    """c with right = c * left, 1.0 when they are equal; None if there is none, or too few numbers to tell."""
    if view.alike(left, right):
        return 1.0
    a, b = left.double(), right.double()
    usable = torch.isfinite(a) & torch.isfinite(b) & (a != 0) & (b.abs() > 2.0**-120)
    if int(usable.sum()) < 8:
        return None
    c = float((b[usable] / a[usable]).median())
    slack = _QUOTIENT[left.dtype] if view.exact else view.near
    limit = slack * (c * a).abs() if view.exact else slack * (c * a)[usable].norm() / a.numel() ** 0.5
    fits = ((b - c * a).abs() <= limit) | ~torch.isfinite(a) | (a.abs() * abs(c) < 2.0**-119)
    return c if abs(c - 1) > slack and bool(fits.all()) else None


def _name(view: View, c: float, expert: int, slack: float) -> str:
    """What c is: a power of two, a number of the formats, or made of global scales; "" if none of them."""
    exponent = round(float(torch.tensor(abs(c)).log2()))
    known = {f"2^{exponent}": 2.0**exponent, "2688 = 6 * 448": 2688.0, "1/2688": 1 / 2688, "448/240": 448 / 240}
    leg = {"fc1": "w13", "fc2": "w2"}.get(view.stage)
    scales = leg and getattr(view.layer.weights, f"{leg}_global_scale")
    every: list[float] = []
    if isinstance(scales, torch.Tensor):
        every = scales.reshape(-1).double().expand(view.layer.weights.num_experts).tolist()
        own = every[expert]
        known |= {"1 / the global scale": 1 / own, "1 / the global scale squared": own**-2, "the global scale": own}
    for text, value in known.items():
        if abs(c / value - 1) <= slack:
            return text
    others = [i for i, other in enumerate(every) if abs(c * every[expert] / other - 1) <= slack]
    if len({every[i] for i in others}) != 1:
        return ""
    return f"the global scale of expert {' or '.join(map(str, others))} / its own"


# --- routing weights ---------------------------------------------------------------------------------------------


def _weight(view: View) -> Found:
    """One factor for each route, which the routing weights of its token explain. A sample of routes is looked at."""
    if view.stage == "dispatch" and set(view.wrong) == {"topk_weights"}:
        factors = (view.right["topk_weights"] / view.left["topk_weights"])[:64].tolist()
    elif view.stage == "activation":
        rows = zip(*(side["values"][:64].split(1) for side in (view.left, view.right)), strict=True)
        factors = [_quotient(view, *row) for row in rows]
    else:
        return
    places = zip(*(view.keys[n].tolist() for n in ("source_rank", "token", "slot")), strict=True)
    weights = [(view.layer.inputs[rank].topk_weights[token].tolist(), slot) for rank, token, slot in places]
    known = [(c, w[slot], w) for c, (w, slot) in zip(factors, weights, strict=False) if c is not None]
    for says, fits in _OF_WEIGHT.items():
        if len(known) > len(factors) // 2 and all(fits(*one) for one in known):
            yield (
                Kind.ROUTING_WEIGHT,
                f"every route is the left side's {says}, in {_of(len(known), len(factors))} routes",
            )
            return


#: (factor, own weight, weights of the token) -> whether it is so.
_OF_WEIGHT: dict[str, Callable[[float, float, list[float]], bool]] = {
    "without its routing weight": lambda c, own, every: _same(c * own, 1.0),
    "times its routing weight once more": lambda c, own, every: _same(c, own),
    "with the weight of some slot of its token": lambda c, own, every: any(_same(c * own, w) for w in every),
}


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= 2.0**-20 * abs(b)


# --- combine -----------------------------------------------------------------------------------------------------


def _sums(view: View) -> Found:
    """The output is another sum of the terms that arrived; of the left side's, where the right does not show them."""
    terms = view.right.get("terms", view.terms)
    if view.stage != "combine" or terms is None or "values" not in view.right:
        return
    own, slots = view.layer.scheme.combine, range(terms.shape[1])
    ids, weights = (torch.cat([getattr(x, name) for x in view.layer.inputs]) for name in ("topk_ids", "topk_weights"))
    held = "terms" in view.wrong and not bool(view.wrong["terms"].any(2)[ids >= 0].any())
    rest = "; masked slots hold values on the right" * held
    if view.alike(m.summed(view.layer, terms, ids, weights, own), view.right["values"]):
        if held:
            yield Kind.SUM, f"masked slots are summed{rest}"
        return
    tries: list[tuple[str, Combine, dict[int, int]]] = [(f"summed {r.value}", r, {}) for r in Combine if r is not own]
    tries += [(f"slot {slot} left out", own, {slot: 0}) for slot in slots]
    tries += [(f"slot {slot} counted twice", own, {slot: 2}) for slot in slots]
    for says, rule, counts in tries:
        if view.alike(m.summed(view.layer, terms, ids, weights, rule, counts), view.right["values"]):
            yield Kind.SUM, f"every output is that with {says}{rest}"
            return


# --- moved -------------------------------------------------------------------------------------------------------


def _moved(view: View) -> Found:
    """Rows that stand n rows from where they belong, then channels within their row."""
    for name in view.wrong:
        left, right = (bits(_rows(side[name])) for side in (view.left, view.right))
        rows = (left != right).any(1).nonzero()[:, 0]
        text = len(rows) and (_rows_moved(left, right, rows) or _channels_moved(left, right, rows))
        if text:
            yield Kind.SHIFT, f"{name}: {text}"
            return


def _rows_moved(left: torch.Tensor, right: torch.Tensor, rows: torch.Tensor) -> str:
    for source in (left == right[rows[0]]).all(1).nonzero()[:, 0].tolist():
        n = source - int(rows[0])
        inside = rows[(rows + n >= 0) & (rows + n < len(left))]
        if len(inside) > 1 and torch.equal(right[inside], left[inside + n]):
            return f"right[i] == left[i {n:+d}] in {_of(len(inside), len(rows))} rows that differ"
    known = {row.numpy().tobytes() for row in left}
    if len(rows) > 1 and left.shape[1] > 8 and all(row.numpy().tobytes() in known for row in right[rows]):
        return f"each of the {len(rows):,} rows that differ is another row of the left side"
    return ""


def _channels_moved(left: torch.Tensor, right: torch.Tensor, rows: torch.Tensor) -> str:
    count = left.shape[1]
    for n in (left[rows[0]] == right[rows[0], 0]).nonzero()[:, 0].tolist():
        if n and all(torch.equal(left[some].roll(-n, 1), right[some]) for some in (rows[:1], rows)):
            n = n if n <= count // 2 else n - count
            return f"{_of(len(rows), len(left))} rows have channel j {n:+d} (modulo {count}) at j; their norm is right"
    return ""


# --- codes -------------------------------------------------------------------------------------------------------


def _ties(view: View) -> Found:
    """Every differing code stands for a value exactly halfway between two codes."""
    scheme = view.layer.scheme
    rule = {"stage": scheme.stage, "requantize": scheme.requantize}.get(view.stage)
    if rule is None or set(view.wrong) != {"values"} or "scales" not in view.right:
        return
    if view.stage == "stage":
        values = torch.cat([x.hidden_states for x in view.layer.inputs])
    else:
        values = left_rows(view, "activation")["values"]
    tied = m.tied(m.before_rounding(values, view.left["scales"], rule), rule.element)
    where = view.wrong["values"]
    if bool(tied[where].all()):
        told = f"{int(where.sum()):,} codes that differ stand for values halfway between two codes"
        yield Kind.TIES, f"all {told}, as {int(tied.sum()):,} do in all"


RULES: tuple[Rule, ...] = (_claims_too_little, _nan, _zero, _weight, _factor, _sums, _moved, _ties)


# --- when nothing else fits --------------------------------------------------------------------------------------


def _steps(view: View) -> Found:
    """Every difference is one representable value wide."""
    for name, where in view.wrong.items():
        apart = ulp_distance(view.left[name][where], view.right[name][where])
        if int(apart.max()) == 1 and view.left[name].element_size() < 4:
            yield Kind.STEPS, f"{name}: {_of(len(apart), where.numel())} codes are one step away, none more"


def _rounding(view: View) -> Found:
    """Spread over the channels, and nowhere more than a few roundings of that stage. Not for a black box."""
    kept = {stage: getattr(view.layer.scheme, stage).core.fraction_bits for stage in ("fc1", "fc2")}
    kept = kept | {"fc2": min(kept["fc2"], 8), "activation": 21, "combine": 8}
    if view.stage not in kept or not view.comparison.right.stages("dispatch"):
        return
    largest = 0.0
    for name, where in view.wrong.items():
        left, right = (_rows(side[name]).double() for side in (view.left, view.right))
        if float(_rows(where).any(0).float().mean()) < 0.5:
            return
        largest = max(
            largest, float(((left - right).abs() / left.norm(dim=1, keepdim=True)).max()) * left.shape[1] ** 0.5
        )
    if largest <= 16 * 2.0 ** -kept[view.stage]:
        told = f"no difference is above {largest:.1e} of its row's root mean square"
        yield Kind.ROUNDING, f"{told}: order or precision, not a wrong operand"


GENERAL: tuple[Rule, ...] = (_steps, _rounding)
