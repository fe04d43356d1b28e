"""Runs inside the grading sandbox as ``python3 -I -c <this text>``: runs one program on many tests, one after another.

The program runs in processes of its own, as the same user as this one: there is no other in the sandbox. It cannot
trace this process, read its memory or open its descriptors (``PR_SET_DUMPABLE``), and inherits none of them, so it can
read neither the inputs of later tests nor the reports of earlier ones. It can stop or kill this process; the service
notices and fails that test. Expected results are never in this sandbox.

Processes that a test leaves behind (daemons, stopped ones) are descendants of this process, a subreaper, and are killed
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
"""Descriptor on which the program's process writes a function's result."""
ERRORS_KEPT = 2000
"""Bytes kept of the end of standard error."""
FILE_SIZE = 64 << 20
SWEEP_SECONDS = 5.0
RESERVED = 1 << 30
"""Address space on top of the memory limit: a thread reserves its whole stack and touches little of it."""

IGNORED_SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
"""Signals that this process ignores; SIGKILL and SIGSTOP cannot be."""

NO_SPACE_FRAME = dict(exit=1, timed_out=False, truncated=False, seconds=0.0, cpu=0.0, clean=True, out=0, err=0)
"""Frame of a test without room for its input in ``/dev/shm``, which an earlier test filled: counts as a crash."""


def main() -> None:
    """Serve the one request on standard input; answer with frames on standard output."""
    job: Any = json.loads(sys.stdin.buffer.readline())
    protect()
    # For the programs, which inherit it: one that sets its own is known to have done so (the sandbox's own filter).
    lower_limit(resource.RLIMIT_CPU, job["cpu"], soft_only=True)
    wake = watch_children()
    write_frame({"ready": True})
    began = time.monotonic()
    for test in job["tests"]:
        if time.monotonic() - began >= job["batch_seconds"]:
            return write_frame({"end": "paused"})
        stdin = sys.stdin.buffer.read(test["stdin"])
        if len(stdin) < test["stdin"]:
            return write_frame({"end": "broken", "error": "the input ended early"})
        wall = min(job["wall"], job["seconds"] - (time.monotonic() - began))
        try:
            run = ProgramRun(job, test["room"], stdin)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                return write_frame({"end": "broken", "error": str(error)})
            ended: Any = (NO_SPACE_FRAME,)
        else:
            ended = run.run_to_end(wall, wake)
        write_frame(*ended)
        if not ended[0]["clean"]:
            return write_frame({"end": "unclean"})
        if job["stop_at_crash"] and (ended[0]["exit"] or ended[0]["timed_out"] or ended[0]["truncated"]):
            return write_frame({"end": "stopped"})
    write_frame({"end": "done"})


def protect() -> None:
    """Shut this process off from the programs that it runs, and become the parent of what they leave behind."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for option, value in ((PR_SET_DUMPABLE, 0), (PR_SET_CHILD_SUBREAPER, 1)):
        if prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) was refused")
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def watch_children() -> int:
    """Return a descriptor that becomes readable when a child ends."""
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return woken


def write_frame(frame: Any, *blobs: bytes) -> None:
    """Write a frame and its blobs at once: this process may be killed at any moment."""
    data = memoryview(json.dumps(frame).encode("ascii") + b"\n" + b"".join(blobs))
    while data:
        data = data[os.write(1, data) :]


