"""The guest, pid 1 of a sandbox or its neighbour: a server that starts, kills and opens things for the service.

Single-threaded so that forking is safe; nothing is imported after ``serve`` begins, since by then the root directory
may be an image without Python.
"""

import errno
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.guest import guest_messages
from prorl_gym.sandbox.guest.disk_watch import DiskWatch
from prorl_gym.sandbox.guest.fork_exec import SpawnWatch, fork_exec, fork_template, open_signal_pipe
from prorl_gym.sandbox.guest.process_table import ProcessTable
from prorl_gym.sandbox.guest.seccomp_notifications import KillMonitor, SharedMemoryAccount
from prorl_gym.sandbox.guest.terminal import Terminal
from prorl_gym.sandbox.guest.transfer import GuestFiles, transfer
from prorl_gym.sandbox.guest.watchdog import SocketMemory, Watchdog
from prorl_gym.sandbox.limit_breach import Breach
from prorl_gym.sandbox.protocol import SandboxLimits

CHANNEL_FD = 3
"""Number of the side socket in a child that was started with one."""


@dataclass(frozen=True)
class GuestOptions:
    """The guest's configuration of its sandbox."""

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
    prepare_confinement: Callable[[], None] = lambda: None
    """Run once when the guest is ready, while the service gets to know of it: what makes ``confine`` faster."""
    allow_system_v: bool = False
    """As ``confine`` has it: System V IPC is bounded, and so may be used."""
    orphan_parent: int | None = None
    """Pid 1 of the pid namespace that the guest's children are in, where the guest is not in it: orphans go there."""
    storage_fd: int | None = None
    """Descriptor of the directory on disk that holds what is written to the root; ``None``: the root has a size."""
    is_isolated: bool = True
    """The network namespace is the sandbox's own, and what runs in it may be filtered."""


def serve(control: socket.socket, options: GuestOptions) -> None:
    """Answer requests until the service is gone (end of file on ``control``); then the caller exits."""
    _GuestServer(control, options).run()


@dataclass(slots=True)
class _Reply:
    """Fields of a reply, descriptors to send, and what closes them once they are sent (or could not be)."""

    fields: dict[str, Any]
    descriptors: list[int] = field(default_factory=list[int])
    on_sent: Callable[[], None] | None = None

    def close(self) -> None:
        if self.on_sent is not None:
            return self.on_sent()
        for fd in self.descriptors:
            os.close(fd)


