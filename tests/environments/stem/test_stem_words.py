"""Choices and short texts."""

from string import ascii_uppercase

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prorl_gym.environments.stem import text_answers
from prorl_gym.environments.stem.environment import StemEnvironment, StemRow
from prorl_gym.environments.stem.text_answers import chosen_option
from prorl_gym.environments.stem.text_normalization import comparison_key
from prorl_gym.errors import TaskError

# ruff: noqa: RUF001 - look-alike signs are tested here

BOUNDED = settings(derandomize=True, max_examples=60, deadline=None, database=None)
OPTIONS = ["nucleus", "mitochondrion", "ribosome", "Golgi apparatus", "9.8 m/s^2", "10^5"]
TERMS = ["alpha", "Sodium", "beta decay", "H2O", "lead(II)", "x-ray", "Ångström", "7"]
WORDS = st.lists(st.sampled_from(TERMS), min_size=1, max_size=3)
FORMS = [
    "{0}",
    "({0})",
    "{0}.",
    "\\text{{{0}}}",
    "\\textbf{{({0})}}",
    "option {0}",
    "The answer is {0}",
    "[{0}]",
    "{0})",
]
BOTH = ["({0}) {1}", "{0}. {1}", "{0}: {1}", "\\text{{{0}) {1}}}", "{1} ({0})"]


def row(options: list[str], answer: str, *, shuffle: bool = True) -> StemRow:
    return StemRow(question="Which?", kind="choice", options=tuple(options), answer=answer, shuffle=shuffle)


@given(place=st.integers(0, 5), other=st.integers(0, 5), form=st.sampled_from(FORMS), both=st.sampled_from(BOTH))
@BOUNDED
def test_letter_text_or_both_agreeing(place: int, other: int, form: str, both: str):
    letter = ascii_uppercase[place]
    assert chosen_option(form.format(letter), OPTIONS) == chosen_option(form.format(letter.lower()), OPTIONS) == place
    assert (
        chosen_option(OPTIONS[place], OPTIONS) == chosen_option(both.format(letter, OPTIONS[place]), OPTIONS) == place
    )
    if other != place:
        assert chosen_option(both.format(letter, OPTIONS[other]), OPTIONS) is None
        for joined in ("{} or {}", "{}, {}", "{}{}", "{}/{}", "({}) and ({})", "{} not {}"):
            assert chosen_option(joined.format(letter, ascii_uppercase[other]), OPTIONS) is None


@given(options=st.lists(WORDS.map(" ".join), min_size=2, max_size=6, unique_by=comparison_key), data=st.data())
@BOUNDED
def test_shuffled_letters_mean_what_is_shown(options: list[str], data: st.DataObject):
    answer = data.draw(st.sampled_from(ascii_uppercase[: len(options)]))
    task = row(options, answer)
    shown = task.shown_options()
    assert sorted(shown) == sorted(options)
    assert shown == row(options, answer).shown_options()  # the same for every replica
    assert shown[ascii_uppercase.index(task.right_letter())] == options[ascii_uppercase.index(answer)]
    assert row(options, answer, shuffle=False).shown_options() == options
    moved = data.draw(st.permutations(options))  # the order in the file does not show through
    assert row(moved, "A").shown_options() == shown


def test_options_are_really_shuffled():
    orders = {row([f"{n} m", f"{n + 1} m", f"{n + 2} m"], "A").option_order() for n in range(40)}
    assert len(orders) == 6


@pytest.mark.parametrize(
    "last", ["all of the above", "both A and B", "None of these", "A and C", "neither of them", "only B"]
)
def test_options_that_mean_others_by_place_keep_them(last: str):
    assert row(["one", "two", "three", last], "D").option_order() == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"kind": "choice", "answer": "A"}, "2 to 26"),
        ({"kind": "choice", "answer": "C", "options": ["x", "y"]}, "from A to B"),
        ({"kind": "choice", "answer": "x", "options": ["x", "y"]}, "from A to B"),
        ({"kind": "choice", "answer": "A", "options": ["x y", "xy"]}, "the same"),
        ({"kind": "choice", "answer": "A", "options": ["x", "y"], "judge": True}, "open answers"),
        ({"kind": "text", "answer": "x", "options": ["x", "y"]}, "for kind 'choice'"),
        ({"kind": "numeric", "answer": "1", "accept": ["2"]}, "for kind 'text'"),
        ({"kind": "numeric", "answer": "1", "tolerance": -1}, "tolerance"),
        ({"kind": "number", "answer": "1"}, "kind"),
        ({"kind": "text", "answer": ""}, "answer"),
        ({"kind": "text", "answer": "x", "asnwer": "y"}, "asnwer"),
    ],
)
def test_bad_rows_say_what_is_wrong(fields: dict[str, object], complaint: str):
    with pytest.raises(TaskError, match=complaint):
        StemEnvironment().parse_row({"question": "Which?", **fields})


RESPELT = [
    "{}",
    "\\text{{{}}}",
    "\\mathrm{{{}}}",
    "  {} ",
    "{}.",
    "\\textbf{{{}}}",
    "the {}",
    "The answer is {}",
    '"{}"',
]


@given(words=WORDS, form=st.sampled_from(RESPELT), upper=st.booleans(), joint=st.sampled_from([" ", "-", "  ", "–"]))
@BOUNDED
def test_spelling_of_words_does_not_count(words: list[str], form: str, upper: bool, joint: str):
    gold = " ".join(words)
    assume("H2O" not in gold or not upper)  # formulas have their case
    other = form.format(joint.join(words) if all(word[-1].isalpha() for word in words) else gold)
    assert text_answers.is_right(other.swapcase() if upper and form == "{}" else other, gold)


@given(one=st.text(max_size=30), other=st.text(max_size=30))
@BOUNDED
def test_equality_of_texts_is_symmetric_and_never_raises(one: str, other: str):
    assert text_answers.is_equal(one, other) == text_answers.is_equal(other, one)
    assert chosen_option(one, ["x", other or "y"]) in (None, 0, 1)


@given(words=WORDS, more=st.sampled_from(["not", "oxide", "or lead", "acid", "no", "2", "un"]))
@BOUNDED
def test_more_words_are_another_answer(words: list[str], more: str):
    gold = " ".join(words)
    assert not text_answers.is_right(f"{gold} {more}", gold)
    assert not text_answers.is_right(f"{more} {gold}", gold)


@pytest.mark.parametrize(
    ("one", "other"),
    [("Co", "CO"), ("K", "K^+"), ("Fe^{2+}", "Fe^{3+}"), ("Cl^-", "Cl^+"), ("10^5", "105"), ("Ca(OH)2", "CaOH2"),
     ("Na, K", "NaK"), ("", ""), ("-", "-"), ("NO", "No2"), ("1s^2", "1s2p"), ("-5", "5")],
)  # fmt: skip
def test_near_misses_of_texts(one: str, other: str):
    assert not text_answers.is_equal(one, other)
    assert not text_answers.is_equal(other, one)
