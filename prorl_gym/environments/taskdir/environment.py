"""The ``taskdir`` environment: work in a container with bash; hidden tests judge the state that is left.

Grading ends the agent's processes first. The tests then run in the agent's own sandbox, for which these layouts are
made, or, where the row names the directories that count (``keep``), in a clean sandbox with copies of these.

The agent may have changed everything in the sandbox's file system, programs included. Only answers of the sandbox's
own server count, which the agent can neither signal nor change: the processes, the entries of a directory, a file's
content.
"""

import asyncio
import base64
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.agents.tools import BashTool, FinishTool
from prorl_gym.deadlines import hold_uncharged
from prorl_gym.environments.killed_program import raise_if_killed, run_with_kill_retry
from prorl_gym.environments.protocol import Episode, Leases, ScriptedStep
from prorl_gym.environments.row_format import to_scripted_steps
from prorl_gym.environments.simple import SimpleEnvironment
from prorl_gym.environments.taskdir.task_dir_row import TaskDirRow, TaskFile
from prorl_gym.errors import Cause, FailureKind, GraderError, SandboxError, TaskError
from prorl_gym.records import GradedSubmission, Score
from prorl_gym.sandbox.protocol import ExecResult, Sandbox, SandboxLimits, SandboxSpec
from prorl_gym.settings import ResolvedSettings, RolloutSettings

EVAL_SHARE = 0.8
"""Share of the stage's deadline that the verifier may use; the rest is for starting and copying."""

_SETUP_SECONDS = 600.0
"""Longest time of one setup command; the stage's deadline is the tighter one."""

_TOOL_OUTPUT = 16 << 10

LOGS = "/logs/verifier"
_TESTS = "/tests"
_MAX_KEPT = 64 << 20
"""Largest archive from the agent's sandbox in bytes; the service holds it in memory while it is copied."""
MAX_ARCHIVES = 4
"""Archives that the service holds at one time."""

