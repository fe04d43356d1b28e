"""Reading the logs of test runners: as they write them, and as hostile code would have them."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.environments.swe import pytest_report
from prorl_gym.environments.swe.runner_reports import Status, read_events, read_log, worse_status


@dataclass(frozen=True, slots=True)
class Log:
    runner: str
    text: str
    statuses: Mapping[str, Status]
    complaint: str = ""


LOGS = {
    "unittest 3.8": Log(
        "unittest",
        "test_add (tests.test_m.T) ... ok\nsetUpClass (tests.test_m.U) ... ERROR\n\nRan 1 test in 0.001s\n\nFAILED\n",
        {"tests.test_m.T.test_add": "passed", "tests.test_m.U.setUpClass": "error"},
    ),
    "unittest, more results than tests": Log(
        "unittest",
        "test_a (m.T.test_a) ... ok\ntest_b (m.T.test_b) ... ok\nRan 1 test in 0.001s\n\nOK\n",
        {"m.T.test_a": "passed", "m.T.test_b": "passed"},
        "2 tests are reported, the runner counted 1",
    ),
    "django": Log(
        "django",
        """\
Testing against Django installed in '/testbed/django' with up to 4 processes
test_get (generic_views.tests.T) ... ok
test_post (generic_views.tests.T) ... FAIL
test_warn (generic_views.tests.T) ... Internal Server Error: /x/
ok
======================================================================
FAIL: test_post (generic_views.tests.T)
Ran 3 tests in 0.050s
""",
        {
            "test_get (generic_views.tests.T)": "passed",
            "test_post (generic_views.tests.T)": "failed",
            "test_warn (generic_views.tests.T)": "passed",
        },
    ),
    "tap": Log(
        "tap",
        """\
TAP version 13
1..6
ok 1 - adds
not ok 2 - subtracts
  ---
  message: no
  ...
# a comment
    ok 1 - a subtest
ok 3 - later # SKIP no network
not ok 4 - planned # TODO not yet
ok 5
ok 6 - with # a comment
""",
        {
            "adds": "passed",
            "subtracts": "failed",
            "later": "skipped",
            "planned": "xfail",
            "5": "passed",
            "with": "passed",
        },
    ),
    "tap, one too many": Log(
        "tap", "1..1\nok 1 - a\nok 2 - b\n", {"a": "passed", "b": "passed"}, "2 tests are reported, 1 were planned"
    ),
    "tap, plan at the end": Log("tap", "ok 1 - a\nok 2 - a\n1..2\n", {"a": "passed"}),
    "tap, given up": Log("tap", "1..1\nok 1 - a\nBail out! no disk\n", {"a": "passed"}, "the test run did not end"),
    "go": Log(
        "go",
        """\
=== RUN   TestSplit
=== RUN   TestSplit/empty
=== RUN   TestSplit/two_words
    split_test.go:12: wrong
--- FAIL: TestSplit (0.00s)
    --- PASS: TestSplit/empty (0.00s)
    --- FAIL: TestSplit/two_words (0.00s)
=== RUN   TestSkip
some output--- SKIP: TestSkip (0.00s)
=== RUN   TestGlued
--- PASS: TestGlued (0.00s)
some output=== RUN   TestGlued/sub
more--- FAIL: TestGlued (0.00s)
    --- FAIL: TestGlued/sub (0.00s)
FAIL
FAIL\texample.org/words\t0.003s
""",
        {
            "TestSplit": "failed",
            "TestSplit/empty": "passed",
            "TestSplit/two_words": "failed",
            "TestSkip": "skipped",
            "TestGlued": "failed",
            "TestGlued/sub": "failed",
        },
    ),
    "go -json": Log(
        "go",
        '{"Action":"run","Package":"p","Test":"TestA"}\n{"Action":"pass","Package":"p","Test":"TestA","Elapsed":0}\n'
        '{"Action":"pass","Package":"p","Elapsed":0.1}\nnot json {\n{"Action":"output","Package":"p"}\n',
        {"TestA": "passed"},
    ),
    "go, forged": Log(
        "go",
        "=== RUN   TestA\n--- PASS: TestB (0.00s)\n--- FAIL: TestA (0.00s)\nFAIL\n",
        {"TestB": "passed", "TestA": "failed"},
        "1 tests are reported that never began",
    ),
    "jest": Log(
        "jest",
        """\
PASS src/sum.test.js
  sum
    ✓ adds (3 ms)
    of three
      ✓ adds (1.5 s)
      ✕ subtracts
    ○ skipped later
FAIL src/top.test.js
  ✓ adds

  ● sum \u203a of three \u203a subtracts

Tests:       1 failed, 1 skipped, 3 passed, 5 total
Time:        0.5 s
""",
        {
            "sum > adds": "passed",
            "sum > of three > adds": "passed",
            "sum > of three > subtracts": "failed",
            "sum > later": "skipped",
            "adds": "passed",
        },
    ),
    "jest, forged": Log(
        "jest",
        "PASS a.test.js\n  ✓ a\n  ✓ b\nTests:       1 passed, 1 total\n",
        {"a": "passed", "b": "passed"},
        "2 tests are reported as passed, the runner counted 1",
    ),
    "cargo": Log(
        "cargo",
        """\
