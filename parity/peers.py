"""What other projects' own tests allow a mixture-of-experts layer, beside which ours (no differing bit) can be read.

Facts only: each row names a test and the version or commit where its lines were read; a commit may lie on a branch that
was not merged. References (dequantized weights, unquantized weights, another kernel) and inputs differ from test to
test, so the numbers are no ranking. Terms in `other`; a bare pair of numbers is atol, rtol:

rel-L2               |out - ref| / |ref|, norms over the whole tensor
calc_diff            1 - 2 <out, ref> / (<out, out> + <ref, ref>)
rtol of the output   the test multiplies rtol by the kernel's output, not by the reference
"""

from dataclasses import dataclass
from functools import partial

import torch

from fp4ep.reference.scheme import Weights


@dataclass(frozen=True)
class PeerTolerance:
    """One test: `share` of the elements must be within atol + rtol * |reference|, and `other` must hold."""

    project: str
    weights: tuple[Weights, ...]  #: the families it applies to
    test: str  #: path of the test, or of the helper that holds its numbers, in the project
    atol: float | None
    rtol: float | None
    share: float = 1.0
    other: str = ""  #: further gates, and what the numbers do not say
    seen: str = ""  #: version or commit that was read

    def allowed(self, expected: torch.Tensor) -> torch.Tensor | None:
        """The bound per element in float32; None where the test has no bound per element."""
        if self.atol is None and self.rtol is None:
            return None
        return (self.atol or 0.0) + (self.rtol or 0.0) * expected.float().abs()


NVFP4, MXFP4, BF16 = Weights.NVFP4, Weights.MXFP4, Weights.BF16
W4A4 = Weights.NVFP4_BLOCK_SCALED
TENSOR, BLOCK = Weights.FP8_PER_EXPERT, Weights.FP8_BLOCK_128
SWAPPED = "rtol of the output"

_flashinfer = partial(PeerTolerance, "FlashInfer", seen="commit fb28d7242b35, 2026-08-22")
_vllm = partial(PeerTolerance, "vLLM", seen="0.33.0")
_sglang = partial(PeerTolerance, "SGLang")
_trtllm = partial(PeerTolerance, "TensorRT-LLM", seen="commit 02320c358831")

_PULL = "tests/moe_ep/test_sm90_pull_{}_kernel_vs_reference.py"
_PULL_RANKS = "tests/moe_ep/test_moe_ep_sm90_pull_{}_mega_multirank.py"
_MOE_EP = "tests/moe_ep/test_{}_kernel_vs_reference.py"
_KERNELS = "tests/kernels/moe/test_{}.py"
_REGISTERED = "test/registered/moe/test_{}.py"
#: Used by test_moe_backend.py and test_moe_module.py beside it.
_QUANTIZE = "tests/unittest/_torch/moe/quantize_utils.py"

