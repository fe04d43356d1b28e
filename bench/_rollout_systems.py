"""The systems that ``bench peers`` measures: each starts what it needs and makes one rollout, or a load of them."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from _rollout_load import Load, Rollout, Seen, put_load
from _rollout_work import (
    ANSWER,
    CALLERS,
    COMMANDS,
    ENGINE_SECONDS,
    PREPARE,
    QUESTION,
    QUESTION_WORK,
    SCALE,
    SHELL_WORK,
    TEST_COMMAND,
    TESTS,
    WORKS,
    Sizes,
    Work,
    project_files,
)

from prorl_gym.cli.demo.stack import HOST, free_ports
from prorl_gym.client import Client
from prorl_gym.errors import ProrlError
from prorl_gym.records import RolloutRequest
from prorl_gym.sandbox.images.config import default_cache
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

BENCH = Path(__file__).resolve().parent
READY_SECONDS = 180.0
"""Longest start of a system."""
_STOP_SECONDS = 30.0
INSTALL = "bench/peers-environment"
BWRAP_OPTIONS = (
    *("--unshare-all", "--uid", "61100", "--gid", "61100", "--die-with-parent", "--clearenv"),
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
    *("--symlink", "usr/bin", "/bin", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
)
"""The isolation that a user would write around the tool: all namespaces, a read-only /usr, no network, an own uid."""

PutLoad = Callable[[Load], Awaitable[Seen]]


class BenchRefusedError(ProrlError):
    """The figures would be worthless."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where systems are started."""

    engine: str
    """Address of the engine, up to /v1."""
    directory: Path


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to make one kind of rollout."""

    name: str
    work: Work
    sizes: Sizes
    calls: int
    """Calls that the engine counts for each rollout."""
    once: bool = False
    """Too slow to be measured in every run."""

    @classmethod
    def of(cls, name: str, work: Work, factor: float = 1.0) -> "Arm":
        """Return an arm with the work's sizes and calls."""
        return cls(name, work, work.sizes.scaled(factor), work.calls)


@dataclass(frozen=True, slots=True)
class System:
    """What is started together, and the arms that it serves in this order."""

    arms: tuple[Arm, ...]
    start: Callable[[Site], AbstractAsyncContextManager[Sequence[PutLoad]]]
    missing: str = ""
    """Why it is left out here, and the command that installs it."""


