# make demo    set up, then run the whole line at the default scale and show the table
# make test    set up, then run the tests
# make test-long   the tests of minutes each that `make test` leaves out
# make lint    ruff, mypy, snakefmt and Snakemake's linter
# make setup   only the environment
# make clean   delete the results (asks first)

PYTHON ?= python3.11
VENV ?= .venv
# More arguments for snakemake (demo) or pytest (test), e.g. make test ARGS="-k config"
ARGS ?=

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := demo
.PHONY: demo test test-long lint setup clean

export PATH := $(abspath $(VENV))/bin:$(PATH)
# Nothing at this scale needs a model hub, and nothing may quietly come to need one.
demo test test-long: export HF_HUB_OFFLINE := 1

setup:
	@scripts/setup.sh "$(VENV)" "$(PYTHON)"

demo: setup
	@python scripts/unlock.py
	@snakemake --cores all $(ARGS) || \
	    { echo "Stopped. The reason stands above; typed again, make demo goes on from here." >&2; exit 1; }
	@$(if $(ARGS),,scripts/show_results.sh results)

test: setup
	@python -m pytest -m "not gpu and not long" $(ARGS)

test-long: setup
	@python -m pytest -m "long" $(ARGS)

lint: setup
	ruff check .
	mypy
	snakefmt --check Snakefile workflow
	snakemake --lint

clean:
	@read -rp "Delete everything in results/ (trained drafters too)? [y/N] " answer; \
	if [[ $$answer == [yY] ]]; then \
	    find results -mindepth 1 -maxdepth 1 ! -name .gitkeep -exec rm -rf {} +; \
	fi
