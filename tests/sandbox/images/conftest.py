"""Image stores and registries for the tests."""

import os
import shutil
import subprocess
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web
from images_support import FakeRegistry
from sandbox_support import closing

from prorl_gym.free_ports import free_ports
from prorl_gym.sandbox.config import ImagesConfig
from prorl_gym.sandbox.images.registry.http import Retries
from prorl_gym.sandbox.images.store import ImageStore


@pytest.fixture
def place(ground: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of this test on a local disk that the sandboxes' uid can reach."""
    path = ground / f"images-{abs(hash(request.node.nodeid)):x}"
    path.mkdir(mode=0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def images_config(place: Path) -> ImagesConfig:
    return ImagesConfig(directory=place / "store", durable=False, jobs=2)


@pytest.fixture
def naps() -> list[float]:
    """The waits that a back-off asked for; none of them is waited."""
    return []


@pytest_asyncio.fixture
async def store(images_config: ImagesConfig, naps: list[float]) -> AsyncIterator[ImageStore]:
    async def nap(seconds: float) -> None:
        naps.append(seconds)

    async with closing(ImageStore(images_config, Retries(attempts=4, sleep=nap))) as store:
        yield store


@asynccontextmanager
async def serving_registry() -> AsyncGenerator[FakeRegistry]:
    registry = FakeRegistry()
    app = web.Application()
    app.router.add_get("/{path:.*}", registry.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    registry.url = f"http://{host}:{port}"
    try:
        yield registry
    finally:
        await runner.cleanup()


@pytest_asyncio.fixture
async def fake_registry() -> AsyncIterator[FakeRegistry]:
    async with serving_registry() as registry:
        yield registry


@pytest_asyncio.fixture
async def other_registry() -> AsyncIterator[FakeRegistry]:
    """Another port, which on the loopback is another host."""
    async with serving_registry() as registry:
        yield registry


@pytest.fixture
def real_registry(place: Path) -> Iterator[str]:
    """Debian's docker-registry on a port of its own; yields its URL."""
    program = shutil.which("docker-registry")
    if program is None:
        if "apptainer" in os.environ.get("PRORL_GYM_REQUIRE", ""):
            pytest.fail("docker-registry is not installed; run .ci/image-tools", pytrace=False)
        pytest.skip("docker-registry is not installed (.ci/image-tools)")
    (port,) = free_ports(1)
    settings = place / "registry.yml"
    settings.write_text(
        f"version: 0.1\nlog: {{level: info}}\nstorage: {{filesystem: {{rootdirectory: {place}/registry}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    log = place / "registry.log"
    with log.open("wb") as file:
        process = subprocess.Popen([program, "serve", settings], stderr=subprocess.PIPE, stdout=file)
    assert process.stderr is not None
    try:
        said = next((line for line in process.stderr if b"listening on" in line), b"")
        assert said, "docker-registry ended before it listened"
        drain = threading.Thread(target=process.stderr.read)  # its log must not fill the pipe
        drain.start()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
    drain.join()
