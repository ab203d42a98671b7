# Every target sets itself up: the first one run makes $(VENV) and installs the versions in constraints.txt.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCHMARKS = $(sort $(wildcard benchmarks/*.py))

.DEFAULT_GOAL := help
.PHONY: help install demo test check format score bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## make $(VENV) and install shardwise with all that the other targets need

$(STAMP): pyproject.toml constraints.txt
	@echo "== installing into $(VENV) (once, until pyproject.toml or constraints.txt change)"
	@start=$$(date +%s) \
	  && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardwise needs Python 3.11 or newer: make PYTHON=python3.11 ...")' \
	  && $(PYTHON) -m venv $(VENV) \
	  && $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[train,dev]' -c constraints.txt \
	  && touch $@ \
	  && echo "== installed in $$(( $$(date +%s) - start )) s (not part of any time below)"

demo: $(STAMP) ## plan, prove and train, each command shown and timed
	@PATH="$(abspath $(BIN)):$$PATH" bash examples/demo.sh

test: $(STAMP) ## all tests that this machine can run
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q --durations=5

check: $(STAMP) ## lint, format, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

format: $(STAMP) ## mend what check would complain of, where a tool can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

score: $(STAMP) ## predict every published run that can be, and compare
	$(BIN)/shardwise score

bench: $(STAMP) ## run every script in benchmarks/
	@test -n "$(BENCHMARKS)" || echo "benchmarks/ holds no script yet"
	@failed=; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script || failed="$$failed $$script"; done; \
	  test -z "$$failed" || { echo "failed, or not to be had here:$$failed"; exit 1; }

clean: ## remove $(VENV), build/ and caches
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
