"""Reports of test runners, read into a status for each test.

A report is text that the code under test may write into. Two rules bound what that is worth: a test that is reported
more than once keeps its worst status, and the runner's own totals must agree with the lines that were found.
``LOG_FORMATS`` names the parser of each runner's log. Runs of pytest in our sandboxes do not depend on its log: there
our plug-in writes events to a file of its own (``read_events``).
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

Status = Literal["passed", "failed", "error", "skipped", "xfail", "missing"]

_WORST_FIRST: tuple[Status, ...] = ("error", "failed", "missing", "skipped", "xfail", "passed")
_RANK: Mapping[Status, int] = {status: rank for rank, status in enumerate(_WORST_FIRST)}

PASSING: frozenset[Status] = frozenset({"passed", "xfail"})
"""An expected failure counts as passing; a skipped test shows nothing."""


def worse_status(one: Status, other: Status) -> Status:
    """Return the worse of two statuses."""
    return min(one, other, key=_RANK.__getitem__)


def _record_status(statuses: dict[str, Status], name: str, status: Status) -> None:
    """Enter a status. A test that was reported before keeps the worse one, so a forged line cannot repair it."""
    statuses[name] = worse_status(statuses[name], status) if name in statuses else status


_MAX_LINE = 4 << 10
"""Characters of a line that are read; output of tests may be longer, lines of the runner are not."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]{0,32}[ -/]?[@-~]|[@-Z\\^_])")


def _plain_lines(log: str) -> Iterator[str]:
    """Yield the lines of a log without colours and carriage returns, cut to ``_MAX_LINE``.

    Only a line feed ends a line.
    """
    for line in _ESCAPES.sub("", log).split("\n"):
        yield line[:_MAX_LINE].removesuffix("\r")


def _count_problem(statuses: Mapping[str, Status], counts: Collection[int]) -> str:
    """Compare the passed tests with the runner's own totals, of which there must be one at least."""
    if not counts:
        return "the test run did not end"
    found = sum(status == "passed" for status in statuses.values())
    passed = sum(counts)
    return f"{found} tests are reported as passed, the runner counted {passed}" if found > passed else ""


# pytest: the summary of `-rA`, and the lines of `-v` where there is no summary

_PYTEST_WORDS: Mapping[str, Status] = {
    "PASSED": "passed",
    "FAILED": "failed",
    "ERROR": "error",
    "SKIPPED": "skipped",
    "XFAIL": "xfail",
    "XPASS": "passed",
}
_PYTEST_SUMMARY = re.compile(r"(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED) (\S.*)")
_PYTEST_VERBOSE = re.compile(r"(\S.*?) (PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)(?: \([^()]*\))?(?: +\[ *\d+%\])?")
_PYTEST_SKIP_PLACE = re.compile(r"\[\d+\] ")
_PYTEST_TOTALS = re.compile(r"\d{1,9} [a-z].* in [0-9.]+ ?s(?:econds)?(?: \([0-9:]+\))?")
_PYTEST_COUNT = re.compile(r"(?<!\d)(\d{1,9}) (passed|xpassed)\b")


def _parse_pytest(log: str) -> dict[str, Status]:
    """Return the status of each test id."""
    statuses: dict[str, Status] = {}
    for line in _plain_lines(log):
        if found := _PYTEST_SUMMARY.fullmatch(line):
            word, rest = found.groups()
            if word == "SKIPPED" and _PYTEST_SKIP_PLACE.match(rest):
                continue  # it names a place in a file, not a test
            _record_status(statuses, _pytest_id(rest), _PYTEST_WORDS[word])
        elif (found := _PYTEST_VERBOSE.fullmatch(line)) and "::" in found[1]:
            _record_status(statuses, found[1], _PYTEST_WORDS[found[2]])
    return statuses


def _pytest_problem(log: str, statuses: Mapping[str, Status]) -> str:
    totals = [line for line in _plain_lines(log) if _PYTEST_TOTALS.fullmatch(line.strip("= "))]
    return _count_problem(statuses, [sum(int(number) for number, _ in _PYTEST_COUNT.findall(line)) for line in totals])


