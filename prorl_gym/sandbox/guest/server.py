"""The guest: a single-threaded server inside the sandbox that starts, kills and opens things for the service.

Single-threaded so that forking is safe; nothing is imported after ``serve`` begins, since by then the root directory
may be an image without Python.
"""

import errno
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from prorl_gym.sandbox.breach import Breach
from prorl_gym.sandbox.disk_watch import DiskWatch
from prorl_gym.sandbox.guest import wire
from prorl_gym.sandbox.guest.child import StartError, fork_exec
from prorl_gym.sandbox.guest.files import Files
from prorl_gym.sandbox.guest.kernel import become_subreaper
from prorl_gym.sandbox.guest.kills import KillWatch
from prorl_gym.sandbox.guest.patience import Starting
from prorl_gym.sandbox.guest.shared_memory import SharedMemory
from prorl_gym.sandbox.guest.socket_memory import SocketMemory
from prorl_gym.sandbox.guest.terminal import Terminal
from prorl_gym.sandbox.guest.transfer import transfer
from prorl_gym.sandbox.guest.tree import ProcessTable
from prorl_gym.sandbox.protocol import SandboxLimits
from prorl_gym.sandbox.watchdog import Watchdog

CHANNEL_FD = 3
"""Number at which a child that asked for a channel finds it."""


@dataclass(frozen=True)
class GuestOptions:
    """What the guest has to know about its sandbox."""

    limits: SandboxLimits
    workdir: str
    env: dict[str, str]
    """Complete, clean base environment of everything that runs."""
    proc_fd: int
    """Descriptor of a procfs that shows this process's own pid namespace."""
    is_init: bool
    """This process is pid 1; otherwise it adopts orphans as a subreaper."""
    confine: Callable[[SandboxLimits, Callable[[int], None]], None]
    """Run in every child after fork, before exec: limits, capabilities, privileges. See ``Confine``."""
    adopter: int | None = None
    """Pid 1 of the pid namespace that the guest's children are in, where the guest is not in it: orphans go there."""
    storage: int | None = None
    """Descriptor of the directory on disk that holds what is written to the root; ``None``: the root has a size."""
    is_isolated: bool = True
    """The network namespace is the sandbox's own, and what runs in it may be filtered."""


def serve(control: socket.socket, options: GuestOptions) -> None:
    """Answer requests until the service is gone (end of file on ``control``); then the caller exits."""
    _Guest(control, options).run()


@dataclass(slots=True)
class _Answer:
    """A reply: fields, descriptors to send, and what to do once they are sent (or could not be)."""

    fields: dict[str, Any]
    descriptors: list[int]
    release: Callable[[], None] | None = None

    def close(self) -> None:
        if self.release is not None:
            return self.release()
        for fd in self.descriptors:
            os.close(fd)