# --- processes --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(
    argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Run a program for the block: its input stays open until the end, which is the sign to stop."""
    with log.open("ab") as errors:
        child = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=None if environment is None else {**os.environ, **environment},
            limit=1 << 24,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        assert child.stdin is not None
        child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), _STOP_SECONDS)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()


async def read_line(child: asyncio.subprocess.Process, log: Path, seconds: float) -> str:
    """Return the next line that a program prints.

    Raises:
        BenchRefusedError: it ended, or said nothing for so long.
    """
    assert child.stdout is not None
    try:
        line = await asyncio.wait_for(child.stdout.readline(), seconds)
    except TimeoutError:
        line = b""
    if not line:
        raise BenchRefusedError(f"A program of the bench ended or said nothing for {seconds:g} s.", _tail(log))
    return line.decode().strip()


def _tail(log: Path) -> str:
    return f"Its last words: {log.read_text(errors='replace')[-1500:]}"


@asynccontextmanager
async def running_engine(directory: Path) -> AsyncGenerator[tuple[str, int]]:
    """Run the engine of all systems; yields its address and its pid."""
    log = directory / "engine.log"
    argv = [sys.executable, str(BENCH / "_rollout_engine.py"), str(write_rows(directory))]
    async with running(argv, log) as child:
        yield await read_line(child, log, READY_SECONDS), child.pid


def write_rows(directory: Path) -> Path:
    """Write the rows that an engine plays; return where."""
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps(gym_row(work)) + "\n" for work in WORKS))
    return rows


def gym_row(work: Work) -> dict[str, Any]:
    """Return a row of ours as it is posted to ``/run``, without its agent."""
    prompt = [{"role": "user", "content": work.row["question"]}]
    return {"responses_create_params": {"input": prompt}, "environment": work.environment, "task": work.row}


async def wait_answering(url: str, child: asyncio.subprocess.Process, log: Path) -> None:
    """Wait until an address answers 200.

    Raises:
        BenchRefusedError: the program behind it ended, or the time is up.
    """
    deadline = asyncio.get_running_loop().time() + READY_SECONDS
    async with aiohttp.ClientSession() as session:
        while child.returncode is None and asyncio.get_running_loop().time() < deadline:
            with suppress(aiohttp.ClientError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)  # another process: there is no event to wait for
    raise BenchRefusedError(f"{url} does not answer.", _tail(log))


def put_on(rollout: Rollout) -> PutLoad:
    """Return what puts a load on a rollout that is made in this process.

    Raises:
        BenchRefusedError: when it is called: a rollout failed.
    """

    async def put(load: Load) -> Seen:
        try:
            return await put_load(load, rollout)
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            raise BenchRefusedError(f"A rollout failed: {type(first).__name__}: {first}") from errors

    return put


# --- the floor --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _engine_alone(site: Site) -> AsyncGenerator[Sequence[PutLoad]]:
    tools = [{"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}]
    question = {"role": "user", "content": QUESTION}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
            body = {"model": "m", "messages": messages, "tools": tools}
            async with session.post(f"{site.engine}/chat/completions", json=body) as response:
                return (await response.json())["choices"][0]["message"]

        async def rollout() -> float:
            called = await ask([question])
            observation = {"role": "tool", "content": ANSWER, "tool_call_id": "call_1"}
            answered = await ask([question, called, observation])
            return float(f"\\boxed{{{ANSWER}}}" in answered["content"])

        yield [put_on(rollout)]


# --- ours -------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _service(
    site: Site, *, backend: BackendName, warm: int, works: Sequence[Work]
) -> AsyncGenerator[Sequence[PutLoad]]:
    """``prorl-gym serve``, and the HTTP client: submit one rollout, wait for its record."""
    async with running_service(site, backend=backend, warm=warm) as client:
        yield [put_on(partial(_submit_and_wait, client, work)) for work in works]


@asynccontextmanager
async def running_service(
    site: Site, *, backend: BackendName = "userns", warm: int = 0, inference: Mapping[str, Any] | None = None
) -> AsyncGenerator[Client]:
    """Run ``prorl-gym serve`` for the block, with some settings of ``inference``; yields a client of it."""
    state = site.directory / f"{backend}-{warm}"
    state.mkdir(exist_ok=True)
    state.chmod(0o711)  # sandboxes have another uid when this is root
    (port,) = free_ports(1)
    engines = {"engine": "vllm", "engines": [site.engine], "model": "m", "tokenizer": "small"}
    config = {
        "inference": {**engines, **(inference or {})},
        "sandbox": {"backend": backend, "warm": warm, "scratch": str(state / "sandboxes")},
        "runner": {"run": 128},
        "state": str(state),
        "http": {"port": port, "stop_seconds": 10},
    }
    (state / "service.yaml").write_text(yaml.safe_dump(config))
    log, url = state / "service.log", f"http://{HOST}:{port}"
    argv = [str(Path(sys.executable).parent / "prorl-gym"), "serve", "--config", str(state / "service.yaml")]
    async with running(argv, log) as child:
        try:
            await wait_answering(f"{url}/readyz", child, log)
            async with Client(url, token=(state / "token").read_text().strip(), retry_seconds=0.0) as client:
                yield client
        finally:
            with suppress(ProcessLookupError):
                child.terminate()


async def _submit_and_wait(client: Client, work: Work) -> float:
    request = RolloutRequest(environment=work.environment, task=work.row)
    await client.submit(request)
    record = await client.result(request.rollout_id, timeout=300)
    if record.reward is None:
        raise BenchRefusedError(f"Rollout {record.rollout_id} has no reward: {record.outcome}.")
    return record.reward


@asynccontextmanager
async def _gym(site: Site) -> AsyncGenerator[Sequence[PutLoad]]:
    """Both environments behind Gym's ``/run``: ours, and its own ``math_with_code``."""
    async with running_gym(site, "_rollout_gym.py") as post:

        async def reward(server: str, row: dict[str, Any]) -> float:
            return float((await post(server, row))["reward"])

        ours = {**gym_row(QUESTION_WORK), "_ng_rollout_index": 0, "agent_ref": agent_ref("prorl_math_agent")}
        indices = iter(range(1 << 30))

        async def through_ours() -> float:
            return await reward("prorl_math_environment_server", {**ours, "_ng_task_index": next(indices)})

        theirs = math_with_code_row()
        yield [put_on(through_ours), put_on(partial(reward, "math_with_code_environment_server", theirs))]


