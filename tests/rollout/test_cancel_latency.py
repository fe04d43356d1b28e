"""A cancel reaches the engine's connection and every process within the stated bound, with real sandboxes."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prorl_gym.environments.protocol import Episode, RunContext
from prorl_gym.errors import CancelReason, SandboxError
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.protocol import Finished, Job
from prorl_gym.rollout.scheduling.model_source import ModelPolicySource
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.testing.rollout.fake_rollout import Script, ScriptedEnvironment, environment_lookup

COUNT = 6
BOUND = 0.2
"""Seconds until the engine's connection is closed and every process is dead (p99 of the contract)."""

SLACK = 3.0
"""This machine is shared: a test that measured the bound itself would fail of other people's work."""


class SlowEngine:
    """Speaks enough HTTP to be called, and never answers: no call, no abort."""

    def __init__(self) -> None:
        self.open = 0
        self.calls = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        call = head.startswith(b"POST /v1/completions")
        self.calls += call
        self.open += call
        try:
            while await reader.read(1 << 16):
                pass
        except ConnectionError:
            pass
        finally:
            self.open -= call
            writer.close()


class Busy(ScriptedEnvironment):
    """Its agent leaves processes behind, one in a session of its own, and then asks the model, or waits for a tool."""

    async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
        box = await context.leases.get_agent_sandbox(SandboxSpec())
        shell = await box.shell()
        started = await shell.run_command(f"sleep {task.id} & setsid -f sleep {task.id}; echo up", timeout=20)
        assert "up" in started.output
        if task.turns:
            await context.policy.start_conversation(episode.messages, ())
        else:
            await shell.run_command(f"sleep {task.id}", timeout=600)


def sleepers(mark: str) -> int:
    """Count the processes of this machine that sleep for one of these rollouts."""
    found = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            found += words[:1] == [b"sleep"] and words[1].startswith(mark.encode())
    return found


@asynccontextmanager
async def slow_engine() -> AsyncGenerator[tuple[SlowEngine, EnginePool]]:
    engine = SlowEngine()
    async with await asyncio.start_server(engine.serve, "127.0.0.1", 0) as server, EnginePool("policy") as pool:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        pool.add_engine(VllmEngine("slow", url, VllmOptions(model="m", vocab_size=1000)))
        yield engine, pool


async def until(fact: object, seconds: float = 20.0) -> float:
    began = time.monotonic()
    assert callable(fact)
    while not fact():
        assert time.monotonic() - began < seconds, "it never came true"
        await asyncio.sleep(0.002)
    return time.monotonic() - began


@pytest.mark.slow
async def test_a_cancel_closes_the_engine_call_and_kills_every_process_in_time() -> None:
    mark = f"86{os.getpid()}"
    try:
        backend = await open_backend(SandboxConfig(backend="userns", warm=0))
    except SandboxError as error:
        pytest.skip(f"user namespaces are refused here: {error.what}")
    assert isinstance(backend, NamespaceBackend)
    try:
        async with slow_engine() as (engine, pool):
            runner = InProcessRunner(
                environment_lookup(Busy()),
                ModelPolicySource(pool, load_codec("small")),
                backend,
                RunnerConfig(run=COUNT),
            )
            for number in range(COUNT):
                task = {"id": f"{mark}{number}", "turns": number % 2}
                request = RolloutRequest(rollout_id=f"r{number}", environment="scripted", task=task)
                await runner.accept(Job(request=request, accepted_at=time.time()))
            await until(lambda: engine.calls == COUNT // 2 and sleepers(mark) == 2 * COUNT + COUNT // 2)
            began = time.monotonic()
            await runner.cancel([f"r{number}" for number in range(COUNT)], CancelReason.REDUNDANT)
            dead = await until(lambda: not engine.open and not sleepers(mark))
            await backend.wait_idle()
            gone = time.monotonic() - began
            await runner.drain()
            ends: list[Rollout] = [e.rollout async for e in runner.events() if isinstance(e, Finished)]
        reported = [rollout.cancel_seconds for rollout in ends]
        print(f"dead after {dead:.3f} s, gone after {gone:.3f} s, reported {reported}")
        assert all(seconds is not None and seconds < BOUND * SLACK for seconds in reported)
        assert dead < BOUND * SLACK
        assert gone < 3.0
    finally:
        await backend.close()