class ProgramRun:
    """One test: the program's process and its output. Raises ``OSError``: the process could not be started."""

    def __init__(self, job: Any, room: int, stdin: bytes) -> None:
        self.output_limit = room
        self.memory_limit, self.peak = job["memory"], 0
        self.before = cpu_seconds()
        self.started = time.monotonic()
        self.out, self.err = bytearray(), bytearray()
        out, err = os.pipe(), os.pipe()
        self.readers = {out[0]: self.out, err[0]: self.err}
        given = -1
        try:
            given = memory_file(stdin)
            self.pid = start(job, given, out[1], err[1])
        except BaseException:
            self.close()
            raise
        finally:
            for descriptor in {given, out[1], err[1]} - {-1}:
                os.close(descriptor)
        for descriptor in self.readers:
            os.set_blocking(descriptor, False)

    def run_to_end(self, wall: float, wake: int) -> Any:
        """Wait for the end of the process and return its frame and both outputs."""
        status = self.wait(wall, wake)
        seconds = time.monotonic() - self.started
        clean = kill_descendants(wake)
        truncated = self.drain() if clean else len(self.out) > self.output_limit
        self.close()
        code = 0 if status is None else os.waitstatus_to_exitcode(status)
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        frame = {
            "exit": code,
            "timed_out": status is None and not truncated,
            "truncated": truncated,
            "seconds": seconds,
            "cpu": cpu_seconds() - self.before,
            "clean": clean,
            # A process inherits its parent's peak.
            "over_memory": self.peak > max(self.memory_limit, own << 10),
            "out": min(len(self.out), self.output_limit),
            "err": len(self.err),
        }
        return frame, bytes(self.out[: self.output_limit]), bytes(self.err)

    def wait(self, wall: float, wake: int) -> Any:
        """Return the exit status, or None when the time or output limit was reached."""
        poll = select.poll()
        for descriptor in (*self.readers, wake):
            poll.register(descriptor, select.POLLIN)
        while True:
            left = self.started + wall - time.monotonic()
            if left <= 0:
                return None
            for descriptor, _ in poll.poll(left * 1000 + 1):
                if descriptor == wake:
                    drain_descriptor(wake)
                elif self.read(descriptor) == 0:
                    poll.unregister(descriptor)
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.peak = used.ru_maxrss << 10
                return status
            if len(self.out) > self.output_limit:
                return None

    def read(self, descriptor: int) -> int:
        """Read once; return the number of bytes, 0 at the end, -1 when nothing is there yet."""
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return -1
        self.readers[descriptor] += data
        del self.err[:-ERRORS_KEPT]
        return len(data)

    def drain(self) -> bool:
        """Read the rest of the pipes, which have no writer left; return whether it is too much."""
        for descriptor, kept in self.readers.items():
            while len(kept) <= self.output_limit and self.read(descriptor) > 0:
                continue
        return len(self.out) > self.output_limit

    def close(self) -> None:
        for descriptor in self.readers:
            os.close(descriptor)


def memory_file(data: bytes) -> int:
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
    """Start the program's process in a session of its own; return its pid. Raises ``OSError``: fork or exec failed."""
    report, failed = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            become_program(job, stdin, out, err, failed)
        os.close(failed)
        failed = -1
        answer = os.read(report, 16)
    finally:
        os.close(report)
        if failed >= 0:
            os.close(failed)
    if answer:
        os.waitpid(pid, 0)
        raise OSError(f"the program cannot be started: error {answer.decode()}")
    return pid


def become_program(job: Any, stdin: int, out: int, err: int, failed: int) -> NoReturn:
    """In the child: connect descriptors, lower limits, exec. Never returns."""
    code = 5
    try:
        os.setsid()
        for number in IGNORED_SIGNALS:
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
        lower_limit(resource.RLIMIT_FSIZE, FILE_SIZE)
        lower_limit(resource.RLIMIT_STACK, job["stack"], soft_only=True)
        lower_limit(resource.RLIMIT_AS, job["memory"] + RESERVED)  # last: this copy of the parent may be larger
        os.execvpe(job["argv"][0], job["argv"], {**os.environ, **job["env"]})
    except OSError as error:
        code = error.errno or code
    finally:
        os.write(failed, b"%d" % code)
        os._exit(127)


def lower_limit(kind: int, wanted: int, soft_only: bool = False) -> None:
    """Lower a limit; never raise one."""
    hard = resource.getrlimit(kind)[1]
    value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (value, hard if soft_only else value))


def kill_descendants(wake: int) -> bool:
    """Kill everything below this process; return whether it is gone.

    All are stopped before any is killed: one that dies early would make room for another fork.
    """
    deadline = time.monotonic() + SWEEP_SECONDS
    while reap_children():
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
        drain_descriptor(wake)
    return True


def reap_children() -> bool:
    """Reap ended children; return whether any are left."""
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
            except (OSError, ValueError):  # it has ended
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
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:  # it has ended
            continue


def drain_descriptor(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            continue
    except BlockingIOError:
        return


def cpu_seconds() -> float:
    """Return the CPU time of all reaped children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


main()
