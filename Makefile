# A fresh machine needs Python 3.11 or newer with pip, make and a C compiler. Everything else lands in .tools and .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
UV ?= .tools/bin/uv
FETCHED_UV := $(filter .tools/bin/uv,$(UV))  # empty where another uv is given: nothing to fetch
UV_VERSION := 0.13.8
BIN := .venv/bin
MEMBERS := $(wildcard packages/* apps/*)
unexport PYTHONDONTWRITEBYTECODE  # every launched rank would compile torch anew

train: .venv/.synced  ## Train the example network on the CPU, in two processes.
	$(BIN)/composer -n 2 examples/train.py

test: .venv/.synced  ## Run every test and every example of a docstring or page, on two cores.
	$(BIN)/python -m pytest -n 2 --dist loadfile --doctest-modules -q

lint: .venv/.synced  ## Format, lint, types, floors, declared dependencies, ranges.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	for member in $(MEMBERS); do (cd $$member && "$(CURDIR)/$(BIN)/deptry" src) || exit 1; done
	$(BIN)/python tools/ranges.py
	$(BIN)/pyright --stats

alone: .venv/.synced  ## Test each built wheel in an environment of its own.
	$(BIN)/python tools/alone.py --uv $(UV)

check-lock: $(FETCHED_UV)  ## The committed lock holds no address and equals a fresh resolution.
	$(PYTHON) tools/lock.py check --uv $(UV)

lock: $(FETCHED_UV)  ## Resolve again, keep every pin that still fits, leave the addresses out.
	$(UV) lock
	$(PYTHON) tools/lock.py strip

.tools/bin/uv:
	$(PYTHON) -m pip install -q --disable-pip-version-check --no-deps --target .tools uv==$(UV_VERSION)

.venv/.synced: uv.lock pyproject.toml $(MEMBERS:%=%/pyproject.toml) | $(FETCHED_UV)
	$(UV) venv -q --allow-existing --python $(PYTHON) .venv
	$(UV) export -q --frozen --all-packages --all-extras --no-emit-workspace --no-annotate -o .venv/lock.txt
	$(UV) pip sync -q --python $(BIN)/python --require-hashes .venv/lock.txt
	$(UV) pip install -q --python $(BIN)/python --no-deps $(MEMBERS:%=-e ./%)
	touch $@

.PHONY: train test lint alone check-lock lock
