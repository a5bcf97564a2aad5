# Every target installs what it needs into $(VENV) first; nothing else has to be done on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
# What pip is asked for before anything else, so that the build of torch is chosen here and not by a dependency.
# Another build: make install TORCH="torch --index-url <index of that build>"
TORCH ?= torch==2.13.0
EXTRAS ?= dev
PIP_INSTALL ?= $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
ifndef SEED
SEED := $(shell $(PYTHON) -c "import secrets; print(secrets.randbelow(2**31))")
endif
PYTEST_ARGS ?=
# The environment of `make test-latest`, and what pip is asked for there; pre-releases: LATEST="--pre transformers".
LATEST_VENV ?= .venv-latest
LATEST ?= transformers
LATEST_TESTS ?= $(wildcard tests/test_parity_*.py tests/test_cache*.py tests/test_static_cache.py tests/test_generate*.py \
	tests/test_padding.py tests/test_packing.py tests/test_imports.py tests/test_registration.py)
QUICKSTART_ARGS ?=
BENCH_ARGS ?=

comma := ,
space := $() $()
# "dev, train" and "dev train" mean dev,train: a name with spaces would be two targets.
EXTRAS_LIST := $(subst $(space),$(comma),$(strip $(subst $(comma),$(space),$(EXTRAS))))
STAMP := $(VENV)/.installed-$(EXTRAS_LIST)
# A file's tests run in one process, which builds what they share once. In the order of names: xdist would put the files
# with few tests, which are the slow ones, at the end.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
# One thread per process: two test processes on two cores, and figures that do not depend on the machine's core count.
# Triton is going to change its default for fusing multiplications and additions, so it is said here.
TEST_ENV := OMP_NUM_THREADS=1 TRITON_DEFAULT_FP_FUSION=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-gpu test-latest fuzz bench lint docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## install torch, zaya_hf (editable) and the extras EXTRAS=dev (or dev,train ...) into VENV=.venv

$(STAMP): pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(TORCH)
	$(PIP_INSTALL) --editable ".[$(EXTRAS_LIST)]"
	touch $@

quickstart: $(STAMP)  ## train, evaluate and compare five tiny models (about five minutes on two cores), write a report
	$(VENV)/bin/zaya quickstart $(QUICKSTART_ARGS)

# Three processes: what Triton interprets cannot be compiled in the same one, and most tests need neither. Arguments may
# leave one of them without a test (exit code 5).
PYTEST = $(TEST_ENV) $(VENV)/bin/python -m pytest -q $(PARALLEL)
MAY_BE_EMPTY = $(if $(strip $(PYTEST_ARGS)),|| test $$? -eq 5)
# Where kernels are tested, unless PYTEST_ARGS names files.
KERNELS = $(if $(findstring tests/,$(PYTEST_ARGS)),,tests/kernels)

test: $(STAMP)  ## the tests that need neither GPU nor network (PYTEST_ARGS adds to the three commands)
	@echo "tests in plain PyTorch:"
	$(PYTEST) $(PYTEST_ARGS) $(MAY_BE_EMPTY)
	@echo "tests of Triton kernels, interpreted:"
	$(PYTEST) -m interpreter $(KERNELS) $(PYTEST_ARGS) $(MAY_BE_EMPTY)
	@echo "tests of Triton kernels, compiled:"
	$(PYTEST) --dist load -m compile_only $(KERNELS) $(PYTEST_ARGS) $(MAY_BE_EMPTY)

test-gpu: $(STAMP)  ## the kernels' tests on a GPU, at the sizes of a real model
	$(TEST_ENV) $(VENV)/bin/python -m pytest -q -m gpu $(KERNELS) $(PYTEST_ARGS)

# pip is told of transformers alone, so that the upper bound of pyproject.toml does not hold; what it then says about
# packages that do not fit together is no error.
test-latest:  ## parity and cache tests on the newest transformers, in an environment of its own (LATEST_VENV, LATEST)
	$(MAKE) --no-print-directory install VENV=$(LATEST_VENV)
	$(LATEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade $(LATEST)
	@$(LATEST_VENV)/bin/python -c "import torch, transformers, zaya_hf.supported_versions as v; \
		print('test-latest: torch', torch.__version__ + ', transformers', transformers.__version__, \
		'(the newest tested before:', v.TESTED['transformers'] + ')')"
	$(TEST_ENV) $(LATEST_VENV)/bin/python -m pytest -q $(PARALLEL) $(LATEST_TESTS) $(PYTEST_ARGS)

fuzz: $(STAMP)  ## the random tests with a fresh seed (SEED=N repeats one) and many more examples
	@echo "fuzz: SEED=$(SEED)"
	$(TEST_ENV) ZAYA_TEST_SEED=$(SEED) $(VENV)/bin/python -m pytest -q $(PARALLEL) \
		--hypothesis-profile=fuzz --hypothesis-seed=$(SEED) $(PYTEST_ARGS)

bench: $(STAMP)  ## speed and memory beside transformers' own class: a table, and benchmarks/results/cpu.json (takes long)
	$(VENV)/bin/python benchmarks/compare_upstream.py --table --output benchmarks/results/cpu.json $(BENCH_ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/mypy

docs: $(STAMP)  ## API reference from the docstrings, as HTML in docs/api
	$(VENV)/bin/python docs/build_api.py docs/api

clean:  ## remove the environment, caches, builds and the quickstart's output
	rm -rf $(VENV) $(LATEST_VENV) build dist docs/api runs .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
