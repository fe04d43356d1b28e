"""From the spawner to a process that is pid 1 of fresh namespaces.

    spawner --fork--> middle: unshare, uid map --fork--> init (pid 1)
       |                |                                  |
       |  pid of init <-'  exits; init becomes the         |
       |                   spawner's child                 |
       '--- "go" ------------------------------------->  arms its parent-death signal, builds, serves

The middle process exists because a process cannot enter a new pid namespace itself, only its next child can. "go" is
sent after the middle has exited: a parent-death signal is bound to the parent at that moment, which must be the
spawner. Whoever dies on the way closes a socket, and the other side gives up.
"""

import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import seccomp, setup_error, syscalls
from prorl_gym.sandbox.diagnosis import explain_user_namespaces

_NAMESPACES = (
    syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
)

HOSTNAME = "sandbox"
_NOTE_BYTES = 1000

InitMain = Callable[[Callable[[str], None]], int]
"""Body of pid 1: builds the sandbox and serves until the control socket ends. Takes a function that tells the spawner
what is weaker than usual; it is called once, before serving. Returns the exit code: 0 for the end of the socket, else
that of the process whose end was the sandbox's."""


@dataclass(frozen=True, slots=True)
class Birth:
    """A sandbox on its way: what the spawner holds until pid 1 is its child."""

    middle: int
    line: socket.socket
    """Brings the pid of init, takes "go", brings a note. Open as long as the spawner lives: init can tell by it."""

    def init_pid(self) -> int | None:
        """Return the pid of init once the middle has exited; ``None`` when it failed before it had one."""
        try:
            data = self.line.recv(64, socket.MSG_DONTWAIT)
        except OSError:
            return None
        return int(json.loads(data)) if data else None

    def go(self) -> None:
        """Let init continue, now that it is this process's child."""
        try:
            self.line.send(b"go", socket.MSG_NOSIGNAL)
        except OSError:
            return  # it died; its pidfd says so


def give_birth(
    control: socket.socket, enter: Callable[[], None], main: InitMain, fork: Callable[[], int] = os.fork
) -> Birth:
    """Fork the middle process.

    Args:
        control: the guest's end of the channel; the child keeps it, the caller closes its own copy.
        enter: run by the middle: checks what must be seen with the host's uids, then enters the namespaces, if any. An
            error ends it and is reported.
        main: body of pid 1.
        fork: makes the middle.

    Raises:
        OSError: the fork was refused.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        pid = fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        _run(control, lambda: _middle(control, theirs, enter, main))
    theirs.close()
    return Birth(pid, ours)


def _run(control: socket.socket, body: Callable[[], int]) -> None:
    """Run the body of a forked process to its end; never return into the spawner's code."""
    status = 1
    try:
        status = body()
    except BaseException as error:
        setup_error.report(control, error)
    finally:
        os._exit(status)


def _middle(control: socket.socket, line: socket.socket, enter: Callable[[], None], main: InitMain) -> int:
    _shed_inheritance(control, line)
    # The spawner's until now, which shows where the host keeps its interpreter. Payloads can read that of
    # every child of the guest until its exec.
    syscalls.set_command_line(HOSTNAME)
    enter()
    pid = os.fork()
    if pid == 0:
        _run(control, lambda: _init(line, main))
    line.send(str(pid).encode(), socket.MSG_NOSIGNAL)
    return 0


def _shed_inheritance(control: socket.socket, line: socket.socket) -> None:
    """Keep no descriptor of the spawner: not its socket, not the sockets of other sandboxes, not its terminal."""
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    setup_error.close_all_except(0, 1, 2, control.fileno(), line.fileno())
    os.setsid()
    os.umask(0o022)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # pid 1 without a handler cannot be hit by its own children


def enter_namespaces(uid: int, gid: int) -> None:
    """Unshare every namespace, map root inside to ``uid`` and ``gid`` of the host, and take a neutral host name.

    Raises:
        SandboxError: the kernel refuses user namespaces, or ``uid`` is the host's root.
    """
    if uid == 0:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            "refusing to map the host's root (uid 0) into a sandbox.",
            "Set sandbox.uid to an unprivileged uid.",
        )
    # A process that changed its uid is not dumpable, and /proc/self/uid_map would belong to the host's root.
    syscalls.set_dumpable(True)
    try:
        syscalls.unshare(_NAMESPACES)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
        socket.sethostname(HOSTNAME)
    except OSError as error:
        diagnosis = explain_user_namespaces(error.errno or 0)
        raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, diagnosis.what, diagnosis.fix) from None


def _init(line: socket.socket, main: InitMain) -> int:
    if not line.recv(16):
        return 1  # the spawner is gone
    syscalls.set_parent_death_signal(signal.SIGKILL)
    try:
        line.send(b"armed", socket.MSG_NOSIGNAL)
    except BrokenPipeError:
        return 1  # the spawner died before the signal was armed
    if not seccomp.SUPPORTED:  # else payloads have no keyrings, and the spawner has left the service's
        syscalls.leave_session_keyring()

    def note(text: str) -> None:
        if text:
            line.send(text.encode()[:_NOTE_BYTES], socket.MSG_NOSIGNAL)
        line.close()

    return main(note)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
