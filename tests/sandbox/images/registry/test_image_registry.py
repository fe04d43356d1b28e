"""Registries: where a password comes from, and the only places it goes to; slow, strict, torn and lying ones."""

import hashlib
import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from images_support import FakeRegistry, digest_of, entry, layer
from sandbox_support import closing, fails_as

from prorl_gym import logs
from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.left_out import left_out_counts
from prorl_gym.sandbox.config import ImagesConfig
from prorl_gym.sandbox.images.registry.http import (
    RegistryCredentials,
    find_credentials,
    is_trusted_realm,
    parse_registry_host,
)
from prorl_gym.sandbox.images.registry.oci_format import (
    MAX_MANIFEST_BYTES,
    ImageConfig,
    Index,
    Manifest,
    RegistryReference,
    parse_model,
)
from prorl_gym.sandbox.images.store import ImageStore

SMALL_BASE = layer(entry("etc/base", b"base"))
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


@pytest.mark.parametrize("file", [".docker/config.json", ".apptainer/docker-config.json"])
async def test_password_of_a_file_is_sent_when_it_is_asked_for(
    store: ImageStore, fake_registry: FakeRegistry, log_in: LogIn, file: str
) -> None:
    log_in(fake_registry.host, file)
    sent = demand(fake_registry, 'Basic realm="registry"', BASIC)
    assert (await store.resolve(fake_registry.add("a", SMALL_BASE))).lower_dirs
    assert sent[0] is None and set(sent[1:]) == {BASIC} and len(sent) > 3  # asked for once, then known


async def test_token_is_granted_for_a_password(store: ImageStore, fake_registry: FakeRegistry, log_in: LogIn) -> None:
    log_in(f"https://{fake_registry.host}/v2/")
    asked = grant_tokens(fake_registry)
    sent = demand(fake_registry, f'Bearer realm="{fake_registry.url}/token",service="s"', "Bearer good")
    assert (await store.resolve(fake_registry.add("a", SMALL_BASE))).lower_dirs
    assert asked == [BASIC]
    assert BASIC not in sent


@pytest.mark.parametrize(
    ("login", "sent"),
    [("none", [None]), ("wrong", [None, BASIC]), ("of another registry", [None]), ("of netrc", [None])],
)
async def test_without_a_login_the_fix_is_named(
    store: ImageStore,
    fake_registry: FakeRegistry,
    other_registry: FakeRegistry,
    log_in: LogIn,
    tmp_path: Path,
    login: str,
    sent: list[str | None],
) -> None:
    """A wrong password is tried once; one of another host, or of netrc, never."""
    if login == "wrong":
        log_in(fake_registry.host)
    elif login == "of another registry":
        log_in(other_registry.host)
    elif login == "of netrc":
        (tmp_path / ".netrc").write_text(f"default login {USER} password secret-of-netrc\n")
        (tmp_path / ".netrc").chmod(0o600)
    seen = demand(fake_registry, 'Basic realm="registry"', "Basic other" if login == "wrong" else BASIC)
    with fails_as(FailureKind.IMAGE_MISSING, match=r"HTTP 401(?s:.*)docker login"):
        await store.resolve(fake_registry.add("a", SMALL_BASE))
    assert seen == sent


async def test_password_does_not_follow_a_redirect(
    store: ImageStore, fake_registry: FakeRegistry, other_registry: FakeRegistry, log_in: LogIn
) -> None:
    log_in(fake_registry.host)
    sent = demand(fake_registry, 'Basic realm="registry"', BASIC)
    elsewhere: list[str | None] = []

    def move(request: web.Request) -> web.StreamResponse | None:
        if not request.path.endswith(digest_of(SMALL_BASE)):
            return None
        return web.Response(status=307, headers={"Location": f"{other_registry.url}{request.path}?signed=a%2Fb"})

    def serve(request: web.Request) -> web.StreamResponse | None:
        elsewhere.extend([request.headers.get("Authorization"), request.raw_path.rpartition("?")[2]])
        return None

    fake_registry.faults.append(move)
    other_registry.faults.append(serve)
    other_registry.add("a", SMALL_BASE)
    assert (await store.resolve(fake_registry.add("a", SMALL_BASE))).lower_dirs
    assert BASIC in sent and elsewhere == [None, "signed=a%2Fb"]


