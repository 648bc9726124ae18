"""The pytest plugin of fp4ep, loaded wherever fp4ep is installed.

    @pytest.mark.fp4ep("sm90_fp8_nvfp4_bf16_pull_cutedsl", tokens=(11, 5))
    def test_my_layer(fp4ep_problem):
        layer = fp4ep_problem.build()
        assert_parity(layer, [my_layer(layer.weights, x) for x in layer.inputs])

The marker's arguments are those of `problems`: scheme, options, `cases=[...]` by name, and fields of Problem;
`ep_sizes=[...]` runs each over several numbers of ranks. `--fp4ep-report=DIR` saves every failing comparison.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("fp4ep").addoption(
        "--fp4ep-report", metavar="DIR", type=Path, help="where a failing assert_parity saves its runs and an HTML page"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "fp4ep(scheme, options=None, cases=None, ep_sizes=None, **changes): what the fixture fp4ep_problem runs over",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fp4ep_problem" not in metafunc.fixturenames:
        return
    from .problem import Problem, problems

    marker = metafunc.definition.get_closest_marker("fp4ep")
    if marker is None:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: fp4ep_problem needs @pytest.mark.fp4ep(scheme, ...)")
    given = dict(marker.kwargs)
    ep_sizes = given.pop("ep_sizes", None)
    try:
        found = problems(*marker.args, **given)
    except ValueError as error:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: {error}") from error
    named: dict[str, Problem] = {}
    for name, problem in found.items():
        for ep_size in ep_sizes or [problem.ep_size]:
            split = problem if ep_size == problem.ep_size else problem.over(ep_size)
            named[f"{name}, ep {ep_size}" if ep_sizes else name] = split
    metafunc.parametrize("fp4ep_problem", named.values(), ids=named.keys())


@pytest.fixture(autouse=True)
def _fp4ep_report(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tells assert_parity where this test's failures go."""
    base = request.config.getoption("--fp4ep-report")
    if base is None:
        yield
        return
    from .testing import folder_name, report_folder

    token = report_folder.set(base / folder_name(request.node.nodeid))
    yield
    report_folder.reset(token)


@pytest.fixture
def fp4ep_ranks():
    """Runs a layer of one's own on EP ranks in processes of their own, over gloo.

    Call it with (function, problem): function belongs to a module and is called in every process as
    (layer, place, progress) -> Trace, see `sides.Side`. Returns the Trace of all ranks.
    """
    from .launch import launch
    from .run import Claim
    from .sides import Side

    def run(function, problem):
        (made,) = launch([Side("layer under test", Claim.FLOAT32, function)], problem, how="spawned")
        return made.trace

    return run
