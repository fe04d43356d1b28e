"""What the shell bench's figures stand beside, measured in the same run: other ways to run commands for an agent.

Those on the host have no sandbox around them. What is not installed is left out by name. SWE-ReX lives in an
environment of its own, named by ``PRORL_BENCH_SWEREX`` (its python).
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import cast

import _apptainer
from _report import Peer, peer
from ptyprocess import PtyProcess  # pyright: ignore[reportMissingTypeStubs]

ROOT = "/tmp/mix"
"""Where a sandbox has the repository; peers on the host have a temporary directory."""
HAS_PYTEST = "python3 -c 'import pytest'"

_SETUP = """
mkdir -p {root}/pkg && cd {root} && git init -q . && git config user.email a@b && git config user.name n
for n in $(seq 60); do printf 'def function_%s(x):\\n    return x + %s\\n' $n $n > pkg/module_$n.py; done
printf 'from pkg.module_7 import function_7\\n\\n\\ndef test_it():\\n    assert function_7(1) == 8\\n' > test_seven.py
touch pkg/__init__.py; git add . && git commit -qm start
"""
_PYTEST = "python3 -m pytest -q -p no:cacheprovider test_seven.py"
_FUNCTION = "python3 -c 'import test_seven; test_seven.test_it()'"


def setup(root: str = ROOT) -> str:
    return _SETUP.format(root=root)


def actions_of_mix(root: str = ROOT, *, pytest: bool) -> Sequence[str]:
    """Return ls, grep, sed, git diff, one test file, git checkout."""
    steps = (
        "ls -la pkg",
        "grep -rn 'return x' pkg",
        "sed -i 's/x + 7$/x + 6 + 1/' pkg/module_7.py",
        "git diff",
        _PYTEST if pytest else _FUNCTION,
        "git checkout -q .",
    )
    return [f"cd {root} && {step}" for step in steps]


_SWEREX = """
import asyncio, json, logging, sys, time
logging.disable(logging.CRITICAL)
from swerex.runtime.local import LocalRuntime
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest

async def main(commands):
    runtime = LocalRuntime()
    await runtime.create_session(CreateBashSessionRequest())
    times = []
    for command in commands:
        began = time.perf_counter()
        await runtime.run_in_session(BashAction(command=command, check="silent", timeout=60))
        times.append((time.perf_counter() - began) * 1000)
    await runtime.close()
    print("RESULT", json.dumps(times))

asyncio.run(main(json.load(sys.stdin)))
"""


@dataclass(frozen=True, slots=True)
class Polling:
    """How a tmux pane is watched, in seconds."""

    name: str
    every: float
    clearing: float = 0.0
    """Waited after the screen was cleared for the next command."""


OPENHANDS = Polling("tmux as OpenHands polls it (0.5 s, 0.1 s to clear), host", 0.5, 0.1)
"""It looks at once, then after every half a second; the median of fast commands hides the poll, the mean does not."""
EAGER = Polling("tmux, polled every 10 ms, host", 0.01)


def environment(image: str | None) -> Mapping[str, str]:
    """Return what programs of host peers see: the system's own programs, and the image's pytest where it has one."""
    base = {"PATH": os.defpath, "HOME": "/nonexistent", "LANG": "C.UTF-8", "PAGER": "cat", "GIT_PAGER": "cat"}
    sites = sorted(map(str, Path(image).glob("usr/local/lib/python3*/dist-packages"))) if image else []
    return {**base, "TERM": "dumb", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join(sites)}


def fork_exec(count: int) -> list[float]:
    """``/bin/true``, forked and executed by this process: the floor of anything that starts a program."""
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        pid = os.posix_spawn("/bin/true", ["/bin/true"], {})
        os.waitpid(pid, 0)
        times.append((time.perf_counter() - began) * 1000)
    return times


def raw_pty(commands: Sequence[str], env: Mapping[str, str]) -> list[float]:
    """A bash on a pty with blocking system calls: no sandbox, event loop, exit codes, directory or limits."""
    shell = PtyProcess.spawn(  # pyright: ignore[reportUnknownMemberType]
        ["/bin/bash", "--noprofile", "--norc", "--noediting"], env={**env, "PS1": "", "PS2": ""}, echo=False
    )
    terminal = cast(int, shell.fd)  # pyright: ignore[reportUnknownMemberType]
    try:
        times: list[float] = []
        for number, command in enumerate(commands):
            end = f"done-{number}\r\n".encode()
            began = time.perf_counter()
            os.write(terminal, f"{command}\necho done-''{number}\n".encode())
            tail = b""
            while not tail.endswith(end):
                tail = tail[-len(end) :] + os.read(terminal, 65536)
            times.append((time.perf_counter() - began) * 1000)
        return times
    finally:
        shell.close(force=True)


def swerex(commands: Sequence[str], env: Mapping[str, str]) -> list[float] | None:
    """SWE-ReX's bash session, without its HTTP server and without a container."""
    python = os.environ.get("PRORL_BENCH_SWEREX")
    if python is None:
        return None
    ours, inside = {**env, "PYTHONPATH": ""}, f"export PYTHONPATH={shlex.quote(env['PYTHONPATH'])}"  # not for its own
    given = json.dumps([inside, *commands])
    done = subprocess.run([python, "-c", _SWEREX], input=given, capture_output=True, text=True, check=False, env=ours)
    if done.returncode != 0:
        print(f"left out: SWE-ReX on {commands[-1]!r}: {done.stderr.strip().splitlines()[-1][:200]}", file=sys.stderr)
        return None
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return list(map(float, json.loads(line.removeprefix("RESULT "))))[1:]


