"""The pages say what is so: their examples, and of the production side its rows, their tests and its measured table."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT.joinpath("docs/moe_ep.md").read_text()


def test_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert names["output"].shape == (4, 256)
    assert names["output"].isfinite().all()
    assert names["output"].any()


def test_example_of_routing_runs():
    (example,) = re.findall(r"```python\n(.*?)```", ROOT.joinpath("docs/routing.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert names["routing"].topk_ids.shape == (4, 8)
    assert names["unrounded"].weight_dtype is not names["router"].weight_dtype


def test_every_row_has_tests():
    rows = [int(row) for row in re.findall(r"^\| (\d+) \| .* \| .* \|$", PAGE, re.MULTILINE)]
    assert rows[:23] == list(range(1, 24))
    tested = set()
    for path in ROOT.joinpath("tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                named = re.match(r"test_rows?_(\d\d)_(?:and_(\d\d)_)?", node.name)
                tested |= {int(row) for row in (named.groups() if named else ()) if row}
    assert tested == set(range(1, 24))


def test_files_named_in_the_rows_are_there():
    named = re.findall(r"^\| \d+ \| .* \| (.*) \|$", PAGE, re.MULTILINE)
    files = [f for cell in named for f in re.findall(r"`([\w/.*]+)`", cell)]
    assert len(files) > 20
    for file in files:
        base = ROOT if "/" in file else ROOT / "optimized"
        assert list(base.glob(file.rstrip("/"))), file


def test_measured_table_is_made_from_the_results():
    script, results = ROOT / "benchmarks/test_adapter_overhead.py", ROOT / "benchmarks/results/adapter_h200.json"
    made = subprocess.run([sys.executable, script, results], capture_output=True, text=True, check=True).stdout
    assert made.count("\n") == 6
    assert made in PAGE
