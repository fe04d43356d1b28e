"""The spawner: one small, single-threaded process that forks every sandbox of a service.

``python -m prorl_gym.sandbox.spawner SOCKET SCRATCH UID GID CGROUP``

It exists because a parent-death signal is bound to the *thread* that forked, because forking a large, threaded service
is slow and unsafe, and because a service that is root must not map its uid into a sandbox: the spawner gives root up
before anything else, for ever. Everything is imported before that, since afterwards neither the interpreter nor the
checkout may be within reach.

From the service: ``{"op": "start", ...launch}`` with the guest's socket, ``{"op": "stop", "id"}``, ``{"op": "reap"}``,
``{"op": "memory", "id"}``.
To the service: ``ready`` or ``failed`` once, then ``note``, ``ended`` (how), ``gone`` (reaped, directory removed),
``reaped`` and ``memory``.
"""

import codecs
import gc
import os
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import apptainer, apptainer_plain, bwrap, host_root, init, keeper, setup_error, syscalls
from prorl_gym.sandbox.cgroup import Cgroups, Refusal, open_cgroups
from prorl_gym.sandbox.guest_bundle import guest_bundle
from prorl_gym.sandbox.launch import Launch, receive, send
from prorl_gym.sandbox.namespaces import Birth, InitMain, enter_namespaces, give_birth
from prorl_gym.sandbox.processes import ProcessIdentity, boot_id
from prorl_gym.sandbox.reaper import reap
from prorl_gym.sandbox.rootfs import check_image
from prorl_gym.sandbox.scratch import (
    State,
    check_reachable,
    make_directory,
    make_scratch,
    remove_directory,
    update_state,
)
from prorl_gym.sandbox.storage import check_storage
from prorl_gym.sandbox.sweeper import Sweeper

_INIT = {"userns": init.run, "apptainer": apptainer.run}
"""Backends whose namespaces are ours: what their pid 1 does."""
_KEPT = {"bwrap": bwrap.prepare, "apptainer-plain": apptainer_plain.prepare}
"""Backends whose container is made by a runtime that a keeper watches: how its command is prepared."""


@dataclass(slots=True)
class _Entry:
    """One sandbox: first its middle process is our child, then its init."""

    id: str
    birth: Birth
    directory: Path
    pidfd: int
    pid: int
    end: signal.Signals
    """What ends its init. A keeper is told, so that it can kill what the kernel does not kill for it."""
    on_disk: bool
    """Its processes write to its directory until they have ended."""
    born: bool = False
    stopped: bool = False


