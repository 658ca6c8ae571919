# make demo: set up and run the main job. make test: set up and pass the tests. make studio: the studio. make docs: the site.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= demo-output
JOBS ?= 2
TORCH ?= 2.6.0
EXTRAS := fast,onnx,plot,sklearn,studio,cluster,tables,docs,dev
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# One file, one worker: the tests of a file share the heads that they compile.
PYTEST := -m pytest -n $(JOBS) --dist loadfile --durations=10

# Python compiles a module when it is first imported and keeps the result, so nothing is compiled for modules never used.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo studio docs test test-all test-oldest lint bench clean

$(VENV)/.ready: pyproject.toml checker/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip show --quiet torch 2>/dev/null || $(PIP) torch==2.13.0  # a torch that is there is kept: the CPU build, say
	$(PIP) -e ".[$(EXTRAS)]" -e ./checker
	touch $@

demo: $(VENV)/.ready
	@$(BIN)/python examples/demo.py --out $(OUT)

studio: $(VENV)/.ready
	@$(BIN)/partita studio

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
	$(BIN)/mypy -n $(JOBS)

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/accuracy.py

# Builds the site and runs its notebooks; warnings are errors. It works from the folder, without a server.
docs: $(VENV)/.ready
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d docs/_build/doctrees docs docs/_build/html
	@echo "open docs/_build/html/index.html"

clean:
	rm -rf $(VENV) $(VENV)-torch-* $(OUT) .pytest_cache .mypy_cache .ruff_cache docs/_build
