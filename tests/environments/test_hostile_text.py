"""Fuzz: whatever a model writes, the host side answers with a value or its own complaint, never anything else."""

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.agents.tool_arguments import BadArguments, parse_arguments
from prorl_gym.agents.tools import BashTool
from prorl_gym.environments.answers.tex import NoAnswerError, last_boxed
from prorl_gym.environments.code.environment import (
    NoProgramError,
    find_program,
    outputs_match,
    parse_result,
    results_match,
)
from prorl_gym.environments.math import answer_text
from prorl_gym.environments.math.words import normalize_words

BASH = BashTool(None, 1.0)  # type: ignore[arg-type]  # no sandbox is needed for its arguments
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
    plain = answer_text.normalize_latex(text)
    for form in (
        answer_text.comparison_key,
        answer_text.normalize_formula,
        answer_text.parse_comma_number,
        answer_text.strip_text_macros,
        normalize_words,
    ):
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
    assert outputs_match(expected, actual) in (True, False)
    assert outputs_match(expected, expected.encode())


@FUZZ
@given(JSON, JSON, st.binary())
def test_results_are_compared_without_raising(one: object, other: object, raw: bytes):
    assert results_match(one, one)
    assert results_match(one, other) in (True, False)
    with suppress(ValueError):
        parse_result(raw)


@FUZZ
@given(st.text() | st.dictionaries(st.text(), JSON).map(repr))
def test_arguments_are_read_or_refused_with_a_reason(text: str):
    try:
        assert isinstance(parse_arguments(BASH.spec, text).get("command", ""), str)
    except BadArguments as complaint:
        assert "Expected: bash(command?: string, is_input?: boolean, restart?: boolean)" in str(complaint)
