"""The supervisor of a sandbox that a container runtime makes: starts the runtime with our guest inside, and ends it.

    spawner
     '- supervisor          in the host's namespaces, as the sandboxes' uid; adopts what is orphaned below it
         '- apptainer
             '- guest       inside, pid 1 of the container's namespace; serves the service's socket
                 '- payload

Each of three events ends such a sandbox: the service's end of the control socket closes (the guest ends, and since it
is pid 1, so does everything inside); the spawner dies or stops it (SIGTERM to the supervisor, which kills what is below
it by parent link and start time, also a runtime that has cleared its parent-death signal); the runtime ends.
"""

import ast
import fcntl
import io
import json
import os
import select
import signal
import socket
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import ptyprocess  # pyright: ignore[reportMissingTypeStubs]

import prorl_gym
from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.guest.fork_exec import open_signal_pipe, renumber_descriptors
from prorl_gym.sandbox.guest.process_table import ProcessTable
from prorl_gym.sandbox.guest.python_template import SITE_MODULES
from prorl_gym.sandbox.spawner.namespaces import become_expendable
from prorl_gym.sandbox.spawner.spawner_protocol import LaunchRequest

RUNTIME_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C",
}
"""The runtime's own; nothing of the service's is in it."""

_CONTROL, _STARTUP, _OPTIONS, _BUNDLE = range(20, 24)
"""Descriptor numbers in the runtime and in the guest: low ones are the runtime's own."""
_ENTRY_MODULE = "prorl_gym.sandbox.guest.container_entry"
_TEMPLATE_MODULE = "prorl_gym.sandbox.guest.python_template"
_MIN_PYTHON = (3, 11)
"""Oldest interpreter of an image that runs the guest's source."""
_BUNDLE_MAIN = f"""\
import sys
if sys.version_info < {_MIN_PYTHON}:
    sys.exit("its python3 is %d.%d, and {".".join(map(str, _MIN_PYTHON))} is needed" % sys.version_info[:2])
from {_ENTRY_MODULE} import main
main(sys.argv[1:])
"""


@dataclass(frozen=True, slots=True)
class RuntimeCommand:
    """How to start a runtime."""

    argv: Sequence[str]
    """Up to where the program to run inside follows."""
    env: dict[str, str]
    """Environment of everything that runs inside."""
    limitations: str
    """Promises that this sandbox lacks, as text for the operator."""


