"""Reading the logs of test runners: as they write them, and as hostile code would have them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.environments.swe import pytest_report
from prorl_gym.environments.swe.runner_reports import LOG_FORMATS, read_events, worse_status
from tests.environments.swe.logs import LOGS

STATUSES = st.sampled_from(["passed", "failed", "error", "skipped", "xfail"])
PYTEST_FILE = """
import pytest

@pytest.mark.parametrize("value", ["a b", "x - y", "[", "]", "a[0] - b", "", "é", "a::b"])
def test_ids(value):
    assert value != "]"

class TestInClass:
    def test_passes(self): print("FAILED a.py::test_ids")
    def test_fails(self): assert 0, "PASSED - x"

@pytest.fixture
def broken(): raise ValueError("a - b")

@pytest.fixture
def breaks_later():
    yield
    raise ValueError

def test_setup(broken): pass
def test_teardown(breaks_later): pass
@pytest.mark.skip
def test_skip(): pass
@pytest.mark.xfail(reason="known - really")
def test_xfail(): assert 0
@pytest.mark.xfail
def test_xpass(): pass
@pytest.mark.xfail(strict=True)
def test_strict(): pass
"""
HOOKS = """
class Plug:
    def pytest_runtest_call(self, item): pass

def pytest_configure(config):
    config.pluginmanager.register(Plug())
"""
UNITTEST_FILE = """
import unittest

class T(unittest.TestCase):
    def test_passes(self): print("test_fails (m.T.test_fails) ... ok")
    def test_doc(self):
        '''First line.'''
    def test_fails(self): self.fail()
    def test_error(self): raise ValueError("ok")
    @unittest.skip("why not ... ok")
    def test_skip(self): pass
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    @unittest.expectedFailure
    def test_unexpected(self): pass
    def test_sub(self):
        for number in range(3):
            with self.subTest(number=number): self.assertNotEqual(number, 1)
