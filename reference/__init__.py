"""What the megakernels compute, bit for bit, in plain PyTorch on the CPU.

Read `schemes.py` for one kernel's record, then `moe.py` for the layer that runs any of them.
"""

from .formats import E2M1, E4M3, E5M2, UE8M0, Format, Overflow, decode, encode, pack_e2m1, unpack_e2m1
from .moe import moe_forward
from .quantize import (
    dequantize_mx,
    dequantize_nvfp4,
    quantize_activation,
    quantize_mx,
    quantize_nvfp4,
    quantize_nvfp4_with_norm,
)
from .scales import ScaleRule, ue8m0_scale
from .scheme import Evidence, Scheme
from .schemes import SCHEMES, find_scheme
from .tensor_core import BLACKWELL_NVFP4, HOPPER_BF16, HOPPER_E4M3, HOPPER_E5M2, TensorCore, matmul
from .types import Exactness, MoEInputs, MoEWeights, Stage, Trace
from .validate import InputError

__all__ = [
    "BLACKWELL_NVFP4",
    "E2M1",
    "E4M3",
    "E5M2",
    "HOPPER_BF16",
    "HOPPER_E4M3",
    "HOPPER_E5M2",
    "SCHEMES",
    "UE8M0",
    "Evidence",
    "Exactness",
    "Format",
    "InputError",
    "MoEInputs",
    "MoEWeights",
    "Overflow",
    "ScaleRule",
    "Scheme",
    "Stage",
    "TensorCore",
    "Trace",
    "decode",
    "dequantize_mx",
    "dequantize_nvfp4",
    "encode",
    "find_scheme",
    "matmul",
    "moe_forward",
    "pack_e2m1",
    "quantize_activation",
    "quantize_mx",
    "quantize_nvfp4",
    "quantize_nvfp4_with_norm",
    "ue8m0_scale",
    "unpack_e2m1",
]
