"""The rule that chooses an engine."""

import warnings
from dataclasses import replace

import pytest

from fp4ep.parity import engines
from fp4ep.parity.engines import ENGINES, choose_engine
from fp4ep.reference.schemes import SCHEMES, find_scheme

NVFP4 = SCHEMES[0]
SM100 = find_scheme("sm100_nvfp4_nvfp4_bf16_cutedsl")


@pytest.fixture
def present(monkeypatch):
    """Sets what is missing, by engine; all else runs here."""
    engines._notice.cache_clear()

    def set_missing(**missing: str) -> None:
        for name, engine in list(ENGINES.items()):
            monkeypatch.setitem(ENGINES, name, replace(engine, missing=lambda name=name: missing.get(name)))

    yield set_missing
    engines._notice.cache_clear()


def test_the_fastest_that_can_run(present):
    present()
    assert choose_engine(NVFP4).name == "cuda"
    present(cuda="no CUDA device")
    assert choose_engine(NVFP4).name == "cpu"


def test_falling_back_to_the_reference_is_said_once(present):
    present(cuda="no CUDA device", cpu="numba is not installed")
    with pytest.warns(UserWarning, match=r"reference, which is slow \(cuda: no CUDA device; cpu: numba is not inst"):
        assert choose_engine(NVFP4).name == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_engine(NVFP4).name == "reference"
    present()
    with pytest.warns(UserWarning, match=r"cuda: it has no FP4 activations, which sm100.* needs; cpu: it has no FP4"):
        assert choose_engine(SM100).name == "reference"


@pytest.mark.parametrize("name", ["cuda", "cpu", "reference"])
def test_by_name(present, name):
    present()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_engine(NVFP4, name) is ENGINES[name]
        assert choose_engine(SM100, "reference").name == "reference"


def test_what_cannot_run_is_refused(present):
    present(cuda="no CUDA device")
    with pytest.raises(ValueError, match=r"^engine: 'cuda' cannot run here: no CUDA device$"):
        choose_engine(NVFP4, "cuda")
    with pytest.raises(ValueError, match=r"^engine: 'cpu' cannot run here: it has no FP4 activations, which sm100"):
        choose_engine(SM100, "cpu")
    with pytest.raises(ValueError, match=r"^engine: 'gpu' is not one of auto, cpu, cuda, reference$"):
        choose_engine(NVFP4, "gpu")
