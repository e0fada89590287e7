# Everything a newcomer or a build machine runs. Stamp files keep a second run from installing again; a change of
# pyproject.toml installs anew.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
VENV_TEST := .venv-test
VENV_TEST312 := .venv-test312
MEGATRON_019 := $(VENV_TEST)/megatron-0.19.2
PIP_INSTALL := -m pip install --quiet --quiet --disable-pip-version-check
# Torch is pinned exactly: the tests compare with what one version of it does.
TORCH := torch==2.13.0
# Megatron-core does without einops until it makes the hierarchical groups of several optimizer instances.
MEGATRON := megatron-core==0.16.1 einops
# The memory saver's real binary runs in tests over a stand-in CUDA driver (tests/fake_cuda). It requires nothing else.
SAVER := torch_memory_saver==0.0.10
PYTEST := -m pytest -n 2
# What a library of another version could change is tested on both Pythons; the service and the simulator's numbers are
# not, for nothing of them differs between the two.
PURE_TESTS := $(wildcard tests/core)

export PIP_ROOT_USER_ACTION := ignore

# $(call find_python,3.12): path of an interpreter of that version, on PATH or among pyenv's; empty if there is none.
comma := ,
find_python = $$( \
  for python in python$(1) $(PYTHON) "$$(pyenv root 2>/dev/null || echo "$${HOME:-}/.pyenv")"/versions/$(1)*/bin/python; do \
    if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != ($(subst .,$(comma) ,$(1))))' \
      >/dev/null 2>&1; then command -v "$$python"; break; fi; \
  done)

.PHONY: help
help: ## Show the targets.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 12

.PHONY: demo
demo: $(VENV)/.stamp-base ## Predict the report's scenario and one that nobody ran; installs no torch.
	$(VENV)/bin/pitstop predict examples/relax-4xa6000-qwen3-4b.yaml --evidence examples/relax-4xa6000-qwen3-4b.baseline.csv
	$(VENV)/bin/pitstop predict examples/h200x64-qwen3-235b-a22b.yaml

.PHONY: check
check: $(VENV)/.stamp-dev ## Lint, format, types, import rules; evidence and calibration up to date.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python evidence/scripts/bundle.py --check
	$(VENV)/bin/pitstop calibrate check

# Megatron-core 0.19 adds the commit of the repository around it to its version: the ceiling hides ours from it.
IN_VENV_TEST := GIT_CEILING_DIRECTORIES="$(CURDIR)/$(VENV_TEST)" PITSTOP_MEGATRON_019="$(CURDIR)/$(MEGATRON_019)" \
  $(VENV_TEST)/bin/python

.PHONY: test
test: $(VENV_TEST)/.stamp check test-312 ## Check, then all tests with torch and Megatron-core, those of the core on Python 3.12 too.
	$(IN_VENV_TEST) $(PYTEST) -m 'not fault'

.PHONY: faults
faults: $(VENV_TEST)/.stamp ## Let ranks fail, stall and die, and the service be away: nothing hangs, nothing is lost.
	$(IN_VENV_TEST) $(PYTEST) -m fault

.PHONY: test-312
test-312: ## The tests that need no torch, on Python 3.12 if there is one.
	@python=$(call find_python,3.12); \
	if [ -z "$$python" ]; then \
	  echo "NOT RUN on Python 3.12: no python3.12 with venv found, neither on PATH nor among pyenv's versions."; \
	else \
	  $(MAKE) --no-print-directory $(VENV_TEST312)/.stamp PYTHON312="$$python"; \
	  echo "Pure tests on $$($(VENV_TEST312)/bin/python --version), without torch:"; \
	  $(VENV_TEST312)/bin/python $(PYTEST) -m 'not megatron' $(PURE_TESTS); \
	fi

.PHONY: serve
serve: $(VENV)/.stamp-dev ## Run the service on this machine.
	$(VENV)/bin/pitstop serve

.PHONY: clean
clean: ## Remove environments and caches.
	rm -rf $(VENV) $(VENV_TEST) $(VENV_TEST312) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Pitstop needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-base: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python $(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python $(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.stamp-base

$(VENV_TEST)/bin/python:
	@python=$(call find_python,3.11); \
	if [ -z "$$python" ]; then echo "The tests need Python 3.11 (with venv), on PATH or among pyenv's versions." >&2; exit 1; fi; \
	"$$python" -m venv $(VENV_TEST)

$(VENV_TEST)/.stamp: pyproject.toml $(MEGATRON_019)/.stamp | $(VENV_TEST)/bin/python
	$(VENV_TEST)/bin/python $(PIP_INSTALL) --editable '.[dev]' $(TORCH) $(MEGATRON) $(SAVER)
	@touch $@

# The tests also compare with megatron-core 0.19, which asks for Python 3.12. What they need of it runs on 3.11 as well,
# so its wheel is only unpacked, beside the installed 0.16.
$(MEGATRON_019)/.stamp: | $(VENV_TEST)/bin/python
	rm -rf $(MEGATRON_019)
	$(VENV_TEST)/bin/python $(PIP_INSTALL) --no-deps --ignore-requires-python --only-binary=:all: \
	  --python-version 3.12 --implementation cp --abi cp312 --target $(MEGATRON_019) megatron-core==0.19.2
	@touch $@

$(VENV_TEST312)/.stamp: pyproject.toml
	@test -x $(VENV_TEST312)/bin/python || "$(PYTHON312)" -m venv $(VENV_TEST312)
	$(VENV_TEST312)/bin/python $(PIP_INSTALL) --editable '.[dev]'
	@touch $@
