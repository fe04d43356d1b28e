"""Programs that a bench runs: their start and end, what they print, and ``prorl-gym serve``."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from prorl_gym.client import Client, read_token
from prorl_gym.errors import ProrlError
from prorl_gym.free_ports import free_ports

BENCH = Path(__file__).resolve().parent
READY_SECONDS = 180.0
"""Longest start of a program."""
_STOP_SECONDS = 30.0


class BenchRefusedError(ProrlError):
    """The figures would be worthless."""


@contextmanager
def bench_directory() -> Generator[Path]:
    """Make a directory for the block on a disk, where /tmp may be memory; sandboxes' users can pass through it."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="prorl-bench-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o711)  # sandboxes have another uid when this is root
        yield Path(name)


@asynccontextmanager
async def running(
    argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Run a program for the block: its input stays open until the end, which is the sign to stop."""
    with log.open("ab") as errors:
        child = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=None if environment is None else {**os.environ, **environment},
            limit=1 << 24,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        assert child.stdin is not None
        child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), _STOP_SECONDS)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()


async def read_line(child: asyncio.subprocess.Process, log: Path, seconds: float = READY_SECONDS) -> str:
    """Return the next line that a program prints.

    Raises ``BenchRefusedError`` if it ended, or printed nothing for so long.
    """
    assert child.stdout is not None
    try:
        line = await asyncio.wait_for(child.stdout.readline(), seconds)
    except TimeoutError:
        line = b""
    if not line:
        raise BenchRefusedError(f"A program of the bench ended or said nothing for {seconds:g} s.", last_words(log))
    return line.decode().strip()


async def ask(child: asyncio.subprocess.Process, line: str, log: Path, seconds: float = READY_SECONDS) -> str:
    """Write a line to a program and return the one that it prints."""
    assert child.stdin is not None
    child.stdin.write(line.encode() + b"\n")
    return await read_line(child, log, seconds)


def last_words(log: Path) -> str:
    """Return the end of a log, as a complaint quotes it."""
    return f"Its last words: {log.read_text(errors='replace')[-1500:]}"


async def wait_answering(url: str, child: asyncio.subprocess.Process, log: Path) -> None:
    """Wait until an address answers 200.

    Raises ``BenchRefusedError`` if the program behind it ended, or the time is up.
    """
    deadline = asyncio.get_running_loop().time() + READY_SECONDS
    async with aiohttp.ClientSession() as session:
        while child.returncode is None and asyncio.get_running_loop().time() < deadline:
            with suppress(aiohttp.ClientError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)  # another process: there is no event to wait for
    raise BenchRefusedError(f"{url} does not answer.", last_words(log))


@dataclass(frozen=True, slots=True)
class RunningService:
    """``prorl-gym serve`` in a process of its own."""

    url: str
    token: str
    pid: int

    def client(self) -> Client:
        """Return a client that does not retry."""
        return Client(self.url, token=self.token, retry_seconds=0.0)


@asynccontextmanager
async def running_service(
    directory: Path, config: Mapping[str, Any], *arguments: str
) -> AsyncGenerator[RunningService]:
    """Run the service for the block; its state and its log lie in ``directory``."""
    (port,) = free_ports(1)
    path, log, url = directory / "service.yaml", directory / "service.log", f"http://127.0.0.1:{port}"
    state = directory / "state"
    own = {"state": str(state), "http": {"port": port, "stop_seconds": 10}}
    path.write_text(yaml.safe_dump({**config, **own}))
    async with running([sys.executable, "-m", "prorl_gym", "serve", "--config", str(path), *arguments], log) as child:
        try:
            await wait_answering(f"{url}/readyz", child, log)
            yield RunningService(url, read_token(state / "token"), child.pid)
        finally:
            with suppress(ProcessLookupError):
                child.terminate()
