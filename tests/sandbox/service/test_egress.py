"""Egress on real backends: exactly what is listed can be reached, through the proxy and in no other way."""

import asyncio
import io
import logging
import os
import shlex
import socket
import subprocess
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import Any

import pytest
import pytest_asyncio
from sandbox_support import closing, needs_python

from prorl_gym import logs
from prorl_gym.sandbox.protocol import ExecResult, SandboxSpec
from prorl_gym.sandbox.service.egress_proxy import PROXY_PORT, EgressLimits, EgressProxy
from prorl_gym.sandbox.service.egress_rules import AllowList
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_python]

USE = "import tiny_tool; print(tiny_tool.answer)"


@cache
def find_pip() -> bool:
    """Whether the python3 that sandboxes over the host's /usr see has pip."""
    asked = ["/usr/bin/python3", "-I", "-c", "import pip"]
    return os.path.exists(asked[0]) and subprocess.run(asked, capture_output=True, check=False).returncode == 0


FETCH = "import sys, urllib.request as r; sys.stdout.write(r.urlopen(sys.argv[1], timeout=10).read().decode())"
TUNNEL = """
import socket, sys
line = socket.create_connection(("127.0.0.1", 3128), 10)
line.sendall(f"CONNECT {sys.argv[1]} HTTP/1.1\\r\\n\\r\\n".encode())
line.settimeout(10)
answer = line.recv(4096)
print(answer.split(b"\\r\\n")[0].decode())
if b" 200 " in answer:
    line.sendall(b"GET /tunnel HTTP/1.0\\r\\n\\r\\n")
    whole = b""
    while piece := line.recv(4096):
        whole += piece
    print(whole.rpartition(b"\\r\\n")[2].decode(), end="")
"""


WHEEL = "tiny_tool-1.0-py3-none-any.whl"


