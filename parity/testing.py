"""Parity in a test suite: `assert_parity` for a layer of one's own. `pytest_plugin.py` adds fixtures and an option."""

import re
from collections.abc import Sequence
from contextvars import ContextVar
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console

from fp4ep.reference.moe import moe_forward
from fp4ep.reference.types import Trace

from .compare import Comparison, compare
from .diagnose import diagnose
from .problem import Layer, Problem
from .run import REFERENCE, Claim, Run, outputs_as_trace, save_run
from .summary import print_comparison

#: Where failures are saved, one folder each; None: nowhere. The plugin sets it from `--fp4ep-report`.
report_folder: ContextVar[Path | None] = ContextVar("report_folder", default=None)


def assert_parity(
    layer: Layer | Problem,
    found: torch.Tensor | Sequence[torch.Tensor] | Trace,
    claim: Claim = Claim.BITS,
    *,
    side: str = "layer under test",
) -> Comparison:
    """Compare what a layer computed with the reference, and raise AssertionError when it breaks its claim.

    layer: what it was given, tokens of every EP rank included. found: its output, `[T, H]` bf16, a list with one for
    each rank, or a Trace with whatever stages it can show (then the first wrong stage is named). claim: BITS for a
    kernel that computes what the scheme says; FLOAT32 for an emulation in float32, which gets the derived tolerance.
    Returns the comparison. The error says what differs first, where, and what it looks like; with a report folder both
    runs and an HTML page (where matplotlib is installed) are left there.

    Raises ValueError when the outputs' number, shapes or dtypes are not those of the layer.
    """
    __tracebackhide__ = True
    problem = layer if isinstance(layer, Problem) else None
    built = layer.build() if isinstance(layer, Problem) else layer
    trace = found if isinstance(found, Trace) else _black_box(built, found)
    _, expected = moe_forward(built.scheme, built.weights, built.inputs)
    left = Run(REFERENCE, Claim.BITS, built, expected, problem)
    comparison = compare(left, Run(side, claim, built, trace, problem))
    if comparison.passed:
        return comparison
    diagnoses = diagnose(comparison)
    text = StringIO()
    print_comparison(comparison, diagnoses, Console(file=text, width=120, no_color=True))
    raise AssertionError(f"{side} breaks its claim of {claim.value}\n{text.getvalue()}{_save(comparison, diagnoses)}")


def _black_box(layer: Layer, outputs: torch.Tensor | Sequence[torch.Tensor]) -> Trace:
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    shapes = [(torch.bfloat16, tuple(x.hidden_states.shape)) for x in layer.inputs]
    got = [(output.dtype, tuple(output.shape)) for output in outputs]
    if got != shapes:
        raise ValueError(f"found must be one output for each rank, {shapes}, got {got}")
    return outputs_as_trace([output.detach().cpu() for output in outputs])


def _save(comparison: Comparison, diagnoses: Sequence) -> str:
    """Both runs and a page in a folder of their own. Returns a line that says where."""
    folder = report_folder.get()
    if folder is None:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    save_run(comparison.left, folder / "left.safetensors")
    save_run(comparison.right, folder / "right.safetensors")
    try:
        from .html import write_page

        write_page(comparison, diagnoses, folder / "report.html")
    except ImportError as error:
        return f"saved in {folder} (no page: {error})\n"
    return f"saved in {folder}\n"


def folder_name(test: str) -> str:
    """A test's id as the name of a folder."""
    return re.sub(r"[^\w.=-]+", "_", test).strip("_")
