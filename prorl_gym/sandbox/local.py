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
from prorl_gym.sandbox.box import Box
from prorl_gym.sandbox.channel import Channel
from prorl_gym.sandbox.host_root import EMAIL
from prorl_gym.sandbox.protocol import DEFAULT_IMAGE, HOST_USR, Probe, SandboxSpec

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalBackend:
    """A ``SandboxBackend`` whose sandboxes are plain processes of this user in a directory of their own.

    Args:
        allow_unsafe_local: must be ``True``: model output runs with everything that this user may do.
    """

    def __init__(self, *, allow_unsafe_local: bool = False) -> None:
        if not allow_unsafe_local:
            raise SandboxError(
                FailureKind.SANDBOX_UNAVAILABLE,
                "sandbox.backend: 'local' isolates nothing and is refused.",
                "Choose 'userns' or 'apptainer', or set sandbox.allow_unsafe_local: true for trusted code.",
            )
        self._boxes: dict[str, Box] = {}

    @property
    def name(self) -> str:
        """The word in configurations."""
        return "local"

    @property
    def live(self) -> int:
        """How many of its sandboxes are there."""
        return len(self._boxes)

    async def probe(self) -> Probe:
        """Start one and run ``true``."""
        try:
            box = await self.start(SandboxSpec())
            try:
                code = (await box.exec(["true"], timeout=10)).exit_code
            finally:
                await box.close()
        except (ProrlError, OSError) as error:
            return Probe(self.name, False, str(error))
        return Probe(self.name, code == 0, "no isolation")

    async def start(self, spec: SandboxSpec) -> Box:
        """Start a sandbox. It works in a fresh directory, whatever ``spec.workdir`` says; see ``Box.spec``.

        Raises:
            SandboxError: ``SANDBOX_UNAVAILABLE`` for images and mounts, which need a namespace.
        """
        if spec.image not in (DEFAULT_IMAGE, HOST_USR) or spec.mounts:
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
            self._boxes.pop(name, None)
            await guest.wait()
            await asyncio.to_thread(shutil.rmtree, root, True)

        box = self._boxes[name] = Box(name, spec, channel, release, python=sys.executable)
        try:
            await channel.ready()
        except BaseException:
            await box.close()
            raise
        return box

    async def close(self) -> None:
        """Close every sandbox. Idempotent."""
        async with asyncio.TaskGroup() as group:
            for box in list(self._boxes.values()):
                group.create_task(box.close())


async def _start_guest(spec: SandboxSpec, temporary: str) -> tuple[Channel, asyncio.subprocess.Process]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {
        "PATH": _PATH,
        "HOME": spec.workdir,
        "USER": "sandbox",
        "LANG": "C.UTF-8",
        "TMPDIR": temporary,
        "EMAIL": EMAIL,
    }
    options = json.dumps({"limits": asdict(spec.limits), "workdir": spec.workdir, "env": env | dict(spec.env)})
    try:
        guest = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "prorl_gym.sandbox.guest.local",
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
    return Channel.attach(ours), guest
