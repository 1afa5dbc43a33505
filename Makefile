# Everything a contributor does. `make help` lists it.

PYTHON ?= python3
VENV := .venv
MLFLOW := .venv-mlflow
FLOWER := .venv-flower
TRL := .venv-trl
BIN := $(VENV)/bin
# Which build of torch `make setup` installs: auto (what pip finds first), cpu, or cuda.
# For cpu and cuda give the index that pytorch.org/get-started names, as TORCH_INDEX_URL.
TORCH ?= auto
TORCH_INDEX_URL ?=
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
torch_pin_auto := torch==$(TORCH_VERSION)
torch_pin_cpu := torch==$(TORCH_VERSION)+cpu
torch_pin_cuda := torch==$(TORCH_VERSION)
torch_index := $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))

# How many processes share the tests without Ray, which wait now and then: one more than there are
# processors, four at most. The rest needs one Ray, and runs in one. nproc heeds OMP_NUM_THREADS, which
# is exported below.
TEST_PROCESSES ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc); echo $$((n < 4 ? n + 1 : 4)))

# Options of `make chaos`, such as --seed 7 (see `python -m tests.chaos --help`).
CHAOS ?=
# Parts of `make soak` to be run, such as `storms contract`; all that have not passed if none is named.
PART ?=

# What is covered whole: the states, the retries and the transitions. And how many storms help.
SURE := service/domain/states.py,service/domain/attempts/retries.py,service/lifecycle/transitions.py
COVERAGE_SEEDS ?= 100

# Tests without Ray take what the tests on a real Ray, which mostly wait for something, leave of the
# processors. Where Linux groups processes by session, the session gets the lower priority.
ifneq ($(shell command -v setsid),)
AT_LEISURE := setsid -w sh -c 'echo 19 2>/dev/null >/proc/self/autogroup; exec nice -n 10 "$$0" "$$@"'
endif

export OMP_NUM_THREADS ?= 1
# Each process compiles every module anew where this is set, a second or two each time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo run test test-fast coverage soak chaos check lint types imports format blocking openapi docs dist bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(VENV)/.ready ## make .venv with everything in it

$(VENV)/.ready: constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dray needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(torch_index) '$(torch_pin_$(TORCH))'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[server,dev,docs]'
	@touch $@

demo: setup ## train a real model on an embedded Ray and show it
	@$(BIN)/python -m examples.demo

run: setup ## run the service here, until Ctrl-C
	$(BIN)/python -m api

test: setup ## run the test suite, but for what takes long
	@trap 'kill $$others 2>/dev/null; rm -f $$told' EXIT; trap 'exit 130' INT TERM; told=$$(mktemp); \
	$(AT_LEISURE) $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal \
		--durations 15 tests/unit tests/page tests/generated tests/simulation >$$told 2>&1 & others=$$!; \
	RAY_worker_niceness=0 $(BIN)/python -m pytest --durations 15 \
		tests/contract tests/integration tests/chaos; with_ray=$$?; \
	wait $$others; without=$$?; cat $$told; exit $$((with_ray + without))

test-fast: setup ## run the tests that start no Ray and train nothing, in a minute or so
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal -q \
		-m 'not soak' --ignore tests/unit/training tests/unit

coverage: setup ## which branches of api/ and service/ the unit tests and some storms take
	$(BIN)/python -m coverage erase
	DRAY_SEEDS=$(COVERAGE_SEEDS) $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) \
		--dist worksteal --cov --cov-report= tests/unit tests/simulation
	@$(BIN)/python -m coverage report --include='$(SURE)' --fail-under=100; sure=$$?; \
	$(BIN)/python -m coverage report --fail-under=95; all=$$?; exit $$((sure + all))

soak: setup ## run every test, in parts; goes on with what has not passed yet
	$(BIN)/python -m tests.soak $(PART)

check: setup ## everything that CI runs
	$(MAKE) --jobs 3 lint types imports
	$(MAKE) test

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.plain_english

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

format: setup ## put the code into its format
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

bench: $(VENV)/.bench-ready $(MLFLOW)/.ready $(FLOWER)/.ready $(TRL)/.ready ## measure against peers, in an hour and a half (see benchmarks/README.md)
	$(BIN)/python -m benchmarks

chaos: setup ## inject every fault into real jobs for two hours or more; writes docs/explanation/chaos.md
	$(BIN)/python -m tests.chaos $(CHAOS)

$(VENV)/.bench-ready: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@touch $@

# Peers that can't share our environment: their own pins would change what is measured.
$(MLFLOW)/.ready: benchmarks/mlflow-requirements.txt
	$(PYTHON) -m venv $(MLFLOW)
	$(MLFLOW)/bin/python -m pip install --quiet --requirement benchmarks/mlflow-requirements.txt
	@touch $@

$(FLOWER)/.ready: benchmarks/flower-requirements.txt
	$(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/python -m pip install --quiet $(torch_index) '$(torch_pin_$(TORCH))'
	$(FLOWER)/bin/python -m pip install --quiet --requirement benchmarks/flower-requirements.txt
	@touch $@

$(TRL)/.ready: benchmarks/trl-requirements.txt
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip install --quiet $(torch_index) '$(torch_pin_$(TORCH))'
	$(TRL)/bin/python -m pip install --quiet --requirement benchmarks/trl-requirements.txt
	@touch $@

blocking: setup ## write the blocking client anew, after a change of the asynchronous one
	$(BIN)/python -m tests.unit.packaging.blocking_client

docs: setup ## build the manual, which `make run` serves at /manual/
	$(BIN)/python -m sphinx -q -j auto -W --keep-going \
		-d build/manual -b html docs dray/_manual

dist: setup ## build the wheel and the source archive; after `make docs` they have the manual
	$(BIN)/python -m build --no-isolation

openapi: setup ## write the agreed description of the API anew, after a change on purpose
	$(BIN)/python -m api.app > tests/unit/api/openapi.json

clean: ## remove the virtual environment, caches and what was built
	rm -rf $(VENV) $(MLFLOW) build dist dray/_manual .mypy_cache .ruff_cache .pytest_cache *.egg-info
