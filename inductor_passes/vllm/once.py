"""What the log says once in a process, however many layers, groups or steps have the same reason to say it."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.mamba_ops")

_said: set[str] = set()


def say_once(level: int, text: str) -> None:
    """Log a line unless it has been logged."""
    if text not in _said:
        _said.add(text)
        logger.log(level, "mamba_ops: %s", text)
