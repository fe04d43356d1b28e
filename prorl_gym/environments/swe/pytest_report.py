"""Runs inside the grading sandbox as a plug-in of pytest: reports each test, apart from what tests print.

Each event is a line of JSON, written at once to a file that only the first run of this process writes to. The plug-in
is loaded before the repository's own code, which shares this process and may do anything to it. It detects the easiest
attack, replacing the parts of pytest that run and judge a test, and reports files of the repository that implement
hooks. Standard library only, for any Python 3.6 and any pytest 4 or newer.
"""

import importlib
import json
import os
from typing import Any

_WRITE, _DUMPS, _PROCESS = os.write, json.dumps, os.getpid()
# Removed, so that programs of the tests cannot find the file.
_PATH = os.environ.pop("PRORL_REPORT", "")
_ROOT = os.environ.pop("PRORL_ROOT", "")

_CORE = (
    "_pytest.python:Function.runtest",
    "_pytest.python:Function.setup",
    "_pytest.python:pytest_pyfunc_call",
    "_pytest.unittest:TestCaseFunction.runtest",
    "_pytest.unittest:TestCaseFunction.addError",
    "_pytest.unittest:TestCaseFunction.addFailure",
    "_pytest.unittest:pytest_runtest_makereport",
    "_pytest.skipping:pytest_runtest_makereport",
    "_pytest.runner:CallInfo.from_call",
    "_pytest.runner:call_runtest_hook",
    "_pytest.runner:call_and_report",
    "_pytest.runner:runtestprotocol",
    "_pytest.runner:pytest_runtest_call",
    "_pytest.runner:pytest_runtest_makereport",
    "_pytest.reports:TestReport.__init__",
    "_pytest.reports:TestReport.from_item_and_call",
    "unittest.case:TestCase.run",
    "unittest.case:TestCase._callTestMethod",
    "unittest.case:_Outcome.testPartExecutor.__wrapped__",
    "pluggy._callers:_multicall",
    "pluggy._hooks:HookCaller.__call__",
    "builtins:AssertionError",
)


def _core_functions() -> Any:
    """Return the functions that run and judge a test, as they are now, where this pytest has them."""
    found: Any = {}
    for place in _CORE:
        module, _, path = place.partition(":")
        try:
            value: Any = importlib.import_module(module)
            for name in path.split("."):
                value = getattr(value, name)
        except (ImportError, AttributeError):
            continue
        function = getattr(value, "__func__", value)  # each look at a class method gives another bound one
        found[place] = (function, getattr(function, "__code__", None))
    return found


# At import, before any conftest.py: an initial one may import the code under test.
_INITIAL_CORE: Any = _core_functions() if _PATH else {}


def _hook_files(config: Any) -> Any:
    """Return the files of the repository that implement hooks of pytest, by their paths in it; no conftest.py."""
    found: set[str] = set()  # of a local name this is not evaluated
    for hook in config.hook.__dict__.values():
        for each in hook.get_hookimpls():
            code = getattr(each.function, "__code__", None)
            path = os.path.realpath(code.co_filename) if code is not None else ""
            if _ROOT and path.startswith(_ROOT + os.sep) and os.path.basename(path) != "conftest.py":
                found.add(path[len(_ROOT) + 1 :])
    return found


class _Reporter:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write_event(self, **event: Any) -> None:
        if os.getpid() == _PROCESS:  # not what the tests forked
            _WRITE(self._descriptor, (_DUMPS(event) + "\n").encode("ascii"))

    def write_hooks(self, config: Any) -> None:
        for path in sorted(_hook_files(config)):
            self.write_event(hooks=path)

    def pytest_collection_finish(self, session: Any) -> None:
        self.write_hooks(session.config)
        self.write_event(collected=len({item.nodeid for item in session.items}))

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self.write_event(uncollected=report.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        # By a mark: code under test can raise what pytest.xfail() raises.
        marks = {"xfail", "__unittest_expecting_failure__"}.intersection(report.keywords)
        xfail = hasattr(report, "wasxfail") and bool(marks)
        now = _core_functions()
        for place, (function, code) in _INITIAL_CORE.items():
            found = now.get(place, (None, None))
            if found[0] is not function or found[1] is not code:
                self.write_event(replaced=place)
        self.write_event(test=report.nodeid, when=report.when, outcome=report.outcome, xfail=xfail)

    def pytest_sessionfinish(self, session: Any, exitstatus: Any) -> None:
        self.write_hooks(session.config)
        self.write_event(end=int(exitstatus))


_reporting: Any = []


def pytest_configure(config: Any) -> None:
    """Begin to report, but not for a run inside a run (tests of a pytest plug-in)."""
    if _PATH and not _reporting and "PYTEST_XDIST_WORKER" not in os.environ:
        report = _Reporter(os.open(_PATH, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        _reporting.append(report)
        config.pluginmanager.register(report, "prorl-report")
        # The controller of pytest-xdist collects nothing itself.
        report.write_event(begin=True, distributed=config.pluginmanager.hasplugin("dsession"))
