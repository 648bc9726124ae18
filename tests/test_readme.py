"""The README says what is so: its numbers and its example."""

import re
from pathlib import Path

from fp4ep.parity import Recording, shipped_recordings
from fp4ep.parity.evidence import elements_of

README = Path(__file__).parents[1].joinpath("README.md").read_text()


def test_it_counts_the_shipped_cases():
    there = [(recording, case) for recording in map(Recording, shipped_recordings()) for case in recording.cases]
    elements = sum(elements_of(recording, case) for recording, case in there)
    assert f"{len(there):,} cases, {elements:,} elements, **0 differing**" in README


def test_changelog_counts_them_too():
    changelog = Path(__file__).parents[1].joinpath("CHANGELOG.md").read_text()
    count = sum(len(Recording(path).cases) for path in shipped_recordings())
    assert f"{count:,} recorded cases" in changelog


def test_example_runs(capsys):
    (example,) = re.findall(r"```python\n(import torch\n.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert names["output"].shape == (4, 256)
    assert "tensor(" in capsys.readouterr().out
