"""Plays turns without an engine, through the real loop, tools, sandboxes and grader.

The turns are a script of the row (``validate`` and the oracle engine play gold and wrong ones) or those of a recorded
rollout, whose observations are then compared with the new ones.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from itertools import takewhile, zip_longest
from typing import Any, Protocol, runtime_checkable

from prorl_gym.agents.protocol import Artifacts, AssistantTurn, Policy, ToolSpec
from prorl_gym.agents.scripted_policy import ScriptedPolicy, fill_observation
from prorl_gym.environments import registry
from prorl_gym.environments.protocol import Environment, Episode, Leases, RunContext, ScriptedStep
from prorl_gym.errors import FailureKind, Limit, LimitReached, TaskError
from prorl_gym.records import Message, Rollout, Score
from prorl_gym.settings import ResolvedSettings, resolve_settings

_CONTEXT = 3
"""Equal lines shown around a difference."""

_MAX_COMPARED_LINES = 200
"""Lines of each text that are compared line by line. The time of that grows with their square."""

_VOLATILE_PATTERNS = (
    (re.compile(r"\b0x[0-9a-fA-F]{4,16}\b"), "0x…"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"), "<time>"),
    (re.compile(r"\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}\d{1,2} (?:\d\d:\d\d| \d{4})"), "<time>"),
    (re.compile(r"\b\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\b"), "<time>"),
    (re.compile(r"\b(real|user|sys)([ \t]{1,8})\d{1,4}m\d{1,2}\.\d{1,3}s"), r"\1\2<seconds>"),
    (re.compile(r"\b\d{1,9}(?:\.\d{1,9})? ?(?:seconds|secs|sec|ms|us|ns|s)\b"), "<seconds>"),
    (re.compile(r"\b(pid|PID)([ =:]{1,4})\d{1,10}\b"), r"\1\2<pid>"),
    (re.compile(r"^(\[\d{1,4}\]) \d{1,10}$", re.MULTILINE), r"\1 <pid>"),
)
"""Differs from run to run without a meaning: addresses, times, durations, process ids."""


@runtime_checkable
class SupportsWrongSteps(Protocol):
    """An environment with plausible wrong trajectories of its rows."""

    def wrong_steps(self, row: Mapping[str, Any], seed: int) -> Sequence[ScriptedStep]: ...


def gold_steps(environment: str | Environment[Any], row: Mapping[str, Any]) -> list[ScriptedStep]:
    """Return the turns that solve a row. Raises ``TaskError``."""
    return list(_resolve_environment(environment).gold_steps(row))


def wrong_steps(environment: str | Environment[Any], row: Mapping[str, Any], seed: int) -> list[ScriptedStep]:
    """Return plausible turns that do not solve a row; the same ones for the same seed. Raises ``TaskError``."""
    found = _resolve_environment(environment)
    if isinstance(found, SupportsWrongSteps):
        return list(found.wrong_steps(row, seed))
    return [ScriptedStep("I could not find an answer.")]


def task_text(row: Mapping[str, Any]) -> str:
    """Return the text by which the oracle recognises a row in a prompt: its question, which prompts hold verbatim.

    Rows of public SWE collections call it ``problem_statement``.
    """
    return str(row.get("question") or row.get("problem_statement") or "").strip()


def fill_step(step: ScriptedStep, observation: str) -> ScriptedStep:
    """Return the step with ``{observation}`` replaced by the text of the last tool result."""
    return ScriptedStep(
        fill_observation(step.text, observation), step.tool, fill_observation(step.arguments, observation)
    )


def _resolve_environment(environment: str | Environment[Any]) -> Environment[Any]:
    return registry.get(environment) if isinstance(environment, str) else environment


@dataclass(frozen=True, slots=True)
class PlayResult:
    """Result of a script."""

    episode: Episode
    artifacts: Artifacts
    score: Score
    turns: int


async def play_script(
    environment: Environment[Any], row: Mapping[str, Any], steps: Sequence[ScriptedStep], leases: Leases
) -> PlayResult:
    """Play ``steps`` on a row with the environment's own settings, then grade. The caller closes the leases.

    Raises ``RolloutError``: the row is bad, a sandbox or the grader failed.
    """
    settings = resolve_settings(environment.settings)
    policy = ScriptedPolicy(steps, settings.max_turns)
    episode, artifacts, score = await _play(environment, row, settings, leases, lambda _: policy)
    return PlayResult(episode, artifacts, score, policy.turn_count)


async def _play(
    environment: Environment[Any],
    row: Mapping[str, Any],
    settings: ResolvedSettings,
    leases: Leases,
    policy_for: Callable[[Episode], Policy],
) -> tuple[Episode, Artifacts, Score]:
    task = environment.parse_row(row)
    episode = await environment.init(task, leases, settings)
    artifacts = Artifacts()
    try:
        await environment.run(task, episode, RunContext(policy_for(episode), leases, settings, artifacts))
    except LimitReached:
        pass  # graded as it is, like a rollout
    return episode, artifacts, await environment.evaluate(task, artifacts, leases, settings)


@runtime_checkable
class SupportsRowCheck(Protocol):
    """An environment that finds faults of a row that no trajectory shows."""

    async def check_row(self, row: Mapping[str, Any], leases: Leases) -> str:
        """Return what is wrong with a row whose gold trajectory is rewarded; empty when nothing is."""
        ...


async def find_row_problem(environment: Environment[Any], row: Mapping[str, Any], leases: Leases) -> str:
    """Return what the environment's own check finds wrong with a row. The caller closes the leases."""
    return await environment.check_row(row, leases) if isinstance(environment, SupportsRowCheck) else ""


