"""Reports are read as their runners mean them: beside what the runner itself holds, and beside SWE-bench's parsers."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from xml.etree import ElementTree

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from prorl_gym.environments.swe import pytest_report
from prorl_gym.environments.swe.runner_reports import PASSING, RunReport, Status, read_events, read_log
from prorl_gym.environments.taskdir.environment import run_verifier
from prorl_gym.sandbox.protocol import Sandbox
from tests.environments.test_taskdir_reward import TASK, Left

pytestmark = pytest.mark.slow

UNSHRUNK = (Phase.explicit, Phase.generate)
"""Each example starts a program."""
HARMLESS = ["", "look\n", "Connecting (retry) now\n", "\x1b[1mbold\x1b[0m\n", "a" * 9 + "\n", "it's 100 %\n"]
HOSTILE = [
    *("ok", "ok\n", "\nok\n", "FAIL\n", "ERROR\n", " ... ok\n", "skipped 'x'\n", "expected failure\n", "OK\n", "\r\n"),
    *(
        "test_0 (m.T.test_0) ... ok\n",
        "\ntest_1 (m.T.test_1)\n",
        "\ntest_2 (m.T.test_2) ... \n",
        "FAIL: test_0 (m.T.test_0)\n",
    ),
    *("Ran 9 tests in 0.1s\n", "\nPASSED m.py::T::test_0\n", "\nFAILED m.py::T::test_1 - no\n", "1 passed in 0.1s\n"),
    *("\n=========== short test summary info ============\n", "\n============ 9 passed in 0.01s =============\n"),
]
BODIES = {
    **{"pass": "pass", "fail": "self.fail('ok')", "error": "raise ValueError('ok')", "skip": "self.skipTest('why')"},
    "subtest": "with self.subTest(a=1): self.fail('no')\n        with self.subTest(a=2): pass",
    **{
        "expected": "self.fail()",
        "unexpected": "pass",
        "skipped": "pass",
        "teardown": "self.addCleanup(lambda: 1 / 0)",
    },
}
MARKS = {
    **dict.fromkeys(("expected", "unexpected"), "    @unittest.expectedFailure\n"),
    "skipped": "    @unittest.skip('ok')\n",
}
TEST = '''\
{mark}    def test_{number}(self):
        """{doc}"""
        print({out!r}, end="")
        sys.stderr.write({err!r})
        {body}
'''
MODULE = """\
import sys, unittest

class T(unittest.TestCase):
    @classmethod
    def {fixture}(cls): sys.stderr.write({said!r})

{tests}
"""
RUN_UNITTEST = """
import json, unittest

started, passed = [], []

class Result(unittest.TextTestResult):
    def startTest(self, test):
        started.append(test.id())
        super().startTest(test)

