# Thin targets; everything of substance is a program with --help.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp

.PHONY: help setup demo demo-short demo-stop test lint bench bench-load clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP)  ## a virtual environment with everything, pinned by constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash .ci/setup
	@touch $(STAMP)

demo: setup  ## the whole job on this machine: a drafter trained, measured, promoted, serving
	@$(BIN)/eyrie demo

demo-short: setup  ## the same in a short form, as CI runs it
	@$(BIN)/eyrie demo --short

demo-stop:  ## end what `make demo` left running
	@$(BIN)/eyrie demo --stop

test: setup  ## every test of the fast tier
	@$(BIN)/pytest -n 2 --dist worksteal tests

lint: setup  ## ruff, mypy --strict, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

bench: setup  ## engine figures for this machine: baseline against transformers, cost of verifying, of drafting
	@$(BIN)/python -m eyrie_workers.speculation.bench --target quickstart

bench-load: setup  ## what the load generator can take on this machine: 256 streams against a responder of known pace
	@$(BIN)/python -m eyrie_workers.load.bench

clean:  ## remove the environment and local state
	rm -rf $(VENV) .eyrie
