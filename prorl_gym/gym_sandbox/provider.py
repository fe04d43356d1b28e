# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""NeMo Gym's sandbox provider ``prorl``.

In a sandbox block of Gym's configuration::

    sandbox:
      prorl: {}

Keys below ``prorl`` are those of ``ProviderConfig``. Sandboxes have no network but what a request's
``provider_options.egress`` lists: declared ports are not reachable, and Gym's optional protocols for endpoints,
networks and port forwarding are not offered.
"""

import asyncio
import logging
import secrets
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from pydantic import Field

from prorl_gym._gym_compat import (
    GymSandboxSpec,
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxPtyError,
    SandboxPtySpec,
    SandboxResources,
    SandboxStatus,
)
from prorl_gym.config import ConfigModel, load_config
from prorl_gym.errors import ConfigError, SandboxError
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.config import LimitsConfig, SandboxConfig
from prorl_gym.sandbox.guest.guest_messages import ChildStartError
from prorl_gym.sandbox.limit_breach import Breach
from prorl_gym.sandbox.protocol import Mount, Sandbox, SandboxBackend, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.operations.interactive_process import InteractiveProcess, OutputStream
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

log = logging.getLogger(__name__)

NO_EXIT_CODE = 125
"""Exit code of a command that has none, as Gym's own providers return it with an ``error_type``."""
_READY_TIMEOUT_SECONDS = 600.0
_MAX_DOWNLOAD_BYTES = 8 << 30
_MAX_ARGUMENT_BYTES = 64 << 10
_MAX_DETACHED_OUTPUT = 1 << 20
"""Maximum bytes of ``run_detached``'s result; beyond it Gym requires an error, never a cut result."""
SHM_SIZE_KEY = "prorl-shm-size"
"""Key of ``metadata`` of Gym's ``SandboxSpec`` that carries /dev/shm's size from validation to creation."""

_OUTPUT_LIMIT = 16 << 20
"""In bytes. Gym's agents fetch whole patches and logs with a command and expect them complete."""


class ProviderConfig(SandboxConfig):
    """Keys below ``prorl:`` in a sandbox block; see ``SandboxConfig`` for the rest."""

    limits: LimitsConfig = LimitsConfig(output=_OUTPUT_LIMIT)
    """Bounds of every sandbox. A request's ``memory_mib`` replaces ``total_memory``, its ``disk_gib`` replaces
    ``root_size`` and ``file_size``."""
    command_seconds: Annotated[float, Field(gt=0)] = 180.0
    """Longest time of a command whose caller names none."""
    workdir: str = "/workspace"
    """Working directory of sandboxes whose request names none."""


class _ProviderOptions(ConfigModel):
    """Keys of a request's ``provider_options``."""

    mounts: tuple[tuple[str, str], ...] = ()
    """Read-only views of host paths: (source, target)."""
    egress: tuple[str, ...] = ()
    """Reachable hosts, ``host`` or ``host:port``; see docs/sandbox-limits.md. None by default."""


