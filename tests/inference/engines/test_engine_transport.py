"""One exchange with a server: what it may not do, whatever the server or the environment says."""

import ssl
import subprocess

import pytest
from aiohttp import web
from fake_vllm import FakeVllm

from prorl_gym.errors import ConfigError, EngineError, FailureKind
from prorl_gym.inference.engines.dialect import error_from_response, error_text
from prorl_gym.inference.engines.http_exchange import (
    ConnectionOptions,
    EngineTransport,
    HttpRequest,
    HttpResponse,
    tls_context,
)


async def exchange(url, link=None, path="/models"):
    transport = EngineTransport(url, link or ConnectionOptions())
    try:
        return await transport.exchange(HttpRequest("GET", url + path), 5.0)
    finally:
        await transport.close()


async def test_the_environments_proxies_are_not_used(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with FakeVllm() as server:
        assert (await exchange(server.url)).status == 200


async def test_a_redirect_is_not_followed_and_the_key_stays():
    seen = []

    async def elsewhere(request):
        seen.append(request.headers)
        return web.Response()

    async def away(request):
        raise web.HTTPFound("/elsewhere")

    app = web.Application()
    app.router.add_get("/v1/models", away)
    app.router.add_get("/elsewhere", elsewhere)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        assert (await exchange(url, ConnectionOptions(api_key="hush"))).status == 302
    finally:
        await runner.cleanup()
    assert seen == []


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate of 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=engine"]
    files = ["-keyout", key, "-out", certificate, "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(["openssl", "req", "-x509", *made, *files], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the openssl command")
    return key, certificate


@pytest.fixture
async def https_url(certificate):
    key, chain = certificate

    async def models(request):
        return web.Response(text="{}")

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(chain, key)
    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    yield f"https://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def test_a_certificate_is_trusted_when_its_authority_is_named(https_url, certificate):
    assert (await exchange(https_url, ConnectionOptions(tls=tls_context(certificate[1])))).status == 200


async def test_a_certificate_of_an_unknown_authority_is_refused(https_url):
    with pytest.raises(EngineError, match="its certificate is not trusted") as caught:
        await exchange(https_url)
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

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://localhost:{runner.addresses[0][1]}/v1"  # none are ever kept for a bare number
    transport = EngineTransport(url, ConnectionOptions())
    try:
        for _ in range(4):
            assert (await transport.exchange(HttpRequest("GET", url + "/models"), 5.0)).status == 200
    finally:
        await transport.close()
        await runner.cleanup()
    assert seen == [None] * 4
