"""Science questions from public data sets: what becomes a row, and what is left out."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stem_support import ENVIRONMENT, Nothing

from prorl_gym.data.converters import select_converters
from prorl_gym.environments.playback import play_script

OPTIONS = "Which is a noble gas?\n(A) oxygen\n(B) argon\n(C) chlorine"


def convert(row: dict[str, Any]) -> Any:
    converter = next(one for one in select_converters("stem", "auto") if one.matches(row))
    return converter.convert(row)


@pytest.mark.parametrize(
    ("row", "kind", "answer"),
    [
        ({"problem": "g?", "matched_solution": "So it is \\boxed{9.81\\,\\text{m}}."}, "numeric", "9.81\\,\\text{m}"),
        ({"problem": "g?", "answer": "$9.81$ m/s^2"}, "numeric", "$9.81$ m/s^2"),
        ({"problem": "E?", "solution": "Thus\n\\[\\boxed{\\frac{m}{2}v^2}\\]"}, "expression", "\\frac{m}{2}v^2"),
        ({"problem": "What?", "solution": "We see it.\nThe answer is carbon dioxide."}, "text", "carbon dioxide"),
        ({"problem": OPTIONS, "solution": "Argon is inert. **Answer:** (B)"}, "choice", "B"),
        ({"problem": OPTIONS, "answer": "argon"}, "choice", "B"),
        ({"question": "Which?", "choices": ["x", "y", "z"], "answer": 2}, "choice", "C"),
        ({"question": "Which?", "options": {"A": "x", "B": "y"}, "answer": "B"}, "choice", "B"),
        ({"question": "Which?", "options": ["iron", "gold"], "answer": "gold"}, "choice", "B"),
    ],
)  # fmt: skip
async def test_rows_are_made_and_solved_by_their_own_answer(row: dict[str, Any], kind: str, answer: str):
    made = convert(row)
    assert (made["kind"], made["answer"]) == (kind, answer)
    assert made == convert(row)
    assert made["id"].startswith("stem-")
    assert (await play_script(ENVIRONMENT, made, ENVIRONMENT.gold_steps(made), Nothing())).score.reward == 1.0
    assert (await play_script(ENVIRONMENT, made, (), Nothing())).score.reward == 0.0
    assert made["question"] in ("g?", "E?", "What?", "Which?", "Which is a noble gas?")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"problem": "Why?", "solution": "Because."}, "names no final answer"),
        ({"problem": "", "answer": "5"}, "no problem"),
        ({"problem": None, "answer": "5"}, "no problem"),
        ({"problem": "Why?", "answer": None}, "names no final answer"),
        ({"problem": "Why?", "answer": "because the heat of the reaction is the largest of all"}, "long answer"),
        ({"problem": "Why?", "answer": "x" * 300}, "long answer"),
        ({"problem": OPTIONS, "answer": "helium"}, "none of the options"),
        ({"question": "Which?", "choices": ["x", "y"], "answer": 5}, "none of the options"),
        ({"question": "Which?", "choices": ["x"], "answer": 0}, "not a row"),
        ({"question": "Which?", "choices": "xy", "answer": 0}, "no options"),
        ({"question": "Which?", "choices": ["x", "x "], "answer": 0}, "not a row"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_skipped_with_its_reason(row: dict[str, Any], reason: str):
    made = convert(row)
    assert isinstance(made, str)
    assert reason in made


VALUES = st.one_of(
    st.none(), st.integers(), st.text(max_size=40), st.lists(st.text(max_size=5), max_size=4), st.booleans()
)


@given(
    row=st.dictionaries(st.sampled_from(["problem", "answer", "solution", "question", "choices", "options"]), VALUES)
)
@settings(derandomize=True, max_examples=80, deadline=None, database=None)
def test_no_row_breaks_a_conversion(row: dict[str, Any]):
    for converter in select_converters("stem", "auto"):
        if converter.matches(row):
            made = converter.convert(row)
            assert isinstance(made, str) or ENVIRONMENT.parse_row(made)
