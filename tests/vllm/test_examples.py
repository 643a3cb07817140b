"""The examples with vLLM run as a user would run them."""

from __future__ import annotations

import re
from collections.abc import Callable

from benchmarks.serving.ports import free_port

Call = Callable[..., str]


def test_offline(call: Call) -> None:
    output = call("examples/vllm_offline.py")
    answers = re.findall(r"(\d+) tokens from the cache, answer: (.*)", output)
    assert len(answers) == 6
    assert answers[0][0] == "0"
    assert all(int(cached) > 0 for cached, _ in answers[1:])
    assert [answer for _, answer in answers[:3]] == [answer for _, answer in answers[3:]]
    assert re.search(r"^mamba_ops: [1-9]\d* layer prefills without a snapshot.* declined: none", output, re.MULTILINE)


def test_server(call: Call) -> None:
    output = call("examples/vllm_server.py", environment={"PORT": str(free_port())})
    assert re.search(r"answer: \[\d+(, \d+){7}\]", output)
    assert re.search(r"next turn: \[\d+(, \d+){7}\]", output)
    assert "the snapshot of cached states is gone" in output
