"""Running the programs that make images: to their end or to their deadline, with the last of what they said."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.shielding import finish

_KEPT = 400


async def run_command(
    command: Sequence[str], *, seconds: float, env: Mapping[str, str] | None = None, allowed: Sequence[int] = (0,)
) -> str:
    """Run a program in a process group of its own and return what it wrote. Cancelling kills the group.

    Args:
        command: program and arguments.
        seconds: after so long it is killed.
        env: its environment; ours by default.
        allowed: exit codes that are no failure.

    Raises:
        ConfigError: it is not installed, failed, or took too long.
    """
    name = os.path.basename(command[0])
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ConfigError(f"{name} is not installed.", "Install it; .ci/image-tools names the packages.") from None
    try:
        async with asyncio.timeout(seconds):
            output, _ = await process.communicate()
    except TimeoutError:
        raise ConfigError(f"{name} was not done after {seconds:.0f} s.", "Is a registry it needs slow?") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await finish(process.wait())
    text = output.decode(errors="replace")
    if process.returncode not in allowed:
        raise ConfigError(f"{name} failed (exit {process.returncode}).", text.strip()[-_KEPT:])
    return text
