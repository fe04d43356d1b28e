"""What the gateway of a rollout costs a program that is served by it.

Latency: one program whose history has grown to 64,000 tokens; a call's time as it sees it, less what the engine
needed. Calls a second: 16 programs with histories of 4,000 tokens at once, each with a gateway of its own, beside a
proxy that only captures text. Programs, gateway and engine are a process each; answers are streamed, and the engine
samples at once. Texts are made of the licence's words. The floor is what a gateway that sends ids cannot avoid: the
same bodies over the same HTTP library, and nothing else.
"""

import asyncio
import json
import random
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from _load import percentile
from _programs import BENCH, ask, running
from _report import SHORT, Figure, Report, figure, peer, report
from aiohttp import web

from prorl_gym.harness.rollout_gateway import RolloutGateway
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.harness_session import HarnessSession
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.settings import RolloutSettings, resolve_settings

LONG, SHORT_HISTORY = 64_000, 4_000
GROWING = 60
"""Calls in which the long history grows."""
CALLS = 20 if SHORT else 200
"""Measured at the long history."""
PROGRAMS, CALLS_EACH = 16, 5 if SHORT else 50
RUNS = 1 if SHORT else 5
_SEED = 20261124
_TEXT = 'I look at it.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l /work"}}\n</tool_call>'


