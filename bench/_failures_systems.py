"""The systems of ``bench failures``: what each starts, and how a batch of its rollouts is made."""

import json
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import aiohttp
from _failures_load import Batch, Call, Made, batch_from_json, make_batch
from _failures_plan import CALL_SECONDS, TURN_TOKENS
from _rollout_systems import (
    BENCH,
    READY_SECONDS,
    Post,
    Site,
    agent_ref,
    environment_missing,
    gym_row,
    math_with_code_row,
    read_line,
    running,
    running_gym,
    running_peer,
    running_service,
    write_rows,
)
from _rollout_work import ANSWER, CODE_WORK, QUESTION, QUESTION_WORK, SHELL_WORK, Work

from prorl_gym.cli.demo.stack import free_ports
from prorl_gym.client import Client
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.settings import RolloutSettings

QUESTION_ROW, PROGRAM_ROW, SHELL_ROW = "mathematics", "program", "shell task"
MakeBatch = Callable[[int, float], Awaitable[Batch]]
"""Makes so many rollouts at once, within so many seconds."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One kind of rollout of a system."""

    system: str
    row: str
    calls: int
    """Model calls of one rollout."""


@dataclass(frozen=True, slots=True)
class Started:
    """A system that runs."""

    batches: Sequence[MakeBatch]
    """One for each of its arms."""
    client: Client | None = None
    """Of our service, to which new weights are reported."""


@dataclass(frozen=True, slots=True)
class System:
    """What is started together."""

    arms: tuple[Arm, ...]
    start: Callable[[Site], AbstractAsyncContextManager[Started]]
    missing: str = ""
    """Why it is left out here, and the command that installs it."""


class Engine:
    """The failing engine, as the bench drives it.

    Args:
        url: its address, up to /v1.
        control: address of the bench's own routes.
        session: to call them.
    """

    def __init__(self, url: str, control: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.version = 0
        self._root = control
        self._session = session

    async def post(self, path: str, body: Mapping[str, Any]) -> None:
        """Post an order."""
        async with self._session.post(f"{self._root}/{path}", json=body) as response:
            response.raise_for_status()

    async def load_weights(self, version: int) -> None:
        """Load the weights of a version."""
        await self.post("weights", {"version": version})
        self.version = version

    async def get(self, path: str) -> dict[str, Any]:
        """Get an answer."""
        async with self._session.get(f"{self._root}/{path}") as response:
            return await response.json()


@asynccontextmanager
async def running_failing_engine(site: Site) -> AsyncGenerator[Engine]:
    """Run the engine of all systems."""
    log = site.directory / "engine.log"
    port, control = free_ports(2)
    rows = write_rows(site.directory)
    argv = [sys.executable, str(BENCH / "_failures_engine.py"), str(rows), str(port), str(control)]
    async with running(argv, log) as child, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as session:
        yield Engine(await read_line(child, log, READY_SECONDS), f"http://127.0.0.1:{control}", session)


def lost_batch(count: int, seconds: float, why: str) -> Batch:
    """Return the batch of a system that ended."""
    return Batch([Made(lost=why, is_answered=False)] * count, seconds)


# --- ours -------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _service(site: Site) -> AsyncGenerator[Started]:
    async with running_service(site, inference={"request_seconds": CALL_SECONDS}) as client:
        works = (QUESTION_WORK, CODE_WORK, SHELL_WORK)
        rollouts = [partial(_submit_and_wait, client, work) for work in works]
        yield Started([partial(make_batch, rollout=rollout) for rollout in rollouts], client)


async def _submit_and_wait(client: Client, work: Work) -> Made:
    settings = RolloutSettings(max_turn_tokens=TURN_TOKENS)
    request = RolloutRequest(environment=work.environment, task=work.row, settings=settings)
    await client.submit(request)
    return made_of_record(await client.result(request.rollout_id, timeout=300))


def made_of_record(record: Rollout) -> Made:
    """Return what a record of ours says."""
    calls = [
        Call(
            segment.token_ids[: part.start],
            segment.token_ids[part.start : part.end],
            segment.logprobs[part.start : part.end],
            segment.policy_versions[part.start : part.end],
        )
        for segment in record.segments
        for part in segment.generations
    ]
    mark = f"{record.outcome.kind or record.outcome.status}: {record.outcome.message}"[:200] if record.masked else ""
    return Made(reward=record.reward, mark=mark, calls=calls)


# --- NeMo Gym ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _gym(site: Site) -> AsyncGenerator[Started]:
    async with running_gym(site, "_failures_gym.py") as post:
        indices = iter(range(1 << 30))

        def ours(work: Work, name: str) -> dict[str, Any]:
            return {
                **gym_row(work),
                "agent_ref": agent_ref(f"prorl_{name}_agent"),
                "_ng_task_index": next(indices),
                "_ng_rollout_index": 0,
            }

        rows: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            ("prorl_math", partial(ours, QUESTION_WORK, "math")),
            ("prorl_code", partial(ours, CODE_WORK, "code")),
            ("math_with_code", math_with_code_row),
            ("code_gen", code_gen_row),
        ]
        rollouts = [partial(_post_row, post, f"{name}_environment_server", row) for name, row in rows]
        yield Started([partial(make_batch, rollout=rollout) for rollout in rollouts])


