"""The reference with the engine's tensor core in place of its own, for tests of what stands around the instruction.

Every rule of a scheme is still read and applied by the reference: chunks, orders of K, scales, quantizers, combine.
tests/optimized/test_engine_gemm.py and `fp4ep replay` hold the two tensor cores together, bit for bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fp4ep.optimized import engine_cpu
from fp4ep.reference import gemm, layer, tensor_core
from fp4ep.reference.tensor_core import HOPPER_BF16, HOPPER_E4M3, HOPPER_E5M2, TensorCore

COMPILED = (HOPPER_E4M3, HOPPER_E5M2, HOPPER_BF16)


def matmul(core: TensorCore, a: torch.Tensor, b: torch.Tensor, **given: Any) -> torch.Tensor:
    """`tensor_core.matmul`, by the engine's loops where it has them; takes what that takes."""
    if core in COMPILED and given.get("scales") is None:
        return engine_cpu.matmul(core, a, b, c=given.get("c"))
    return tensor_core.matmul(core, a, b, **given)


@contextmanager
def compiled_tensor_core() -> Iterator[None]:
    """On one thread: test runs have a process for each core. Without numba nothing changes: the same bits, slower."""
    if engine_cpu.missing_for_engine() is not None:
        yield
        return
    import numba

    before = numba.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "matmul", matmul)
        patch.setattr(layer, "matmul", matmul)
        numba.set_num_threads(1)
        yield
        numba.set_num_threads(before)
