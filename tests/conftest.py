"""The hardware that tests may ask for, quick GEMMs, and a last word on what a run left out."""

from collections.abc import Iterator

import pytest
from quick_gemms import compiled_tensor_core

from fp4ep.parity.sides import missing_for_flashinfer_sm90

pytest_plugins = ["pytester"]


@pytest.fixture
def flashinfer_sm90() -> None:
    """Skips the test where the kernels cannot run."""
    reason = missing_for_flashinfer_sm90()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def quick_gemms() -> Iterator[None]:
    """The reference's GEMMs compiled, in this process, for modules that test something else."""
    with compiled_tensor_core():
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    yield  # everything else first
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, [])]
    if not any("gpu" in report.keywords for report in reports):
        reason = missing_for_flashinfer_sm90() or "no test of it was selected"
        terminalreporter.line(f"not exercised: FlashInfer SM90 megakernels ({reason})")
