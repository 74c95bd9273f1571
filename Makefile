# make demo   an attention call that runs out of memory, recovered, on whatever device is here
# make test   lint, types, tests
# Both set up an environment of their own in .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

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

.PHONY: demo test lint types clean

# torch first and by its exact version: a resolver left free would fetch the largest build there is.
$(VENV)/.run: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	@$(if $(TORCH),$(PIP) install $(TORCH) $(CONSTRAINTS),true)
	@$(PIP) install $(CONSTRAINTS) -e ".[draw]"
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(PIP) install $(CONSTRAINTS) -e ".[dev]"
	@touch $@

demo: $(VENV)/.run
	@$(BIN)/quorum-attention recover --causal

test: lint types
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
