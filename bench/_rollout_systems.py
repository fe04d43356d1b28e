"""The systems that ``bench peers`` measures: each starts what it needs and makes one rollout, or a load of them."""

import json
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
from _engine import gym_row, running_engine
from _load import Load, Rollout, Seen, put_load
from _programs import BENCH, BenchRefusedError, ask, last_words, read_line, running, running_service
from _rollout_work import (
    ANSWER,
    CALLERS,
    ENGINE_SECONDS,
    MINI_WORK,
    QUESTION,
    QUESTION_WORK,
    SCALE,
    SHELL_WORK,
    WORKS,
    Sizes,
    Work,
)

from prorl_gym.client import Client
from prorl_gym.records import RolloutRequest
from prorl_gym.sandbox.config import default_cache
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

INSTALL = "bench/peers-environment"
BWRAP = (
    "bwrap",
    *("--unshare-all", "--uid", "61100", "--gid", "61100", "--die-with-parent", "--clearenv"),
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
    *("--symlink", "usr/bin", "/bin", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
)
"""The isolation that a user would write around the tool: all namespaces, a read-only /usr, no network, an own uid."""

PutLoad = Callable[[Load], Awaitable[Seen]]


@dataclass(frozen=True, slots=True)
class Site:
    engine: str
    """Address of the engine, up to /v1."""
    directory: Path


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    work: Work
    sizes: Sizes
    calls: int
    """Calls that the engine counts for each rollout."""
    once: bool = False
    """Too slow to be measured in every run."""

    @classmethod
    def of(cls, name: str, work: Work, factor: float = 1.0) -> "Arm":
        return cls(name, work, work.sizes.scaled(factor), work.calls)


@dataclass(frozen=True, slots=True)
class System:
    """What is started together, and the arms that it serves in this order."""

    arms: tuple[Arm, ...]
    start: Callable[[Site], AbstractAsyncContextManager[Sequence[PutLoad]]]
    missing: str = ""
    """Why it is left out here, and the command that installs it."""


@asynccontextmanager
async def peers_engine(directory: Path) -> AsyncGenerator[tuple[str, int]]:
    """Run the engine of all systems; yields its address and its pid."""
    rows = [gym_row(work.environment, work.row) for work in WORKS]
    async with running_engine(directory, rows, ENGINE_SECONDS) as engine:
        yield engine


def put_on(rollout: Rollout) -> PutLoad:

    async def put(load: Load) -> Seen:
        try:
            return await put_load(load, rollout)
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            raise BenchRefusedError(f"A rollout failed: {type(first).__name__}: {first}") from errors

    return put


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


@asynccontextmanager
async def _service(site: Site, *, backend: BackendName, works: Sequence[Work]) -> AsyncGenerator[Sequence[PutLoad]]:
    """``prorl-gym serve``, and the HTTP client: submit one rollout, wait for its record."""
    folder = site.directory / backend
    folder.mkdir(exist_ok=True)
    folder.chmod(0o711)  # sandboxes have another uid when this is root
    config = {
        "inference": {"engine": "vllm", "engines": [site.engine], "model": "m", "tokenizer": "small"},
        "sandbox": {"backend": backend, "warm": 0, "scratch": str(folder / "sandboxes")},
        "runner": {"run": 128},
    }
    async with running_service(folder, config) as service, service.client() as client:
        yield [put_on(partial(_submit_and_wait, client, work)) for work in works]


async def _submit_and_wait(client: Client, work: Work) -> float:
    request = RolloutRequest(environment=work.environment, task=work.row)
    await client.submit(request)
    record = await client.result(request.rollout_id, timeout=300)
    if record.reward is None:
        raise BenchRefusedError(f"Rollout {record.rollout_id} has no reward: {record.outcome}.")
    return record.reward


@asynccontextmanager
async def _gym(site: Site) -> AsyncGenerator[Sequence[PutLoad]]:
    directory = site.directory / "gym"
    directory.mkdir(exist_ok=True)
    directory.chmod(0o711)
    log = directory / "stack.log"
    indices = iter(range(1 << 30))
    ours = {
        **gym_row(QUESTION_WORK.environment, QUESTION_WORK.row),
        "_ng_rollout_index": 0,
        "agent_ref": _agent_ref("prorl_math_agent"),
    }
    theirs = _math_with_code_row()
    async with (
        running([sys.executable, str(BENCH / "_gym_stack.py"), "serve", site.engine, str(directory)], log) as child,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),  # Gym's servers close theirs after 5 s
            timeout=aiohttp.ClientTimeout(total=300),
        ) as session,
    ):
        addresses = json.loads(await read_line(child, log))

        async def reward(server: str, row: dict[str, Any]) -> float:
            async with session.post(f"{addresses[server]}/run", json=row) as response:
                if response.status != 200:
                    text = (await response.text())[:300]
                    raise BenchRefusedError(f"{server} answers {response.status}: {text}", last_words(log))
                return float((await response.json())["reward"])

        async def through_ours() -> float:
            return await reward("prorl_math_environment_server", {**ours, "_ng_task_index": next(indices)})

        yield [put_on(through_ours), put_on(partial(reward, "math_with_code_environment_server", theirs))]


