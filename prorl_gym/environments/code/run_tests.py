"""Runs inside the grading sandbox as ``python3 -I -c <this text>``: runs one program on many tests, one after another.

The program runs in processes of its own, as the same user as this one: there is no other in the sandbox. It cannot
trace this process, read its memory or open its descriptors (``PR_SET_DUMPABLE``), and inherits none of them, so it sees
neither the inputs of later tests nor what was reported of earlier ones. It can stop or kill this process; the service
notices and makes that test fail. Expected results are not here at all.

What a test leaves behind (daemons, stopped processes) is below this process, since orphans come to it, and is killed
before the next test begins. Where that fails, no further test runs here. Standard library only, Python 3.8 or later.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
RESULT = 3
"""Descriptor on which the program's process finds the way back for a function's result."""
ERRORS_KEPT = 2000
"""Bytes kept of the end of standard error."""
FILE_SIZE = 64 << 20
SWEEP_SECONDS = 5.0

HARMLESS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
"""Signals that this process ignores: only two are left that can stop it."""

NO_ROOM = dict(exit=1, timed_out=False, truncated=False, seconds=0.0, cpu=0.0, clean=True, out=0, err=0)
"""Frame of a test for whose input the program left no room in ``/dev/shm`` at an earlier one: as one that crashed."""


def main() -> None:
    """Serve the one request on standard input; answer with frames on standard output."""
    job: Any = json.loads(sys.stdin.buffer.readline())
    protect()
    wake = watch_children()
    say({"ready": True})
    began = time.monotonic()
    for test in job["tests"]:
        if time.monotonic() - began >= job["batch_seconds"]:
            return say({"end": "paused"})
        stdin = sys.stdin.buffer.read(test["stdin"])
        if len(stdin) < test["stdin"]:
            return say({"end": "broken", "error": "the input ended early"})
        wall = min(job["wall"], job["seconds"] - (time.monotonic() - began))
        try:
            run = Run(job, test["room"], stdin)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                return say({"end": "broken", "error": str(error)})
            say(NO_ROOM)
            if job["stop_at_crash"]:
                return say({"end": "stopped"})
            continue
        ended = run.to_the_end(wall, wake)
        say(*ended)
        if not ended[0]["clean"]:
            return say({"end": "unclean"})
        if job["stop_at_crash"] and (ended[0]["exit"] or ended[0]["timed_out"] or ended[0]["truncated"]):
            return say({"end": "stopped"})
    say({"end": "done"})


def protect() -> None:
    """Shut this process off from the programs that it runs, and become the parent of what they leave behind."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for option, value in ((PR_SET_DUMPABLE, 0), (PR_SET_CHILD_SUBREAPER, 1)):
        if prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) was refused")
    for number in HARMLESS:
        signal.signal(number, signal.SIG_IGN)


def watch_children() -> int:
    """Return a descriptor that becomes readable when a child ends."""
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return woken


def say(frame: Any, *blobs: bytes) -> None:
    """Write a frame and what follows it, at once: this process may be killed at any moment."""
    data = memoryview(json.dumps(frame).encode("ascii") + b"\n" + b"".join(blobs))
    while data:
        data = data[os.write(1, data) :]


class Run:
    """One test: the program's process and what it wrote.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self, job: Any, room: int, stdin: bytes) -> None:
        self.room = room
        self.before = cpu_seconds()
        self.started = time.monotonic()
        self.out, self.err = bytearray(), bytearray()
        out, err = os.pipe(), os.pipe()
        self.readers = {out[0]: self.out, err[0]: self.err}
        given = -1
        try:
            given = unnamed(stdin)
            self.pid = start(job, given, out[1], err[1])
        except BaseException:
            self.close()
            raise
        finally:
            for descriptor in {given, out[1], err[1]} - {-1}:
                os.close(descriptor)
        for descriptor in self.readers:
            os.set_blocking(descriptor, False)

    def to_the_end(self, wall: float, wake: int) -> Any:
        """Wait for the end of the process and return the frame that tells of it, with both outputs."""
        status = self.wait(wall, wake)
        seconds = time.monotonic() - self.started
        clean = sweep(wake)
        truncated = self.drain() if clean else len(self.out) > self.room
        self.close()
        frame = {
            "exit": 0 if status is None else exit_code(status),
            "timed_out": status is None and not truncated,
            "truncated": truncated,
            "seconds": seconds,
            "cpu": cpu_seconds() - self.before,
            "clean": clean,
            "out": min(len(self.out), self.room),
            "err": len(self.err),
        }
        return frame, bytes(self.out[: self.room]), bytes(self.err)

    def wait(self, wall: float, wake: int) -> Any:
        """Return the exit status, or None when time or room for output was used up."""
        poll = select.poll()
        for descriptor in (*self.readers, wake):
            poll.register(descriptor, select.POLLIN)
        while True:
            left = self.started + wall - time.monotonic()
            if left <= 0:
                return None
            for descriptor, _ in poll.poll(left * 1000 + 1):
                if descriptor == wake:
                    empty(wake)
                elif self.read(descriptor) == 0:
                    poll.unregister(descriptor)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return status
            if len(self.out) > self.room:
                return None

    def read(self, descriptor: int) -> int:
        """Read once; return how much came, 0 at the end, -1 when there is nothing now."""
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return -1
        self.readers[descriptor] += data
        del self.err[:-ERRORS_KEPT]
        return len(data)

    def drain(self) -> bool:
        """Read what is in the pipes, that nobody writes to any more; return whether it was too much."""
        for descriptor, kept in self.readers.items():
            while len(kept) <= self.room and self.read(descriptor) > 0:
                continue
        return len(self.out) > self.room

    def close(self) -> None:
        """Close our ends of the pipes."""
        for descriptor in self.readers:
            os.close(descriptor)


def unnamed(data: bytes) -> int:
    """Return a file without a name that holds the data. It is memory, bounded by the sandbox's ``/dev/shm``."""
    file = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.lseek(file, 0, os.SEEK_SET)
    except OSError:
        os.close(file)
        raise
    return file


