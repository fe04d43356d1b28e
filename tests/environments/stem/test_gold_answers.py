"""Gold answers as public data sets write them: nearly all become rows, and what does not is named by reason."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from stem_support import ENVIRONMENT, GRADER

from prorl_gym.data.answer_converters import simplify_gold, unreadable_reason
from prorl_gym.data.converters import select_converters
from prorl_gym.environments.math.answer_equality import is_accepted


def read_lines(name: str) -> list[dict[str, str]]:
    file = Path(__file__).parents[2] / "corpora" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


GOLDS = read_lines("golds")
CONVERTERS = {"math": select_converters("math", "deepscaler")[0], "stem": select_converters("stem", "scp")[0]}


def prepared(environment: str, gold: str) -> Any:
    return CONVERTERS[environment].convert({"problem": "How much is it?", "answer": gold})


@pytest.mark.parametrize("environment", ["math", "stem"])
def test_at_most_five_percent_of_plausible_golds_are_refused(environment: str):
    golds = [row["gold"] for row in GOLDS if row["environment"] == environment]
    refused = [gold for gold in golds if isinstance(prepared(environment, gold), str)]
    assert len(golds) >= 100
    assert len(refused) <= 0.05 * len(golds), refused


def test_what_becomes_a_row_of_mathematics_is_right_for_itself():
    made = [prepared("math", row["gold"]) for row in GOLDS if row["environment"] == "math"]
    answers = [row["answer"] for row in made if not isinstance(row, str)]
    assert [answer for answer in answers if not is_accepted(answer, answer, "How much is it?")] == []


def test_what_becomes_a_row_of_science_is_right_for_itself():
    async def wrong() -> list[str]:
        made = [prepared("stem", row["gold"]) for row in GOLDS if row["environment"] == "stem"]
        rows = [ENVIRONMENT.parse_row(row) for row in made if not isinstance(row, str)]
        return [row.answer for row in rows if (await GRADER.grade_by_rules(row, row.answer)).verdict != "right"]

    assert asyncio.run(wrong()) == []


@pytest.mark.parametrize("label", read_lines("gold_kinds"), ids=lambda label: label["gold"])
def test_an_answer_is_compared_as_what_it_is_or_refused_by_reason(label: dict[str, str]):
    made = prepared(label["environment"], label["gold"])
    if "refused" in label:
        assert made == label["refused"]
    else:
        assert made["kind"] == label["kind"]


@pytest.mark.parametrize(
    ("gold", "plain"),
    [
        (r"f(x) = x \text{ for all } x \in \mathbb{R}", "f(x) = x"),
        ("$f(x)=x+c$ where $c$ is an arbitrary constant", "f(x)=x+c"),
        ("0 . 5", "0.5"),
    ],
)
def test_a_clause_that_restricts_nothing_is_left_out(gold: str, plain: str):
    assert simplify_gold(gold).strip("$") == plain
    assert unreadable_reason(plain) is None


@pytest.mark.parametrize("gold", [r"x \text{ for all odd } x", r"-x^2 \text{ for } x < 0"])
def test_a_clause_that_restricts_an_answer_stays(gold: str):
    assert simplify_gold(gold) == gold
