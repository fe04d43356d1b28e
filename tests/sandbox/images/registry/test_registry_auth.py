"""Registries that ask for a user: where a password comes from, and the only places it goes to."""

import json
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web
from images_support import FakeRegistry, digest_of, entry, layer

from prorl_gym import logs
from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.images.config import ImagesConfig
from prorl_gym.sandbox.images.registry.auth import (
    CredentialFinder,
    RegistryCredentials,
    is_trusted_realm,
    parse_registry_host,
)
from prorl_gym.sandbox.images.store import ImageStore

BASE = layer(entry("etc/base", b"base"))
USER, PASSWORD = "alice", "pass:w0rd-of-alice"
ENCODED = b64encode(f"{USER}:{PASSWORD}".encode()).decode()
BASIC = f"Basic {ENCODED}"

LogIn = Callable[..., None]


@pytest.fixture(autouse=True)
def log_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogIn:
    """A home without logins, and a way to have one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DOCKER_CONFIG", "APPTAINER_CONFIGDIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for prefix in ("APPTAINER", "SINGULARITY"):
        monkeypatch.delenv(f"{prefix}_DOCKER_USERNAME", raising=False)
        monkeypatch.delenv(f"{prefix}_DOCKER_PASSWORD", raising=False)

    def write(host: str, file: str = ".docker/config.json") -> None:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(json.dumps({"auths": {host: {"auth": ENCODED}}, "credsStore": "none"}))

    return write


def demand(registry: FakeRegistry, challenge: str, wanted: str, exempt: str = "/token") -> list[str | None]:
    """Have a registry refuse requests without the expected login; return what it is sent."""
    sent: list[str | None] = []

    def guard(request: web.Request) -> web.StreamResponse | None:
        if request.path == exempt:
            return None
        sent.append(request.headers.get("Authorization"))
        if sent[-1] == wanted:
            return None
        return web.Response(status=401, headers={"WWW-Authenticate": challenge})

    registry.faults.append(guard)
    return sent


def grant_tokens(registry: FakeRegistry) -> list[str | None]:
    """Have a registry grant tokens to every caller; return what it is sent."""
    sent: list[str | None] = []

    def grant(request: web.Request) -> web.StreamResponse | None:
        if request.path != "/token":
            return None
        sent.append(request.headers.get("Authorization"))
        return web.json_response({"token": "good" if sent[-1] == BASIC else "anonymous"})

    registry.faults.append(grant)
    return sent


@pytest_asyncio.fixture
async def other_registry() -> AsyncIterator[FakeRegistry]:
    """Another port, which on the loopback is another host."""
    registry = FakeRegistry()
    app = web.Application()
    app.router.add_get("/{path:.*}", registry.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    registry.url = f"http://{host}:{port}"
    yield registry
    await runner.cleanup()


@pytest.mark.parametrize("file", [".docker/config.json", ".apptainer/docker-config.json"])
async def test_password_of_a_file_is_sent_when_it_is_asked_for(
    store: ImageStore, fake_registry: FakeRegistry, log_in: LogIn, file: str
) -> None:
    log_in(fake_registry.host, file)
    sent = demand(fake_registry, 'Basic realm="registry"', BASIC)
    assert (await store.resolve(fake_registry.add("a", BASE))).lower_dirs
    assert sent[0] is None and set(sent[1:]) == {BASIC} and len(sent) > 3  # asked for once, then known


async def test_token_is_granted_for_a_password(store: ImageStore, fake_registry: FakeRegistry, log_in: LogIn) -> None:
    log_in(f"https://{fake_registry.host}/v2/")
    asked = grant_tokens(fake_registry)
    sent = demand(fake_registry, f'Bearer realm="{fake_registry.url}/token",service="s"', "Bearer good")
    assert (await store.resolve(fake_registry.add("a", BASE))).lower_dirs
    assert asked == [BASIC]
    assert BASIC not in sent


async def test_without_a_login_the_fix_is_named(store: ImageStore, fake_registry: FakeRegistry) -> None:
    demand(fake_registry, 'Basic realm="registry"', BASIC)
    with pytest.raises(SandboxError, match=r"HTTP 401(?s:.*)docker login") as caught:
        await store.resolve(fake_registry.add("a", BASE))
    assert caught.value.kind is FailureKind.IMAGE_MISSING


async def test_wrong_password_is_tried_once(store: ImageStore, fake_registry: FakeRegistry, log_in: LogIn) -> None:
    log_in(fake_registry.host)
    sent = demand(fake_registry, 'Basic realm="registry"', "Basic other")
    with pytest.raises(SandboxError, match="HTTP 401"):
        await store.resolve(fake_registry.add("a", BASE))
    assert sent == [None, BASIC]


async def test_password_does_not_follow_a_redirect(
    store: ImageStore, fake_registry: FakeRegistry, other_registry: FakeRegistry, log_in: LogIn
) -> None:
    log_in(fake_registry.host)
    sent = demand(fake_registry, 'Basic realm="registry"', BASIC)
    elsewhere: list[str | None] = []

    def move(request: web.Request) -> web.StreamResponse | None:
        if not request.path.endswith(digest_of(BASE)):
            return None
        return web.Response(status=307, headers={"Location": f"{other_registry.url}{request.path}?signed=a%2Fb"})

    def serve(request: web.Request) -> web.StreamResponse | None:
        elsewhere.extend([request.headers.get("Authorization"), request.raw_path.rpartition("?")[2]])
        return None

    fake_registry.faults.append(move)
    other_registry.faults.append(serve)
    other_registry.add("a", BASE)
    assert (await store.resolve(fake_registry.add("a", BASE))).lower_dirs
    assert BASIC in sent and elsewhere == [None, "signed=a%2Fb"]


async def test_password_is_not_sent_to_a_strangers_address_for_tokens(
    store: ImageStore, fake_registry: FakeRegistry, other_registry: FakeRegistry, log_in: LogIn
) -> None:
    log_in(fake_registry.host)
    asked = grant_tokens(other_registry)
    sent = demand(fake_registry, f'Bearer realm="{other_registry.url}/token"', "Bearer good")
    with pytest.raises(SandboxError, match="HTTP 401"):
        await store.resolve(fake_registry.add("a", BASE))
    assert asked == [None] and BASIC not in sent


async def test_password_is_not_sent_to_another_registry(
    store: ImageStore, fake_registry: FakeRegistry, other_registry: FakeRegistry, log_in: LogIn
) -> None:
    log_in(other_registry.host)
    sent = demand(fake_registry, 'Basic realm="registry"', BASIC)
    with pytest.raises(SandboxError, match="HTTP 401"):
        await store.resolve(fake_registry.add("a", BASE))
    assert sent == [None]


async def test_netrc_is_never_sent(store: ImageStore, fake_registry: FakeRegistry, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text(f"default login {USER} password secret-of-netrc\n")
    (tmp_path / ".netrc").chmod(0o600)
    sent = demand(fake_registry, "Basic", BASIC)
    with pytest.raises(SandboxError, match="HTTP 401"):
        await store.resolve(fake_registry.add("a", BASE))
    assert sent == [None]


@pytest.mark.parametrize("prefix", ["APPTAINER", "SINGULARITY"])
async def test_variables_are_of_the_registry_that_the_configuration_names(
    images_config: ImagesConfig,
    fake_registry: FakeRegistry,
    other_registry: FakeRegistry,
    monkeypatch: pytest.MonkeyPatch,
    prefix: str,
) -> None:
    monkeypatch.setenv(f"{prefix}_DOCKER_USERNAME", USER)
    monkeypatch.setenv(f"{prefix}_DOCKER_PASSWORD", PASSWORD)
    named, other = (demand(registry, "Basic", BASIC) for registry in (fake_registry, other_registry))
    store = ImageStore(images_config.model_copy(update={"login_host": fake_registry.host}))
    try:
        assert (await store.resolve(fake_registry.add("a", BASE))).lower_dirs
        with pytest.raises(SandboxError, match="HTTP 401"):
            await store.resolve(other_registry.add("b", BASE))
    finally:
        await store.close()
    assert BASIC in named and other == [None]


@pytest.mark.parametrize(
    ("host", "api", "realm", "belongs"),
    [
        ("docker.io", "https://registry-1.docker.io/v2/a", "https://auth.docker.io/token", True),
        ("registry.gitlab.com", "https://registry.gitlab.com/v2/a", "https://gitlab.com/jwt/auth", True),
        ("h.example:5000", "https://h.example:5000/v2/a", "https://h.example:5001/auth", True),
        ("docker.io", "https://registry-1.docker.io/v2/a", "https://auth.docker.io.evil.example/token", False),
        ("docker.io", "https://registry-1.docker.io/v2/a", "https://io/token", False),
        ("ghcr.io", "https://ghcr.io/v2/a", "https://evilghcr.io/token", False),
        ("localhost:1", "http://localhost:1/v2/a", "http://localhost:2/token", False),
    ],
)
def test_addresses_for_tokens_that_are_of_the_host(host: str, api: str, realm: str, belongs: bool) -> None:
    assert is_trusted_realm(realm, api, RegistryCredentials(host, USER, PASSWORD)) is belongs


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("https://index.docker.io/v1/", "docker.io"),
        ("https://registry-1.docker.io/v2/library/debian", "docker.io"),
        ("GHCR.io", "ghcr.io"),
        ("http://127.0.0.1:5000/v2/a", "127.0.0.1:5000"),
    ],
)
def test_hosts_are_distinguished_from_names_in_files(name: str, host: str) -> None:
    assert parse_registry_host(name) == host


@pytest.mark.parametrize(
    "text", ["[]", "no json", '{"auths": {"h": {"auth": "!"}}}', '{"auths": {"h": {"auth": "/w=="}}}']
)
def test_broken_file_is_named_without_its_contents(tmp_path: Path, text: str) -> None:
    file = tmp_path / ".docker" / "config.json"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(SandboxError) as caught:
        CredentialFinder().find_credentials("h")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{file}: cannot be read") and len(lines) == 2 and text not in str(caught.value)


def test_password_is_never_written(log_in: LogIn) -> None:
    log_in("h.example")
    login = CredentialFinder().find_credentials("h.example")
    assert login == RegistryCredentials("h.example", USER, PASSWORD)
    assert PASSWORD not in repr(login) and ENCODED not in repr(login)
    assert PASSWORD not in logs.redact(f"sent {PASSWORD}") and ENCODED not in logs.redact(f"sent {login.authorization}")
