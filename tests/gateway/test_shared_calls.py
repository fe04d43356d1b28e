"""Who gets which answer when calls are repeated."""

import asyncio
from contextvars import ContextVar, copy_context
from typing import Any

import pytest

from prorl_gym.gateway import shared_calls
from prorl_gym.gateway.shared_calls import SharedCall, SharedCalls
from prorl_gym.gateway.turn_stream import Piece


class Calls:
    """Calls that wait for ``ready``, and then give their number."""

    def __init__(self) -> None:
        self.shared = SharedCalls(copy_context())
        self.made = 0
        self.ready = asyncio.Event()
        self.stopped = 0

    async def make(self, call: SharedCall) -> Any:
        self.made += 1
        number = self.made
        try:
            await self.ready.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        return number

    async def receive(self, key: bytes, *, is_delivered: bool = True) -> Any:
        async with self.shared.join(key, self.make) as call:
            result = await asyncio.shield(call.task)
            call.is_delivered = is_delivered
            return result


async def begun(calls: Calls, *keys: bytes) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(calls.receive(key)) for key in keys]
    for _ in range(2):  # each has joined, and each call has begun
        await asyncio.sleep(0)
    return tasks


async def test_equal_calls_are_made_once():
    calls = Calls()
    tasks = await begun(calls, b"a", b"a", b"b")
    calls.ready.set()
    assert await asyncio.gather(*tasks) == [1, 1, 2]


async def test_an_undelivered_answer_is_given_again_and_a_delivered_one_is_not():
    calls = Calls()
    calls.ready.set()
    given = [await calls.receive(b"a", is_delivered=last) for last in (False, False, True, True)]
    assert given == [1, 1, 1, 2]


async def test_a_call_stops_with_the_last_request_that_waits():
    calls = Calls()
    first, second = await begun(calls, b"a", b"a")
    first.cancel()
    await asyncio.wait({first})
    assert calls.stopped == 0
    second.cancel()
    await asyncio.wait({second})
    assert (calls.stopped, b"a" in calls.shared) == (1, False)


async def test_a_call_that_failed_is_made_again():
    calls = Calls()

    async def fail(call: SharedCall) -> Any:
        raise ValueError

    with pytest.raises(ValueError):
        async with calls.shared.join(b"a", fail) as call:
            await call.task
    calls.ready.set()
    assert await calls.receive(b"a") == 1


async def test_undelivered_answers_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_calls, "MAX_UNDELIVERED", 2)
    calls = Calls()
    calls.ready.set()
    for key in (b"a", b"b", b"c"):
        await calls.receive(key, is_delivered=False)
    assert [key in calls.shared for key in (b"a", b"b", b"c")] == [False, True, True]


async def test_closing_stops_all_calls():
    calls = Calls()
    tasks = await begun(calls, b"a", b"b")
    await calls.shared.close()
    assert calls.stopped == 2
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_pieces_wake_who_waits_for_them():
    calls = Calls()
    async with calls.shared.join(b"a", calls.make) as call:
        assert not await call.wait_for_pieces(0, 0.01)
        waiting = asyncio.create_task(call.wait_for_pieces(0, 10))
        call.add_pieces([Piece("text", "x")])
        assert await waiting
        calls.ready.set()
        assert await call.wait_for_pieces(1, 10)
        assert call.task.done()


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
