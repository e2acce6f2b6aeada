# Two commands are all the set-up: `make run` and `make test`. ARGS="..." passes overrides, or pytest's options.
#   make run ARGS="pipeline=grpo reward.target=reverse"
#   make bench BENCH=loader ARGS="rows=12000"          (BENCH: learning, loader, token_cache, data_path, planning)
# TORCH_INDEX names an index that serves the CPU build of torch; without it pip's own configuration decides.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
ARGS ?=
BENCH ?= learning
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# The build of vllm that fits this machine; both bring torch packages that are built for another torch.
ENGINE := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)

.PHONY: run test check bench clean

run: $(VENV)/.installed-run
	$(BIN)/python run.py $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.$(BENCH) $(ARGS)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-run: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV): a few minutes, once"
	$(PIP) install '$(TORCH)' $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) install -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed-run
	@echo "installing the test tools and vllm ($(ENGINE) build) into $(VENV): a few minutes, once"
	$(PIP) install -e '.[test,bench,$(ENGINE)]' $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(PIP) uninstall -y torchvision torchaudio torchcodec
	@touch $@

$(VENV)/.installed-bench: pyproject.toml $(VENV)/.installed-run
	$(PIP) install -e '.[bench]'
	@touch $@

clean:
	rm -rf $(VENV)
