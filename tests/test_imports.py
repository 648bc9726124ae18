"""The import rule, from the syntax tree: parity -> optimized -> reference -> torch, numpy, and nothing back.

optimized takes descriptions from reference, never arithmetic: a bug in shared arithmetic would cancel out.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("reference", "optimized", "parity")

#: Which of the three a package may import.
ALLOWED = {"reference": {"reference"}, "optimized": {"reference", "optimized"}, "parity": set(PACKAGES)}
#: What optimized may take from reference: these modules, and measured tables.
DESCRIPTIONS = {"scheme", "schemes", "formats", "types"}
KERNEL_LIBRARIES = {"flashinfer": "flashinfer_", "cutlass": "flashinfer_", "vllm": ("flashinfer_", "vllm_")}
REFERENCE_LIBRARIES = {"torch", "numpy", "fp4ep"} | set(sys.stdlib_module_names)


def imports(tree: ast.AST, package: str, inside: bool = False) -> Iterator[tuple[str, int, bool]]:
    """(dotted name, line, inside a function) of every import; `from a import b` counts as a.b, `from .` as fp4ep."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, inside
        elif isinstance(node, ast.ImportFrom):
            base = {0: [], 1: ["fp4ep", package], 2: ["fp4ep"]}[node.level]
            for alias in node.names:
                yield ".".join([*base, *([node.module] if node.module else []), alias.name]), node.lineno, inside
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            name = node.args[0]
            yield name.value if isinstance(name, ast.Constant) else "a computed name", node.lineno, inside
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed", node.lineno, inside
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(node, package, inside or function)


def violations(source: str, package: str, file: str = "module.py") -> list[str]:
    """What breaks the rule in one file of a package."""
    found = []
    for name, line, inside in imports(ast.parse(source), package):
        reason = _reason(name.split("."), package, file, inside)
        if reason:
            found.append(f"{package}/{file}:{line}: {name}: {reason}")
    return found


def _reason(name: list[str], package: str, file: str, inside: bool) -> str | None:
    top = name[0]
    if top in PACKAGES:
        return f"import fp4ep.{top}"
    if top in KERNEL_LIBRARIES and not inside:
        return "import it inside a function"
    if top in KERNEL_LIBRARIES and not file.startswith(KERNEL_LIBRARIES[top]):
        return f"only in files named {KERNEL_LIBRARIES[top]}*"
    if package == "reference" and (top not in REFERENCE_LIBRARIES or name[:2] == ["torch", "distributed"]):
        return "reference needs torch, numpy and the standard library only"
    if top == "fp4ep" and (len(name) == 1 or name[1] not in ALLOWED[package]):
        return f"{package} may import {' and '.join(sorted(ALLOWED[package]))}"
    if package == "optimized" and name[:2] == ["fp4ep", "reference"]:
        table = name[2:3] == ["special"] and len(name) > 3 and name[3].endswith("_table")
        if not table and (len(name) < 3 or name[2] not in DESCRIPTIONS):
            return f"optimized may take {', '.join(sorted(DESCRIPTIONS))} and measured tables from reference"
    return None


@pytest.mark.parametrize("package", PACKAGES)
def test_package_keeps_the_rule(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    assert [v for f in files for v in violations(f.read_text(encoding="utf-8"), package, f.name)] == []


@pytest.mark.parametrize(
    ("package", "source", "file"),
    [
        ("reference", "import triton", "a.py"),
        ("reference", "def f():\n    from numba import njit", "a.py"),
        ("reference", "import torch.distributed as dist", "a.py"),
        ("reference", "from torch import distributed", "a.py"),
        ("reference", "import torch\ntorch.distributed.barrier()", "a.py"),
        ("reference", "def f():\n    import flashinfer", "flashinfer_a.py"),
        ("reference", "from fp4ep.optimized import engine", "a.py"),
        ("reference", "from ..parity import compare", "a.py"),
        ("reference", "from .. import optimized", "a.py"),
        ("reference", "from reference.formats import E2M1", "a.py"),
        ("reference", "import rich", "a.py"),
        ("reference", "import importlib\nimportlib.import_module('triton')", "a.py"),
        ("reference", "import importlib\nimportlib.import_module('tri' + 'ton')", "a.py"),
        ("optimized", "from fp4ep.reference.quantize import quantize_mx", "a.py"),
        ("optimized", "from fp4ep.reference import gemm", "a.py"),
        ("optimized", "from ..reference.fp32 import RECIPROCAL_E4M3_MAX", "a.py"),
        ("optimized", "from fp4ep.reference.special import ex2_approx", "a.py"),
        ("optimized", "from fp4ep import reference", "a.py"),
        ("optimized", "import fp4ep.reference", "a.py"),
        ("optimized", "import fp4ep.reference.moe as moe", "a.py"),
        ("optimized", "from fp4ep.parity import report", "a.py"),
        ("optimized", "import flashinfer", "flashinfer_a.py"),
        ("optimized", "class A:\n    import cutlass", "flashinfer_a.py"),
        ("optimized", "if True:\n    from flashinfer.moe_ep import MoEEpLayer", "flashinfer_a.py"),
        ("optimized", "def f():\n    import flashinfer", "a.py"),
        ("optimized", "import vllm", "vllm_a.py"),
        ("optimized", "def f():\n    from vllm import envs", "a.py"),
        ("parity", "import cutlass.cute as cute", "flashinfer_a.py"),
        ("parity", "import parity", "a.py"),
        ("parity", "import fp4ep", "a.py"),
    ],
)
def test_a_violation_is_found(package, source, file):
    assert len(violations(source, package, file)) == 1


@pytest.mark.parametrize(
    ("package", "source", "file"),
    [
        ("reference", "import torch\nimport numpy as np\nimport hashlib\nfrom collections.abc import Iterator", "a.py"),
        ("reference", "from .formats import E2M1\nfrom . import fp32\nimport fp4ep.reference.moe", "a.py"),
        ("reference", "'import triton'  # import triton", "a.py"),
        ("optimized", "import triton\nimport torch.distributed\nfrom . import layouts", "a.py"),
        ("optimized", "from fp4ep.reference.scheme import Scheme\nfrom fp4ep.reference import schemes, types", "a.py"),
        ("optimized", "from ..reference.formats import E2M1\nfrom fp4ep.reference.special import _ex2_table", "a.py"),
        ("optimized", "def f():\n    from flashinfer.moe_ep import MoEEpLayer", "flashinfer_a.py"),
        ("optimized", "def f():\n    from vllm import envs", "vllm_a.py"),
        ("parity", "from fp4ep.reference.moe import moe_forward\nfrom ..optimized import engine\nimport rich", "a.py"),
        ("parity", "async def f():\n    import cutlass", "flashinfer_a.py"),
    ],
)
def test_what_the_rule_allows(package, source, file):
    assert violations(source, package, file) == []
