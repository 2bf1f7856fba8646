# Everything a person types. `make demo` and `make test` set themselves up: Python 3.11+, pip and make are enough.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.setup-done
# Each room beside the core is a distribution of its own.
ROOMS := cli local operator worker
# Tests of ranks one after another in one pytest process, those of whole clusters in a second, all others in a third:
# clusters mostly wait.
THREE := -n 3 --no-loadscope-reorder

# Where `make chaos` and `make fuzz` begin to draw, and how much each test draws. The same two give the same draws.
SEED := $(or $(SEED),$(shell date +%s))
RUNS ?= 20
DRAW = MESHWRIGHT_TEST_SEED=$(SEED) MESHWRIGHT_TEST_RUNS=$(RUNS) $(VENV)/bin/python -m pytest $(THREE) \
	--hypothesis-seed=$(SEED) --timeout=$$((300 + 60 * $(RUNS)))

.PHONY: help setup demo test test-fast test-long chaos fuzz parity lint sizes generate docs-output clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv and install everything, pinned by constraints.txt

$(STAMP): pyproject.toml constraints.txt $(ROOMS:%=%/pyproject.toml)
	@echo "setting up $(VENV): a few minutes the first time, then never again"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --progress-bar off --disable-pip-version-check -c constraints.txt -e '.[dev]' $(ROOMS:%=-e ./%)
	@touch $(STAMP)

demo: setup ## Train a language model on the embedded cluster, lose a worker midway, finish
	@exec $(VENV)/bin/meshwright demo

test: setup ## Lint, type-check and test
	$(VENV)/bin/python -m pytest $(THREE)

test-fast: setup ## Only tests that take seconds
	$(VENV)/bin/python -m pytest -m "not slow and not long"

test-long: setup ## The tests that `make test` leaves out: at most 90 minutes
	$(VENV)/bin/python -m pytest $(THREE) -m long

chaos: setup ## Random histories and faults: make chaos SEED=7 RUNS=100 (without SEED: new ones every time)
	$(DRAW) -m chaos

fuzz: setup ## Random inputs, in the same way: make fuzz SEED=7 RUNS=100
	$(DRAW) -m "fuzz or (hypothesis and not chaos)"

parity: setup ## Hold every technique to one process in every layout; writes docs/parity.md and docs/loss-curves.md
	$(VENV)/bin/python -m tests.parity
	$(VENV)/bin/python -m tests.parity.curves

lint: setup ## ruff, mypy, import contracts, conflict markers
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m tests.conflicts

sizes: setup ## Lines and files by room, the longest files and functions
	@$(VENV)/bin/python -m tests.sizes

generate: setup ## Write every generated page again: CRD, API reference, protocol schema, metrics, output in docs
	$(VENV)/bin/python -m meshwright.crd
	$(VENV)/bin/python -m meshwright_operator.metrics.metrics_docs > docs/metrics.md
	$(VENV)/bin/python -m meshwright_worker.agent.metrics_docs > docs/worker-metrics.md
	$(VENV)/bin/python -m tests.docs

docs-output: setup ## Write the output that README and docs show again; LONG=1 for `make demo` and its like too
	$(VENV)/bin/python -m tests.docs $(if $(LONG),--long)

clean: ## Remove what setup and tests made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .demo