def _pytest_id(rest: str) -> str:
    """Cut the message off: it begins at the first `` - `` outside of the brackets of a parameter."""
    depth = 0
    for position, character in enumerate(rest):
        depth += (character == "[") - (character == "]" and depth > 0)
        if depth == 0 and rest.startswith(" - ", position):
            return rest[:position]
    # An unbalanced bracket inside a parameter: the message is what follows the last bracket, where there is one.
    head, bracket, _ = rest.rpartition("] - ")
    return f"{head}]" if bracket and depth else rest.rstrip()


# unittest: its verbose output, and that of Django's runner, which is one. A test takes one line,
# `name (place) ... ok`, or more: the first line of its docstring may follow the name, and its own output comes between
# the dots and the status.

_UNITTEST_WORDS: Mapping[str, Status] = {
    "ok": "passed",
    "OK": "passed",
    "FAIL": "failed",
    "ERROR": "error",
    "skipped": "skipped",
    "expected failure": "xfail",
    "unexpected success": "failed",
}
_UNITTEST_WORD = r"ok|OK|FAIL|ERROR|skipped(?: .*)?|expected failure|unexpected success"
_UNITTEST_HEADER = re.compile(r"\s*(\w+) \(([\w.<>]+)\)(.*)")
_UNITTEST_AFTER_DOTS = re.compile(rf"(.*?) \.\.\. +({_UNITTEST_WORD})")
_UNITTEST_ALONE = re.compile(rf"({_UNITTEST_WORD})")
_UNITTEST_REPORT = re.compile(r"(FAIL|ERROR): (\w+) \(([\w.<>]+)\).*")
_UNITTEST_RAN = re.compile(r"Ran (\d{1,9}) tests? in [0-9.]+s")


def _parse_unittest(log: str) -> dict[str, Status]:
    """Return the status of each test by its dotted name, ``package.module.Class.test_name``."""
    return _parse_unittest_log(log, _dotted_name)


def _parse_django(log: str) -> dict[str, Status]:
    """Return the status of each test by its name as in Django's logs: the text before the dots."""
    return _parse_unittest_log(log, lambda name, place: f"{name} ({place})")


def _unittest_problem(log: str, statuses: Mapping[str, Status]) -> str:
    """The runner must print how many tests it ran, and no more may be reported."""
    totals = [int(found[1]) for line in _plain_lines(log) if (found := _UNITTEST_RAN.fullmatch(line))]
    if not totals:
        return "the test run did not end"
    found = sum(status in ("passed", "failed", "xfail") for status in statuses.values())
    return f"{found} tests are reported, the runner counted {sum(totals)}" if found > sum(totals) else ""


def _dotted_name(name: str, place: str) -> str:
    """Python 3.11 and newer give the whole name in the place, older ones the class alone."""
    return place if place.rpartition(".")[2] == name else f"{place}.{name}"


def _parse_unittest_log(log: str, full_name: Callable[[str, str], str]) -> dict[str, Status]:
    statuses: dict[str, Status] = {}
    waiting: str | None = None
    for line in _plain_lines(log):
        if report := _UNITTEST_REPORT.fullmatch(line):
            _record_status(statuses, full_name(report[2], report[3]), _UNITTEST_WORDS[report[1]])
            continue
        header = _UNITTEST_HEADER.fullmatch(line)
        if header is not None:
            waiting = full_name(header[1], header[2])
        if waiting is None:
            continue
        status = _unittest_status(line)
        if status is not None:
            _record_status(statuses, waiting, status)
            waiting = None
    return statuses


def _unittest_status(line: str) -> Status | None:
    """Return the status that a line ends with."""
    if found := _UNITTEST_AFTER_DOTS.fullmatch(line):
        word = found[2]
    elif found := _UNITTEST_ALONE.fullmatch(line.strip()):
        word = found[1]
    else:
        return None
    return "skipped" if word.startswith("skipped") else _UNITTEST_WORDS[word]


# The Test Anything Protocol: `ok 1 - name` and `not ok 2 - name`, with a plan `1..2`

_TAP_TEST = re.compile(r"(not )?ok\b(?: +(\d{1,9})\b)?(.*)")
_TAP_PLAN = re.compile(r"1\.\.(\d{1,9})(?: *#.*)?")


