"""Sessions without a call for a while are over."""

import asyncio

import pytest

from prorl_gym.gateway import session_tracker
from prorl_gym.gateway.session_tracker import SessionTracker


class Over:
    """Sessions that were forgotten, and an event for the next one."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.forgotten = asyncio.Event()

    def __call__(self, name: str) -> None:
        self.names.append(name)
        self.forgotten.set()


async def test_idle_session_is_forgotten():
    over = Over()
    live = SessionTracker(over, idle_seconds=0.01)
    with live.track_call("a"):
        pass
    await asyncio.wait_for(over.forgotten.wait(), 5)
    assert (over.names, len(live)) == (["a"], 0)


async def test_session_with_a_call_in_flight_is_not_idle():
    over = Over()
    live = SessionTracker(over, idle_seconds=0.01)
    with live.track_call("a"):
        with live.track_call("a"):
            pass
        with live.track_call("b"):
            pass
        await asyncio.wait_for(over.forgotten.wait(), 5)
        assert over.names == ["b"]


async def test_session_that_calls_again_goes_on():
    over = Over()
    live = SessionTracker(over, idle_seconds=0.05)
    with live.track_call("a"):
        pass
    with live.track_call("b"):
        pass
    with live.track_call("a"):
        await asyncio.wait_for(over.forgotten.wait(), 5)
    assert (over.names, len(live)) == (["b"], 1)


async def test_idle_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session_tracker, "MAX_IDLE", 2)
    over = Over()
    live = SessionTracker(over, idle_seconds=60)
    for name in "abc":
        with live.track_call(name):
            pass
    live.close()
    assert (over.names, len(live)) == (["a"], 2)
