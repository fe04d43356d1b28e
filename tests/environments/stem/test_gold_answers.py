"""Gold answers as public data sets write them: nearly all become rows, and what does not is named by reason."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from stem_support import ENVIRONMENT, GRADER

from prorl_gym.environments.math.answer_equality import is_accepted
from prorl_gym.environments.prepare import Skipped, select_converters
from prorl_gym.environments.prepare.math_converters import simplify_gold, unreadable_reason

CORPUS = Path(__file__).parents[2] / "corpora" / "golds.jsonl"
GOLDS: list[dict[str, str]] = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
CONVERTERS = {"math": select_converters("math", "deepscaler")[0], "stem": select_converters("stem", "scp")[0]}


def prepared(environment: str, gold: str) -> Any:
    return CONVERTERS[environment].convert({"problem": "How much is it?", "answer": gold})


@pytest.mark.parametrize("environment", ["math", "stem"])
def test_at_most_five_percent_of_plausible_golds_are_refused(environment: str):
    golds = [row["gold"] for row in GOLDS if row["environment"] == environment]
    refused = [gold for gold in golds if isinstance(prepared(environment, gold), Skipped)]
    assert len(golds) >= 100
    assert len(refused) <= 0.05 * len(golds), refused


def test_what_becomes_a_row_of_mathematics_is_right_for_itself():
    made = [prepared("math", row["gold"]) for row in GOLDS if row["environment"] == "math"]
    answers = [row["answer"] for row in made if not isinstance(row, Skipped)]
    assert [answer for answer in answers if not is_accepted(answer, answer, "How much is it?")] == []


def test_what_becomes_a_row_of_science_is_right_for_itself():
    async def wrong() -> list[str]:
        made = [prepared("stem", row["gold"]) for row in GOLDS if row["environment"] == "stem"]
        rows = [ENVIRONMENT.parse_row(row) for row in made if not isinstance(row, Skipped)]
        return [row.answer for row in rows if (await GRADER.grade_by_rules(row, row.answer)).verdict != "right"]

    assert asyncio.run(wrong()) == []


@pytest.mark.parametrize(
    ("gold", "reason"),
    [
        (r"A \subseteq B", "the answer is a statement, not a value"),
        (r"\forall x > 0, x^2 \ge 0", "the answer is a statement, not a value"),
        (r"\triangle ABC \text{ is isosceles}", "the answer is a statement, not a value"),
        (r"\text{at most } 5", "the answer is a bound in words"),
        (r"n-1 \text{ if } n \text{ is even}, n \text{ otherwise}", "the answer has cases that cannot be read"),
        (r"2 \text{ boys and } 3 \text{ girls}", "the answer joins several quantities by words"),
        (r"3 \text{ m} \times 4 \text{ m}", "the answer holds several quantities"),
        ("the set of all those numbers that are divisible by three", "the answer is prose"),
        (r"\frac{1}{", "the answer cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused_by_reason(gold: str, reason: str):
    assert prepared("math", gold) == Skipped(reason)


@pytest.mark.parametrize(
    ("gold", "reason"),
    [
        (r"0.2\text{ to }0.3\text{ mm}", "the answer is a range"),
        ("between 4 and 6 N", "the answer is a range"),
        ("at most 5", "the answer is a bound in words"),
        (r"2 \text{ boys and } 3 \text{ girls}", "the answer joins several quantities by words"),
    ],
)
def test_numbers_that_cannot_be_read_are_no_short_text(gold: str, reason: str):
    made = prepared("stem", gold)
    assert isinstance(made, Skipped)
    assert made.reason.startswith(reason)


@pytest.mark.parametrize(
    ("gold", "kind"),
    [
        (r"\frac{1}{2}kA^2", "expression"),
        ("2mgR", "expression"),
        ("x^2 + y^2 = 4", "expression"),
        (r"n \lambda = 2 d \sin \theta", "expression"),
        (r"x = -1 \pm \sqrt{2}", "expression"),
        (r"1 \text{ or } 3", "expression"),
        ("300 K", "numeric"),
        (r"\text{pH} = 4.74", "numeric"),
        (r"9\pi \text{ square units}", "numeric"),
        ("H2SO4", "text"),
        (r"\text{Fe}^{3+}", "text"),
        (r"^{14}_{6}\text{C}", "text"),
        ("2H2 + O2 → 2H2O", "text"),
        ("1s^2 2s^2 2p^6", "text"),
        (r"\alpha \text{-helix}", "text"),
        ("No", "text"),
        ("3d^{10}", "text"),
        ("(R)-2-butanol", "text"),
        ("D-glucose", "text"),
        ("ΔH = -92 kJ", "numeric"),
        (r"E^\circ = 1.10\text{ V}", "numeric"),
        (r"12\pi cm^2", "numeric"),
    ],
)
def test_science_is_compared_as_what_it_is(gold: str, kind: str):
    assert prepared("stem", gold)["kind"] == kind


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
