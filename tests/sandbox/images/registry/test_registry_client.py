"""A registry that is slow, strict, torn or lying, and how it is asked again."""

import hashlib
from pathlib import Path

import pytest
from aiohttp import web
from images_support import FakeRegistry, digest_of, entry, layer

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.images.registry.oci_format import MAX_MANIFEST_BYTES
from prorl_gym.sandbox.images.store import ImageStore

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
    with pytest.raises(SandboxError, match=f"HTTP {status}") as caught:
        await store.resolve(fake_registry.name("a"))
    assert caught.value.kind is FailureKind.IMAGE_MISSING


async def test_download_continues_where_it_stopped(store: ImageStore, fake_registry: FakeRegistry) -> None:
    name = fake_registry.add("a", BASE)
    store.layers.make_directories()
    part = store.layers.directory / "blobs" / f"{digest_of(BASE).replace(':', '-')}.part"
    part.write_bytes(BASE[:100])
    await store.resolve(name)
    assert fake_registry.ranges == ["bytes=100-"]
    assert not part.exists()


async def test_registry_that_cannot_continue_is_asked_for_all(store: ImageStore, fake_registry: FakeRegistry) -> None:
    name = fake_registry.add("a", BASE)
    store.layers.make_directories()
    (store.layers.directory / "blobs" / f"{digest_of(BASE).replace(':', '-')}.part").write_bytes(BASE[:100])
    fake_registry.faults.append(of_blobs(lambda: web.Response(body=BASE)))
    assert (await store.resolve(name)).lower_dirs


async def test_torn_rest_of_an_earlier_download_is_forgotten(store: ImageStore, fake_registry: FakeRegistry) -> None:
    name = fake_registry.add("a", BASE)
    store.layers.make_directories()
    (store.layers.directory / "blobs" / f"{digest_of(BASE).replace(':', '-')}.part").write_bytes(bytes(100))
    assert (await store.resolve(name)).lower_dirs
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
    with pytest.raises(SandboxError, match=said) as caught:
        await store.resolve(fake_registry.add("a", BASE))
    assert caught.value.kind is FailureKind.IMAGE_BROKEN
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
    from prorl_gym.sandbox.images.config import ImagesConfig

    fake_registry.add("library/debian", BASE)
    store = ImageStore(ImagesConfig(directory=place / "store", durable=False, mirrors={"docker.io": fake_registry.url}))
    try:
        assert (await store.resolve("docker://debian")).lower_dirs
    finally:
        await store.close()