def _parse_tap(log: str) -> dict[str, Status]:
    """Return the status of each test by its description, or by its number where it has none. Subtests are left out."""
    statuses: dict[str, Status] = {}
    for line in _plain_lines(log):
        found = _TAP_TEST.fullmatch(line)
        if found is None:
            continue
        failed, number, rest = found.groups()
        name, _, comment = rest.partition("#")
        status = _tap_status(bool(failed), comment.strip()[:4].upper())
        _record_status(statuses, name.strip().removeprefix("-").strip() or number or "", status)
    statuses.pop("", None)
    return statuses


def _tap_problem(log: str, statuses: Mapping[str, Status]) -> str:
    """Every plan must be met exactly."""
    lines = list(_plain_lines(log))
    plans = [int(found[1]) for line in lines if (found := _TAP_PLAN.fullmatch(line))]
    if not plans or any(line.startswith("Bail out!") for line in lines):
        return "the test run did not end"
    results = sum(_TAP_TEST.fullmatch(line) is not None for line in lines)
    return f"{results} tests are reported, {sum(plans)} were planned" if results != sum(plans) else ""


def _tap_status(failed: bool, directive: str) -> Status:
    if directive == "SKIP":
        return "skipped"
    if directive == "TODO":
        return "xfail" if failed else "passed"
    return "failed" if failed else "passed"


# `go test -v` as text, and `go test -json`

_GO_RESULT = re.compile(r"\s*--- (PASS|FAIL|SKIP): (\S+) \([0-9.]+s\)")
_GO_STARTED = re.compile(r"=== RUN +(\S+)")
_GO_PACKAGE = re.compile(r"(?:ok|FAIL|\?|---) *\t\S+.*|(?:PASS|FAIL)|FAIL\t.*")
_GO_WORDS: Mapping[str, Status] = {
    "PASS": "passed",
    "FAIL": "failed",
    "SKIP": "skipped",
    "pass": "passed",
    "fail": "failed",
    "skip": "skipped",
}


def _parse_go(log: str) -> dict[str, Status]:
    """Return the status of each test and subtest (``TestSplit/empty``), whatever its package."""
    statuses: dict[str, Status] = {}
    for line in _plain_lines(log):
        if found := _GO_RESULT.fullmatch(line):
            _record_status(statuses, found[2], _GO_WORDS[found[1]])
        elif (event := _go_event(line)) is not None and event[1] in _GO_WORDS:
            _record_status(statuses, event[0], _GO_WORDS[event[1]])
    return statuses


def _go_problem(log: str, statuses: Mapping[str, Status]) -> str:
    """A test that ended must have begun, and the package must have a result."""
    lines = list(_plain_lines(log))
    started = {found[1] for line in lines if (found := _GO_STARTED.fullmatch(line))}
    started |= {event[0] for line in lines if (event := _go_event(line)) is not None and event[1] == "run"}
    if strangers := statuses.keys() - started:
        return f"{len(strangers)} tests are reported that never began"
    ended = any(_GO_PACKAGE.fullmatch(line) or ('"Action":' in line and '"Test":' not in line) for line in lines)
    return "" if ended else "the test run did not end"


