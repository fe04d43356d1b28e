"""The real backends: sandboxes in user namespaces, with or without Apptainer, started through the spawner."""

import asyncio
import logging
import os
import platform
import re
import shutil
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from uuid import uuid4

from prorl_gym.errors import ConfigError, FailureKind, RolloutError, SandboxError
from prorl_gym.sandbox.backends.userns import HOST_ENVIRONMENT
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.images.store import ImageResolver, ResolvedImage
from prorl_gym.sandbox.protocol import HOST_IMAGE, Mount, ProbeResult, SandboxSpec
from prorl_gym.sandbox.service.egress_proxy import open_egress, with_proxy_environment
from prorl_gym.sandbox.service.egress_rules import AllowList
from prorl_gym.sandbox.service.guest_channel import GuestChannel, GuestTimeouts
from prorl_gym.sandbox.service.host_facts import first_output_line, require_apptainer
from prorl_gym.sandbox.service.operations.execute import invalid_env_reason, invalid_reason
from prorl_gym.sandbox.service.python_packages import IPYTHON_TARGET, packages_mount
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.service.spawner_client import SpawnerClient, SpawnerLostError, TemplateRequest, is_writable_by
from prorl_gym.sandbox.spawner.scratch import Reaped, default_scratch
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName, LaunchRequest

log = logging.getLogger(__name__)
_PROBE_SECONDS = 20.0
_INTERPRETER_VARIABLE = re.compile(r"PATH$|PYTHON|LD_|LC_|LANG|HOME$|IPYTHON|MALLOC_|GLIBC_")
"""Variables that an interpreter reads as it starts: with one of them, a fork of the template would be another."""
_INTERPRETER_PLACE = re.compile(r"/+(usr|etc|root|bin|sbin|lib\w*)(/|$)")
"""Directories from which an interpreter loads: with a mount there, likewise."""


