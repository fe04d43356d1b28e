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


MARKERS = "".join(f"  {name}: x\n" for name in ("ray", "slow", "product", "release", "kit", "apptainer", "gym", "vllm"))


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    missing = CONFTEST.replace('_importable("ray")', "lambda: False")
    assert missing != CONFTEST
    pytester.makeconftest(missing)
    pytester.makepyfile(TESTS)
    pytester.makeini(f"[pytest]\nmarkers =\n{MARKERS}")
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
