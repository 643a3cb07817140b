"""What holds for every test: PyTorch warns of no mutation or graph break, and nothing comes from a compile cache."""

import logging
import re
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch._dynamo.utils import counters

# PyTorch logs these, it raises no Python warning: in each case it goes on, but slower or with needless copies.
FORBIDDEN = re.compile(
    r"identify_(mutated|accessed)_tensors|assuming every input is mutated|graph break|skipping cudagraphs"
    r"|recompile_limit|cache_size_limit",
    re.IGNORECASE,
)

# On a busy machine one example may take long; how long says nothing about the code.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")


class Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if FORBIDDEN.search(message):
            self.messages.append(f"{record.name}: {message}")


@pytest.fixture(autouse=True)
def compile_afresh() -> Iterator[None]:
    """Compile what a test compiles: a graph from a cache would not meet the pass, nor show what this code does to it.

    A test of the caches themselves switches them on again.
    """
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


@pytest.fixture(autouse=True)
def forbid_pytorch_warnings() -> Iterator[None]:
    """Fail a test in which PyTorch could not analyse a mutation, broke a graph, or gave up compiling or CUDA graphs."""
    counters["graph_break"].clear()
    collector = Collector()
    logger = logging.getLogger("torch")
    logger.addHandler(collector)
    try:
        yield
    finally:
        logger.removeHandler(collector)
    assert not collector.messages, "PyTorch warned:\n" + "\n".join(collector.messages)
    assert not counters["graph_break"], f"torch.compile broke the graph: {dict(counters['graph_break'])}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
