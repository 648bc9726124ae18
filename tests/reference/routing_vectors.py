"""Run FlashInfer's and vLLM's routing references on a CPU and keep their answers for the tests, which need neither.

    python tests/reference/routing_vectors.py --flashinfer DIR --vllm DIR [--triton DIR]

DIR: the package folders of FlashInfer 0.7.4 and vLLM 0.33.0 (unpacked wheels do). Their functions are taken out of the
source files as they are, since the packages do not import on a machine without a GPU. Kernels written in Triton run in
Triton's interpreter.

torch.topk on a CPU breaks ties as it pleases, and so do references that call it. They run twice: as they are, which is
reported, and with a stable torch.topk, lower id first as the kernels have it, whose answers are kept.
"""

import argparse
import ast
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from routing_cases import CASES, VECTORS, Case, bias_of

Answer = tuple[torch.Tensor, torch.Tensor]  # ids, weights


def stable_topk(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def functions(path: Path, names: tuple[str, ...], **namespace: object) -> SimpleNamespace:
    """Functions and classes of a source file by name, without decorators, in a namespace of our own."""
    found = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
    ]
    for node in found:
        node.decorator_list = []
    scope: dict[str, Any] = {"torch": torch, **namespace}
    source = "from __future__ import annotations\n" + "\n\n".join(ast.unparse(node) for node in found)
    exec(compile(source, str(path), "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


def flashinfer_peers(root: Path) -> dict[str, Callable[[Case], Answer]]:
    kinds = ("default", "renormalize", "renormalize_naive", "topk", "llama4", "ds")
    names = tuple(f"_trtllm_fp8_block_scale_moe_{kind}_routing_reference" for kind in kinds)
    file = root / "trace" / "templates" / "moe.py"

    def experts(*args: Any, **_: Any) -> Answer:  # stands for the experts: what they are called with
        return args[7], args[6]

    module = functions(file, (*names, "_hash_topk_reference"), _fp8_moe_run_experts=experts)
    fused = functions(root / "trace" / "templates" / "sampling.py", ("_fused_topk_deepseek_reference",))

    def standard(name: str) -> Callable[[Case], Answer]:
        def run(case: Case) -> Answer:
            groups = dict(zip(("n_group", "topk_group"), case.groups or (), strict=False))
            tensors = ("hidden_states", "gemm1_weights", "gemm2_weights")
            unused = dict.fromkeys([*tensors, *(f"{name}_scale" for name in tensors)])
            return getattr(module, name)(
                routing_logits=case.logits,
                routing_bias=bias_of(case.bias, case.experts),
                top_k=case.top_k,
                local_expert_offset=0,
                routed_scaling_factor=case.factor,
                **unused,
                **groups,
            )

        return run

    def fused_topk(case: Case) -> Answer:
        weights = torch.empty(len(case.logits), case.top_k)
        ids = torch.empty(len(case.logits), case.top_k, dtype=torch.int32)
        bias = bias_of(case.bias, case.experts)
        fused._fused_topk_deepseek_reference(case.logits, bias, *case.groups, case.top_k, case.factor, weights, ids)
        return ids, weights

    def hashed(case: Case) -> Answer:
        weights, ids = module._hash_topk_reference(case.logits, *case.table)
        return ids, weights

    peers = {f"fi_{kind}": standard(name) for kind, name in zip(kinds, names, strict=True)}
    return {**peers, "fi_fused": fused_topk, "fi_hash": hashed}


def vllm_peers(root: Path) -> dict[str, Callable[[Case], Answer]]:
    layers, models = root / "model_executor" / "layers" / "fused_moe" / "router", root / "model_executor" / "models"
    envs = SimpleNamespace(
        VLLM_USE_FUSED_MOE_GROUPED_TOPK=False, VLLM_BATCH_INVARIANT=True, VLLM_MOE_SKIP_PADDING=False
    )
    aiter = SimpleNamespace(is_fused_moe_enabled=lambda: True)  # the way to the torch part
    grouped = functions(layers / "grouped_topk_router.py", ("grouped_topk",), envs=envs).grouped_topk
    biased = functions(
        layers / "fused_topk_bias_router.py",
        ("fused_topk_bias",),
        envs=envs,
        rocm_aiter_ops=aiter,
        _aiter_get_num_expert_group=lambda experts: 1,
        _aiter_can_use_biased_grouped_topk=lambda experts, topk: False,
    ).fused_topk_bias
    cpu = functions(layers / "cpu_router.py", ("_grouped_topk", "_softmax_topk"))
    fast_topk = functions(models / "utils.py", ("fast_topk",)).fast_topk
    llama4 = functions(models / "llama4.py", ("custom_routing_function",), fast_topk=fast_topk).custom_routing_function
    cohere = functions(models / "cohere2_moe.py", ("token_choice_with_bias",)).token_choice_with_bias

    def swapped(function: Callable[[Case], Answer]) -> Callable[[Case], Answer]:
        return lambda case: function(case)[::-1]  # vLLM returns weights first

    def run_grouped(score: str) -> Callable[[Case], Answer]:
        return swapped(
            lambda c: grouped(c.logits, c.logits, c.top_k, True, *c.groups, score, c.factor, bias_of(c.bias, c.experts))
        )

    def run_biased(score: str, renormalize: bool) -> Callable[[Case], Answer]:
        return swapped(
            lambda c: biased(
                c.logits,
                c.logits,
                score,
                bias_of(c.bias, c.experts),
                c.top_k,
                renormalize,
                routed_scaling_factor=c.factor,
            )
        )

    return {
        "vllm_grouped_sigmoid": run_grouped("sigmoid"),
        "vllm_grouped_softmax": run_grouped("softmax"),
        "vllm_bias_sigmoid": run_biased("sigmoid", True),
        "vllm_bias_softmax": run_biased("softmax", True),
        "vllm_bias_raw": run_biased("sigmoid", False),
        "vllm_cpu_grouped": swapped(
            lambda c: cpu._grouped_topk(
                c.logits, c.top_k, True, *c.groups, "sigmoid", c.factor, bias_of(c.bias, c.experts)
            )
        ),
        "vllm_cpu_softmax": swapped(lambda c: cpu._softmax_topk(c.logits, c.top_k, False)),
        "vllm_cpu_renormalize": swapped(lambda c: cpu._softmax_topk(c.logits, c.top_k, True)),
        "vllm_llama4": swapped(lambda c: llama4(c.logits, c.logits, c.top_k, False)),
        "vllm_cohere": swapped(lambda c: cohere(c.logits, c.logits, c.top_k, True)),
        "vllm_cohere_raw": swapped(lambda c: cohere(c.logits, c.logits, c.top_k, False)),
    }


def dsv4_peer(root: Path) -> Callable[[Case], Answer]:
    """vLLM's Triton kernel, in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    path = root / "model_executor" / "layers" / "fused_moe" / "router" / "dsv4_topk.py"
    kernel = next(
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "_dsv4_topk_kernel"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write("import triton\nimport triton.language as tl\n" + ast.unparse(kernel))
    spec = importlib.util.spec_from_file_location("dsv4_kernel", file.name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(case: Case) -> Answer:
        tokens = len(case.logits)
        weights = torch.empty(tokens, 6)
        ids = torch.empty(tokens, 6, dtype=torch.int64)
        bias = bias_of(case.bias, case.experts)
        flags = {"HAS_PADDING": False, "HAS_VL": False, "num_warps": 1, "launch_pdl": False}
        with np.errstate(all="ignore"):
            module._dsv4_topk_kernel[(tokens,)](
                *(case.logits, bias, None, weights, ids, case.factor, None, None, 0),
                NUM_EXPERTS=case.experts,
                BLOCK_N=case.experts,
                **flags,
            )
        return ids, weights

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flashinfer", type=Path, required=True)
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--triton", type=Path, help="where triton is, if it does not import")
    args = parser.parse_args()
    if args.triton:
        sys.path.append(str(args.triton))
    peers = {**flashinfer_peers(args.flashinfer), **vllm_peers(args.vllm), "vllm_dsv4": dsv4_peer(args.vllm)}
    arrays: dict[str, np.ndarray] = {}
    for name, case in CASES.items():
        raw_ids, _ = peers[case.peer](case)
        with patch.object(torch, "topk", stable_topk), patch.object(torch.Tensor, "topk", stable_topk):
            ids, weights = peers[case.peer](case)
        as_is = (raw_ids.sort(-1).values == ids.sort(-1).values).all(-1).sum()
        print(f"{name:45} {as_is:3} of {len(ids)} rows select the same with torch.topk as it is")
        arrays[f"{name}: ids"] = ids.numpy().astype(np.int16)
        arrays[f"{name}: weights"] = weights.float().numpy()
        arrays[f"{name}: as is"] = np.asarray(as_is, dtype=np.int16)
    VECTORS.parent.mkdir(exist_ok=True)
    np.savez_compressed(VECTORS, **arrays)  # type: ignore[arg-type]
    print(f"{VECTORS}: {VECTORS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
