# The README's two commands are `make setup replay` and `make check`; CI runs both.
PYTHON ?= python3
VENV ?= .venv
# The CPU suffices for everything but recording: on machines where this version resolves to a CUDA build, point pip at
# PyTorch's CPU wheels (PIP_INDEX_URL or PIP_EXTRA_INDEX_URL) to save some gigabytes.
TORCH ?= torch==2.13.0

.PHONY: setup replay lint format type test check

setup:
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --config-settings editable_mode=strict -e '.[dev]'

replay:
	$(VENV)/bin/fp4ep replay

lint:
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format:
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

type:
	$(VENV)/bin/mypy

# One thread for each worker: torch's and numba's own threads and the workers would fight for the cores.
test:
	OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 $(VENV)/bin/pytest -n auto --maxprocesses 8 --dist loadfile

check: lint type test