class NamespaceBackend:
    """A ``SandboxBackend`` on one spawner, which is started with the first sandbox and again should it die.

    ``userns`` needs nothing but the kernel; ``apptainer`` has Apptainer enter the root. Without ``images``, an image is
    ``host`` or a directory. ``on_close`` is called once everything is stopped: it closes what was opened for this
    backend.
    """

    def __init__(
        self,
        name: BackendName,
        config: SandboxConfig,
        images: ImageResolver | None = None,
        on_close: Callable[[], Awaitable[None]] | None = None,
        timeouts: GuestTimeouts | None = None,
    ) -> None:
        self._timeouts = timeouts
        self._on_close = on_close
        self.name: BackendName = name
        self._config = config
        self._images: ImageResolver = images or _PathImageResolver()
        self.scratch = config.scratch or default_scratch()
        self._spawner: asyncio.Task[SpawnerClient] | None = None
        self._shared_mounts: asyncio.Task[tuple[Mount, ...]] | None = None
        self.uid = os.geteuid() or config.uid
        """The host's uid that sandboxes have: this process's own, or the configured one when that is root."""
        self._sandboxes: dict[str, RunningSandbox] = {}
        self._notes: set[str] = set()
        self._probe: ProbeResult | None = None
        self._closed = False

    @property
    def sandbox_count(self) -> int:
        return len(self._sandboxes)

    async def probe(self) -> ProbeResult:
        """Start a sandbox over the configured image, run ``true``, stop it. The answer is cached."""
        if self._probe is None:
            self._probe = await self._probe_once()
        return self._probe

    async def _probe_once(self) -> ProbeResult:
        flaw = fix = ""
        try:
            box = await self.start_sandbox(SandboxSpec())
            try:
                code = (await box.exec(["true"], timeout=_PROBE_SECONDS)).exit_code
            finally:
                await box.close()
            if code != 0:
                flaw = f"a sandbox started, but `true` in it gave exit code {code}."
        except RolloutError as error:
            flaw, fix = error.what, error.fix
        if not flaw:
            version = f"Linux {platform.release()}"
            if self.name != "userns":
                version = await asyncio.to_thread(first_output_line, self._runtime_path(), "--version")
            works = [version, f"sandboxes run as uid {self.uid}", *sorted(self._notes)]
            return ProbeResult(self.name, True, "; ".join(works))
        misconfigured = False
        with suppress(RolloutError):
            box = await self._start_with_retry(SandboxSpec(image=HOST_IMAGE))
            await box.close()
            misconfigured = True
        return ProbeResult(self.name, False, flaw, fix, misconfigured)

    async def start_sandbox(self, spec: SandboxSpec) -> RunningSandbox:
        """Start a sandbox. Cancelling it leaves nothing behind; a spawner that dies during it costs time only."""
        return await self._start_with_retry(self._config.apply_defaults(spec))

    async def _start_with_retry(self, spec: SandboxSpec) -> RunningSandbox:
        try:
            return await self._start_once(spec)
        except SpawnerLostError:
            return await self._start_once(spec)  # on the next one: this sandbox has had no user yet

    async def _start_once(self, spec: SandboxSpec) -> RunningSandbox:
        program = self._runtime_path()
        _check_strings(spec)
        allowed = AllowList.parse(spec.egress)
        spawner = await self._ensure_spawner()
        mounts = (*await asyncio.shield(self._ensure_shared_mounts()), *spec.mounts)
        image = await self._images.resolve(spec.image)
        completed = replace(spec, env={**dict(image.environment), **spec.env}, mounts=mounts)
        launch = LaunchRequest(
            uuid4().hex, self.name, with_proxy_environment(completed, allowed), program, image.lower_dirs
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = GuestChannel(ours, self._timeouts)
        try:
            with theirs:
                ended = spawner.launch(launch, theirs)
            async with asyncio.timeout(self._config.start_seconds):
                await channel.wait_ready()
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
            if isinstance(error, SandboxError):  # reported, or just lost: both may be the spawner's end
                await spawner.wait_ended(launch.id)
                if error.kind is FailureKind.SANDBOX_LOST:  # a guest that never reported
                    raise SandboxError(
                        FailureKind.SANDBOX_UNAVAILABLE,
                        "a sandbox died while it was being built, and reported no error.",
                        "Check the kernel's log (out of memory?) and run `prorl-gym doctor`.",
                    ) from None
            raise

        channel.count_oom_kills = partial(spawner.count_oom_kills, launch.id)

        async def release() -> None:
            self._sandboxes.pop(launch.id, None)
            spawner.stop(launch.id)
            self._images.release(image)

        start = self._template_request(launch.spec, mounts)
        open_template = None if start is None else partial(spawner.open_template, launch.id, start)
        box = self._sandboxes[launch.id] = RunningSandbox(
            launch.id, spec, channel, release, ended, egress=egress, open_template=open_template
        )
        return box

    def _template_request(self, spec: SandboxSpec, mounts: Sequence[Mount]) -> TemplateRequest | None:
        """Return how a template of this sandbox's python workers is started; ``None``: it takes a fresh interpreter."""
        if spec.image != HOST_IMAGE or spec.python_tool == "kernel" or any(map(_INTERPRETER_VARIABLE.match, spec.env)):
            return None
        if any(_INTERPRETER_PLACE.match(os.path.normpath("/" + mount.target)) for mount in spec.mounts):
            return None
        program = shutil.which("python3", path=HOST_ENVIRONMENT["PATH"])
        if program is None or is_writable_by(program, self.uid):  # cells reach it as /proc/self/exe, past the overlay
            return None
        packages = next((mount.source for mount in mounts if mount.target == IPYTHON_TARGET), "")
        return TemplateRequest(program, packages, HOST_ENVIRONMENT)

    async def prepare_python(self) -> bool:
        """Start the template of python workers before the first session; whether it is ready."""
        mounts = await asyncio.shield(self._ensure_shared_mounts())
        start = self._template_request(SandboxSpec(image=HOST_IMAGE), mounts)
        return start is not None and await (await self._ensure_spawner()).wait_template(start)

    async def wait_idle(self) -> None:
        """Wait until no sandbox, closed or not, has a process or a directory left. Only tests need to wait."""
        await (await self._ensure_spawner()).wait_idle()

    async def spawner_pid(self) -> int:
        return (await self._ensure_spawner()).pid

    async def reap(self) -> Reaped:
        """Clean up after services that were killed. It is also done whenever a spawner starts."""
        return await (await self._ensure_spawner()).reap()

    async def close(self) -> None:
        self._closed = True
        await run_shielded(self._close())

    async def _close(self) -> None:
        async with asyncio.TaskGroup() as group:
            for box in list(self._sandboxes.values()):
                group.create_task(box.close())
        if self._spawner is not None:
            with suppress(SandboxError):  # it never came up
                await (await self._spawner).close()
        if self._shared_mounts is not None:
            await self._shared_mounts
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            await on_close()

    def _ensure_shared_mounts(self) -> "asyncio.Task[tuple[Mount, ...]]":
        """Return the mounts of every sandbox; found again when their sources were removed."""
        task = self._shared_mounts
        if task is None or (task.done() and not all(os.path.isdir(mount.source) for mount in task.result())):
            task = self._shared_mounts = asyncio.create_task(self._find_shared_mounts())
        return task

    async def _find_shared_mounts(self) -> tuple[Mount, ...]:
        try:
            return (await asyncio.to_thread(packages_mount, self._config.ipython_cache_dir(), self.uid),)
        except ConfigError as error:
            log.warning("python tool: the standard library's console where an image has no IPython: %s", error.what)
            return ()

    async def _ensure_spawner(self) -> SpawnerClient:
        """Return the living spawner; concurrent callers wait for the same start."""
        if self._closed:
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, f"the {self.name} sandbox backend is closed.")
        task = self._spawner
        if task is None or (task.done() and (task.exception() is not None or task.result().is_lost)):
            task = self._spawner = asyncio.create_task(self._start_spawner(task))
        return await asyncio.shield(task)

    async def _start_spawner(self, previous: "asyncio.Task[SpawnerClient] | None") -> SpawnerClient:
        self._ensure_shared_mounts()  # at the same time: both are slow
        if previous is not None and previous.exception() is None:
            log.warning("the sandbox spawner (pid %d) died with its sandboxes; starting another", previous.result().pid)
            await previous.result().close()
        return await SpawnerClient.start_spawner(
            self.scratch, self._config.uid, self._on_note, str(self._config.cgroup)
        )

    def _on_note(self, sandbox_id: str, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            log.warning("%s sandboxes: %s", self.name, text)

    def _runtime_path(self) -> str:
        return "" if self.name == "userns" else require_apptainer(self._config)


def _check_strings(spec: SandboxSpec) -> None:
    """Refuse what no system call takes: the sandbox would not start, or no program in it."""
    named = (("image", spec.image), ("workdir", spec.workdir))
    wrong = next((f"{name}: {text!a} {flaw}" for name, text in named if (flaw := invalid_reason(text))), "")
    if not wrong and (flaw := invalid_env_reason(spec.env)):
        wrong = f"env: {flaw}"
    if wrong:
        raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, f"{wrong}.", "Correct the sandbox's spec.")


class _PathImageResolver:
    """An ``ImageResolver`` of absolute paths. The spawner checks them, as the uid that will use them."""

    async def resolve(self, image: str) -> ResolvedImage:
        if image != HOST_IMAGE and not os.path.isabs(image):
            raise SandboxError(
                FailureKind.IMAGE_MISSING,
                f"image {image!r}: without an image store there are only 'host' and absolute paths.",
                "Set sandbox.images ('images: {}' is enough; see docs/sandboxes.md), or give an unpacked image's path.",
            )
        return ResolvedImage(image, () if image == HOST_IMAGE else (image,))

    def release(self, image: ResolvedImage) -> None:
        """Nothing is pinned."""