class Spawner:
    """The loop. Every wait is for a descriptor: the service's socket, the service itself, a child.

    Args:
        connection: the service's socket.
        scratch: directory of the sandboxes' directories.
        cgroups: makes a cgroup for each, or says why not.
    """

    def __init__(self, connection: socket.socket, scratch: Path, cgroups: Cgroups | Refusal) -> None:
        self._connection = connection
        self._cgroups = cgroups
        self._scratch = scratch
        self._owner = ProcessIdentity.of(os.getpid())
        self._boot = boot_id()
        self._entries: dict[str, _Entry] = {}
        # Not epoll: the kernel counts its watches per uid, so that a payload could use up those of the spawner.
        self._selector = selectors.PollSelector()
        self._sweeper = Sweeper(self._watch, self._selector.unregister)
        self._service_lives = True

    def run(self) -> None:
        """Serve until the service is gone, then leave nothing behind."""
        self._watch(self._connection.fileno(), self._on_request)
        service = _service_handle()
        if service is not None:
            self._watch(service, self._on_service_death)
        self._tell(
            {
                "event": "ready",
                "scratch": str(self._scratch),
                "uid": os.geteuid(),
                "cgroups": str(self._cgroups),
                **self._reap(),
            }
        )
        while self._service_lives:
            for key, _ in self._selector.select():
                key.data()
        self._clear()

    def _watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def _tell(self, message: Mapping[str, Any]) -> None:
        try:
            send(self._connection, message)
        except OSError:
            self._service_lives = False

    def _on_service_death(self) -> None:
        self._service_lives = False

    def _on_request(self) -> None:
        try:
            request, descriptors = receive(self._connection)
        except OSError:
            request, descriptors = None, []
        if request is None:
            self._service_lives = False
        elif request["op"] == "start":
            self._start(Launch.from_json(request), socket.socket(fileno=descriptors[0]))
        elif request["op"] == "stop":
            self._stop(request["id"])
        elif request["op"] == "reap":
            self._tell({"event": "reaped", **self._reap()})
        elif request["op"] == "memory":
            self._tell({"event": "memory", "kills": self._memory_kills(request["id"])})

    def _reap(self) -> dict[str, int]:
        return asdict(reap(self._scratch, lambda directory: self._remove(directory, directory.name)))

    def _start(self, launch: Launch, control: socket.socket) -> None:
        directory = self._scratch / launch.id
        try:
            make_directory(self._scratch, launch.id, State(self._boot, self._owner, None))
            birth, end = _begin(launch, f"{directory}/root", control, self._forker(launch))
        except OSError as error:
            setup_error.report(control, error)
            remove_directory(directory)
            self._tell({"event": "gone", "id": launch.id})
        else:
            on_disk = launch.spec.limits.root_on == "disk"
            entry = _Entry(launch.id, birth, directory, os.pidfd_open(birth.middle), birth.middle, end, on_disk)
            self._entries[launch.id] = entry
            self._watch(entry.pidfd, lambda: self._on_exit(entry))
        finally:
            control.close()

    def _forker(self, launch: Launch) -> Callable[[], int]:
        """Return what makes the first process of a sandbox: in a cgroup of its own, where there can be one."""
        cgroups = self._cgroups
        if isinstance(cgroups, Refusal):
            return os.fork

        def fork() -> int:
            try:
                return cgroups.fork(launch.id, launch.spec.limits)
            except OSError as error:
                self._note(launch.id, f"without a cgroup: the kernel refuses it ({error.filename}: {error.strerror})")
                return os.fork()

        return fork

    def _stop(self, sandbox_id: str) -> None:
        """Kill a sandbox and forget its directory at once; its namespaces end in their own time (up to seconds)."""
        entry = self._entries.get(sandbox_id)
        if entry is None:
            return
        entry.stopped = True
        if entry.born:
            self._kill(entry)

    def _kill(self, entry: _Entry) -> None:
        signal.pidfd_send_signal(entry.pidfd, entry.end)  # our child and not waited for: it exists
        if entry.end is signal.SIGKILL and not entry.on_disk:  # else it is in use until the keeper or init has ended
            self._remove(entry.directory, entry.id)

    def _remove(self, directory: Path, sandbox_id: str, *, gone: bool = False) -> None:
        """Remove a directory; one that stays is no reason to end all other sandboxes with this process.

        Args:
            directory: the sandbox's, or one of a dead owner's.
            sandbox_id: whose it is.
            gone: nothing else is left of the sandbox: say so afterwards.
        """

        def done(trouble: str) -> None:
            if trouble:
                self._note(sandbox_id, trouble)
            if gone:
                self._tell({"event": "gone", "id": sandbox_id})

        self._sweeper.remove(directory, done)

    def _on_exit(self, entry: _Entry) -> None:
        """The watched child of a sandbox ended: the middle (then init is ours now) or init."""
        _, status = os.waitpid(entry.pid, 0)
        self._selector.unregister(entry.pidfd)
        os.close(entry.pidfd)
        pid = None if entry.born else entry.birth.init_pid()
        if pid is None:
            self._tell_end(entry, os.waitstatus_to_exitcode(status))
            self._forget(entry)
            return
        entry.born, entry.pid, entry.pidfd = True, pid, os.pidfd_open(pid)
        self._watch(entry.pidfd, lambda: self._on_exit(entry))
        if entry.stopped:
            self._kill(entry)
            return
        try:
            update_state(entry.directory, State(self._boot, self._owner, ProcessIdentity.of(pid)))
        except ProcessLookupError:
            return  # it died before it began; its pidfd says so next
        except OSError as error:  # a full disk; and what no reaper could find must not run
            self._note(entry.id, f"none can be started in {self._scratch}: {error.strerror}")
            self._kill(entry)
            return
        self._watch(entry.birth.line.fileno(), lambda: self._on_note(entry))
        entry.birth.go()

    def _tell_end(self, entry: _Entry, code: int) -> None:
        self._tell({"event": "ended", "id": entry.id, "code": code, "memory_kills": self._memory_kills(entry.id)})

    def _memory_kills(self, sandbox_id: str) -> int:
        return self._cgroups.memory_kills(sandbox_id) if isinstance(self._cgroups, Cgroups) else 0

    def _on_note(self, entry: _Entry) -> None:
        if entry.birth.line.fileno() < 0:
            return  # forgotten in the same round of events
        try:
            text = entry.birth.line.recv(4096)
        except OSError:
            text = b""
        if not text:
            self._selector.unregister(entry.birth.line.fileno())
        elif text != b"armed":
            self._note(entry.id, text.decode(errors="replace"))

    def _note(self, sandbox_id: str, text: str) -> None:
        self._tell({"event": "note", "id": sandbox_id, "text": text})

    def _forget(self, entry: _Entry) -> None:
        if entry.birth.line.fileno() in self._selector.get_map():
            self._selector.unregister(entry.birth.line.fileno())
        entry.birth.line.close()
        del self._entries[entry.id]
        if isinstance(self._cgroups, Cgroups):
            self._cgroups.remove(entry.id)
        self._remove(entry.directory, entry.id, gone=True)

    def _clear(self) -> None:
        """The service is gone: kill everything. A sandbox that is only half born sees its line close and gives up."""
        for entry in self._entries.values():
            entry.birth.line.close()
            if entry.born:
                signal.pidfd_send_signal(entry.pidfd, entry.end)
        for entry in self._entries.values():  # so that whoever waits for us finds their processes gone, too
            os.waitpid(entry.pid, 0)
        for entry in self._entries.values():
            if isinstance(self._cgroups, Cgroups):
                self._cgroups.remove(entry.id)
            self._remove(entry.directory, entry.id)
        self._sweeper.wait()