def run_supervisor(
    launch: LaunchRequest,
    build_command: Callable[[LaunchRequest, str], RuntimeCommand],
    base: str,
    control: socket.socket,
    on_note: Callable[[str], None],
) -> int:
    """Start a runtime and wait until it ends or SIGTERM comes; return its exit code, 0 in the latter case.

    ``build_command`` may put files into ``base``, an empty directory. ``on_note`` is called once with what is weaker
    than usual, or "". Raises ``SandboxError`` when the image cannot be used, or the runtime ended before the guest was
    up.
    """
    wake = open_signal_pipe(signal.SIGTERM, signal.SIGCHLD)
    syscalls.set_parent_death_signal(signal.SIGTERM)
    syscalls.set_child_subreaper()
    table = ProcessTable(os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        command = build_command(launch, base)
        on_note(command.limitations)
        return _Runtime(launch, command, control).wait_for_end(wake)
    finally:
        table.kill_descendants(os.getpid())
        with suppress(ChildProcessError):  # until nothing of what was killed is left
            while True:
                os.waitpid(-1, 0)


class _Runtime:
    """A started runtime, which reports on a socket of its own when the guest is up."""

    def __init__(self, launch: LaunchRequest, command: RuntimeCommand, control: socket.socket) -> None:
        self._launch = launch
        self._control = control
        self._startup_socket, started = socket.socketpair()
        self._stderr_fd = os.memfd_create("stderr")
        options = {
            "limits": asdict(launch.spec.limits),
            "workdir": os.path.join("/", launch.spec.workdir),
            "env": {**command.env, **launch.spec.env},
        }
        inherited = {
            _CONTROL: control.fileno(),
            _STARTUP: started.fileno(),
            _OPTIONS: sealed_memfd("options", json.dumps(options).encode()),
            _BUNDLE: sealed_memfd("guest", guest_bundle()),
        }
        numbers = [str(number) for number in (_CONTROL, _STARTUP, _OPTIONS)]
        argv = [*command.argv, "python3", "-I", "-S", f"/proc/self/fd/{_BUNDLE}", *numbers]
        self._pid = os.fork()
        if self._pid == 0:
            standard = {1: self._stderr_fd, 2: self._stderr_fd}
            exec_runtime(argv, RUNTIME_ENVIRONMENT, {**standard, **inherited}, become_expendable)
        started.close()
        for descriptor in (inherited[_OPTIONS], inherited[_BUNDLE]):
            os.close(descriptor)

    def wait_for_end(self, wake: int) -> int:
        """Return the runtime's exit code when it has ended, 0 when SIGTERM came.

        The control socket stays open here until the guest is up: until then this process reports failures on it.
        """
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        poll.register(self._startup_socket, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._startup_socket.fileno() in ready:
                poll.unregister(self._startup_socket)
                if not self._startup_socket.recv(1):  # the other end is closed
                    raise self._start_error()
                self._control.close()
            if wake in ready:
                if signal.SIGTERM in os.read(wake, 4096):
                    return 0
                while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                    if ended[0] == self._pid:
                        has_reported = select.select([self._startup_socket], [], [], 0)[0]
                        if self._control.fileno() >= 0 and not (has_reported and self._startup_socket.recv(1)):
                            raise self._start_error()
                        return shell_exit_code(ended[1])

    def _start_error(self) -> SandboxError:
        runtime = os.path.basename(self._launch.runtime_path)
        return SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"{runtime} cannot run {self._launch.spec.image}: {read_error(self._stderr_fd)}",
            f"The {self._launch.backend!r} backend needs python3 in the image; `prorl-gym doctor` names other causes.",
        )


def shell_exit_code(status: int) -> int:
    """Turn a wait status into an exit code, 128 + signal for a process that a signal ended, as shells do."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def read_error(stderr_fd: int) -> str:
    """Return the line that says why a runtime ended, of 300 characters at most: the last fatal one, or the last."""
    text = os.pread(stderr_fd, 8000, 0).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = [line.partition("FATAL:")[2].strip() for line in lines if "FATAL:" in line]
    return (fatal or lines or ["it printed no error"])[-1][:300]


def sealed_memfd(name: str, data: bytes) -> int:
    """Return the descriptor of a memory file that no process can change, at its start."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def exec_runtime(
    argv: list[str], env: dict[str, str], descriptors: Mapping[int, int], prepare: Callable[[], None]
) -> None:
    """In a child: become a container runtime; ``descriptors``: number -> descriptor here. Never returns."""
    try:
        prepare()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        renumber_descriptors(descriptors)
        os.execve(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"FATAL: {error.filename or argv[0]}: {error.strerror}".encode())
    finally:
        os._exit(127)


@cache
def guest_bundle() -> bytes:
    """Return the guest as one zip archive, for containers that we cannot enter: the image's own python3 runs it.

    It holds the modules that the guest imports, found by reading their imports. It is inherited as a sealed memory
    file: nothing has to be mounted into the image, and no process inside can change it. The spawner makes it once,
    while it can still read the installation.
    """
    files = {f"ptyprocess/{path.name}": path.read_text("utf-8") for path in Path(ptyprocess.__path__[0]).glob("*.py")}
    waiting = [_ENTRY_MODULE, _TEMPLATE_MODULE]
    while waiting:
        path = _source(waiting.pop())
        name = f"prorl_gym/{path.relative_to(prorl_gym.__path__[0])}"
        if name not in files:
            files[name] = path.read_text("utf-8")
            waiting += _imports(files[name])
    for name in list(files):  # packages, empty: ours may import modules that are not in the bundle
        for parent in list(Path(name).parents)[:-1]:
            if parent.parts[0] == "prorl_gym":
                files[f"{parent}/__init__.py"] = ""
    no_customization = {f"{name}.py": "" for name in SITE_MODULES}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as bundle:  # an image's python may lack zlib
        for name, text in sorted({"__main__.py": _BUNDLE_MAIN, **no_customization, **files}.items()):
            bundle.writestr(name, text)
    return archive.getvalue()


def _imports(text: str) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prorl_gym."):
            module = str(node.module)
            below = [f"{module}.{alias.name}" for alias in node.names]
            found += [name for name in below if _source(name).is_file()] or [module]
    return found


def _source(module: str) -> Path:
    return Path(prorl_gym.__path__[0], *module.split(".")[1:]).with_suffix(".py")
