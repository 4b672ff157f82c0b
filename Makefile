# Everything a fresh machine needs: git, Python 3.11 or newer, make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test test-all lint docs clean

quickstart: .venv/.installed
	$(BIN)/doublehorizon train Pendulum-v1 --preset quick --steps 2000 --out runs/quickstart
	@echo
	@echo "Next, try:"
	@echo "  $(BIN)/python examples/use_policy.py runs/quickstart      # act with the trained policy, NumPy only"
	@echo "  $(BIN)/doublehorizon train InvertedPendulum-v5 --preset quick --steps 3000"
	@echo "  $(BIN)/doublehorizon train --help-all                     # every number of the algorithm can be set"

test: .venv/.dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --durations 25

test-all: .venv/.peers
	$(BIN)/python -m pytest -m "slow or not slow" -n 2 --dist loadgroup --no-loadscope-reorder --durations 25

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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/.dev: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ .venv/.installed

.venv/.peers: .venv/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,peers]'
	@touch $@

clean:
	rm -rf site .venv .jax_cache .pytest_cache .ruff_cache
