"""Starting a confined child: fork, wire up, confine, exec; failures come back as an ``OSError``."""

import errno
import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager

from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.guest.guest_messages import encode_packet, send_packet
from prorl_gym.sandbox.guest.namespace_entry import open_namespaces
from prorl_gym.sandbox.guest.payload_kill_monitor import receive_report, send_listener
from prorl_gym.sandbox.guest.process_table import ProcessTable

Confine = Callable[[Callable[[int], None]], None]
"""Drops what a payload must not have; passes on the listener of the seccomp filter, if there is one."""
_FD_LIMIT = 1 << 20
_CHECK_SECONDS = 0.5
"""Seconds between checks for children stopped before their exec. They are killed: only a payload stops them there."""
_EXEC_SECONDS = 20.0
"""A child that has not come to its exec by then is killed in any case; a busy machine takes tens of milliseconds."""
_TICKS = os.sysconf("SC_CLK_TCK")
_CREDENTIALS = struct.Struct("3i")
"""Pid, uid and gid of a sender, which the kernel adds, translated into the receiver's namespaces."""


class StartError(OSError):
    """A child could not be started. ``stage``: ``cwd``, ``confine``, ``exec``, or ``template`` (no fork of one)."""

    def __init__(self, code: int, stage: str) -> None:
        super().__init__(code, os.strerror(code))
        self.stage = stage


def fork_exec(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    descriptors: Mapping[int, int],
    confine: Confine,
) -> tuple[int, int | None]:
    """Start a program in its own session; return its pid and the listener of its filter of calls, if that has one.

    Args:
        argv: program (searched in ``env``'s PATH) and arguments.
        env: complete environment.
        cwd: working directory.
        descriptors: number in the child -> descriptor here. Nothing else is inherited.
        confine: called in the child just before exec.

    Raises:
        StartError: with the stage that failed.
    """
    report, failed = socket.socketpair()  # close-on-exec: a successful exec closes it, and we read EOF
    with report:
        with failed:
            pid = os.fork()
            if pid == 0:
                _run_child(argv, env, cwd, descriptors, confine, failed.detach())
        answer, listener = receive_report(report, wait=True)
    if answer:
        os.waitpid(pid, 0)
        raise _start_error(answer, listener)
    return pid, listener


def fork_template(
    line: socket.socket, table: ProcessTable, settings: Mapping[str, object], descriptors: Mapping[int, int]
) -> tuple[int, int | None]:
    """Have the template of python workers fork one into this sandbox; see ``python_template``.

    It is not this process's child: ``table`` counts it as one, and its end is a message on ``line``.

    Args:
        line: the socket that was given to the template.
        table: shows this process, whose namespaces the worker enters.
        settings: fields of ``python_template.Settings``.
        descriptors: numbers 0 to 3 in the worker -> descriptors here.

    Raises:
        StartError: with the stage that failed.
    """
    line.settimeout(_EXEC_SECONDS)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    report, failed = socket.socketpair()
    with report:
        with failed:
            namespaces = open_namespaces("self", table.proc_fd)
            try:
                standard = [descriptors[number] for number in sorted(descriptors)]
                send_packet(line, encode_packet(dict(settings)), [failed.fileno(), *standard, *namespaces])
            except OSError as error:  # there is no template any more, or it has no process for this
                raise StartError(error.errno or errno.EIO, "template") from None
            finally:
                for descriptor in namespaces:
                    os.close(descriptor)
        try:
            word, ancillary, _, _ = line.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
        except OSError:
            word, ancillary = b"", []
        if not word or not ancillary:
            raise StartError(errno.EIO, "template")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        pid: int = _CREDENTIALS.unpack(ancillary[0][2])[0]
        table.adopted.add(pid)
        answer, listener = receive_report(report, wait=True)
    if answer:
        table.adopted.discard(pid)
        raise _start_error(answer, listener)
    return pid, listener


def _start_error(answer: bytes, listener: int | None) -> StartError:
    if listener is not None:
        os.close(listener)
    stage, _, code = answer.decode().partition(":")
    return StartError(int(code), stage)


