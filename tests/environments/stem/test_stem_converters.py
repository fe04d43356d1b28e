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
        ({"question": "Which?", "options": {"B": "Ganymede", "A": "Io"}, "answer": "B"}, "choice", "B"),
        ({"question": "Which?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "A"}, "choice", "A"),
        ({"question": "Which?", "choices": {"label": ["1", "2"], "text": ["x", "y"]}, "answerKey": "2"}, "choice", "B"),
        ({"question": "Which?", "options": ["Vega", "Sun", None], "answer": "B"}, "choice", "B"),
        ({"question": "Which?", "options": {"A": "x", "B": "y", "C": None}, "answer_idx": "B"}, "choice", "B"),
        ({"question": "Which?", "options": [{"key": "A", "value": "x"}, {"key": "B", "value": "y"}], "answer": "y"},
         "choice", "B"),
        ({"question": "Which?", "options": ["O", "C", "N", "B"], "answer": "B", "answer_index": 3}, "choice", "D"),
        ({"question": "Which?", "options": ["4", "3"], "answer": "4", "answer_letter": "A"}, "choice", "A"),
        ({"question": "Which?", "mc1_targets": {"choices": ["x", "y"], "labels": [0, 1]}}, "choice", "B"),
        ({"question": "Which?", "options": ["4", "3", "2", "1"], "answer": 1}, "choice", "B"),
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
        ({"question": "Which?", "choices": ["x", "y"], "answer": "A", "answer_index": 1}, "disagree"),
        ({"question": "Which?", "choices": ["x", "y"], "answer": "z", "answer_index": 1}, "none of the options"),
        ({"question": "Which?", "options": ["O", "C", "N", "B"], "answer": "B"}, "label of one option"),
        ({"question": "Which?", "options": ["4", "3", "2", "1"], "answer": "1"}, "label of one option"),
        ({"question": "Which?", "options": {"A": "x", "C": "y"}, "answer": "C"}, "labels of the options"),
        ({"question": "Which?", "options": {"A": "x", "B": None, "C": "y"}, "answer": "C"}, "an option is no text"),
        ({"question": "Which?", "options": {"x": "1", "y": "2"}, "answer": "x"}, "labels of the options"),
        ({"question": "Which?", "options": ["B. x", "A. y"], "answer": "A"}, "the letter of another"),
        ({"question": "Which?", "options": [["x"], ["y"]], "answer": "A"}, "an option is no text"),
        ({"question": "Which?", "options": [str(n) for n in range(30)], "answer": "A"}, "unknown shape"),
        ({"question": "Which?", "choices": {"text": ["x", "y"], "label": ["A"]}, "answer": "A"}, "malformed"),
        ({"question": "Which?", "choices": "xy", "answer": 0}, "no options"),
        ({"question": "Which?", "choices": ["x", "x "], "answer": 0}, "not a row"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_skipped_with_its_reason(row: dict[str, Any], reason: str):
    made = convert(row)
    assert isinstance(made, str)
    assert reason in made


@pytest.mark.parametrize("form", ["{}. {}", "({}){}", "{}) {}", "{}: {}"])
def test_letters_in_the_texts_of_options_are_not_shown_beside_others(form: str):
    options = [
        form.format(letter, text) for letter, text in zip("ABCD", ("Io", "Ganymede", "Titan", "A. B."), strict=True)
    ]
    made = convert({"question": "Which?", "options": options, "answer": "B"})
    assert (made["options"], made["answer"]) == (["Io", "Ganymede", "Titan", "A. B."], "B")
    assert convert({"question": "Which?", "options": ["E. coli", "B. cereus"], "label": "A"})["options"][0] == "E. coli"


def test_an_ending_continues_its_text():
    made = convert({"ind": 4, "ctx": "He sits.", "ctx_a": "He", "endings": ["Up.", "Down."], "label": "1"})
    assert made["question"].endswith("He sits.")
    assert (made["options"], made["answer"]) == (["Up.", "Down."], "B")


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
