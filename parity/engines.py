"""Which implementation runs a layer: one rule, for callers that want the bits and do not mind who computes them."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from fp4ep.optimized.emulation import NOT_EMULATED
from fp4ep.optimized.engine_cpu import fast_forward, missing_for_engine
from fp4ep.optimized.engine_cuda import cuda_forward, missing_for_cuda_engine
from fp4ep.reference.moe import moe_forward_ranks
from fp4ep.reference.scheme import Scheme
from fp4ep.reference.types import Trace


@dataclass(frozen=True)
class Engine:
    """forward: called as `moe_forward_ranks` is, for the same Trace; missing: why it cannot run here, None: it can."""

    name: str
    forward: Callable[..., Trace]
    missing: Callable[[], str | None]

    def refuses(self, scheme: Scheme) -> str | None:
        """What keeps the engine from running the scheme here; None: nothing."""
        if self.forward is not moe_forward_ranks and scheme.weights in NOT_EMULATED:
            return f"it has no {NOT_EMULATED[scheme.weights]}, which {scheme} needs"
        return self.missing()


#: Fastest first.
ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("cuda", cuda_forward, missing_for_cuda_engine),
        Engine("cpu", fast_forward, missing_for_engine),
        Engine("reference", moe_forward_ranks, lambda: None),
    )
}


def choose_engine(scheme: Scheme, engine: str = "auto") -> Engine:
    """The engine of that name or, for "auto", the fastest that can run the scheme here.

    All give the same bits. Where "auto" is left with the reference, a warning says why, once for each reason. Raises
    ValueError for an unknown name, and for an engine that cannot run the scheme here.
    """
    if engine == "auto":
        refused = {name: each.refuses(scheme) for name, each in ENGINES.items()}
        name = next(name for name, reason in refused.items() if reason is None)
        if name == "reference":
            _notice("; ".join(f"{name}: {reason}" for name, reason in refused.items() if reason))
        return ENGINES[name]
    if engine not in ENGINES:
        raise ValueError(f"engine: {engine!r} is not one of auto, {', '.join(sorted(ENGINES))}")
    if reason := ENGINES[engine].refuses(scheme):
        raise ValueError(f"engine: {engine!r} cannot run here: {reason}")
    return ENGINES[engine]


@cache
def _notice(reasons: str) -> None:
    warnings.warn(f"the layer runs on the reference, which is slow ({reasons})", stacklevel=3)
