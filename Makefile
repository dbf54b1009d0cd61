# Two commands: `make demo` and `make test`. Each makes its .venv on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The committed results: `make results` completes them, `make results METHODS=new,new:parameter=7` extends them.
RESULTS := benchmarks/results/smollm2
TASKS := needle,passkey64,ruler_niah_single_1,ruler_niah_single_2,ruler_niah_multikey_1,ruler_fwe,ruler_qa_1,multiturn,shared,manyshot,arithmetic,instructions
METHODS := streamingllm,knorm,snapkv,snapkv:kernel=21,snapkv:kernel=63,fastkv:tsp_layer=22;tsp_rate=0.3;window=32;kernel=21;pooling=avg

.PHONY: demo test bench results docs clean

demo: $(VENV)/.ready
	$(BIN)/kvsieve demo

test: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/first.py

results: $(VENV)/.ready
	$(BIN)/kvsieve eval --tasks $(TASKS) --lengths 1024 --methods "$(METHODS)" --budgets 10%,25%,50% --samples 25 \
		--question both --out $(RESULTS) --resume
	$(BIN)/kvsieve report $(RESULTS) --formats png

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
