"""Peers of the shell bench: other ways to run a command for an agent, each returning ms per command.

What is not installed here is left out by name. SWE-ReX lives in an environment of its own, named by
``PRORL_BENCH_SWEREX`` (its python).
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

_SWEREX = """
import asyncio, json, logging, sys, time
logging.disable(logging.CRITICAL)
from swerex.runtime.local import LocalRuntime
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest

async def main(commands, count):
    runtime = LocalRuntime()
    await runtime.create_session(CreateBashSessionRequest())
    times = []
    for _ in range(count):
        for command in commands:
            began = time.perf_counter()
            await runtime.run_in_session(BashAction(command=command, check="silent", timeout=60))
            times.append((time.perf_counter() - began) * 1000)
    await runtime.close()
    print("RESULT", json.dumps(times))

asyncio.run(main(json.loads(sys.argv[1]), int(sys.argv[2])))
"""


def fork_exec(count: int) -> list[float]:
    """``/bin/true``, forked and executed by this process: the floor of anything that starts a program."""
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        pid = os.posix_spawn("/bin/true", ["/bin/true"], {})
        os.waitpid(pid, 0)
        times.append((time.perf_counter() - began) * 1000)
    return times


def swerex(commands: Sequence[str], count: int) -> list[float] | None:
    """SWE-ReX's bash session, on the host: without its HTTP server and without a container."""
    python = os.environ.get("PRORL_BENCH_SWEREX")
    if python is None:
        return None
    arguments = [python, "-c", _SWEREX, json.dumps(list(commands)), str(count)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"left out: SWE-ReX on {commands[0]!r}: {done.stderr.strip().splitlines()[-1][:200]}", file=sys.stderr)
        return None
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return list(map(float, json.loads(line.removeprefix("RESULT "))))


def tmux(command: str, poll: float, count: int) -> list[float] | None:
    """Keys sent to a tmux pane of the host, its screen read every ``poll`` seconds until a mark shows up."""
    program = shutil.which("tmux")
    if program is None:
        return None
    with TemporaryDirectory() as directory:
        base = [program, "-S", str(Path(directory, "socket")), "-f", "/dev/null"]

        def ask(*words: str) -> str:
            return subprocess.run([*base, *words], capture_output=True, text=True, check=True).stdout

        ask("new-session", "-d", "-s", "bench", "-x", "200", "-y", "50", "bash --noprofile --norc")
        times: list[float] = []
        try:
            for number in range(count):
                mark = f"done-{number}-"
                began = time.perf_counter()
                ask("send-keys", "-t", "bench", f"clear; {command}; echo done-''{number}-$?", "Enter")
                while mark not in ask("capture-pane", "-p", "-t", "bench"):
                    time.sleep(poll)
                times.append((time.perf_counter() - began) * 1000)
        finally:
            ask("kill-server")
        return times


async def gym_apptainer(image: str, commands: Sequence[str], count: int) -> tuple[float, list[float]] | None:
    """NeMo Gym's own Apptainer provider: ms until its first command was answered, and of every later one.

    It takes images that Apptainer built (it runs their start script): a SIF, no plain directory.
    """
    try:
        from nemo_gym.sandbox import AsyncSandbox, SandboxSpec  # pyright: ignore
    except ImportError:
        return None
    if shutil.which("apptainer") is None:
        return None
    began = time.perf_counter()
    # Without --userns it does not start where this is root without all capabilities.
    provider = {"apptainer": {"create": {"extra_start_args": ["--userns"]}, "exec": {"extra_exec_args": ["--userns"]}}}
    sandbox = AsyncSandbox(provider, SandboxSpec(image=image))
    try:
        try:
            await sandbox.start()
        except RuntimeError as error:
            print(f"left out: NeMo Gym's apptainer provider does not start here: {error}", file=sys.stderr)
            return None
        result = await sandbox.exec("echo hi")
        if result.return_code != 0:
            raise RuntimeError(f"NeMo Gym's apptainer provider: {result}")
        start = (time.perf_counter() - began) * 1000
        times: list[float] = []
        for _ in range(count):
            for command in commands:
                began = time.perf_counter()
                await sandbox.exec(command)
                times.append((time.perf_counter() - began) * 1000)
        return start, times
    finally:
        await sandbox.stop()


def apptainer_exec(image: str, count: int) -> list[float] | None:
    """``apptainer exec`` of an image, isolated as our backend isolates: ms per start-to-end of ``true``."""
    program = shutil.which("apptainer")
    if program is None:
        return None
    flags = ["--userns", "--containall", "--no-home", "--cleanenv", "--net", "--network", "none"]
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        subprocess.run([program, "-q", "exec", *flags, image, "true"], check=True, capture_output=True)
        times.append((time.perf_counter() - began) * 1000)
    return times


async def echo_socket(tcp: bool, count: int) -> list[float]:
    """A 64-byte round trip through an asyncio server: over TCP loopback, or over a Unix socket."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(64):
            writer.write(data)
        writer.close()

    with TemporaryDirectory() as directory:
        path = str(Path(directory, uuid4().hex))
        server = await (
            asyncio.start_server(answer, "127.0.0.1", 0) if tcp else asyncio.start_unix_server(answer, path)
        )
        async with server:
            address = server.sockets[0].getsockname()
            reader, writer = await (asyncio.open_connection(*address) if tcp else asyncio.open_unix_connection(path))
            times: list[float] = []
            for _ in range(count):
                began = time.perf_counter()
                writer.write(b"x" * 64)
                await reader.readexactly(64)
                times.append((time.perf_counter() - began) * 1000)
            writer.close()
            await writer.wait_closed()
            return times
