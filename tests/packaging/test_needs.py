"""A missing need skips; a required one fails."""

pytest_plugins = ["pytester"]

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

CONFTEST = (Path(__file__).parents[1] / "conftest.py").read_text()
TESTS = """
import pytest

@pytest.mark.ray
def test_with_ray(): pass

@pytest.mark.slow
def test_slow(): pass

def test_plain(): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    missing = CONFTEST.replace('_importable("ray")', "lambda: False")
    assert missing != CONFTEST
    pytester.makeconftest(missing)
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers =\n  ray: x\n  slow: x\n  apptainer: x\n  gym: x\n  vllm: x\n  root: x\n")
    return pytester


def test_missing_need_is_skipped_with_a_reason(suite: pytest.Pytester):
    result = suite.runpytest("-ra", "-p", "no:asyncio")
    result.assert_outcomes(passed=1, skipped=1, deselected=1)
    result.stdout.fnmatch_lines(["*Ray is not installed*"])


def test_required_need_fails(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PRORL_GYM_REQUIRE", "ray")
    result = suite.runpytest("-p", "no:asyncio")
    result.assert_outcomes(passed=1, errors=1, deselected=1)


def test_unknown_requirement_is_refused(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PRORL_GYM_REQUIRE", "apptaner")
    result = suite.runpytest("-p", "no:asyncio")
    result.stdout.fnmatch_lines(["*PRORL_GYM_REQUIRE: unknown*apptaner*"])


def test_all_runs_the_slow_ones_too(suite: pytest.Pytester):
    suite.runpytest("--all", "-p", "no:asyncio").assert_outcomes(passed=2, skipped=1)


def test_one_case_keeps_what_runs_other_code_and_can_run(suite: pytest.Pytester):
    suite.makepyfile("""
        import pytest

        @pytest.mark.parametrize("check", [min, max])
        @pytest.mark.parametrize("value", [pytest.param(1, marks=pytest.mark.ray), pytest.param(2), pytest.param(3)])
        def test_cases(check, value): assert check(value, 2) == 2
    """)
    suite.runpytest("--one-case", "-p", "no:asyncio").assert_outcomes(passed=2, deselected=4)
