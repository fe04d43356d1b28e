"""Reports of test runners, read into a status for each test.

A report is text that the code under test may write into. Two rules bound what that is worth: a test that is reported
more than once keeps its worst status, and the runner's own totals must agree with the lines that were found.
``read_log`` reads a runner's log. Runs of pytest in our sandboxes do not depend on its log: there our plug-in writes
events to a file of its own (``read_events``).
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

Status = Literal["passed", "failed", "error", "skipped", "xfail", "missing"]

_WORST_FIRST: tuple[Status, ...] = ("error", "failed", "missing", "skipped", "xfail", "passed")

PASSING: frozenset[Status] = frozenset({"passed", "xfail"})
"""An expected failure counts as passing; a skipped test shows nothing."""

_MAX_LINE = 4 << 10
"""Characters of a line that are read, at both ends; output of tests may be longer, lines of the runner are not."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]{0,32}[ -/]?[@-~]|[@-Z\\^_])")
NO_PYTEST = "pytest did not report (the command must keep PYTHONPATH and PYTEST_ADDOPTS)"
_UNFINISHED = "the test run did not end"


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run of a test runner, or several in a row."""

    statuses: Mapping[str, Status]
    problem: str
    """Contradiction in the report, or sign that the run did not end; empty when there is none."""


def read_log(runner: str, log: str) -> RunReport:
    """Read the log of a runner, without colours and carriage returns. Only a line feed ends a line."""
    lines = [line.removesuffix("\r") for line in _ESCAPES.sub("", log).split("\n")]
    half = _MAX_LINE // 2
    return _READERS[runner]([line if len(line) <= _MAX_LINE else line[:half] + line[-half:] for line in lines])


def read_json_object(line: str) -> Mapping[str, Any] | None:
    """Return the JSON object in an untrusted line; ``None`` when it holds none."""
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast(Mapping[str, Any], found) if isinstance(found, dict) else None


def worse_status(one: Status, other: Status) -> Status:
    return one if _WORST_FIRST.index(one) <= _WORST_FIRST.index(other) else other


def _record_status(statuses: dict[str, Status], name: str, status: Status) -> None:
    """Enter a status. A test that was reported before keeps the worse one, so a forged line cannot repair it."""
    statuses[name] = worse_status(statuses[name], status) if name in statuses else status


def _report_counted(statuses: Mapping[str, Status], counts: Collection[int]) -> RunReport:
    """Compare the passed tests with the runner's own totals, of which there must be one at least."""
    if not counts:
        return RunReport(statuses, _UNFINISHED)
    found, passed = sum(status == "passed" for status in statuses.values()), sum(counts)
    problem = f"{found} tests are reported as passed, the runner counted {passed}" if found > passed else ""
    return RunReport(statuses, problem)


# unittest: its verbose output (``TextTestResult`` of CPython), and that of Django's runner, which is one. A test takes
# one line, `name (place) ... ok`, or more: the first line of its docstring may follow the name, and output comes
# between the dots and the status, also on the status' line, where SWE-bench's parser misses it. So each line up to the
# next test counts that ends like a status, and the worst decides: no output can stand for the status, or end the test
# before it, not even one like the runner's own last lines. What failed is
# repeated by name at the end.

_UNITTEST_ENDS: Mapping[str, Status] = {
    **{"ok": "passed", "OK": "passed", "expected failure": "xfail", "unexpected success": "failed"},
    **{" ... FAIL": "failed", " ... ERROR": "error", " ... skipped": "skipped"},
}
_UNITTEST_PLACE = r"\(([^\W\d]\w*(?:\.[^\W\d][\w<>]*|\.<locals>)+)\)"
_UNITTEST_FIXTURE = re.compile(r"(?:setUp|tearDown)(?:Class|Module)")
"""Not among the tests that the runner counts."""
_UNITTEST_HEADER = re.compile(rf"\s*(\w+) {_UNITTEST_PLACE}(?: .*\.\.\..*)?")
_UNITTEST_LATE_HEADER = re.compile(rf".*?\W(\w+) {_UNITTEST_PLACE} \.\.\. .*")
"""After output of a class or module without a line feed."""
_UNITTEST_REPORT = re.compile(r"(FAIL|ERROR|UNEXPECTED SUCCESS): (\w+) \(([\w.<>]+)\).*")
_UNITTEST_RAN = re.compile(r"Ran (\d{1,9}) tests? in [0-9.]+s")


