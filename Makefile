# Everything a fresh machine needs: git, Python 3.11 or newer, make.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: quickstart test test-all test-pythons lint docs clean

quickstart: .venv/.installed
	$(BIN)/doublehorizon train Pendulum-v1 --preset quick --steps 2000 --out runs/quickstart
	@echo
	@echo "Next, try:"
	@echo "  $(BIN)/python examples/use_policy.py runs/quickstart      # act with the trained policy, NumPy only"
	@echo "  $(BIN)/doublehorizon train InvertedPendulum-v5 --preset quick --steps 3000"
	@echo "  $(BIN)/doublehorizon train --help-all                     # every number of the algorithm can be set"

PYTEST := -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --durations 10

test: .venv/.test
	$(BIN)/python $(PYTEST)

test-all: .venv/.peers
	$(BIN)/python $(PYTEST) -m "slow or not slow"

# with each Python that is installed, and with the oldest versions of all dependencies
test-pythons:
	benchmarks/test_pythons.sh

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

docs: .venv/.dev
	$(BIN)/python -m mkdocs build --strict --quiet

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "doublehorizon needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv

.venv/.installed: .venv/bin/python pyproject.toml
	$(BIN)/python $(INSTALL) -e .
	@touch $@

.venv/.test: .venv/bin/python pyproject.toml
	$(BIN)/python $(INSTALL) -e '.[test]'
	$(BIN)/python $(INSTALL) --no-deps dm_control  # Python 3.13 and newer: see pyproject.toml
	@touch $@ .venv/.installed

.venv/.dev: .venv/.test
	$(BIN)/python $(INSTALL) -e '.[test,dev]'
	@touch $@

.venv/.peers: .venv/.dev
	$(BIN)/python $(INSTALL) -e '.[peers]'
	@touch $@

clean:
	rm -rf site .venv .jax_cache .pytest_cache .ruff_cache
