"""A service in a process of its own, as ``prorl-gym serve`` runs it; only the rollouts are those of the bench.

``Server`` starts it and talks to it: it says where it listens, and on every line of its input how late its event loop
was since the line before, and how much memory it holds. Run as a program this module is that process.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal

from prorl_gym.client import Client

Kind = Literal["noop", "queue", "cancel", "echo"]
TOKEN = "bench-token-of-no-worth"
SAMPLE_SECONDS = 0.005
"""Between two looks at the event loop's lag."""


@dataclass(frozen=True, slots=True)
class Health:
    """How the server was since it was asked before."""

    lag_p99_ms: float
    lag_max_ms: float
    samples: int
    rss_mb: float
    """Resident set."""
    peak_mb: float


class Server:
    """The process, from outside."""

    def __init__(self, child: asyncio.subprocess.Process, url: str) -> None:
        self.url = url
        self.pid = child.pid
        self._child = child

    def client(self) -> Client:
        """Return a client of it."""
        return Client(self.url, token=TOKEN, retry_seconds=0.0)

    async def health(self) -> Health:
        """Ask how it is, since it was asked before.

        Raises:
            RuntimeError: it died.
        """
        assert self._child.stdin is not None
        self._child.stdin.write(b"\n")
        return Health(**await _said(self._child))


@asynccontextmanager
async def running_server(kind: Kind, directory: Path, *arguments: str) -> AsyncGenerator[Server, None]:
    """Run a server for the block."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, kind, str(directory), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Server(child, (await _said(child))["url"])
    finally:
        assert child.stdin is not None
        child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), 30)
        except TimeoutError:
            child.kill()
            await child.wait()


async def _said(child: asyncio.subprocess.Process) -> dict[str, Any]:
    assert child.stdout is not None
    line = await asyncio.wait_for(child.stdout.readline(), 60)
    if not line:
        raise RuntimeError("the server of the bench died; its complaint is above")
    return json.loads(line)


class _Lag:
    """Asks the loop to be called at a time, over and over, and notes how late that was."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self._ask()

    def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + SAMPLE_SECONDS
        loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        self.seen.append(max(0.0, asyncio.get_running_loop().time() - due) * 1000)
        self._ask()

    def taken(self) -> Health:
        seen, self.seen = self.seen, []
        status = Path("/proc/self/status").read_text()
        rss, peak = (int(status.split(f"{key}:")[1].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))
        p99 = quantiles(seen, n=100)[98] if len(seen) > 1 else 0.0
        return Health(p99, max(seen, default=0.0), len(seen), rss, peak)


async def _backend(scratch: Path) -> Any:
    from prorl_gym.sandbox.backend_selection import open_backend
    from prorl_gym.sandbox.config import SandboxConfig

    return await open_backend(SandboxConfig(backend="userns", warm=0, scratch=scratch))


async def _serve(kind: Kind, directory: Path, arguments: list[str]) -> None:
    from _service_cancel import Busy, engines_at
    from _service_work import CANCELLED, RUNNING, RecordPolicySource, TimedEnvironment

    from prorl_gym.api.app import create_app
    from prorl_gym.api.app_context import AppContext
    from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
    from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
    from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
    from prorl_gym.rollout.service import RolloutService
    from prorl_gym.testing.rollout.fake_rollout import EmptyBackend, environment_lookup

    ledger = await SqliteLedger.open(LedgerConfig(path=directory / f"{kind}.sqlite"))
    if kind == "cancel":
        async with engines_at(arguments[0]) as policies:
            backend = await _backend(directory / "scratch")
            runner = InProcessRunner(environment_lookup(Busy()), policies, backend, RunnerConfig(run=CANCELLED))
            service = RolloutService(ledger, runner)
            await service.start()
            await _answer(create_app(AppContext.create(service), TOKEN))
            service.begin_shutdown()
            await service.stop(drain=False)
            await backend.close()
        return
    config = RunnerConfig(run=RUNNING) if kind == "queue" else RunnerConfig()
    find: Any = environment_lookup(TimedEnvironment())  # pyright: ignore[reportArgumentType]
    service = RolloutService(ledger, InProcessRunner(find, RecordPolicySource(), EmptyBackend(), config))
    await service.start()
    serving = AppContext.create(service)
    async with serving.history:
        await _answer(create_app(serving, TOKEN))
    service.begin_shutdown()
    await service.stop(drain=False)


def _echo() -> Any:
    """Return the least that any service on this framework does: take a body, give 20 kB back."""
    from _service_work import TOKENS
    from fastapi import FastAPI, Request
    from starlette.responses import Response

    app = FastAPI()
    record = b"[" + b",".join(b"-0.12345678901234567" for _ in range(TOKENS)) + b"]"

    @app.post("/echo")
    async def echo(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        await request.body()
        return Response(record, media_type="application/json")

    return app


async def _answer(app: Any) -> None:
    """Answer until the input ends."""
    from prorl_gym.api.http.http_server import HttpServer
    from prorl_gym.api.service_process import bind_socket

    with bind_socket("127.0.0.1", 0) as listener:
        listener.listen()
        server = HttpServer(app)
        answering = asyncio.create_task(server.serve(sockets=[listener]))
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(0, "rb")
        )
        lag = _Lag()
        print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
        while await lines.readline():
            health = lag.taken()
            print(json.dumps({name: getattr(health, name) for name in Health.__slots__}), flush=True)
        server.force_exit = server.should_exit = True
        await answering


if __name__ == "__main__":
    kind: Any = sys.argv[1]
    asyncio.run(_answer(_echo()) if kind == "echo" else _serve(kind, Path(sys.argv[2]), sys.argv[3:]))
