# A fresh machine needs Python 3.11 or newer with pip, make and a C compiler. Everything else lands in .tools and .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
UV ?= .tools/bin/uv
FETCHED_UV := $(filter .tools/bin/uv,$(UV))  # empty where another uv is given: nothing to fetch
UV_VERSION := 0.13.8
BIN := .venv/bin
MEMBERS := $(wildcard packages/* apps/*)
TRAIN_MEMBERS := $(filter-out %/composer-hf %/composer-ckpt,$(MEMBERS))
LOCKED := uv.lock pyproject.toml $(MEMBERS:%=%/pyproject.toml)
# Those whose subject has another form in transformers 4.57 than in 5.
TRANSFORMERS_TESTS := packages/composer-hf/tests tests/hf tests/ckpt/test_round_trips.py tests/ckpt/test_adapters.py \
    tests/ckpt/test_tied_adapters.py tests/ckpt/test_adapter_matrix.py tests/checkpoint/test_bridge_hugging_face.py \
    tests/algorithms/test_alibi_transformers.py tests/algorithms/test_gated_linear_units.py
unexport PYTHONDONTWRITEBYTECODE  # every launched rank would compile torch anew

.DEFAULT_GOAL := train

help:  ## Tell what can be made.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "%-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: .venv/.train  ## Train the example network on the CPU, in two processes.
	$(BIN)/composer -n 2 examples/train.py

stdlib-gpt: .venv/.synced  ## Train a small language model on two ranks, convert it, and generate with plain transformers.
	$(BIN)/composer -n 2 examples/stdlib_gpt.py

# Two workers that compute with two threads each would wait for each other on two cores.
ONE_THREAD = OMP_NUM_THREADS=1

test: .venv/.synced  ## Run every test and every example of a docstring or page, on two cores.
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist loadfile --doctest-modules -q

test-transformers4: .venv-transformers4/.synced  ## What depends on transformers, on its older major version.
	$(ONE_THREAD) .venv-transformers4/bin/python -m pytest -n 2 --dist loadfile -q $(TRANSFORMERS_TESTS)

docs: .venv/.synced  ## Build the site of the documentation into site/.
	$(BIN)/python tools/docs/build.py

bench: .venv/.synced  ## Measure everything in benchmarks/ beside plain PyTorch, and write docs/benchmarks.md.
	$(BIN)/python tools/bench.py

lint: .venv/.synced  ## Format, lint, types, floors, declared dependencies, ranges, generated modules, the numbers of the house.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	for member in $(MEMBERS); do (cd $$member && "$(CURDIR)/$(BIN)/deptry" src) || exit 1; done
	$(BIN)/python tools/ranges.py
	$(BIN)/python tools/faces.py --check
	$(BIN)/python tools/house.py --check
	$(BIN)/pyright --stats

alone: .venv/.synced  ## Test each built wheel in an environment of its own.
	$(BIN)/python tools/alone.py --uv $(UV)

dist: $(FETCHED_UV)  ## Build all wheels into dist/, twice, and compare them to the byte.
	$(PYTHON) tools/dist.py --uv $(UV)

check-lock: $(FETCHED_UV)  ## The committed lock holds no address and equals a fresh resolution.
	$(PYTHON) tools/lock.py check --uv $(UV)

lock: $(FETCHED_UV)  ## Resolve again, keep every pin that still fits, leave the addresses out.
	$(UV) lock
	$(PYTHON) tools/lock.py strip

.tools/bin/uv:
	@echo "Downloading uv $(UV_VERSION), which installs everything else (about 20 MB)."
	$(PYTHON) -m pip install -q --disable-pip-version-check --no-deps --target .tools uv==$(UV_VERSION)

# What examples/train.py needs. It is added to what the environment has, so that it may run after `make test` as well.
.venv/.train: $(LOCKED) | $(FETCHED_UV)
	$(call install,.venv,--package composer-suite --no-default-groups --group example,install -r,$(TRAIN_MEMBERS))
	touch $@

.venv/.synced: $(LOCKED) | $(FETCHED_UV)
	$(call install,.venv,--all-packages --all-extras,sync,$(MEMBERS))
	touch .venv/.train $@

.venv-transformers4/.synced: .venv/.synced
	$(call install,.venv-transformers4,--all-packages --all-extras --group transformers4,sync,$(MEMBERS))
	touch $@

# $(1): the environment's folder; $(2): the part of the lock; $(3): whether to add it or to leave nothing else;
# $(4): our packages.
define install
	$(UV) venv -q --allow-existing --python $(PYTHON) $(1)
	$(UV) export -q --frozen $(2) --no-emit-workspace --no-annotate -o $(1)/lock.txt
	@$(1)/bin/python tools/download_size.py --uv $(UV) $(1)/lock.txt
	$(UV) pip $(3) $(1)/lock.txt --python $(1)/bin/python --require-hashes
	$(UV) pip install -q --python $(1)/bin/python --no-deps $(4:%=-e ./%)
endef

.PHONY: help train stdlib-gpt test test-transformers4 docs bench lint alone dist check-lock lock
