"""A flood of a service by a caller without the token: ``python flood.py KIND PORT SOURCE CONNECTIONS SECONDS UID``.

Keeps that many connections busy, opens another one for each that is closed, and prints how many it opened.
"""

import os
import resource
import selectors
import socket
import sys
import time
from collections import deque

FIELDS = b"X: a\r\n" * 90
HEAD = b"POST /v1/rollouts HTTP/1.1\r\nHost: x\r\n"
SENT = {
    "silent": b"",
    "half": HEAD + FIELDS,
    "heads": HEAD + b"X: a\r\n" * 200_000,
    "line": HEAD + b"X: " + b"a" * 1_000_000,
    "bodies": HEAD + b"Content-Length: 1000000000\r\n\r\n" + b"a" * 1_000_000,
    "pipelined": b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n" * 20_000,
    "pages": b"GET /docs/ui.js HTTP/1.1\r\nHost: x\r\n\r\n",
    "many": b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n",
}
READS = frozenset({"many"})
"""Kinds that read their answers and ask again; the others never read."""


class Flood:
    def __init__(self, kind: str, port: int, source: str) -> None:
        self.kind, self.port, self.source = kind, port, source
        self.opened = 0
        self.selector = selectors.DefaultSelector()
        self.left: dict[socket.socket, memoryview] = {}

    def open(self) -> None:
        one = socket.socket()
        one.setblocking(False)
        one.bind((self.source, 0))
        one.connect_ex(("127.0.0.1", self.port))
        self.left[one] = memoryview(SENT[self.kind])
        self.selector.register(one, selectors.EVENT_WRITE if SENT[self.kind] else selectors.EVENT_READ)
        self.opened += 1

    def turn(self, one: socket.socket, events: int) -> bool:
        """Go on with a connection; whether it is still open."""
        try:
            if events & selectors.EVENT_WRITE:
                self.left[one] = self.left[one][one.send(self.left[one]) :]
                if not self.left[one]:
                    self.selector.modify(one, selectors.EVENT_READ)
            elif self.kind in READS or not SENT[self.kind]:
                if not one.recv(1 << 16):
                    return False
                self.left[one] = memoryview(SENT[self.kind])
                self.selector.modify(one, selectors.EVENT_WRITE)
            elif not one.recv(1, socket.MSG_PEEK):
                return False
            else:
                self.selector.unregister(one)  # what was answered is never read
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


def main(kind: str, port: int, source: str, connections: int, seconds: float, uid: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.nice(19)  # what counts is what the service does, not who gets the processors of a small machine
    if uid:
        os.setresuid(uid, uid, uid)
    flood = Flood(kind, port, source)
    wanted = deque(range(min(connections, hard - 50)))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(min(len(wanted), 100)):
            wanted.popleft()
            flood.open()
        for key, events in flood.selector.select(0.0 if wanted else 0.1):
            one = key.fileobj
            assert isinstance(one, socket.socket)
            if not flood.turn(one, events):
                flood.selector.unregister(one)
                del flood.left[one]
                one.close()
                wanted.append(0)
    print(flood.opened, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6]))
