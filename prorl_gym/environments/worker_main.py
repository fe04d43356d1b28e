"""A grader's worker process: read a request, call one function, write its answer.

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
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct(">I")
MAX_MESSAGE = 8 << 20
"""Longest message in bytes, both ways."""


def main(descriptor: int, target: str, memory: int) -> None:
    """Serve requests on an inherited socket until the other end closes. See ``WorkerPool`` about the arguments."""
    connection = socket.socket(fileno=descriptor)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        module, _, name = target.partition(":")
        function: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # reported whatever it is: this worker cannot work
        _send(connection, {"failed": f"{type(error).__name__}: {error}"})
        return
    _send(connection, {"ready": True})
    stream = connection.makefile("rb")
    while header := stream.read(LENGTH.size):
        request = json.loads(stream.read(LENGTH.unpack(header)[0]))
        # SIGPROF ends the process when its CPU time is used up; a busy machine does not shorten that.
        signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])
        try:
            answer = {"result": function(request["body"])}
        except (Exception, RecursionError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(connection, answer)


def _send(connection: socket.socket, message: Any) -> None:
    body = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(body)) + body)
