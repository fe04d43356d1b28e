"""Rollouts beside every attack at once: each ends with the reward that it has alone, and the loop goes round."""

import asyncio
import contextlib
import itertools
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator, Sequence
from functools import partial
from pathlib import Path
from random import Random

import pytest
from loop_watch import LoopWatch
from test_attacks_on_the_guest import PRELUDE as GUEST_PRELUDE
from test_files import HOLD, HOLD_TEXT, KILL, STOP
from test_hidden_memory import PRELUDE, WAYS

from prorl_gym.agents.fake import ScriptedPolicy
from prorl_gym.api.app import create_app
from prorl_gym.api.auth import has_bearer
from prorl_gym.api.connections import HttpServer
from prorl_gym.client import Client
from prorl_gym.environments import registry
from prorl_gym.environments.gym_rows import read_rows
from prorl_gym.environments.script import gold_steps, wrong_steps
from prorl_gym.errors import RolloutError, SandboxError
from prorl_gym.records import RolloutRequest, Segment
from prorl_gym.rollout.memory_ledger import MemoryLedger
from prorl_gym.rollout.protocol import Job
from prorl_gym.rollout.retry import RetryConfig
from prorl_gym.rollout.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.sandbox.choose import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import Sandbox, SandboxBackend, SandboxLimits, SandboxSpec
from prorl_gym.settings import ResolvedSettings

TESTS = Path(__file__).parents[1]
TOKEN = "test-token-of-no-worth"
MB = 1 << 20
LIMITS = SandboxLimits(
    memory=128 * MB, total_memory=128 * MB, shm_size=32 * MB, root_size=512 * MB, processes=100, cpu_seconds=20
)
PROGRAMS = {
    **{way: PRELUDE + script for way, script in WAYS.items()},
    "limits of pid 1": GUEST_PRELUDE
    + "for k in range(16):\n  try: resource.prlimit(1, k, (0, 0))\n  except OSError: pass",
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
FLOODS = ("silent", "heads", "bodies", "pipelined")


async def attack_by_program(box: Sandbox, script: str) -> None:
    await box.exec(["/usr/bin/python3", "-c", script + "\ntime.sleep(1)"], timeout=4)


async def attack_by_shell(box: Sandbox, command: str) -> None:
    shell = await box.shell()
    await shell.run(command, timeout=2)
    await shell.run("true", timeout=2)


async def attack_by_locks(box: Sandbox, script: str) -> None:
    await box.exec(["/usr/bin/python3", "-c", script], timeout=4)
    for _ in range(4):
        await box.write_file("/tmp/victim", b"x" * 1000)


async def attack_the_text(box: Sandbox, script: str) -> None:
    shell = await box.shell()
    await box.write_file("/tmp/hold.py", script.encode())
    await shell.run("/usr/bin/python3 /tmp/hold.py", timeout=4)
    await shell.run("true", timeout=2)


ATTACKS = [
    *(partial(attack_by_program, script=script) for script in PROGRAMS.values()),
    *(partial(attack_by_shell, command=command) for command in COMMANDS.values()),
    partial(attack_by_locks, script=HOLD),
    partial(attack_the_text, script=HOLD_TEXT),
]


class Attackers:
    """Some that go through all attacks, each in a sandbox of its own, until they are cancelled."""

    def __init__(self, backend: SandboxBackend) -> None:
        self.backend, self.done = backend, 0

    async def work(self, seed: int) -> None:
        order = Random(seed).sample(ATTACKS, len(ATTACKS))
        for attack in itertools.cycle(order):
            box = await self.backend.start(SandboxSpec(limits=LIMITS))
            try:
                with contextlib.suppress(SandboxError, OSError):
                    await attack(box)
                self.done += 1
            finally:
                await box.close()


@contextlib.contextmanager
def flooded(port: int) -> Generator[None]:
    """Every kind of flood of the port, by callers without the token."""
    script = str(TESTS / "api" / "flood.py")
    flooders = [
        subprocess.Popen([sys.executable, script, kind, str(port), f"127.0.0.{host}", "200", "120", "65534"])
        for host, kind in enumerate(FLOODS, start=2)
    ]
    try:
        yield
    finally:
        for one in flooders:
            one.kill()
            one.wait()


class Session:
    """Implements ``PolicySession``: a repair, or plausible turns that are none."""

    def __init__(self, request: RolloutRequest) -> None:
        name, row = request.environment, request.task
        self.policy = ScriptedPolicy(gold_steps(name, row) if is_right(request) else wrong_steps(name, row, 1))

    async def failure_at_deadline(self) -> RolloutError | None: ...

    async def room(self) -> None: ...

    def rest(self) -> None: ...

    def hurry(self) -> None: ...

    async def close(self) -> None: ...

    def segments(self) -> list[Segment]:
        return []


class Policies:
    def open(self, job: Job, settings: ResolvedSettings) -> Session:
        return Session(job.request)


def is_right(request: RolloutRequest) -> bool:
    return request.rollout_id.endswith("-right")


def requests() -> list[RolloutRequest]:
    return [
        RolloutRequest(rollout_id=f"{name}{number}-{kind}", environment=name, task=dict(row.task))
        for name in ("code", "swe", "math", "taskdir")
        for number, row in enumerate(read_rows(TESTS.parent / f"environments/prorl_{name}/data/example.jsonl"))
        for kind in ("right", "wrong")
    ]


@contextlib.asynccontextmanager
async def attacked(backend: SandboxBackend, port: int) -> AsyncGenerator[Attackers]:
    attackers = Attackers(backend)
    with flooded(port):
        working = [asyncio.create_task(attackers.work(seed)) for seed in range(4)]
        try:
            yield attackers
        finally:
            for one in working:
                one.cancel()
            ended = await asyncio.gather(*working, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_no_attack_changes_the_reward_of_a_neighbour() -> None:
    try:
        backend = await open_backend(SandboxConfig(backend="userns"))
    except SandboxError as error:
        pytest.skip(error.what)
    asked = requests()
    for request in asked:  # environments are imported before a service serves
        registry.get(request.environment)
    runner = InProcessRunner(registry.get, Policies(), backend, RunnerConfig(init=2, run=2, eval=2))
    service = RolloutService(MemoryLedger(), runner, RetryConfig(pause_seconds=0.001))
    await service.start()
    server = HttpServer(create_app(service, TOKEN), partial(has_bearer, token=TOKEN.encode()))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            port = listener.getsockname()[1]
            async with LoopWatch() as watch, attacked(backend, port) as attackers:
                rewards = await rewards_of(f"http://127.0.0.1:{port}", asked)
            server.should_exit = True
            await serving
    finally:
        service.refuse()
        await service.stop(drain=False)
        await backend.close()
    print(f"\n{attackers.done} attacks, {len(rewards)} rollouts, longest stall {watch.longest * 1000:.0f} ms")
    assert attackers.done >= len(ATTACKS), "every attack is to have run beside some rollout"
    assert rewards == {one.rollout_id: 1.0 if is_right(one) else 0.0 for one in asked}
    assert watch.longest < 0.5


async def rewards_of(url: str, asked: Sequence[RolloutRequest]) -> dict[str, float | None]:
    """Submit rollouts and read their ends from the stream."""
    async with Client(url, token=TOKEN) as client:
        await client.submit(asked)
        found: dict[str, float | None] = {}
        async for delivered in client.stream():
            found[delivered.rollout.rollout_id] = delivered.rollout.reward
            if len(found) == len(asked):
                break
        return found
