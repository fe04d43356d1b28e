"""Finding and killing a process tree, by parent links and start times; never by name."""

import os
import signal
import time
from dataclasses import dataclass

_ROUNDS = 200
_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    start: int
    """Clock ticks since boot."""
    alive: bool
    """Not a zombie."""
    stopped: bool = False
    """By SIGSTOP or the like, or by a tracer."""


class ProcessTable:
    """Reads a procfs through a descriptor, whatever is mounted on /proc.

    Args:
        proc_fd: descriptor of a procfs that shows this process's own pid namespace.
    """

    def __init__(self, proc_fd: int) -> None:
        self._fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc_fd)

    def look(self, pid: int) -> Process | None:
        """Return one process, or ``None`` when there is none of that number."""
        try:
            fd = os.open(f"{pid}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return None
        try:
            line = os.read(fd, 4096)
        except OSError:  # it ended between open and read
            return None
        finally:
            os.close(fd)
        fields = line[line.rindex(b")") + 2 :].split()  # the name before it may contain anything
        state = fields[0]
        return Process(pid, int(fields[1]), int(fields[19]), state not in (b"Z", b"X"), state in (b"T", b"t"))

    def children(self, parent: int) -> list[Process]:
        """Return the living children of a process."""
        found = [self.look(int(name)) for name in os.listdir(self._fd) if name.isdigit()]
        return [process for process in found if process and process.parent == parent and process.alive]

    def descendants(self, root: int) -> list[Process]:
        """Return the living descendants of ``root``, without itself."""
        children: dict[int, list[Process]] = {}
        for name in os.listdir(self._fd):
            if name.isdigit() and (process := self.look(int(name))):
                children.setdefault(process.parent, []).append(process)
        found: list[Process] = []
        level = [root]
        while level:
            level = [child for parent in level for child in children.get(parent, ())]
            found += [process for process in level if process.alive]
            level = [process.pid for process in level]
        return found

    def kill(self, target: Process) -> None:
        """SIGKILL exactly this process: the descriptor pins it, the start time proves that it is the one meant."""
        try:
            pidfd = os.pidfd_open(target.pid)
        except OSError:
            return
        try:
            now = self.look(target.pid)
            if now is not None and now.start == target.start:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended by itself
        finally:
            os.close(pidfd)

    def kill_descendants(self, root: int, since: int = 0) -> bool:
        """Kill until no living descendant of ``root`` that started at tick ``since`` or later is left.

        Processes that fork while we look are caught by the next round; rounds and time are bounded.

        Returns:
            Whether the tree is gone.
        """
        deadline = time.monotonic() + _SECONDS
        for _ in range(_ROUNDS):
            victims = [process for process in self.descendants(root) if process.start >= since]
            if not victims:
                return True
            for process in victims:
                self.kill(process)
            if time.monotonic() > deadline:
                break
        return False
