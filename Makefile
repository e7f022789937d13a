# `make help` lists what there is. Each target sets up what it needs.
SHELL := /bin/bash
PY := .venv/bin/python
LOCK = .venv/bin/uv pip compile -q --no-header --no-annotate --no-emit-index-url --python-version 3.11 pyproject.toml
.DEFAULT_GOAL := help

.PHONY: help demo test test-fast check format lock bench clean setup-run setup-dev

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup-run:
	@scripts/setup.sh run

setup-dev:
	@scripts/setup.sh dev

demo: setup-run ## two encode groups on this machine, images through them and back; ends with `demo: ok`
	@$(PY) examples/demo.py

test: setup-dev ## all tests, with the real peers
	@scripts/test.sh all

test-fast: setup-dev ## the pure and contract layers
	@scripts/test.sh fast

check: setup-dev ## format, lint, types, import rules, generated files
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(PY) -m pytest -q -p no:cacheprovider tests/test_import_rules.py tests/test_no_pickle.py tests/test_generated.py

format: setup-dev ## rewrite the sources as `make check` wants them
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

lock: setup-dev ## resolve pyproject.toml into requirements/ again
	@$(LOCK) -c requirements/constraints.txt --extra operator --extra worker -o requirements/run.txt
	@$(LOCK) -c requirements/run.txt --extra dev -o requirements/dev.txt

clean: ## remove what the targets made
	rm -rf .venv .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
