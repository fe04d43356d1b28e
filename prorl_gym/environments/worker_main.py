"""What runs inside a grader's worker process: read a request, call one function, write its answer.

Started by ``prorl_gym.environments.worker_pool`` with one socket; nothing else is inherited. Each message is a 4-byte
big-endian length and that many bytes of JSON. The process bounds itself in memory and, per request, in CPU time, so
that it ends even when the service that started it is gone.
"""

import importlib
import json
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct(">I")
MAX_MESSAGE = 8 << 20
"""Longest message in bytes, both ways."""


def main(descriptor: int, target: str, memory: int) -> None:
    """Serve requests until the other end closes.

    Args:
        descriptor: inherited socket.
        target: ``module:function`` that maps a JSON value to a JSON value.
        memory: bound of the address space in bytes.
    """
    connection = socket.socket(fileno=descriptor)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        function = _load(target)
    except Exception as error:  # reported whatever it is: this worker cannot work
        _send(connection, {"failed": f"{type(error).__name__}: {error}"})
        return
    _send(connection, {"ready": True})
    while True:
        request = _receive(connection)
        if request is None:
            return
        # SIGPROF ends the process when its CPU time is used up; a busy machine does not shorten that.
        signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])
        try:
            answer = {"result": function(request["body"])}
        except (Exception, RecursionError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(connection, answer)


def _load(target: str) -> Callable[[Any], Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _send(connection: socket.socket, message: Any) -> None:
    body = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(body)) + body)


def _receive(connection: socket.socket) -> Any:
    header = _receive_exactly(connection, LENGTH.size)
    if header is None:
        return None
    body = _receive_exactly(connection, LENGTH.unpack(header)[0])
    return None if body is None else json.loads(body)


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        chunk = connection.recv(count - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
