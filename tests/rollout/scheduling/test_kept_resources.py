"""What a rollout keeps beside its sandboxes is left when it ends: also if that comes early, and if leaving fails."""

import asyncio
import logging

import pytest

from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend


class Resource:
    def __init__(self, *, slow: bool = False, broken: bool = False) -> None:
        self.slow, self.broken = slow, broken
        self.events: list[str] = []

    async def __aenter__(self) -> str:
        self.events.append("entering")
        try:
            if self.slow:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise
        self.events.append("entered")
        return "value"

    async def __aexit__(self, *_: object) -> None:
        self.events.append("left")
        if self.broken:
            raise OSError("it hangs on")


async def test_it_is_left_once_at_the_end() -> None:
    leases, resource = SandboxLeases(EmptyBackend()), Resource()
    assert await leases.enter_context(resource) == "value"
    assert resource.events == ["entering", "entered"]
    leases.begin_close()
    await leases.close()
    await leases.close()
    assert resource.events == ["entering", "entered", "left"]


@pytest.mark.parametrize("by", ["the end", "its caller"])
async def test_what_is_still_being_entered_is_stopped(by: str) -> None:
    leases, resource = SandboxLeases(EmptyBackend()), Resource(slow=True)
    keeping = asyncio.create_task(leases.enter_context(resource))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if by == "its caller":
        keeping.cancel()
    await leases.close()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert resource.events == ["entering", "cancelled"]


async def test_one_that_cannot_be_closed_delays_no_other(caplog: pytest.LogCaptureFixture) -> None:
    leases, broken, other = SandboxLeases(EmptyBackend()), Resource(broken=True), Resource()
    await leases.enter_context(broken)
    await leases.enter_context(other)
    with caplog.at_level(logging.ERROR):
        await leases.close()
    assert other.events[-1] == "left"
    assert "Resource could not be closed" in caplog.text


async def test_nothing_is_entered_after_the_end() -> None:
    leases, resource = SandboxLeases(EmptyBackend()), Resource()
    await leases.close()
    with pytest.raises(RuntimeError, match="has ended"):
        await leases.enter_context(resource)
    assert resource.events == []
