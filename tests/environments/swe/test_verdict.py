"""From statuses to a reward."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.environments.swe.run_tests import StatusLookup, TestResults, score_tests, summarize_names
from prorl_gym.environments.swe.runner_reports import PASSING, Status
from tests.environments.swe.mini import task

STATUS = st.sampled_from(["passed", "failed", "error", "skipped", "xfail"])
NAMES = ["a", "b", "c", "d"]


def found(fail_to_pass: list[str], pass_to_pass: list[str], source: str = "generic"):
    made = task(fail_to_pass=tuple(fail_to_pass), pass_to_pass=tuple(pass_to_pass))
    return replace(made, source=source)


@given(st.dictionaries(st.sampled_from(NAMES), STATUS), st.integers(1, 3))
def test_one_exactly_when_all_that_must_pass_do(statuses: dict[str, Status], count: int):
    score = score_tests(found(NAMES[:count], NAMES[count:]), TestResults(statuses))
    assert (score.reward == 1.0) == all(statuses.get(name) in PASSING for name in NAMES)
    assert ("why" in score.detail) == (score.reward == 0.0)


@given(st.dictionaries(st.sampled_from(NAMES), STATUS, min_size=1))
def test_a_complaint_outweighs_every_status(statuses: dict[str, Status]):
    score = score_tests(found(NAMES, []), TestResults(dict.fromkeys(NAMES, "passed") | statuses, "the run did not end"))
    assert (score.reward, score.detail) == (0.0, {"why": "the run did not end"})


def test_nothing_against_nothing_is_not_solved():
    assert score_tests(found([], []), TestResults({})).reward == 0.0
    assert score_tests(found([], ["a"]), TestResults({"a": "passed"})).reward == 0.0


def test_failed_and_missing_tests_are_named():
    score = score_tests(found(["a", "b"], ["c", "d"]), TestResults({"a": "failed", "b": "passed", "c": "skipped"}))
    assert score.detail == {
        "why": "the fault is not repaired",
        "fail_to_pass": "1/2",
        "pass_to_pass": "0/2",
        "failed": "a, c",
        "missing": "d",
    }
    assert summarize_names(["x" * 500, "b", "c", "d", "e"]) == f"{'x' * 120}, b, c and 2 more"


@pytest.mark.parametrize(
    "statuses, expected",
    [
        ({"t.py::t[a b]": "passed"}, "passed"),
        ({"t.py::t[a b]": "passed", "t.py::t[a c]": "failed"}, "failed"),
        ({"t.py::t[b]": "passed"}, "missing"),
        ({"t.py::t[a b]": "passed", "t.py::t[a": "failed"}, "failed"),
    ],
)
def test_ids_that_a_data_set_has_cut_at_a_space(statuses: dict[str, Status], expected: Status):
    assert StatusLookup(statuses).status_of("t.py::t[a") == expected


def test_names_without_their_file_count_as_the_worst_of_them():
    statuses: dict[str, Status] = {"a.py::T::test_x": "passed", "b.py::T::test_x": "failed", "a.py::test_y": "passed"}
    score = score_tests(found(["T.test_x", "test_y"], [], "r2egym"), TestResults(statuses))
    assert (score.reward, score.detail["failed"]) == (0.0, "T.test_x")
    assert score_tests(found(["test_y"], [], "r2egym"), TestResults(statuses)).reward == 1.0
    assert score_tests(found(["test_y"], []), TestResults(statuses)).detail["missing"] == "test_y"
