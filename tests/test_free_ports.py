"""Ports that are named before their server starts: free, different, and never one that a client's connection gets."""

import socket
from pathlib import Path

import pytest

from prorl_gym import free_ports as module
from prorl_gym.free_ports import free_ports


def test_the_kernel_gives_none_of_them_to_a_connection():
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = free_ports(30)
    assert len(set(found)) == 30
    assert not [port for port in found if first <= port <= last and first >= 32_768]


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    (port,) = free_ports(1)
    following: list[int] = []

    def sample(ports: range, count: int) -> list[int]:
        following.extend([port, *(other for other in ports if other != port)])
        return following

    monkeypatch.setattr(module.random, "sample", sample)
    with socket.create_server(("127.0.0.1", port)):
        assert port not in free_ports(3)
    assert following[0] == port
