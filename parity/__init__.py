"""Recordings of real kernels, and their replay through the reference."""

from .recording import Case, Recording, RecordingError, RecordingWriter
from .replay import Result, replay_cases, shipped_recordings

__all__ = ["Case", "Recording", "RecordingError", "RecordingWriter", "Result", "replay_cases", "shipped_recordings"]
