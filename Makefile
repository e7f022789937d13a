# `make help` lists what there is. Each target sets up what it needs.
SHELL := /bin/bash
PY := .venv/bin/python
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/encodepool
LOCK = .venv/bin/uv pip compile -q --no-header --no-annotate --no-emit-index-url --python-version 3.11 pyproject.toml
.DEFAULT_GOAL := help

.PHONY: help demo demo-tp2 test test-all test-fast mutants check format generate lock clean cluster-programs cluster-up cluster-down test-cluster gpu-check bench bench-quick bench-tp setup-run setup-dev

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup-run:
	@scripts/setup.sh run

setup-dev:
	@scripts/setup.sh dev

demo: setup-run ## two encode groups on this machine, images through them and back; ends with `demo: ok`
	@$(PY) examples/demo.py

demo-tp2: setup-run ## the same with one group of two ranks that compute the tower together
	@$(PY) examples/demo.py examples/tiny-tp2.yaml

test: setup-dev ## all tests, with the real peers; three groups only when what they cover has changed (tests/README.md)
	@scripts/test.sh changed

test-all: setup-dev ## all tests, whatever has changed
	@scripts/test.sh all

test-fast: setup-dev ## the pure and contract layers
	@scripts/test.sh fast

mutants: setup-dev ## 200 small faults in the cores and the wire, and which of them the pure tests notice; AGAINST=earlier.json
	@$(PY) -m tests.mutants $(if $(AGAINST),--against $(AGAINST))

check: setup-dev ## format, lint, types, import rules, generated files
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy --cache-dir $(CACHE)/mypy
	@$(PY) -m pytest -q -p no:cacheprovider tests/test_import_rules.py tests/test_no_pickle.py
	@scripts/generate.sh --check

format: setup-dev ## rewrite the sources as `make check` wants them
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

generate: setup-dev ## the pages and manifests made from tables in the code
	@scripts/generate.sh

lock: setup-dev ## resolve pyproject.toml into requirements/ again
	@$(LOCK) -c requirements/constraints.txt --extra operator --extra worker -o requirements/run.txt
	@$(LOCK) -c requirements/run.txt --extra dev -o requirements/dev.txt

cluster-programs: setup-dev ## build the programs of a test cluster that are missing (once, about 16 minutes)
	@$(PY) -m tests.cluster.kit build

cluster-up: setup-dev ## a real cluster with two nodes on this machine, until cluster-down; WITH=operator or WITH=example adds ours
	@$(PY) -m tests.cluster.kit up $(if $(WITH),--with $(WITH))

cluster-down: setup-dev ## remove it without a trace
	@$(PY) -m tests.cluster.kit down

test-cluster: cluster-programs ## the tests on a real cluster; those with nodes need root
	@$(PY) -m pytest tests/cluster

bench: setup-dev ## what the worker costs, each figure against something in the same run (docs/benchmarks.md); ONLY=B2,B7 for some
	@$(PY) -m benchmarks $(if $(ONLY),--only $(ONLY))

bench-tp: setup-run ## what an idle group of two ranks costs, beside the reference's way
	@$(PY) -m benchmarks.idle_ranks

bench-quick: setup-dev ## the same with fewer sizes and shorter: 15 to 25 minutes
	@$(PY) -m benchmarks --quick $(if $(ONLY),--only $(ONLY))

gpu-check: setup-run ## rows, memory and speed of the towers on a CUDA device; without one it ends with exit code 2
	@timeout -k 5 480 $(PY) benchmarks/gpu_check.py

clean: ## remove what the targets made
	rm -rf .mutants.json .venv .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
