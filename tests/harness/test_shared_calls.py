"""Who gets which answer when calls are repeated."""

import asyncio
from contextvars import ContextVar, copy_context
from typing import Any

import pytest

from prorl_gym.harness import rollout_gateway
from prorl_gym.harness.rollout_gateway import SharedCall, SharedCalls


class Calls:
    """Calls that give their number."""

    def __init__(self) -> None:
        self.shared = SharedCalls(copy_context())
        self.made = 0

    async def make(self, call: SharedCall) -> Any:
        self.made += 1
        return self.made

    async def receive(self, key: bytes, *, is_delivered: bool) -> Any:
        async with self.shared.join(key, self.make) as call:
            result = await asyncio.shield(call.task)
            call.is_delivered = is_delivered
            return result


async def test_an_undelivered_answer_is_given_again_and_a_delivered_one_is_not():
    calls = Calls()
    given = [await calls.receive(b"a", is_delivered=last) for last in (False, False, True, True)]
    assert given == [1, 1, 1, 2]


async def test_undelivered_answers_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_gateway, "MAX_UNDELIVERED", 2)
    calls = Calls()
    for key in (b"a", b"b", b"c"):
        await calls.receive(key, is_delivered=False)
    assert [key in calls.shared for key in (b"a", b"b", b"c")] == [False, True, True]


async def test_calls_are_made_in_the_rollouts_context():
    variable: ContextVar[str] = ContextVar("variable", default="")
    variable.set("rollout")
    calls = SharedCalls(copy_context())
    variable.set("connection")
    seen: list[str] = []

    async def make(call: SharedCall) -> Any:
        seen.append(variable.get())

    async with calls.join(b"a", make) as call:
        await call.task
    assert seen == ["rollout"]
