"""What the gateway of a rollout costs a program that is served by it.

Latency: one program whose history has grown to 64,000 tokens; a call's time as it sees it, less what the engine
needed. Calls a second: 16 programs with histories of 4,000 tokens at once, each with a gateway of its own, beside a
proxy that only captures text (``_gateway_proxy.py``). Programs, gateway and engine are a process each and share the
cores; answers are streamed, and the engine samples at once. Texts are made of the licence's words. ``floor`` is what a
gateway that sends ids cannot avoid: the same bodies over the same HTTP library, or read as JSON, and nothing else.
Histories that are edited: ``_gateway_edits.py``.
"""

import asyncio
import json
import random
import socket
import sys
import timeit
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from _gateway_edits import play_histories
from _gateway_proxy import CapturingProxy, FloorProxy
from _report import SHORT, Figure, Report, StartConditions, figure, peer, report
from aiohttp import web

from prorl_gym.gateway.rollout_gateway import RolloutGateway
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
HISTORIES = 1_000 if SHORT else 10_000
"""Played by appending, then edited once."""
_SEED = 20261124
_ROOT = Path(__file__).parent.parent
_TEXT = 'I look at it.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l /work"}}\n</tool_call>'


def run() -> Report:
    """Measure."""
    begun = StartConditions.capture()
    return report("gateway", asyncio.run(_figures()), "aiohttp", "tokenizers", begun=begun)


async def _figures() -> list[Figure]:
    codec = load_codec("small")
    words = (_ROOT / "LICENSE").read_text(encoding="utf-8").split()
    async with _engine(codec) as engine:
        added = await _added_latency(codec, engine, words)
        floor = await _floor_latency(codec, engine, words)
        gateways, proxies, floors = list[float](), list[float](), list[float]()
        for _ in range(RUNS):  # alternately: the machine may change its pace
            gateways.append(await _gateway_rate(codec, engine, words))
            proxies.append(await _proxy_rate(CapturingProxy(engine), words, codec))
            floors.append(await _proxy_rate(FloorProxy(engine, SHORT_HISTORY, _TEXT), words, codec))
    edits = await play_histories(codec, HISTORIES)
    return [
        figure("added latency, 64 k history: p50", [_share(added, 0.5)], "ms", better="lower", target=10.0),
        figure("added latency, 64 k history: p99", [_share(added, 0.99)], "ms", better="lower", target=30.0),
        figure("floor: HTTP alone, 64 k history: p50", [_share(floor, 0.5)], "ms", better="lower"),
        figure("floor: HTTP alone, 64 k history: p99", [_share(floor, 0.99)], "ms", better="lower"),
        figure("floor: the body of a 64 k history as JSON", [_json_milliseconds(codec, words)], "ms", better="lower"),
        figure(
            "calls a second, 4 k history",
            gateways,
            "1/s",
            better="higher",
            target=100.0,
            peers=[peer("a proxy that only captures", proxies, target=0.8)],
        ),
        figure("floor: HTTP alone, calls a second, 4 k history", floors, "1/s", better="higher"),
        figure(
            f"segments of a history that is only appended to: most of {HISTORIES}",
            [edits.most_segments],
            "",
            better="lower",
            target=1.0,
        ),
        figure(
            f"edits of {HISTORIES} histories that were found",
            [100 * edits.found / edits.edits],
            "%",
            better="higher",
            target=100.0,
        ),
    ]


async def _added_latency(codec: ChatCodec, engine: str, words: list[str]) -> list[float]:
    """Return milliseconds that the gateway added to each call, in ascending order."""
    async with _pool(codec, engine) as pool, AsyncExitStack() as open_gateways:
        session, url, token = await _open_gateway(codec, pool, open_gateways)
        added = await _latency(codec, engine, words, url, token)
        (segment,) = session.segments()
        if not LONG <= len(segment.token_ids) <= 1.5 * LONG:
            raise RuntimeError(f"the history has {len(segment.token_ids)} tokens")
        return added


async def _floor_latency(codec: ChatCodec, engine: str, words: list[str]) -> list[float]:
    """Return the same of HTTP alone, with bodies as long as the gateway's."""
    async with _serve_proxy(FloorProxy(engine, LONG, _TEXT)) as url:
        return await _latency(codec, engine, words, url, "")