runner = unittest.TextTestRunner(resultclass=Result, verbosity=2)
result = unittest.main("m", argv=["m"], exit=False, testRunner=runner).result
bad = [test.id().partition(" ")[0] for test, _ in (*result.failures, *result.errors)]
bad += [test.id() for test in result.unexpectedSuccesses]
skipped = [test.id() for test, _ in result.skipped]
json.dump({name: False if name in bad else None if name in skipped else True for name in started}, open("truth", "w"))
"""


@st.composite
def modules(draw: Any, texts: Sequence[str]) -> str:
    """Return a module of tests in the words of unittest, which pytest plays, too."""
    tests: list[str] = []
    for number in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(sorted(BODIES)))
        out, err = ("".join(draw(st.lists(st.sampled_from(texts), max_size=3))) for _ in range(2))
        doc = draw(st.sampled_from(["", "First line.", "it's (not) so ... ok?"]))
        fields = {"mark": MARKS.get(kind, ""), "body": BODIES[kind], "number": number}
        tests.append(TEST.format(out=out, err=err, doc=doc, **fields))
    fixture = draw(st.sampled_from(["setUpClass", "tearDownClass"]))
    return MODULE.format(tests="\n".join(tests), fixture=fixture, said=draw(st.sampled_from(texts)))


def run(folder: str, *command: str, **env: str) -> str:
    given_env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": folder, **env}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=given_env, stdout=-1, stderr=-2, check=False)
    return done.stdout.decode()


def check(report: RunReport, truth: Mapping[str, bool | None], is_harmless: bool) -> None:
    """Check that no test passes that failed, and without hostile output that each is read as it ended.

    ``None`` in the truth is a skipped test, which unittest does not repeat at the end: output can stand for its status.
    """
    passed = {name for name, status in report.statuses.items() if status in PASSING and not report.problem}
    assert not passed & {name for name, has_passed in truth.items() if has_passed is False}
    if is_harmless:
        assert (passed, report.problem) == ({name for name, has_passed in truth.items() if has_passed}, "")


@settings(max_examples=30, deadline=None, derandomize=True, phases=UNSHRUNK)
@given(is_harmless=st.booleans(), data=st.data(), buffered=st.booleans())
def test_real_unittest(is_harmless: bool, data: Any, buffered: bool) -> None:
    module = data.draw(modules(HARMLESS if is_harmless else HARMLESS + HOSTILE))
    with TemporaryDirectory() as folder:
        Path(folder, "m.py").write_text(module)
        Path(folder, "run.py").write_text(RUN_UNITTEST)
        log = run(folder, "run.py", PYTHONUNBUFFERED="" if buffered else "1")
        truth = json.loads(Path(folder, "truth").read_text())
    found = read_log("unittest", log)
    check(found, truth, is_harmless)
    if "Ran 9" not in module:  # with more tests than were run, the runner's own count contradicts
        assert found.problem or found.statuses.keys() <= {*truth, "m.T.setUpClass", "m.T.tearDownClass"}


def pytest_complaints(report: Path) -> dict[str, set[str]]:
    """Return by node id what pytest's JUnit report says against a test: a bad teardown is an entry of its own there."""
    found: dict[str, set[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = "::".join(["m.py", *case.attrib["classname"].split(".")[1:], case.attrib["name"]])
        found.setdefault(name, set()).update(part.tag for part in case if part.get("type") != "pytest.xfail")
    return {name: tags & {"failure", "error", "skipped"} for name, tags in found.items()}


def reward_of_summary(log: str) -> float | None:
    task = TASK.model_copy(update={"verifier": TASK.verifier.model_copy(update={"reward": "pytest"})})
    return asyncio.run(run_verifier(cast(Sandbox, Left({"output.txt": log})), task, 1.0))


@settings(max_examples=20, deadline=None, derandomize=True, phases=UNSHRUNK)
@given(is_harmless=st.booleans(), data=st.data(), capture=st.sampled_from(["fd", "sys", "no"]))
def test_real_pytest(is_harmless: bool, data: Any, capture: str) -> None:
    """Both by the events of our plug-in, and by its summary, which is all that Terminal-Bench has."""
    module = data.draw(modules(HARMLESS if is_harmless else HARMLESS + HOSTILE))
    with TemporaryDirectory() as folder:
        Path(folder, "m.py").write_text(module)
        Path(folder, "prorl_report.py").write_text(Path(pytest_report.__file__).read_text())
        env = {"PRORL_REPORT": f"{folder}/report", "PRORL_ROOT": folder, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = ["-m", "pytest", "-rA", "-p", "prorl_report", f"--capture={capture}", "--junitxml=x.xml", "m.py"]
        log = run(folder, *command, "-c", "/dev/null", "--rootdir", folder, **env)
        complaints = pytest_complaints(Path(folder, "x.xml"))
        events = Path(folder, "report").read_text()
    truth = {name: not tags for name, tags in complaints.items()}
    check(read_events(events), truth, is_harmless=True)
    reward, failed = reward_of_summary(log), any(tags & {"failure", "error"} for tags in complaints.values())
    assert not (reward == 1.0 and failed)
    if is_harmless:
        assert (reward == 1.0) == (any(truth.values()) and not failed)


def plainly(runner: str, results: Mapping[str, Status]) -> str:
    """Return the log of a run without output of the tests."""
    lines = [LINES[runner][status].format(name, number) for number, (name, status) in enumerate(results.items(), 1)]
    passed = sum(status == "passed" for status in results.values())
    return "\n".join([*lines, END[runner].format(passed=passed, all=len(results)), ""])


LINES: Mapping[str, Mapping[Status, str]] = {
    "go": {
        "passed": "=== RUN   {0}\n--- PASS: {0} (0.01s)",
        "failed": "=== RUN   {0}\n    x_test.go:1: no\n--- FAIL: {0} (0.01s)",
        "skipped": "=== RUN   {0}\n    --- SKIP: {0} (0.00s)",
    },
    "cargo": {"passed": "test {0} ... ok", "failed": "test {0} ... FAILED", "skipped": "test {0} ... ignored"},
    "jest": {"passed": "  ✓ {0} (3 ms)", "failed": "  ✕ {0}", "skipped": "  ○ {0}"},
    "tap": {
        "passed": "ok {1} {0}",
        "failed": "not ok {1} - {0}",
        "skipped": "ok {1} {0} # SKIP",
        "xfail": "not ok {1} {0} # TODO",
    },
    "django": {
        **{"passed": "{0} (m.T) ... ok", "failed": "{0} (m.T) ... FAIL", "error": "{0} (m.T) ... ERROR"},
        **{"skipped": "{0} (m.T) ... skipped 'x'", "xfail": "{0} (m.T) ... expected failure"},
    },
}
END = {
    "go": "ok  \tp\t0.01s",
    "cargo": "test result: ok. {passed} passed; 0 failed; 0 ignored",
    "jest": "Tests:       {passed} passed, {all} total",
    "tap": "1..{all}",
    "django": "Ran {all} tests in 0.01s",
}
PARSERS = {"go": "gotest"}
UNREAD = {("cargo", "skipped"), ("django", "xfail"), ("tap", "skipped"), ("tap", "xfail")}
"""Departures: results that SWE-bench's parser does not have."""


@pytest.mark.oracles
@settings(max_examples=100, deadline=None, derandomize=True)
@given(runner=st.sampled_from(sorted(LINES)), data=st.data())
def test_swebench_reads_plain_logs_as_we_do(runner: str, data: Any, oracles: Callable[..., Any]) -> None:
    names = (
        st.from_regex(r"[A-Za-z]\w{0,5}(::\w{1,3})?", fullmatch=True)
        if runner == "cargo"
        else st.from_regex(r"[A-Za-z]\w{0,5}", fullmatch=True)
    )
    results = data.draw(st.dictionaries(names, st.sampled_from(sorted(LINES[runner])), min_size=1, max_size=6))
    log = plainly(runner, results)
    found = read_log(runner, log)
    wanted = {f"{name} (m.T)": status for name, status in results.items()} if runner == "django" else results
    assert (found.statuses, found.problem) == (wanted, "")
    theirs = oracles(log=log, parser=f"parse_log_{PARSERS.get(runner, runner)}")["answer"]
    read = {name: status for name, status in wanted.items() if (runner, status) not in UNREAD}
    assert {name.removeprefix("- "): status.lower() for name, status in theirs.items() if " # " not in name} == read