# Every command names its directory: the sandbox's own may be gone, and then nothing could be run.
_SECONDS = 120.0
_KEPT = "/.prorl-kept.tar"
_PAUSES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Seconds between checks that killed processes are gone: the kernel takes a while to free much memory."""

_OUTPUT = f"{LOGS}/output.txt"
_HEADER = re.compile(r"^=+ short test summary info =+\s*$", re.MULTILINE)
_END = re.compile(r"\A(.*)^(?:=+ )?\d+ [a-z][^\n]* in [\d.]+s.*", re.DOTALL | re.MULTILINE)
_STATUS = re.compile(r"^(PASSED|FAILED|SKIPPED|XFAIL|XPASS|ERROR)\s+\S", re.MULTILINE)
_BAD_TOTAL = re.compile(r"^(?:=+ )?(?:\d+ [a-z]+, )*[1-9]\d* (?:failed|errors?)\b[^\n]* in [\d.]+s", re.MULTILINE)
"""Failed subtests have a word of their own in the summary; the total has them."""
_GOOD = {"PASSED", "XFAIL", "SKIPPED"}
_LARGEST = 4 << 20
_ROUNDING = 0.005


class TaskDirEnvironment(SimpleEnvironment[TaskDirRow]):
    """Implements ``Environment[TaskDirRow]``."""

    name = "taskdir"
    row_model = TaskDirRow
    prompt = (
        "You work in a container with the bash tool; there is no network. Do the task that you are given: hidden tests "
        "then look at the state that you leave. Programs that you leave running are ended first. When you are done, "
        "call finish and say in a sentence what you did."
    )
    settings = RolloutSettings(max_turns=50, init_seconds=600.0, eval_seconds=900.0, action_seconds=120.0)
    gold_field = "solution"

    def __init__(self) -> None:
        self._archive_permits = asyncio.Semaphore(MAX_ARCHIVES)

    async def init(self, task: TaskDirRow, leases: Leases, settings: ResolvedSettings) -> Episode:
        await prepare_starting_state(await leases.get_agent_sandbox(sandbox_spec(task)), task)
        return self.plan_episode(task, leases, settings)

    def plan_episode(self, task: TaskDirRow, leases: Leases, settings: ResolvedSettings) -> Episode:
        source = partial(leases.get_agent_sandbox, sandbox_spec(task))
        bash = BashTool(source, settings.action_seconds)
        return Episode(self.messages(task), (bash, FinishTool("Say what you did, and end.")), source)

    async def evaluate(
        self, task: TaskDirRow, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings
    ) -> Score:
        """Let the verifier judge the end state.

        A verifier that gives no reward also runs on the starting state. If it gives one there, the agent's state is to
        blame, and the reward is 0. Otherwise the verifier is broken, and this raises ``GraderError``.
        """
        artifacts.submission = GradedSubmission(kind="files", text=artifacts.answer or "")
        seconds = settings.eval_seconds * EVAL_SHARE
        try:
            reward, output = await self._verify_end_state(task, leases, seconds)
        except SpoiledStateError as spoiled:
            return Score(reward=0.0, detail={"why": str(spoiled)})
        except SandboxError as error:
            if error.cause is not Cause.POLICY:
                raise
            return Score(reward=0.0, detail={"why": error.kind.value})
        if reward is not None:
            if reward == 1.0:
                return Score(reward=reward, report=output)
            return Score(reward=reward, detail={"why": f"the verifier's reward is {reward:g}"}, report=output)
        fresh = await leases.start_clean_sandbox(sandbox_spec(task))
        await prepare_starting_state(fresh, task)
        if await run_verifier(fresh, task, seconds) is None:
            raise GraderError(
                f"taskdir row {task.id or 'without id'}: the verifier gives no reward, not even on the starting state.",
                "Run it by hand there: it may need the network, or a program that the image lacks.",
            )
        return Score(reward=0.0, detail={"why": "the verifier gives no reward on what the agent left"}, report=output)

    async def _verify_end_state(self, task: TaskDirRow, leases: Leases, seconds: float) -> tuple[float | None, str]:
        """Return the verifier's reward and its output."""
        agents = await leases.get_agent_sandbox(sandbox_spec(task))
        await kill_agent_processes(agents)
        place = agents
        if task.keep:
            place = await leases.start_clean_sandbox(sandbox_spec(task))
            await prepare_starting_state(place, task)
            async with hold_uncharged(self._archive_permits):
                await copy_kept_paths(agents, place, task.keep)
        else:
            await remove_verifier_paths(agents)
        try:
            return await run_verifier(place, task, seconds), await read_verifier_output(place)
        except OSError as error:
            raise SpoiledStateError(f"the verifier's files cannot be placed ({error.strerror})") from None

    def gold_steps(self, row: Mapping[str, Any]) -> Sequence[ScriptedStep]:
        """Return the row's own trajectory, or its solution, placed and run by one command."""
        task = self.parse_row(row)
        if task.gold_steps or task.solution is None:
            return super().gold_steps(row)
        lines: list[str] = []
        for file in task.solution.files:
            path = shlex.quote(file.path)
            lines.append(f'mkdir -p "$(dirname {path})"')
            lines.append(f"base64 -d > {path} <<'PRORL_END'\n{base64.encodebytes(file.data).decode()}PRORL_END")
            if file.executable:
                lines.append(f"chmod +x {path}")
        command = "\n".join([*lines, task.solution.command])
        done = ScriptedStep(tool="finish", arguments={"answer": "The reference solution was run."})
        return [ScriptedStep(tool="bash", arguments={"command": command}), done]

    def wrong_steps(self, row: Mapping[str, Any], seed: int) -> Sequence[ScriptedStep]:
        claim = ScriptedStep(tool="finish", arguments={"answer": f"I believe that it is done (attempt {seed})."})
        return to_scripted_steps(self.parse_row(row).wrong_steps) or [
            ScriptedStep(tool="bash", arguments={"command": "ls"}),
            claim,
        ]


class SpoiledStateError(Exception):
    """The agent left a state that cannot be verified; the message has the reason. The reward is 0."""


def sandbox_spec(task: TaskDirRow) -> SandboxSpec:
    limits = SandboxLimits(output=_TOOL_OUTPUT)
    if task.memory is not None:
        limits = replace(limits, total_memory=task.memory)
    return SandboxSpec(image=task.image, workdir=task.workdir, env=task.env, limits=limits)


