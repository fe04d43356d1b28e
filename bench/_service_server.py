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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from _load import percentile
from _programs import BENCH, ask, read_line, running

from prorl_gym.client import Client
from prorl_gym.environments.protocol import Episode, RunContext
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.scheduling.model_source import ModelPolicySource
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.testing.rollout.fake_rollout import Script, ScriptedEnvironment

Kind = Literal["noop", "queue", "cancel", "echo"]
TOKEN = "bench-token-of-no-worth"
SAMPLE_SECONDS = 0.005
"""Between two looks at the event loop's lag."""


@dataclass(frozen=True, slots=True)
class Health:
    """How the server was since it was asked before."""

    lag_p99_ms: float
    rss_mb: float


class Server:
    """The process, from outside."""

    def __init__(self, child: asyncio.subprocess.Process, url: str, log: Path) -> None:
        self.url = url
        self.pid = child.pid
        self._child = child
        self._log = log

    def client(self) -> Client:
        return Client(self.url, token=TOKEN, retry_seconds=0.0)

    async def health(self) -> Health:
        """Ask how it is, since it was asked before."""
        return Health(**json.loads(await ask(self._child, "", self._log)))


@asynccontextmanager
async def running_server(kind: Kind, directory: Path, *arguments: str) -> AsyncGenerator[Server]:
    log = directory / f"{kind}.log"
    argv = [sys.executable, str(BENCH / "_service_server.py"), kind, str(directory), *arguments]
    async with running(argv, log) as child:
        yield Server(child, await read_line(child, log), log)


def require_completed(rollout: Rollout) -> Rollout:
    """Return it. Raises ``RuntimeError`` if it did not complete: the figure would be worthless."""
    if rollout.outcome.status != "completed" or not rollout.segments:
        raise RuntimeError(f"rollout {rollout.rollout_id}: {rollout.outcome}")
    return rollout


async def submit_and_wait(client: Client, request: RolloutRequest) -> Rollout:
    await client.submit(request)
    return require_completed(await client.result(request.rollout_id))


class Busy(ScriptedEnvironment):
    """Its agent leaves processes behind, one of them in a session of its own, and then asks the model."""

    async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
        box = await context.leases.get_agent_sandbox(SandboxSpec())
        shell = await box.shell()
        await shell.run_command(f"sleep {task.id} & setsid -f sleep {task.id}; echo up", timeout=60)
        await context.policy.start_conversation(episode.messages, ())


@asynccontextmanager
async def engines_at(url: str) -> AsyncGenerator[ModelPolicySource, None]:
    async with EnginePool("policy") as pool:
        pool.add_engine(VllmEngine("silent", url, VllmOptions(model="m", vocab_size=1000)))
        yield ModelPolicySource(pool, load_codec("small"))


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

    def read(self) -> Health:
        seen, self.seen = self.seen, []
        rss = int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) / 1024
        return Health(percentile(seen, 99) if len(seen) > 1 else 0.0, rss)


async def _serve(kind: Kind, directory: Path, arguments: list[str]) -> None:
    from _service_work import CANCELLED, RUNNING, RecordPolicySource, TimedEnvironment

    from prorl_gym.api.app import create_app
    from prorl_gym.api.app_context import AppContext
    from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
    from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
    from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
    from prorl_gym.rollout.service import RolloutService
    from prorl_gym.sandbox.backend_selection import open_backend
    from prorl_gym.sandbox.config import SandboxConfig
    from prorl_gym.testing.rollout.fake_rollout import EmptyBackend, environment_lookup

    ledger = await SqliteLedger.open(LedgerConfig(path=directory / f"{kind}.sqlite"))
    if kind == "cancel":
        async with engines_at(arguments[0]) as policies:
            backend = await open_backend(SandboxConfig(backend="userns", warm=0, scratch=directory / "scratch"))
            runner = InProcessRunner(environment_lookup(Busy()), policies, backend, RunnerConfig(run=CANCELLED))
            service = RolloutService(ledger, runner)
            await service.start()
            await _answer(create_app(AppContext(service), TOKEN))
            service.begin_shutdown()
            await service.stop(drain=False)
            await backend.close()
        return
    config = RunnerConfig(run=RUNNING) if kind == "queue" else RunnerConfig()
    find: Any = environment_lookup(TimedEnvironment())  # pyright: ignore[reportArgumentType]
    service = RolloutService(ledger, InProcessRunner(find, RecordPolicySource(), EmptyBackend(), config))
    await service.start()
    serving = AppContext(service)
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
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        while await lines.readline():
            print(json.dumps(asdict(lag.read())), flush=True)
        server.force_exit = server.should_exit = True
        await answering


if __name__ == "__main__":
    kind: Any = sys.argv[1]
    asyncio.run(_answer(_echo()) if kind == "echo" else _serve(kind, Path(sys.argv[2]), sys.argv[3:]))