class ProrlPtySession:
    """A ``SandboxPtySession``. It reads straight from the terminal in this process: there is no transport."""

    def __init__(self, session_id: str, live: InteractiveProcess) -> None:
        self.session_id = session_id
        self.mode: str | None = "pty" if live.stderr is None else "pipe"
        self._process = live
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it can no longer run commands."""
        return self._closed or not self._process.is_running

    async def read(self, *, timeout_s: float | None = None) -> bytes:
        """Unread output blocks the program: nothing is lost or buffered."""
        return await self._read(self._process.stdout, timeout_s)

    async def read_stderr(self, *, timeout_s: float | None = None) -> bytes:
        """On a terminal this stream is empty; returns at once."""
        if self._process.stderr is None:
            return b""
        return await self._read(self._process.stderr, timeout_s)

    async def _read(self, stream: OutputStream, timeout_s: float | None) -> bytes:
        if self._closed:
            return b""
        async with asyncio.timeout(timeout_s):
            chunk = await stream.read()
        if not chunk:
            await self.wait_exit()  # raises if the sandbox was lost
        return chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self.read():
            yield chunk

    async def write(self, data: bytes) -> None:
        if self.closed:
            raise SandboxPtyError(f"PTY session {self.session_id} has ended: nothing reads its input.")
        self._process.write(data)

    async def resize(self, rows: int, cols: int) -> None:
        if self.mode == "pty" and not self.closed:
            self._process.resize(rows, cols)

    async def send_signal(self, signal: str) -> None:
        """Send a signal by name to the program's process group."""
        if signal not in Signals.__members__:
            raise ValueError(f"No signal {signal!r}. Use a name such as 'SIGTERM'.")
        await self._process.send_signal(Signals[signal])

    async def wait_exit(self, *, timeout_s: float | None = None) -> int:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._process.wait()
        except SandboxError as error:
            raise SandboxPtyError(str(error)) from error

    async def run_detached(self, command: str, *, poll_interval_s: float = 15.0) -> tuple[bytes, int | None]:
        """Run a command in the session's shell to its end. There is no connection to hold, so nothing is polled."""
        token = secrets.token_hex(8)
        begin, end = f"{token}B\n".encode(), f"{token}E:".encode()
        # In halves: the terminal's echo of these lines must not look like the marks.
        mark = f"printf '%s%s' '{token[:4]}'"
        await self.write(
            f"{{ {mark} '{token[4:]}B\n'\n{command}\n{mark} '{token[4:]}E:'$?' '\n}} </dev/null\n".encode()
        )
        seen = b""
        while not (end in seen and b" " in seen.partition(end)[2]):
            chunk = await self.read()
            if not chunk:
                raise SandboxPtyError(f"PTY session {self.session_id} ended before its command did.")
            seen += chunk
            if len(seen) > _MAX_DETACHED_OUTPUT:
                raise SandboxPtyError(f"A detached command wrote more than {_MAX_DETACHED_OUTPUT} bytes; use exec().")
        output, _, rest = seen.replace(b"\r\n", b"\n").partition(begin)[2].partition(end)
        code = rest.partition(b" ")[0]
        return output, int(code) if code.isdigit() else None

    async def detach(self) -> None:
        """Do nothing: there is no transport to release."""

    async def reattach(self) -> None:
        """Do nothing: see ``detach``."""

    async def close(self) -> None:
        self._closed = True
        await self._process.close()

    async def __aenter__(self) -> "ProrlPtySession":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()


@dataclass(slots=True)
class _StartedSandbox:
    """The sandbox behind a handle."""

    sandbox: Sandbox
    shell: str
    """``bash``, or ``sh`` in images without it."""
    pty_sessions: list[ProrlPtySession] = field(default_factory=list[ProrlPtySession])
    ttl_timer: asyncio.TimerHandle | None = None
    close_task: asyncio.Task[None] | None = None


