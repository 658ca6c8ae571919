# make demo: set up and run the main job. make test: set up and pass the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= demo-output
JOBS ?= 2
TORCH ?= 2.8.0
EXTRAS := fast,onnx,plot,sklearn,dev
PYTEST := -m pytest -n $(JOBS) --dist worksteal --durations=10

.PHONY: demo test test-all test-oldest lint bench clean

$(VENV)/.ready: pyproject.toml checker/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]" -e ./checker
	touch $@

demo: $(VENV)/.ready
	@$(BIN)/python examples/demo.py --out $(OUT)

test: $(VENV)/.ready lint
	$(BIN)/python $(PYTEST)

test-all: $(VENV)/.ready lint
	$(BIN)/python $(PYTEST) -m "slow or not slow"

# The oldest torch that pyproject.toml allows; TORCH=2.9.0 tests another one. Downloads gigabytes.
test-oldest:
	$(PYTHON) -m venv $(VENV)-torch-$(TORCH)
	$(VENV)-torch-$(TORCH)/bin/pip install --quiet torch==$(TORCH) -e ".[$(EXTRAS)]" -e ./checker
	$(VENV)-torch-$(TORCH)/bin/python $(PYTEST)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/grids.py
	$(BIN)/python benchmarks/accuracy.py

clean:
	rm -rf $(VENV) $(VENV)-torch-* $(OUT) .pytest_cache .mypy_cache .ruff_cache
