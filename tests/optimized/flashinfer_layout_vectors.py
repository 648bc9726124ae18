"""Makes data/layouts_flashinfer_0_7_4.json: digests of the layouts that FlashInfer's own code gives, on the CPU.

    python tests/optimized/flashinfer_layout_vectors.py DEEP_GEMM_CHECKOUT

Needs FlashInfer 0.7.4 with nvidia-cutlass-dsl, and a source checkout of DeepGEMM, of which two Python functions are
taken. FlashInfer's preparation runs whole, with three parts replaced: its check for CUDA tensors; the fp4_fp8 nibble
shuffle, a CUDA kernel, by ours (test_layouts.py has a literal statement of it, the live kernels' recordings prove it);
and DeepGEMM's scale packing, a CUDA kernel, by the torch function that DeepGEMM tests it against.
"""

import ast
import json
import subprocess
import sys
import types
import typing
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from layout_cases import CASES, Case, canonical, digest

from fp4ep.optimized.layouts import interleave_fp4_fp8
from fp4ep.reference.formats import E4M3, decode
from fp4ep.reference.types import MoEWeights

VECTORS = Path(__file__).parent / "data" / "layouts_flashinfer_0_7_4.json"
#: Packages of FlashInfer whose modules have the same names, so that each needs a process of its own.
FAMILIES = {
    "cutedsl": "sm100",
    "deep_gemm": "sm100",
    "sm90_nvfp4": "sm90",
    "sm90_mxfp4": "sm90",
    "sm90_fp8": "sm90",
    "sm90_bf16": "sm90",
}


def states(case: Case, deep_gemm: Path) -> dict[str, torch.Tensor]:
    """FlashInfer's kernel weights, as vLLM's `kernel_weights` returns them, and the decode vectors beside them."""
    import flashinfer.fused_moe.prepare as prepare
    from flashinfer.moe_ep.backends.mega.kernel import sm90, sm100
    from flashinfer.moe_ep.weights import MoEWeightPack

    weights = canonical(case)
    sizes = {"intermediate_size": case.intermediate, "hidden_size": case.hidden}
    shuffle = mock.patch.object(
        prepare, "interleave_moe_weights_for_sm90_mixed_gemm", lambda w, quant_type="fp4_fp8": interleave_fp4_fp8(w)
    )
    with shuffle, mock.patch.object(torch.Tensor, "is_cuda", True, create=True):
        pack = MoEWeightPack(weights.w13, weights.w2, weights.w13_scale, weights.w2_scale)
        if case.kernel == "cutedsl":
            from flashinfer.moe_ep.backends.mega.kernel.sm100.nvfp4_nvfp4_bf16_cutedsl import weights as module

            legs = module.preprocess_mega_weights(pack, **sizes)
        elif case.kernel == "deep_gemm":
            from flashinfer.moe_ep.backends.mega.kernel.sm100.fp8_fp4_bf16_deepgemm import weights as module

            sys.modules["deep_gemm"] = deep_gemm_functions(deep_gemm)
            legs = module.preprocess_mega_weights(pack, **sizes)
        elif case.kernel == "sm90_nvfp4":
            from flashinfer.moe_ep.backends.mega.kernel.sm90.fp8_nvfp4_bf16_pull_cutedsl import weights as module

            given = {name: tensor for name, tensor in vars(weights).items() if tensor is not None}
            legs = module.preprocess_mega_weights(
                module.Nvfp4WeightPack(**given), nvfp4_kperm=case.options["kperm"], **sizes
            )
        elif case.kernel == "sm90_mxfp4":
            from flashinfer.moe_ep.backends.mega.kernel.sm90.fp8_mxfp4_bf16_pull_cutedsl import weights as module

            legs = module.preprocess_mega_weights(pack, **sizes)
        elif case.kernel == "sm90_fp8":
            from flashinfer.moe_ep.backends.mega.kernel.sm90.fp8_fp8_bf16_pull_cutedsl import weights as module

            mode = "blockwise" if case.blockwise else "per_tensor"
            legs = module.preprocess_mega_weights(
                MoEWeightPack(*dense_fp8(case, weights)), fp8_scale_mode=mode, **sizes
            )
        else:
            from flashinfer.moe_ep.backends.mega.kernel.sm90.bf16_bf16_bf16_pull_cutedsl import weights as module

            legs = [(leg,) for leg in module.preprocess_mega_weights(pack, **sizes)]
    assert sm90, sm100
    state = {}
    for name, leg in zip(("fc1", "fc2"), legs, strict=True):
        parts = dict(zip(("weight", "scale", "activation", "alpha"), leg, strict=False))
        parts.pop("activation", None)
        state |= {f"{name}_{part}": expert_major(tensor) for part, tensor in parts.items() if tensor is not None}
    return state


def dense_fp8(case: Case, weights: MoEWeights) -> list[torch.Tensor]:
    """bf16 weights that FlashInfer quantizes to the case's codes and scales: every scale block holds +448."""
    dense = []
    for codes, scale, parts in ((weights.w13, weights.w13_scale, 2), (weights.w2, weights.w2_scale, 1)):
        if case.blockwise:  # scale row b covers 128 / parts rows of each part, from row b * 128 / parts
            rows = scale.repeat_interleave(128 // parts, 1).repeat(1, parts, 1)
            spread = rows.repeat_interleave(128, 2)
        else:
            spread = scale[:, None, None]
        dense.append((decode(codes, E4M3) * spread).bfloat16())
    return dense


def expert_major(tensor: torch.Tensor) -> torch.Tensor:
    """vLLM's `_expert_major_bytes`, restated: undo the transposed view, show one-byte dtypes as uint8."""
    tensor = tensor if tensor.is_contiguous() else tensor.transpose(1, 2)
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def deep_gemm_functions(checkout: Path) -> types.ModuleType:
    """What FlashInfer calls of DeepGEMM, from its Python sources."""

    def align(x: int, multiple: int) -> int:
        return -(-x // multiple) * multiple

    scope = vars(typing) | {
        "torch": torch,
        "align": align,
        "get_tma_aligned_size": lambda size, itemsize: align(size, 16 // itemsize),
    }
    wanted = ("_interleave_weights", "_transpose_sf_for_utccp", "transform_weights_for_mega_moe")
    packing = "get_mn_major_tma_aligned_packed_ue8m0_tensor_torch_impl"
    for file, names in (("deep_gemm/mega/__init__.py", wanted), ("tests/test_layout.py", (packing,))):
        tree = ast.parse((checkout / file).read_text())
        tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
        exec(compile(tree, file, "exec"), scope)
    module = types.ModuleType("deep_gemm")
    module.transform_weights_for_mega_moe = scope["transform_weights_for_mega_moe"]
    module.transform_sf_into_required_layout = lambda sf, n, k, recipe, groups: scope[packing](sf)
    return module


def main() -> None:
    checkout = Path(sys.argv[1])
    if len(sys.argv) == 3:
        cases = [case for case in CASES if FAMILIES[case.kernel] == sys.argv[2]]
        found = {str(c): {name: digest(t) for name, t in states(c, checkout).items()} for c in cases}
        print(json.dumps(found))
        return
    vectors: dict = {}
    for family in sorted(set(FAMILIES.values())):
        out = subprocess.run(
            [sys.executable, __file__, checkout, family], check=True, stdout=subprocess.PIPE, text=True
        )
        vectors |= json.loads(out.stdout.splitlines()[-1])
    VECTORS.parent.mkdir(exist_ok=True)
    VECTORS.write_text(json.dumps({str(case): vectors[str(case)] for case in CASES}, indent=1) + "\n")


if __name__ == "__main__":
    main()
