"""Starting a confined child: fork, wire up, confine, exec; failures come back as an ``OSError``.

Also enters the namespaces of a running sandbox from above, for workers that are forked outside of it.
"""

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
from prorl_gym.sandbox.guest.guest_messages import ChildStartError, encode_packet, receive_descriptors, send_packet
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
_NS_GET_USERNS, _NS_GET_PARENT = 0xB701, 0xB702
_NAMESPACES = (
    ("ipc", syscalls.CLONE_NEWIPC),
    ("uts", syscalls.CLONE_NEWUTS),
    ("net", syscalls.CLONE_NEWNET),
    ("pid_for_children", syscalls.CLONE_NEWPID),
    ("mnt", syscalls.CLONE_NEWNS),  # last: the host's /proc is gone then
)


def fork_exec(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    descriptors: Mapping[int, int],
    confine: Confine,
) -> tuple[int, int | None]:
    """Start a program in its own session; return its pid and the listener of its filter of calls, if that has one.

    The program is searched in ``env``'s PATH; ``env`` is complete. ``descriptors``: number in the child -> descriptor
    here; nothing else is inherited. Raises ``ChildStartError`` with the stage that failed.
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

    It is not this process's child: ``table`` counts it as one, and its end is a message on ``line``, the socket that
    was given to the template. ``settings``: ``limits``, ``env`` (complete), ``cwd``, ``allow_system_v``, and
    ``is_untouched``: the sandbox's files are those of the host. ``descriptors``: numbers 0 to 3 in the worker ->
    descriptors here. Raises ``ChildStartError`` with the stage that failed.
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
                raise ChildStartError(error.errno or errno.EIO, "template") from None
            finally:
                for descriptor in namespaces:
                    os.close(descriptor)
        try:
            word, ancillary, _, _ = line.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
        except OSError:
            word, ancillary = b"", []
        if not word or not ancillary:
            raise ChildStartError(errno.EIO, "template")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        pid: int = _CREDENTIALS.unpack(ancillary[0][2])[0]
        table.adopted.add(pid)
        answer, listener = receive_report(report, wait=True)
    if answer:
        table.adopted.discard(pid)
        raise _start_error(answer, listener)
    return pid, listener


def _start_error(answer: bytes, listener: int | None) -> ChildStartError:
    if listener is not None:
        os.close(listener)
    stage, _, code = answer.decode().partition(":")
    return ChildStartError(int(code), stage)


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
        report = max(descriptors) + 1
        renumber_descriptors({**descriptors, report: failed})
        os.set_inheritable(report, False)  # a successful exec closes it
        failed = report
        close_all_except(0, 1, 2, *descriptors, report)
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
    """Last steps of every payload process: default signals, orphans stay below it, confinement."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    syscalls.set_child_subreaper()

    def send_listener(listener: int) -> None:
        with socket.socket(fileno=os.dup(guest_fd)) as sock:
            socket.send_fds(sock, [b"+"], [listener])
        os.close(listener)

    confine(send_listener)


def renumber_descriptors(descriptors: Mapping[int, int]) -> None:
    """In a child: give descriptors their numbers (number -> descriptor here); what had the numbers is closed."""
    above = max(descriptors) + 1
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in descriptors.items()}
    for number, fd in high.items():
        os.dup2(fd, number)


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
    """Keeps a new child from holding up the guest between fork and exec, while the guest waits for it.

    Until then the child runs only our code, yet any payload may send it SIGSTOP, and the disk with the file to execute
    may hang. The guest would then answer no further request. ``known_children``, which have been started, are left
    alone.
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
        # A handler, not SIG_IGN: exec puts handlers back to the default.
        signal.signal(number, lambda _number, _frame: None)
    return woken


def close_all_except(*kept: int) -> None:
    """Close every descriptor but these: no end of another sandbox's sockets may leak into a child."""
    low = 0
    for descriptor in sorted(kept):
        if low < descriptor:  # closerange(0, 0) would close everything
            os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, _FD_LIMIT)


def receive_report(sock: socket.socket, *, wait: bool) -> tuple[bytes, int | None]:
    """Return what a child wrote, until its exec closes the socket if ``wait``, and the listener it handed over."""
    written, listener = b"", None
    while True:
        try:
            data, descriptors, _ = receive_descriptors(sock, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return written, listener
        listener = descriptors[0] if descriptors else listener
        if not data:
            return written.removeprefix(b"+"), listener
        written += data


def open_namespaces(process: str = "self", proc_fd: int | None = None) -> list[int]:
    """Return descriptors of a process's root directory and of its namespaces, as ``enter_namespaces`` takes them.

    ``process`` is its name in the procfs behind ``proc_fd``, ``/proc`` by default.
    """
    directory = process if proc_fd is not None else f"/proc/{process}"
    opened = [os.open(f"{directory}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc_fd)]
    try:
        for name in ("user", *(name for name, _ in _NAMESPACES)):
            opened.append(os.open(f"{directory}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc_fd))
    except OSError:
        for descriptor in opened:
            os.close(descriptor)
        raise
    return opened


def enter_namespaces(descriptors: Sequence[int]) -> None:
    """Enter the namespaces that this process is not in, then the root directory; closes the descriptors.

    A process that owns a sandbox's user namespace may do so from above. A namespace is entered with the rights that a
    process has in the user namespace that owns it. So where one user namespace lies below another (a container's in
    ours), each is entered in turn, with what it owns. Only children of this process will be in the pid namespace.
    """
    root, user, *others = descriptors
    own_user = os.stat("/proc/self/ns/user").st_ino
    waiting = [
        (descriptor, flag, _owner(descriptor))
        for descriptor, (name, flag) in zip(others, _NAMESPACES, strict=True)
        if os.fstat(descriptor).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino
    ]
    path: list[int] = []  # of user namespaces, from below this process's own
    while os.fstat(user).st_ino != own_user:
        path.insert(0, user)
        user = fcntl.ioctl(user, _NS_GET_PARENT)
    for level in path:
        syscalls.setns(level, syscalls.CLONE_NEWUSER)
        for descriptor, flag, owner in waiting:
            if owner == os.fstat(level).st_ino:
                syscalls.setns(descriptor, flag)
    os.fchdir(root)
    os.chroot(".")
    os.chdir("/")
    for descriptor in {*descriptors, *path, user}:
        os.close(descriptor)


def _owner(namespace: int) -> int:
    owner = fcntl.ioctl(namespace, _NS_GET_USERNS)
    try:
        return os.fstat(owner).st_ino
    finally:
        os.close(owner)
