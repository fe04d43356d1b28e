"""Commands that the scripts start: each announces that it works, may be killed and started again, and ends with us."""

import ctypes
import os
import re
import resource
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from audit import LearnError

SERVING = re.compile(r"serving on (http://[\w.:]+(?:/v1)?)")
STOP_SECONDS = 30.0
READY_SECONDS = 300.0
_PR_SET_PDEATHSIG = 1


@dataclass
class Process:
    """A command, and its output in a file. It ends with this process, whatever ends that."""

    name: str
    """In messages."""
    command: Sequence[str]
    log: Path
    """What it prints is added there."""
    niceness: int = 0
    announced: re.Pattern[str] = SERVING
    """Finds in a line of its output that it works; its first group is the address, if it has one."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables beside ours, of which PYTHONPATH is left out: the command has its own environment."""

    def start(self) -> None:
        """Start it."""

        def prepare() -> None:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            os.setpgid(0, 0)  # Ctrl-C reaches this process, which stops it
            os.nice(self.niceness)

        self.child = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=prepare,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | dict(self.env),
            text=True,
            errors="replace",
        )
        assert self.child.stdout is not None
        self._ready = Future[str]()
        self._copier = threading.Thread(target=self._copy, args=(self.child.stdout, self._ready), daemon=True)
        self._copier.start()

    def _copy(self, lines: Iterable[str], ready: Future[str]) -> None:
        last = deque[str](maxlen=3)
        with self.log.open("a", encoding="utf-8") as file:
            for line in lines:
                print(line, end="", file=file, flush=True)
                last.append(line.strip())
                if not ready.done() and (found := self.announced.search(line)):
                    ready.set_result(found[1] if found.re.groups else "")
        if not ready.done():
            ready.set_exception(LearnError(f"{self.name}: it does not start: {' '.join(last)[-400:]}"))

    def wait_ready(self) -> str:
        """Wait until it says that it works; return its address.

        Raises:
            LearnError: it ended, or it says nothing.
        """
        try:
            return self._ready.result(READY_SECONDS)
        except TimeoutError:
            raise LearnError(f"{self.name}: it does not start within {READY_SECONDS:g} s: see {self.log}") from None

    def stop(self) -> None:
        """End it by SIGTERM; by SIGKILL if that takes long."""
        self.child.terminate()
        try:
            self.child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._copier.join(STOP_SECONDS)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.child.kill()
        self.child.wait()


@contextmanager
def server(process: Process, cpu: dict[str, float] | None = None) -> Iterator[str]:
    """Run a server while the context is open; yield its address.

    Args:
        process: not started.
        cpu: takes its CPU seconds, and those of its children.

    Raises:
        LearnError: it does not start.
    """
    process.log.unlink(missing_ok=True)
    process.start()
    try:
        yield process.wait_ready()
    finally:
        own, others = _own_cpu_seconds(process.child.pid), _children_cpu_seconds()
        process.stop()
        if cpu is not None:
            cpu[process.name] = own
            cpu[f"children of the {process.name}"] = _children_cpu_seconds() - others - own


def _own_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, without its children."""
    times = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def _children_cpu_seconds() -> float:
    """Return the CPU seconds of our children that have ended, with those of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
