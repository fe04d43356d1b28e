"""What an agent left behind: processes ended, places of the verifier swept, or files taken to a clean sandbox.

Everything of the sandbox's file system may have been changed by the agent, programs included. What is relied upon here
is answered by the sandbox's own server, which the agent can neither signal nor change: which processes there are, what
a directory holds, what a file says.
"""

import asyncio

from prorl_gym.environments.killed import must_have_ended, run_settled
from prorl_gym.sandbox.protocol import Sandbox

LOGS = "/logs/verifier"
TESTS = "/tests"
MAX_KEPT = 64 << 20
"""Largest archive that is taken from the agent's sandbox, in bytes. The service holds it for a moment."""
MOST_AT_ONCE = 4
"""Archives that the service holds at the same time."""

# Every command names its directory: the sandbox's own may be gone, and then nothing could be run.
_SECONDS = 120.0
_KEPT = "/.prorl-kept.tar"
_PAUSES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Seconds between looks for processes that were killed: the kernel takes a while to give back much memory."""


class Spoiled(Exception):
    """The agent left a state in which nothing can be verified. The text says what; the reward is 0."""


async def stop(sandbox: Sandbox) -> None:
    """End every process of the agent's: daemons, and what waits for the verifier.

    Raises:
        Spoiled: some live on, because the sandbox's shell was tampered with.
        SandboxError: the sandbox is lost.
    """
    for pause in _PAUSES:
        await sandbox.exec(["/bin/sh", "-c", "kill -9 -1"], timeout=_SECONDS, cwd="/")
        if await _alone(sandbox):
            return
        await asyncio.sleep(pause)  # the sandbox does not report the end of what it was not asked to start
    raise Spoiled("processes of the agent cannot be ended")


async def sweep(sandbox: Sandbox) -> None:
    """Remove what stands where the verifier's files and logs go.

    Raises:
        Spoiled: it cannot be removed.
        SandboxError: the sandbox is lost.
    """
    await run_settled(lambda: sandbox.exec(["/bin/rm", "-rf", "/logs", TESTS], timeout=_SECONDS, cwd="/"))
    left = {entry.name for entry in await sandbox.list_dir("/")} & {"logs", TESTS[1:]}
    if left:
        raise Spoiled(f"/{min(left)} cannot be removed")


async def take(agents: Sandbox, clean: Sandbox, paths: tuple[str, ...]) -> None:
    """Copy files and directories from the agent's sandbox into a clean one, in place of what is there.

    The archive is made by the agent's sandbox and is not to be trusted; it is unpacked by the clean one, below its own
    root, and never looked at here.

    Raises:
        Spoiled: it cannot be made, is too large, or cannot be unpacked.
        SandboxError: a sandbox is lost.
    """
    packing = ["tar", "-C", "/", "-cf", _KEPT, "--", *(path.lstrip("/") for path in paths)]
    packed = await run_settled(lambda: agents.exec(packing, timeout=_SECONDS, cwd="/"))
    if packed.exit_code != 0:
        raise Spoiled(f"{', '.join(paths)} cannot be read")
    try:
        archive = await agents.read_file(_KEPT, limit=MAX_KEPT)
    except OSError as error:
        raise Spoiled(f"{', '.join(paths)} cannot be taken ({error.strerror})") from None
    await clean.exec(["/bin/rm", "-rf", "--", *paths], timeout=_SECONDS, cwd="/")
    try:
        await clean.write_file(_KEPT, archive)
    except OSError as error:  # what the agent left does not fit
        raise Spoiled(f"{', '.join(paths)} cannot be placed ({error.strerror})") from None
    wanted = [path.lstrip("/") for path in paths]
    unpacking = ["tar", "-C", "/", "-xf", _KEPT, "--no-same-owner", "--", *wanted]
    unpacked = must_have_ended(await clean.exec(unpacking, timeout=_SECONDS, cwd="/"), "tar")
    await clean.exec(["/bin/rm", "-f", _KEPT], timeout=_SECONDS, cwd="/")
    if unpacked.exit_code != 0:
        raise Spoiled(f"{', '.join(paths)} cannot be unpacked")


async def _alone(sandbox: Sandbox) -> bool:
    return not any(entry.name.isdigit() and entry.name != "1" for entry in await sandbox.list_dir("/proc"))
