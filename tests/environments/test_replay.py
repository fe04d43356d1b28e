"""Replaying records in real sandboxes: the same answers as recorded, and a difference where one was tampered with."""

import pytest
from example_turns import EXAMPLE_ROWS
from sample_records import record

from prorl_gym.environments import registry
from prorl_gym.environments.playback import ReplayedAction, gold_steps, play_script, replay
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.row_format import DiskRow
from prorl_gym.errors import Limit
from prorl_gym.records import Message, Outcome, Rollout, ToolCall
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.settings import resolve_settings

NAMES = ("code", "math", "stem")
ROWS = [row for row in EXAMPLE_ROWS if row.environment in NAMES]


async def played(row: DiskRow, leases: Leases) -> Rollout:
    """Return the record of the row's gold trajectory."""
    assert row.environment is not None
    environment = registry.get(row.environment)
    found = await play_script(environment, row.task, gold_steps(environment, row.task), leases)
    rollout = record_of(row, found.artifacts.messages, len(found.episode.messages))
    return rollout.model_copy(update={"score": found.score})


def record_of(row: DiskRow, messages: list[Message], prompt: int, outcome: Outcome | None = None) -> Rollout:
    assert row.environment is not None
    settings = resolve_settings(registry.get(row.environment).settings)
    return record(
        "r",
        outcome,
        reward=None,
        environment=row.environment,
        messages=messages,
        prompt_messages=prompt,
        settings=settings,
    )


def differing(said: tuple[ReplayedAction, ...]) -> list[ReplayedAction]:
    return [one for one in said if one.recorded != one.replayed]


async def again(row: DiskRow, rollout: Rollout, backend: SandboxBackend):
    leases = SandboxLeases(backend)
    try:
        return await replay(registry.get(rollout.environment), row.task, rollout, leases)
    finally:
        await leases.close()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_a_gold_trajectory_replays_to_the_same_words_and_score(
    row: DiskRow, leases: Leases, backend: SandboxBackend
):
    before = await played(row, leases)
    replayed = await again(row, before, backend)
    assert differing(replayed.actions) == []
    assert replayed.score.reward == before.reward == 1.0
    assert len(replayed.actions) == 1 + sum(message.role == "tool" for message in before.messages)


def tampered(rollout: Rollout, place: int, text: str) -> Rollout:
    messages = list(rollout.messages)
    messages[place] = messages[place].model_copy(update={"content": text})
    return rollout.model_copy(update={"messages": messages})


def with_tools(name: str) -> DiskRow:
    return next(
        row for row in ROWS if row.environment == name and any(step.tool for step in gold_steps(name, row.task))
    )


@pytest.mark.parametrize("name", NAMES)
async def test_a_tampered_answer_is_found(name: str, leases: Leases, backend: SandboxBackend):
    row = with_tools(name)
    before = await played(row, leases)
    place = next(place for place, message in enumerate(before.messages) if message.role == "tool")
    replayed = await again(row, tampered(before, place, "something else"), backend)
    (difference,) = differing(replayed.actions)
    assert (difference.recorded, difference.replayed) == ("something else", before.messages[place].content)
    assert (difference.turn, difference.action) == (1, before.messages[place].name)
    assert replayed.score.reward == 1.0


async def test_a_tampered_turn_changes_the_reward(leases: Leases, backend: SandboxBackend):
    row = ROWS[0]
    before = await played(row, leases)
    last = max(place for place, message in enumerate(before.messages) if message.role == "assistant")
    wrong = before.messages[last].model_copy(update={"content": "I give up.", "tool_calls": ()})
    replayed = await again(row, before.model_copy(update={"messages": [*before.messages[:last], wrong]}), backend)
    assert replayed.score.reward == 0.0


async def test_another_prompt_is_found(leases: Leases, backend: SandboxBackend):
    before = await played(ROWS[0], leases)
    replayed = await again(ROWS[0], tampered(before, 1, "Another question."), backend)
    assert [one.turn for one in differing(replayed.actions)] == [0]


def call(name: str, arguments: str) -> Message:
    return Message(role="assistant", content="", tool_calls=(ToolCall(id="1", name=name, arguments=arguments),))


async def test_an_action_that_a_limit_cut_off_needs_no_answer(backend: SandboxBackend):
    row = with_tools("math")
    prompt = [Message(role="user", content="?")]
    cut = Outcome(status="truncated", limit=Limit.TIME)
    replayed = await again(row, record_of(row, [*prompt, call("python", '{"code": "6*7"}')], 1, cut), backend)
    assert [one.turn for one in replayed.actions] == [0]
    assert replayed.score.reward == 0.0


async def test_a_call_that_could_not_be_read_is_complained_of_again(backend: SandboxBackend):
    row = with_tools("math")
    messages = [
        Message(role="user", content="?"),
        Message(role="assistant", content="hm"),
        Message(role="user", content="The call is not JSON."),
        Message(role="assistant", content="Never mind."),
    ]
    replayed = await again(row, record_of(row, messages, 1), backend)
    assert differing(replayed.actions)[1:] == []
    assert [one.replayed for one in replayed.actions[1:]] == ["The call is not JSON."]
