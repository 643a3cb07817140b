"""A server gets a port that stays free until the server has bound it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from benchmarks.serving import ports
from benchmarks.serving.ports import free_port

HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_port_can_be_listened_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()


def test_a_port_that_is_listened_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        taken = free_port()
        listener.bind(("127.0.0.1", taken))
        listener.listen()
        monkeypatch.setattr(ports, "FIRST", taken)
        monkeypatch.setattr(ports, "LAST", taken + 2)
        assert {free_port() for _ in range(20)} == {taken + 1}


@pytest.mark.skipif(not HANDED_OUT.exists(), reason="Linux tells which ports it hands out")
def test_no_port_that_linux_hands_out_by_itself() -> None:
    first, last = map(int, HANDED_OUT.read_text().split())
    assert all(not first <= free_port() <= last for _ in range(100))
