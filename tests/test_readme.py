"""The README says what is so: its numbers and its example."""

import math
import re
from collections import Counter
from pathlib import Path

from fp4ep.parity import Recording, shipped_recordings
from fp4ep.reference import find_scheme

README = Path(__file__).parents[1].joinpath("README.md").read_text()


def test_table_counts_the_shipped_cases():
    cases: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for recording in map(Recording, shipped_recordings()):
        for case in recording.cases:
            scheme = str(find_scheme(case.scheme, **case.options)) if case.kind == "moe" else case.scheme
            (output,) = (case.tensors[role] for role in ("output", "d", "y") if role in case.tensors)
            cases[scheme] += 1
            elements[scheme] += math.prod(recording.specs[output]["shape"])
    rows = re.findall(r"^\| `(.+)` \| (\d+) \| ([\d,]+) \| 0 \| verified \|$", README, re.MULTILINE)
    assert {name: (int(n), int(e.replace(",", ""))) for name, n, e in rows} == {
        name: (cases[name], elements[name]) for name in cases
    }


def test_changelog_counts_them_too():
    changelog = Path(__file__).parents[1].joinpath("CHANGELOG.md").read_text()
    assert f"{sum(len(Recording(path).cases) for path in shipped_recordings())} recorded cases" in changelog


def test_example_runs(capsys):
    (example,) = re.findall(r"```python\n(import torch\n.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert names["output"].shape == (4, 256)
    assert "tensor(" in capsys.readouterr().out
