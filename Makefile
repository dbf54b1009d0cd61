# Two commands: `make demo` and `make test`. Each makes its .venv on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench docs clean

demo: $(VENV)/.ready
	$(BIN)/kvsieve demo

test: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/first.py

docs: $(VENV)/.ready
	$(BIN)/kvsieve models --markdown > docs/supported_models.md
	$(BIN)/kvsieve methods --markdown > docs/methods.md

$(VENV)/.ready: pyproject.toml constraints.txt requirements-demo.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements-demo.txt
	touch $@

clean:
	rm -rf $(VENV)
