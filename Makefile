# make demo: install and watch a model learn to use a tool. make test: install and run every check.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Elsewhere than on a machine whose index serves the CPU build of torch: make demo PIP_ARGS="--extra-index-url URL"
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# The tests run in parts, JOBS at once, the longest first: tests wait for servers and processes half of their time. Each
# part is one pytest, whose tests share what they start.
PARTS := unit-runs unit-servers unit-engine unit-faults unit-trainer unit-rest
# Of tests/engine those that start servers of their own, and do not use the one that the others share.
SERVERS := $(patsubst %,tests/engine/test_%.py,lost_engines killed_driver capacity arguments refused_arguments \
	benchmark_measures benchmark_logprob_gap)
JOBS ?= 3
STAMP := $(VENV)/.installed
PACKAGES := rl rollout algorithms teachers tasks

.DEFAULT_GOAL := help
.PHONY: help install demo test test-pd test-slow lint types layering unit $(PARTS) format hooks clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## make .venv with the locked packages

# pip would compile on one core. Some packages' files are of other Pythons and fail, as they would with pip, in silence.
$(STAMP): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps --no-compile $(PIP_ARGS) -r requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q -j 0 -x '/tests?/' $(VENV)/lib > /dev/null 2>&1 || true
	touch $@

demo: install  ## agentic RL on this machine: real SGLang, real Megatron, 2 cores
	$(BIN)/python train.py +stage=agent_rl run_dir=runs/demo overwrite=true

test: install lint types layering unit  ## every check that needs no GPU

lint: install  ## ruff: format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: install  ## mypy
	$(BIN)/mypy

layering: install  ## which package may import which
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

unit: install  ## pytest without the slow tests
	$(MAKE) --no-print-directory --jobs=$(JOBS) --output-sync=target --keep-going $(PARTS)

unit-runs: TESTS := tests/e2e --ignore=tests/e2e/test_faults.py
unit-faults: TESTS := tests/e2e/test_faults.py
unit-servers: TESTS := $(SERVERS)
unit-engine: TESTS := tests/engine $(SERVERS:%=--ignore=%)
unit-trainer: TESTS := tests/trainer
unit-rest: TESTS := tests --ignore=tests/e2e --ignore=tests/engine --ignore=tests/trainer
$(PARTS):
	$(BIN)/python -m pytest -m "not slow" --durations=10 $(TESTS)

test-pd: install  ## prefill and decode servers apart (wants libibverbs1 of the system)
	$(BIN)/pip install --quiet --no-deps $(PIP_ARGS) mooncake-transfer-engine-non-cuda==0.3.13.post1
	$(BIN)/python -m pytest tests/engine/test_pd.py

test-slow: install  ## learning tests and long faults
	$(BIN)/python -m pytest -m slow --durations=10

format: install  ## ruff: format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

hooks: install  ## run the checks before each commit
	$(BIN)/pre-commit install

clean:  ## remove caches (not runs, not .venv)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
