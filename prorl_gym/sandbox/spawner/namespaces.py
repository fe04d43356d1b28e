"""From the spawner to the first process of a sandbox: as a rule, pid 1 of fresh namespaces.

    spawner --fork, into the namespaces--> init (pid 1): closes what is the spawner's
       '--- "go" ---------------------------> arms its parent-death signal, maps its ids, builds, serves

"go" is sent once the sandbox's directory says which process init is. When one of the two dies during the start, its
socket closes, and the other side fails the start.
"""

import errno
import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.guest import seccomp
from prorl_gym.sandbox.guest.fork_exec import close_all_except

_HOSTNAME = "sandbox"
NAMESPACES = (
    syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
)
_NOTE_BYTES = 1000
_OOM_SCORE = 800
"""From -1000 to 1000; the service normally has 0."""
_MAX_ERROR_TEXT = 600
"""Characters of the cause, and of the fix, of an error: causes may quote a program's output."""
_APPARMOR = "kernel.apparmor_restrict_unprivileged_userns"
_DEBIAN = "kernel.unprivileged_userns_clone"
_COUNT = "user.max_user_namespaces"

InitMain = Callable[[Callable[[str], None]], int]
"""Body of pid 1: builds the sandbox and serves until the control socket ends. Takes a function that reports to the
spawner what is weaker than usual; it is called once, before serving. Returns the exit code: 0 for the end of the
socket, else that of the process whose end was the sandbox's."""


def become_expendable() -> None:
    """Make the kernel kill this process before the service when memory runs out."""
    syscalls.set_dumpable(True)  # as after every exec; a file of /proc belongs to the host's root otherwise
    syscalls.write_setting("/proc/self/oom_score_adj", str(_OOM_SCORE))


def fork_sandbox(control: socket.socket, main: InitMain, fork: Callable[[], int]) -> tuple[int, socket.socket]:
    """Fork the first process of a sandbox, which runs ``main``, and return its pid and channel.

    The channel sends "go", for which it waits, and receives "armed" and a note; the process sees its end.

    ``control`` is the guest's end of the channel; the child keeps it, the caller closes its own copy. Raises
    ``SandboxError`` when the kernel refuses the namespaces, ``OSError`` when it refuses the fork.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            pid = fork()
        except BaseException:
            ours.close()
            raise
        if pid == 0:
            _run_child(control, theirs, main)
    return pid, ours


def _run_child(control: socket.socket, spawner: socket.socket, main: InitMain) -> None:
    """Run the first process of a sandbox to its end; never return into the spawner's code."""
    status = 1
    try:
        null = os.open("/dev/null", os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        close_all_except(0, 1, 2, control.fileno(), spawner.fileno())  # other sandboxes' sockets among them
        os.setsid()
        os.umask(0o022)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)  # pid 1 without a handler cannot be hit by its own children
        # The spawner's until now, which shows where the host keeps its interpreter. Payloads can read that of
        # every child of the guest until its exec.
        syscalls.set_command_line(_HOSTNAME)
        status = _run_init(spawner, main)
    except BaseException as error:
        report_setup_error(control, error)
    finally:
        os._exit(status)


def map_ids(uid: int, gid: int) -> None:
    """In new namespaces: map root to ``uid`` and ``gid`` of the host, and take a neutral host name.

    Raises ``SandboxError`` when the kernel refuses user namespaces, or ``uid`` is the host's root.
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
        syscalls.write_setting("/proc/self/setgroups", "deny")
        syscalls.write_setting("/proc/self/uid_map", f"0 {uid} 1")
        syscalls.write_setting("/proc/self/gid_map", f"0 {gid} 1")
        socket.sethostname(_HOSTNAME)
    except OSError as error:
        raise explain_user_namespaces(error.errno or 0) from None


def _run_init(spawner: socket.socket, main: InitMain) -> int:
    if not spawner.recv(16):
        return 1  # the spawner is gone
    syscalls.set_parent_death_signal(signal.SIGKILL)
    try:
        spawner.send(b"armed", socket.MSG_NOSIGNAL)
    except BrokenPipeError:
        return 1  # the spawner died before the signal was armed
    if not seccomp.SUPPORTED:  # the filter keeps payloads from keyrings; the spawner has left the service's
        syscalls.leave_session_keyring()

    def note(text: str) -> None:
        if text:
            spawner.send(text.encode()[:_NOTE_BYTES], socket.MSG_NOSIGNAL)
        spawner.close()

    return main(note)


def report_setup_error(control: socket.socket, error: BaseException) -> None:
    message = {"type": "failed", **describe_setup_error(error)}
    with suppress(OSError):
        control.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL)


def describe_setup_error(error: BaseException) -> dict[str, str]:
    """Return kind, cause and fix of an error as the message carries them."""
    if isinstance(error, SandboxError):
        return {"kind": error.kind.value, "what": error.what[:_MAX_ERROR_TEXT], "fix": error.fix[:_MAX_ERROR_TEXT]}
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        what = f"the sandbox could not be built: {error.strerror or error}{where}."
        fix = "Run `prorl-gym doctor`; it names what this machine lacks."
    else:
        what = f"the sandbox could not be built: {type(error).__name__}: {error}"
        fix = "This is a defect; please report it."
    return {"kind": FailureKind.SANDBOX_UNAVAILABLE.value, "what": " ".join(what.split())[:_MAX_ERROR_TEXT], "fix": fix}


def read_sysctl(name: str) -> str | None:
    try:
        with open(f"/proc/sys/{name.replace('.', '/')}", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def explain_user_namespaces(number: int, read: Callable[[str], str | None] = read_sysctl) -> SandboxError:
    """Return cause and fix of a refusal (``errno``) to make a user namespace, or to work inside a new one."""
    for name, closed, opened in ((_COUNT, "0", "65536"), (_DEBIAN, "0", "1"), (_APPARMOR, "1", "0")):
        if read(name) == closed:
            what = f"this kernel refuses user namespaces: {name} is {closed}."
            fix = f"As root: sysctl -w {name}={opened} (and put it into /etc/sysctl.d to keep it)."
            return SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, fix)
    if number in (errno.ENOSPC, errno.EUSERS):
        what = f"the kernel's limit on user namespaces is reached ({_COUNT} is {read(_COUNT)})."
        fix = f"As root: sysctl -w {_COUNT}=65536, or stop other containers."
    elif number == errno.EPERM:
        what = "user namespaces are refused here (EPERM), as in a container with the default seccomp filter."
        fix = (
            "Start that container with '--security-opt seccomp=unconfined --security-opt systempaths=unconfined'"
            f" or run outside it; otherwise check sysctl {_COUNT}."
        )
    else:
        what = f"user namespaces cannot be made ({errno.errorcode.get(number, number)})."
        fix = f"The kernel needs CONFIG_USER_NS and sysctl {_COUNT} above 0."
    return SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, fix)
