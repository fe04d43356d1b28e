"""The code grader in a real sandbox: right, wrong, hanging and hostile programs, and failures that are not theirs."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from code_support import function, mark, stdio

from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import Cause, Evidence, FailureKind, GraderError, SandboxError
from prorl_gym.records import Score
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.protocol import ExecResult, SandboxSpec
from prorl_gym.testing.sandbox.fake_sandbox import FakeBackend, SandboxScript

ADD = function(([1, 2], 3), ([5, -5], 0), entry="add")
DOUBLE = stdio(("4\n", "8\n"), ("21\n", "42\n"))


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


@pytest.mark.parametrize(
    ("program", "why", "passed"),
    [
        ("def add(a, b): return a - b", "wrong result", 0),
        ("def add(a, b): return 3", "wrong result", 1),
        ("def add(a, b): return True if a == 1 else False", "wrong result", 0),
        ("def add(a, b): return {1, 2}", "runtime error", 0),
        ("def add(a): return 3", "runtime error", 0),
        ("def plus(a, b): return a + b", "runtime error", 0),
        ("def add(a, b) return a + b", "runtime error", 0),
        ("", "runtime error", 0),
        ("import sys\nsys.exit(0)", "no result", 0),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "killed", 0),
        ("import ctypes\nctypes.string_at(0)", "runtime error", 0),
        ("def add(a, b):\n    while True: pass", "time limit", 0),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\ndef add(a, b):\n    while True: pass", "*", 0),
        ("def add(a, b): return bytearray(1 << 40)", "memory limit", 0),
        ("def add(a, b): return [0] * (1 << 40)", "memory limit", 0),
        ("def add(a, b):\n    x = []\n    for _ in range(50000): x = [x]\n    return x", "runtime error", 0),
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
        ("x = bytearray(1 << 40)", "memory limit"),
        ("import os\nos.write(1, b'8')\nos.closerange(0, 100)\nimport time\ntime.sleep(99)", "time limit"),
    ],
)
async def test_bad_program_fails(leases: Leases, program: str, why: str):
    score = await mark(DOUBLE, program, leases, seconds=2.0)
    assert (score.reward, score.detail["why"]) == (0.0, why)


async def test_time_for_all_tests_together_is_bounded(leases: Leases):
    score = await mark(DOUBLE, "import time\ntime.sleep(0.5)\nprint(2 * int(input()))", leases, seconds=0.4)
    assert score.detail == {"why": "time limit", "passed": 0, "tests": 2}


async def test_large_output_is_compared_whole(leases: Leases):
    expected = "".join(f"{number}\n" for number in range(60_000))
    tests = stdio(("60000", expected))
    assert (await mark(tests, "for i in range(int(input())): print(i)", leases)).reward == 1.0
    assert (await mark(tests, "for i in range(int(input())): print(i + (i == 30000))", leases)).reward == 0.0


def frames(*outputs: bytes, end: bool = True) -> bytes:
    """What a driver says."""
    said = b'{"ready": true}\n'
    for output in outputs:
        facts = {"exit": 0, "timed_out": False, "truncated": False, "seconds": 0.1, "cpu": 0.1, "clean": True}
        said += json.dumps({**facts, "out": len(output), "err": 0}).encode() + b"\n" + output
    return said + (b'{"end": "done"}\n' if end else b"")


def play(*said: bytes | SandboxError, exit_code: int = 0, sigkill: Evidence | None = None) -> FakeBackend:
    """Return sandboxes whose drivers say the given things, one each; each ends before the next begins."""
    left = list(said)

    def start(spec: SandboxSpec) -> None:
        assert all(sandbox.closed for sandbox in backend.started)

    def answer(argv: Sequence[str], stdin: bytes) -> ExecResult:
        text = left.pop(0)
        if isinstance(text, SandboxError):
            raise text
        return ExecResult(exit_code, text, b"sh: python3: not found", kill_evidence=sigkill)

    backend = FakeBackend(SandboxScript(on_exec=answer, on_start=start))
    return backend


async def grade_played(backend: FakeBackend) -> Score:
    return await mark(DOUBLE, "", SandboxLeases(backend))


LOST = SandboxError(FailureKind.SANDBOX_LOST, "The sandbox does not answer.")


async def test_sandbox_lost_twice_is_infrastructure():
    backend = play(LOST, LOST)
    with pytest.raises(SandboxError) as caught:
        await grade_played(backend)
    assert caught.value.cause is Cause.INFRASTRUCTURE
    assert [sandbox.closed for sandbox in backend.started] == [True, True]


async def test_sandbox_choked_by_an_earlier_test_is_replaced():
    backend = play(LOST, frames(b"8"), frames(b"42"))
    assert (await grade_played(backend)).reward == 1.0
    jobs = [sandbox.calls[-1].options["stdin"].split(b"\n")[0] for sandbox in backend.started[1:]]
    assert [len(json.loads(job)["tests"]) for job in jobs] == [1, 1]


async def test_a_driver_that_ends_early_is_tried_once_more_with_the_test_by_itself():
    assert (await grade_played(play(frames(b"8", end=False), frames(b"42")))).reward == 1.0
    again = await grade_played(play(frames(b"8", end=False), frames(end=False)))
    assert again.detail == {"why": "stopped the test runner", "passed": 1, "tests": 2}


async def test_a_driver_that_is_killed_twice_is_the_programs_doing_only_if_a_program_may_have_sent_that():
    cut = frames(end=False)
    assert (await grade_played(play(cut, cut, exit_code=137))).detail["why"] == "stopped the test runner"
    with pytest.raises(SandboxError) as caught:
        await grade_played(play(cut, cut, exit_code=137, sigkill=Evidence.SANDBOX_LOST_UNEXPLAINED))
    assert caught.value.cause is Cause.INFRASTRUCTURE


@pytest.mark.parametrize("cut", [30, 130, 148])
async def test_a_report_cut_anywhere_is_no_report(cut: int):
    said = frames(b"8" * 20, end=False)
    assert len(said) > 148
    assert (await grade_played(play(said[:cut], said[:cut]))).detail["why"] == "stopped the test runner"


@pytest.mark.parametrize("line", [b"[" * 100_000, b"{}", b"[]", b'{"exit": "x"}', b"\xff", b'{"end": "?"}'])
async def test_what_is_no_frame_is_no_report(line: bytes):
    said = frames(end=False) + line + b"\n"
    assert (await grade_played(play(said, said))).reward == 0.0


async def test_sandbox_without_python_is_infrastructure():
    with pytest.raises(GraderError, match=r"python3 does not run.*127, sh: python3: not found"):
        await grade_played(play(b"", exit_code=127))


async def test_first_process_that_cannot_start_is_infrastructure():
    broken = b'{"end": "broken", "error": "no room"}\n'
    with pytest.raises(GraderError, match="no room"):
        await grade_played(play(frames(end=False) + broken))
    assert (await grade_played(play(frames(b"8", end=False) + broken, frames(b"42")))).reward == 1.0