running 8 tests
test parse::empty ... ok
some outputtest after_output ... ok
test one_thread ... some output, ignored FAILED
more ... ok
test two_lines ... ok
FAILED
test glued_failure ... looks ok
lookFAILED
test parse::deep ... FAILED
test slow ... ignored, takes an hour
test panics - should panic ... ok

failures:

---- parse::deep stdout ----
    wrong

failures:
    glued_failure
    parse::deep
    two_lines

test result: FAILED. 4 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

   Doc-tests words
running 1 test
test src/lib.rs - split (line 12) ... ok
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s
""",
        {
            "parse::empty": "passed",
            "after_output": "passed",
            "one_thread": "passed",
            "two_lines": "failed",
            "glued_failure": "failed",
            "parse::deep": "failed",
            "slow": "skipped",
            "panics": "passed",
            "src/lib.rs - split (line 12)": "passed",
        },
    ),
    "cargo, does not compile": Log("cargo", "error[E0308]: mismatched types\n", {}, "the test run did not end"),
}
"""Logs as the runners write them, shortened, and what they say."""

RUNNERS = ("unittest", "django", "tap", "go", "jest", "cargo")
TAP_LINES: dict[Status, str] = {
    "passed": "ok - {}",
    "failed": "not ok - {}",
    "skipped": "ok - {} # SKIP",
    "xfail": "not ok - {} # TODO",
}
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


@pytest.mark.parametrize("name", LOGS)
def test_logs(name):
    log = LOGS[name]
    found = read_log(log.runner, log.text)
    assert (found.statuses, found.problem) == (log.statuses, log.complaint)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Events of a real run of pytest."""
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
    subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False)
    return (place / "report").read_text()


def test_plug_in_reports_each_test_of_a_real_run(report: str):
    events = read_events(report)
    assert events.problem == ""
    statuses = dict(events.statuses)
    values = [statuses.pop(name) for name in list(statuses) if name.startswith("a.py::test_ids[")]
    assert sorted(values) == ["failed", *["passed"] * 7]
    assert statuses == {
        "a.py::TestInClass::test_passes": "passed",
        "a.py::TestInClass::test_fails": "failed",
        "a.py::test_setup": "error",
        "a.py::test_teardown": "error",
        "a.py::test_skip": "skipped",
        "a.py::test_xfail": "xfail",
        "a.py::test_xpass": "passed",
        "a.py::test_strict": "failed",
    }


def test_hooks_are_reported_and_only_those_of_a_patch_are_a_complaint(report: str):
    event = '{"hooks": "own/hooks.py"}'
    assert report.splitlines().count(event) == 2  # before the tests and after them
    assert report.count("hooks") == 2 * 3  # and our own, which is below the root only here
    assert read_events(report, {"own/other.py"}).problem == ""
    complaint = "the test runner was tampered with (hooks in own/hooks.py)"
    assert read_events(report, {"own/hooks.py"}).problem == complaint


def test_every_kind_of_tampering_with_events_is_a_complaint(report: str):
    lines = report.splitlines()
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


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(list(TAP_LINES))), min_size=1), st.randoms())
def test_the_worst_report_of_a_test_counts_in_any_order(reports: list[tuple[str, Status]], chance: random.Random):
    lines = [TAP_LINES[status].format(name) for name, status in reports]
    first = read_log("tap", "\n".join(lines)).statuses
    chance.shuffle(lines)
    assert read_log("tap", "\n".join(lines)).statuses == first
    for name, status in reports:
        assert worse_status(first[name], status) == first[name]


@given(st.text(alphabet='ok.(){}[]" \n\r\x1b#-✓=:1/aFAILPSEDRUNT') | st.text())
def test_no_text_breaks_a_parser(text):
    for runner in RUNNERS:
        read_log(runner, text)
    read_events(text)


@pytest.mark.parametrize("runner", RUNNERS)
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
                *["x test_a (" * 300 + "a.b" * 300] * (size * 8),
                "  ✓ " + " (1" * (size * 8192),
                "test_a (" + "a." * (size * 8192) + " ... ",
                "\x1b[" + ";" * (size * 16384),
            ]
        )
        started = time.process_time()
        read_log(runner, text)
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
    log = "\n".join(["PASS x.js", *lines, *(f"{deep}✓ t{number}" for number in range(10_000))])
    statuses = read_log("jest", log).statuses
    assert sum(map(len, statuses)) <= 16 << 20
    assert max(map(len, statuses), default=0) <= 2_000


def test_a_line_is_read_up_to_a_length():
    assert read_log("tap", "ok 1 - " + "x" * 5_000 + "\nok 2 - y\n1..2\n").statuses == {
        "x" * (4096 - 7): "passed",
        "y": "passed",
    }