Post = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Posts a row to a server's ``/run`` and returns the answer."""


@asynccontextmanager
async def running_gym(site: Site, script: str) -> AsyncGenerator[Post]:
    """Run the servers of Gym that a script starts; yields what posts rows to them."""
    directory = site.directory / "gym"
    directory.mkdir(exist_ok=True)
    directory.chmod(0o711)
    log = directory / "stack.log"
    argv = [sys.executable, str(BENCH / script), site.engine, str(directory)]
    async with (
        running(argv, log) as child,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),  # Gym's servers close theirs after 5 s
            timeout=aiohttp.ClientTimeout(total=300),
        ) as session,
    ):
        addresses = json.loads(await read_line(child, log, READY_SECONDS))

        async def post(server: str, row: dict[str, Any]) -> dict[str, Any]:
            async with session.post(f"{addresses[server]}/run", json=row) as response:
                if response.status != 200:
                    text = (await response.text())[:300]
                    raise BenchRefusedError(f"{server} answers {response.status}: {text}", _tail(log))
                return await response.json()

        yield post


def agent_ref(name: str) -> dict[str, str]:
    """Return a row's field that names its agent."""
    return {"type": "responses_api_agents", "name": name}


def math_with_code_row() -> dict[str, Any]:
    """Return a row of Gym's own environment: its first example, with our question."""
    import resources_servers  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]

    (root,) = resources_servers.__path__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    example = Path(str(root), "math_with_code", "data", "example.jsonl")  # pyright: ignore[reportUnknownArgumentType]
    row = json.loads(example.read_text().splitlines()[0])
    row["responses_create_params"]["input"][-1]["content"] = QUESTION
    return {**row, "expected_result": ANSWER, "agent_ref": agent_ref("math_with_code_simple_agent")}


# --- peers in environments of their own -------------------------------------------------------------------------------


def peer_environment(name: str) -> Path:
    """Return the directory of a peer's own environment, which ``bench/peers-environment`` makes."""
    return default_cache() / "peers" / name


@asynccontextmanager
async def _peer_program(
    site: Site, *, environment: str, script: str, arguments: Sequence[str], needs_engine: bool = True
) -> AsyncGenerator[Sequence[PutLoad]]:
    """A peer's own runner, which takes loads on its input."""
    given = [site.engine, *arguments] if needs_engine else list(arguments)
    async with running_peer(site, environment, script, given) as ask:

        async def put(load: Load) -> Seen:
            return Seen(**json.loads(await ask(json.dumps(asdict(load)), 600.0)))

        yield [put]


Ask = Callable[[str, float], Awaitable[str]]
"""Writes a line to a program and returns the one that it prints, within so many seconds."""


@asynccontextmanager
async def running_peer(site: Site, environment: str, script: str, given: Sequence[str]) -> AsyncGenerator[Ask]:
    """Run a script with the python of a peer's environment; yields what asks it."""
    log = site.directory / f"{script}.log"
    binaries = peer_environment(environment) / "bin"
    variables = {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": "",
        "TMPDIR": str(site.directory),
        "BENCH_WORK": json.dumps(_mini_work()),
    }
    async with running([str(binaries / "python"), str(BENCH / script), *given], log, variables) as child:
        while await read_line(child, log, READY_SECONDS) != "ready":  # some print a banner first
            pass

        async def ask(line: str, seconds: float) -> str:
            assert child.stdin is not None
            child.stdin.write(line.encode() + b"\n")
            return await read_line(child, log, seconds)

        yield ask


def _mini_work() -> dict[str, Any]:
    return {
        "engine_seconds": ENGINE_SECONDS,
        "files": project_files(),
        "prepare": PREPARE,
        "commands": COMMANDS,
        "task": SHELL_WORK.row["question"],
        "tests": TESTS,
        "test_command": TEST_COMMAND,
    }