class _GuestServer:
    def __init__(self, control: socket.socket, options: GuestOptions) -> None:
        control.setblocking(True)
        self._control = control
        self._options = options
        self._table = ProcessTable(options.proc_fd, options.orphan_parent)
        self._files = GuestFiles(options.workdir, options.proc_fd)
        self._children: set[int] = set()
        self._is_untouched = True
        """No payload and no file operation has begun: the root holds what it was made with."""
        self._transfers: set[int] = set()
        self._spawn_watch = SpawnWatch(self._table, self._children)
        self._poll = select.poll()
        self._listeners: set[int] = set()
        self._worker_lines: dict[int, tuple[socket.socket, int]] = {}
        """By descriptor, the sockets on which the ends of workers come that the template forked, and their pids."""
        self._cpu_limits: dict[int, int] = {}
        limits = options.limits
        self._shared_memory: SharedMemoryAccount | None = None
        if options.is_isolated:
            self._shared_memory = SharedMemoryAccount(self._table, os.getpid(), limits.total_memory, limits.shm_size)
        self._kill_monitor = KillMonitor(self._table, self._children, self._shared_memory)
        self._watchdog = Watchdog(
            self._table,
            os.getpid(),
            limits,
            shared_memory=self._shared_memory,
            socket_memory=SocketMemory(self._table) if options.is_isolated else lambda: 0,
            on_breach=self._send_breach,
        )
        self._disk_watch: DiskWatch | None = None
        if options.storage_fd is not None:
            self._disk_watch = DiskWatch(
                options.storage_fd,
                limits,
                self._table,
                os.getpid(),
                on_breach=self._send_breach,
                on_full_change=lambda full: self._send({"type": "disk", "full": full}),
            )
        self._operations: dict[str, Callable[[Mapping[str, Any]], _Reply]] = {
            "ping": lambda _: _Reply({}),
            "spawn": self._spawn,
            "shell": self._shell,
            "signal": self._signal,
            "kill_tree": self._kill_tree,
            "transfer": self._transfer,
            "kill_payload": self._kill_payload,
            "listen": self._listen,
        }

    def run(self) -> None:
        if not self._options.is_init:
            syscalls.set_child_subreaper()
        woken = open_signal_pipe(signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(woken, select.POLLIN)
        try:
            self._send({"type": "hello"})
            self._options.prepare_confinement()
            while True:
                waits = [self._watchdog.next_check_ms(bool(self._children))]
                if self._disk_watch is not None:
                    waits.append(self._disk_watch.next_check_ms(waits[0] is not None))
                timeout = min((wait for wait in waits if wait is not None), default=None)
                ready = dict(self._poll.poll(timeout))
                for listener in self._listeners & ready.keys():  # first: what is reaped next may have ended by it
                    self._handle_notification(listener, ready[listener])
                self._watchdog.check_if_due()
                if self._disk_watch is not None:
                    self._disk_watch.check_if_due()
                for line_fd in self._worker_lines.keys() & ready.keys():
                    self._on_worker_end(line_fd)
                if woken in ready:
                    with suppress(BlockingIOError):  # when the pipe is drained
                        while os.read(woken, 4096):
                            continue
                    self._reap_children()
                if self._control.fileno() in ready and not self._handle_request():
                    return
        except (BrokenPipeError, ConnectionResetError):  # the service is gone: the same as end of file
            return

    def _handle_request(self) -> bool:
        """Answer one request; ``False`` at end of file."""
        try:
            received = guest_messages.receive_packet(self._control)
        except guest_messages.PacketError:
            return True
        if received is None:
            return False
        request, descriptors = received
        try:
            if isinstance(request.get("id"), int):  # otherwise nothing that could be answered
                self._answer_request(request, descriptors)
        finally:
            for fd in descriptors:  # what the request's operation did not keep
                os.close(fd)
        return True

    def _answer_request(self, request: dict[str, Any], descriptors: list[int]) -> None:
        if request.get("op") == "spawn" and descriptors:
            request["template"] = descriptors.pop(0)
        try:
            answer = self._operations[request["op"]](request)
        except guest_messages.ChildStartError as error:
            answer = _Reply({"errno": error.errno, "stage": error.stage})
        except OSError as error:
            answer = _Reply({"errno": error.errno or errno.EIO, "text": error.strerror or str(error)})
        except Exception as error:  # a request that makes no sense is answered, and ends nothing
            answer = _Reply({"errno": errno.EINVAL, "text": f"{type(error).__name__}: {error}"[:1000]})
        try:
            self._send({"type": "reply", "id": request["id"], **answer.fields}, answer.descriptors)
        finally:
            answer.close()

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        guest_messages.send_packet(self._control, guest_messages.encode_packet(message), descriptors)

    def _reap_children(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:  # everything else is an orphan
                self._on_child_end(pid, os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)

    def _on_child_end(self, pid: int, code: int, cpu_seconds: float) -> None:
        if code != 0 and (_is_file_system_full() or self._is_root_full()):
            self._send_breach(pid, Breach.DISK)
        if code == -signal.SIGKILL and cpu_seconds >= self._cpu_limits[pid]:
            self._send_breach(pid, Breach.CPU)  # it ignored the signal of the soft limit
        struck, sent = self._kill_monitor.remove_child(pid, code)
        self._cpu_limits.pop(pid)
        self._children.discard(pid)
        self._watchdog.remove_child(pid)
        self._transfers.discard(pid)
        self._send({"type": "exit", "pid": pid, "status": code, "struck": struck, "sent": sent})

    def _on_worker_end(self, line_fd: int) -> None:
        """A worker that the template forked has ended, or the process outside that would report its end has."""
        line, pid = self._worker_lines.pop(line_fd)
        self._poll.unregister(line_fd)
        with line:  # which lets the worker be reaped, and its number be used again
            received = guest_messages.try_receive_packet(line)
            if received is None:  # the kernel has killed the worker with its parent
                self._table.kill_descendants(pid)
            status = -signal.SIGKILL if received is None else int(received[0]["status"])
            self._on_child_end(pid, status, self._table.read_cpu_seconds(pid))
            self._table.adopted.discard(pid)

    def _handle_notification(self, listener: int, events: int) -> None:
        if events & select.POLLIN:
            self._kill_monitor.handle_notification(listener)
        else:  # nothing is left that has this filter
            self._poll.unregister(listener)
            self._listeners.discard(listener)
            os.close(listener)

    def _confine(self, limits: SandboxLimits, on_listener: Callable[[int], None]) -> None:
        self._options.confine(limits, on_listener)
        if self._disk_watch is not None:  # a full root is an error of the write, not the end of the shell
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            self._disk_watch.limit_new_child(0)  # before the exec: a program may write at once

    def _is_root_full(self) -> bool:
        return self._disk_watch is not None and self._disk_watch.is_full

    def _track_child(self, pid: int, listener: int | None, limits: SandboxLimits) -> None:
        self._is_untouched = False
        self._children.add(pid)
        self._cpu_limits[pid] = limits.cpu_seconds
        if listener is not None:
            self._kill_monitor.filtered.add(pid)
            self._listeners.add(listener)
            self._poll.register(listener, select.POLLIN)

    def _transfer(self, request: Mapping[str, Any]) -> _Reply:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                transfer(self._files, request, theirs, is_full=self._is_root_full())
        self._transfers.add(pid)
        self._track_child(pid, None, self._options.limits)
        return _Reply({"pid": pid}, [ours.detach()])

    def _kill_payload(self, request: Mapping[str, Any]) -> _Reply:
        """Kill everything that runs in the sandbox but the file operations, and let those go on.

        One that stood still although nothing of the payload's is left was not held up by the payload.
        """
        for pid in self._children - self._transfers:
            self._kill_monitor.record_kill(pid)
        gone = self._table.kill_descendants(os.getpid(), excluded=self._transfers)
        for pid in self._transfers:
            os.kill(pid, signal.SIGCONT)
        return _Reply({"gone": gone})

    def _send_breach(self, pid: int, breach: Breach) -> None:
        if pid in self._children:
            self._send({"type": "breach", "pid": pid, "breach": breach.value})

    def _spawn(self, request: Mapping[str, Any]) -> _Reply:
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
            env = {**self._options.env, **request["env"]}
            cwd = os.path.join(self._options.workdir, request["cwd"] or "")
            with self._spawn_watch.watch_spawn():
                if "template" in request:
                    pid, listener = self._fork_template(request["template"], limits, env, cwd, child)
                else:
                    pid, listener = fork_exec(request["argv"], env, cwd, child, partial(self._confine, limits))
        except BaseException:
            for fd in theirs:
                os.close(fd)
            raise
        finally:
            for fd in child.values():
                os.close(fd)
        self._track_child(pid, listener, limits)
        if limits.memory < self._options.limits.memory:
            self._watchdog.limit_child_memory(pid, limits.memory)
        return _Reply({"pid": pid}, theirs)

    def _fork_template(
        self, line_fd: int, limits: SandboxLimits, env: dict[str, str], cwd: str, child: Mapping[int, int]
    ) -> tuple[int, int | None]:
        line = socket.socket(fileno=line_fd)
        settings = {
            "limits": asdict(limits),
            "env": env,
            "cwd": cwd,
            "allow_system_v": self._options.allow_system_v,
            "is_untouched": self._is_untouched,
        }
        try:
            pid, listener = fork_template(line, self._table, settings, child)
        except BaseException:
            line.close()
            raise
        self._worker_lines[line.fileno()] = line, pid
        self._poll.register(line, select.POLLIN)
        if self._disk_watch is not None:  # before the reply to this request, and so before its first cell
            self._disk_watch.limit_new_child(pid)
        return pid, listener

    def _shell(self, request: Mapping[str, Any]) -> _Reply:
        limits = self._options.limits
        with self._spawn_watch.watch_spawn():
            terminal = Terminal(
                {**self._options.env, **request["env"]},
                request["cwd"] or self._options.workdir,
                limits.open_files,
                partial(self._confine, limits),
                survives_full_disk=self._disk_watch is not None,
            )
        self._track_child(terminal.pid, terminal.listener, limits)
        return _Reply({"pid": terminal.pid}, terminal.descriptors, terminal.close_descriptors)

    def _signal(self, request: Mapping[str, Any]) -> _Reply:
        """Signal the process group that a child leads, as a terminal's C-c does."""
        if request["pid"] in self._children:  # not reaped yet: the number cannot belong to anything else
            os.killpg(request["pid"], request["signal"])
        return _Reply({})

    def _kill_tree(self, request: Mapping[str, Any]) -> _Reply:
        pid = request["pid"]
        if pid not in self._children:
            return _Reply({"gone": True})
        since = request.get("since")
        if since is not None:
            return _Reply({"gone": self._table.kill_descendants(pid, since)})
        self._kill_monitor.record_kill(pid)
        os.kill(pid, signal.SIGSTOP)  # it can start nothing new while its descendants die
        gone = self._table.kill_descendants(pid)
        os.kill(pid, signal.SIGKILL)
        return _Reply({"gone": gone})

    def _listen(self, request: Mapping[str, Any]) -> _Reply:
        """Listen on the sandbox's own loopback, for the service, which is not in that network namespace."""
        return _Reply({}, [socket.create_server(("127.0.0.1", request["port"]), backlog=128).detach()])


def _is_file_system_full() -> bool:
    """Whether a file system that the payload may fill has less than a page, or no inode, left."""
    for path in ("/", "/dev/shm"):
        try:
            found = os.statvfs(path)
        except OSError:  # an image directory of the local backend, or something that the payload removed
            continue
        if found.f_blocks and (found.f_bavail * found.f_frsize < 4096 or (found.f_files and not found.f_favail)):
            return True
    return False
