"""The code grader in a real sandbox: right, wrong, hanging and hostile programs, and failures that are not theirs."""

import json
import textwrap
from typing import Any

import pytest

from prorl_gym.environments.code.code_row import CodeRow
from prorl_gym.environments.code.grader import grade
from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import Cause, Evidence, FailureKind, GraderError, SandboxError
from prorl_gym.records import Score
from prorl_gym.sandbox.protocol import ExecResult, SandboxSpec

ADD = {"kind": "function", "entry": "add", "cases": [{"args": [1, 2], "expected": 3}, {"args": [5, -5], "expected": 0}]}
DOUBLE = {"kind": "stdio", "cases": [{"stdin": "4\n", "stdout": "8\n"}, {"stdin": "21\n", "stdout": "42\n"}]}


def row(tests: dict[str, Any], **more: Any) -> CodeRow:
    return CodeRow.model_validate({"question": "?", "tests": tests, "time_limit": 1.0, **more})


async def mark(tests: dict[str, Any], program: str, leases: Leases, seconds: float = 60.0, **more: Any) -> Score:
    return await grade(row(tests, **more), textwrap.dedent(program), leases, seconds)


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        (ADD, "def add(a, b): return a + b"),
        (ADD, "print('noise')\ndef add(a, b):\n    print('more noise')\n    return a + b"),
        ({**ADD, "entry": "Sum.add"}, "class Sum:\n    def add(self, a, b): return a + b"),
        (DOUBLE, "print(2 * int(input()))"),
        (DOUBLE, "import sys\nsys.stdout.write(f'{2 * int(sys.stdin.read())}  \\n\\n')"),
    ],
)
async def test_right_program_passes(leases: Leases, tests: dict[str, Any], program: str):
    score = await mark(tests, program, leases)
    assert (score.reward, score.detail) == (1.0, {"passed": 2, "tests": 2})


