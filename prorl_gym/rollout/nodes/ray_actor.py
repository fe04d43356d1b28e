"""The actor on each Ray node: runs ``prorl-gym node`` there as a child process, and starts it again when it ends.

A child process and not the runner on the actor's event loop: it has a main thread of its own, so that signals, the
event loop and the spawner of sandboxes work as they do without Ray. It dies with the actor, which dies with its raylet.
This module does not import Ray: the launcher makes the actor of it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from prorl_gym.backoff import backoff_delay
from prorl_gym.sandbox.syscalls import set_parent_death_signal

_FIRST_DELAY_SECONDS = 1.0
_LONGEST_DELAY_SECONDS = 30.0
"""Between two starts. A node that ran for longer than this starts again after the first delay."""


class NodeSupervisor:
    """Keeps one node running.

    Args:
        arguments: of ``prorl-gym``.
        environment: variables to add to the actor's.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._arguments = tuple(arguments)
        self._environment = {**os.environ, **environment}
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_draining = threading.Event()
        # The parent-death signal comes when the thread that forked ends: this one lives as long as the actor.
        self._thread = threading.Thread(target=self._keep_running, name="node", daemon=True)
        self._thread.start()

    def ping(self) -> None:
        """Return once the actor has started."""

    def drain(self) -> None:
        """Stop the node with SIGTERM, and return when it has finished what it had in hand."""
        with self._lock:
            self._is_draining.set()
            if self._child is not None:
                self._child.terminate()
        self._thread.join()

    def _keep_running(self) -> None:
        failures = 0
        while True:
            with self._lock:
                if self._is_draining.is_set():
                    return
                child = self._child = self._start()
            started = time.monotonic()
            code = child.wait()
            failures = 0 if time.monotonic() - started > _LONGEST_DELAY_SECONDS else failures + 1
            delay = backoff_delay(max(0, failures - 1), first=_FIRST_DELAY_SECONDS, longest=_LONGEST_DELAY_SECONDS)
            print(f"prorl-gym node ended with exit code {code}", file=sys.stderr, flush=True)
            if self._is_draining.wait(delay):
                return

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", __name__, str(os.getpid()), *self._arguments]
        return subprocess.Popen(command, env=self._environment, stdin=subprocess.DEVNULL)


def _run_below_parent(parent: int, arguments: Sequence[str]) -> None:
    """Become ``prorl-gym`` with these arguments; it ends when the thread that forked this process ends."""
    set_parent_death_signal(signal.SIGKILL)  # kept across exec
    if os.getppid() != parent:  # it ended before the signal was set
        return
    # Ray gives its workers niceness 15 and the highest OOM score: the kernel would kill the node before its sandboxes.
    with suppress(PermissionError):  # an unprivileged process may not lower its niceness
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with suppress(PermissionError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("0")
    os.execv(sys.executable, [sys.executable, "-m", "prorl_gym", *arguments])


if __name__ == "__main__":
    _run_below_parent(int(sys.argv[1]), sys.argv[2:])