def start(job: Any, stdin: int, out: int, err: int) -> int:
    """Start the program's process in a session of its own; return its pid.

    Raises:
        OSError: fork or exec failed.
    """
    told, failed = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            become_program(job, stdin, out, err, failed)
        os.close(failed)
        failed = -1
        answer = os.read(told, 16)
    finally:
        os.close(told)
        if failed >= 0:
            os.close(failed)
    if answer:
        os.waitpid(pid, 0)
        raise OSError(f"the program cannot be started: error {answer.decode()}")
    return pid


def become_program(job: Any, stdin: int, out: int, err: int, failed: int) -> NoReturn:
    """In the child: wire up, give up what is left, exec. Never returns."""
    code = 5
    try:
        os.setsid()
        for number in HARMLESS:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        failed = fcntl.fcntl(failed, fcntl.F_DUPFD_CLOEXEC, 64)
        out = fcntl.fcntl(out, fcntl.F_DUPFD_CLOEXEC, 64)
        err = fcntl.fcntl(err, fcntl.F_DUPFD_CLOEXEC, 64)
        os.dup2(stdin, 0)
        os.dup2(err, 2)
        if job["result_pipe"]:
            os.dup2(out, RESULT)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        else:
            os.dup2(out, 1)
        argv, environment = job["argv"], {**os.environ, **job["env"]}
        path = job["argv"][0]
        limit(resource.RLIMIT_FSIZE, FILE_SIZE)
        limit(resource.RLIMIT_STACK, job["stack"], soft_only=True)
        limit(resource.RLIMIT_CPU, job["cpu"], reserve=1)
        limit(resource.RLIMIT_AS, job["memory"])  # last: this copy of the parent may be larger
        os.execvpe(path, argv, environment)
    except OSError as error:
        code = error.errno or code
    finally:
        os.write(failed, b"%d" % code)
        os._exit(127)


def limit(kind: int, wanted: int, reserve: int = 0, soft_only: bool = False) -> None:
    """Lower a limit; ``reserve``: what the hard one is above it. None that is lower already is raised."""
    hard = resource.getrlimit(kind)[1]
    value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    room = hard == resource.RLIM_INFINITY or value < hard
    resource.setrlimit(kind, (value, hard if soft_only else value + (reserve if room else 0)))


def sweep(wake: int) -> bool:
    """Kill everything below this process; return whether it is gone.

    First all are stopped, then killed: a process that is killed at once makes room for another fork.
    """
    deadline = time.monotonic() + SWEEP_SECONDS
    while reap():
        if time.monotonic() > deadline:
            return False
        victims: set[int] = set()
        while True:
            fresh = descendants() - victims
            if not fresh:
                break
            signal_all(fresh, signal.SIGSTOP)
            victims |= fresh
        signal_all(victims, signal.SIGKILL)
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        poll.poll(50)
        empty(wake)
    return True


def reap() -> bool:
    """Collect what has ended; return whether there are children left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return False
    return True


def descendants() -> set[int]:
    """Return the pids of the living processes below this one."""
    children: dict[int, list[tuple[int, bool]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):  # it has ended meanwhile
                continue
            children.setdefault(int(parent), []).append((int(name), state not in (b"Z", b"X")))
    found: set[int] = set()
    level = [os.getpid()]
    while level:
        below = [child for parent in level for child in children.get(parent, ())]
        found |= {pid for pid, alive in below if alive}
        level = [pid for pid, _ in below]
    return found


def signal_all(pids: set[int], number: int) -> None:
    """Send a signal to each that is still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


def empty(descriptor: int) -> None:
    """Read away what woke us."""
    try:
        while os.read(descriptor, 4096):
            continue
    except BlockingIOError:
        return


def cpu_seconds() -> float:
    """Return the CPU time of everything that was reaped so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def exit_code(status: int) -> int:
    """Return the exit code as a shell reports it."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


main()
