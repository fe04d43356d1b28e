"""Rollouts beside every attack at once: each ends with the reward that it has alone, and the loop goes round."""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from loop_watch import LoopWatch
from quick_server import listening
from sandbox_support import PRELUDE, closing, kernel_has_user_namespaces
from scripted_sessions import ScriptedPolicies
from test_files import HOLD, HOLD_TEXT, KILL, STOP
from test_hidden_memory import MEMORY_PRELUDE, WAYS

from prorl_gym.api.app import create_app
from prorl_gym.api.app_context import AppContext
from prorl_gym.client import Client
from prorl_gym.environments import registry
from prorl_gym.environments.playback import gold_steps, wrong_steps
from prorl_gym.environments.row_format import read_rows
from prorl_gym.errors import SandboxError
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import Sandbox, SandboxBackend, SandboxLimits, SandboxSpec
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

TESTS = Path(__file__).parents[1]
TOKEN = "test-token-of-no-worth"
MB = 1 << 20
LIMITS = SandboxLimits(
    memory=128 * MB, total_memory=128 * MB, shm_size=32 * MB, root_size=512 * MB, processes=100, cpu_seconds=20
)
PROGRAMS = {
    **{way: MEMORY_PRELUDE + script + "\ntime.sleep(1)" for way, script in WAYS.items()},
    "limits of pid 1": PRELUDE + "for k in range(16):\n  try: resource.prlimit(1, k, (0, 0))\n  except OSError: pass",
    "all killed": KILL,
    "all stopped": STOP,
    "much output": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "much in a file": "f = open('/tmp/f', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "many files": "n = 0\nwhile True: open(f'/tmp/{n}', 'w').close(); n += 1",
    "a deep directory": "import os\nfor _ in range(3000): os.mkdir('d' * 20); os.chdir('d' * 20)",
    "many processes": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
}
COMMANDS = {
    "lines without end": "yes",
    "lines of keys": r"while :; do printf '\e[999B\e[2J\e]0;x\a\r'; done",
    "one line without end": "tr '\\0' x < /dev/zero",
    "forks": ":(){ :|:& };: 2>/dev/null; wait",
}


async def attack_by_program(box: Sandbox, script: str) -> None:
    result = await box.exec(["/usr/bin/python3", "-c", script], timeout=4)
    assert not re.search(b"SyntaxError|NameError", result.stderr), f"a program that attacks nothing: {result.stderr!r}"


async def attack_by_shell(box: Sandbox, command: str) -> None:
    shell = await box.shell()
    await shell.run_command(command, timeout=2)
    await shell.run_command("true", timeout=2)


async def attack_by_locks(box: Sandbox, script: str) -> None:
    await box.exec(["/usr/bin/python3", "-c", script], timeout=4)
    for _ in range(4):
        await box.write_file("/tmp/victim", b"x" * 1000)


async def attack_the_text(box: Sandbox, script: str) -> None:
    shell = await box.shell()
    await box.write_file("/tmp/hold.py", script.encode())
    await shell.run_command("/usr/bin/python3 /tmp/hold.py", timeout=4)
    await shell.run_command("true", timeout=2)


ATTACKS = {
    **{name: partial(attack_by_program, script=script) for name, script in PROGRAMS.items()},
    **{name: partial(attack_by_shell, command=command) for name, command in COMMANDS.items()},
    "held locks": partial(attack_by_locks, script=HOLD),
    "a held script of the shell": partial(attack_the_text, script=HOLD_TEXT),
}
ATTACKERS = 4


class Attackers:
    """Some that go through all attacks, each in a sandbox of its own, until they are cancelled."""

    def __init__(self, backend: SandboxBackend) -> None:
        self._backend = backend
        self.done: Counter[str] = Counter()

    async def work(self, first: int) -> None:
        """Repeat all attacks for ever, from one of them on."""
        names = list(ATTACKS)
        while True:
            for name in (*names[first:], *names[:first]):
                async with closing(await self._backend.start_sandbox(SandboxSpec(limits=LIMITS))) as box:
                    with contextlib.suppress(SandboxError, OSError):
                        await ATTACKS[name](box)
                    self.done[name] += 1


def is_right(request: RolloutRequest) -> bool:
    return request.rollout_id.endswith("-right")


def steps_of(request: RolloutRequest) -> list[Any]:
    """Return a repair, or plausible turns that are none."""
    name, row = request.environment, request.task
    return gold_steps(name, row) if is_right(request) else wrong_steps(name, row, 1)


def requests() -> list[RolloutRequest]:
    return [
        RolloutRequest(rollout_id=f"{name}{number}-{kind}", environment=name, task=dict(row.task))
        for name in ("code", "swe", "math", "taskdir")
        for number, row in enumerate(read_rows(TESTS.parent / f"environments/prorl_{name}/data/example.jsonl"))
        for kind in ("right", "wrong")
    ]


@contextlib.asynccontextmanager
async def attacked(backend: SandboxBackend) -> AsyncGenerator[Attackers]:
    attackers = Attackers(backend)
    working = [asyncio.create_task(attackers.work(k * len(ATTACKS) // ATTACKERS)) for k in range(ATTACKERS)]
    try:
        yield attackers
    finally:
        for one in working:
            one.cancel()
        ended = await asyncio.gather(*working, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not kernel_has_user_namespaces(), reason="the kernel refuses user namespaces")
async def test_no_attack_changes_the_reward_of_a_neighbour() -> None:
    backend = await open_backend(SandboxConfig(backend="userns"))
    asked = requests()
    for request in asked:  # environments are imported before a service serves
        registry.get(request.environment)
    runner = InProcessRunner(registry.get, ScriptedPolicies(steps_of), backend, RunnerConfig(init=2, run=2, eval=2))
    service = RolloutService(MemoryLedger(), runner, RetryConfig(pause_seconds=0.001))
    await service.start()
    try:
        async with listening(create_app(AppContext(service), TOKEN)) as url:
            async with LoopWatch() as watch, attacked(backend) as attackers:
                rounds = [await rewards_of(url, asked, "round-0")]
                while set(attackers.done) != set(ATTACKS):  # every attack is to run beside some rollout
                    rounds.append(await rewards_of(url, asked, f"round-{len(rounds)}"))
    finally:
        service.begin_shutdown()
        await service.stop(drain=False)
        await backend.close()
    stall = f"longest stall {watch.longest * 1000:.0f} ms"
    print(f"\n{attackers.done.total()} attacks, {len(rounds)} times {len(asked)} rollouts, {stall}")
    assert rounds == [{one.rollout_id: 1.0 if is_right(one) else 0.0 for one in asked}] * len(rounds)
    assert watch.longest < 0.5


async def rewards_of(url: str, asked: Sequence[RolloutRequest], run_id: str) -> dict[str, float | None]:
    """Submit rollouts as a run and read their ends from its stream."""
    names = {f"{run_id}-{one.rollout_id}": one.rollout_id for one in asked}
    async with Client(url, token=TOKEN) as client:
        await client.submit(
            [
                one.model_copy(update={"rollout_id": name, "run_id": run_id})
                for name, one in zip(names, asked, strict=True)
            ]
        )
        found: dict[str, float | None] = {}
        async for delivered in client.stream(run_id):
            found[names[delivered.rollout.rollout_id]] = delivered.rollout.reward
            if len(found) == len(asked):
                break
        return found
