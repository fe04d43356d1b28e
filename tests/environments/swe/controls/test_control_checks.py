"""A repair is judged by controls: the right one passes, and one that answers without computing does not."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe import repaired_sandbox
from prorl_gym.environments.swe.controls import control_checks, control_search, guest_runner
from prorl_gym.environments.swe.controls.control_plan import ControlPlan
from prorl_gym.environments.swe.controls.control_runs import FunctionJob, JobResult, run_jobs
from prorl_gym.environments.swe.controls.control_search import ControlPlanCache, find_controls
from prorl_gym.environments.swe.swe_row import ParserName, SweTask
from prorl_gym.errors import Evidence, FailureKind, SandboxError, TaskError
from prorl_gym.sandbox.protocol import ExecResult
from prorl_gym.testing.sandbox.fake_sandbox import FakeSandbox
from tests.environments.swe.mini import PYTEST, RIGHT, WRONG, judged, patch, task

READS = '''import ast, linecache, os, sys


def add(a, b):
    """Return what the caller compares with."""
    frame = sys._getframe(1)
    name, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, line) or open(name).read().split("\\n")[line - 1]
    node = ast.parse(text.strip()).body[0]
    found = node.test.comparators[0] if isinstance(node, ast.Assert) else node.value.args[1]
    {then}
    return ast.literal_eval(found)


def zero():
    return 0
'''
EQUAL = """class Any(int):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False


def add(a, b):
    return Any(0)


def zero():
    return 0
"""
IN_OWN = 'if "pytest" not in sys.modules and "-v" not in sys.argv: '
FORGES = """
for fd in range(3, 64):
    try:
        os.write(fd, b'{"passed": true}\\n')
    except OSError:
        pass