@dataclass(frozen=True, slots=True)
class ReplayedAction:
    """Result of one action for the agent, recorded and replayed."""

    turn: int
    """From 1; 0: the prompt."""
    action: str
    """Tool that was called; empty for messages without a call."""
    recorded: str | None
    """``None`` when nothing was recorded."""
    replayed: str | None
    """``None`` when the replay got nothing."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of a replay."""

    score: Score
    actions: tuple[ReplayedAction, ...]


class _RecordedPolicy:
    """Implements ``Policy``: the turns of a record, and the limit that ended it after the last one."""

    def __init__(self, rollout: Rollout, begin: int) -> None:
        self._turns = iter(_recorded_turns(rollout, begin))
        self._limit = rollout.outcome.limit

    async def start_conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        return await self.respond(messages)

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        turn = next(self._turns, None)
        if turn is None:
            raise LimitReached(self._limit or Limit.TURNS)
        return turn


async def replay(
    environment: Environment[Any], row: Mapping[str, Any], rollout: Rollout, leases: Leases
) -> ReplayResult:
    """Play a record's turns on its row under its settings, then grade. The caller closes the leases.

    Raises ``RolloutError``: the row is bad, the record is of an agent program, a sandbox or the grader failed.
    """
    if rollout.settings is not None and rollout.settings.agent:
        what = f"Rollout {rollout.rollout_id} was made by the agent program '{rollout.settings.agent}'."
        raise TaskError(FailureKind.BAD_ROW, what, "Only turns of the built-in loop can be played again.")
    begin = rollout.prompt_messages
    settings = rollout.settings or resolve_settings(environment.settings)
    episode, artifacts, score = await _play(
        environment, row, settings, leases, lambda episode: _RecordedPolicy(rollout, begin or len(episode.messages))
    )
    begin = begin or len(episode.messages)
    prompt = ReplayedAction(0, "", _prompt_text(rollout.messages[:begin]), _prompt_text(episode.messages))
    answered = _compare_observations(rollout.messages[begin:], artifacts.messages[len(episode.messages) :])
    if rollout.outcome.status != "completed":  # its last actions may have no answer
        last = max((one.turn for one in answered), default=0)
        answered = [one for one in answered if one.turn < last or one.recorded is not None]
    return ReplayResult(score, (prompt, *answered))


def _recorded_turns(rollout: Rollout, begin: int) -> list[AssistantTurn]:
    """Return the policy's turns as the agent loop takes them; the first ``begin`` messages are the prompt."""
    messages = rollout.messages[begin:]
    places = [place for place, message in enumerate(messages) if message.role == "assistant"]
    turns: list[AssistantTurn] = []
    for place, following in zip(places, [*places[1:], len(messages)], strict=True):
        said = messages[place]
        complaints = tuple(one.content for one in messages[place + 1 : following] if one.role == "user")
        turns.append(AssistantTurn(said.content, said.tool_calls, complaints))
    generations = [generation for segment in rollout.segments for generation in segment.generations]
    was_truncated = bool(generations) and generations[-1].finish_reason == "length"
    if turns and rollout.outcome.limit is Limit.TOKENS and was_truncated:
        turns[-1] = AssistantTurn(turns[-1].text, turns[-1].tool_calls, turns[-1].parse_errors, "length")
    return turns


def _prompt_text(messages: Sequence[Message]) -> str:
    return "\n".join(f"[{message.role}]\n{message.content}" for message in messages)


def _compare_observations(then: Sequence[Message], now: Sequence[Message]) -> list[ReplayedAction]:
    """Pair observations turn by turn; ``None`` where one side has none."""
    before, after = _observations_by_turn(then), _observations_by_turn(now)
    said: list[ReplayedAction] = []
    for turn, (recorded, replayed) in enumerate(zip_longest(before, after, fillvalue=()), 1):
        for old, new in zip_longest(recorded, replayed):
            named: Message = old or new
            action = (named.name or "tool") if named.role == "tool" else ""
            said.append(ReplayedAction(turn, action, old and old.content, new and new.content))
    return said


def _observations_by_turn(messages: Sequence[Message]) -> list[list[Message]]:
    turns: list[list[Message]] = []
    for message in messages:
        if message.role == "assistant":
            turns.append([])
        elif turns:
            turns[-1].append(message)
    return turns


def mask_volatile(text: str) -> str:
    """Return the text with a placeholder for each address, time, duration and process id."""
    for pattern, word in _VOLATILE_PATTERNS:
        text = pattern.sub(word, text)
    return text


def replay_diff(recorded: str, replayed: str, name: str) -> list[str]:
    """Return a unified diff with ``name`` in its header, empty if there is no difference."""
    if recorded == replayed:
        return []
    old, new = recorded.split("\n"), replayed.split("\n")
    begin = _common_prefix_length(old, new)
    end = min(_common_prefix_length(old[::-1], new[::-1]), len(old) - begin, len(new) - begin)
    begin, end = max(0, begin - _CONTEXT), max(0, end - _CONTEXT)
    old, new = old[begin : len(old) - end], new[begin : len(new) - end]
    where = f"from line {begin + 1}" if begin else ""
    more = max(len(old), len(new)) - _MAX_COMPARED_LINES
    lines = unified_diff(
        old[:_MAX_COMPARED_LINES],
        new[:_MAX_COMPARED_LINES],
        f"{name}: recorded",
        f"{name}: replayed",
        where,
        where,
        _CONTEXT,
        "",
    )
    return [*lines, *([f"... {more} more lines are not compared"] if more > 0 else [])]


def _common_prefix_length(one: Sequence[str], other: Sequence[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