def _agent_ref(name: str) -> dict[str, str]:
    return {"type": "responses_api_agents", "name": name}


def _math_with_code_row() -> dict[str, Any]:
    """Return a row of Gym's own environment: its first example, with our question."""
    import resources_servers  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]

    (root,) = resources_servers.__path__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    example = Path(str(root), "math_with_code", "data", "example.jsonl")  # pyright: ignore[reportUnknownArgumentType]
    row = json.loads(example.read_text().splitlines()[0])
    row["responses_create_params"]["input"][-1]["content"] = QUESTION
    return {**row, "expected_result": ANSWER, "agent_ref": _agent_ref("math_with_code_simple_agent")}


def peer_environment(name: str) -> Path:
    """Return the directory of a peer's own environment, which ``bench/peers-environment`` makes."""
    return default_cache() / "peers" / name


@asynccontextmanager
async def _peer_program(
    environment: str, script: str, arguments: Sequence[str], site: Site
) -> AsyncGenerator[Sequence[PutLoad]]:
    """Run a peer's own runner, which takes loads on its input, with the python of its environment."""
    log = site.directory / f"{script}.log"
    binaries = peer_environment(environment) / "bin"
    variables = {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": "",
        "TMPDIR": str(site.directory),
        "BENCH_WORK": json.dumps(MINI_WORK),
    }
    command = [str(binaries / "python"), str(BENCH / script), site.engine, *arguments]
    async with running(command, log, variables) as child:
        while await read_line(child, log) != "ready":  # some print a banner first
            pass

        async def put(load: Load) -> Seen:
            return Seen(**json.loads(await ask(child, json.dumps(asdict(load)), log, 600.0)))

        yield [put]


FLOOR = "engine alone, two chat calls (floor)"
OURS: dict[BackendName, str] = {"userns": "ours, userns", "apptainer": "ours, apptainer"}
THROUGH_GYM = "ours through Gym"
GYM = "NeMo Gym's `math_with_code`, no sandbox"
TOOL_ENV = "verifiers 0.1 `ToolEnv`, tool a host process"
TOOL_ENV_BWRAP = "verifiers 0.1 `ToolEnv`, tool in bubblewrap"
BASH_HARNESS = "verifiers 0.4 `bash` harness, host processes"
MINI = "mini-swe-agent, host processes"
MINI_BWRAP = "mini-swe-agent, each command in bubblewrap"


def all_systems() -> list[System]:
    """Return every system in the order of a run; those that are not installed say so."""
    many = Sizes(48, {1: 60, CALLERS: 1200, 128: 1200}, 200).scaled(SCALE)  # it is fast: CPU is counted in 10 ms
    floor = replace(Arm.of(FLOOR, QUESTION_WORK), sizes=many)
    slow = replace(Arm.of(BASH_HARNESS, QUESTION_WORK), sizes=Sizes(2, {1: 10, CALLERS: 32}, 0), once=True)
    asked = (QUESTION, ANSWER)
    return [
        System((floor,), _engine_alone),
        System(tuple(Arm.of(OURS["userns"], work) for work in WORKS), partial(_service, backend="userns", works=WORKS)),
        System(
            tuple(Arm.of(OURS["apptainer"], work, 0.5) for work in WORKS),
            partial(_service, backend="apptainer", works=WORKS),
            missing=_program_missing("apptainer", "docs/installation.md says how to install Apptainer"),
        ),
        System(
            (Arm.of(THROUGH_GYM, QUESTION_WORK), Arm.of(GYM, QUESTION_WORK)),
            _gym,
            missing="" if find_spec("nemo_gym") else "NeMo Gym is not installed; run: make setup",
        ),
        _peer(Arm.of(TOOL_ENV, QUESTION_WORK), "verifiers-0.1", "_rollout_tool_env.py", *asked),
        _peer(Arm.of(TOOL_ENV_BWRAP, QUESTION_WORK), "verifiers-0.1", "_rollout_tool_env.py", *asked, *BWRAP),
        _peer(slow, "verifiers-0.4", "_rollout_bash_harness.py", *asked),
        # Its scripted model counts its own calls: the engine sees none.
        _peer(replace(Arm.of(MINI, SHELL_WORK), calls=0), "mini-swe-agent", "_rollout_mini.py", "local"),
        _peer(replace(Arm.of(MINI_BWRAP, SHELL_WORK), calls=0), "mini-swe-agent", "_rollout_mini.py", "bwrap"),
    ]


def _peer(arm: Arm, environment: str, script: str, *arguments: str) -> System:
    missing = ""
    if not (peer_environment(environment) / "bin" / "python").exists():
        missing = f"{environment} is not installed; run: {INSTALL}"
    elif "bwrap" in arguments:
        missing = _program_missing("bwrap", "run: apt-get install bubblewrap")
    return System((arm,), partial(_peer_program, environment, script, arguments), missing)


def _program_missing(program: str, fix: str) -> str:
    return "" if shutil.which(program) else f"{program} is not installed; {fix}"
