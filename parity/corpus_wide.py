"""A wide corpus: every SM90 scheme over sizes, routings, values, clamps and knobs, most of it drawn at random.

Inputs are `Problem`s and outputs are kept as `row_digests`, so that many elements take little room.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fp4ep.optimized.emulation import NOT_EMULATED
from fp4ep.reference.scheme import Combine, ScaleSource, Scheme, Swiglu, Weights
from fp4ep.reference.schemes import find_scheme

from .corpus import BF16, FP8, MXFP4, NVFP4, PUSH
from .problem import ROUTING, VALUES, Problem


@dataclass(frozen=True)
class Entry:
    """One case to record. config: fields of FlashInfer's config beside the scheme's options; they decide no bits."""

    title: str
    problem: Problem
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def on_arrival(self) -> bool:
        """Whether launches may differ, so that each is a case, and judged by its elements."""
        return find_scheme(self.problem.scheme, **self.problem.options).combine is Combine.ON_ARRIVAL


_BLOCKWISE: dict[str, Any] = {"fp8_scale_mode": "blockwise"}
_E5M2: dict[str, Any] = {"kind": "fp8_e5m2"}
_2XACC: dict[str, Any] = {"fp8_accum_mode": "2xacc"}
_TILE_K_256: dict[str, Any] = _2XACC | {"mma_tiler_k": 256}
_GROUPED: dict[str, Any] = {"grouped_token_back": True}
_REDUCED: dict[str, Any] = {"enable_in_kernel_fc2_reduce": True}

#: Scheme, options that select a record, and how many problems are drawn for it.
_VARIANTS: tuple[tuple[str, dict[str, Any], int], ...] = (
    (NVFP4, {}, 20),
    (NVFP4, {"nvfp4_kperm": 32}, 6),
    (NVFP4, {"nvfp4_kperm": 0}, 10),
    (MXFP4, {}, 20),
    (FP8, {}, 16),
    (FP8, _2XACC, 8),
    (FP8, _TILE_K_256, 4),
    (FP8, _E5M2, 8),
    (FP8, _E5M2 | _2XACC, 6),
    (FP8, _E5M2 | _TILE_K_256, 4),
    (FP8, _BLOCKWISE, 20),
    (FP8, _BLOCKWISE | _E5M2, 10),
    (FP8, _BLOCKWISE | _GROUPED, 6),
    *((FP8, _BLOCKWISE | _GROUPED | {"combine_format": f"32{wire}xe8m0"}, 6) for wire in ("e4m3", "e5m2")),
    (BF16, {}, 20),
    *((FP8, kind | mode | _REDUCED, 3) for kind in ({}, _E5M2) for mode in ({}, _2XACC, _TILE_K_256)),
    (FP8, _BLOCKWISE | _E5M2 | _REDUCED, 3),
    (FP8, _BLOCKWISE | _REDUCED, 6),
    (BF16, _REDUCED, 6),
    (PUSH, {}, 16),
    (PUSH, {"grouped_combine": False}, 8),
    (PUSH, {"grouped_combine": False, "combine_dtype": "bf16"}, 8),
)
#: The arithmetics that everything else varies.
ARITHMETICS: tuple[tuple[str, dict[str, Any]], ...] = (
    (NVFP4, {}),
    (MXFP4, {}),
    (FP8, {"fc1_activation_dequant_scale": 2.0**-6, "fc2_activation_dequant_scale": 2.0**-5}),
    (FP8, _BLOCKWISE),
    (BF16, {}),
    (PUSH, {}),
)

_STEPS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
_TOKENS = (1, 2, 3, 5, 8, 9, 17, 31, 48, 64, 65, 100, 128, 200, 256, 333, 512)
_EXPERTS = (1, 2, 4, 8, 16, 32, 64)
_CLAMPS = (None, 10.0, 7.0, 2.0, 0.5)
_STATIC_SCALES = (1.0, 2.0**-6, 0.013, 0.3)
#: A drawn problem has no more weights in all, multiply-adds and output elements; less where only the reference can run
#: it, or where outputs are stored whole, as those are that depend on the order of arrival.
_MOST, _MOST_SLOW, _MOST_STORED = (1 << 22, 1 << 28, 1 << 24), (1 << 20, 1 << 26, 1 << 17), (1 << 20, 1 << 24, 1 << 12)
#: The push kernel has no other.
_PUSH_TOP_K = (1, 2, 4, 6, 8)


def work_of(problem: Problem) -> int:
    """Multiply-adds of all live slots, at most."""
    return sum(problem.tokens) * problem.top_k * 3 * problem.hidden * problem.intermediate


def least_sizes(scheme: Scheme) -> dict[str, int]:
    """hidden and intermediate, the least that a kernel takes and always gets right: with FP8 per tensor FlashInfer
    0.7.4 takes an intermediate of 64, and may give other bits at every launch."""
    intermediate = max(scheme.intermediate_multiple, 128 * (scheme.weights is Weights.FP8_PER_EXPERT))
    return {"hidden": scheme.hidden_multiple, "intermediate": intermediate}


def _drawn(draw: random.Random, name: str, options: Mapping[str, Any]) -> Problem:
    scheme = find_scheme(name, **options)
    while True:
        problem = _candidate(draw, scheme, options)
        if problem is not None and _small_enough(problem, scheme):
            return problem


def _small_enough(problem: Problem, scheme: Scheme) -> bool:
    weights = problem.num_experts * 3 * problem.hidden * problem.intermediate
    found = weights, work_of(problem), sum(problem.tokens) * problem.hidden
    most = _MOST_SLOW if scheme.weights in NOT_EMULATED else _MOST
    most = _MOST_STORED if scheme.combine is Combine.ON_ARRIVAL else most
    return all(n <= limit for n, limit in zip(found, most, strict=True))


def _candidate(draw: random.Random, scheme: Scheme, options: Mapping[str, Any]) -> Problem | None:
    chosen = dict(options)
    if draw.random() < 0.5 and scheme.swiglu is Swiglu.UP_FIRST:
        chosen["gate_up_clamp"] = draw.choice(_CLAMPS)
    static = scheme.stage is not None and scheme.stage.source is ScaleSource.STATIC
    if static:
        for name in ("fc1_activation_dequant_scale", "fc2_activation_dequant_scale"):
            chosen[name] = draw.choice(_STATIC_SCALES)
    # A K tile of 256 takes whole tiles.
    least = {name: max(size, options.get("mma_tiler_k", 0)) for name, size in least_sizes(scheme).items()}
    ordinary = scheme.combine is Combine.GROUPED  # its order of arrival shows when terms are far apart
    fields: dict[str, Any] = {
        "tokens": (draw.choice(_TOKENS),),
        "num_experts": draw.choice(_EXPERTS),
        "top_k": draw.choice(_PUSH_TOP_K) if scheme.name == PUSH else draw.randint(1, 8),
        **{name: size * draw.choice(_STEPS) for name, size in least.items()},
        "values": "normal" if ordinary or draw.random() < 0.4 else draw.choice(list(VALUES)),
        "routing": "uniform" if ordinary or draw.random() < 0.4 else draw.choice(list(ROUTING)),
        "padding": draw.choice((0, 0, 0, 3)),
        "dense_weights": scheme.name == NVFP4 and draw.random() < 0.25,
        "quantize_input": scheme.stage is None or not scheme.quantized_inputs or draw.random() < 0.8,
        "seed": draw.randint(1, 9999),
    }
    try:
        return Problem(scheme.name, chosen, **fields)
    except ValueError:
        return None  # more slots than experts, or than the routing has


def _drawn_entries() -> Iterator[Entry]:
    draw = random.Random(20261201)
    for name, options, count in _VARIANTS:
        for _ in range(count):
            problem = _drawn(draw, name, options)
            yield Entry(_sizes(problem), problem)


def _sizes(problem: Problem) -> str:
    more = [f"{problem.values} values"] * (problem.values != "normal") + [f"{problem.routing} routing"] * (
        problem.routing != "uniform"
    )
    more += ["padding"] * bool(problem.padding) + ["bf16 weights"] * problem.dense_weights
    more += ["quantized before"] * (not problem.quantize_input)
    return (
        f"T {sum(problem.tokens)}, E {problem.num_experts}, k {problem.top_k}, H {problem.hidden}, "
        f"I {problem.intermediate}" + "".join(f", {text}" for text in more)
    )


def _edges() -> Iterator[Entry]:
    """The ends of every range, by each arithmetic."""
    for name, options in ARITHMETICS:
        scheme = find_scheme(name, **options)
        least = least_sizes(scheme)
        few = _PUSH_TOP_K if name == PUSH else range(1, 9)
        ends: tuple[dict[str, Any], ...] = (
            least | {"tokens": (1,), "num_experts": 1, "top_k": 1},
            least | {"tokens": (0,)},
            *(least | {"tokens": (7,), "num_experts": 16, "top_k": top_k} for top_k in few),
            {
                "tokens": (33,),
                "num_experts": 64,
                "top_k": 6,
                "hidden": 256,
                "intermediate": scheme.intermediate_multiple,
            },
            {"tokens": (1024,), "num_experts": 4, "top_k": 1, "hidden": 512, "intermediate": 128},
            {"tokens": (1024,), "num_experts": 4, "top_k": 2, "hidden": 2048, "intermediate": 128},
            {"tokens": (1024,), "num_experts": 8, "top_k": 4, "hidden": 2048, "intermediate": 128, "routing": "skewed"},
        )
        for sizes in ends[: -2 if scheme.weights in NOT_EMULATED else None]:
            problem = Problem(name, options, **sizes, seed=7)
            yield Entry(_sizes(problem), problem)
    for name, options in (ARITHMETICS[0], ARITHMETICS[3]):
        problem = Problem(name, options, tokens=(3,), num_experts=1, top_k=1, hidden=2048, intermediate=7168, seed=8)
        yield Entry(_sizes(problem), problem)


def entries() -> list[Entry]:
    """Everything but the knobs that may not change bits, in a fixed order."""
    return [*_edges(), *_drawn_entries()]


def knob_entries(knobs_of: Callable[[Problem], Iterable[Mapping[str, Any]]]) -> list[Entry]:
    """One problem of each arithmetic under every setting that `knobs_of` lists for it."""
    found = []
    for name, options in (*ARITHMETICS, (NVFP4, {"nvfp4_kperm": 0}), (FP8, _BLOCKWISE | _E5M2)):
        problem = Problem(name, options, (70,), 4, 2, hidden=512, intermediate=256, routing="masked", seed=9)
        settings = list(knobs_of(problem))
        title = "knobs, setting {} of " + str(len(settings))
        found += [Entry(title.format(n), problem, config) for n, config in enumerate(settings, 1)]
    return found
