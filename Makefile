PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup check test docs

# torch comes first and alone, so that no other package's wish for "any torch" is heard before the pinned one.
setup:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable . --group check --group test --group docs

check:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test:
	$(BIN)/pytest --numprocesses 2 --quiet

docs:
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs docs/_build/html
