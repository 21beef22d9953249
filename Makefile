PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup setup-core quick check test test-cli test-others campaign docs notebooks gpu release-check test-newest setup-ecosystem test-ecosystem test-deepspeed
.PHONY: test-floor test-floor-quick test-floor-torch test-floor-jax

# torch comes first and alone, so that no other package's wish for "any torch" is heard before the pinned one.
setup: GROUPS := check test docs benchmarks
setup-core: GROUPS := check test
setup setup-core:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable . $(GROUPS:%=--group %)

# The loop while working: the first case of every test that is not long, see tests/conftest.py.
quick:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses 2 --quiet -m quick tests/shared tests/torch tests/jax

check:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/proselint check README.md CHANGELOG.md CONTRIBUTING.md $(wildcard docs/*.md contrib/*.md examples/*.md)
	$(BIN)/mypy
	PYTHONPATH=src:. $(BIN)/lint-imports
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python tests/shared/user_script.py

# Three workers on two cores: many tests wait for processes of their own. The tests of the command fork, which only a
# process without threads may do, so they have one, and come first: the others add to their coverage.
test: test-cli test-others
test-cli:
	$(BIN)/pytest --quiet --cov --cov-report= tests/cli
test-others:
	$(BIN)/pytest --numprocesses 3 --dist worksteal --quiet --ignore tests/cli --durations 40 --durations-min 15 \
		--cov --cov-append --cov-report=term-missing:skip-covered --cov-fail-under=97

# Random sequences of operations with new seeds until the time is up; a failure ends it with the shortest sequence.
MINUTES ?= 30
campaign:
	MECHANIC_CAMPAIGN_MINUTES=$(MINUTES) $(BIN)/pytest -m slow --capture=no --quiet tests/campaign

# All that needs a GPU to be known: times and memory. See docs/gpu.md.
gpu:
	$(BIN)/python -m benchmarks.speed.on_gpu

# What would be released: built, looked into, installed into an empty environment and used.
release-check:
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --quiet --constraint constraints.txt pip
	.venv-release/bin/pip install --quiet --constraint constraints.txt --group release
	.venv-release/bin/python -m tests.release

# Executes the notebooks anew and keeps what they print and draw. The docs show that, and execute nothing.
notebooks:
	$(BIN)/pip install --quiet --constraint constraints.txt nbconvert ipykernel
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False docs/*.ipynb

docs:
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs docs/_build/html
	$(BIN)/sphinx-build --quiet --fail-on-warning -b linkcheck -d docs/_build/html/.doctrees docs docs/_build/links

# The oldest versions that pyproject.toml allows. PYTEST="-m quick" runs the quick ones alone.
PYTEST ?=
FLOOR_PYTHON ?= $(shell python3.10 -c 'import sys; print(sys.executable)' 2>/dev/null || echo $(PYTHON))
FLOOR_TORCH := torch==2.5.1 numpy==1.26.0
FLOOR_JAX := jax==0.8.1 jaxlib==0.8.1 optax==0.2.7 chex==0.1.92 toolz==1.2.0 flax==0.12.6 numpy==2.0.0
JAX_TESTS := tests/jax tests/shared/test_tuner.py tests/campaign/test_jax_campaign.py src/mechanic/jax
TORCH_TESTS := tests/torch tests/shared/test_oracle.py tests/shared/test_theory.py \
	tests/campaign/test_torch_campaign.py src/mechanic/torch src/mechanic/config.py src/mechanic/tuner.py

test-floor: test-floor-jax test-floor-torch

# torch's part only where its environment is there already: it takes minutes to install.
test-floor-quick:
	$(MAKE) test-floor-jax PYTEST="-m quick"
	[ ! -d .venv-floor-torch ] || $(MAKE) test-floor-torch PYTEST="-m quick"

# From PyPI this torch brings 5 GB of CUDA; the index of PyTorch has it without, and CI takes it from there.
test-floor-torch:
	$(FLOOR_PYTHON) -m venv .venv-floor-torch
	.venv-floor-torch/bin/pip install --quiet --constraint constraints.txt pip
	.venv-floor-torch/bin/pip install --quiet $(FLOOR_TORCH)
	.venv-floor-torch/bin/pip install --quiet $(FLOOR_TORCH) --editable . --group test-torch
	.venv-floor-torch/bin/pytest --numprocesses 2 --quiet $(PYTEST) $(TORCH_TESTS)

# JAX 0.8 needs Python 3.11. All that is not of JAX is seen in .venv, so that this takes seconds.
test-floor-jax:
	$(BIN)/python -m venv .venv-floor-jax
	.venv-floor-jax/bin/pip install --quiet --constraint constraints.txt pip
	.venv-floor-jax/bin/pip install --quiet --no-deps $(FLOOR_JAX) --editable .
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$(echo .venv-floor-jax/lib/python3*)/site-packages/venv.pth
	.venv-floor-jax/bin/python -m pytest --numprocesses 2 --quiet $(PYTEST) $(JAX_TESTS)

# The newest of everything that installs, with any Python.
test-newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --upgrade pip
	.venv-newest/bin/pip install --quiet torch
	.venv-newest/bin/pip install --quiet --editable . --group test
	.venv-newest/bin/pytest --numprocesses 2 --quiet $(PYTEST) $(TORCH_TESTS) $(JAX_TESTS)

# The frameworks bring more packages than all else together, and write under HOME.
# timm has a folder of its own: others import it if they find it, and it needs torchvision, which beside a torch for
# CPUs only cannot be imported as it comes from PyPI.
setup-ecosystem test-ecosystem: export HOME := $(CURDIR)/.venv-ecosystem/home
setup-ecosystem:
	$(PYTHON) -m venv .venv-ecosystem
	mkdir -p $(HOME)
	.venv-ecosystem/bin/pip install --quiet --constraint constraints.txt pip
	.venv-ecosystem/bin/pip install --quiet --constraint constraints.txt torch
	.venv-ecosystem/bin/pip install --quiet --constraint constraints.txt --editable . --group ecosystem
	.venv-ecosystem/bin/pip install --quiet --upgrade --constraint constraints.txt --no-deps --target .venv-ecosystem/timm timm torchvision

test-ecosystem: setup-ecosystem
	.venv-ecosystem/bin/pytest --numprocesses 2 --dist loadfile --quiet -W default tests/ecosystem
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