FORGED = """
    import os
    os.write(3, b"3")
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("program", "why", "passed"),
    [
        ("def add(a, b): return a - b", "wrong result", 0),
        ("def add(a, b): return 3", "wrong result", 1),
        ("def add(a, b): return True if a == 1 else False", "wrong result", 0),
        ("def add(a, b): return '3'", "wrong result", 0),
        ("def add(a, b): return {1, 2}", "runtime error", 0),
        ("def add(a, b): return float('nan')", "wrong result", 0),
        ("def add(a): return 3", "runtime error", 0),
        ("def plus(a, b): return a + b", "runtime error", 0),
        ("def add(a, b) return a + b", "runtime error", 0),
        ("", "runtime error", 0),
        ("import sys\nsys.exit(0)", "no result", 0),
        ("import os\nos._exit(0)", "no result", 0),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "killed", 0),
        ("import ctypes\nctypes.string_at(0)", "runtime error", 0),
        ("def add(a, b):\n    while True: pass", "time limit", 0),
        (
            "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\ndef add(a, b):\n    while True: pass",
            "*",
            0,
        ),
        ("def add(a, b): return bytearray(1 << 40)", "memory limit", 0),
        ("def add(a, b): return [0] * (1 << 40)", "memory limit", 0),
        ("class E(int):\n    def __eq__(s, o): return True\ndef add(a, b): return E(7)", "wrong result", 0),
        ("import json\njson.dumps = lambda *a, **k: '3'\ndef add(a, b): return 7", "wrong result", 0),
        (
            "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None\ndef add(a, b): return 7",
            "wrong result",
            0,
        ),
        (FORGED, "wrong result", 1),
        ("def add(a, b):\n    x = []\n    for _ in range(50000): x = [x]\n    return x", "runtime error", 0),
        ("def add(a, b): return 10 ** 6000", "*", 0),
        ("import atexit\natexit.register(print, 3)\ndef add(a, b): return 7", "wrong result", 0),
    ],
)
async def test_bad_function_fails(leases: Leases, program: str, why: str, passed: int):
    score = await mark(ADD, program, leases)
    assert score.reward == 0.0
    assert score.detail["passed"] == passed
    assert why in ("*", score.detail["why"])


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("print(8)", "wrong output"),
        ("print(2 * int(input()), end='!')", "wrong output"),
        ("print(2 * int(input()))\nraise SystemExit(1)", "runtime error"),
        ("raise ValueError", "runtime error"),
        ("while True: pass", "time limit"),
        ("while True: print('x' * 100000)", "*"),
        ("import sys\nsys.stdout.buffer.write(b'8\\xff')", "wrong output"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "*"),
        ("x = bytearray(1 << 40)", "memory limit"),
        ("import os\nos.write(1, b'8')\nos.closerange(0, 100)\nimport time\ntime.sleep(99)", "time limit"),
        ("import shutil\nshutil.rmtree('/usr/lib/python3', ignore_errors=True)\nprint(9)", "wrong output"),
    ],
)
async def test_bad_program_fails(leases: Leases, backend: Any, program: str, why: str):
    if backend.name == "local" and ("fork" in program or "rmtree" in program):
        pytest.skip("needs isolation: no user namespaces here")
    score = await mark(DOUBLE, program, leases, seconds=1.0 if "fork" in program else 2.0)
    assert score.reward == 0.0
    assert why in ("*", score.detail["why"])


async def test_no_expected_output_is_in_the_sandbox(leases: Leases, backend: Any):
    if backend.name == "local":
        pytest.skip("needs isolation: no user namespaces here")
    secret = "expected-7f3a"
    tests = {"kind": "stdio", "cases": [{"stdin": "", "stdout": secret}]}
    program = """
        import os
        places = ["/proc/self/environ", "/proc/self/cmdline", "/proc/1/environ", "/proc/1/cmdline"]
        for top in ("/workspace", "/tmp", "/var/tmp", "/home", "/run", "/dev/shm"):
            places += [os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names]
        found = []
        for place in places:
            try:
                with open(place, "rb") as file:
                    if b"expected-" + b"7f3a" in file.read(1 << 20):
                        found.append(place)
            except OSError:
                pass
        print(found or "nothing")
    """
    revealing = {"kind": "stdio", "cases": [{"stdin": "", "stdout": "nothing"}, *tests["cases"]]}
    score = await mark(revealing, program, leases, time_limit=5.0)
    assert score.detail == {"why": "wrong output", "passed": 1, "tests": 2}


async def test_function_never_sees_expected_values(leases: Leases):
    tests = {"kind": "function", "entry": "peek", "cases": [{"args": [], "expected": 987654321}]}
    program = """
        import gc
        def peek():
            return sum(1 for thing in gc.get_objects() if isinstance(thing, dict) and 987654320 + 1 in thing.values())
    """
    assert (await mark(tests, program, leases)).detail["why"] == "wrong result"


async def test_time_for_all_tests_together_is_bounded(leases: Leases):
    score = await mark(DOUBLE, "import time\ntime.sleep(0.5)\nprint(2 * int(input()))", leases, seconds=0.4)
    assert score.detail == {"why": "time limit", "passed": 0, "tests": 2}


async def test_what_a_test_leaves_running_does_not_help_or_hurt_the_next(leases: Leases):
    program = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            time.sleep(30)
        print(2 * int(input()))
    """
    score = await mark(DOUBLE, program, leases)
    assert score.detail in ({"passed": 2, "tests": 2}, {"why": "time limit", "passed": 0, "tests": 2})


async def test_large_output_is_compared_whole(leases: Leases):
    expected = "".join(f"{number}\n" for number in range(60_000))
    tests = {"kind": "stdio", "cases": [{"stdin": "60000", "stdout": expected}]}
    assert (await mark(tests, "for i in range(int(input())): print(i)", leases)).reward == 1.0
    assert (await mark(tests, "for i in range(int(input())): print(i + (i == 30000))", leases)).reward == 0.0


def frames(*outputs: bytes, end: bool = True, ready: bool = True) -> bytes:
    """What a driver says."""
    said = b'{"ready": true}\n' if ready else b""
    for output in outputs:
        facts = {"exit": 0, "timed_out": False, "truncated": False, "seconds": 0.1, "cpu": 0.1, "clean": True}
        said += json.dumps({**facts, "out": len(output), "err": 0}).encode() + b"\n" + output
    return said + (b'{"end": "done"}\n' if end else b"")


class PlayedSandbox:
    """A sandbox whose driver answers as scripted."""

    spec = SandboxSpec()

    def __init__(self, said: bytes | SandboxError, exit_code: int = 0, sigkill: Evidence | None = None) -> None:
        self._said, self._exit_code, self._sigkill = said, exit_code, sigkill
        self.closed = False

    async def exec(self, argv: list[str], *, stdin: bytes = b"", **options: Any) -> ExecResult:
        if isinstance(self._said, SandboxError):
            raise self._said
        self.tests = len(json.loads(stdin.split(b"\n")[0])["tests"])
        return ExecResult(self._exit_code, self._said, b"sh: python3: not found", sigkill_evidence=self._sigkill)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        assert path == "/workspace/solution.py"

    async def close(self) -> None:
        self.closed = True