class ProrlProvider:
    """A ``SandboxProvider`` with PTYs. All providers of an event loop share a backend per configuration."""

    name = "prorl"

    def __init__(self, **config: Any) -> None:
        self._config = load_config(ProviderConfig, config, "sandbox provider 'prorl'")
        self._shared: _SharedBackend | None = None
        self._started: dict[str, _StartedSandbox] = {}

    async def create(self, spec: GymSandboxSpec) -> SandboxHandle:
        """Start a sandbox and run a first command in it; both within ``ready_timeout_s``."""
        wanted = to_spec(spec, self._config)
        seconds = spec.ready_timeout_s or _READY_TIMEOUT_SECONDS
        try:
            async with asyncio.timeout(seconds):
                backends = _backends_by_loop.setdefault(asyncio.get_running_loop(), {})
                self._shared = backends.setdefault(self._config.model_dump_json(), _SharedBackend())
                backend = await self._shared.acquire(self, self._config)
                box = await backend.start_sandbox(wanted)
                try:
                    shell = await _find_shell(box, wanted.image)
                except BaseException:
                    await box.close()
                    raise
        except SandboxError as error:
            raise SandboxCreateError(str(error)) from error
        except TimeoutError:
            raise SandboxCreateError(
                f"prorl: no sandbox over {wanted.image!r} was ready after {seconds:g} s."
            ) from None
        started = self._started[box.id] = _StartedSandbox(box, shell)
        handle = SandboxHandle(sandbox_id=box.id, provider_name=self.name, raw=started)
        if spec.ttl_s is not None:
            started.ttl_timer = asyncio.get_running_loop().call_later(spec.ttl_s, self._expire, started, spec.ttl_s)
        return handle

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run a command in a shell of its own. At the timeout its process tree is killed; its output is kept.

        ``error_type``: ``sandbox`` (it is lost), ``timeout``, or the name of the limit that the command ran into
        (``Breach``, such as ``memory_sandbox``). With the last, and with ``None``, the exit code is the command's own.
        """
        _check_user(user)
        started: _StartedSandbox = handle.raw
        seconds = self._config.command_seconds if timeout_s is None else timeout_s
        argv, stdin = [started.shell, "-c", command], b""
        if len(encoded := command.encode("utf-8", "surrogateescape")) >= _MAX_ARGUMENT_BYTES:
            # Too long for an argument list. The outer shell reads the whole command before it runs any of it, so that
            # the command cannot read its own text as input.
            argv, stdin = [started.shell, "-c", 'eval "$(cat)" </dev/null'], encoded
        try:
            result = await started.sandbox.exec(argv, timeout=seconds, stdin=stdin, cwd=cwd, env=env)
        except SandboxError as error:
            return SandboxExecResult(None, str(error), NO_EXIT_CODE, "sandbox")
        stdout, stderr = result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")
        if result.timed_out:
            cause = "" if result.breach in (None, Breach.WALL_CLOCK) else f" (limit: {result.breach})"
            said = f"{stderr}Command timed out after {seconds:g}s{cause}"
            return SandboxExecResult(stdout, said, NO_EXIT_CODE, "timeout")
        return SandboxExecResult(stdout, stderr, result.exit_code, result.breach and result.breach.value)

    async def exec_with_background_services(
        self, handle: SandboxHandle, command: str, *, cwd: str | None = None, timeout_s: float | None = None
    ) -> SandboxExecResult:
        """Run a command. Its background processes live on, as after every ``exec``."""
        return await self.exec(handle, command, cwd=cwd, timeout_s=timeout_s)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """Copy a host file into the sandbox, with its permissions."""
        data = await asyncio.to_thread(source_path.read_bytes)
        mode = (await asyncio.to_thread(source_path.stat)).st_mode & 0o777
        await handle.raw.sandbox.write_file(target_path, data, mode=mode)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Copy a regular file of the sandbox to the host, making directories."""
        data = await handle.raw.sandbox.read_file(source_path, limit=_MAX_DOWNLOAD_BYTES)
        await asyncio.to_thread(target_path.parent.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(target_path.write_bytes, data)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """``RUNNING`` while it answers, ``STOPPED`` after ``close``, ``ERROR`` when it died by itself."""
        started: _StartedSandbox = handle.raw
        if started.close_task is not None:
            return SandboxStatus.STOPPED
        return SandboxStatus.RUNNING if await started.sandbox.is_alive() else SandboxStatus.ERROR

    async def create_pty(self, handle: SandboxHandle, spec: SandboxPtySpec) -> ProrlPtySession:
        """Open a terminal, or pipes, to a shell or to one command."""
        _check_user(spec.user)
        started: _StartedSandbox = handle.raw
        box = started.sandbox
        if not isinstance(box, RunningSandbox):
            raise SandboxPtyError(f"prorl: a {type(box).__name__} has no terminals.")
        interactive = ["-i"] if spec.pty else []
        argv = [started.shell, *(interactive if spec.command is None else ["-c", spec.command])]
        env, cwd = {"TERM": "xterm", **(spec.env or {})}, spec.cwd or box.spec.workdir
        terminal = partial(box.open_terminal, rows=spec.rows, columns=spec.cols)
        opening = terminal if spec.pty else box.open_pipes
        try:
            live = await opening(argv, env=env, cwd=cwd)
        except (SandboxError, ChildStartError) as error:
            raise SandboxPtyError(f"prorl: no PTY session in sandbox {box.id}: {error}") from error
        session = ProrlPtySession(uuid.uuid4().hex, live)
        started.pty_sessions.append(session)
        return session

    def validate_runtime_requirements(self, *, cap_add: tuple[str, ...], shm_size: int | None) -> dict[str, str] | None:
        """Return the metadata that ``create`` reads for the size of /dev/shm; refuse capabilities."""
        if cap_add:
            raise ValueError(f"prorl: sandboxes get no further capabilities (requested: {', '.join(cap_add)}).")
        return None if shm_size is None else {SHM_SIZE_KEY: str(shm_size)}

    async def configure_runtime(self, handle: SandboxHandle, *, cap_add: tuple[str, ...], shm_size: int | None) -> None:
        """Do nothing more: the size was set at creation."""
        self.validate_runtime_requirements(cap_add=cap_add, shm_size=shm_size)

    async def close(self, handle: SandboxHandle) -> None:
        await self._close(handle.raw)

    async def aclose(self) -> None:
        """Close the remaining sandboxes, and the backend if this was its last provider. Idempotent."""
        async with asyncio.TaskGroup() as group:
            for started in list(self._started.values()):
                group.create_task(self._close(started))
        shared, self._shared = self._shared, None
        if shared is not None:
            await shared.release(self)

    async def _close(self, started: _StartedSandbox) -> None:
        if started.close_task is None:
            started.close_task = asyncio.ensure_future(self._release(started))
        await asyncio.shield(started.close_task)

    async def _release(self, started: _StartedSandbox) -> None:
        if started.ttl_timer is not None:
            started.ttl_timer.cancel()
        self._started.pop(started.sandbox.id, None)
        await started.sandbox.close()
        for session in started.pty_sessions:
            await session.close()

    def _expire(self, started: _StartedSandbox, seconds: float) -> None:
        log.warning("sandbox %s reached its ttl_s of %g s and is closed", started.sandbox.id, seconds)
        if started.close_task is None:
            started.close_task = asyncio.ensure_future(self._release(started))


def to_spec(request: GymSandboxSpec, config: ProviderConfig) -> SandboxSpec:
    """Translate a request. The provider handles ``ttl_s`` and ``ready_timeout_s``, Gym handles ``files``."""
    if request.entrypoint:
        raise SandboxCreateError(
            "prorl: `entrypoint` is not supported: a sandbox starts without a main process.\nRun it with exec()."
        )
    try:
        options = load_config(_ProviderOptions, request.provider_options, "provider_options of 'prorl'")
    except ConfigError as error:
        raise SandboxCreateError(str(error)) from None
    return SandboxSpec(
        image=request.image or config.image,
        workdir=request.workdir or config.workdir,
        env=dict(request.env),
        mounts=tuple(Mount(source, target) for source, target in options.mounts),
        egress=options.egress,
        limits=_to_limits(request, config.limits.to_limits()),
    )


def _to_limits(request: GymSandboxSpec, limits: SandboxLimits) -> SandboxLimits:
    resources = request.resources
    assert isinstance(resources, SandboxResources)  # Gym's dataclass converts mappings
    if resources.gpu:
        raise SandboxCreateError("prorl: `resources.gpu` is not supported: sandboxes see no devices.\nRemove it.")
    for name in ("cpu", "memory_mib", "disk_gib"):
        value = getattr(resources, name)
        if value is not None and not value > 0:
            raise SandboxCreateError(f"prorl: `resources.{name}` is {value}.\nIt must be positive, or left out.")
    if resources.cpu is not None:
        # Gym's own configurations set it everywhere: refusing it would refuse them.
        log.warning(
            "prorl: resources.cpu (%g) is not enforced: a share of the processors takes a cgroup. "
            "limits.cpu_seconds bounds the time of each process.",
            resources.cpu,
        )
    if resources.memory_mib is not None:
        limits = replace(limits, total_memory=resources.memory_mib << 20)
    if resources.disk_gib is not None:
        limits = replace(limits, root_size=resources.disk_gib << 30, file_size=resources.disk_gib << 30)
    if SHM_SIZE_KEY in request.metadata:
        limits = replace(limits, shm_size=int(request.metadata[SHM_SIZE_KEY]))
    return limits


async def _find_shell(box: Sandbox, image: str) -> str:
    for shell in ("bash", "sh"):
        if (await box.exec([shell, "-c", ":"], timeout=_READY_TIMEOUT_SECONDS)).exit_code == 0:
            return shell
    raise SandboxCreateError(f"prorl: image {image!r} has neither bash nor sh.\nInstall one in the image.")


def _check_user(user: str | int | None) -> None:
    if user not in (None, "root", 0, "0"):
        raise ValueError(f"prorl: a sandbox has one user, root; it cannot run anything as {user!r}.")


class _SharedBackend:
    """A backend that is opened by its first user and closed by its last.

    Gym's agents make a provider per rollout. A backend per provider would mean a spawner process, a probe and a reaping
    of the scratch directory per rollout.
    """

    def __init__(self) -> None:
        self._users: set[ProrlProvider] = set()
        self._opening: asyncio.Task[SandboxBackend] | None = None

    async def acquire(self, user: ProrlProvider, config: SandboxConfig) -> SandboxBackend:
        """Return the backend, opened again if that failed. Unless it fails, the user needs one ``release``."""
        self._users.add(user)
        if self._opening is None or (self._opening.done() and _has_failed(self._opening)):
            self._opening = asyncio.ensure_future(open_backend(config))
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except BaseException:
            if opening.done() and _has_failed(opening):
                self._users.discard(user)
            raise

    async def release(self, user: ProrlProvider) -> None:
        self._users.discard(user)
        opening = self._opening
        if not self._users and opening is not None:
            self._opening = None
            await run_shielded(self._close(opening))

    async def _close(self, opening: "asyncio.Task[SandboxBackend]") -> None:
        (outcome,) = await asyncio.gather(opening, return_exceptions=True)
        if not isinstance(outcome, BaseException):
            await outcome.close()


def _has_failed(task: "asyncio.Task[SandboxBackend]") -> bool:
    return task.cancelled() or task.exception() is not None


_backends_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _SharedBackend]] = WeakKeyDictionary()
