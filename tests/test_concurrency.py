"""Work that is done one at a time."""

import asyncio

import pytest

from prorl_gym.concurrency import Slot


async def test_a_slot_is_given_on_when_its_work_ends_and_not_when_its_caller_is_cancelled():
    slot, may_end, log = Slot(), asyncio.Event(), list[str]()

    async def work(name: str) -> str:
        log.append(name)
        await may_end.wait()
        return name

    first, second, third = (asyncio.ensure_future(slot.run(lambda name=name: work(name))) for name in "abc")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await asyncio.wait({first, second})
    assert log == ["a"]
    may_end.set()
    assert await third == "c"
    assert log == ["a", "c"]


async def test_an_error_of_the_work_reaches_its_caller_and_frees_the_slot():
    slot = Slot()

    async def fail() -> None:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await slot.run(fail)