def tmux(commands: Sequence[str], polling: Polling, env: Mapping[str, str]) -> list[float] | None:
    """Keys sent to a tmux pane, its screen read until a mark shows up."""
    program = shutil.which("tmux")
    if program is None:
        return None
    with TemporaryDirectory() as directory:
        base = [program, "-S", str(Path(directory, "socket")), "-f", "/dev/null"]

        def ask(*words: str) -> str:
            return subprocess.run([*base, *words], capture_output=True, text=True, check=True, env=env).stdout

        ask("new-session", "-d", "-s", "bench", "-x", "200", "-y", "50", "bash --noprofile --norc")
        times: list[float] = []
        try:
            for number, command in enumerate(commands):
                mark = f"done-{number}-"
                began = time.perf_counter()
                ask("send-keys", "-t", "bench", "-l", f"{command.strip()}\necho done-''{number}-$?\n")
                while mark not in ask("capture-pane", "-p", "-t", "bench"):
                    time.sleep(polling.every)
                ask("send-keys", "-t", "bench", "C-l")
                if polling.clearing:
                    time.sleep(polling.clearing)
                    ask("clear-history", "-t", "bench")
                times.append((time.perf_counter() - began) * 1000)
        finally:
            ask("kill-server")
        return times


FLOOR = "raw pty, blocking calls, no sandbox (floor)"
_GYM, _REX = "NeMo Gym's apptainer provider", "SWE-ReX session, host"
_GYM_TIMES, _SWEREX_TIMES = 200.0, 300.0
"""How many times faster ``echo hi`` shall be."""


@dataclass(frozen=True, slots=True)
class Repetitions:
    """How often what is done. Peers that take a tenth of a second and more are asked less often."""

    fast: int = 1000
    slow: int = 30
    polled: int = 12
    rounds: int = 5
    bulk: int = 10


@dataclass(frozen=True, slots=True)
class Peers:
    """Peers of ``echo hi``, of the mix (mean ms), and of a megabyte of output."""

    echo: list[Peer] = field(default_factory=list[Peer])
    mix: list[Peer] = field(default_factory=list[Peer])
    bulk: list[Peer] = field(default_factory=list[Peer])

    def add(self, name: str, echo: Sequence[float], mix: Sequence[float], bulk: Sequence[float] = ()) -> None:
        wanted = {_GYM: _GYM_TIMES, _REX: _SWEREX_TIMES}.get(name)
        if echo:
            self.echo.append(peer(name, echo, target=wanted))
        if mix:
            self.mix.append(peer(name, [mean(mix)]))
        if bulk:
            self.bulk.append(peer(name, bulk))


Run = Callable[[Sequence[str]], list[float] | None]


def measure(image: str | None, sif: str | None, megabyte: str, counts: Repetitions, *, pytest: bool) -> Peers:
    env, found = environment(image), Peers()

    def on_host(name: str, run: Run, echoes: int, rounds: int, bulk: int) -> None:
        with TemporaryDirectory(prefix="mix-") as root:
            echo = run(["echo hi"] * (echoes + 1))
            actions = run([setup(root), *(list(actions_of_mix(root, pytest=pytest)) * rounds)])
            output = run([megabyte] * (bulk + 1)) if bulk else []
        found.add(name, (echo or [])[1:], (actions or [])[1:], (output or [])[1:])  # the first one warms up

    on_host(FLOOR, lambda commands: raw_pty(commands, env), counts.fast, counts.rounds, counts.bulk)
    found.echo.append(peer("fork and exec of /bin/true (floor)", fork_exec(max(10, counts.fast // 4))))
    if sif:
        echoes, bulk = ["echo hi"] * counts.slow, [megabyte] * max(2, counts.bulk // 2)
        root = f"{_apptainer.GYM_DIRECTORY}/mix"
        mix = list(actions_of_mix(root, pytest=pytest)) * counts.rounds
        if measured := _apptainer.gym(sif, setup(root), [*echoes, *mix, *bulk]):
            times, actions = measured.times, len(echoes) + len(mix)
            found.add(_GYM, times[: len(echoes)], times[len(echoes) : actions], times[actions:])
    if os.environ.get("PRORL_BENCH_SWEREX"):
        rex_bulk = max(2, counts.bulk // 2)
        on_host(_REX, lambda commands: swerex(commands, env), counts.slow, counts.rounds, rex_bulk)
    for polling, echoes, rounds in ((OPENHANDS, counts.polled, 2), (EAGER, counts.slow, counts.rounds)):
        on_host(polling.name, lambda commands, polling=polling: tmux(commands, polling, env), echoes, rounds, 0)
    return found
