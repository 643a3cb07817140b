"""Ports for servers that are started side by side, and beside whatever else a machine does."""

from __future__ import annotations

import secrets
import socket

# Systems hand out higher ones by themselves, to outgoing connections too: one that was free a moment ago may be taken
# when a server that has just been told to use it gets that far.
FIRST, LAST = 20_000, 32_000


def free_port() -> int:
    """A port that nothing listens on and that no process is given unless it asks for just that one."""
    while True:
        port = FIRST + secrets.randbelow(LAST - FIRST)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