def _dotted_name(name: str, place: str) -> str:
    """Python 3.11 and newer give the whole name in the place, older ones the class alone."""
    return place if place.rpartition(".")[2] == name else f"{place}.{name}"


def _read_unittest(lines: Sequence[str], full_name: Callable[[str, str], str] = _dotted_name) -> RunReport:
    """Name each test ``package.module.Class.test_name``.

    The runner must print how many tests it ran, and no more may begin or be reported.
    """
    statuses: dict[str, Status] = {}
    begun: set[str] = set()
    totals: list[int] = []
    waiting: str | None = None
    for line in lines:
        if ran := _UNITTEST_RAN.fullmatch(line):
            totals.append(int(ran[1]))
        if report := _UNITTEST_REPORT.fullmatch(line):
            _record_status(statuses, full_name(report[2], report[3]), "error" if report[1] == "ERROR" else "failed")
        elif header := _UNITTEST_HEADER.fullmatch(line) or _UNITTEST_LATE_HEADER.fullmatch(line):
            waiting = full_name(header[1], header[2])
            begun.add(waiting)
        text = line.rstrip()
        status: Status | None = next((word for end, word in _UNITTEST_ENDS.items() if text.endswith(end)), None)
        if text.endswith(("'", '"')) and ("skipped '" in text or 'skipped "' in text):
            status = "skipped"
        if waiting is not None and status is not None:
            _record_status(statuses, waiting, status)
    if not totals:
        return RunReport(statuses, _UNFINISHED)
    named = sum(_UNITTEST_FIXTURE.search(name) is None for name in begun | statuses.keys())
    problem = f"{named} tests are reported, the runner counted {sum(totals)}" if named > sum(totals) else ""
    return RunReport(statuses, problem)


# The Test Anything Protocol: `ok 1 - name` and `not ok 2 - name`, with a plan `1..2`

_TAP_TEST = re.compile(r"(not )?ok\b(?: +(\d{1,9})\b)?(.*)")
_TAP_PLAN = re.compile(r"1\.\.(\d{1,9})(?: *#.*)?")


def _read_tap(lines: Sequence[str]) -> RunReport:
    """Name each test by its description, or by its number where it has none. Subtests are left out.

    Every plan must be met exactly.
    """
    statuses: dict[str, Status] = {}
    results = 0
    for line in lines:
        found = _TAP_TEST.fullmatch(line)
        if found is None:
            continue
        results += 1
        failed, number, rest = found.groups()
        name, _, comment = rest.partition("#")
        directive = comment.strip()[:4].upper()
        status: Status = "failed" if failed else "passed"
        if directive == "SKIP":
            status = "skipped"
        elif directive == "TODO" and failed:
            status = "xfail"
        _record_status(statuses, name.strip().removeprefix("-").strip() or number or "", status)
    statuses.pop("", None)
    plans = [int(found[1]) for line in lines if (found := _TAP_PLAN.fullmatch(line))]
    if not plans or any(line.startswith("Bail out!") for line in lines):
        return RunReport(statuses, _UNFINISHED)
    problem = f"{results} tests are reported, {sum(plans)} were planned" if results != sum(plans) else ""
    return RunReport(statuses, problem)


# `go test -v` as text, and `go test -json`. Output without a line feed stands before a result on its line, where
# SWE-bench's parser misses it. In JSON it cannot.

_GO_RESULT = re.compile(r"--- (PASS|FAIL|SKIP): (\S+) \([0-9.]+s\)")
_GO_STARTED = re.compile(r"=== RUN +(\S+)")
_GO_PACKAGE = re.compile(r"(?:ok|FAIL|\?|---) *\t\S+.*|(?:PASS|FAIL)|FAIL\t.*")
_GO_WORDS: Mapping[str, Status] = {"pass": "passed", "fail": "failed", "skip": "skipped"}


