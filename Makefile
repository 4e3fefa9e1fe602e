# All targets work in an environment of their own, .venv, which `setup` makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup compiled demo test test-compiled apiserver test-real test-real-contract test-real-integration soak step lint bench clean

help:  ## Print what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

setup: $(VENV)/.done  ## Make the environment

# Built from a copy: the compiler leaves its results beside the sources, where they would be taken for them.
COMPILED := .venv-compiled
$(COMPILED)/.done: pyproject.toml $(shell find src -name '*.py')
	$(PYTHON) -m venv $(COMPILED)
	rm -rf build/compiled && mkdir -p build/compiled && cp -r pyproject.toml README.md LICENSE src build/compiled
	HATCH_BUILD_HOOKS_ENABLE=1 $(COMPILED)/bin/pip install --quiet 'build/compiled[dev]'
	@touch $@

compiled: $(COMPILED)/.done  ## An environment with the request path compiled (needs a C compiler)

demo: setup  ## A cluster, two variants, a load that comes and goes
	$(BIN)/tidemill demo

# Most of a test's time is waiting, so there are more workers than cores.
PARALLEL := -n 3 --dist loadscope

test: setup  ## All tests
	$(BIN)/python -m pytest $(PARALLEL)

test-compiled: compiled  ## The picker's tests with the request path compiled
	$(COMPILED)/bin/python -c "import tidemill.picker.director as d; assert d.__file__.endswith('.so'), d.__file__"
	$(COMPILED)/bin/python -m pytest $(PARALLEL) tests/unit/picker $(addprefix tests/integration/test_,broken_wire.py \
	  connections.py gateway.py lean_transport.py picker_process.py pools.py telemetry.py transports.py)

KUBERNETES := 1.36.3
CONTROL_PLANE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tidemill/kubernetes-$(KUBERNETES)
$(CONTROL_PLANE)/kube-controller-manager: | tests/real/control_plane/go.mod
	mkdir -p $(CONTROL_PLANE)
	cd tests/real/control_plane && CGO_ENABLED=0 go build -trimpath -o $(CONTROL_PLANE)/ \
	  -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=v$(KUBERNETES)" \
	  k8s.io/kubernetes/cmd/kube-apiserver k8s.io/kubernetes/cmd/kube-controller-manager

apiserver: $(CONTROL_PLANE)/kube-controller-manager  ## Build a real control plane into a cache (needs Go)

test-real: test-real-contract test-real-integration  ## Contract and integration tests on a real control plane (needs etcd)

test-real-contract: setup apiserver
	$(BIN)/python -m tests.real.cluster $(CONTROL_PLANE) tests/contract

test-real-integration: setup apiserver
	$(BIN)/python -m tests.real.cluster $(CONTROL_PLANE) --no-workloads $(addprefix tests/integration/test_,cases.py \
	  capacity_cases.py doctor.py engine_timing.py external_metrics.py informer.py keda_scaler.py leader_worker_sets.py \
	  lease_and_events.py pools.py roles.py seed_watches.py)

soak: setup  ## Five minutes of trouble behind the gateway: no request may be lost
	TIDEMILL_SOAK_SECONDS=300 $(BIN)/python -m pytest -s tests/e2e/test_no_lost_request.py

step: setup  ## Half an hour: a latency target through a step of load
	TIDEMILL_STEP=1 $(BIN)/python -m pytest -s tests/e2e/test_capacity.py

lint: setup  ## Style, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

bench: setup compiled  ## Measure; results in build/bench
	$(BIN)/python -m benchmarks.autoscaler
	$(BIN)/python -m benchmarks.attribution
	$(BIN)/python -m benchmarks.capacity
	$(COMPILED)/bin/python -m benchmarks.picker --interpreted $(BIN)/tidemill

clean:  ## Remove the environment and what was built
	rm -rf $(VENV) $(COMPILED) build dist
