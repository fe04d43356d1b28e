"""The keeper of a sandbox that a container runtime makes by itself: starts it with our guest inside, and ends it.

    spawner
     '- keeper              in the host's namespaces, as the sandboxes' uid; adopts whatever is orphaned below it
         '- bwrap, apptainer
             '- guest       inside, pid 1 of the container's namespace; serves the service's socket
                 '- payload

Three things end such a sandbox, each alone sufficient: the service's end of the control socket closes (the guest ends,
and being pid 1 takes everything along); the spawner dies or stops it (the keeper is told by SIGTERM, and kills what is
below it by parent link and start time, so a runtime that hides from parent-death signals is found); the runtime ends.
"""

import fcntl
import json
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import syscalls, system_v
from prorl_gym.sandbox.guest.tree import ProcessTable
from prorl_gym.sandbox.guest_bundle import guest_bundle
from prorl_gym.sandbox.inside import BOUNDED, UNBOUNDED, UP
from prorl_gym.sandbox.launch import Launch
from prorl_gym.sandbox.processes import be_first_victim, shell_code

ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C"}
"""The runtime's own; built from nothing."""

_CONTROL, _STARTED, _OPTIONS, _BUNDLE = range(20, 24)
"""Descriptor numbers in the runtime and in the guest: low ones are the runtime's own."""


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a runtime."""

    argv: Sequence[str]
    """Up to where the program to run inside follows."""
    env: dict[str, str]
    """Environment of everything that runs inside."""
    copies: Sequence[tuple[str, str]] = ()
    """Directories, by their paths inside, that the guest copies into the writable root first."""
    furnish: bool = True
    """The root is the guest's to complete: the directories that every root must have, the files of its network."""
    weaker: str = ""
    """What this sandbox does not promise, for people."""


def run(
    launch: Launch,
    prepare: Callable[[Launch, str], Command],
    base: str,
    control: socket.socket,
    note: Callable[[str], None],
) -> int:
    """Start a runtime and keep it until it ends or we are told to end it; return its exit code, 0 in the latter case.

    Args:
        launch: what to start.
        prepare: makes the command for it, using an empty directory.
        base: that directory.
        control: the guest's end of the channel.
        note: called once with what is weaker than usual, or "".

    Raises:
        SandboxError: the image cannot be used, or the runtime ended before the guest was up.
        OSError: a system call was refused.
    """
    wake = _catch_signals()
    syscalls.set_parent_death_signal(signal.SIGTERM)
    syscalls.set_child_subreaper()
    table = ProcessTable(os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        command = prepare(launch, base)
        note(command.weaker)
        return _Runtime(launch, command, control).watch(wake)
    finally:
        table.kill_descendants(os.getpid())
        _reap_all()


class _Runtime:
    """A started runtime."""

    def __init__(self, launch: Launch, command: Command, control: socket.socket) -> None:
        self._launch = launch
        self._control = control
        self._started, started = socket.socketpair()
        # The kernel adds the guest's pid to what it writes, translated into our pid namespace.
        self._started.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._complaints = os.memfd_create("complaints")
        options = {
            "limits": asdict(launch.spec.limits),
            "workdir": os.path.join("/", launch.spec.workdir),
            "env": {**command.env, **launch.spec.env},
            "copies": list(command.copies),
            "furnish": command.furnish,
            "keep_etc": not launch.lower,
        }
        inherited = {
            _CONTROL: control.fileno(),
            _STARTED: started.fileno(),
            _OPTIONS: _sealed("options", json.dumps(options).encode()),
            _BUNDLE: _sealed("guest", guest_bundle()),
        }
        numbers = [str(number) for number in (_CONTROL, _STARTED, _OPTIONS)]
        argv = [*command.argv, "python3", "-I", "-S", f"/proc/self/fd/{_BUNDLE}", *numbers]
        self._pid = os.fork()
        if self._pid == 0:
            _exec(argv, inherited, self._complaints)
        started.close()
        for descriptor in (inherited[_OPTIONS], inherited[_BUNDLE]):
            os.close(descriptor)

    def watch(self, wake: int) -> int:
        """Return the runtime's exit code when it has ended, 0 when SIGTERM came.

        The control socket stays open here until the guest is up: so long, a failure is ours to report.
        """
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        poll.register(self._started, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._started.fileno() in ready:
                poll.unregister(self._started)
                self._welcome()
            if wake in ready:
                if signal.SIGTERM in os.read(wake, 4096):
                    return 0
                if (code := self._ended()) is not None:
                    return code

    def _welcome(self) -> None:
        """Read the guest's word; if it is up, tell it whether payloads may have System V IPC."""
        word, ancillary, _, _ = self._started.recvmsg(1, socket.CMSG_SPACE(struct.calcsize("3i")))
        if not word:  # nobody holds the other end any more
            raise self._refusal()
        if word == UP:
            pid: int = struct.unpack("3i", ancillary[0][2])[0]
            bounded = system_v.bound_from_outside(pid, self._launch.spec.limits.shm_size)
            self._started.send(BOUNDED if bounded else UNBOUNDED, socket.MSG_NOSIGNAL)
        self._control.close()

    def _ended(self) -> int | None:
        """Reap; return the runtime's exit code if it was among the dead."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == self._pid and self._control.fileno() >= 0 and not self._came_up():
                raise self._refusal()
            if pid in (0, self._pid):
                return None if pid == 0 else shell_code(status)

    def _came_up(self) -> bool:
        return bool(select.select([self._started], [], [], 0)[0]) and bool(self._started.recv(1))

    def _refusal(self) -> SandboxError:
        text = os.pread(self._complaints, 8000, 0).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        fatal = [line.partition("FATAL:")[2].strip() for line in lines if "FATAL:" in line]
        reason = (fatal or lines or ["it ended without a word"])[-1]
        return SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"{os.path.basename(self._launch.program)} cannot run {self._launch.spec.image}: {reason[:300]}",
            f"The {self._launch.backend!r} backend needs python3 in the image; `prorl-gym doctor` names other causes.",
        )


def _catch_signals() -> int:
    """Turn SIGTERM and SIGCHLD into bytes on a descriptor."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, _note)
    return woken


def _note(number: int, frame: object) -> None:
    """The wake-up descriptor carries the news; there is nothing to do here."""


def _sealed(name: str, data: bytes) -> int:
    """Return a memory file that nobody can change."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _exec(argv: list[str], inherited: dict[int, int], complaints: int) -> None:
    """In the child: become the runtime. Never returns."""
    try:
        syscalls.set_dumpable(True)  # as after every exec; a file of /proc belongs to the host's root otherwise
        be_first_victim()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        above = max(inherited) + 1
        moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in inherited.items()}
        os.dup2(complaints, 2)
        os.dup2(2, 1)
        for number, descriptor in moved.items():
            os.dup2(descriptor, number)
        os.execve(argv[0], argv, ENVIRONMENT)
    except OSError as error:
        os.write(2, f"FATAL: {error.filename or argv[0]}: {error.strerror}".encode())
    finally:
        os._exit(127)


def _reap_all() -> None:
    """Wait for what was killed: whoever waits for the keeper finds it all gone."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
