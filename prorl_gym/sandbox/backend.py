"""The real backends: sandboxes in user namespaces, with or without Apptainer, started through the spawner."""

import asyncio
import logging
import os
import platform
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

from prorl_gym.errors import ConfigError, FailureKind, RolloutError, SandboxError
from prorl_gym.sandbox.box import Box
from prorl_gym.sandbox.channel import Channel
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.egress import AllowList
from prorl_gym.sandbox.egress_proxy import open_egress, with_proxy
from prorl_gym.sandbox.image_paths import PlainPaths
from prorl_gym.sandbox.images.protocol import ImageResolver
from prorl_gym.sandbox.launch import BackendName, Launch
from prorl_gym.sandbox.native_text import flaw_of, flaw_of_variables
from prorl_gym.sandbox.protocol import HOST_USR, Mount, Probe, SandboxSpec
from prorl_gym.sandbox.python_packages import ipython_mount
from prorl_gym.sandbox.reaper import Reaped
from prorl_gym.sandbox.runtimes import find_runtime
from prorl_gym.sandbox.scratch import default_scratch
from prorl_gym.sandbox.shielding import finish
from prorl_gym.sandbox.spawner_client import SpawnerClient, SpawnerLostError

log = logging.getLogger(__name__)

_PROBE_SECONDS = 20.0


