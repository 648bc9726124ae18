"""Parity of two implementations of one layer: recordings and their replay, problems, comparison, tolerances.

The verbs are functions of the modules of their name: `compare.compare`, `diagnose.diagnose`, `launch.launch`.
"""

from .compare import Comparison, Difference
from .diagnose import Diagnosis
from .load import Load, load_of
from .problem import CASES, Layer, Problem, problems
from .recording import Case, Recording, RecordingError, RecordingWriter
from .replay import Result, replay_cases, shipped_recordings
from .run import Claim, Run, RunError, load_run, save_run
from .sides import find_side
from .testing import assert_parity

__all__ = [
    "CASES",
    "Case",
    "Claim",
    "Comparison",
    "Diagnosis",
    "Difference",
    "Layer",
    "Load",
    "Problem",
    "Recording",
    "RecordingError",
    "RecordingWriter",
    "Result",
    "Run",
    "RunError",
    "assert_parity",
    "find_side",
    "load_of",
    "load_run",
    "problems",
    "replay_cases",
    "save_run",
    "shipped_recordings",
]
