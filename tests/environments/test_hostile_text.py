"""Fuzz: whatever a model writes, the host side answers with a value or its own complaint, never anything else."""

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.agents.arguments import BadArguments, read_arguments
from prorl_gym.agents.tools.bash import _SPEC
from prorl_gym.environments.code.compare import read_result, same_output, same_result
from prorl_gym.environments.code.solution import NoProgramError, find_program
from prorl_gym.environments.math import spelling
from prorl_gym.environments.math.boxed import NoAnswerError, last_boxed
from prorl_gym.environments.math.words import words

FUZZ = settings(max_examples=150, deadline=None, derandomize=True)
LATEX = st.lists(
    st.sampled_from(["\\boxed", "{", "}", "\\", "$", "4", "^", "_", "%", "√", "½", "²", " ", "e", "="])
).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@FUZZ
@given(st.text() | LATEX)
def test_box_is_found_or_missed_with_a_reason(text: str):
    try:
        content = last_boxed(text)
    except NoAnswerError as complaint:
        assert str(complaint)
    else:
        assert content.strip() == content != ""
        assert content in text


@FUZZ
@given(st.text() | LATEX)
def test_spelling_accepts_everything_and_settles(text: str):
    plain = spelling.plain(text)
    for form in (spelling.key, spelling.formula, spelling.number_with_commas, spelling.untexted, words):
        form(plain)
    assert "$" not in plain


@FUZZ
@given(st.text() | st.lists(st.sampled_from(["```", "python", "\n", "x", " "])).map("".join))
def test_program_is_found_or_missed_with_a_reason(text: str):
    try:
        assert find_program(text).strip()
    except NoProgramError as complaint:
        assert str(complaint)


@FUZZ
@given(st.text(), st.binary())
def test_output_is_compared_without_raising(expected: str, actual: bytes):
    assert same_output(expected, actual) in (True, False)
    assert same_output(expected, expected.encode())


@FUZZ
@given(JSON, JSON, st.binary())
def test_results_are_compared_without_raising(one: object, other: object, raw: bytes):
    assert same_result(one, one)
    assert same_result(one, other) in (True, False)
    with suppress(ValueError):
        read_result(raw)


@FUZZ
@given(st.text() | st.dictionaries(st.text(), JSON).map(repr))
def test_arguments_are_read_or_refused_with_a_reason(text: str):
    try:
        assert isinstance(read_arguments(_SPEC, text).get("command", ""), str)
    except BadArguments as complaint:
        assert "Expected: bash(command?: string, is_input?: boolean, restart?: boolean)" in str(complaint)