class NamespaceBackend:
    """A ``SandboxBackend`` on one spawner, which is started with the first sandbox and again should it die.

    Args:
        name: ``userns`` needs nothing but the kernel; ``apptainer`` has Apptainer enter the root.
        config: the sandbox room's configuration.
        images: finds images by their names; by default, an image is ``host`` or a directory.
        on_close: called once everything is stopped: closes what was opened for this backend.
    """

    def __init__(
        self,
        name: BackendName,
        config: SandboxConfig,
        images: ImageResolver | None = None,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._on_close = on_close
        self._name: BackendName = name
        self._config = config
        self._images: ImageResolver = images or PlainPaths()
        self._scratch = config.scratch or default_scratch()
        self._spawner: asyncio.Task[SpawnerClient] | None = None
        self._shared: asyncio.Task[tuple[Mount, ...]] | None = None
        self._boxes: dict[str, Box] = {}
        self._notes: set[str] = set()
        self._probe: Probe | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """The word in configurations."""
        return self._name

    @property
    def live(self) -> int:
        """How many of its sandboxes are there, warm ones that wait for work included."""
        return len(self._boxes)

    @property
    def scratch(self) -> Path:
        """Where the sandboxes' directories are."""
        return self._scratch

    @property
    def uid(self) -> int:
        """The host's uid that sandboxes have: this process's own, or the configured one when that is root."""
        return os.geteuid() or self._config.uid

    async def probe(self) -> Probe:
        """Start a sandbox over the configured image, run ``true``, stop it. The answer is cached."""
        if self._probe is None:
            self._probe = await self._try()
        return self._probe

    async def _try(self) -> Probe:
        try:
            box = await self.start(SandboxSpec())
            try:
                code = (await box.exec(["true"], timeout=_PROBE_SECONDS)).exit_code
            finally:
                await box.close()
        except RolloutError as error:
            return Probe(self._name, False, error.what, error.fix, misconfigured=await self._works_unconfigured())
        if code != 0:
            what = f"a sandbox started, but `true` in it gave exit code {code}."
            return Probe(self._name, False, what, misconfigured=await self._works_unconfigured())
        works = [await self._version(), f"sandboxes run as uid {self.uid}", *sorted(self._notes)]
        return Probe(self._name, True, "; ".join(works))

    async def _works_unconfigured(self) -> bool:
        try:
            box = await self._begin(SandboxSpec(image=HOST_USR))
            await box.close()
        except RolloutError:
            return False
        return True

    async def _version(self) -> str:
        if self._name == "userns":
            return f"Linux {platform.release()}"
        asked = await asyncio.create_subprocess_exec(
            self._program(), "--version", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await asked.communicate()
        return said.decode(errors="replace").strip()[:100]

    async def start(self, spec: SandboxSpec) -> Box:
        """Start a sandbox. Cancelling it leaves nothing behind; a spawner that dies meanwhile costs time only.

        Raises:
            SandboxError: ``IMAGE_MISSING``, ``IMAGE_BROKEN`` or ``SANDBOX_UNAVAILABLE``.
        """
        return await self._begin(self._config.complete(spec))

    async def _begin(self, spec: SandboxSpec) -> Box:
        try:
            return await self._start(spec)
        except SpawnerLostError:
            return await self._start(spec)  # on the next one: nobody has had anything of this sandbox yet

    async def _start(self, spec: SandboxSpec) -> Box:
        program = self._program()
        _check_texts(spec)
        allowed = AllowList.parse(spec.egress)
        spawner = await self._ensure_spawner()
        mounts = (*await asyncio.shield(self._ensure_shared()), *spec.mounts)
        image = await self._images.resolve(spec.image)
        furnished = replace(spec, env={**dict(image.environment), **spec.env}, mounts=mounts)
        launch = Launch(uuid4().hex, self._name, with_proxy(furnished, allowed), program, image.lower)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = Channel.attach(ours)
        try:
            with theirs:
                ended = spawner.launch(launch, theirs)
            async with asyncio.timeout(self._config.start_seconds):
                await channel.ready()
                egress = await open_egress(launch.id, allowed, channel)
        except BaseException as error:
            channel.close()
            spawner.stop(launch.id)
            self._images.release(image)
            if isinstance(error, TimeoutError):
                raise SandboxError(
                    FailureKind.SANDBOX_UNAVAILABLE,
                    f"a sandbox over {spec.image} was not ready after {self._config.start_seconds:g} s.",
                    "Raise sandbox.start_seconds if the machine or the image's disk is that slow.",
                ) from None
            if isinstance(error, SandboxError):  # told, or just lost: both may be the spawner's end
                await spawner.outlive(launch.id)
            raise _as_start_failure(error) from None

        channel.memory_kills = partial(spawner.memory_kills, launch.id)

        async def release() -> None:
            self._boxes.pop(launch.id, None)
            spawner.stop(launch.id)
            self._images.release(image)

        box = self._boxes[launch.id] = Box(launch.id, spec, channel, release, ended, egress=egress)
        return box

    async def idle(self) -> None:
        """Wait until no sandbox, closed or not, has a process or a directory left. Only tests need to wait."""
        await (await self._ensure_spawner()).idle()

    async def spawner_pid(self) -> int:
        """Return the pid of the spawner, which is started if need be."""
        return (await self._ensure_spawner()).pid

    async def reap(self) -> Reaped:
        """Clean up after services that were killed. It is also done whenever a spawner starts."""
        return await (await self._ensure_spawner()).reap()

    async def close(self) -> None:
        """Stop every sandbox of this backend and its spawner. Idempotent."""
        self._closed = True
        await finish(self._close())

    async def _close(self) -> None:
        async with asyncio.TaskGroup() as group:
            for box in list(self._boxes.values()):
                group.create_task(box.close())
        if self._spawner is not None:
            with suppress(SandboxError):  # it never came up
                await (await self._spawner).close()
        if self._shared is not None:
            await self._shared
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            await on_close()

    def _ensure_shared(self) -> "asyncio.Task[tuple[Mount, ...]]":
        """Return what every sandbox is shown; looked up again when it was removed under our feet."""
        task = self._shared
        if task is None or (task.done() and not all(os.path.isdir(mount.source) for mount in task.result())):
            task = self._shared = asyncio.create_task(self._find_shared())
        return task

    async def _find_shared(self) -> tuple[Mount, ...]:
        try:
            return (await asyncio.to_thread(ipython_mount, self._config.ipython_cache(), self.uid),)
        except ConfigError as error:
            log.warning("python tool: the standard library's console where an image has no IPython: %s", error.what)
            return ()

    async def _ensure_spawner(self) -> SpawnerClient:
        """Return the living spawner; concurrent callers wait for the same start."""
        if self._closed:
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, f"the {self._name} sandbox backend is closed.")
        task = self._spawner
        if task is None or (task.done() and (task.exception() is not None or task.result().lost)):
            task = self._spawner = asyncio.create_task(self._start_spawner(task))
        return await asyncio.shield(task)

    async def _start_spawner(self, previous: "asyncio.Task[SpawnerClient] | None") -> SpawnerClient:
        self._ensure_shared()  # meanwhile: both take their time
        if previous is not None and previous.exception() is None:
            log.warning("the sandbox spawner (pid %d) died with its sandboxes; starting another", previous.result().pid)
            await previous.result().close()
        return await SpawnerClient.start(self._scratch, self._config.uid, self._on_note, str(self._config.cgroup))

    def _on_note(self, sandbox_id: str, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            log.warning("%s sandboxes: %s", self._name, text)

    def _program(self) -> str:
        return "" if self._name == "userns" else find_runtime(self._name, self._config)


def _as_start_failure(error: BaseException) -> BaseException:
    """A guest that vanishes before its first word did not start; nobody has lost a sandbox yet."""
    if isinstance(error, SandboxError) and error.kind is FailureKind.SANDBOX_LOST:
        return SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            "a sandbox died while it was being built, without a word.",
            "The kernel's log may tell (out of memory?); `prorl-gym doctor` tries again.",
        )
    return error


def _check_texts(spec: SandboxSpec) -> None:
    """Refuse what no system call takes: the sandbox would not start, or no program in it."""
    named = (("image", spec.image), ("workdir", spec.workdir))
    wrong = next((f"{name}: {text!a} {flaw}" for name, text in named if (flaw := flaw_of(text))), "")
    if not wrong and (flaw := flaw_of_variables(spec.env)):
        wrong = f"env: {flaw}"
    if wrong:
        raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, f"{wrong}.", "Correct the sandbox's spec.")
