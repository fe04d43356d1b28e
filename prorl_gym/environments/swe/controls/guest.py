"""Runs inside the grading sandbox: calls one test function per process and reports whether it returned.

It is loaded either as ``sitecustomize``, where it calls the function itself, or as a plug-in of pytest. In both cases
it takes the process over before any code of the repository is loaded: the parent keeps the key, can neither be traced
nor read, and writes the report; a child per job runs the test. Standard library only, for any Python 3.6 and newer.
"""

import json
import os
import signal
import sys
from typing import Any

_FOLDER = os.environ.pop("PRORL_JOBS", "")
_OWN = "sitecustomize" in __name__
_MAX_SAID = 1 << 20
_said = -1
_job: Any = {}
_counts: Any = {"passed": 0, "other": 0}
_steps: Any = {"all": 0, "before": 0, "begun": False, "repair": False}
_ends: Any = []
_watched: Any = {}
_write, _exit, _dumps = os.write, os._exit, json.dumps


def _take_over() -> None:
    """Run the jobs, each in a child; return in the children that go on as pytest."""
    with open(os.path.join(_FOLDER, "jobs")) as file:
        jobs = json.load(file)
    os.unlink(os.path.join(_FOLDER, "jobs"))
    sys.dont_write_bytecode = True
    if jobs[0].get("warm"):
        _import_pytest()
    key, report = "", -1
    for job in jobs:
        _place(job)
        hold, go = os.pipe()
        said, say = os.pipe()
        child = os.fork()
        if child == 0:
            for fd in (go, said, report):
                if fd >= 0:
                    os.close(fd)
            os.read(hold, 1)
            os.close(hold)
            _become(job, say)
            return
        os.close(hold)
        os.close(say)
        if not key:  # not before the fork: the child has a copy of this memory
            _hide()
            path = os.path.join(_FOLDER, "key")
            with open(path) as file:
                key = file.read()
            os.unlink(path)
            report = os.open(os.path.join(_FOLDER, "report"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(go, b"g")
        os.close(go)
        text, code, killed = _follow(child, said, job.get("seconds", 0))
        line = json.dumps({"key": key, "id": job["id"], "code": code, "killed": killed, "said": text})
        os.write(report, (line + "\n").encode("ascii"))
    _exit(0)


def _import_pytest() -> None:
    """Import what most test files import once for all jobs, where code of the repository may be in this process."""
    try:
        import pytest  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        pass


def _place(job: Any) -> None:
    """Write the file of a job; nothing that was compiled from another text of it may stay."""
    folder, name = os.path.split(job["file"])
    cache = os.path.join(folder, "__pycache__")
    stem = os.path.splitext(name)[0] + "."
    for each in os.listdir(cache) if os.path.isdir(cache) else ():
        if each.startswith(stem):
            os.unlink(os.path.join(cache, each))
    os.makedirs(folder, exist_ok=True)
    if os.path.lexists(job["file"]):
        os.unlink(job["file"])
    with open(job["file"], "w", encoding="utf-8", newline="\n") as file:
        file.write(job["text"])


def _hide() -> None:
    try:
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    except (ImportError, OSError, AttributeError):
        pass


def _follow(child: int, said: int, seconds: float) -> Any:
    """Return what a child said, how it ended, and whether SIGKILL ended it; it is killed when its time is over."""
    late: Any = []

    def kill(*_: Any) -> None:
        late.append(True)
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    # What the test left running may keep the pipe open: read no longer than the child lives.
    import threading

    parts: Any = []

    def read() -> None:
        size = 0
        while size < _MAX_SAID:
            part = os.read(said, 65536)
            if not part:
                break
            size += len(part)
            parts.append(part)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    _, status = os.waitpid(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    reader.join(1.0)
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) and not late else -1
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and not late
    return b"".join(parts).decode("ascii", "replace"), code, killed


def _become(job: Any, say: int) -> None:
    global _said
    _said = say
    _job.update(job)
    if job.get("emit"):
        import builtins

        setattr(builtins, job["emit"], _emit)
    if _OWN:
        code = 1
        try:
            _call(job)
            _tell(passed=True)
            code = 0
        except BaseException as error:
            _note_end(error.__traceback__)
            sys.stderr.write(type(error).__name__ + ": " + str(error)[:2000] + "\n")
        finally:
            if job.get("trace"):
                if not _ends:
                    _note_end(None)
                _tell(ends=_ends)
            _exit(code)


def _watch(frame: Any, event: str, argument: Any) -> Any:
    """Count the steps of the test file, which tell how far a test came, and see lines of the repair run."""
    name = frame.f_code.co_filename
    if name not in _watched:
        path = os.path.realpath(name)
        _watched[name] = "test" if path == os.path.realpath(_job["file"]) else _job["repaired"].get(path)
    if _watched[name] == "test":
        frame.f_trace_opcodes = True
        return _count
    return _see if _watched[name] else None


def _count(frame: Any, event: str, argument: Any) -> Any:
    if event == "opcode":
        _steps["all"] += 1
    return _count


def _see(frame: Any, event: str, argument: Any) -> Any:
    if event == "line" and frame.f_lineno in _watched[frame.f_code.co_filename]:
        _steps["repair"] = True
    return _see


def _begin() -> None:
    _steps.update(before=_steps["all"], begun=True, repair=False)
    if _job.get("trace"):  # not before: most of the time goes into imports
        sys.settrace(_watch)


def _note_end(trace: Any) -> None:
    """Note how far the test came that begun last; nothing when none did."""
    if _job.get("trace"):
        sys.settrace(None)
    if _steps["begun"]:
        steps = _steps["all"] - _steps["before"]
        _ends.append([steps, trace is not None, _lines(trace), _steps["repair"]])
    _steps["begun"] = False


def _lines(trace: Any) -> Any:
    """Return the lines of the test file in a traceback, the outermost first."""
    found: Any = []
    while trace is not None:
        if _watched.get(trace.tb_frame.f_code.co_filename) == "test":
            found.append(trace.tb_lineno)
        trace = trace.tb_next
    return found


def _tell(**event: Any) -> None:
    _write(_said, (_dumps(event) + "\n").encode("ascii"))


def _call(job: Any) -> None:
    """Import the file as pytest and ``unittest`` do, and call the function."""
    import importlib

    if _is_module_run():
        sys.path.insert(0, os.getcwd())
    folder, name = os.path.split(job["file"])
    module = os.path.splitext(name)[0]
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder, package = os.path.split(folder)
        module = package + "." + module
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if not hasattr(sys, "argv"):
        sys.argv = ["test"]
    *owners, function = job["name"].split("::")
    holder: Any = importlib.import_module(module)
    for owner in owners:
        holder = getattr(holder, owner)
    _begin()
    if not owners:
        result = getattr(holder, function)()
    else:
        import unittest

        if issubclass(holder, unittest.TestCase):
            if getattr(holder, "__unittest_skip__", False):
                raise RuntimeError("skipped")
            unittest.TestSuite([holder(function)]).debug()
            return
        result = getattr(holder(), function)()
    if result is not None:
        raise RuntimeError("the function returned something: a coroutine, or it yields")


def _arguments() -> Any:
    with open("/proc/self/cmdline", "rb") as file:
        return file.read().split(b"\0")


def _is_module_run() -> bool:
    return b"-m" in _arguments()


def _is_runner() -> bool:
    """Whether this interpreter is about to run tests, and is none that the command starts before."""
    names = (b"pytest", b"py.test", b"unittest", b"test")
    return any(name in argument for argument in _arguments() for name in names)


def _emit(site: int, value: Any) -> None:
    """Hand out what a test got, in a form from which the judge can make the same value."""
    try:
        encoded: Any = _encoded(value)
    except (TypeError, RecursionError):
        encoded = None
    _tell(site=site, value=encoded)


def _encoded(value: Any) -> Any:
    if value is None or value is True or value is False:
        return ["plain", value]
    # By the built-in types' own methods: those of a class in between may say anything.
    if isinstance(value, str):
        return ["plain", str.__str__(value) if type(value) is str else "".join(str.__iter__(value))]
    if isinstance(value, int):
        return ["int", hex(int.__index__(value))]
    if isinstance(value, float):
        return ["float", float.__repr__(value)]
    if isinstance(value, bytes):
        return ["bytes", bytes.hex(value)]
    kinds: Any = (list, tuple, set, frozenset)
    for kind in kinds:
        if isinstance(value, kind):
            return [kind.__name__, [_encoded(each) for each in kind.__iter__(value)]]
    if isinstance(value, dict):
        items: Any = dict.items(value)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return ["dict", [[_encoded(key), _encoded(each)] for key, each in items]]
    raise TypeError


def pytest_configure(config: Any) -> None:
    """Run the one function, whatever the command asks for."""
    if _job:
        config.args = [_job["file"] + "::" + _job["name"]]


def pytest_runtest_logstart() -> None:
    """Count from here how far the test comes."""
    _begin()


def pytest_runtest_makereport(call: Any) -> None:
    """Note how far a test came, and where it ended."""
    if call.when == "call" or call.excinfo is not None:
        _note_end(call.excinfo.tb if call.excinfo is not None else None)


def pytest_runtest_logreport(report: Any) -> None:
    """Count what came of it; a function with parameters is several tests."""
    if report.outcome == "passed" and report.when != "call":
        return
    passed = report.outcome == "passed" or (hasattr(report, "wasxfail") and "xfail" in report.keywords)
    _counts["passed" if passed else "other"] += 1


def pytest_sessionfinish() -> None:
    """Say whether all of it passed."""
    if _job.get("trace"):
        _tell(ends=_ends)
    if _job and _counts["passed"] and not _counts["other"]:
        _tell(passed=True)


if _FOLDER and (not _OWN or _is_runner()):
    _take_over()
elif _FOLDER:
    os.environ["PRORL_JOBS"] = _FOLDER  # for the runner that this process may start
