"""Spawners that die, at whatever moment of a start: the start goes on with the next one."""

import asyncio
import os
import signal
from typing import Any

import pytest

from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.spawner_client import SpawnerClient

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

MOMENTS = [number / 700 for number in range(8)]
"""Seconds after a start was issued; one takes some 10 ms with `userns`."""


async def test_a_start_survives_its_spawner_at_any_moment(own_backend: NamespaceBackend) -> None:
    killed = 0
    for moment in MOMENTS:
        while (spawner := await own_backend.spawner_pid()) == killed:  # noqa: ASYNC110 - its death is not noticed yet
            await asyncio.sleep(0.001)
        killed = spawner
        start = asyncio.create_task(own_backend.start_sandbox(SandboxSpec()))
        await asyncio.sleep(moment)  # at whatever point of the start this falls
        os.kill(spawner, signal.SIGKILL)
        await (await start).close()  # it may have been handed out just before, and then it is gone with its spawner


async def test_many_starts_share_the_next_spawner(own_backend: NamespaceBackend) -> None:
    spawner = await own_backend.spawner_pid()
    os.kill(spawner, signal.SIGSTOP)  # so that it finishes none of these
    starts = [asyncio.create_task(own_backend.start_sandbox(SandboxSpec())) for _ in range(8)]
    await asyncio.sleep(0)
    os.kill(spawner, signal.SIGKILL)
    boxes = await asyncio.gather(*starts)
    assert await own_backend.spawner_pid() != spawner
    assert all(await asyncio.gather(*(box.is_alive() for box in boxes)))
    await asyncio.gather(*(box.close() for box in boxes))


async def test_a_second_death_is_reported(own_backend: NamespaceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    await own_backend.spawner_pid()
    launched: list[int] = []
    launch = SpawnerClient.launch

    def kill(self: SpawnerClient, *arguments: Any) -> None:
        os.kill(self.pid, signal.SIGSTOP)  # so that it has not finished when it dies
        launch(self, *arguments)
        os.kill(self.pid, signal.SIGKILL)
        launched.append(self.pid)

    monkeypatch.setattr(SpawnerClient, "launch", kill)
    with pytest.raises(SandboxError, match="the sandbox spawner died"):
        await own_backend.start_sandbox(SandboxSpec())
    assert len(set(launched)) == len(launched) == 2


async def test_a_sandbox_that_dies_by_itself_is_not_made_again(
    own_backend: NamespaceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await own_backend.spawner_pid()
    launched: list[str] = []
    launch = SpawnerClient.launch

    def stop(self: SpawnerClient, *arguments: Any) -> None:
        launch(self, *arguments)
        launched.append(arguments[0].id)
        self.stop(arguments[0].id)

    monkeypatch.setattr(SpawnerClient, "launch", stop)
    with pytest.raises(SandboxError, match="died while it was being built"):
        await own_backend.start_sandbox(SandboxSpec())
    assert len(launched) == 1
