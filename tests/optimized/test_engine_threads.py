"""The engine leaves torch's number of threads as it found it, whichever OpenMP the two share."""

import os
import subprocess
import sys

import pytest

from fp4ep.optimized.engine_cpu import missing_for_engine

pytestmark = pytest.mark.skipif(missing_for_engine() is not None, reason=str(missing_for_engine()))

PROGRAM = """
import torch
from fp4ep.optimized.engine_cpu import matmul, sigmoid
from fp4ep.reference.tensor_core import HOPPER_E4M3

torch.set_num_threads(1)
sigmoid(torch.ones(3))
matmul(HOPPER_E4M3, torch.ones(4, 32), torch.ones(4, 32))
assert torch.get_num_threads() == 1, torch.get_num_threads()
"""


def test_torch_keeps_its_threads():
    """In a process of its own: numba starts its threads once, four here."""
    environment = os.environ | {"NUMBA_NUM_THREADS": "4", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
