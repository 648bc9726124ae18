"""Parity of two implementations of one layer: recordings and their replay, problems, comparison, tolerances."""

from .compare import Comparison, Difference, compare
from .diagnose import Diagnosis, diagnose
from .launch import launch
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
    "Problem",
    "Recording",
    "RecordingError",
    "RecordingWriter",
    "Result",
    "Run",
    "RunError",
    "assert_parity",
    "compare",
    "diagnose",
    "find_side",
    "launch",
    "load_run",
    "problems",
    "replay_cases",
    "save_run",
    "shipped_recordings",
]
