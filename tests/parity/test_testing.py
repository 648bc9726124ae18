"""`assert_parity` and the pytest plugin, as a suite elsewhere uses them; the example is the README's own."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import NVFP4, change, reference_run

from fp4ep.parity import Claim, Problem, RunError, assert_parity, load_run
from fp4ep.parity.testing import folder_name, report_folder

pytestmark = pytest.mark.usefixtures("quick_gemms")

README = Path(__file__).parents[2].joinpath("README.md").read_text()
PROBLEM = Problem(NVFP4, tokens=(5, 2))

#: Stands for a project with a layer of its own.
MY_PROJECT = """
from fp4ep.optimized.fake_quant import fake_quant_forward
from fp4ep.reference import find_scheme
from fp4ep.reference.exchange import exchange_in_process

def my_layer(weights, inputs):
    scheme = find_scheme("sm90_fp8_nvfp4_bf16_pull_cutedsl")
    trace = fake_quant_forward(scheme, weights, [inputs], ranks=[0], ep_size=1, exchange=exchange_in_process)
    return trace["combine"].tensors["values"]
"""


@pytest.fixture(scope="module")
def outputs():
    return reference_run(PROBLEM).outputs()


def test_right_outputs_pass(outputs):
    found = assert_parity(PROBLEM, outputs)
    assert found.passed
    assert found.right.side == "layer under test"
    assert assert_parity(PROBLEM.build(), outputs, Claim.FLOAT32).passed
    one = replace(PROBLEM, tokens=(7,))
    assert assert_parity(one, torch.cat(outputs), side="mine").right.side == "mine"


def test_a_wrong_bit_fails_and_is_named(outputs):
    wrong = [output.clone() for output in outputs]
    wrong[1].view(torch.int16)[1, 100] ^= 1
    with pytest.raises(AssertionError) as error:
        assert_parity(PROBLEM, wrong)
    text = str(error.value)
    assert text.startswith("layer under test breaks its claim of bits\n")
    assert re.search(r"combine\.values at rank 1, token 1, channel 100: .*1 ulp apart", text)
    assert assert_parity(PROBLEM, wrong, Claim.FLOAT32).passed  # one bf16 ulp is inside the bound here


def test_a_trace_names_the_stage():
    hook = change("fc1", "up", lambda up: up[0, 0].mul_(2))
    with pytest.raises(AssertionError, match=r"first in fc1\.up"):
        assert_parity(PROBLEM, reference_run(PROBLEM, hook).trace)


def test_outputs_that_do_not_fit(outputs):
    for found in (outputs[:1], [outputs[1], outputs[0]], [o.float() for o in outputs], outputs[0]):
        with pytest.raises(ValueError, match="found must be one output for each rank"):
            assert_parity(PROBLEM, found)


def test_a_failure_is_saved(outputs, tmp_path):
    wrong = [output + 1 for output in outputs]
    token = report_folder.set(tmp_path / "here")
    try:
        with pytest.raises(AssertionError, match=r"saved in .*here"):
            assert_parity(PROBLEM, wrong)
    finally:
        report_folder.reset(token)
    saved = load_run(tmp_path / "here" / "right.safetensors")
    assert saved.problem == PROBLEM
    assert all(torch.equal(a, b) for a, b in zip(saved.outputs(), wrong, strict=True))
    assert (tmp_path / "here" / "report.html").read_text().startswith("<!doctype html>")
    with pytest.raises(RunError):
        load_run(tmp_path / "here" / "report.html")


def test_folder_names_are_safe():
    assert folder_name("tests/a.py::test_b[x, ep 2-../..]") == "tests_a.py_test_b_x_ep_2-.._.."


# --- the plugin --------------------------------------------------------------------------------------------------


def readme_example() -> str:
    (example,) = re.findall(r"```python\n(# test_my_layer\.py\n.*?)```", README, re.DOTALL)
    return example


@pytest.mark.slow
def test_the_readme_example_passes(pytester):
    pytester.makepyfile(my_project=MY_PROJECT, test_my_layer=readme_example())
    result = pytester.runpytest_inprocess("-v", "-p", "no:cacheprovider")
    names = [name for name in ("values at ties", "poisoned padding") if f"[{name}]" in result.stdout.str()]
    assert names == ["values at ties", "poisoned padding"]
    assert result.ret == 0
    assert result.parseoutcomes()["passed"] > 10


@pytest.mark.slow
def test_the_readme_example_fails_where_the_layer_is_wrong(pytester):
    wrong = MY_PROJECT.replace('.tensors["values"]', '.tensors["values"] * 1.25')
    pytester.makepyfile(my_project=wrong, test_my_layer=readme_example())
    result = pytester.runpytest_inprocess("--fp4ep-report=reports", "-k", "duplicate", "--tb=short")
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines(["*layer under test breaks its claim of float32*", "*saved in reports*"])
    assert "moe_forward(" not in result.stdout.str()  # the helper hides its own frames
    (folder,) = (pytester.path / "reports").iterdir()
    assert folder.name == "test_my_layer.py_test_my_layer_duplicate_ids"
    assert {path.name for path in folder.iterdir()} == {"left.safetensors", "right.safetensors", "report.html"}


def test_markers_choose_cases_and_ranks(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.fp4ep("sm90_bf16_bf16_bf16_pull_cutedsl", cases=["ordinary", "masked slots"], ep_sizes=[1, 4],
                           tokens=(6,), hidden=512)
        def test_it(fp4ep_problem):
            assert fp4ep_problem.hidden == 512
            assert sum(fp4ep_problem.tokens) == 6
        """
    )
    result = pytester.runpytest_inprocess("-v")
    assert result.ret == 0
    for case in ("ordinary", "masked slots"):
        for ep_size in (1, 4):
            assert f"test_it[{case}, ep {ep_size}] PASSED" in result.stdout.str()


def test_what_a_marker_gets_wrong_is_said(pytester):
    wrong = {
        "": "fp4ep_problem needs @pytest.mark.fp4ep",
        '@pytest.mark.fp4ep("sm90_bf16_bf16_bf16_pull_cutedsl", cases=["nothing"])': "cases: nothing not among",
        '@pytest.mark.fp4ep("bf16")': "scheme: 'bf16' is not one of",
    }
    tests = [f"import pytest\n\n{marker}\ndef test_it(fp4ep_problem):\n    pass\n" for marker in wrong]
    pytester.makepyfile(**{f"test_{i}": text for i, text in enumerate(tests)})
    result = pytester.runpytest_inprocess()
    assert result.parseoutcomes() == {"errors": 3}
    for words in wrong.values():
        assert words in result.stdout.str() + result.stderr.str()


@pytest.mark.slow
def test_a_layer_on_ranks_of_its_own(pytester):
    """`fp4ep_ranks`: the function runs in one process per rank."""
    pytester.makepyfile(
        my_ranks="""
        import os
        from functools import partial
        from fp4ep.parity.sides import SIDES

        def my_side(layer, place, progress):
            assert len(place.ranks) == 1 and layer.weights.num_experts == 8 // place.ep_size
            return SIDES["fake_quant"].run(layer, place, progress)
        """,
        test_ranks="""
        import pytest
        from fp4ep.parity import Claim, assert_parity
        from my_ranks import my_side

        @pytest.mark.fp4ep("sm90_bf16_bf16_bf16_pull_cutedsl", cases=["uneven ranks, one without tokens"])
        def test_it(fp4ep_problem, fp4ep_ranks):
            assert_parity(fp4ep_problem, fp4ep_ranks(my_side, fp4ep_problem), Claim.FLOAT32)
        """,
    )
    assert pytester.runpytest_subprocess().ret == 0
