# Each command makes what it needs; a second run installs nothing.
PYTHON ?= python3
VENV := $(or $(MAMBA_OPS_VENV),.venv)

.PHONY: help demo test docs serve-docs package gpu-test gpu-graph-test lint format clean

help:
	@echo "make demo      compile a Mamba2 layer with and without the pass, and show that nothing but the copy is gone"
	@echo "make test      the whole CPU test suite (make test VLLM_CPU=0 leaves out what needs vLLM's engine for CPUs)"
	@echo "make docs      the documentation, in build/site (make serve-docs shows it in a browser as you write)"
	@echo "make package   wheel and sdist, in build/package, installed and tried in an environment of their own"
	@echo "make gpu-test  the tests that need a GPU"
	@echo "make gpu-graph-test  the tests that look at the code for a GPU without one (PyTorch's CUDA build: 3 GB)"
	@echo "make lint      ruff and mypy"
	@echo "make format    let ruff rewrite the files"
	@echo "make clean     remove environments and caches"

demo:
	@$(PYTHON) tools/bootstrap.py inspect
	@$(VENV)/bin/python -m demo

test:
	@$(PYTHON) tools/bootstrap.py inspect test
	@$(VENV)/bin/python tools/run_tests.py

docs:
	@$(PYTHON) tools/bootstrap.py inspect docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

serve-docs:
	@$(PYTHON) tools/bootstrap.py inspect docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs serve

package:
	@$(PYTHON) tools/bootstrap.py inspect test lint package
	@$(VENV)/bin/python tools/check_package.py

gpu-test:
	@$(PYTHON) tools/bootstrap.py inspect test
	@$(VENV)/bin/python -m pytest -m gpu

gpu-graph-test: export MAMBA_OPS_VENV := .venv-cuda
gpu-graph-test: export MAMBA_OPS_TORCH := torch>=2.13
gpu-graph-test:
	@$(PYTHON) tools/bootstrap.py inspect test
	@.venv-cuda/bin/python -m pytest -q -n 2 tests/inductor_passes/test_gpu_graph.py

lint:
	@$(PYTHON) tools/bootstrap.py inspect test lint
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

format:
	@$(PYTHON) tools/bootstrap.py lint
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

clean:
	rm -rf .venv .venv-* build .mypy_cache .pytest_cache .ruff_cache .hypothesis
