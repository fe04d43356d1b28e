import asyncio
from contextlib import asynccontextmanager

import pytest
from fake_vllm import FakeVllm

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.conformance import CHECKS, STOP_ID
from prorl_gym.inference.fake import FakeEngine, Reply
from prorl_gym.inference.vllm import VllmEngine, VllmOptions


class FakeCase:
    def __init__(self):
        self._reply = Reply((STOP_ID,))
        self.engine = FakeEngine("fake", lambda request: self._reply)

    def answer(self, ids):
        self._reply = Reply(tuple(ids))

    def hold(self):
        self._reply = Reply((10, 11, 12, STOP_ID), hold=asyncio.Event())

    def break_down(self):
        self.engine.down = EngineError(FailureKind.ENGINE_UNREACHABLE, "fake is down")

    async def held(self, count):
        for _ in range(10):  # the fake needs a few turns of the event loop, no time
            await asyncio.sleep(0)
        if self.engine.in_flight != count:
            raise TimeoutError


class VllmCase:
    def __init__(self, server):
        self._server = server
        self.engine = VllmEngine("vllm", server.url, VllmOptions(model="m", vocab_size=100))

    def answer(self, ids):
        self._server.mode, self._server.ids = "ok", ids

    def hold(self):
        self._server.mode, self._server.ids = "hang", [10, 11, 12, STOP_ID]

    def break_down(self):
        self.engine = VllmEngine("vllm", "http://127.0.0.1:1/v1", VllmOptions(model="m", vocab_size=100))

    async def held(self, count):
        await self._server.running_is(count)


@asynccontextmanager
async def fake_case():
    yield FakeCase()


@asynccontextmanager
async def vllm_case(can_abort):
    async with FakeVllm(can_abort=can_abort) as server:
        case = VllmCase(server)
        engine = case.engine
        yield case
        await engine.close()
        await case.engine.close()


CASES = {
    "fake": fake_case,
    "vllm": lambda: vllm_case(can_abort=True),
    "vllm-without-abort": lambda: vllm_case(can_abort=False),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check, case):
    async with CASES[case]() as opened:
        await check(opened)
