"""The example rows: solved by gold, not by silence or the wrong trajectory, and mostly not without their tools."""

import json
from pathlib import Path
from typing import Any

import pytest
from example_turns import EXAMPLE_ROWS

from prorl_gym.environments import registry
from prorl_gym.environments.playback import fill_step, gold_steps, play_script, task_text, wrong_steps
from prorl_gym.environments.protocol import Leases, ScriptedStep
from prorl_gym.environments.row_format import DiskRow, to_gym_row

NAMES = ("code", "math", "stem")
ROWS = [row for row in EXAMPLE_ROWS if row.environment in NAMES]


def ids(row: DiskRow) -> str:
    return row.name


def needs_observation(row: DiskRow) -> bool:
    return any(
        "{observation}" in json.dumps([step.text, step.arguments]) for step in gold_steps(row.environment, row.task)
    )


def raw(row: DiskRow) -> dict[str, Any]:
    path, line = row.where.rsplit(":", 1)
    return json.loads(Path(path).read_text(encoding="utf-8").splitlines()[int(line) - 1])


def test_there_are_five_of_each():
    assert [row.environment for row in ROWS] == [name for name in NAMES for _ in range(5)]
    assert len({row.name for row in ROWS}) == 5 * len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_most_gold_trajectories_use_what_a_tool_said(name: str):
    rows = [row for row in ROWS if row.environment == name]
    assert 2 * sum(map(needs_observation, rows)) >= len(rows)


@pytest.mark.parametrize("row", ROWS, ids=ids)
async def test_wrong_trajectory_uses_a_tool_and_scores_zero(row: DiskRow, leases: Leases):
    steps = wrong_steps(row.environment, row.task, seed=1)
    played = await play_script(registry.get(row.environment), row.task, steps, leases)
    assert played.score.reward == 0.0
    said = [message.content for message in played.artifacts.messages if message.role == "tool"]
    assert said
    assert not any("Traceback" in text or "not accepted" in text for text in said)


@pytest.mark.parametrize("row", [row for row in ROWS if needs_observation(row)], ids=ids)
async def test_answer_without_the_observation_scores_zero(row: DiskRow, leases: Leases):
    last: ScriptedStep = fill_step(gold_steps(row.environment, row.task)[-1], "")
    assert (await play_script(registry.get(row.environment), row.task, [last], leases)).score.reward == 0.0


@pytest.mark.parametrize("row", ROWS, ids=ids)
async def test_gym_prompt_is_the_environments_own(row: DiskRow):
    assert raw(row) == await to_gym_row(registry.get(row.environment), row.task, f"prorl_{row.environment}_agent")


@pytest.mark.parametrize("row", ROWS, ids=ids)
async def test_prompt_holds_the_question_but_not_the_gold(row: DiskRow, leases: Leases):
    prompt = json.dumps((await to_gym_row(registry.get(row.environment), row.task, "a"))["responses_create_params"])
    assert json.dumps(task_text(row.task))[1:-1] in prompt
    for secret in ("gold_steps", "cases", "expected", "observation"):
        assert secret not in prompt


def test_rows_are_recognised_by_their_text():
    texts = [task_text(row.task) for row in ROWS]
    assert not any(one in other for one in texts for other in texts if one is not other)
