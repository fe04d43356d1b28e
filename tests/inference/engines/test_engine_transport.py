"""One exchange with a server: what it may not do, whatever the server or the environment says."""

import json
import ssl
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from fake_vllm import FakeVllm

from prorl_gym.errors import ConfigError, EngineError, FailureKind, Limit
from prorl_gym.inference.engines.dialect import error_from_response, error_text
from prorl_gym.inference.engines.http_exchange import (
    ConnectionOptions,
    EngineTransport,
    HttpRequest,
    HttpResponse,
    tls_context,
)
from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.inference.protocol import ContextExceeded
from prorl_gym.testing.inference.engine_conformance import request


async def exchange(url, link=None):
    transport = EngineTransport(url, link or ConnectionOptions())
    try:
        return await transport.exchange(HttpRequest("GET", url + "/models"), 5.0)
    finally:
        await transport.close()


async def test_the_environments_proxies_are_not_used(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with FakeVllm() as server:
        assert (await exchange(server.url)).status == 200


@asynccontextmanager
async def serving(models, other=None, tls=None, host="127.0.0.1"):
    """Serve a handler of /v1/models, and perhaps one of /elsewhere; give the address."""
    app = web.Application()
    app.router.add_get("/v1/models", models)
    if other is not None:
        app.router.add_get("/elsewhere", other)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield f"http{'s' * (tls is not None)}://{host}:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def test_a_redirect_is_not_followed_and_the_key_stays():
    seen = []

    async def elsewhere(request):
        seen.append(request.headers)
        return web.Response()

    async def away(request):
        raise web.HTTPFound("/elsewhere")

    async with serving(away, elsewhere) as url:
        assert (await exchange(url, ConnectionOptions(api_key="hush"))).status == 302
    assert seen == []


async def test_a_certificate_is_trusted_only_when_its_authority_is_named(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=engine"]
    files = ["-keyout", key, "-out", certificate, "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(["openssl", "req", "-x509", *made, *files], check=True, capture_output=True)  # noqa: ASYNC221
    except FileNotFoundError:
        pytest.skip("needs the openssl command")

    async def models(request):
        return web.Response(text="{}")

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    async with serving(models, tls=context) as url:
        assert (await exchange(url, ConnectionOptions(tls=tls_context(certificate)))).status == 200
        with pytest.raises(EngineError, match="its certificate is not trusted") as caught:
            await exchange(url)
    assert caught.value.kind is FailureKind.ENGINE_UNREACHABLE


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_without_certificates_is_reported_at_the_start(tmp_path, content):
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="holds no certificates") as caught:
        tls_context(path)
    assert caught.value.fix == "Check 'ca_file'."


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b'{"error": {"message": "a"}}', "a"),
        (b'{"error": "b"}', "b"),
        (b'{"message": "c"}', "c"),
        (b'{"detail": "d"}', "d"),
        (b'{"detail": [1]}', '{"detail": [1]}'),
        (b"[" * 100_000, "[" * 200),
        (b"", "no message"),
        (b"\x00\x1b[31m \r\n", "[31m"),
    ],
)
def test_a_servers_own_words(payload, text):
    assert error_text(payload) == text


MESSAGES = [json.loads(line) for line in Path(__file__).with_name("context_messages.jsonl").read_text().splitlines()]
"""Of vLLM 0.8 to 0.33 and SGLang 0.4 to 0.5.23; ``context``: the length that they name, or ``no limit``."""


@pytest.mark.parametrize("row", MESSAGES, ids=lambda row: row["message"][:60])
def test_what_does_not_fit_into_the_context_is_a_limit(row):
    error = error_from_response("a", HttpResponse(400, json.dumps({"message": row["message"]}).encode()))
    if row["context"] == "no limit":
        assert isinstance(error, EngineError)
        assert error.kind is FailureKind.ENGINE_REFUSED
    else:
        assert isinstance(error, ContextExceeded)
        assert (error.limit, error.max_model_len) == (Limit.TOKENS, row["context"])


def test_a_server_that_breaks_over_a_long_prompt_is_still_broken():
    error = error_from_response("a", HttpResponse(500, b"maximum context length is 5 tokens"))
    assert isinstance(error, EngineError)
    assert error.kind is FailureKind.ENGINE_UNREACHABLE


async def test_cookies_are_not_kept():
    seen = []

    async def models(request):
        seen.append(request.headers.get("Cookie"))
        answer = web.Response()
        answer.set_cookie(f"c{len(seen)}", "x" * 4000)
        return answer

    async with serving(models, host="localhost") as url:  # none are ever kept for a bare number
        transport = EngineTransport(url, ConnectionOptions())
        for _ in range(4):
            assert (await transport.exchange(HttpRequest("GET", url + "/models"), 5.0)).status == 200
        await transport.close()
    assert seen == [None] * 4


async def test_calls_share_a_connection():
    async with FakeVllm() as server:
        engine = VllmEngine("e", server.url, VllmOptions(model="m", vocab_size=100))
        for _ in range(10):
            await engine.generate(request())
        await engine.close()
    assert (len(server.bodies), len(server.connections)) == (10, 1)
