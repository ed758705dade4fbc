# Everything runs inside .venv, which the first target makes. Two commands do all: `make train`, `make test`.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
# Some virtual CPUs advertise AMX and trap on it; this keeps oneDNN off it. Harmless elsewhere.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.PHONY: train test test-learning test-browser lint sanitize bench clean

$(VENV)/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[plot,tensorboard]"
	touch $@

$(VENV)/dev: $(VENV)/base
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

train: $(VENV)/base
	$(VENV)/bin/holdfast train --preset repeat-previous-easy

test: $(VENV)/dev
	$(PY) -m pytest -n 2 --dist worksteal

test-learning: $(VENV)/dev
	$(PY) -m pytest tests/learning -o norecursedirs= -o addopts="--import-mode=importlib -q"

# The doctor's HTML report in a real browser, installed by the system's package manager when missing.
test-browser: $(VENV)/dev
	command -v chromium || { SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo); $$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq chromium fonts-dejavu-core; }
	$(PY) -m pytest tests/doctor/report/test_html.py

lint: $(VENV)/dev
	$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy

sanitize: $(VENV)/dev
	$(PY) tests/kernels/sanitize.py

bench: $(VENV)/dev
	$(PY) benchmarks/cpu_recurrence.py

clean:
	rm -rf $(VENV) build dist
