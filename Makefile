# maestro-hive. `make` alone lists the targets.
#
# Every target sets up what it needs: Python 3.11 or newer, make and git are enough, and only this
# folder is written to. What is installed is pinned, with hashes, in requirements/dev.txt; the peers
# that `make bench` compares with are in requirements/bench.txt and get an environment of their own.

BIN      := .venv/bin
READY    := $(wildcard .venv/ready)
PYTHONS  := $(if $(READY),$(BIN)/python) python3 python3.14 python3.13 python3.12 python3.11
# More workers than cores: many tests wait for processes that they started.
WORKERS  := $(shell expr `getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2` + 2)
PARALLEL := -n $(WORKERS) --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-dates check format formatted lint types imports docs
.PHONY: bench bench-peers bench-walk fuzz faults-quick faults lock agents clean venv

help:  ## list the targets
	@echo 'maestro-hive: durable execution for teams of AI agents'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  make test PYTHON=python3.13   uses another Python'
	@echo '  make test ARGS="-k lease -x"  passes arguments to the tool, here to pytest'

# --- try it -----------------------------------------------------------------------------------

demo: venv  ## watch a team work, its engine killed with kill -9, and nothing done twice
	@$(BIN)/maestro demo $(ARGS)

# What measures the wall clock runs alone, after the others. Arguments may select tests of only one of
# the two, and pytest ends with 5 where it selected none: that is an error if it is so for both.
# Bytecode is written even where the environment says not to: otherwise every process that tests
# start compiles it again. In a folder of its own it would be without that of .venv and of Python.
test: export PYTHONDONTWRITEBYTECODE :=
test: venv  ## run the tests
	@$(BIN)/pytest tests .mahabharatha/tests $(PARALLEL) $(ARGS) -m 'not timing'; first=$$?; \
	if [ $$first -ne 0 ] && [ $$first -ne 5 ]; then exit $$first; fi; \
	$(BIN)/pytest $$(grep -rl --include='*.py' 'mark[.]timing$$' tests) -n 0 $(ARGS) -m timing; \
	second=$$?; \
	if [ $$second -eq 5 ] && [ $$first -eq 0 ]; then exit 0; fi; \
	exit $$second

# The wall clock is shifted by a library that is compiled for it: gcc and libc6-dev on Debian.
test-dates: export PYTHONDONTWRITEBYTECODE :=
test-dates: venv  ## run the tests that depend on a clock at other dates
	@$(BIN)/python -m tests.clocks $(PARALLEL) $(ARGS)

# --- change it --------------------------------------------------------------------------------

check: formatted lint types imports test  ## run everything that a change must pass

format: venv  ## format the code, and apply the fixes that ruff has
	@$(BIN)/ruff check --quiet --fix-only
	@$(BIN)/ruff format

formatted: venv
	@$(BIN)/ruff format --check

lint: venv  ## check the code (ruff)
	@$(BIN)/ruff check

types: venv  ## check the types (mypy --strict)
	@$(BIN)/mypy

imports: venv  ## check that imports point down only (import-linter)
	@$(BIN)/lint-imports --no-logo

docs: venv  ## regenerate the reference, the pictures and the output shown in README and tutorial
	@$(BIN)/python -m docs.generate

# --- measure it, and inject faults -------------------------------------------------------------

bench: venv  ## measure it next to the limits of this machine and to its peers
	@$(BIN)/python -m benchmarks $(ARGS)

bench-peers: venv  ## install the peers into .venv-bench, as `make bench` does when it needs them
	@$(BIN)/python requirements/install.py bench

bench-walk: venv  ## count the calls that one step makes, and the modules they are in
	@$(BIN)/python -m benchmarks.walk $(ARGS)

# Each round draws other examples than the ones before, and than `make test`, which always draws the same.
fuzz: venv  ## try the properties with values drawn at random (ROUNDS=10)
	@for round in $$(seq $(or $(ROUNDS),10)); do \
	    $(BIN)/pytest $$(grep -rl --include='test_*.py' '@given(' tests) $(PARALLEL) \
	        --hypothesis-profile others -q $(ARGS) -m 'not timing' || exit; \
	done

faults-quick: venv  ## inject faults (kills, full disks, torn files, …): a sample
	@$(BIN)/python -m faults --quick $(ARGS)

faults: venv  ## inject faults: all of them
	@$(BIN)/python -m faults $(ARGS)

# --- set-up -----------------------------------------------------------------------------------

# Uses the first Python that is new enough; does nothing when .venv is ready.
venv:
	@for python in $(or $(PYTHON),$(PYTHONS)); do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        exec $$python requirements/install.py; \
	    fi; \
	done; \
	echo 'maestro-hive needs Python 3.11 or newer, which $(or $(PYTHON),python3) is not:' \
	     'install one, or name one, as in `make test PYTHON=/path/to/python3`.' >&2; \
	exit 1

LOCK := build/lock/bin/uv pip compile pyproject.toml --group build --universal \
    --python-version 3.11 --generate-hashes --custom-compile-command 'make lock' --quiet

lock: venv  ## pin the dependencies that pyproject.toml names (ARGS=--upgrade: the newest ones)
	@$(BIN)/python -m venv build/lock
	@build/lock/bin/pip install --quiet uv
	@$(LOCK) --extra dev --output-file requirements/dev.txt $(ARGS)
	@$(LOCK) --output-file requirements/runtime.txt $(ARGS)
	@$(LOCK) --extra bench --output-file requirements/bench.txt $(ARGS)
	@git --no-pager diff --stat -- requirements

agents: venv  ## install the agents, as far as they can be, for the tests with them (build/agents)
	@$(BIN)/python requirements/agents.py

clean:  ## remove everything that make created, .venv too
	@rm -rf .venv .venv-bench build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@rm -rf .mahabharatha/.mahabharatha
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