def _read_go(lines: Sequence[str]) -> RunReport:
    """Name each test and subtest (``TestSplit/empty``), whatever its package.

    A test that ended must have begun, and the package must have a result.
    """
    statuses: dict[str, Status] = {}
    started: set[str] = set()
    ended = False
    for line in lines:
        event = read_json_object(line) if line.startswith("{") else None  # of ``-json``
        test, action = (str(event.get("Test")), str(event.get("Action"))) if event and "Test" in event else ("", "")
        if found := _GO_RESULT.fullmatch(line, max(line.rfind("--- "), 0)):
            _record_status(statuses, found[2], _GO_WORDS[found[1].lower()])
        elif found := _GO_STARTED.fullmatch(line, max(line.rfind("=== "), 0)):
            started.add(found[1])
        elif action in _GO_WORDS:
            _record_status(statuses, test, _GO_WORDS[action])
        elif action == "run":
            started.add(test)
        ended |= _GO_PACKAGE.fullmatch(line) is not None or ('"Action":' in line and '"Test":' not in line)
    problem = "" if ended else _UNFINISHED
    if unstarted := statuses.keys() - started:
        problem = f"{len(unstarted)} tests are reported that never began"
    return RunReport(statuses, problem)


# `jest --verbose` (and what prints like it): a tree of descriptions with a mark before each test

# A name repeats those of its groups, so all names together may be far longer than the log.
_MAX_JEST_NAME = 2_000
"""Characters of a whole name that are kept."""
_MAX_JEST_DEPTH = 32
"""Nested groups of a test that are kept."""
_MAX_JEST_NAMES = 16 << 20
"""Characters of all names together; a log with more gives no statuses."""

_JEST_TEST = re.compile(r"( +)([✓✔√✕✖\xd7○✎]) (?:skipped |todo )?(.+?)(?: \([0-9.]+ m?s\))?")
_JEST_GROUP = re.compile(r"( +)(\S.*)")
_JEST_FILE = re.compile(r"(?:PASS|FAIL) \S.*")
_JEST_PASSED = re.compile(r"(?<!\d)(\d{1,9}) passed")
_JEST_MARKS: Mapping[str, Status] = {
    **dict.fromkeys("✓✔√", "passed"),
    **dict.fromkeys("✕✖\xd7", "failed"),
    **dict.fromkeys("○✎", "skipped"),
}


def _read_jest(lines: Sequence[str]) -> RunReport:
    """Name each test ``group > inner group > test``; there are no statuses if the names are too many."""
    statuses: dict[str, Status] = {}
    length = 0
    groups: list[tuple[int, str]] = []
    for line in lines:
        if _JEST_FILE.fullmatch(line):
            groups = []
        elif found := _JEST_TEST.fullmatch(line):
            depth = len(found[1])
            path = [name for indent, name in groups if indent < depth]
            name = " > ".join([*path, found[3]])[:_MAX_JEST_NAME]
            _record_status(statuses, name, _JEST_MARKS[found[2]])
            length += len(name)
            if length > _MAX_JEST_NAMES:
                statuses = {}
                break
        elif found := _JEST_GROUP.fullmatch(line):
            depth = len(found[1])
            above = [(indent, name) for indent, name in groups if indent < depth]
            groups = [*above[: _MAX_JEST_DEPTH - 1], (depth, found[2])]
        elif line.strip():
            groups = []
    totals = [line for line in lines if line.startswith("Tests: ") and line.endswith(" total")]
    return _report_counted(statuses, [sum(map(int, _JEST_PASSED.findall(line))) for line in totals])


# `cargo test`: `test module::name ... ok`, and a result line for each binary. Output that is not captured may stand
# before that on its line; with one thread also between the dots and the status, as for unittest. SWE-bench's parser
# misses both. What failed is listed at the end.

