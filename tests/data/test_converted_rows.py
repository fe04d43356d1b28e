"""Rows of public data sets, a line each in a corpus: what each becomes, or why it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.data import converters
from prorl_gym.environments.code.environment import CodeEnvironment
from prorl_gym.environments.math import answer_equality
from prorl_gym.environments.math.environment import MathEnvironment, MathGrader
from prorl_gym.environments.playback import play_script
from tests.environments.stem.stem_support import ENVIRONMENT, Nothing
from tests.environments.worker_support import InlineWorkers

LINES = (Path(__file__).parents[1] / "corpora" / "converted_rows.jsonl").read_text(encoding="utf-8").splitlines()
MATH = MathEnvironment(MathGrader(InlineWorkers(answer_equality.grade)))
ENVIRONMENTS: dict[str, Any] = {"math": MATH, "stem": ENVIRONMENT, "code": CodeEnvironment()}


@pytest.mark.parametrize("line", LINES, ids=map(str, range(1, len(LINES) + 1)))
async def test_a_row_is_read_and_solved_by_its_answer_or_refused(line: str):
    wanted = json.loads(line)
    name, row = wanted.pop("environment"), wanted.pop("row")
    converter = next(one for one in converters.select_converters(name) if one.matches(row))
    made = converter.convert(row)
    if "refused" in wanted:
        assert isinstance(made, str) and wanted["refused"] in made
        return
    assert made == converter.convert(row)
    assert isinstance(made, dict)
    made.pop(converters.LEFT_OUT, None)
    assert {field: made[field] for field in wanted} == wanted
    gold = ENVIRONMENTS[name].gold_steps(made)
    assert (await play_script(ENVIRONMENTS[name], made, gold, Nothing())).score.reward == 1.0
    assert (await play_script(ENVIRONMENTS[name], made, (), Nothing())).score.reward == 0.0
