"""Protocols of sandboxes and their backends. Nothing below ``prorl_gym.sandbox`` depends on rollouts.

Cancelling an ``await`` on any method that runs something kills what it started (the whole process tree) before the
cancellation propagates. Every method raises ``SandboxError(SANDBOX_LOST)`` once the sandbox is gone.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from prorl_gym.errors import Evidence
from prorl_gym.sandbox.limit_breach import Breach

DEFAULT_IMAGE = ""
"""The image that the service's configuration names (``sandbox.image``)."""
HOST_IMAGE = "host"
"""Image name of the host-``/usr`` mode: the host's own programs, nothing else of the host."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Bounds of one sandbox. Sizes in bytes, times in seconds."""

    memory: int = 4 << 30
    """Memory of each process: what it has touched, not what it has reserved. A watchdog kills one that exceeds it."""
    total_memory: int = 8 << 30
    """Memory of the whole sandbox, shared pages shared out; a watchdog kills the largest process that exceeds it."""
    processes: int = 512
    """Processes and threads of the whole sandbox (RLIMIT_NPROC counts per user namespace)."""
    open_files: int = 4096
    file_size: int = 2 << 30
    root_size: int = 2 << 30
    """Bytes that may be written to the whole root file system."""
    root_on: Literal["memory", "disk"] = "memory"
    """Where they are kept: in a sized tmpfs, or on the disk of the scratch directory, for more than fits in memory."""
    shm_size: int = 64 << 20
    """``/dev/shm`` and memory files; System V shared memory has the same bound, separately."""
    cpu_seconds: int = 3600
    """CPU time of each process."""
    output: int = 64 << 10
    """Bytes of output returned by one command: head and tail are kept, with a marker between them."""

    @property
    def root_inodes(self) -> int:
        """Files and directories that may be made in the root: each takes an inode, which counts as no byte."""
        return self.root_size // 4096 + 4096


@dataclass(frozen=True, slots=True)
class Mount:
    """A read-only view of a host file or directory inside the sandbox."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Specification of a sandbox. Equal specs may be served from one warm pool."""

    image: str = DEFAULT_IMAGE
    """``host``, or the path of an image directory; with an image store also a SIF's path, ``docker://...``, a name."""
    workdir: str = "/workspace"
    """Working directory of everything that runs; created when missing."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    mounts: tuple[Mount, ...] = ()
    limits: SandboxLimits = SandboxLimits()
    """A bound that is left at its default is replaced by the service's (``sandbox.limits``)."""
    network: Literal["none"] = "none"
    egress: tuple[str, ...] = ()
    """Hosts that may be reached through a proxy of the service: ``host`` (ports 80 and 443) or ``host:port``. A
    private, loopback or link-local address is only reached when it is listed itself."""
    python_tool: Literal["session", "kernel"] | None = None
    """Runner of the cells of ``Sandbox.python``: a worker of ours, which needs nothing of the image but python3, or the
    image's own ipykernel. ``None``: as the service has it (``sandbox.python_tool``)."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Result of a one-shot command."""

    exit_code: int
    """As a shell reports it: 128 + signal number when a signal ended it."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    """Output beyond the limit was left out (head and tail are kept)."""
    seconds: float = 0.0
    breach: Breach | None = None
    """The limit it ran into, as far as that is known; see ``limit_breach``."""
    kill_evidence: Evidence | None = None
    """Evidence about a SIGKILL or SIGTERM that ended a part of it, if nothing inside sent one and no limit explains it.
    ``None``: there was none, or the payload may have sent it."""


@dataclass(frozen=True, slots=True)
class ShellResult:
    """Result of one command in the persistent shell, or the output so far of one that is still running."""

    output: str
    """Terminal output, decoded with replacement, ``\\r\\n`` folded to ``\\n``, cut to the limit with a marker."""
    exit_code: int | None
    """``None`` while the command is still running."""
    cwd: str
    timed_out: bool = False
    """The command hit its timeout and was interrupted or killed."""
    restarted: bool = False
    """The shell died or was tampered with and was started again in the last known directory and environment."""
    breach: Breach | None = None
    """The limit it ran into, as far as that is known."""
    state_kept: bool = False
    """With ``restarted``: directory and environment are as the old shell left them, not as before this command."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """Result of one cell of the python session."""

    output: str
    """Printed output, then the value's repr or the traceback; cut to the limit with a marker."""
    ok: bool
    """Whether the cell ran without raising."""
    images: tuple[bytes, ...] = ()
    """PNG files of figures."""
    timed_out: bool = False
    restarted: bool = False
    """The session died (segfault, ``os._exit``, out of memory) and was started again, empty."""
    breach: Breach | None = None
    """The limit it ran into, as far as that is known."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One entry of a directory."""

    name: str
    kind: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: int


