"""Sessions without a call for a while are over."""

import asyncio

import pytest
from virtual_time import virtually

from prorl_gym.gateway import gateway
from prorl_gym.gateway.gateway import SessionTracker


@virtually
async def test_idle_session_is_forgotten_and_one_that_calls_again_goes_on():
    over: list[str] = []
    live = SessionTracker(over.append, idle_seconds=60)
    for name in "ab":
        with live.track_call(name):
            pass
    await asyncio.sleep(59)
    with live.track_call("a"):
        await asyncio.sleep(2)
    assert (over, len(live)) == (["b"], 1)
    await asyncio.sleep(61)
    assert (over, len(live)) == (["b", "a"], 0)


@virtually
async def test_session_with_a_call_in_flight_is_not_idle():
    over: list[str] = []
    live = SessionTracker(over.append, idle_seconds=60)
    with live.track_call("a"):
        for name in "ab":
            with live.track_call(name):
                pass
        await asyncio.sleep(61)
        assert over == ["b"]


@virtually
async def test_idle_sessions_are_bounded():
    over: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway, "MAX_IDLE", 2)
        live = SessionTracker(over.append, idle_seconds=60)
        for name in "abc":
            with live.track_call(name):
                pass
    live.close()
    assert (over, len(live)) == (["a"], 2)
