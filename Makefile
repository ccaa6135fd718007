# The first target that needs it creates .venv; stamp files in it say what is installed.
# PYTHON: the interpreter .venv is made from. Default: the first one here that is new enough, 3.11 (the tested one) first.
PYTHON ?= $(firstword $(foreach p,python3.11 python3 python3.12 python3.13,\
	$(if $(shell $(p) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),$(p))))
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := constraints.txt
INSTALL := $(PIP) install -q -c $(CONSTRAINTS)
LATEST := .venv-latest
# bytecode is kept whatever the shell says: without it every process of a run rewrites and compiles all tests again
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
PYTEST := $(TEST_ENV) $(BIN)/pytest -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-deep test-fast test-latest test-triton gpu-test check lint format types api size layout dist clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/\1/p' $(MAKEFILE_LIST) | awk '{ name = $$1; $$1 = ""; printf "%-12s%s\n", name, $$0 }'

demo: $(VENV)/.run  ## install into .venv and run examples/demo.py
	$(BIN)/python examples/demo.py

# `times` prints the CPU time of the shell, then that of all it ran, user and system
test: $(VENV)/.test  ## install with the test extra and run the tests (JOBS=2 processes)
	$(PYTEST) $(ARGS); status=$$?; times; exit $$status

test-deep: $(VENV)/.test  ## all of them: every combination, more examples of each property
	$(PYTEST) --deep $(ARGS)

test-fast: $(VENV)/.test  ## the tests without the slow ones, of every subsystem
	$(PYTEST) -q -m "not slow" $(ARGS)

test-latest:  ## the tests on the newest versions that a plain install takes, in .venv-latest
	$(MAKE) $(LATEST)/.torch VENV=$(LATEST) CONSTRAINTS=constraints-latest.txt
	$(LATEST)/bin/python -m pip --disable-pip-version-check install -q -c constraints-latest.txt \
		--upgrade --upgrade-strategy eager -e ".[test]"
	$(TEST_ENV) $(LATEST)/bin/pytest -n $(JOBS) --dist worksteal $(ARGS)

test-triton: $(VENV)/.test  ## every kernel compiles for GPUs, without one, on the oldest Triton supported: minutes
	$(PIP) install -q --no-deps --upgrade --target .venv-triton triton==3.6.0
	SPECDEC_KERNELS=usual PYTHONPATH=.venv-triton $(TEST_ENV) $(BIN)/pytest -q tests/test_kernels_compile.py

gpu-test: $(VENV)/.test  ## on a CUDA device: kernels, timings and the engine as one table (ARGS="--out FILE")
	$(BIN)/python -m bench paged-attention tables greedy crowd $(ARGS)

# `make check test` finds the layout among the tests
check: lint size $(if $(filter test,$(MAKECMDGOALS)),,layout) types  ## lint, format, file sizes, layout, types

lint: $(VENV)/.test  ## ruff, rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.test  ## rewrite the files as `lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# build/ goes first: a module that was deleted would still be there. setuptools alone makes in half a second the tree
# that `pip install --target` takes four for
# mypy runs inside the copy: its own folder comes first when it resolves an import
types: $(VENV)/.test  ## mypy --strict on what is shipped, not on the checkout
	rm -rf build
	$(BIN)/python -W ignore -c "import setuptools; setuptools.setup()" -q build_py --build-lib build/types
	cd build/types && ../../$(BIN)/mypy -n $(JOBS) --strict --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache specdec

api: $(VENV)/.run  ## write docs/api.md, and the lists in other pages, from the code
	$(BIN)/python tools/api_reference.py
	$(BIN)/python tools/code_lists.py

size: $(VENV)/.run  ## lines of code, words of pages (ARGS="--against COMMIT"); fails on a long file without a reason
	$(BIN)/python tools/size.py $(if $(filter size,$(MAKECMDGOALS)),$(ARGS))

layout: $(VENV)/.test  ## import order, packages, exports
	OMP_NUM_THREADS=1 $(BIN)/pytest -q tests/test_layout.py tests/test_exports.py

dist: $(VENV)/.test  ## wheel and sdist in dist/, checked; the demo runs on the wheel in an environment of its own
	$(INSTALL) -e ".[dist]"
	rm -rf build dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	rm -rf build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tools/check_dist.py dist

clean:  ## remove what builds and checks leave; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/pyvenv.cfg:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch goes first, by itself, so that no later requirement chooses another build of it
$(VENV)/.torch: $(CONSTRAINTS) | $(VENV)/pyvenv.cfg
	$(INSTALL) torch
	@touch $@

$(VENV)/.run: pyproject.toml $(VENV)/.torch
	$(INSTALL) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(INSTALL) -e ".[test]"
	@touch $@
