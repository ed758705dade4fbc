# Everything runs inside .venv, which the first target creates. Two commands do everything: `make train`, `make test`.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install -q --disable-pip-version-check -c constraints.txt
# Some virtual CPUs advertise AMX and trap on it. This keeps oneDNN from using it and is harmless elsewhere.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.PHONY: train test test-learning test-browser test-peers test-wheel wheels lint hooks coverage sanitize chaos mutants bench docs docs-serve figures test-docs clean

$(VENV)/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) "torch==2.13.0"
	$(PIP) -e ".[plot,tensorboard]"
	touch $@

$(VENV)/dev: $(VENV)/base
	$(PIP) -e ".[dev]"
	touch $@

train: $(VENV)/base
	$(VENV)/bin/holdfast train --preset repeat-previous-easy

test: $(VENV)/dev
	HOLDFAST_DEV=1 $(PY) -m pytest -n 2 --dist worksteal

SEED ?= 1
test-learning: $(VENV)/dev
	HOLDFAST_LEARNING_SEED=$(SEED) $(PY) -m pytest tests/learning -o norecursedirs= -o addopts="--import-mode=importlib -q"

# The doctor's HTML report in a real browser. The system's package manager installs one if it is missing.
test-browser: $(VENV)/dev
	command -v chromium || { SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo); $$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq chromium fonts-dejavu-core; }
	$(PY) -m pytest tests/doctor/report/test_html.py

# Environments written in JAX, EnvPool, rsl_rl's integration, and the doctor's subjects for other frameworks. RLlib pins a
# gymnasium of its own, so they have an environment of their own.
PEERS := .venv-peers
$(PEERS)/ready: pyproject.toml
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q --disable-pip-version-check "torch==2.13.0" pytest pytest-xdist \
		-e ".[jax,gymnax,craftax,brax,rsl_rl,skrl,rllib,onnx]" envpool "gymnax==1.0.1" "jax==0.10.2" "flax==0.12.8" "equinox==0.13.8" "rsl-rl-lib==5.5.1" "skrl==2.1.1" "ray[rllib]==2.60.0"
	touch $@

test-peers: $(PEERS)/ready
	$(PEERS)/bin/python -m pytest tests/examples/test_examples.py -k "jax or craftax or envpool"
	$(PEERS)/bin/python -m pytest tests/envs/jax tests/rollout/test_batch_env.py tests/integrations/rsl_rl tests/examples/test_rsl_rl_robot.py \
		tests/doctor/gallery $(foreach name,jax rsl_rl skrl rllib packed frameworks_page,tests/doctor/subjects/test_$(name).py)

# Style, formatting, types (strict), and the direction of imports.
lint: $(VENV)/dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

# Runs the checks of `make lint` before every commit.
hooks: $(VENV)/dev
	$(VENV)/bin/pre-commit install

# Which lines and branches of src/holdfast the tests run. Processes that tests start are not counted.
coverage: $(VENV)/dev
	HOLDFAST_DEV=1 $(PY) -m pytest -n 2 --dist worksteal --cov --cov-report=term

# Every function in C, and mutants of checkpoints, under tools that watch memory and threads.
sanitize: $(VENV)/dev
	$(PY) tests/kernels/sanitize.py

# Kills, faults, mutants, hostile files, wrong inputs and threads, for five minutes.
chaos: $(VENV)/dev
	$(PY) tests/chaos.py

# Mutants of shared policies: none may run code, none may load silently wrong. Mutants of buffers on disk: refused or harmless. Five minutes.
mutants: $(VENV)/dev
	$(PY) tests/pretrained_mutants.py --count 10000
	$(PY) tests/buffer_mutants.py --count 1000

# dist/: the wheel with the compiled CPU kernel, for any Python 3 on Linux x86_64, and the source distribution.
wheels: $(VENV)/dev
	rm -rf dist build/wheel
	$(PY) -m build --sdist --outdir dist .
	$(PY) -m build --wheel --outdir build/wheel .
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m auditwheel repair --plat manylinux_2_28_x86_64 --wheel-dir dist build/wheel/*.whl
	ls -l dist

# Installs the wheel into a clean environment, without a compiler on PATH, and trains.
test-wheel: wheels
	$(PY) tests/wheel_install.py dist/*.whl

# The documentation site, build/site/index.html. Everything it needs is in an environment of its own.
DOCS := .venv-docs
$(DOCS)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt "torch==2.13.0" -e ".[docs,plot]" pytest
	touch $@

export NO_MKDOCS_2_WARNING := 1
docs: $(DOCS)/ready
	$(DOCS)/bin/mkdocs build --strict

docs-serve: $(DOCS)/ready
	$(DOCS)/bin/mkdocs serve

# Draws docs/figures/ again.
figures: $(DOCS)/ready
	$(DOCS)/bin/python docs/tools/figures.py

# Every link and anchor of the built site, and the notebooks from top to bottom.
test-docs: docs
	$(DOCS)/bin/python -m pytest tests/docs -o addopts="--import-mode=importlib -q"

bench: $(VENV)/dev
	$(PY) benchmarks/cpu_recurrence.py

clean:
	rm -rf $(VENV) $(PEERS) $(DOCS) build dist htmlcov .coverage
