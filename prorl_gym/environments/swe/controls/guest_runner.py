"""Runs inside the grading sandbox: calls one test function per process and reports whether it returned.

It is loaded either as ``sitecustomize``, and calls the function itself, or as a plug-in of pytest. In both cases it
forks before any code of the repository is loaded: the parent keeps the key, can neither be traced nor read, and writes
the report; a child per job runs the test. Standard library only, for any Python 3.6 and newer.
"""

import json
import numbers
import os
import signal
import sys
from typing import Any

_FOLDER = os.environ.pop("PRORL_JOBS", "")
_IS_OWN_RUNNER = "sitecustomize" in __name__
_MAX_CHILD_OUTPUT = 1 << 20
_child_pipe = -1
_job: Any = {}
_counts: Any = {"passed": 0, "other": 0}
_steps: Any = {"all": 0, "before": 0, "begun": False, "repair": False}
_stop_points: Any = []
_file_kinds: Any = {}
_write, _exit, _dumps = os.write, os._exit, json.dumps


def _run_jobs() -> None:
    """Run the jobs, each in a child; return in the children that go on as pytest."""
    with open(os.path.join(_FOLDER, "jobs")) as file:
        jobs = json.load(file)
    os.unlink(os.path.join(_FOLDER, "jobs"))
    sys.dont_write_bytecode = True
    if jobs[0].get("preload"):
        _preload(jobs[0]["preload"], jobs[0]["root"])
    key, report = "", -1
    for job in jobs:
        _write_job_file(job)
        hold, go = os.pipe()
        output, sink = os.pipe()
        child = os.fork()
        if child == 0:
            for fd in (go, output, report):
                if fd >= 0:
                    os.close(fd)
            os.read(hold, 1)
            os.close(hold)
            _enter_child(job, sink)
            return
        os.close(hold)
        os.close(sink)
        if not key:  # not before the fork: the child has a copy of this memory
            _block_tracing()
            path = os.path.join(_FOLDER, "key")
            with open(path) as file:
                key = file.read()
            os.unlink(path)
            report = os.open(os.path.join(_FOLDER, "report"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(go, b"g")
        os.close(go)
        text, code, killed = _wait_for_child(child, output, job.get("seconds", 0))
        line = json.dumps({"key": key, "id": job["id"], "code": code, "killed": killed, "output": text})
        os.write(report, (line + "\n").encode("ascii"))
    _exit(0)


def _preload(module: str, root: str) -> None:
    """Import a module for all children, from outside the repository: this process runs no code of the repair.

    Nothing stays loaded of which the repository has a module of the same name: that one is under test.
    """
    from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

    def is_within(entry: str) -> bool:
        return os.path.realpath(entry).startswith(os.path.realpath(root))

    before, paths, finders = set(sys.modules), sys.path[:], sys.meta_path[:]
    sys.path[:] = [each for each in paths if not is_within(each)]
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]  # no finder of an installation in place
    try:
        __import__(module)
        is_usable = True
    except Exception:  # the children meet it again, and report it
        is_usable = False
    finally:
        sys.path[:], sys.meta_path[:] = paths, finders
    loaded = set(sys.modules) - before
    own = [root, *filter(is_within, paths)]
    if not is_usable or any(PathFinder.find_spec(each, own) for each in loaded if "." not in each):
        for each in loaded:
            del sys.modules[each]


def _write_job_file(job: Any) -> None:
    """Write the file of a job, and remove what was compiled from another text of it."""
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


def _block_tracing() -> None:
    """Let no process of this user trace this one or read its memory."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    except (ImportError, OSError, AttributeError):
        pass


def _wait_for_child(child: int, output: int, seconds: float) -> Any:
    """Return the child's output, its exit code, and whether SIGKILL ended it; kill it at the timeout."""
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
        while size < _MAX_CHILD_OUTPUT:
            part = os.read(output, 65536)
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


def _enter_child(job: Any, sink: int) -> None:
    """Run the job and end, as our own runner; return for pytest, whose hooks below do the rest."""
    global _child_pipe
    _child_pipe = sink
    _job.update(job)
    if job.get("emit"):
        import builtins

        setattr(builtins, job["emit"], _emit_value)
    if _IS_OWN_RUNNER:
        code = 1
        try:
            _call_test(job)
            _write_event(passed=True)
            code = 0
        except BaseException as error:
            _record_stop(error.__traceback__)
            sys.stderr.write(type(error).__name__ + ": " + str(error)[:2000] + "\n")
        finally:
            if job.get("trace"):
                if not _stop_points:
                    _record_stop(None)
                _write_event(stop_points=_stop_points)
            _exit(code)


def _trace_call(frame: Any, event: str, argument: Any) -> Any:
    """Count the instructions of the test file that run, and note whether a line of the repair does."""
    name = frame.f_code.co_filename
    if name not in _file_kinds:
        path = os.path.realpath(name)
        _file_kinds[name] = "test" if path == os.path.realpath(_job["file"]) else _job["repaired"].get(path)
    if _file_kinds[name] == "test":
        frame.f_trace_opcodes = True
        return _trace_opcodes
    return _trace_repair_lines if _file_kinds[name] else None


def _trace_opcodes(frame: Any, event: str, argument: Any) -> Any:
    if event == "opcode":
        _steps["all"] += 1
    return _trace_opcodes


def _trace_repair_lines(frame: Any, event: str, argument: Any) -> Any:
    if event == "line" and frame.f_lineno in _file_kinds[frame.f_code.co_filename]:
        _steps["repair"] = True
    return _trace_repair_lines


def _start_test() -> None:
    _steps.update(before=_steps["all"], begun=True, repair=False)
    if _job.get("trace"):  # not before: most of the time goes into imports
        sys.settrace(_trace_call)


def _record_stop(trace: Any) -> None:
    """Record how far the test that began last ran; nothing when none began."""
    if _job.get("trace"):
        sys.settrace(None)
    if _steps["begun"]:
        failed = trace is not None
        lines: Any = []
        while trace is not None:
            if _file_kinds.get(trace.tb_frame.f_code.co_filename) == "test":
                lines.append(trace.tb_lineno)
            trace = trace.tb_next
        _stop_points.append([_steps["all"] - _steps["before"], failed, lines, _steps["repair"]])
    _steps["begun"] = False


def _write_event(**event: Any) -> None:
    _write(_child_pipe, (_dumps(event) + "\n").encode("ascii"))


def _call_test(job: Any) -> None:
    """Import the file as pytest and ``unittest`` do, and call the function."""
    import importlib

    if b"-m" in _process_arguments():
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
    _start_test()
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


def _process_arguments() -> Any:
    with open("/proc/self/cmdline", "rb") as file:
        return file.read().split(b"\0")


def _is_runner() -> bool:
    """Whether this interpreter is the one that runs tests, not another that the command starts."""
    names = (b"pytest", b"py.test", b"unittest", b"test")
    return any(name in argument for argument in _process_arguments() for name in names)


def _emit_value(site: int, value: Any) -> None:
    """Emit a value of a test, encoded; ``None`` for one that has no encoding."""
    try:
        encoded: Any = encode_value(value)
    except (TypeError, RecursionError):
        encoded = None
    _write_event(site=site, value=encoded)


def encode_value(value: Any) -> Any:
    """Return a value of built-in types or a rational as JSON for ``sealed_values.decode_value``; else ``TypeError``."""
    if value is None or value is True or value is False:
        return ["plain", value]
    # By the built-in types' own methods: a subclass may return anything.
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
            return [kind.__name__, [encode_value(each) for each in kind.__iter__(value)]]
    if isinstance(value, dict):
        items: Any = dict.items(value)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return ["dict", [[encode_value(key), encode_value(each)] for key, each in items]]
    if isinstance(value, numbers.Rational):  # of numpy, for example
        return ["ratio", [hex(value.numerator), hex(value.denominator)]]
    raise TypeError


def pytest_configure(config: Any) -> None:
    if _job:  # whatever the command selects
        config.args = [_job["file"] + "::" + _job["name"]]


def pytest_runtest_logstart() -> None:
    _start_test()


def pytest_runtest_makereport(call: Any) -> None:
    if call.when == "call" or call.excinfo is not None:
        _record_stop(call.excinfo.tb if call.excinfo is not None else None)


def pytest_runtest_logreport(report: Any) -> None:
    # A function with parameters is several tests.
    if report.outcome == "passed" and report.when != "call":
        return
    passed = report.outcome == "passed" or (hasattr(report, "wasxfail") and "xfail" in report.keywords)
    _counts["passed" if passed else "other"] += 1


def pytest_sessionfinish() -> None:
    if _job.get("trace"):
        _write_event(stop_points=_stop_points)
    if _job and _counts["passed"] and not _counts["other"]:
        _write_event(passed=True)


if _FOLDER and (not _IS_OWN_RUNNER or _is_runner()):
    _run_jobs()
elif _FOLDER:
    os.environ["PRORL_JOBS"] = _FOLDER  # for the runner that this process may start
