# Commands for developers. Each one runs `setup` if needed: Python 3.11+, pip and make are enough.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.setup-done
# The directories of all packages except the core.
PACKAGES := cli local operator worker
PIP = $(VENV)/bin/python -m pip install --progress-bar off --disable-pip-version-check -c constraints.txt
# The pip of a new environment compares each file of an index with hundreds of tags: it is brought up to date first.
# pip would build each package in an environment of its own and compile everything on one core. Half of the time went to
# files that are hardly imported; Python compiles those that are.
NEVER_COMPILED := /(kubernetes|mypy|networkx|numpy|pip|pyarrow|pygments|setuptools|testing|tests)/
# Tests start hundreds of processes. Each would compile the packages again if the environment forbade bytecode files.
unexport PYTHONDONTWRITEBYTECODE
# One pytest process runs the tests of ranks one after another, two run those of clusters, each on a cluster of its own,
# and a fourth one all others. Tests of clusters mostly wait: two cores are enough.
FOUR := -n 4 --no-loadscope-reorder

# Seed of `make chaos` and `make fuzz`, and number of runs of each test. The same values give the same draws.
SEED := $(or $(SEED),$(shell date +%s))
RUNS ?= 20
DRAW = MESHWRIGHT_TEST_SEED=$(SEED) MESHWRIGHT_TEST_RUNS=$(RUNS) $(VENV)/bin/python -m pytest $(FOUR) \
	--hypothesis-seed=$(SEED) --timeout=$$((300 + 60 * $(RUNS)))

.PHONY: help setup demo agent-bundle test test-fast test-long chaos fuzz parity gpu lint sizes generate docs-output clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv and install everything, pinned by constraints.txt

$(STAMP): pyproject.toml constraints.txt $(PACKAGES:%=%/pyproject.toml)
	@echo "setting up $(VENV): takes a few minutes, only the first time"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) pip hatchling editables
	$(PIP) --no-build-isolation --no-compile -e '.[dev]' $(PACKAGES:%=-e ./%)
	@$(VENV)/bin/python -m compileall -q -j 0 -x '$(NEVER_COMPILED)' $(VENV)/lib
	@touch $(STAMP)

demo: setup ## Train a language model on the embedded cluster, lose a worker midway, finish
	@exec $(VENV)/bin/meshwright demo

test: setup ## Run all tests except the long ones
	$(VENV)/bin/python -m pytest $(FOUR)

test-fast: setup ## Run only tests that take seconds
	$(VENV)/bin/python -m pytest -m "not slow and not long"

test-long: setup ## Run the tests that `make test` leaves out: at most 90 minutes
	$(VENV)/bin/python -m pytest $(FOUR) -m long

chaos: setup ## Test with random histories and faults: make chaos SEED=7 RUNS=100 (default: a new seed)
	$(DRAW) -m chaos

fuzz: setup ## Test with random inputs: make fuzz SEED=7 RUNS=100 (default: a new seed)
	$(DRAW) -m "fuzz or (hypothesis and not chaos)"

parity: setup ## Compare every technique, in every layout, with a single-process run; writes docs/parity.md and docs/loss-curves.md
	$(VENV)/bin/python -m tests.parity
	$(VENV)/bin/python -m tests.parity.curves

gpu: setup ## On a machine with a GPU: run its tests, throughput and profiles; make gpu WITHIN=580 (seconds)
	$(VENV)/bin/python -m benchmarks.gpu $(if $(WITHIN),--within $(WITHIN))

agent-bundle: setup ## Assemble the agent of `runtime.agent: Injected` in .agent, the root of its image
	rm -rf .agent
	$(VENV)/bin/python -m meshwright_worker.bundle .agent

lint: setup ## Run ruff, mypy, import contracts, and a check for conflict markers
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m tests.conflicts

sizes: setup ## Report lines and files by directory, and the longest files and functions
	@$(VENV)/bin/python -m tests.sizes

generate: setup ## Write every generated file: CRD, API reference, protocol schema, metrics, dashboards, output in docs
	$(VENV)/bin/python -m meshwright.crd
	$(VENV)/bin/python -m meshwright.crd.chart_schema
	$(VENV)/bin/python -m meshwright_operator.metrics.metrics_docs > docs/metrics.md
	$(VENV)/bin/python -m meshwright_worker.agent.metrics_docs > docs/worker-metrics.md
	$(VENV)/bin/python -m meshwright_cli.reference > docs/cli.md
	$(VENV)/bin/python -m dashboards.source
	$(VENV)/bin/python -m meshwright_cli.explain.docs_figures
	$(VENV)/bin/python -m tests.docs

docs-output: setup ## Write the command output in README and docs; LONG=1 includes `make demo` and other long commands
	$(VENV)/bin/python -m tests.docs $(if $(LONG),--long)

clean: ## Remove the files that setup and tests created
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .demo .agent