# --- all --------------------------------------------------------------------------------------------------------------

FLOOR = "engine alone, two chat calls (floor)"
OURS: dict[BackendName, str] = {"userns": "ours, userns", "apptainer": "ours, apptainer"}
WARM = "ours, userns, 32 warm"
THROUGH_GYM = "ours through Gym"
GYM = "NeMo Gym's `math_with_code`, no sandbox"
TOOL_ENV = "verifiers 0.1 `ToolEnv`, tool a host process"
TOOL_ENV_BWRAP = "verifiers 0.1 `ToolEnv`, tool in bubblewrap"
BASH_HARNESS = "verifiers 0.4 `bash` harness, host processes"
MINI = "mini-swe-agent, host processes"
MINI_BWRAP = "mini-swe-agent, each command in bubblewrap"


def all_systems() -> list[System]:
    """Return every system in the order of a run; those that are not installed say so."""
    both = (QUESTION_WORK, SHELL_WORK)
    many = Sizes(48, {1: 60, CALLERS: 1200, 128: 1200}, 200).scaled(SCALE)  # it is fast: CPU is counted in 10 ms
    floor = replace(Arm.of(FLOOR, QUESTION_WORK), sizes=many)
    slow = replace(Arm.of(BASH_HARNESS, QUESTION_WORK), sizes=Sizes(2, {1: 10, CALLERS: 32}, 0), once=True)
    return [
        System((floor,), _engine_alone),
        System(
            tuple(Arm.of(OURS["userns"], work) for work in WORKS),
            partial(_service, backend="userns", warm=0, works=WORKS),
        ),
        System((Arm.of(WARM, QUESTION_WORK),), partial(_service, backend="userns", warm=32, works=(QUESTION_WORK,))),
        System(
            tuple(Arm.of(OURS["apptainer"], work, 0.5) for work in both),
            partial(_service, backend="apptainer", warm=0, works=both),
            missing=_program_missing("apptainer", "docs/installation.md says how to install Apptainer"),
        ),
        System(
            (Arm.of(THROUGH_GYM, QUESTION_WORK), Arm.of(GYM, QUESTION_WORK)),
            _gym,
            missing="" if find_spec("nemo_gym") else "NeMo Gym is not installed; run: make setup",
        ),
        _tool_env(TOOL_ENV, ()),
        _tool_env(TOOL_ENV_BWRAP, ("bwrap", *BWRAP_OPTIONS), needs_bwrap=True),
        System(
            (slow,),
            partial(
                _peer_program,
                environment="verifiers-0.4",
                script="_rollout_bash_harness.py",
                arguments=(QUESTION, ANSWER),
            ),
            missing=environment_missing("verifiers-0.4"),
        ),
        _mini(MINI, "local"),
        _mini(MINI_BWRAP, "bwrap"),
    ]


def _tool_env(name: str, wrapper: Sequence[str], *, needs_bwrap: bool = False) -> System:
    arguments = (QUESTION, ANSWER, *wrapper)
    start = partial(_peer_program, environment="verifiers-0.1", script="_rollout_tool_env.py", arguments=arguments)
    missing = environment_missing("verifiers-0.1") or (_bwrap_missing() if needs_bwrap else "")
    return System((Arm.of(name, QUESTION_WORK),), start, missing)


def _mini(name: str, kind: str) -> System:
    """Its scripted model counts its own calls: the engine sees none."""
    start = partial(
        _peer_program,
        environment="mini-swe-agent",
        script="_rollout_mini.py",
        arguments=(kind,),
        needs_engine=False,
    )
    missing = environment_missing("mini-swe-agent") or (_bwrap_missing() if kind == "bwrap" else "")
    return System((replace(Arm.of(name, SHELL_WORK), calls=0),), start, missing)


def _bwrap_missing() -> str:
    return _program_missing("bwrap", "run: apt-get install bubblewrap")


def _program_missing(program: str, fix: str) -> str:
    return "" if shutil.which(program) else f"{program} is not installed; {fix}"


def environment_missing(name: str) -> str:
    """Return why a peer is left out here; nothing where its environment is installed."""
    return "" if (peer_environment(name) / "bin" / "python").exists() else f"{name} is not installed; run: {INSTALL}"
