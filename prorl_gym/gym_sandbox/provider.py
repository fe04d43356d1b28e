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
import uuid
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from prorl_gym._gym_compat import (
    GymSandboxSpec,
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxPtyError,
    SandboxPtySpec,
    SandboxStatus,
)
from prorl_gym.config import load_config
from prorl_gym.errors import SandboxError
from prorl_gym.gym_sandbox.config import SHM_SIZE_KEY, ProviderConfig, to_spec
from prorl_gym.gym_sandbox.pty import ProrlPtySession
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.limit_breach import Breach
from prorl_gym.sandbox.protocol import Sandbox, SandboxBackend
from prorl_gym.sandbox.service.guest_channel import ChildStartError
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

log = logging.getLogger(__name__)

NO_EXIT_CODE = 125
"""Exit code of a command that has none, as Gym's own providers return it beside an ``error_type``."""
_READY_TIMEOUT_SECONDS = 600.0
_MAX_DOWNLOAD_BYTES = 8 << 30
_MAX_ARGUMENT_BYTES = 64 << 10


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
    """A ``SandboxProvider`` with PTYs. All providers of an event loop share a backend per configuration.

    Args:
        config: keys of ``ProviderConfig``.

    Raises:
        ConfigError: a key is unknown or a value does not fit.
    """

    name = "prorl"

    def __init__(self, **config: Any) -> None:
        self._config = load_config(ProviderConfig, config, "sandbox provider 'prorl'")
        self._shared: _SharedBackend | None = None
        self._open_task: asyncio.Task[SandboxBackend] | None = None
        self._started: dict[str, _StartedSandbox] = {}

    async def create(self, spec: GymSandboxSpec) -> SandboxHandle:
        """Start a sandbox and run a first command in it.

        Raises:
            SandboxCreateError: it cannot be started, or not within ``ready_timeout_s``.
        """
        wanted = to_spec(spec, self._config)
        seconds = spec.ready_timeout_s or _READY_TIMEOUT_SECONDS
        try:
            async with asyncio.timeout(seconds):
                backend = await self._backend()
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

        Raises:
            ValueError: a user other than root is requested; there is only root.
        """
        _check_user(user)
        started: _StartedSandbox = handle.raw
        seconds = self._config.command_seconds if timeout_s is None else timeout_s
        # The command travels on stdin when it is too long for an argument list.
        argv, stdin = _shell_argv(started.shell, command)
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
        data, mode = await asyncio.to_thread(_read, source_path)
        await handle.raw.sandbox.write_file(target_path, data, mode=mode)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Copy a regular file of the sandbox to the host, making directories."""
        data = await handle.raw.sandbox.read_file(source_path, limit=_MAX_DOWNLOAD_BYTES)
        await asyncio.to_thread(_write, target_path, data)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """``RUNNING`` while it answers, ``STOPPED`` after ``close``, ``ERROR`` when it died by itself."""
        started: _StartedSandbox = handle.raw
        if started.close_task is not None:
            return SandboxStatus.STOPPED
        return SandboxStatus.RUNNING if await started.sandbox.is_alive() else SandboxStatus.ERROR

    async def create_pty(self, handle: SandboxHandle, spec: SandboxPtySpec) -> ProrlPtySession:
        """Open a terminal, or pipes, to a shell or to one command.

        Raises:
            ValueError: a user other than root is requested.
            SandboxPtyError: it could not be opened.
        """
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
        """Return the metadata that ``create`` reads for the size of /dev/shm.

        Raises:
            ValueError: capabilities are requested.
        """
        if cap_add:
            raise ValueError(f"prorl: sandboxes get no further capabilities (requested: {', '.join(cap_add)}).")
        return None if shm_size is None else {SHM_SIZE_KEY: str(shm_size)}

    async def configure_runtime(self, handle: SandboxHandle, *, cap_add: tuple[str, ...], shm_size: int | None) -> None:
        """Do nothing more: the size was set at creation."""
        self.validate_runtime_requirements(cap_add=cap_add, shm_size=shm_size)

    async def close(self, handle: SandboxHandle) -> None:
        """Kill everything in the sandbox and release it. Idempotent."""
        await self._close(handle.raw)

    async def aclose(self) -> None:
        """Close the remaining sandboxes, and the backend if this was its last provider. Idempotent."""
        async with asyncio.TaskGroup() as group:
            for started in list(self._started.values()):
                group.create_task(self._close(started))
        shared, self._shared, self._open_task = self._shared, None, None
        if shared is not None:
            await shared.release()

    async def _backend(self) -> SandboxBackend:
        if self._open_task is None or (self._open_task.done() and self._open_task.exception() is not None):
            self._open_task = asyncio.ensure_future(self._acquire_backend())
        return await asyncio.shield(self._open_task)

    async def _acquire_backend(self) -> SandboxBackend:
        shared = _shared_backend(self._config)
        backend = await shared.acquire(self._config)
        self._shared = shared
        return backend

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


