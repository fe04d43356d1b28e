"""Ports for servers that are started with a number."""

import errno
import random
import socket
from pathlib import Path

_CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 20_000  # Ray's workers listen below


def free_ports(count: int) -> list[int]:
    """Return different ports of 127.0.0.1 that nothing uses, none of them in the range of clients' own ports.

    From there (what binding port 0 returns) the kernel gives a port to some connection before the server has started.
    """
    end = max(int(_CLIENTS.read_text(encoding="ascii").split()[0]), 32_768)
    found: list[int] = []
    for port in random.sample(range(_FIRST, end), end - _FIRST):
        if len(found) == count:
            break
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                found.append(port)
    return found
