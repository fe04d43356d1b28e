"""Child processes of a command that leaves none behind.

Gym starts servers and Ray, and Ray's daemons leave their parent's session and group. So the command makes itself the
*subreaper*: orphans below it become its children instead of init's, and everything that was started is exactly the
tree below this process. Processes are ended by id, never by name.
"""

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path

from prorl_gym.process_identity import ProcessIdentity


def descendants(root: int) -> list[ProcessIdentity]:
    """Return every living process below ``root``, except zombies, parents before children."""
    children: dict[int, list[ProcessIdentity]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = _stat(int(entry.name))
            if stat is not None:
                parent, seen = stat
                children.setdefault(parent, []).append(seen)
    found: list[ProcessIdentity] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += [seen.pid for seen in below]
    return found


def _stat(pid: int) -> tuple[int, ProcessIdentity] | None:
    """Return parent and identity of a process; ``None`` when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may contain any characters
    return None if fields[0] in "ZX" else (int(fields[1]), ProcessIdentity(pid, int(fields[19])))


def send_signal(seen: ProcessIdentity, number: signal.Signals) -> None:
    """Signal a process if it is still the same."""
    if seen.is_alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(seen.pid, number)


class LoggedProcess:
    """A started program whose output goes to a file."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    def tail(self, lines: int = 25) -> str:
        """Return the last lines of its output."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class ProcessSupervisor:
    """Starts children and ends everything below this process.

    Args:
        logs: directory of the children's outputs.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.children: list[LoggedProcess] = []

    async def start_child(self, name: str, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> LoggedProcess:
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
        child = LoggedProcess(name, process, log)
        self.children.append(child)
        return child

    async def stop_all(self, grace: float = 12.0) -> int:
        """End everything: first the children, newest first, then what is left below. Never raises.

        Args:
            grace: seconds between SIGTERM and SIGKILL.

        Returns:
            Number of processes that outlived SIGKILL: zero, unless the kernel holds one.
        """
        for child in reversed(self.children):
            if child.process.returncode is None:
                child.process.terminate()
        await self._wait_exited([child.process.wait() for child in self.children], grace)
        for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0), (signal.SIGKILL, 5.0)):
            left = descendants(os.getpid())
            for seen in left:
                send_signal(seen, number)
            await self._wait_exited([asyncio.to_thread(_wait_for_exit, seen, seconds) for seen in left], seconds + 1)
            _reap_adopted({child.process.pid for child in self.children})
        return len(descendants(os.getpid()))

    @staticmethod
    async def _wait_exited(waits: Sequence[Awaitable[object]], seconds: float) -> None:
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()


def _wait_for_exit(seen: ProcessIdentity, seconds: float) -> None:
    """Wait by pidfd for the end of a process, which need not be a child."""
    try:
        descriptor = os.pidfd_open(seen.pid)
    except OSError:
        return
    try:
        if seen.is_alive:
            select.select([descriptor], [], [], seconds)
    finally:
        os.close(descriptor)


def _reap_adopted(own: set[int]) -> None:
    """Collect the exit codes of adopted orphans; asyncio collects those of the children in ``own``."""
    for pid in _zombie_children():
        if pid not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


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