class Shelf:
    """Hands out sandboxes that say the given things."""

    def __init__(self, *said: bytes | SandboxError, exit_code: int = 0, sigkill: Evidence | None = None) -> None:
        self.sandboxes = [PlayedSandbox(text, exit_code, sigkill) for text in said]
        self.handed: list[PlayedSandbox] = []

    async def start_clean_sandbox(self, spec: SandboxSpec) -> PlayedSandbox:
        assert all(sandbox.closed for sandbox in self.handed)
        self.handed.append(self.sandboxes.pop(0))
        return self.handed[-1]


LOST = SandboxError(FailureKind.SANDBOX_LOST, "The sandbox does not answer.")


async def test_sandbox_lost_twice_is_infrastructure():
    shelf = Shelf(LOST, LOST)
    with pytest.raises(SandboxError) as caught:
        await mark(DOUBLE, "", shelf)
    assert caught.value.cause is Cause.INFRASTRUCTURE
    assert [sandbox.closed for sandbox in shelf.handed] == [True, True]


OF_ITS_SANDBOX = {
    "limits of pid 1": "resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))",
    "limits of the next child": "[resource.prlimit(os.getpid() + n, resource.RLIMIT_AS, (0, 0)) for n in range(1, 50)]",
    "everything": "os.kill(-1, 9)",
    "itself": "os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("attack", OF_ITS_SANDBOX)
async def test_a_wrong_program_that_turns_on_its_sandbox_is_worth_nothing(leases: Leases, attack: str):
    program = f"import os, resource\ntry:\n    {OF_ITS_SANDBOX[attack]}\nexcept OSError: pass\nprint('wrong')"
    assert (await mark(DOUBLE, program, leases)).reward == 0.0


async def test_sandbox_choked_by_an_earlier_test_is_replaced():
    shelf = Shelf(LOST, frames(b"8"), frames(b"42"))
    assert (await mark(DOUBLE, "", shelf)).reward == 1.0
    assert [sandbox.tests for sandbox in shelf.handed[1:]] == [1, 1]


async def test_a_driver_that_ends_early_is_tried_once_more_with_the_test_by_itself():
    shelf = Shelf(frames(b"8", end=False), frames(b"42"))
    assert (await mark(DOUBLE, "", shelf)).reward == 1.0
    shelf = Shelf(frames(b"8", end=False), frames(end=False))
    assert (await mark(DOUBLE, "", shelf)).detail == {"why": "stopped the test runner", "passed": 1, "tests": 2}


async def test_a_driver_that_is_killed_twice_is_the_programs_doing_only_if_a_program_may_have_sent_that():
    cut = frames(end=False)
    assert (await mark(DOUBLE, "", Shelf(cut, cut, exit_code=137))).detail["why"] == "stopped the test runner"
    with pytest.raises(SandboxError) as caught:
        await mark(DOUBLE, "", Shelf(cut, cut, exit_code=137, sigkill=Evidence.SANDBOX_LOST_UNEXPLAINED))
    assert caught.value.cause is Cause.INFRASTRUCTURE


@pytest.mark.parametrize("cut", [30, 130, 148])
async def test_a_report_cut_anywhere_is_no_report(cut: int):
    said = frames(b"8" * 20, end=False)
    assert len(said) > 148
    shelf = Shelf(said[:cut], said[:cut])
    assert (await mark(DOUBLE, "", shelf)).detail["why"] == "stopped the test runner"


@pytest.mark.parametrize("line", [b"[" * 100_000, b"{}", b"[]", b'{"exit": "x"}', b"\xff", b'{"end": "?"}'])
async def test_what_is_no_frame_is_no_report(line: bytes):
    said = frames(end=False) + line + b"\n"
    assert (await mark(DOUBLE, "", Shelf(said, said))).reward == 0.0


async def test_sandbox_without_python_is_infrastructure():
    with pytest.raises(GraderError, match=r"python3 does not run.*127, sh: python3: not found"):
        await mark(DOUBLE, "", Shelf(b"", exit_code=127))


async def test_first_process_that_cannot_start_is_infrastructure():
    broken = b'{"end": "broken", "error": "no room"}\n'
    with pytest.raises(GraderError, match="no room"):
        await mark(DOUBLE, "", Shelf(frames(end=False) + broken))
    shelf = Shelf(frames(b"8", end=False) + broken, frames(b"42"))
    assert (await mark(DOUBLE, "", shelf)).reward == 1.0