"""


@pytest.mark.parametrize("name", LOGS)
def test_logs(name):
    log = LOGS[name]
    statuses = LOG_FORMATS[log.runner].parse(log.text)
    assert statuses == log.statuses
    assert LOG_FORMATS[log.runner].find_problem(log.text, statuses) == log.complaint


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Log and events of a real run of pytest."""
    place = tmp_path_factory.mktemp("ran")
    (place / "a.py").write_text(PYTEST_FILE)
    (place / "prorl_report.py").write_text(Path(pytest_report.__file__).read_text())
    env = {**os.environ, "PYTHONPATH": str(place), "PRORL_REPORT": str(place / "report")}
    env.pop("PYTEST_XDIST_WORKER", None)  # of the run that this test is part of
    (place / "conftest.py").write_text("def pytest_runtest_setup(item): pass")
    (place / "own").mkdir()
    (place / "own" / "hooks.py").write_text(HOOKS)
    env |= {
        "PRORL_ROOT": str(place),
        "PYTEST_ADDOPTS": "-p prorl_report -p own.hooks",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PY_COLORS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-rA", "-c", os.devnull, "--rootdir", str(place), "a.py"]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False)
    return done.stdout, (place / "report").read_text()


def test_plug_in_and_summary_of_pytest_agree(ran: tuple[str, str]):
    log, report = ran
    events = read_events(report)
    assert events.problem == ""
    statuses = dict(events.statuses)
    assert statuses.pop("a.py::test_skip") == "skipped"  # the summary names a place instead
    assert LOG_FORMATS["pytest"].parse(log) == {**statuses, "a.py::test_ids": "failed"}  # that one is printed by a test
    assert LOG_FORMATS["pytest"].find_problem(log, statuses) == ""
    assert [name for name, status in statuses.items() if status == "error"] == [
        "a.py::test_setup",
        "a.py::test_teardown",
    ]
    assert statuses["a.py::test_strict"] == "failed"
    assert statuses["a.py::test_xfail"] == "xfail"
    assert len(statuses) == 15


def test_real_run_of_unittest(tmp_path: Path):
    (tmp_path / "m.py").write_text(UNITTEST_FILE)
    done = subprocess.run(
        [sys.executable, "-m", "unittest", "-v", "m"], cwd=tmp_path, stdout=-1, stderr=-2, text=True, check=False
    )
    statuses = LOG_FORMATS["unittest"].parse(done.stdout)
    expected = {"passes": "passed", "doc": "passed", "fails": "failed", "error": "error", "skip": "skipped"}
    expected |= {"expected": "xfail", "unexpected": "failed", "sub": "failed"}
    assert statuses == {f"m.T.test_{name}": status for name, status in expected.items()}
    assert LOG_FORMATS["unittest"].find_problem(done.stdout, statuses) == ""


def test_hooks_are_reported_and_only_those_of_a_patch_are_a_complaint(ran: tuple[str, str]):
    report = '{"hooks": "own/hooks.py"}'
    assert ran[1].splitlines().count(report) == 2  # before the tests and after them
    assert ran[1].count("hooks") == 2 * 3  # and our own, which is below the root only here
    assert read_events(ran[1], {"own/other.py"}).problem == ""
    complaint = "the test runner was tampered with (hooks in own/hooks.py)"
    assert read_events(ran[1], {"own/hooks.py"}).problem == complaint


def test_every_kind_of_tampering_with_events_is_a_complaint(ran: tuple[str, str]):
    lines = ran[1].splitlines()
    forged = json.dumps({"test": "a.py::test_other", "when": "call", "outcome": "passed"})
    tampered = {
        "the test run did not end": lines[:-1],
        "pytest did not report (the command must keep PYTHONPATH and PYTEST_ADDOPTS)": [],
        "1 more tests are reported than were collected": [*lines, forged],
        "1 lines of the report are not from the test runner": [*lines, "PASSED a.py::test"],
        "the test runner was tampered with (x)": [*lines, '{"replaced": "x"}'],
    }
    for complaint, text in tampered.items():
        assert read_events("\n".join(text)).problem == complaint


@given(st.lists(st.tuples(st.sampled_from("ab"), STATUSES), min_size=1), st.randoms(use_true_random=False))
def test_the_worst_report_of_a_test_counts_in_any_order(reports, chance):
    words = {"passed": "PASSED", "failed": "FAILED", "error": "ERROR", "xfail": "XFAIL", "skipped": "SKIPPED"}
    lines = [f"{words[status]} t.py::{name}" for name, status in reports]
    first = LOG_FORMATS["pytest"].parse("\n".join(lines))
    chance.shuffle(lines)
    assert LOG_FORMATS["pytest"].parse("\n".join(lines)) == first
    for name, status in reports:
        assert worse_status(first[f"t.py::{name}"], status) == first[f"t.py::{name}"]


@given(st.text(alphabet="ab [](){}-,.'=:é\\", max_size=30).filter(lambda text: " - " not in text), st.text(max_size=20))
def test_ids_survive_their_message(parameter, message):
    if parameter.count("[") != parameter.count("]") or "]" in message or "\n" in message:
        return  # then the end of the id is ambiguous
    depth = 0
    for character in parameter:
        depth += (character == "[") - (character == "]")
        if depth < 0:
            return
    name = f"t.py::test[{parameter}]"
    assert list(LOG_FORMATS["pytest"].parse(f"FAILED {name} - {message}")) == [name]


@given(st.text(alphabet='ok.(){}[]" \n\r\x1b#-✓=:1/aFAILPSEDRUNT') | st.text())
def test_no_text_breaks_a_parser(text):
    for runner in LOG_FORMATS.values():
        assert all(isinstance(name, str) for name in runner.parse(text))
        assert isinstance(runner.find_problem(text, runner.parse(text)), str)
    read_events(text)


@pytest.mark.parametrize("runner", LOG_FORMATS)
def test_hostile_lines_take_linear_time(runner):
    """A megabyte of what a pattern would have to think about."""
    seconds = []
    for size in (1, 8):
        text = "\n".join(
            [
                "PASSED " + " - " * (size * 4096),
                "a PASSED (" * (size * 2048),
                "=== " + "1 a11 " * (size * 4096) + "===",
                "=== 1 passed" + " in 1s" * (size * 4096),
                "1" * (size * 16384),
                "Tests: " + "1" * (size * 16384) + " total",
                "ok " + " " * (size * 16384) + "x",
                "1.." + "1" * (size * 16384),
                "Ran " + "1" * (size * 16384) + " tests in 1s",
                "test " + "[ ... " * (size * 8192),
                "  ✓ " + " (1" * (size * 8192),
                "test_a (" + "a." * (size * 8192) + " ... ",
                "\x1b[" + ";" * (size * 16384),
            ]
        )
        started = time.process_time()
        LOG_FORMATS[runner].find_problem(text, LOG_FORMATS[runner].parse(text))
        seconds.append(time.process_time() - started)
    assert seconds[1] < 0.1 + 24 * seconds[0]


@pytest.mark.parametrize(
    "groups",
    [["x" * 200_000], ["x" * 1_900], ["x" * 60] * 2_000, [" " * 3_000 + "x"]],
    ids=["one long", "one", "many", "far in"],
)
def test_names_are_not_much_longer_than_their_log(groups: list[str]):
    lines = [f"{' ' * (depth + 1)}{name}" for depth, name in enumerate(groups)]
    deep = " " * min(len(lines) + 1, 3_500)
    statuses = LOG_FORMATS["jest"].parse(
        "\n".join(["PASS x.js", *lines, *(f"{deep}✓ t{number}" for number in range(10_000))])
    )
    assert sum(map(len, statuses)) <= 16 << 20
    assert max(map(len, statuses), default=0) <= 2_000


def test_a_line_is_read_up_to_a_length():
    assert LOG_FORMATS["tap"].parse("ok 1 - " + "x" * 5_000 + "\nok 2 - y\n1..2\n") == {
        "x" * (4096 - 7): "passed",
        "y": "passed",
    }
