# All targets work in an environment of their own, .venv, which `setup` makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak step lint bench clean

help:  ## Print what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

setup: $(VENV)/.done  ## Make the environment

demo: setup  ## A cluster, two variants, a load that comes and goes
	$(BIN)/tidemill demo

test: setup  ## All tests
	$(BIN)/python -m pytest

soak: setup  ## Five minutes of trouble behind the gateway: no request may be lost
	TIDEMILL_SOAK_SECONDS=300 $(BIN)/python -m pytest -s tests/e2e/test_no_lost_request.py

step: setup  ## Half an hour: a latency target through a step of load
	TIDEMILL_STEP=1 $(BIN)/python -m pytest -s tests/e2e/test_capacity.py

lint: setup  ## Style, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

bench: setup  ## Measure; results in build/bench
	$(BIN)/python -m benchmarks.autoscaler
	$(BIN)/python -m benchmarks.capacity
	$(BIN)/python -m benchmarks.picker

clean:  ## Remove the environment and what was built
	rm -rf $(VENV) build dist