def _wheel() -> bytes:
    """A package of one line."""
    about = "tiny_tool-1.0.dist-info"
    files = {
        "tiny_tool.py": "answer = 42\n",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: tiny-tool\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{about}/RECORD"))
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel.getvalue()


async def _index(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A package index with one package; any other page says what it was asked."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    path = head.split()[1]
    host = next((line for line in head.splitlines() if line.lower().startswith("host:")), "Host: none")
    body, kind = f"{path} for {host}".encode(), b"text/plain"
    if path == "/simple/tiny-tool/":
        body, kind = f'<!DOCTYPE html><html><body><a href="/{WHEEL}">{WHEEL}</a></body></html>'.encode(), b"text/html"
    elif path == f"/{WHEEL}":
        body, kind = _wheel(), b"application/octet-stream"
    head_lines = (b"HTTP/1.1 200 OK", b"Content-Type: " + kind, b"Content-Length: %d" % len(body), b"Connection: close")
    writer.write(b"\r\n".join((*head_lines, b"", body)))
    writer.close()


@asynccontextmanager
async def index() -> AsyncIterator[int]:
    """Serve on the host's loopback; the port."""
    async with await asyncio.start_server(_index, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def listed() -> AsyncIterator[int]:
    async with index() as port:
        yield port


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unlisted() -> AsyncIterator[int]:
    async with index() as port:
        yield port


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(backend: NamespaceBackend, listed: int) -> AsyncIterator[RunningSandbox]:
    async with closing(
        await backend.start_sandbox(SandboxSpec(egress=(f"127.0.0.1:{listed}", "nowhere.invalid")))
    ) as box:
        yield box


async def python(box: RunningSandbox, code: str, *arguments: str) -> ExecResult:
    return await box.exec(["/usr/bin/python3", "-c", code, *arguments], timeout=20)


@pytest.mark.skipif(not find_pip(), reason="the host's /usr/bin/python3 has no pip")
async def test_pip_installs_from_the_listed_index_only(box: RunningSandbox, listed: int, unlisted: int) -> None:
    install = "python3 -m pip --no-cache-dir --disable-pip-version-check install --retries 0 --target"
    trust = "--trusted-host 127.0.0.1 --index-url http://127.0.0.1"
    good = f"{install} /tmp/good {trust}:{listed}/simple tiny-tool && PYTHONPATH=/tmp/good python3 -c '{USE}'"
    result = await box.exec(["sh", "-c", good], timeout=60)
    assert result.stdout.endswith(b"\n42\n"), result
    result = await box.exec(["sh", "-c", f"{install} /tmp/bad {trust}:{unlisted}/simple tiny-tool"], timeout=60)
    assert result.exit_code != 0 and b"No matching distribution" in result.stderr, result


@contextmanager
def requests() -> Iterator[list[dict[str, Any]]]:
    """What the log says of requests, as facts, each with the identity that its line has."""
    seen: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append({**vars(record)["event"], "level": record.levelname, "of": logs.current_log_context()})

    logger, keep = logging.getLogger(EgressProxy.__module__), Keep()
    before = logger.level
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    try:
        yield seen
    finally:
        logger.removeHandler(keep)
        logger.setLevel(before)


async def test_requests_are_logged_as_of_who_uses_the_sandbox(backend: NamespaceBackend, listed: int) -> None:
    """Not of who had it started: a warm one was started on behalf of another."""
    with logs.log_context(rollout_id="first", stage="init"):
        box = await backend.start_sandbox(SandboxSpec(egress=(f"127.0.0.1:{listed}",)))
    fetch = shlex.join(["/usr/bin/python3", "-c", FETCH, f"http://127.0.0.1:{listed}/"])
    async with closing(box):
        with requests() as seen:
            with logs.log_context(rollout_id="second", stage="run"):
                fetched = await python(box, FETCH, f"http://127.0.0.1:{listed}/simple/")
                await (await box.shell()).run_command(fetch, timeout=20)
            with logs.log_context(rollout_id="second", stage="eval"):
                await (await box.shell()).run_command(fetch, timeout=20)
            await box.close()  # a program may end before its request is logged
    assert fetched.stdout.decode() == f"/simple/ for Host: 127.0.0.1:{listed}", fetched
    stages = [("second", "run"), ("second", "run"), ("second", "eval")]
    assert [(line["of"]["rollout_id"], line["of"]["stage"]) for line in seen] == stages
    assert all(line["sent"] > 0 and line["received"] > 0 and line["seconds"] > 0 for line in seen)


async def test_tunnel_to_what_is_listed(box: RunningSandbox, listed: int) -> None:
    result = await python(box, TUNNEL, f"127.0.0.1:{listed}")
    assert result.stdout == b"HTTP/1.1 200 Connection established\n/tunnel for Host: none", result


async def test_tunnel_elsewhere_is_refused(box: RunningSandbox, unlisted: int) -> None:
    for place in (f"127.0.0.1:{unlisted}", "169.254.169.254:80"):
        assert (await python(box, TUNNEL, place)).stdout == b"HTTP/1.1 403 Forbidden\n"
    fetched = await python(box, FETCH, f"http://127.0.0.1:{unlisted}/")
    assert fetched.exit_code != 0 and b"403" in fetched.stderr, fetched


async def test_a_name_that_has_no_address_is_refused_in_words(box: RunningSandbox) -> None:
    result = await python(box, TUNNEL.replace('.split(b"\\r\\n")[0]', ""), "nowhere.invalid:443")
    assert b"403 Forbidden" in result.stdout, result
    assert b"nowhere.invalid:443 may not be reached: its name cannot be resolved" in result.stdout, result


async def test_there_is_no_way_around_the_proxy(box: RunningSandbox, listed: int) -> None:
    code = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
    for address in ("127.0.0.1", "10.0.0.1", "8.8.8.8"):
        assert (await python(box, code, address, str(listed))).exit_code != 0, address


async def test_without_a_list_there_is_no_proxy(backend: NamespaceBackend) -> None:
    async with closing(await backend.start_sandbox(SandboxSpec())) as box:
        assert b"PROXY" not in (await box.exec(["env"], timeout=10)).stdout.upper()
        code = f"import socket; socket.create_connection(('127.0.0.1', {PROXY_PORT}), 5)"
        assert b"ConnectionRefusedError" in (await python(box, code)).stderr


async def test_the_proxy_ends_with_its_sandbox(backend: NamespaceBackend, listed: int) -> None:
    """A tunnel that is held open is cut, and the server hears of it."""
    ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.set_result(await reader.read())
        writer.close()

    async with await asyncio.start_server(hold, "127.0.0.1", 0) as server:
        place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        box = await backend.start_sandbox(SandboxSpec(egress=(place,)))
        held = asyncio.ensure_future(python(box, TUNNEL.replace("recv(4096):", "recv(4096) or True:"), place))
        await asyncio.wait([held], timeout=0.5)
        await box.close()
        async with asyncio.timeout(10):
            assert (await ended).startswith(b"GET /tunnel")
        await asyncio.gather(held, return_exceptions=True)


class Inside:
    """A program in the sandbox, played by the test: connects to where a sandbox's proxy would listen."""

    def __init__(self, bounds: EgressLimits, allowed: list[str]) -> None:
        self.proxy = EgressProxy("box-1", AllowList.parse(allowed), bounds)

    async def __aenter__(self) -> "Inside":
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        await self.proxy.serve(listener)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.proxy.close()

    async def ask(self, head: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head.encode())
        try:
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()


async def test_requests_and_bytes_are_counted(listed: int) -> None:
    with requests() as seen:
        async with Inside(EgressLimits(), [f"127.0.0.1:{listed}"]) as inside:
            answer = await inside.ask(f"GET http://127.0.0.1:{listed}/x HTTP/1.1\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 OK")
            await inside.ask("GET http://10.0.0.1/ HTTP/1.1\r\n\r\n")
    first, second = seen
    assert [first[name] for name in ("sandbox_id", "method", "port", "outcome")] == ["box-1", "GET", listed, "allowed"]
    assert first["received"] == len(answer) and first["sent"] > 0
    assert [second[name] for name in ("host", "outcome", "received", "level")] == ["10.0.0.1", "refused", 0, "WARNING"]


async def test_traffic_is_bounded(listed: int) -> None:
    with requests() as seen:
        async with Inside(EgressLimits(total_bytes=10), [f"127.0.0.1:{listed}"]) as inside:
            assert await inside.ask(f"GET http://127.0.0.1:{listed}/x HTTP/1.1\r\n\r\n") == b""
    assert "used up" in seen[0]["detail"]


async def test_requests_are_bounded() -> None:
    """Each is a line in the log, which a program inside must not be able to fill the disk with."""
    with requests() as seen:
        async with Inside(EgressLimits(requests=1), []) as inside:
            assert (await inside.ask("GET http://10.0.0.1/ HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 403")
            assert (await inside.ask("GET http://10.0.0.1/ HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 503")
    assert len(seen) == 1


async def test_connections_are_bounded(listed: int) -> None:
    async with Inside(EgressLimits(connections=1), [f"127.0.0.1:{listed}"]) as inside:
        _, idle = await asyncio.open_connection("127.0.0.1", inside.port)
        assert (await inside.ask("")).startswith(b"HTTP/1.1 503")
        idle.close()


async def test_a_server_that_is_down_is_named() -> None:
    async with index() as port:
        pass
    with requests() as seen:
        async with Inside(EgressLimits(), [f"127.0.0.1:{port}"]) as inside:
            assert (await inside.ask(f"GET http://127.0.0.1:{port}/ HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 502")
    assert [line["outcome"] for line in seen] == ["unreachable"]


async def test_nonsense_and_endless_heads_are_answered() -> None:
    with requests() as seen:
        async with Inside(EgressLimits(), []) as inside:
            assert (await inside.ask("hello\r\n\r\n")).startswith(b"HTTP/1.1 400")
            assert (await inside.ask("GET http://a/ HTTP/1.1\r\nX: " + "x" * 40_000)).startswith(b"HTTP/1.1 431")
    assert [line["outcome"] for line in seen] == ["malformed"] * 2