async def prepare_starting_state(sandbox: Sandbox, task: TaskDirRow) -> None:
    """Place the task's files and run its setup commands, in order.

    Raises ``TaskError`` (BAD_ROW): one of them fails, and the row or its image is to blame; ``SandboxError``: one of
    them is slow or killed.
    """
    for number, step in enumerate(task.setup, 1):
        if isinstance(step, TaskFile):
            try:
                await _place_file(sandbox, step)
            except OSError as error:
                raise _bad_row(task, f"'{step.path}' cannot be placed ({error.strerror})") from None
            continue
        ran = await sandbox.exec(["/bin/bash", "-c", step.command], timeout=_SETUP_SECONDS, cwd=step.cwd)
        raise_if_killed(ran, f"setup step {number}")
        if ran.timed_out:
            what = f"taskdir row {task.id or 'without id'}: setup step {number} took longer than {_SETUP_SECONDS:g} s."
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "Look at the load of the node, and at the step.")
        if ran.exit_code != 0:
            message = (ran.stderr or ran.stdout).decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
            raise _bad_row(task, f"setup step {number} ends with exit code {ran.exit_code}: {message[0][:200]}")


async def _place_file(sandbox: Sandbox, file: TaskFile) -> None:
    await sandbox.write_file(file.path, file.data, mode=0o755 if file.executable else 0o644)


def _bad_row(task: TaskDirRow, why: str) -> TaskError:
    fix = "There is no network in a sandbox: put what needs one into an image, and import with --image-map."
    return TaskError(FailureKind.BAD_ROW, f"taskdir row {task.id or 'without id'}: {why}.", fix)


async def kill_agent_processes(sandbox: Sandbox) -> None:
    """End every process of the agent's: daemons, and what waits for the verifier.

    Raises ``SpoiledStateError``: some live on, because the sandbox's shell was tampered with.
    """
    for pause in _PAUSES:
        await sandbox.exec(["/bin/sh", "-c", "kill -9 -1"], timeout=_SECONDS, cwd="/")
        if not any(entry.name.isdigit() and entry.name != "1" for entry in await sandbox.list_dir("/proc")):
            return
        await asyncio.sleep(pause)  # the sandbox does not report the end of processes that it did not start
    raise SpoiledStateError("processes of the agent cannot be ended")


async def remove_verifier_paths(sandbox: Sandbox) -> None:
    """Remove what is in the places of the verifier's files and logs, or raise ``SpoiledStateError``."""
    await run_with_kill_retry(lambda: sandbox.exec(["/bin/rm", "-rf", "/logs", _TESTS], timeout=_SECONDS, cwd="/"))
    left = {entry.name for entry in await sandbox.list_dir("/")} & {"logs", _TESTS[1:]}
    if left:
        raise SpoiledStateError(f"/{min(left)} cannot be removed")


async def copy_kept_paths(agents: Sandbox, clean: Sandbox, paths: tuple[str, ...]) -> None:
    """Copy files and directories from the agent's sandbox into a clean one, in place of what is there.

    The archive is made by the agent's sandbox and is not to be trusted; it is unpacked by the clean one, below its own
    root, and never read by the service. Raises ``SpoiledStateError``: it cannot be made, is too large, or cannot be
    unpacked.
    """
    relative = [path.lstrip("/") for path in paths]
    packing = ["tar", "-C", "/", "-cf", _KEPT, "--", *relative]
    packed = await run_with_kill_retry(lambda: agents.exec(packing, timeout=_SECONDS, cwd="/"))
    if packed.exit_code != 0:
        found = await clean.exec(["tar", "--version"], timeout=_SECONDS, cwd="/")
        if raise_if_killed(found, "tar").exit_code == 127:
            raise GraderError("The image has no tar, which takes what counts to a clean sandbox.", "Add it.")
        raise SpoiledStateError(f"{', '.join(paths)} cannot be read")
    try:
        archive = await agents.read_file(_KEPT, limit=_MAX_KEPT)
    except OSError as error:
        raise SpoiledStateError(f"{', '.join(paths)} cannot be taken ({error.strerror})") from None
    await clean.exec(["/bin/rm", "-rf", "--", *paths], timeout=_SECONDS, cwd="/")
    try:
        await clean.write_file(_KEPT, archive)
    except OSError as error:  # what the agent left does not fit
        raise SpoiledStateError(f"{', '.join(paths)} cannot be placed ({error.strerror})") from None
    unpacking = ["tar", "-C", "/", "-xf", _KEPT, "--no-same-owner", "--", *relative]
    unpacked = raise_if_killed(await clean.exec(unpacking, timeout=_SECONDS, cwd="/"), "tar")
    await clean.exec(["/bin/rm", "-f", _KEPT], timeout=_SECONDS, cwd="/")
    if unpacked.exit_code != 0:
        raise SpoiledStateError(f"{', '.join(paths)} cannot be unpacked")


