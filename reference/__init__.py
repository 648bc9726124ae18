"""What the megakernels compute, bit for bit, in plain PyTorch on the CPU.

Read `schemes.py` for one kernel's record, then `moe.py` for the experts that run any of them, and `layer.py` for what
is around them: router, placement, shared experts.
"""

from .formats import E2M1, E4M3, E5M2, UE8M0, Format, Overflow, decode, encode, pack_e2m1, unpack_e2m1
from .layer import LayerInputs, MoELayer, SharedExperts, moe_layer_forward
from .moe import moe_forward
from .placement import Placement
from .quantize import (
    dequantize_mx,
    dequantize_nvfp4,
    quantize_activation,
    quantize_mx,
    quantize_nvfp4,
    quantize_nvfp4_with_norm,
)
from .routing import Router, Routing, find_router, route
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
    "LayerInputs",
    "MoEInputs",
    "MoELayer",
    "MoEWeights",
    "Overflow",
    "Placement",
    "Router",
    "Routing",
    "ScaleRule",
    "Scheme",
    "SharedExperts",
    "Stage",
    "TensorCore",
    "Trace",
    "decode",
    "dequantize_mx",
    "dequantize_nvfp4",
    "encode",
    "find_router",
    "find_scheme",
    "matmul",
    "moe_forward",
    "moe_layer_forward",
    "pack_e2m1",
    "quantize_activation",
    "quantize_mx",
    "quantize_nvfp4",
    "quantize_nvfp4_with_norm",
    "route",
    "ue8m0_scale",
    "unpack_e2m1",
]