class Shell(Protocol):
    """One persistent bash on a pty. Directory, variables, functions and jobs survive between commands."""

    async def run_command(self, command: str, *, timeout: float) -> ShellResult:
        """Run a command to its end, or until ``timeout``; then SIGINT, then SIGKILL of its process tree."""
        ...

    async def start_command(self, command: str, *, wait: float) -> ShellResult:
        """Start a command and return after at most ``wait`` seconds, leaving it running when it is not done."""
        ...

    async def send_input(self, text: str, *, wait: float) -> ShellResult:
        """Type ``text`` (no newline is added) into the running command, then collect output for up to ``wait`` seconds.

        An empty text types nothing. A text that is the name of a key (``C-c``, ``^C``, ``ctrl+c``, with any letter) is
        sent as the control character.
        """
        ...

    async def restart(self) -> ShellResult:
        """End the shell with everything that it started, and start one with its last directory and exported variables.

        Returns output that was not returned yet; ``exit_code`` is 0.
        """
        ...

    async def close(self) -> None:
        """Kill the shell and everything it started. Idempotent."""
        ...


class PythonSession(Protocol):
    """One persistent Python interpreter in its own killable process."""

    async def run_cell(self, code: str, *, timeout: float) -> CellResult:
        """Run a cell; at the timeout it is interrupted, then the process is killed and started again."""
        ...

    async def close(self) -> None:
        """Kill it. Idempotent."""
        ...


class Sandbox(Protocol):
    """A running sandbox."""

    @property
    def id(self) -> str:
        """Unique on this host."""
        ...

    @property
    def spec(self) -> SandboxSpec:
        """The spec it was started from."""
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        """Run one program to its end with separate stdout and stderr, never through a shell.

        After ``timeout`` seconds the whole process tree is killed and ``timed_out`` is set. A program that does not
        exist gives exit code 127. ``cwd`` is the spec's by default, ``env`` is added to the spec's, and ``limits`` are
        narrower ones for this command.
        """
        ...

    async def shell(self) -> Shell:
        """Return the sandbox's persistent shell; the first call starts it."""
        ...

    async def python(self) -> PythonSession:
        """Return the sandbox's python session; the first call starts it."""
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write a file, making its directories. The path is resolved inside the sandbox only; links are followed.

        ``mode``: its permissions from now on; ``None`` keeps those of an existing file and gives a new one 644. The
        owner stays in either case. Raises ``OSError`` as a program inside would see it (``ENOSPC`` when the disk limit
        is hit).
        """
        ...

    async def read_file(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """Read a regular file.

        Raises ``OSError`` as inside; ``EFBIG`` when it is larger than ``limit``, ``EINVAL`` when it is not a regular
        file.
        """
        ...

    async def list_dir(self, path: str) -> list[FileEntry]:
        """List a directory, sorted by name."""
        ...

    async def listen(self, port: int) -> socket.socket:
        """Return a TCP socket that listens on 127.0.0.1 inside the sandbox; the caller accepts, and closes it.

        A sandbox without a network has a loopback of its own: programs inside reach this port, nothing else does.
        Connections that were accepted outlive the socket, and are cut by the caller or by the end of the sandbox. Port
        0 takes a free one. Raises ``OSError`` (``EADDRINUSE``) when the port is taken inside.
        """
        ...

    async def is_alive(self) -> bool:
        """Whether the sandbox still answers. Checked before a failure is blamed on a command."""
        ...

    @property
    def is_gone(self) -> bool:
        """Whether it is known to be closed or dead. Sends it nothing, so takes no time."""
        ...

    async def close(self) -> None:
        """Kill everything inside and release it. Idempotent, shielded from cancellation, safe at any time."""
        ...


@runtime_checkable
class HasLossEvidence(Protocol):
    """A sandbox that can report why it is gone."""

    async def loss_evidence(self) -> Evidence | None: ...


async def loss_evidence_of(sandbox: Sandbox) -> Evidence | None:
    """Return the evidence about a sandbox's loss; ``None``: it lives, was closed, or cannot report any."""
    return await sandbox.loss_evidence() if isinstance(sandbox, HasLossEvidence) else None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Whether a backend works here, found by starting a sandbox."""

    backend: str
    ok: bool
    detail: str
    """Version or, when it does not work, the cause."""
    fix: str = ""
    misconfigured: bool = False
    """It would work here, but not as configured (image, limits): no reason to fall back to a weaker backend."""


@runtime_checkable
class SandboxCounter(Protocol):
    """A backend that counts its sandboxes."""

    @property
    def sandbox_count(self) -> int:
        """Number of sandboxes, including warm ones that wait for work."""
        ...


def sandbox_count_of(backend: object) -> int | None:
    """Return the number of a backend's sandboxes; ``None``: it does not count them."""
    return backend.sandbox_count if isinstance(backend, SandboxCounter) else None


class SandboxBackend(Protocol):
    """Starts sandboxes of one kind."""

    @property
    def name(self) -> str:
        """``userns``, ``apptainer``, ``local``, ..."""
        ...

    async def probe(self) -> ProbeResult:
        """Start a sandbox, run ``true``, stop it. The answer is cached."""
        ...

    async def start_sandbox(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox. Cancelling it leaves nothing behind.

        Raises ``SandboxError``: ``IMAGE_MISSING``, ``IMAGE_BROKEN`` or ``SANDBOX_UNAVAILABLE``.
        """
        ...

    async def close(self) -> None:
        """Stop every sandbox of this backend and its helper processes. Idempotent."""
        ...