def _go_event(line: str) -> tuple[str, str] | None:
    """Return test and action of a line of ``-json``."""
    if not line.startswith("{"):
        return None
    try:
        event: Any = json.loads(line)
        return str(event["Test"]), str(event["Action"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


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


def _parse_jest(log: str) -> dict[str, Status]:
    """Return the status of each test by its whole name, ``group > inner group > test``; none if names are too many."""
    statuses: dict[str, Status] = {}
    length = 0
    groups: list[tuple[int, str]] = []
    for line in _plain_lines(log):
        if _JEST_FILE.fullmatch(line):
            groups = []
        elif found := _JEST_TEST.fullmatch(line):
            depth = len(found[1])
            path = [name for indent, name in groups if indent < depth]
            name = " > ".join([*path, found[3]])[:_MAX_JEST_NAME]
            _record_status(statuses, name, _JEST_MARKS[found[2]])
            length += len(name)
            if length > _MAX_JEST_NAMES:
                return {}
        elif found := _JEST_GROUP.fullmatch(line):
            depth = len(found[1])
            above = [(indent, name) for indent, name in groups if indent < depth]
            groups = [*above[: _MAX_JEST_DEPTH - 1], (depth, found[2])]
        elif line.strip():
            groups = []
    return statuses


def _jest_problem(log: str, statuses: Mapping[str, Status]) -> str:
    totals = [line for line in _plain_lines(log) if line.startswith("Tests: ") and line.endswith(" total")]
    return _count_problem(statuses, [sum(map(int, _JEST_PASSED.findall(line))) for line in totals])


# `cargo test`: `test module::name ... ok`, and a result line for each binary

_CARGO_TEST = re.compile(r"test (\S.*?)(?: - should panic)? \.\.\. (ok|FAILED|ignored)(?:, .*)?")
_CARGO_RESULT = re.compile(r"test result: (?:ok|FAILED)\. (\d{1,9}) passed; \d{1,9} failed; .*")
_CARGO_WORDS: Mapping[str, Status] = {"ok": "passed", "FAILED": "failed", "ignored": "skipped"}


def _parse_cargo(log: str) -> dict[str, Status]:
    """Return the status of each test, and of each documentation test by file and line."""
    statuses: dict[str, Status] = {}
    for line in _plain_lines(log):
        if found := _CARGO_TEST.fullmatch(line):
            _record_status(statuses, found[1], _CARGO_WORDS[found[2]])
    return statuses


def _cargo_problem(log: str, statuses: Mapping[str, Status]) -> str:
    results = [found for line in _plain_lines(log) if (found := _CARGO_RESULT.fullmatch(line))]
    return _count_problem(statuses, [int(found[1]) for found in results])


@dataclass(frozen=True, slots=True)
class LogFormat:
    """How to read the log of one kind of test runner."""

    parse: Callable[[str], dict[str, Status]]
    find_problem: Callable[[str, Mapping[str, Status]], str]
    """What in the log contradicts itself or shows that the run did not end; empty when nothing does."""


LOG_FORMATS: Mapping[str, LogFormat] = {
    "pytest": LogFormat(_parse_pytest, _pytest_problem),
    "unittest": LogFormat(_parse_unittest, _unittest_problem),
    "django": LogFormat(_parse_django, _unittest_problem),
    "tap": LogFormat(_parse_tap, _tap_problem),
    "go": LogFormat(_parse_go, _go_problem),
    "jest": LogFormat(_parse_jest, _jest_problem),
    "cargo": LogFormat(_parse_cargo, _cargo_problem),
}
"""By the name in a row's ``parser``."""


# Events of our pytest plug-in (`pytest_report.py`), as untrusted as any file from a sandbox

_PHASES = ("setup", "call", "teardown")


@dataclass(frozen=True, slots=True)
class PytestEvents:
    """One run of pytest, or several in a row."""

    statuses: Mapping[str, Status]
    problem: str
    """What contradicts itself or shows that the run did not end; empty when nothing does."""


def read_events(text: str, patched_paths: Collection[str] = ()) -> PytestEvents:
    """Read the plug-in's file.

    Args:
        text: of the file.
        patched_paths: paths below the repository that a patch changes: none of them may implement hooks.
    """
    statuses: dict[str, Status] = {}
    begun = ended = collected = strange = 0
    reported: set[str] = set()
    replaced = ""
    distributed = False
    for event in _events(text):
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
    if replaced:
        return PytestEvents(statuses, f"the test runner was tampered with ({replaced})")
    surplus = 0 if distributed else max(len(reported) - collected, 0)
    return PytestEvents(statuses, _events_problem(begun, ended, strange, surplus))


def _events_problem(begun: int, ended: int, strange: int, surplus: int) -> str:
    if not begun:
        return "pytest did not report (the command must keep PYTHONPATH and PYTEST_ADDOPTS)"
    if begun != ended:
        return "the test run did not end"
    if strange:
        return f"{strange} lines of the report are not from the test runner"
    return f"{surplus} more tests are reported than were collected" if surplus else ""


def _events(text: str) -> Iterator[dict[str, Any] | None]:
    for line in text.split("\n"):
        if not line:
            continue
        try:
            event: Any = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        yield cast(dict[str, Any], event) if isinstance(event, dict) else None


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
