"""Child processes of a command that leaves none behind.

Gym starts servers and Ray, and Ray's daemons leave their parent's session and group. So this process makes itself the
*subreaper*: whatever is orphaned below it becomes its child again instead of init's, and "everything that was started"
is exactly the tree below this process. It is ended by process id, never by name.
"""

import asyncio
import ctypes
import os
import select
import signal
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Seen:
    """One process, told apart from a later one with the same number by its start time (clock ticks since boot)."""

    pid: int
    started: int


def become_subreaper() -> None:
    """Adopt orphaned descendants from now on.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(root: int) -> list[Seen]:
    """Return every living process below ``root``, zombies left out, parents before children."""
    children: dict[int, list[Seen]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = _stat(int(entry.name))
            if stat is not None:
                parent, seen = stat
                children.setdefault(parent, []).append(seen)
    found: list[Seen] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += [seen.pid for seen in below]
    return found


def _stat(pid: int) -> tuple[int, Seen] | None:
    """Return parent and identity of a process; ``None`` when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else (int(fields[1]), Seen(pid, int(fields[19])))


def send(seen: Seen, number: signal.Signals) -> None:
    """Signal a process if it is still the one that was seen."""
    stat = _stat(seen.pid)
    if stat is not None and stat[1] == seen:
        try:
            os.kill(seen.pid, number)
        except ProcessLookupError:
            return


class Child:
    """A started program with its output in a file."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    def tail(self, lines: int = 25) -> str:
        """Return the last lines of its output."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class Family:
    """Starts children and ends everything below this process.

    Args:
        logs: directory of the children's outputs.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.children: list[Child] = []

    async def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> Child:
        """Start a program in a session of its own, so that a Ctrl-C at the terminal reaches only this process."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=dict(env),
                cwd=cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        child = Child(name, process, log)
        self.children.append(child)
        return child

    async def stop(self, grace: float = 12.0) -> int:
        """End everything: first the children in the order of trust, then whatever is left below. Never raises.

        Args:
            grace: seconds that SIGTERM gets before SIGKILL.

        Returns:
            How many processes outlived SIGKILL: zero, or the kernel is holding one.
        """
        for child in reversed(self.children):
            if child.process.returncode is None:
                child.process.terminate()
        await self._gone([child.process.wait() for child in self.children], grace)
        for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0), (signal.SIGKILL, 5.0)):
            left = descendants(os.getpid())
            for seen in left:
                send(seen, number)
            await self._gone([asyncio.to_thread(_wait_for_exit, seen, seconds) for seen in left], seconds + 1)
            _reap_adopted({child.process.pid for child in self.children})
        return len(descendants(os.getpid()))

    @staticmethod
    async def _gone(waits: Sequence[Awaitable[object]], seconds: float) -> None:
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()


def _wait_for_exit(seen: Seen, seconds: float) -> None:
    """Wait for the end of a process that need not be a child, by its pidfd."""
    try:
        descriptor = os.pidfd_open(seen.pid)
    except OSError:
        return
    try:
        stat = _stat(seen.pid)
        if stat is not None and stat[1] == seen:
            select.select([descriptor], [], [], seconds)
    finally:
        os.close(descriptor)


def _reap_adopted(own: set[int]) -> None:
    """Collect the exit codes of adopted orphans; those of our own children belong to asyncio."""
    for pid in _zombie_children():
        if pid not in own:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def _zombie_children() -> list[int]:
    me = os.getpid()
    zombies: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue
            fields = text[text.rindex(")") + 2 :].split()
            if fields[0] == "Z" and int(fields[1]) == me:
                zombies.append(int(entry.name))
    return zombies