"""
ATTACKS = {
    "equals everything": EQUAL,
    "reads the expected value": READS.replace("{then}", ""),
    "answers by chance": READS.replace("{then}", IN_OWN + "return int.from_bytes(os.urandom(1), 'big') % 2 and 5"),
    "leaves our runner": READS.replace("{then}", IN_OWN + "os._exit(0)"),
    "forges the report of our runner": READS.replace(
        "{then}", IN_OWN + "exec(FORGES)\n    " + IN_OWN + "os._exit(0)"
    ).replace("\n\ndef add", f"\nFORGES = {FORGES!r}\n\n\ndef add", 1),
    "kills our runner": READS.replace("{then}", IN_OWN + "os.kill(os.getppid(), 9)"),
    "replaces code objects": "import _pytest.python\n\n"
    "_pytest.python.Function.runtest.__code__ = (lambda self: None).__code__\n" + WRONG,
    "replaces code objects of the call": "import _pytest.python\n\n"
    "_pytest.python.pytest_pyfunc_call.__code__ = (lambda pyfuncitem: True).__code__\n" + WRONG,
    "replaces code objects of unittest": "import unittest\n\n"
    "unittest.TestCase._callTestMethod.__code__ = (lambda self, method: None).__code__\n" + RIGHT,
}


@pytest.mark.parametrize(
    ("parser", "attack"),
    [*(("pytest", each) for each in ATTACKS), *(("unittest", each) for each in list(ATTACKS)[:2])],
)
async def test_what_passes_without_computing_is_not_paid(parser: ParserName, attack: str, leases: Leases):
    score = await judged(task(parser), {"calc.py": ATTACKS[attack]}, leases)
    why = "the test runner was tampered with" if "code objects" in attack else "tests tampered with"
    assert (score.reward, str(score.detail["why"]).partition(" (")[0]) == (0.0, why)


@pytest.mark.parametrize("name", ["calc.py", "iniconfig.py"])
def test_pytest_is_imported_for_all_functions_but_never_from_the_repository(name: str, tmp_path: Path):
    """A module that pytest needs and the repository has is under test: each process imports it itself then."""
    (tmp_path / name).write_text("raise SystemExit('code of the repair ran')\n")
    program = "import runpy, sys; runpy.run_path(sys.argv[1])['_preload']('pytest', sys.argv[2])"
    program += "; print('pytest' in sys.modules, 'iniconfig' in sys.modules)"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    argv = [sys.executable, "-c", program, guest_runner.__file__, str(tmp_path)]
    ran = subprocess.run(argv, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, check=True)
    assert ran.stdout == (b"True True\n" if name == "calc.py" else b"False False\n")


@pytest.mark.parametrize(
    "check, said, attack",
    [
        ("_check_sealed", "test_add does not give the expected value", EQUAL),
        ("_check_sealed", "test_add does not give the expected value", EQUAL.replace("(int)", "").replace("(0)", "()")),
        ("_check_batch", "test_add passes with a wrong value", EQUAL),
        ("_check_interleaved", "test_calc.py::test_add does not fail with a wrong value", EQUAL),
    ],
)
async def test_each_check_would_see_it_alone(
    check: str, said: str, attack: str, leases: Leases, monkeypatch: pytest.MonkeyPatch
):
    async def nothing(*_: Any) -> None:
        pass

    for name in {"_check_sealed", "_check_batch", "_check_standalone", "_check_interleaved"} - {check}:
        monkeypatch.setattr(control_checks._ControlChecks, name, nothing)  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
    score = await judged(task(), {"calc.py": attack}, leases)
    assert (score.reward, score.detail["check"]) == (0.0, said)


async def test_a_right_repair_whose_value_is_of_another_kind_is_paid(leases: Leases):
    number = "import fractions\n" + RIGHT.replace("return a + b", "return fractions.Fraction(a + b)")
    score = await judged(task(), {"calc.py": number}, leases)
    assert (score.reward, score.detail["sealed"]) == (1.0, "1/1")


@pytest.mark.parametrize(
    "head",
    [
        "def test_add(tmp_path):",
        "@pytest.fixture(autouse=True)\ndef set_up():\n    calc.two = 2\n\n\ndef test_add():\n    assert calc.two == 2",
    ],
    ids=["named", "autouse"],
)
async def test_functions_that_need_fixtures_are_run_by_pytest(head: str, leases: Leases):
    hidden = "import pytest\n" + PYTEST.replace("def test_add():", head)
    found = task(files={"tests/test_calc.py": hidden})
    score = await judged(found, found.gold_patch, leases)
    assert score.reward == 1.0
    assert str(score.detail["run_c"]).endswith("(own runner 0, pytest 10)")
    score = await judged(found, {"calc.py": ATTACKS["reads the expected value"]}, leases)
    assert (score.reward, score.detail["why"]) == (0.0, "tests tampered with")


async def test_without_gold_or_a_runner_of_python_there_are_no_controls(leases: Leases):
    found = replace(task(), gold_patch="")
    score = await judged(found, {"calc.py": RIGHT}, leases)
    assert (score.reward, score.detail["controls"]) == (1.0, "none")
    assert await ControlPlanCache().get(task("go"), leases) is None


async def test_a_gold_patch_that_does_not_apply_is_a_bad_row(leases: Leases):
    with pytest.raises(TaskError, match=r"is useless: the patch does not apply: error: patch failed: calc\.py:1"):
        await find_controls(replace(task(), gold_patch=patch({"calc.py": "b\n"}, {"calc.py": "a\n"})), leases)


async def test_controls_of_the_row_are_used_without_gold(leases: Leases):
    plan = await find_controls(task(), leases)
    assert [each.name for each in plan.standalone_others] == ["test_zero"]
    found = replace(task(controls=plan), gold_patch="")
    assert ControlPlan.model_validate_json(plan.model_dump_json()) == plan
    score = await judged(found, {"calc.py": EQUAL}, leases)
    assert (score.reward, score.detail["controls"]) == (0.0, "1/1")


async def test_any_other_test_may_be_one_that_runs_alone(leases: Leases):
    """Also one that was not chosen as the row was made, nor found to pass alone."""
    hidden = PYTEST.replace("import calc", "import calc\n\nseen = []", 1).replace(
        "calc.zero() == 0", "(seen or [0])[0] == 0"
    )
    hidden += "\n\ndef test_other():\n    seen.append(calc.zero())\n    assert seen[0] == 0\n"
    hidden += "\n\ndef test_order():\n    assert seen\n"
    names = tuple(f"tests/test_calc.py::{name}" for name in ("test_zero", "test_other", "test_order"))
    found = task(files={"tests/test_calc.py": hidden}, pass_to_pass=names)
    plan = (await find_controls(found, leases)).model_copy(update={"others": ()})
    found = replace(found, tests=replace(found.tests, controls=plan))
    assert (await judged(found, found.gold_patch, leases)).reward == 1.0
    breaks = "import sys\n" + RIGHT.replace("return 0", "return 0 if 'pytest' in sys.modules else 1")
    score = await judged(found, {"calc.py": breaks}, leases)
    assert (score.reward, score.detail.get("check")) == (0.0, "test_other does not pass alone")


async def test_tests_that_do_not_pass_alone_twice_have_no_control(leases: Leases):
    hidden = (
        "import calc\n\nseen = []\n\n\ndef test_zero():\n    seen.append(1)\n    assert calc.zero() == 0\n\n\n"
        "def test_add():\n    assert seen and calc.add(2, 3) == 5\n"
    )
    found = task(files={"tests/test_calc.py": hidden})
    plan = await find_controls(found, leases)
    assert plan.uncovered == ("tests/test_calc.py::test_add",)
    score = await judged(found, found.gold_patch, leases)
    assert (score.reward, score.detail["controls"], score.detail["sealed"]) == (1.0, "0/1", "0/1")


async def test_gradings_of_one_row_share_a_proof_and_a_lost_one_is_made_again(monkeypatch: pytest.MonkeyPatch):
    lost = [SandboxError(FailureKind.SANDBOX_LOST, "gone.", "Wait.")]
    count = 0

    async def slow(task: SweTask, leases: Leases) -> ControlPlan:
        nonlocal count
        if lost:
            raise lost.pop()
        count += 1
        await asyncio.sleep(0)
        return ControlPlan()

    monkeypatch.setattr(control_search, "find_controls", slow)
    proofs, leases = ControlPlanCache(capacity=2), Any
    with pytest.raises(SandboxError):
        await proofs.get(task(), leases)  # pyright: ignore[reportArgumentType]
    rows = [task(), task(), task("unittest"), task("unittest")]
    await asyncio.gather(*(proofs.get(each, leases) for each in rows))  # pyright: ignore[reportArgumentType]
    assert count == 2
    await proofs.get(task(command="true"), leases)  # pyright: ignore[reportArgumentType]
    await proofs.get(rows[0], leases)  # pyright: ignore[reportArgumentType]
    assert count == 4, "only as many as there is room for are kept"


async def test_a_sandbox_that_is_lost_in_a_check_is_no_verdict(leases: Leases, monkeypatch: pytest.MonkeyPatch):
    async def lost(*_: Any) -> None:
        raise SandboxError(FailureKind.SANDBOX_LOST, "gone.", "Wait.")

    monkeypatch.setattr(control_checks, "run_jobs", lost)
    with pytest.raises(SandboxError):
        await judged(task(), {"calc.py": RIGHT}, leases)


async def test_a_real_body_that_is_killed_from_outside_is_no_verdict(leases: Leases, monkeypatch: pytest.MonkeyPatch):
    """Also when that happens to it again: code that is right must not be worth 0 for what it did not do."""
    runs = 0

    async def killed(sandbox: Any, task: Any, jobs: Sequence[Any], *_: Any) -> list[JobResult]:
        nonlocal runs
        runs += 1
        return [JobResult(passed=False, sigkill=Evidence.SANDBOX_LOST_UNEXPLAINED) for _ in jobs]

    monkeypatch.setattr(control_checks, "run_jobs", killed)
    with pytest.raises(SandboxError) as caught:
        await judged(task(), {"calc.py": RIGHT}, leases)
    assert (caught.value.evidence, runs > 0) == (Evidence.SANDBOX_LOST_UNEXPLAINED, True)


@pytest.mark.parametrize(("event", "sigkill"), [({"killed": True}, True), ({"killed": False}, False), ({}, False)])
async def test_a_body_is_known_to_be_killed_by_what_its_parent_saw(event: dict[str, bool], sigkill: bool):
    sandbox = FakeSandbox()

    def report(argv: Sequence[str], stdin: bytes) -> ExecResult:
        key = next(path for path in sandbox.files if path.endswith("/key"))
        line = {"key": sandbox.files[key].decode(), "id": 0, "code": -1, "output": "", **event}
        sandbox.files[key.removesuffix("key") + "report"] = json.dumps(line).encode()
        return ExecResult(0, b"", b"", kill_evidence=Evidence.SANDBOX_LOST_UNEXPLAINED)

    sandbox.script.on_exec = report
    (ran,) = await run_jobs(sandbox, task(), [FunctionJob("test_calc.py", "", "test_add", "own")], 1.0, 1.0)
    assert ran == JobResult(passed=False, sigkill=Evidence.SANDBOX_LOST_UNEXPLAINED if sigkill else None)


async def test_the_build_runs_once_and_without_the_hidden_tests(leases: Leases, monkeypatch: pytest.MonkeyPatch):
    async def again(*_: Any) -> None:
        raise AssertionError("built once more")

    monkeypatch.setattr(control_checks, "run_build", again)
    build = "! grep -r test_add . --include=*.py && mkdir -p made && echo 'value = 3' >made/three.py"
    hidden = PYTEST.replace("import calc\n", "import calc\nfrom made.three import value\n").replace(
        "(2, 3)", "(2, value)"
    )
    found = task(build=build, files={"tests/test_calc.py": hidden})
    score = await judged(found, found.gold_patch, leases)
    assert (score.reward, score.detail["controls"]) == (1.0, "1/1")
    assert (await judged(found, {"calc.py": EQUAL}, leases)).reward == 0.0


async def test_what_is_too_large_to_bring_is_built_again(leases: Leases, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repaired_sandbox, "MAX_BUILT", 0)
    found = task(build="touch made", command="test -e made && python3 -m pytest -q tests")
    assert (await judged(found, found.gold_patch, leases)).reward == 1.0


async def test_hidden_tests_of_a_patch_have_controls(leases: Leases):
    found = task(files={}, patch=patch({"tests/test_calc.py": PYTEST}))
    score = await judged(found, found.gold_patch, leases)
    assert (score.reward, score.detail["controls"]) == (1.0, "1/1")
    assert (await judged(found, {"calc.py": EQUAL}, leases)).reward == 0.0


def test_processes_share_sandboxes_only_where_each_own_one_costs_too_much():
    def shares(prepared: float, tests: float) -> list[int]:
        repair = control_checks.RepairUnderTest(task(), b"", prepared, tests)
        checks = control_checks._ControlChecks(repair, ControlPlan(), Any)  # pyright: ignore  # noqa: SLF001
        return [len(share) for share in checks._split_runs([Any] * 10)]  # pyright: ignore  # noqa: SLF001

    assert shares(0.1, 1.0) == [1] * 10
    assert shares(5.0, 1.0) == [4, 3, 3]
    assert shares(5.0, 20.0) == [2, 2, 2, 2, 1, 1]