async def test_password_is_not_sent_to_a_strangers_address_for_tokens(
    store: ImageStore, fake_registry: FakeRegistry, other_registry: FakeRegistry, log_in: LogIn
) -> None:
    log_in(fake_registry.host)
    asked = grant_tokens(other_registry)
    sent = demand(fake_registry, f'Bearer realm="{other_registry.url}/token"', "Bearer good")
    with pytest.raises(SandboxError, match="HTTP 401"):
        await store.resolve(fake_registry.add("a", SMALL_BASE))
    assert asked == [None] and BASIC not in sent


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
    async with closing(ImageStore(images_config.model_copy(update={"login_host": fake_registry.host}))) as store:
        assert (await store.resolve(fake_registry.add("a", SMALL_BASE))).lower_dirs
        with pytest.raises(SandboxError, match="HTTP 401"):
            await store.resolve(other_registry.add("b", SMALL_BASE))
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
        find_credentials("h")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{file}: cannot be read") and len(lines) == 2 and text not in str(caught.value)


def test_password_is_never_written(log_in: LogIn) -> None:
    log_in("h.example")
    login = find_credentials("h.example")
    assert login == RegistryCredentials("h.example", USER, PASSWORD)
    assert PASSWORD not in repr(login) and ENCODED not in repr(login)
    assert PASSWORD not in logs.redact(f"sent {PASSWORD}") and ENCODED not in logs.redact(f"sent {login.authorization}")


BASE = layer(entry("etc/base", bytes(range(256)) * 40))


def times(count: int, fault: object) -> object:
    """Misbehave so often, then no more."""
    left = [count]

    def sometimes(request: web.Request) -> web.StreamResponse | None:
        if left[0] and (answer := fault(request)) is not None:  # type: ignore[operator]
            left[0] -= 1
            return answer
        return None

    return sometimes


def of_blobs(answer: object) -> object:
    return lambda request: answer() if request.path.endswith(digest_of(BASE)) else None  # type: ignore[operator]


async def test_too_many_requests_are_repeated_after_the_registrys_delay(
    store: ImageStore, fake_registry: FakeRegistry, naps: list[float]
) -> None:
    fake_registry.faults.append(times(2, lambda _: web.Response(status=429, headers={"Retry-After": "7"})))
    assert (await store.resolve(fake_registry.add("a", BASE))).lower_dirs
    assert naps == [7.0, 7.0]


async def test_long_waits_are_logged(
    store: ImageStore, fake_registry: FakeRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    waits = iter(("1", "7"))
    fake_registry.faults.append(times(2, lambda _: web.Response(status=429, headers={"Retry-After": next(waits)})))
    image = fake_registry.add("a", BASE)
    await store.resolve(image)
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("prorl_gym")]
    assert logged == [f"{image}: too many requests; next attempt in 7 s"]


async def test_waits_grow_where_the_registry_names_no_delay(
    store: ImageStore, fake_registry: FakeRegistry, naps: list[float]
) -> None:
    fake_registry.faults.append(times(3, lambda _: web.Response(status=503)))
    await store.resolve(fake_registry.add("a", BASE))
    assert [0.5 <= naps[0] <= 1, 1 <= naps[1] <= 2, 2 <= naps[2] <= 4] == [True] * 3


async def test_registry_that_stays_busy_is_named(
    store: ImageStore, fake_registry: FakeRegistry, naps: list[float]
) -> None:
    fake_registry.faults.append(lambda _: web.Response(status=429))
    with pytest.raises(SandboxError, match=r"too many requests \(4 attempts\)") as caught:
        await store.resolve(fake_registry.add("a", BASE))
    assert (caught.value.kind, len(naps)) == (FailureKind.SANDBOX_UNAVAILABLE, 3)


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_unknown_image_is_missing(store: ImageStore, fake_registry: FakeRegistry, status: int) -> None:
    fake_registry.faults.append(lambda _: web.Response(status=status))
    with fails_as(FailureKind.IMAGE_MISSING, match=f"HTTP {status}"):
        await store.resolve(fake_registry.name("a"))


