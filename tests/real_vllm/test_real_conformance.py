"""The conformance kit of engines, on a real server.

Its weights determine what it samples: a checkpoint whose tokens follow each other in a fixed chain. What a well
server never does (faults of the wire) is left to the fakes.
"""

import asyncio
import threading
from dataclasses import replace

import pytest
from real_fleet import Fleet
from real_server import MODEL, VOCAB

from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.testing.inference.engine_conformance import CHECKS, Capabilities

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]


class PatientEngine(VllmEngine):
    """The adapter, with calls that do not end by themselves when the server is to hold them."""

    holding = False

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return await super().generate(replace(request, max_tokens=8000) if self.holding else request)


class RealCase:
    """One server, told what to do by its weights."""

    capabilities = Capabilities()

    def __init__(self, fleet: Fleet):
        self._server, self._checkpoints = fleet.servers[0], fleet.checkpoints
        self.engine = self._made(self._server.url)
        self.opened = [self.engine]

    def set_reply(self, ids):
        self.engine.holding = False
        self._server.reload(self._checkpoints.chain(*ids))

    def hold_calls(self):
        self.engine.holding = True
        self._server.reload(self._checkpoints.chain(10, 11, 12, again=True))

    def shut_down_server(self):
        self._replace("http://127.0.0.1:1/v1")

    def shorten_timeouts(self):
        self._replace(self._server.url, request_seconds=0.3)

    def block_cache_reset(self):
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "n": 16}
        threading.Thread(target=self._server.post, args=("/v1/completions", body), daemon=True).start()
        self._server.running(16)

    async def wait_for_held_calls(self, count):
        await asyncio.to_thread(self._server.running, count, sampling=count > 0)

    def _replace(self, url, **changes):
        self.engine = self._made(url, **changes)
        self.opened.append(self.engine)

    @staticmethod
    def _made(url, **changes):
        options = VllmOptions(model=MODEL, vocab_size=VOCAB, logprob_kind="processed", **changes)
        return PatientEngine("e", url, options)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check, fleet: Fleet):
    case = RealCase(fleet)
    await check(case)
    for engine in case.opened:
        await engine.close()
