# Every command of the project: `make help` lists them.
#
# Commands set up .venv when it is missing or older than pyproject.toml. With an interpreter named on the command line
# (`make test PYTHON=python3`) they use that one as it is and install nothing: for GPU hosts that bring their own torch
# and Triton and have no network.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
# What pip is asked for as torch; empty: tools/install_torch.py chooses.
TORCH ?=
# Passed on to the command, as in `make test ARGS="-k causal"`.
ARGS ?=

# Where the CPU build of torch is looked for if the indexes that pip is configured with have none; empty: PyTorch's own.
TORCH_CPU_INDEX ?=

ifeq ($(origin PYTHON),command line)
PY := $(PYTHON)
# One process: that Python may have no pytest-xdist.
PARALLEL :=
else
VENV := .venv
PY := $(VENV)/bin/python
# -q, not -qq: warnings are shown, as pip gives what ails the network as those.
PIP := $(PY) -m pip -q --disable-pip-version-check
TEST_READY := $(VENV)/.ready-test
DEV_READY := $(VENV)/.ready-dev
BENCH_READY := $(VENV)/.ready-bench
DOCS_READY := $(VENV)/.ready-docs
# The other minor release of Triton that is supported, in a folder that a test puts in front of the one in .venv.
OTHER_TRITON := 3.8
OTHER_TRITON_READY := .triton-$(OTHER_TRITON)/.ready
# A process for each core, and each file's tests in one of them, as they share what is compiled; files in the order of
# tests/conftest.py. One process if there is a card, which they would share.
PARALLEL := $(if $(shell nvidia-smi -L 2>/dev/null | grep GPU),,-n auto --dist loadfile --no-loadscope-reorder)
endif

.PHONY: help run test test-slow check format gpu-test bench docs blackwell-bringup explore mutants prove check-proofs who-sees-what races clean

help: ## List every command
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'PYTHON=python3    use this interpreter as it is, install nothing (GPU hosts with their own torch and Triton)'
	@echo 'TORCH=torch       the torch that set-up installs; default: a CPU build, if there is one, where there is no NVIDIA GPU'
	@echo 'ARGS="..."        passed on to the command, as in: make test ARGS="-k causal"'
	@echo
	@echo 'Systems: Linux on x86_64 (tested) and aarch64 (not tested), with Python 3.11 or newer;'
	@echo 'not macOS and not Windows (WSL 2 is Linux), for which there is no Triton'

run: $(TEST_READY) ## Run attention here and now and print what it saw
	@echo 'Loading torch and Triton: some seconds'
	@$(PY) -m gluon_attn $(ARGS)

test: $(TEST_READY) ## Run the tests but for the slow ones; without a Hopper card those that need one are skipped, with the reason
	@$(PY) -m pytest tests -m 'not slow' $(PARALLEL) $(ARGS)

test-slow: $(TEST_READY) $(OTHER_TRITON_READY) ## Run the other tests, further cases of the same kinds (half an hour on two quick cores)
	@$(PY) -m pytest tests -m slow --durations=40 $(PARALLEL) $(ARGS)

check: $(DEV_READY) ## Check formatting, lint and types
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy

format: $(DEV_READY) ## Format the code and apply the lint's safe fixes
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

gpu-test: $(TEST_READY) ## Run the tests that need a Hopper card
	@$(PY) -m pytest tests/gpu -m gpu $(ARGS)

bench: $(BENCH_READY) ## Run the benchmarks (needs a card)
	@$(PY) -m bench $(ARGS)

docs: $(DOCS_READY) ## Build all pages as one HTML site
	@$(PY) -m sphinx -q -b html -c docs/site . .out/site
	@echo 'written: .out/site/docs/README.html'

blackwell-bringup: $(TEST_READY) ## Try everything on a new card, safest first, and write one report; without a card, what can be
	@$(PY) -m bench.bringup $(ARGS)

explore: $(TEST_READY) ## Execute every kernel on the CPU under 1000 schedules each, looking for races (hours; ARGS="--only twins": small ones)
	@$(PY) -m tests.gluon_cpu.campaign_silent $(ARGS)

mutants: $(TEST_READY) ## Break each synchronisation operation of the kernel, one by one: is it found? (30 min)
	@$(PY) -m tests.gluon_cpu.campaign_mutants $(ARGS)

prove: $(TEST_READY) ## Prove the Blackwell kernels free of deadlocks and races, where no record of it holds (hours)
	@$(PY) -m proving $(or $(ARGS),all)

check-proofs: $(TEST_READY) ## Does each proof on record still hold for the kernels as they are? (half a minute on two free cores; proves nothing)
	@$(PY) -m proving list --check $(ARGS)

who-sees-what: $(TEST_READY) ## Which judge finds which kind of fault? The table of docs/checked.md, from planted faults (minutes)
	@$(PY) -m tests.proving.who_sees_what

races: $(TEST_READY) ## Run the kernels under Triton's concurrency sanitizer (needs a Hopper card)
	@$(PY) -m pytest tests/gpu/test_consan.py $(ARGS)

clean: ## Remove caches, builds and what runs left behind; .venv and .triton-3.8 stay
	@rm -rf build dist .out .pytest_cache .mypy_cache .ruff_cache .triton *.egg-info
	@find . \( -name .git -o -name .venv -o -name '.triton-*' \) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

ifdef VENV
$(TEST_READY): pyproject.toml
	@$(PYTHON) tools/install_torch.py --check
	@if [[ ! -x $(PY) ]]; then \
	    echo 'set-up: making $(VENV) with $(PYTHON)'; \
	    $(PYTHON) -m venv --clear $(VENV); \
	fi
	@$(PY) tools/install_torch.py --torch '$(TORCH)' --cpu-index '$(TORCH_CPU_INDEX)'
	@echo 'set-up: installing gluon-attn and what its tests need (a minute or two)'
	@$(PIP) install -e '.[test]'
	@touch $@

# Where pip finds none, what needs it is skipped, with the reason.
$(OTHER_TRITON_READY): pyproject.toml | $(TEST_READY)
	@echo 'set-up: installing Triton $(OTHER_TRITON) beside the other (under a minute)'
	@rm -rf $(@D)
	@if $(PIP) install --target $(@D) --no-deps 'triton==$(OTHER_TRITON).*'; then touch $@; \
	    else echo 'set-up: no Triton $(OTHER_TRITON), so its tests are skipped'; fi

$(DEV_READY): $(TEST_READY)
	@echo 'set-up: installing the formatter, the linter and the type checker (under a minute)'
	@$(PIP) install -e '.[dev]'
	@touch $@

$(DOCS_READY): $(TEST_READY)
	@echo 'set-up: installing what builds the site (under a minute)'
	@$(PIP) install -e '.[docs]'
	@touch $@

$(BENCH_READY): $(TEST_READY)
	@echo 'set-up: installing what the benchmarks need (under a minute)'
	@$(PIP) install -e '.[bench]'
	@touch $@
endif