@pytest.fixture
def part(store: ImageStore) -> Path:
    """Where a download that was cut off has left its beginning."""
    store.layers.make_directories()
    path = store.layers.directory / "blobs" / f"{digest_of(BASE).replace(':', '-')}.part"
    path.write_bytes(BASE[:100])
    return path


async def test_download_continues_where_it_stopped(store: ImageStore, fake_registry: FakeRegistry, part: Path) -> None:
    await store.resolve(fake_registry.add("a", BASE))
    assert fake_registry.ranges == ["bytes=100-"]
    assert not part.exists()  # noqa: ASYNC240


@pytest.mark.usefixtures("part")
async def test_registry_that_cannot_continue_is_asked_for_all(store: ImageStore, fake_registry: FakeRegistry) -> None:
    fake_registry.faults.append(of_blobs(lambda: web.Response(body=BASE)))
    assert (await store.resolve(fake_registry.add("a", BASE))).lower_dirs


async def test_torn_rest_of_an_earlier_download_is_forgotten(
    store: ImageStore, fake_registry: FakeRegistry, part: Path
) -> None:
    part.write_bytes(bytes(100))  # noqa: ASYNC240
    assert (await store.resolve(fake_registry.add("a", BASE))).lower_dirs
    assert fake_registry.fetched(BASE) == 2


async def test_broken_connection_is_repeated(store: ImageStore, fake_registry: FakeRegistry) -> None:
    fake_registry.faults.append(times(1, of_blobs(lambda: web.Response(body=BASE[:100]))))
    assert (await store.resolve(fake_registry.add("a", BASE))).lower_dirs
    assert fake_registry.ranges == ["bytes=100-"]


@pytest.mark.parametrize(
    ("lie", "said"),
    [(BASE[:-1] + b"x", "has other contents"), (BASE + b"more", "is longer than")],
    ids=["changed", "longer"],
)
async def test_lying_blob_is_refused(store: ImageStore, fake_registry: FakeRegistry, lie: bytes, said: str) -> None:
    fake_registry.faults.append(of_blobs(lambda: web.Response(body=lie)))
    with fails_as(FailureKind.IMAGE_BROKEN, match=said):
        await store.resolve(fake_registry.add("a", BASE))
    assert store.layers.list_layers() == []


async def test_lying_manifest_is_refused(store: ImageStore, fake_registry: FakeRegistry) -> None:
    fake_registry.add("a", BASE)
    wanted = f"sha256:{hashlib.sha256(b'other').hexdigest()}"
    fake_registry.manifests[f"a:{wanted}"] = fake_registry.manifests["a:latest"]
    with pytest.raises(SandboxError, match="do not have the digest"):
        await store.resolve(f"docker://{fake_registry.host}/a@{wanted}")


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b"not json", b'{"config": {}, "layers": []}', b'{"manifests": []}'], ids=repr
)
async def test_nonsense_manifest_is_refused(store: ImageStore, fake_registry: FakeRegistry, body: bytes) -> None:
    fake_registry.manifests["a:latest"] = body
    with pytest.raises(SandboxError) as caught:
        await store.resolve(fake_registry.name("a"))
    assert caught.value.kind in (FailureKind.IMAGE_BROKEN, FailureKind.IMAGE_MISSING)


async def test_endless_manifest_is_refused(store: ImageStore, fake_registry: FakeRegistry) -> None:
    fake_registry.manifests["a:latest"] = bytes(MAX_MANIFEST_BYTES + 1)
    with pytest.raises(SandboxError, match="longer than"):
        await store.resolve(fake_registry.name("a"))


