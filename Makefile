# Each command makes what it needs; a second run installs nothing.
PYTHON ?= python3
VENV := $(or $(MAMBA_OPS_VENV),.venv)

.PHONY: help demo test gpu-test gpu-graph-test lint format clean

help:
	@echo "make demo      compile a Mamba2 layer with and without the pass, and show that nothing but the copy is gone"
	@echo "make test      the whole CPU test suite (make test VLLM_CPU=0 leaves out what needs vLLM's engine for CPUs)"
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