# fmt: off
PEERS: tuple[PeerTolerance, ...] = (
    # the Hopper megakernels that this project emulates, but for the weight-only NVFP4 one
    _flashinfer((TENSOR, BLOCK), _PULL.format("fp8"), 1e-2, 1e-2, other="rel-L2 < 0.02"),
    _flashinfer((BF16,), _PULL.format("bf16"), 1e-2, 1e-2, other="rel-L2 < 0.02", seen="commit 030b00914379"),
    _flashinfer((MXFP4,), _PULL.format("mxfp4"), 2e-2, 3e-2, other="rel-L2 < 0.035", seen="commit 36a24dd4d67c"),
    _flashinfer((MXFP4,), _PULL_RANKS.format("mxfp4"), 2e-2, 2e-2, other="rel-L2 < 0.025", seen="commit 251f44240a7d"),
    _flashinfer((NVFP4,), _PULL_RANKS.format("nvfp4"), 2e-2, 2e-2, seen="commit b03ee05a67b3",
                other="rel-L2 < 0.005; bf16 activations, a kernel that 0.7.4 does not have"),
    # Blackwell megakernels
    _flashinfer((NVFP4, W4A4), _MOE_EP.format("nvfp4_cutedsl"), None, None,
                other="all within 2e-3 * max|reference| + 0.05 * |reference|; rel-L2 < 0.02"),
    _flashinfer((MXFP4,), _MOE_EP.format("deep_gemm_mega"), 0.15, 0.05, other="rel-L2 < 0.02"),
    # one GPU, without dispatch and combine
    _flashinfer((MXFP4, TENSOR, BLOCK), "tests/moe/test_trtllm_cutlass_fused_moe.py", 0.1, 0.1,
                other=f"{SWAPPED}, but for FP8 blocks; NVFP4: 0.2, 0.2; MXFP4 by FP8 on Hopper: 1e-3, 5e-2"),
    _flashinfer((NVFP4, MXFP4, TENSOR), "tests/moe/trtllm_gen_fused_moe_utils.py", 0.1, 0.85, 0.92,
                f"{SWAPPED}; share 0.79 for FP8 blocks, 0.925 for bf16"),

    _vllm((NVFP4, W4A4, MXFP4), _KERNELS.format("flashinfer_moe_ep"), 0.0, 0.0,
          other="2 and 4 ranks; inputs chosen so that every rounding is exact"),
    _vllm((NVFP4, MXFP4, BF16), _KERNELS.format("deep_gemm_mega_moe"), None, None,
          other="calc_diff < 1e-3; cosine of every token > 0.99"),
    _vllm((NVFP4, W4A4), _KERNELS.format("nvfp4_moe"), 0.1, 0.1, other=SWAPPED),
    _vllm((MXFP4,), _KERNELS.format("ocp_mx_moe"), 0.0, 0.3, 0.8, f"{SWAPPED}; NVIDIA kernels only"),
    _vllm((TENSOR,), _KERNELS.format("cutlass_moe"), 5.5e-2, 1e-2, other=f"{SWAPPED}; atol 0.09 in a CUDA graph"),
    _vllm((BLOCK,), _KERNELS.format("block_fp8"), 0.035, 0.035, other="both 0.039 from 8192 tokens"),
    _vllm((BF16,), _KERNELS.format("moe"), 2e-2, 0.0),

    _sglang((NVFP4, W4A4), _REGISTERED.format("cutedsl_moe"), 5e-2, 5e-2, seen="commit 00deb1e6b124",
            other="wrapper: 92.5% within max(0.1, 3 std) or 85% of |reference|; ranks' sum to one rank's: 0.01, 0.01"),
    _sglang((MXFP4,), _REGISTERED.format("aiter_mxfp4_triton_moe"), None, None, seen="commit 866d733cfdfc",
            other="rel-L2 < 0.01; bf16 activations, AMD gfx942"),
    _sglang((BLOCK,), _REGISTERED.format("hpc_ops_moe"), 0.05, 0.05, seen="commit 05f70dc50332",
            other="cosine > 0.999; one scale per expert: 0.1, 0.1, cosine > 0.99"),
    _sglang((TENSOR, BF16), _REGISTERED.format("fused_moe"), 1e-2, 0.1, seen="commit 071675979c07"),

    _trtllm((NVFP4, W4A4), _QUANTIZE, 0.15, 0.1, 0.97, "I * top_k > 10000: share 0.93; "
            "CuTeDSL MegaMoE above 5000, 10000, 20000: 0.95, 0.92, 0.91"),
    _trtllm((MXFP4,), _QUANTIZE, 0.2, 0.1, 0.85, "H >= 4096: 0.3, 0.15; MXFP8 activations, DeepGEMM MegaMoE included"),
    _trtllm((TENSOR,), _QUANTIZE, 0.1, 4e-2, 0.95),
    _trtllm((BLOCK,), _QUANTIZE, 0.1, 1e-2, other="DeepGEMM: 1.5, 0.02; TRTLLM: 0.1, 0.85, share 0.925"),
    _trtllm((BF16,), _QUANTIZE, 0.2, 0.2, 0.96),
)
# fmt: on


def peers_for(weights: Weights) -> tuple[PeerTolerance, ...]:
    """Of the push kernel's blocks those of blocks: the legs apart or together makes no difference to a tolerance."""
    weights = BLOCK if weights is Weights.FP8_BLOCK_128_APART else weights
    return tuple(peer for peer in PEERS if weights in peer.weights)