def _run_child(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    descriptors: Mapping[int, int],
    confine: Confine,
    failed: int,
) -> None:
    """Never returns: an exception must not unwind into the guest's own loop."""
    stage = "confine"
    code = errno.EIO
    try:
        os.setsid()
        failed = _renumber_descriptors(descriptors, failed)
        stage = "cwd"
        os.chdir(cwd)
        stage = "confine"
        prepare_exec(confine, failed)
        stage = "exec"
        _exec(argv, env)
    except OSError as error:
        code = error.errno or errno.EIO
    except ValueError:  # a NUL byte
        code = errno.EINVAL
    finally:
        try:
            os.write(failed, f"{stage}:{code}".encode())
        finally:
            os._exit(127)


def prepare_exec(confine: Confine, guest_fd: int) -> None:
    """Last steps of every payload process: default signals, orphans stay below it, confinement.

    Args:
        confine: the last of them.
        guest_fd: a socket to the guest.
    """
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    syscalls.set_child_subreaper()
    confine(lambda listener: send_listener(guest_fd, listener))


def _renumber_descriptors(descriptors: Mapping[int, int], failed: int) -> int:
    """Give the descriptors their numbers and close all others; return the new number of ``failed``."""
    above = max(descriptors) + 1
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in descriptors.items()}
    report = fcntl.fcntl(failed, fcntl.F_DUPFD_CLOEXEC, above)
    for number, fd in high.items():
        os.dup2(fd, number)
    close_all_except(0, 1, 2, *descriptors, report)
    return report


def _exec(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Exec along PATH. The most telling error wins: a file that may not be executed over one that is not there."""
    program = argv[0]
    places = [program]
    if "/" not in program:
        places = [os.path.join(place, program) for place in env.get("PATH", "").split(":") if place]
    best = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for place in places:
        try:
            os.execve(place, list(argv), dict(env))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            best = error
    raise best


class SpawnWatch:
    """Kills children that do not reach their exec, so that the guest, which waits for it, gets their exit instead.

    Between fork and exec a child runs our code, yet any payload may send it SIGSTOP, and the disk with the file to
    execute may hang. The guest would then answer no further request.

    Args:
        table: shows this process and its children.
        known_children: pids of children that have been started; they are left alone.
    """

    def __init__(self, table: ProcessTable, known_children: Collection[int]) -> None:
        self._table = table
        self._known_children = known_children
        self._guest_pid = os.getpid()
        self._started_at: float | None = None
        signal.signal(signal.SIGALRM, self._kill_stalled)

    @contextmanager
    def watch_spawn(self) -> Generator[None, None, None]:
        """Start one child inside this; nothing else may be waited for in there."""
        self._started_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        signal.setitimer(signal.ITIMER_REAL, _CHECK_SECONDS, _CHECK_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._started_at = None

    def _kill_stalled(self, number: int, frame: object) -> None:
        # A payload may send this signal too, at any time and also to the child, where this handler is still in place.
        since = self._started_at
        if since is None or os.getpid() != self._guest_pid:
            return
        late = time.clock_gettime(time.CLOCK_BOOTTIME) - since > _EXEC_SECONDS
        for child in self._table.children(self._guest_pid):
            new = child.pid not in self._known_children and child.start_ticks >= int(since * _TICKS)
            if new and (late or child.is_stopped):
                self._table.kill(child)


def open_signal_pipe(*signals: signal.Signals) -> int:
    """Return a non-blocking descriptor on which each of these signals becomes a byte: its number."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, _ignore_signal)  # a handler, not SIG_IGN: exec puts handlers back to the default
    return woken


def _ignore_signal(number: int, frame: object) -> None:
    """Do nothing: the byte on the pipe is enough."""


def close_all_except(*kept: int) -> None:
    """Close every descriptor but these: no end of another sandbox's sockets may leak into a child."""
    low = 0
    for descriptor in sorted(kept):
        if low < descriptor:  # closerange(0, 0) would close everything
            os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, _FD_LIMIT)
