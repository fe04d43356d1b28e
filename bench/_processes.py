"""Processes as /proc shows them, and what they cost.

Memory is the proportional set size (PSS), as the kernel accounts it: shared pages are divided among their users.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

UNSHARE = (
    *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts"),
    *("--fork", "--mount-proc", "true"),
)
"""The namespaces of a sandbox, with nothing else of one."""


def all_processes() -> Iterator[int]:
    """Yield every process of this pid namespace."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def process_tree(pid: int) -> list[int]:
    """Return every descendant of a process, itself first."""
    children: dict[int, list[int]] = {}
    for member in all_processes():
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{member}/stat").read_bytes().rpartition(b")")[2].split()
            children.setdefault(int(fields[1]), []).append(member)
    found, level = [pid], [pid]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += level
    return found


def pss(pids: Iterable[int]) -> float:
    """Return MB of some processes; those that have ended count nothing."""
    total = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of some processes, and of their children that have ended and were waited for."""
    ticks = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
