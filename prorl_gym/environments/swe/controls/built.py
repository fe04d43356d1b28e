"""Bringing what a build made from one sandbox into another, so that the build runs once."""

import secrets

from prorl_gym.environments.swe.ready import Unsolved
from prorl_gym.environments.swe.run_tests import CommandRun
from prorl_gym.environments.swe.task import SweTask
from prorl_gym.sandbox.protocol import Sandbox

MAX_BUILT = 64 << 20
"""Bytes, packed. More than that is built again."""
_SECONDS = 120.0

# By the time of change of the inode, which no program sets. What a build removes is not brought.
_PACK = """
find / "$2" -xdev \\( -path /proc -o -path /sys -o -path /dev -o -path "$1" -o -path '/tmp/prorl-*' \\) -prune \\
    -o -cnewer "$1" ! -path / -print0 2>/dev/null |
    tar --null --no-recursion -czf "$1.tar" -T - 2>/dev/null
[ "$(stat -c %s "$1.tar")" -le "$3" ]
"""


class Built:
    """What a build changes in a sandbox.

    Args:
        sandbox: where the build will run.
        workdir: the repository.
    """

    def __init__(self, sandbox: Sandbox, workdir: str) -> None:
        self._sandbox = sandbox
        self._workdir = workdir
        self._mark = f"/tmp/prorl-{secrets.token_hex(8)}"

    async def begin(self) -> None:
        """Remember the time: call it before the build."""
        await self._sandbox.write_file(self._mark, b"")

    async def pack(self) -> bytes:
        """Return a tar.gz of what changed since, or nothing when it is too large or cannot be packed."""
        argv = ["sh", "-c", _PACK, "pack", self._mark, self._workdir, str(MAX_BUILT)]
        result = await self._sandbox.exec(argv, timeout=_SECONDS, cwd="/")
        if result.exit_code != 0:
            return b""
        try:
            return await self._sandbox.read_file(f"{self._mark}.tar", limit=MAX_BUILT)
        except OSError:
            return b""


async def unpack_built(sandbox: Sandbox, packed: bytes) -> None:
    """Put what ``pack`` returned in place."""
    await sandbox.exec(["tar", "-xzf", "-", "-C", "/"], stdin=packed, timeout=_SECONDS, cwd="/")


async def build_again(sandbox: Sandbox, task: SweTask) -> None:
    """Run the build.

    Raises:
        Unsolved: it fails, although it did not in run A.
    """
    run = CommandRun(sandbox, task.workdir, task.tests.seconds)
    await run.prepare()
    if (await run.command(task.tests.build)).exit_code != 0:
        raise Unsolved("the build failed when it ran once more")