async def run_verifier(sandbox: Sandbox, task: TaskDirRow, seconds: float) -> float | None:
    """Place the verifier's files, run it with a fresh shell, and return the reward, from 0 to 1; ``None`` for none.

    The sandbox holds no process of an agent any more. Raises ``OSError``: the files cannot be placed: a full disk, a
    file where a directory should be.
    """
    verifier = task.verifier

    async def run() -> ExecResult:
        await sandbox.write_file(_OUTPUT, b"")
        for file in verifier.files:
            await _place_file(sandbox, file)
        return await sandbox.exec(
            ["/bin/bash", "--noprofile", "--norc", "-c", f"{{ {verifier.command}\n}} > {_OUTPUT} 2>&1 < /dev/null"],
            timeout=min(seconds, verifier.seconds),
            cwd=task.workdir,
            env=verifier.env,
        )

    ran = await run_with_kill_retry(run)
    if verifier.reward == "exit":
        return None if ran.timed_out or ran.exit_code in (126, 127) else float(ran.exit_code == 0)
    if verifier.reward == "pytest":  # one test passed at least and none failed; skipped tests do not count
        output = re.sub(r"\x1b\[[\d;]*m", "", await _read(sandbox, _OUTPUT) or "")
        sections = _HEADER.split(output)[1:]
        found = {status for section in sections for status in _STATUS.findall(_END.sub(r"\1", section))}
        found |= {"FAILED" for section in sections if _BAD_TOTAL.search(section)}
        return float(found <= _GOOD and bool(found & {"PASSED", "XFAIL"})) if found else None
    # Of the files that exist, both must agree, rounding aside.
    texts = [(name, await _read(sandbox, f"{LOGS}/{name}")) for name in ("reward.json", "reward.txt")]
    rewards = [one for name, text in texts if text is not None for one in _parse_rewards(text, name == "reward.json")]
    known = [reward for reward in rewards if 0.0 <= reward <= 1.0]
    return known[0] if known and len(known) == len(rewards) and max(known) - min(known) <= _ROUNDING else None


async def read_verifier_output(sandbox: Sandbox) -> str:
    """Return the verifier's output; empty where it cannot be read any more: the verdict stands without it."""
    try:
        return await _read(sandbox, _OUTPUT) or ""
    except SandboxError:
        return ""


async def _read(sandbox: Sandbox, path: str) -> str | None:
    try:
        return (await sandbox.read_file(path, limit=_LARGEST)).decode("utf-8-sig", "replace")
    except OSError:
        return None


def _parse_rewards(text: str, is_json: bool) -> list[float]:
    """Return the rewards of a file, as Harbor 0.26.0 reads it (its ``Verifier``); NaN: it has an error.

    A number, or of an object ``reward`` or its only number. Several numbers without ``reward`` are none at all.
    """
    try:
        value: Any = json.loads(text) if is_json else float(text)
        bare: dict[str, Any] = {"reward": None if isinstance(value, bool) else value}
        values = cast(dict[str, Any], value) if isinstance(value, dict) else bare
        if not all(isinstance(number, int | float) and abs(number) < math.inf for number in values.values()):
            return [float("nan")]
        return [float(number) for name, number in values.items() if len(values) == 1 or name == "reward"]
    except (ValueError, OverflowError, RecursionError):
        return [float("nan")]
