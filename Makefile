# Two commands matter: `make demo` and `make test`. Both install what they need into .venv first.
PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
CPU := OMP_NUM_THREADS=1
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all check bench clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed  ## the virtual environment, with everything pinned by constraints.txt

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install  ## train a tiny policy end to end on this machine (ARGS="--seed 1 --steps 100")
	$(BIN)/deltawire demo $(ARGS)

test: install  ## every test that Python packages alone allow (browser tests too where Chromium is installed)
	$(CPU) $(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

test-all: test  ## test, then the tiers that install more (none yet beyond the checks)
	$(MAKE) check

check: install  ## lint, format, types, import graph, sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m arch

bench: install  ## the loop's ratios, medians of interleaved pairs with their spread
	$(BIN)/python benchmarks/loop.py $(ARGS)

clean:  ## remove what the commands made (not the results in runs/)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