class _Guest:
    def __init__(self, control: socket.socket, options: GuestOptions) -> None:
        control.setblocking(True)
        self._control = control
        self._options = options
        self._table = ProcessTable(options.proc_fd, options.adopter)
        self._files = Files(options.workdir, options.proc_fd)
        self._children: set[int] = set()
        self._transfers: set[int] = set()
        self._starting = Starting(self._table, self._children)
        self._poll = select.poll()
        self._listeners: set[int] = set()
        self._cpu_limits: dict[int, int] = {}
        limits = options.limits
        self._shared: SharedMemory | None = None
        if options.is_isolated:
            self._shared = SharedMemory(self._table, os.getpid(), limits.total_memory, limits.shm_size)
        self._kills = KillWatch(self._table, self._children, self._shared)
        self._watchdog = Watchdog(
            self._table,
            os.getpid(),
            memory=limits.total_memory,
            process_memory=limits.memory,
            processes=limits.processes,
            shared=self._shared,
            sockets=SocketMemory(options.proc_fd) if options.is_isolated else lambda: 0,
            tell=self._tell_breach,
        )
        self._disk = None if options.storage is None else self._watch_disk(options.storage)
        self._operations: dict[str, Callable[[Mapping[str, Any]], _Answer]] = {
            "ping": lambda _: _Answer({}, []),
            "spawn": self._spawn,
            "shell": self._shell,
            "signal": self._signal,
            "kill_tree": self._kill_tree,
            "transfer": self._transfer,
            "relieve": self._relieve,
            "listen": lambda request: _Answer({}, [_listen(request["port"])]),
            "connect": lambda request: _Answer({}, [_connect(request["name"])]),
        }

    def run(self) -> None:
        if not self._options.is_init:
            become_subreaper()
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _note)  # a handler, not SIG_IGN: exec puts handlers back to the default
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(woken, select.POLLIN)
        try:
            self._send({"type": "hello"})
            while True:
                ready = dict(self._poll.poll(self._wait_ms()))
                for listener in self._listeners & ready.keys():  # first: what is reaped next may have ended by it
                    self._listen_to(listener, ready[listener])
                self._watchdog.look_if_due()
                if self._disk is not None:
                    self._disk.look_if_due()
                if woken in ready:
                    _drain(woken)
                    self._reap()
                if self._control.fileno() in ready and not self._serve_one():
                    return
        except (BrokenPipeError, ConnectionResetError):  # the service is gone: the same as end of file
            return

    def _serve_one(self) -> bool:
        """Answer one request; ``False`` at end of file."""
        try:
            received = wire.receive(self._control)
        except wire.PacketError:
            return True
        if received is None:
            return False
        request, descriptors = received
        for fd in descriptors:  # no request carries any
            os.close(fd)
        if not isinstance(request.get("id"), int):
            return True  # nothing that could be answered
        try:
            answer = self._operations[request["op"]](request)
        except StartError as error:
            self._reply(request, {"errno": error.errno, "stage": error.stage})
            return True
        except OSError as error:
            self._reply(request, {"errno": error.errno or errno.EIO, "text": error.strerror or str(error)})
            return True
        except Exception as error:  # a request that makes no sense is answered, and ends nothing
            self._reply(request, {"errno": errno.EINVAL, "text": f"{type(error).__name__}: {error}"[:1000]})
            return True
        try:
            self._reply(request, answer.fields, answer.descriptors)
        finally:
            answer.close()
        return True

    def _reply(
        self, request: Mapping[str, Any], fields: Mapping[str, Any], descriptors: list[int] | None = None
    ) -> None:
        self._send({"type": "reply", "id": request["id"], **fields}, descriptors)

    def _send(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        wire.send(self._control, wire.encode(message), descriptors or ())

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:  # everything else is an orphan that nobody asked about
                if status != 0 and (_disk_is_full() or self._disk_is_used_up()):
                    self._tell_breach(pid, Breach.DISK)
                code = os.waitstatus_to_exitcode(status)
                if code == -signal.SIGKILL and usage.ru_utime + usage.ru_stime >= self._cpu_limits.pop(pid):
                    self._tell_breach(pid, Breach.CPU)  # it ignored the signal of the soft limit
                struck, sent = self._kills.forget(pid)
                self._cpu_limits.pop(pid, None)
                self._children.discard(pid)
                self._watchdog.forget(pid)
                self._transfers.discard(pid)
                self._send({"type": "exit", "pid": pid, "status": code, "struck": struck, "sent": sent})

    def _watch_disk(self, storage: int) -> DiskWatch:
        def announce(full: bool) -> None:
            self._send({"type": "disk", "full": full})

        return DiskWatch(storage, self._options.limits, self._table, os.getpid(), self._tell_breach, announce)

    def _listen_to(self, listener: int, events: int) -> None:
        if events & select.POLLIN:
            self._kills.serve(listener)
        else:  # nothing is left that has this filter
            self._poll.unregister(listener)
            self._listeners.discard(listener)
            os.close(listener)

    def _confine(self, limits: SandboxLimits, hand_over: Callable[[int], None]) -> None:
        self._options.confine(limits, hand_over)
        if self._disk is not None:  # a full root shall be an error of the write, not the end of the shell
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def _disk_is_used_up(self) -> bool:
        return self._disk is not None and self._disk.full

    def _wait_ms(self) -> int | None:
        """Return the milliseconds until something is to be looked at."""
        waits = [self._watchdog.wait_ms(bool(self._children))]
        if self._disk is not None:
            waits.append(self._disk.wait_ms(waits[0] is not None))
        return min((wait for wait in waits if wait is not None), default=None)

    def _adopt(self, pid: int, listener: int | None, limits: SandboxLimits) -> None:
        self._children.add(pid)
        self._cpu_limits[pid] = limits.cpu_seconds
        if listener is not None:
            self._kills.watch(pid)
            self._listeners.add(listener)
            self._poll.register(listener, select.POLLIN)
        if self._disk is not None:
            self._disk.hold(pid)

    def _transfer(self, request: Mapping[str, Any]) -> _Answer:
        """Start a child that does one file operation; see ``transfer``."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                transfer(self._files, request, theirs, is_full=self._disk_is_used_up())
        self._transfers.add(pid)
        self._adopt(pid, None, self._options.limits)
        return _Answer({"pid": pid}, [ours.detach()])

    def _relieve(self, request: Mapping[str, Any]) -> _Answer:
        """Kill everything that runs in the sandbox but the file operations, and let those go on.

        One that stood still although nothing of the payload's is left was not held up by the payload.
        """
        for pid in self._children - self._transfers:
            self._kills.explain(pid)
        gone = self._table.kill_descendants(os.getpid(), spared=self._transfers)
        for pid in self._transfers:
            os.kill(pid, signal.SIGCONT)
        return _Answer({"gone": gone}, [])

    def _tell_breach(self, pid: int, breach: Breach) -> None:
        if pid in self._children:
            self._send({"type": "breach", "pid": pid, "breach": breach.value})

    def _spawn(self, request: Mapping[str, Any]) -> _Answer:
        """Start a program on pipes. They are made here, so that the payload may reopen /dev/stdout."""
        limits = SandboxLimits(**request["limits"]) if request.get("limits") else self._options.limits
        theirs: list[int] = []
        child: dict[int, int] = {}
        try:
            if request["stdin"]:
                child[0], fd = os.pipe2(os.O_CLOEXEC)
                theirs.append(fd)
            else:
                child[0] = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            fd, child[1] = os.pipe2(os.O_CLOEXEC)
            theirs.append(fd)
            if request["merge"]:
                child[2] = os.dup(child[1])
            else:
                fd, child[2] = os.pipe2(os.O_CLOEXEC)
                theirs.append(fd)
            if request["channel"]:
                ours, inside = socket.socketpair()
                theirs.append(ours.detach())
                child[CHANNEL_FD] = inside.detach()
            with self._starting.bounded():
                pid, listener = fork_exec(
                    request["argv"],
                    {**self._options.env, **request["env"]},
                    os.path.join(self._options.workdir, request["cwd"] or ""),
                    child,
                    partial(self._confine, limits),
                )
        except BaseException:
            for fd in theirs:
                os.close(fd)
            raise
        finally:
            for fd in child.values():
                os.close(fd)
        self._adopt(pid, listener, limits)
        if limits.memory < self._options.limits.memory:
            self._watchdog.bound(pid, limits.memory)
        return _Answer({"pid": pid}, theirs)

    def _shell(self, request: Mapping[str, Any]) -> _Answer:
        limits = self._options.limits
        with self._starting.bounded():
            terminal = Terminal(
                {**self._options.env, **request["env"]},
                request["cwd"] or self._options.workdir,
                limits.open_files,
                partial(self._confine, limits),
                survives_full_disk=self._disk is not None,
            )
        self._adopt(terminal.pid, terminal.listener, limits)
        return _Answer({"pid": terminal.pid}, terminal.descriptors, terminal.release)

    def _signal(self, request: Mapping[str, Any]) -> _Answer:
        """Signal the process group that a child leads, as a terminal's C-c does."""
        if request["pid"] in self._children:  # not reaped yet: the number cannot belong to anything else
            os.killpg(request["pid"], request["signal"])
        return _Answer({}, [])

    def _kill_tree(self, request: Mapping[str, Any]) -> _Answer:
        """Kill the descendants of a child; without ``since``, the child too, last."""
        pid = request["pid"]
        if pid not in self._children:
            return _Answer({"gone": True}, [])
        since = request.get("since")
        if since is not None:
            return _Answer({"gone": self._table.kill_descendants(pid, since)}, [])
        self._kills.explain(pid)
        os.kill(pid, signal.SIGSTOP)  # it can start nothing new while its descendants die
        gone = self._table.kill_descendants(pid)
        os.kill(pid, signal.SIGKILL)
        return _Answer({"gone": gone}, [])


def _listen(port: int) -> int:
    """Return a listening TCP socket on the loopback of the sandbox's own network namespace.

    Whoever holds it accepts what programs inside connect to: the service, which is not in that namespace.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener.detach()


def _connect(name: str) -> int:
    """Return a connection to an abstract Unix socket of the sandbox's own network namespace.

    Abstract: there is no path, thus no link to follow. Non-blocking: a full backlog must not stop the guest.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        connection.connect(b"\0" + name.encode("ascii"))
    except OSError:
        connection.close()
        raise
    return connection.detach()


def _disk_is_full() -> bool:
    """Whether a file system that the payload may fill has less than a page, or no inode, left."""
    for path in ("/", "/dev/shm"):
        try:
            found = os.statvfs(path)
        except OSError:  # an image directory of the local backend, or something that the payload removed
            continue
        if found.f_blocks and (found.f_bavail * found.f_frsize < 4096 or (found.f_files and not found.f_favail)):
            return True
    return False


def _note(number: int, frame: object) -> None:
    """The wake-up descriptor carries the news; there is nothing to do here."""


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            continue
    except BlockingIOError:
        return