async def test_anonymous_token_is_asked_for_once(store: ImageStore, fake_registry: FakeRegistry) -> None:
    granted: list[str] = []

    def guard(request: web.Request) -> web.StreamResponse | None:
        if request.path == "/token":
            granted.append(request.query["scope"])
            return web.json_response({"token": "t0"})
        if request.headers.get("Authorization") == "Bearer t0":
            return None
        challenge = f'Bearer realm="{fake_registry.url}/token",service="s",scope="repository:a:pull"'
        return web.Response(status=401, headers={"WWW-Authenticate": challenge})

    fake_registry.faults.append(guard)
    assert (await store.resolve(fake_registry.add("a", BASE))).lower_dirs
    assert granted == ["repository:a:pull"]


async def test_token_is_not_asked_for_at_a_strangers(store: ImageStore, fake_registry: FakeRegistry) -> None:
    challenge = 'Bearer realm="http://169.254.169.254/latest",service="s"'
    fake_registry.faults.append(lambda _: web.Response(status=401, headers={"WWW-Authenticate": challenge}))
    with pytest.raises(SandboxError, match="HTTP 401"):
        await store.resolve(fake_registry.add("a", BASE))


async def test_mirror_is_asked_in_place_of_the_host(fake_registry: FakeRegistry, place: Path) -> None:
    fake_registry.add("library/debian", BASE)
    async with closing(
        ImageStore(ImagesConfig(directory=place / "store", durable=False, mirrors={"docker.io": fake_registry.url}))
    ) as store:
        assert (await store.resolve("docker://debian")).lower_dirs


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("docker://debian", "docker://docker.io/library/debian:latest"),
        ("docker://team/x:1", "docker://docker.io/team/x:1"),
        ("docker://ghcr.io/a/b/c:v1.2", "docker://ghcr.io/a/b/c:v1.2"),
        ("docker://localhost:5000/a", "docker://localhost:5000/a:latest"),
        (f"docker://h.io/a:tag@sha256:{'0' * 64}", f"docker://h.io/a@sha256:{'0' * 64}"),
    ],
)
def test_references_are_read_as_elsewhere(text: str, read: str) -> None:
    assert str(RegistryReference.parse(text)) == read


@pytest.mark.parametrize(
    "text", ["docker://", "docker://a/../b", "docker://a:b:c", "docker://a@sha256:0", "docker://-a"]
)
def test_wrong_references_are_refused(text: str) -> None:
    with pytest.raises(SandboxError, match="is not a reference"):
        RegistryReference.parse(text)


def test_variables_of_an_image_are_those_that_a_program_can_have() -> None:
    settings = ImageConfig.model_validate({"config": {"Env": ["A=1=2", "B=\0", "=x", "C", "D="]}})
    assert settings.environment == (("A", "1=2"), ("D", ""))


DESCRIPTOR = {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": f"sha256:{'0' * 64}", "size": 3}
SPECIFIED = {
    Manifest: {"schemaVersion": 2, "config": DESCRIPTOR, "layers": [DESCRIPTOR | {"annotations": {"a": "b"}}]},
    Index: {"schemaVersion": 2, "manifests": [DESCRIPTOR | {"platform": {"os": "linux", "variant": "v8"}}]},
    ImageConfig: {
        "created": "2026-01-01T00:00:00Z",
        "architecture": "amd64",
        "os": "linux",
        "config": {"User": "alice", "Env": ["A=b"], "WorkingDir": "/w", "Labels": {"a": "b"}},
        "rootfs": {"diff_ids": [], "type": "layers"},
        "history": [{"created_by": "sh"}],
    },
}
"""After the examples of OCI's image specification."""


@pytest.mark.parametrize("model", SPECIFIED)
def test_fields_that_the_specification_lacks_are_counted(model: type[Manifest | Index | ImageConfig]) -> None:
    before = left_out_counts()["registry"]
    parse_model(model, json.dumps(SPECIFIED[model]).encode(), "it")
    assert left_out_counts()["registry"] == before
    text = json.dumps(SPECIFIED[model]).replace('"mediaType"', '"encryption": "x", "mediaType"')
    parse_model(model, text.replace('"WorkingDir"', '"Root": "/r", "WorkingDir"').encode(), "it")
    assert left_out_counts()["registry"] == before + {Manifest: 2, Index: 1, ImageConfig: 1}[model]
