"""Science questions from public data sets: what becomes a row, and what is left out."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stem_support import ENVIRONMENT

from prorl_gym.data.converters import select_converters


def convert(row: dict[str, Any]) -> Any:
    converter = next(one for one in select_converters("stem", "auto") if one.matches(row))
    return converter.convert(row)


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