_CARGO_TEST = re.compile(r"test (\S.*?)(?: - should panic)? \.\.\. (.*)")
_CARGO_RESULT = re.compile(r"test result: (?:ok|FAILED)\. (\d{1,9}) passed; \d{1,9} failed; .*")


def _read_cargo(lines: Sequence[str]) -> RunReport:
    """Name each test, and each documentation test by file and line."""
    statuses: dict[str, Status] = {}
    totals: list[int] = []
    waiting: str | None = None
    is_list = False
    for line in lines:
        late = max(line.rfind("test ", 0, line.rfind(" ... ")), 0)
        if result := _CARGO_RESULT.fullmatch(line):
            totals.append(int(result[1]))
            waiting = None
        elif test := _CARGO_TEST.fullmatch(line) or _CARGO_TEST.fullmatch(line, late):
            name = waiting = str(test[1])
            if test[2] == "ignored" or test[2].startswith("ignored, "):
                _record_status(statuses, name, "skipped")
            elif test[2] == "FAILED":
                _record_status(statuses, name, "failed")
        if waiting is not None and line.endswith("ok"):
            _record_status(statuses, waiting, "passed")
        is_list = line == "failures:" or (is_list and line.startswith("    "))
        if is_list and line != "failures:":
            _record_status(statuses, line[4:], "failed")
    return _report_counted(statuses, totals)


_READERS: Mapping[str, Callable[[Sequence[str]], RunReport]] = {
    "unittest": _read_unittest,
    "django": partial(_read_unittest, full_name="{} ({})".format),  # as its logs have it: the text before the dots
    "tap": _read_tap,
    "go": _read_go,
    "jest": _read_jest,
    "cargo": _read_cargo,
}
"""By the name in a row's ``parser``."""


# Events of our pytest plug-in (`pytest_report.py`), as untrusted as any file from a sandbox

_PHASES = ("setup", "call", "teardown")


def read_events(text: str, patched_paths: Collection[str] = ()) -> RunReport:
    """Read the text of the plug-in's file. None of ``patched_paths``, which a patch changes, may implement hooks."""
    statuses: dict[str, Status] = {}
    begun = ended = collected = strange = 0
    reported: set[str] = set()
    replaced = ""
    distributed = False
    for event in map(read_json_object, filter(None, text.split("\n"))):
        if event is None:
            strange += 1
        elif "begin" in event:
            begun += 1
            distributed |= event.get("distributed") is True
        elif "end" in event:
            ended += 1
        elif isinstance(part := event.get("replaced"), str):
            replaced = part[:80]
        elif isinstance(path := event.get("hooks"), str):
            if path in patched_paths:
                replaced = f"hooks in {path[:80]}"
        elif isinstance(number := event.get("collected"), int):
            collected += number
        elif isinstance(name := event.get("uncollected"), str):
            _record_status(statuses, name, "error")
        elif (status := _event_status(event)) is not None:
            _record_status(statuses, str(event["test"]), status)
            reported.add(str(event["test"]))
    surplus = 0 if distributed else len(reported) - collected
    problem = ""
    if replaced:
        problem = f"the test runner was tampered with ({replaced})"
    elif not begun:
        problem = NO_PYTEST
    elif begun != ended:
        problem = _UNFINISHED
    elif strange:
        problem = f"{strange} lines of the report are not from the test runner"
    elif surplus > 0:
        problem = f"{surplus} more tests are reported than were collected"
    return RunReport(statuses, problem)


def _event_status(event: Mapping[str, Any]) -> Status | None:
    """Return the status that one phase of a test gives it; ``None`` for a rerun, or a setup or teardown that passed."""
    when, outcome, xfail = event.get("when"), event.get("outcome"), event.get("xfail")
    if not isinstance(event.get("test"), str) or when not in _PHASES:
        return None
    if outcome == "failed":
        return "failed" if when == "call" else "error"
    if outcome == "skipped":
        return "xfail" if xfail else "skipped"
    return "passed" if outcome == "passed" and when == "call" else None