async def _latency(codec: ChatCodec, engine: str, words: list[str], url: str, token: str) -> list[float]:
    outputs = [_text(codec, words, LONG // GROWING, seed) for seed in range(GROWING)]
    outputs += [_text(codec, words, 20, seed) for seed in range(CALLS)]
    job = {"urls": [url], "tokens": [token], "prompt": "Begin.", "outputs": outputs, "unmeasured": GROWING}
    await _engine_seconds(engine)
    played = await _play(job)
    pairs = zip(played["each"][0], (await _engine_seconds(engine))[GROWING:], strict=True)
    return sorted(1000 * (seconds - engine) for seconds, engine in pairs)


def _json_milliseconds(codec: ChatCodec, words: list[str]) -> float:
    """Return the shortest time in which a body with a long history is read as JSON."""
    texts = [_text(codec, words, LONG // GROWING, seed) for seed in range(GROWING)]
    body = json.dumps({"messages": [{"role": "user", "content": text} for text in texts]})
    return 1000 * min(timeit.repeat(lambda: json.loads(body), number=1, repeat=20))


async def _gateway_rate(codec: ChatCodec, engine: str, words: list[str]) -> float:
    async with _pool(codec, engine) as pool, AsyncExitStack() as open_gateways:
        opened = [await _open_gateway(codec, pool, open_gateways) for _ in range(PROGRAMS)]
        return await _rate(codec, words, [url for _, url, _ in opened], [token for _, _, token in opened])


async def _proxy_rate(proxy: CapturingProxy, words: list[str], codec: ChatCodec) -> float:
    async with _serve_proxy(proxy) as url:
        return await _rate(codec, words, [url] * PROGRAMS, [""] * PROGRAMS)


@asynccontextmanager
async def _serve_proxy(proxy: CapturingProxy) -> AsyncGenerator[str]:
    """Start a proxy in this process; yield the address of its route."""
    runner = web.AppRunner(proxy.application(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions"
    finally:
        await runner.cleanup()


async def _rate(codec: ChatCodec, words: list[str], urls: list[str], tokens: list[str]) -> float:
    outputs = [_text(codec, words, 20, seed) for seed in range(CALLS_EACH)]
    prompt = _text(codec, words, SHORT_HISTORY, _SEED)
    job = {"urls": urls, "tokens": tokens, "prompt": prompt, "outputs": outputs, "unmeasured": 0}
    return PROGRAMS * CALLS_EACH / (await _play(job))["all"]


async def _open_gateway(codec: ChatCodec, pool: EnginePool, stack: AsyncExitStack) -> tuple[HarnessSession, str, str]:
    limits = RolloutSettings(max_turns=100_000, max_tokens=1_000_000)
    settings = resolve_settings(limits)
    session = HarnessSession(pool, codec, settings, rollout_id=f"r{random.getrandbits(64):x}")
    gateway = RolloutGateway(session, codec, settings)
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
async def _engine(codec: ChatCodec) -> AsyncGenerator[str]:
    """Start the engine; yield its address."""
    ids = [*codec.tokenizer.encode_trusted(_TEXT), codec.terminator_id]
    process = await _start("_gateway_engine.py", {"ids": ids, "text": _TEXT})
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.kill()
        await process.wait()


async def _engine_seconds(engine: str) -> list[float]:
    async with aiohttp.ClientSession() as client, client.get(f"{engine}/seconds") as answer:
        return await answer.json()


async def _play(job: dict[str, Any]) -> dict[str, Any]:
    """Run the programs; return what they measured."""
    process = await _start("_gateway_load.py", job)
    printed, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError("the programs of the bench failed")
    return json.loads(printed)


async def _start(script: str, job: dict[str, Any]) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, Path(__file__).parent / script),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(job).encode() + b"\n")
    await process.stdin.drain()
    return process


def _text(codec: ChatCodec, words: list[str], tokens: int, seed: int) -> str:
    """Return a text of about so many tokens."""
    chosen = random.Random(seed).choices(words, k=tokens)
    ids = codec.tokenizer.encode_untrusted(" ".join(chosen))[:tokens]
    return codec.decode(ids)


def _share(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