async def _post_row(post: Post, server: str, row: Callable[[], dict[str, Any]]) -> Made:
    posted = row()
    posted["responses_create_params"]["max_output_tokens"] = TURN_TOKENS
    return made_of_gym_answer(await post(server, posted))


def made_of_gym_answer(answer: Mapping[str, Any]) -> Made:
    """Return what an answer of ``/run`` says: any field by which Gym or a trainer knows a failure is a mark."""
    config: Mapping[str, Any] = answer.get("instance_config") or {}
    marks = {
        "mask_sample": answer.get("mask_sample") or config.get("mask_sample"),
        "failure": answer.get("failure") or answer.get("failure_kind") or answer.get("_ng_failure_class"),
    }
    items = answer["response"]["output"]
    return Made(
        reward=answer["reward"],
        mark=", ".join(f"{name}: {value}" for name, value in marks.items() if value)[:200],
        calls=[
            Call(item["prompt_token_ids"], item["generation_token_ids"], item["generation_log_probs"])
            for item in items
            if item.get("generation_token_ids")
        ],
    )


def code_gen_row() -> dict[str, Any]:
    """Return our program's row as Gym's ``code_gen`` takes it: one turn, the program in a fence."""
    task = CODE_WORK.row
    cases = task["tests"]["cases"]
    tests = {
        "inputs": [case["stdin"] for case in cases],
        "outputs": [case["stdout"] for case in cases],
        "fn_name": None,
    }
    prompt = f"{task['question']}\n\nPut the program into a ```python block."
    return {
        "responses_create_params": {"input": [{"role": "user", "content": prompt}]},
        "verifier_metadata": {"unit_tests": tests},
        "agent_ref": agent_ref("code_gen_simple_agent"),
    }


# --- peers in environments of their own -------------------------------------------------------------------------------


@asynccontextmanager
async def _peer(site: Site, *, environment: str, script: str, arguments: Sequence[str] = ()) -> AsyncGenerator[Started]:
    async with running_peer(site, environment, script, [site.engine, *arguments]) as ask:

        async def make(count: int, seconds: float) -> Batch:
            return batch_from_json(await ask(json.dumps({"count": count, "seconds": seconds}), seconds + 60))

        yield Started([make])


# --- all --------------------------------------------------------------------------------------------------------------

OURS, OURS_IN_GYM = "ours", "ours through Gym"
MATH_WITH_CODE, CODE_GEN = "NeMo Gym `math_with_code`", "NeMo Gym `code_gen`"
_IMAGES = "its rows are graded in images of SWE-bench, which come from a registry that cannot be reached here"
NOT_RUN = {
    "NeMo Gym `mini_swe_agent_2`": _IMAGES,
    "NeMo Gym `anyswe_agent`": f"{_IMAGES}, and its harnesses are installed from the network in each sandbox",
}
"""Systems that no run of the bench here can have, with the reason."""
TOOL_ENV, BASH_HARNESS, MINI = "verifiers 0.1 `ToolEnv`", "verifiers 0.4 `bash` harness", "mini-swe-agent"


def all_systems() -> list[System]:
    """Return every system; those that are not installed say so."""
    asked = (QUESTION, ANSWER)
    tool_env = partial(_peer, environment="verifiers-0.1", script="_failures_tool_env.py", arguments=asked)
    harness = partial(_peer, environment="verifiers-0.4", script="_failures_bash_harness.py", arguments=asked)
    mini = partial(_peer, environment="mini-swe-agent", script="_failures_mini.py")
    return [
        System((Arm(OURS, QUESTION_ROW, 2), Arm(OURS, PROGRAM_ROW, 3), Arm(OURS, SHELL_ROW, 21)), _service),
        System(
            (
                Arm(OURS_IN_GYM, QUESTION_ROW, 2),
                Arm(OURS_IN_GYM, PROGRAM_ROW, 3),
                Arm(MATH_WITH_CODE, QUESTION_ROW, 2),
                Arm(CODE_GEN, PROGRAM_ROW, 1),
            ),
            _gym,
            missing="" if find_spec("nemo_gym") else "NeMo Gym is not installed; run: make setup",
        ),
        System((Arm(TOOL_ENV, QUESTION_ROW, 2),), tool_env, environment_missing("verifiers-0.1")),
        System((Arm(BASH_HARNESS, QUESTION_ROW, 2),), harness, environment_missing("verifiers-0.4")),
        System((Arm(MINI, SHELL_ROW, 21),), mini, environment_missing("mini-swe-agent")),
    ]


def selected(systems: Sequence[System]) -> list[System]:
    """Return the systems that ``PRORL_BENCH_SYSTEMS`` names, separated by commas; all of them without it."""
    wanted = set(filter(None, os.environ.get("PRORL_BENCH_SYSTEMS", "").split(",")))
    return [system for system in systems if not wanted or any(arm.system in wanted for arm in system.arms)]