def _begin(launch: Launch, base: str, control: socket.socket, fork: Callable[[], int]) -> tuple[Birth, signal.Signals]:
    """Fork a sandbox; return it with the signal that ends it."""
    if launch.backend in _KEPT:
        prepare = _KEPT[launch.backend]
        keep: InitMain = lambda note: keeper.run(launch, prepare, base, control, note)  # noqa: E731
        return give_birth(control, lambda: _check(launch, base), keep, fork), signal.SIGTERM

    def enter() -> None:
        _check(launch, base)
        enter_namespaces(os.geteuid(), os.getegid())

    main = _INIT[launch.backend]
    return give_birth(control, enter, lambda note: main(launch, base, control, note), fork), signal.SIGKILL


def _check(launch: Launch, base: str) -> None:
    check_image(launch)
    check_storage(launch, base)


def _service_handle() -> int | None:
    """Return a descriptor that becomes readable when the service dies; its socket's end says the same, normally."""
    try:
        return os.pidfd_open(os.getppid())
    except OSError:
        return None


def _become(uid: int, gid: int) -> None:
    """Give up root irrevocably. A service that is not root keeps its own uid."""
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        except OSError as error:
            raise SandboxError(
                FailureKind.SANDBOX_UNAVAILABLE,
                f"root cannot become uid {uid} here ({error.strerror}): this container may not know that uid.",
                "Set sandbox.uid to a uid that exists in it, or run the service as an ordinary user.",
            ) from None
    if 0 in os.getresuid():
        raise PermissionError("root could not be given up")
    syscalls.set_dumpable(False)


def _prepare_process() -> None:
    for encoding in ("ascii", "utf-8", "latin-1"):
        codecs.lookup(encoding)  # codecs are modules too, loaded at first use
    os.chdir("/")
    os.umask(0o077)
    syscalls.set_child_subreaper()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the terminal's; the service decides when to stop
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: list[str]) -> None:
    """Run a spawner. Arguments: descriptor of the service's socket, scratch directory, uid, gid and cgroup."""
    connection = socket.socket(fileno=int(arguments[0]))
    scratch, uid, gid = Path(arguments[1]), int(arguments[2]), int(arguments[3])
    if os.geteuid() != 0:
        uid, gid = os.geteuid(), os.getegid()
    try:
        _prepare_process()
        guest_bundle()
        make_scratch(scratch, uid, gid)
        cgroups = open_cgroups(arguments[4], uid, gid)
        _become(uid, gid)
        syscalls.leave_session_keyring()
        check_reachable(scratch)
        host_root.owned_directories()
        spawner = Spawner(connection, scratch, cgroups)
    except Exception as error:
        send(connection, {"event": "failed", **setup_error.describe(error)})
        return
    gc.collect()
    gc.freeze()  # forked children then share the heap's pages instead of copying them at the first collection
    spawner.run()


if __name__ == "__main__":
    main(sys.argv[1:])
