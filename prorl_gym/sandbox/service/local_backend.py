"""The ``local`` backend: no isolation at all. For trusted code and for tests of everything above the namespaces."""

import asyncio
import json
import os
import shutil
import socket
import sys
import tempfile
from dataclasses import asdict, replace
from uuid import uuid4

from prorl_gym.errors import FailureKind, ProrlError, SandboxError
from prorl_gym.sandbox.protocol import DEFAULT_IMAGE, HOST_IMAGE, ProbeResult, SandboxSpec
from prorl_gym.sandbox.service.guest_channel import GuestChannel
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.rootfs import DEFAULT_EMAIL

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalBackend:
    """A ``SandboxBackend`` whose sandboxes are plain processes of this user in a directory of their own.

    ``allow_unsafe_local`` must be ``True``: model output runs with everything that this user may do.
    """

    name = "local"

    def __init__(self, *, allow_unsafe_local: bool = False) -> None:
        if not allow_unsafe_local:
            raise SandboxError(
                FailureKind.SANDBOX_UNAVAILABLE,
                "sandbox.backend: 'local' isolates nothing and is refused.",
                "Choose 'userns' or 'apptainer', or set sandbox.allow_unsafe_local: true for trusted code.",
            )
        self._sandboxes: dict[str, RunningSandbox] = {}

    @property
    def sandbox_count(self) -> int:
        return len(self._sandboxes)

    async def probe(self) -> ProbeResult:
        try:
            box = await self.start_sandbox(SandboxSpec())
            try:
                code = (await box.exec(["true"], timeout=10)).exit_code
            finally:
                await box.close()
        except (ProrlError, OSError) as error:
            return ProbeResult(self.name, False, str(error))
        return ProbeResult(self.name, code == 0, "no isolation")

    async def start_sandbox(self, spec: SandboxSpec) -> RunningSandbox:
        """Start a sandbox without image or mounts. It works in a fresh directory, not in ``spec.workdir``."""
        if spec.image not in (DEFAULT_IMAGE, HOST_IMAGE) or spec.mounts:
            raise SandboxError(
                FailureKind.SANDBOX_UNAVAILABLE,
                "the 'local' sandbox backend has neither images nor mounts.",
                "Use 'userns' or 'apptainer' for this environment.",
            )
        name = uuid4().hex
        root = tempfile.mkdtemp(prefix="prorl-local-")
        spec = replace(spec, workdir=os.path.join(root, "workspace"))
        temporary = os.path.join(root, "tmp")  # so that what its programs leave there goes with it
        os.mkdir(spec.workdir)
        os.mkdir(temporary)
        try:
            channel, guest = await _start_guest(spec, temporary)
        except BaseException:
            shutil.rmtree(root, ignore_errors=True)
            raise

        async def release() -> None:
            self._sandboxes.pop(name, None)
            await guest.wait()
            await asyncio.to_thread(shutil.rmtree, root, True)

        box = self._sandboxes[name] = RunningSandbox(name, spec, channel, release, python=sys.executable)
        try:
            await channel.wait_ready()
        except BaseException:
            await box.close()
            raise
        return box

    async def close(self) -> None:
        async with asyncio.TaskGroup() as group:
            for box in list(self._sandboxes.values()):
                group.create_task(box.close())


async def _start_guest(spec: SandboxSpec, temporary: str) -> tuple[GuestChannel, asyncio.subprocess.Process]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {
        "PATH": _PATH,
        "HOME": spec.workdir,
        "USER": "sandbox",
        "LANG": "C.UTF-8",
        "TMPDIR": temporary,
        "EMAIL": DEFAULT_EMAIL,
    }
    options = json.dumps({"limits": asdict(spec.limits), "workdir": spec.workdir, "env": env | dict(spec.env)})
    try:
        guest = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "prorl_gym.sandbox.guest.container_entry",
            str(theirs.fileno()),
            options,
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return GuestChannel(ours), guest
