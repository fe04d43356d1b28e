"""A plug-in of pytest for making rows: why tests fail and, optionally, which lines run.

It is copied into the sandbox as a file: standard library only, no import of this package. Its output only
guides the choice of faults; grading's own plug-in decides whether a test passes.
"""

import json
import os
import sys
import threading
from types import FrameType
from typing import Any

ROOT = os.environ.get("PRORL_SUITE_ROOT", "")
TARGET = os.environ.get("PRORL_SUITE_REPORT", "")
TRACE = os.environ.get("PRORL_SUITE_TRACE", "") == "1"

messages: "dict[str, str]" = {}
lines: "dict[str, set[int]]" = {}


def _inside(frame: FrameType, event: str, argument: Any) -> Any:
    if event == "line":
        lines[frame.f_code.co_filename].add(frame.f_lineno)
    return _inside


def _enter(frame: FrameType, event: str, argument: Any) -> Any:
    name = frame.f_code.co_filename
    if not name.startswith(ROOT):
        return None
    lines.setdefault(name, set())
    return _inside


if TRACE:
    threading.settrace(_enter)
    sys.settrace(_enter)


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        messages[report.nodeid] = str(getattr(crash, "message", "") or "")[:2000]


def pytest_sessionfinish() -> None:
    sys.settrace(None)
    seen = {os.path.relpath(name, ROOT): sorted(numbers) for name, numbers in list(lines.items())}
    with open(TARGET, "w") as file:
        json.dump({"messages": messages, "lines": seen}, file)
