# make demo   an attention call that runs out of memory, recovered, on whatever device is here
# make test   lint, types, and the tests that are quick: some minutes
# make test-all   the same with all tests, as CI does, a short soak among them
# make test-models   the tests of models, with the oldest and the newest Transformers that are allowed
# make check FILE=...   lint and types of a file, and the tests of its room
# make docs   the pages of docs/ as a site, into site/
# make smoke   wheel and sdist, each in a fresh environment of every Python here, with the pinned dependencies
# make resolve   whether the pins can be had from the default index, on every Python here; installs nothing
# The first ones set up an environment of their own in .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is written by the first run, of what it imports: compiling all of torch takes 20 seconds.
INSTALL := $(BIN)/pip --disable-pip-version-check --quiet install --no-compile

# A machine whose Python already has a CUDA torch keeps it; elsewhere the pinned one is installed.
HAS_CUDA := $(shell $(PYTHON) -c "import torch; print(int(torch.cuda.is_available()))" 2>/dev/null)
ifeq ($(HAS_CUDA),1)
VENV_FLAGS := --system-site-packages
CONSTRAINTS :=
TORCH :=
else
VENV_FLAGS :=
CONSTRAINTS := -c constraints.txt
TORCH := "$(shell grep '^torch==' constraints.txt)"
endif

.PHONY: demo test test-all quick-tests all-tests test-models check lint types docs smoke resolve clean

# A pip of 2026 needs two thirds of the time of one of 2023. torch by its exact version: a resolver left
# free would fetch the largest build there is.
$(VENV)/.run: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	@$(INSTALL) $(CONSTRAINTS) --upgrade pip
	@$(if $(TORCH),$(INSTALL) $(TORCH) $(CONSTRAINTS),true)
	@$(INSTALL) $(CONSTRAINTS) -e ".[draw]"
	@touch $@

# What lint and types need.
$(VENV)/.tools: $(VENV)/.run
	@$(INSTALL) $(CONSTRAINTS) mypy ruff
	@touch $@

$(VENV)/.dev: $(VENV)/.tools
	@$(INSTALL) $(CONSTRAINTS) -e ".[dev]"
	@touch $@

# Bytecode of torch, which both processes of the tests would compile.
$(VENV)/.compiled: $(VENV)/.run
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import torch._dynamo, quorum_attention"
	@touch $@

demo: $(VENV)/.run
	@PYTHONDONTWRITEBYTECODE= $(BIN)/quorum-attention recover --causal

# Two processes of one thread each: most tensors of the tests are so small that two threads only wait
# for each other. (Three processes on two cores: 216 s for the quick tests in place of 165.) With a GPU
# one process, because tests count what is allocated on it. Bytecode is kept even where the environment
# says not to: tests start some hundred processes that import the package.
WORKERS ?= $(if $(filter 1,$(HAS_CUDA)),0,2)

PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# mypy takes 20 s of one core: while the other tools are installed, later while tests run.
test: lint
	@$(MAKE) --no-print-directory -j 2 quick-tests types $(VENV)/.compiled

test-all: lint
	@$(MAKE) --no-print-directory -j 2 all-tests types $(VENV)/.compiled

quick-tests: $(VENV)/.dev
	$(PYTEST) -m "not slow"

all-tests: $(VENV)/.dev
	$(PYTEST)

# Each Transformers gets an environment over .venv, in which it and what it needs are installed anew.
ALLOWED := $(shell sed -n 's/^transformers = \["transformers\(.*\)"\]$$/\1/p' pyproject.toml)
OLDEST := $(shell echo '$(ALLOWED)' | sed 's/^>=\([^,]*\),.*/==\1.*/')
MODEL_TESTS := tests/integrations tests/recipes

test-models: $(VENV)/.dev
	@below=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"); \
	for version in "$(ALLOWED)" "$(OLDEST)"; do \
	  here=build/models; rm -rf $$here; $(BIN)/python -m venv $(VENV_FLAGS) $$here || exit 1; \
	  dir=$$($$here/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"); \
	  echo "import site; site.addsitedir('$$below')" > $$dir/below.pth; \
	  $$here/bin/pip --disable-pip-version-check install --quiet --no-compile --upgrade "transformers$$version" || exit 1; \
	  $$here/bin/python -c "import transformers; print('Transformers', transformers.__version__)"; \
	  PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 QUORUM_ATTENTION_GENERATED=64 $$here/bin/python -m pytest -n $(WORKERS) --dist worksteal \
	    $(MODEL_TESTS) || exit 1; \
	done

# The tests of src/quorum_attention/ROOM/NAME.py are tests/ROOM, of a file beside the rooms tests/test_NAME.py.
PARTS = $(subst /, ,$(patsubst src/quorum_attention/%,%,$(FILE)))
TESTS = $(if $(filter tests/%,$(FILE)),$(FILE),$(wildcard tests/$(firstword $(PARTS)) tests/test_$(firstword $(PARTS))))

check: $(VENV)/.dev
	@test -n "$(TESTS)" || { echo "make check FILE=path: no tests belong to '$(FILE)'"; exit 1; }
	$(BIN)/ruff check $(FILE)
	$(BIN)/ruff format --check $(FILE)
	$(BIN)/mypy
	$(PYTEST) -m "not slow" $(TESTS)

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.tools
	$(BIN)/mypy

# The warning is of a later MkDocs, which the pins leave out.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

# Local wheels, which may ask for less than those of the index do, are left out.
resolve:
	@for v in 3.10 3.11 3.12 3.13; do \
	  if ! python$$v -m pip --version >/dev/null 2>&1; then echo "Python $$v: not here"; continue; fi; \
	  env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null \
	    python$$v -m pip --disable-pip-version-check install --quiet --dry-run --ignore-installed \
	    $(if $(CONSTRAINTS),$(CONSTRAINTS),-c constraints.txt) ".[dev]" || exit 1; \
	  echo "Python $$v: resolves"; \
	done

smoke: $(VENV)/.dev
	@rm -rf build dist && $(BIN)/python -c "from setuptools import build_meta as b; b.build_sdist('dist'), b.build_wheel('dist')"
	@for v in 3.10 3.11 3.12 3.13; do \
	  if ! python$$v -m pip --version >/dev/null 2>&1; then echo "Python $$v: not here"; continue; fi; \
	  for what in dist/*.whl dist/*.tar.gz; do \
	    here=build/smoke/$$v; rm -rf $$here; python$$v -m venv $$here || exit 1; \
	    $$here/bin/pip --disable-pip-version-check install --quiet -c constraints.txt \
	      "$(shell grep '^torch==' constraints.txt)" setuptools "$$what" || exit 1; \
	    (cd build/smoke && $$v/bin/python $(CURDIR)/tests/packaging/smoke.py) || exit 1; \
	    echo "Python $$v: $$what works"; \
	  done; \
	done

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