async def _find_shell(box: Sandbox, image: str) -> str:
    for shell in ("bash", "sh"):
        if (await box.exec([shell, "-c", ":"], timeout=_READY_TIMEOUT_SECONDS)).exit_code == 0:
            return shell
    raise SandboxCreateError(f"prorl: image {image!r} has neither bash nor sh.\nInstall one in the image.")


def _shell_argv(shell: str, command: str) -> tuple[list[str], bytes]:
    encoded = command.encode("utf-8", "surrogateescape")
    if len(encoded) < _MAX_ARGUMENT_BYTES:
        return [shell, "-c", command], b""
    # The outer shell reads the whole command before it runs any of it, so that it cannot read its own text as input.
    return [shell, "-c", 'eval "$(cat)" </dev/null'], encoded


def _check_user(user: str | int | None) -> None:
    if user not in (None, "root", 0, "0"):
        raise ValueError(f"prorl: a sandbox has one user, root; it cannot run anything as {user!r}.")


def _read(path: Path) -> tuple[bytes, int]:
    return path.read_bytes(), path.stat().st_mode & 0o777


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


class _SharedBackend:
    """A backend that is opened by its first user and closed by its last.

    Gym's agents make a provider per rollout. A backend per provider would mean a spawner process, a probe and a reaping
    of the scratch directory per rollout.
    """

    def __init__(self) -> None:
        self._users = 0
        self._open_task: asyncio.Task[SandboxBackend] | None = None

    async def acquire(self, config: SandboxConfig) -> SandboxBackend:
        """Return the backend; every ``acquire`` that returned needs one ``release``.

        Raises:
            SandboxError: no backend works here.
        """
        self._users += 1
        if self._open_task is None:
            self._open_task = asyncio.ensure_future(open_backend(config))
        opening = self._open_task
        try:
            return await asyncio.shield(opening)
        except BaseException:
            if opening.done() and self._open_task is opening and (opening.cancelled() or opening.exception()):
                self._open_task = None  # the next user tries again
            await self.release()
            raise

    async def release(self) -> None:
        """Close the backend when this was the last user."""
        self._users -= 1
        opening = self._open_task
        if self._users == 0 and opening is not None:
            self._open_task = None
            await run_shielded(_close(opening))


async def _close(opening: "asyncio.Task[SandboxBackend]") -> None:
    (outcome,) = await asyncio.gather(opening, return_exceptions=True)
    if not isinstance(outcome, BaseException):
        await outcome.close()


_backends_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _SharedBackend]] = WeakKeyDictionary()


def _shared_backend(config: SandboxConfig) -> _SharedBackend:
    """Return the running loop's backend for this configuration, open or not."""
    backends = _backends_by_loop.setdefault(asyncio.get_running_loop(), {})
    return backends.setdefault(config.model_dump_json(), _SharedBackend())
