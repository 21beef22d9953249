PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup check test campaign docs test-ecosystem test-deepspeed

# torch comes first and alone, so that no other package's wish for "any torch" is heard before the pinned one.
setup:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable . --group check --group test --group docs --group benchmarks

check:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	PYTHONPATH=src:. $(BIN)/lint-imports

test:
	$(BIN)/pytest --numprocesses 2 --quiet

# Random sequences of operations with new seeds until the time is up; a failure ends it with the shortest sequence.
MINUTES ?= 30
campaign:
	MECHANIC_CAMPAIGN_MINUTES=$(MINUTES) $(BIN)/pytest -m slow --capture=no --quiet tests/campaign

docs:
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs docs/_build/html

# The frameworks bring more packages than all else together, and write under HOME.
test-ecosystem: export HOME := $(CURDIR)/.venv-ecosystem/home
test-ecosystem:
	$(PYTHON) -m venv .venv-ecosystem
	mkdir -p $(HOME)
	.venv-ecosystem/bin/pip install --quiet --constraint constraints.txt pip
	.venv-ecosystem/bin/pip install --quiet --constraint constraints.txt torch
	.venv-ecosystem/bin/pip install --quiet --constraint constraints.txt --editable . --group ecosystem
	.venv-ecosystem/bin/pytest --quiet -W default tests/ecosystem
	# timm has a folder of its own: others import it if they find it, and it needs torchvision, which beside a torch for
	# CPUs only cannot be imported as it comes from PyPI.
	.venv-ecosystem/bin/pip install --quiet --constraint constraints.txt --no-deps --target .venv-ecosystem/timm timm torchvision
	PYTHONPATH=.venv-ecosystem/timm .venv-ecosystem/bin/pytest --quiet -W default tests/ecosystem/test_timm.py

# DeepSpeed compiles at run time and writes under HOME, so it has an environment and a home of its own.
test-deepspeed: export HOME := $(CURDIR)/.venv-deepspeed/home
test-deepspeed: export DS_ACCELERATOR := cpu
test-deepspeed: export DS_BUILD_OPS := 0
test-deepspeed:
	$(PYTHON) -m venv .venv-deepspeed
	mkdir -p $(HOME)
	.venv-deepspeed/bin/pip install --quiet --constraint constraints.txt torch
	.venv-deepspeed/bin/pip install --quiet --constraint constraints.txt setuptools wheel ninja py-cpuinfo numpy pytest
	.venv-deepspeed/bin/pip install --quiet deepspeed==0.19.8
	.venv-deepspeed/bin/pip install --quiet --no-deps --editable .
	.venv-deepspeed/bin/pytest --quiet -p no:cacheprovider -W default tests/torch/test_deepspeed.py