class CapturingProxy:
    """Forwards chat completions, streamed, and keeps each call with its answer."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.captured: list[tuple[Any, str]] = []
        """Messages of each call, and the text of its answer."""

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self._forward)
        app.cleanup_ctx.append(self._client)
        return app

    async def _client(self, app: web.Application):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self._session:
            yield

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        messages, stream = json.loads(body)["messages"], bytearray()
        async with self._session.post(f"{self._upstream}/v1/chat/completions", data=body) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                stream += chunk
                await response.write(chunk)
        events = [json.loads(line[6:]) for line in bytes(stream).split(b"\n") if line.startswith(b"data: {")]
        deltas = (choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        self.captured.append((messages, "".join(deltas)))
        return response


class FloorProxy(CapturingProxy):
    """Sends as many ids as a history has, the same in every call, and answers with a prepared stream. Keeps nothing."""

    def __init__(self, upstream: str, ids: int, text: str) -> None:
        super().__init__(upstream)
        self._body = json.dumps({"stream": True, "max_tokens": 4096, "prompt": list(range(1000, 1000 + ids))}).encode()
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        self._answer = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"choices": [choice]}).encode()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        async with self._session.post(f"{self._upstream}/v1/completions", data=self._body) as answer:
            async for _ in answer.content.iter_any():
                pass
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write_eof(self._answer)
        return response


def run() -> Report:
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as directory:
        figures = asyncio.run(_figures(Path(directory)))
    return report("gateway", figures, "aiohttp", "tokenizers")


async def _figures(directory: Path) -> list[Figure]:
    codec = load_codec("small")
    words = (BENCH.parent / "LICENSE").read_text(encoding="utf-8").split()
    texts = _Texts(codec, words)
    ids = [*codec.tokenizer.encode_trusted(_TEXT), codec.terminator_id]
    async with _program("engine", directory, {"ids": ids, "text": _TEXT}) as port:
        engine = f"http://127.0.0.1:{port}"
        added = await _added_latency(texts, engine, directory)
        async with _serve_proxy(FloorProxy(engine, LONG, _TEXT)) as url:  # bodies as long as the gateway's
            floor = await _latency(texts, engine, url, "", directory)
        gateways, proxies, floors = list[float](), list[float](), list[float]()
        for _ in range(RUNS):  # alternately: the machine may change its pace
            async with _pool(codec, engine) as pool, AsyncExitStack() as stack:
                opened = [await _open_gateway(codec, pool, stack) for _ in range(PROGRAMS)]
                urls, tokens = [url for _, url, _ in opened], [token for _, _, token in opened]
                gateways.append(await _rate(texts, urls, tokens, directory))
            for rates, proxy in ((proxies, CapturingProxy(engine)), (floors, FloorProxy(engine, SHORT_HISTORY, _TEXT))):
                async with _serve_proxy(proxy) as url:
                    rates.append(await _rate(texts, [url] * PROGRAMS, [""] * PROGRAMS, directory))
    return [
        *(
            figure(
                f"added latency, 64 k history: p{percent}",
                [percentile(added, percent)],
                "ms",
                target=target,
                peers=[peer("HTTP alone (floor)", [percentile(floor, percent)])],
            )
            for percent, target in ((50, 10.0), (99, 30.0))
        ),
        figure(
            "calls a second, 4 k history",
            gateways,
            "1/s",
            better="higher",
            target=100.0,
            peers=[peer("a proxy that only captures", proxies, target=0.8), peer("HTTP alone (floor)", floors)],
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Texts:
    """Texts of a wanted length, made of words."""

    codec: ChatCodec
    words: Sequence[str]

    def make(self, tokens: int, seed: int) -> str:
        chosen = random.Random(seed).choices(self.words, k=tokens)
        ids = self.codec.tokenizer.encode_untrusted(" ".join(chosen))[:tokens]
        return self.codec.decode(ids)


async def _added_latency(texts: _Texts, engine: str, directory: Path) -> list[float]:
    """Return milliseconds that the gateway added to each call."""
    async with _pool(texts.codec, engine) as pool, AsyncExitStack() as stack:
        session, url, token = await _open_gateway(texts.codec, pool, stack)
        added = await _latency(texts, engine, url, token, directory)
        (segment,) = session.segments()
        if not LONG <= len(segment.token_ids) <= 1.5 * LONG:
            raise RuntimeError(f"the history has {len(segment.token_ids)} tokens")
        return added


async def _latency(texts: _Texts, engine: str, url: str, token: str, directory: Path) -> list[float]:
    outputs = [texts.make(LONG // GROWING, seed) for seed in range(GROWING)]
    outputs += [texts.make(20, seed) for seed in range(CALLS)]
    job = {"urls": [url], "tokens": [token], "prompt": "Begin.", "outputs": outputs, "unmeasured": GROWING}
    await _engine_seconds(engine)
    async with _program("load", directory, job) as played:
        seconds = json.loads(played)["each"][0]
    pairs = zip(seconds, (await _engine_seconds(engine))[GROWING:], strict=True)
    return [1000 * (whole - engine) for whole, engine in pairs]


async def _rate(texts: _Texts, urls: list[str], tokens: list[str], directory: Path) -> float:
    outputs = [texts.make(20, seed) for seed in range(CALLS_EACH)]
    prompt = texts.make(SHORT_HISTORY, _SEED)
    job = {"urls": urls, "tokens": tokens, "prompt": prompt, "outputs": outputs, "unmeasured": 0}
    async with _program("load", directory, job) as played:
        return PROGRAMS * CALLS_EACH / json.loads(played)["all"]


@asynccontextmanager
async def _serve_proxy(proxy: CapturingProxy) -> AsyncGenerator[str]:
    runner = web.AppRunner(proxy.application(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions"
    finally:
        await runner.cleanup()


async def _open_gateway(codec: ChatCodec, pool: EnginePool, stack: AsyncExitStack) -> tuple[HarnessSession, str, str]:
    limits = RolloutSettings(max_turns=100_000, max_tokens=1_000_000)
    settings = resolve_settings(limits)
    session = HarnessSession(pool, codec, settings, rollout_id=f"r{random.getrandbits(64):x}")
    gateway = RolloutGateway(session, codec, settings, program="bench")
    listener = socket.create_server(("127.0.0.1", 0))
    await stack.enter_async_context(gateway.serving(listener))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions"
    return session, url, gateway.token


@asynccontextmanager
async def _pool(codec: ChatCodec, engine: str) -> AsyncGenerator[EnginePool]:
    pool = EnginePool("policy")
    options = VllmOptions(model="policy", vocab_size=codec.vocab_size, logprob_kind="processed")
    pool.add_engine(VllmEngine("e", f"{engine}/v1", options))
    async with pool:
        await pool.check_health()
        yield pool


@asynccontextmanager
async def _program(role: str, directory: Path, job: dict[str, Any]) -> AsyncGenerator[str]:
    log = directory / f"{role}.log"
    async with running([sys.executable, str(BENCH / "_gateway_programs.py"), role], log) as child:
        yield await ask(child, json.dumps(job), log, 600.0)


async def _engine_seconds(engine: str) -> list[float]:
    async with aiohttp.ClientSession() as client, client.get(f"{engine}/seconds") as answer:
        return await answer.json()
