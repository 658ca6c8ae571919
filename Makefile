# make demo: set up and run the main job. make test: set up and pass the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= demo-output

.PHONY: demo test test-all lint bench clean

$(VENV)/.ready: pyproject.toml checker/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[fast,onnx,plot,sklearn,dev]" -e ./checker
	touch $@

demo: $(VENV)/.ready
	@$(BIN)/python examples/demo.py --out $(OUT)

test: $(VENV)/.ready lint
	$(BIN)/python -m pytest

test-all: $(VENV)/.ready lint
	$(BIN)/python -m pytest -m "slow or not slow"

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict checker/partita_check

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/grids.py
	$(BIN)/python benchmarks/accuracy.py

clean:
	rm -rf $(VENV) $(OUT) .pytest_cache .mypy_cache .ruff_cache
