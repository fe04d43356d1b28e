"""Grading: what solves, what does not, and what hostile code under test cannot turn into a reward."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe import run_tests
from prorl_gym.environments.swe.grading import grade, grade_timed, run_hidden_tests
from prorl_gym.environments.swe.patch_filter import paths_in_diff
from prorl_gym.environments.swe.repaired_sandbox import apply_patch
from prorl_gym.environments.swe.swe_row import ParserName, parse_swe_row
from prorl_gym.errors import FailureKind, GraderError, TaskError
from prorl_gym.sandbox.protocol import ExecResult, SandboxSpec
from prorl_gym.settings import resolve_settings
from prorl_gym.testing.sandbox.fake_sandbox import FakeSandbox
from tests.environments.swe.mini import BASE, PYTEST, RIGHT, UNITTEST, WRONG, judged, pack, patch, task

LINES = "PASSED tests/test_calc.py::test_add\\nPASSED tests/test_calc.py::test_zero\\n=== 2 passed in 0.01s ===\\n"
VERBOSE = "test_add (tests.test_calc.T.test_add) ... ok\\ntest_zero (tests.test_calc.T.test_zero) ... ok\\n"
TOTAL = "Ran 2 tests in 0.001s\\n\\nOK\\n"
CHEAT_PLUGIN = """import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""

FORGERY = """import json, os

def forge(name):
    event = {"test": "tests/test_calc.py::" + name, "when": "call", "outcome": "passed"}
    for number in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{number}").endswith("/report"):
                os.write(number, (json.dumps(event) + "\\n").encode())
        except OSError:
            pass

"""

OUR_PLUGIN = """import json, os

FILE = open(os.environ.pop("PRORL_REPORT"), "a", buffering=1)


def say(**event):
    print(json.dumps(event), file=FILE)


def pytest_configure(config):
    say(begin=True, distributed=False)


def pytest_collection_finish(session):
    say(collected=len(session.items))
    for item in session.items:
        say(test=item.nodeid, when="call", outcome="passed", xfail=False)


def pytest_sessionfinish():
    say(end=0)
    os._exit(0)
"""

CHEAT_CALL = "def pytest_pyfunc_call(pyfuncitem):\n    return True\n"

PYTEST_ATTACKS = {
    "prints results": {"calc.py": f'print("{LINES}", flush=True)\n{WRONG}'},
    "leaves at import": {"calc.py": f"import os\n\nos.write(1, b'{LINES}')\nos._exit(0)\n{WRONG}"},
    "leaves in the test": {"calc.py": f"import os\n{WRONG}".replace("return a - b", "os._exit(0)")},
    "leaves at the end": {"calc.py": f"import atexit, os\n\natexit.register(os._exit, 0)\n{WRONG}"},
    "exits": {"calc.py": WRONG.replace("return a - b", "raise SystemExit(0)")},
    "skips": {"calc.py": WRONG.replace("return a - b", "import unittest\n    raise unittest.SkipTest('no')")},
    "expects to fail": {"calc.py": WRONG.replace("return a - b", "import pytest\n    pytest.xfail('no')")},
    "kills the runner's parent": {"calc.py": f"import os\n\nos.kill(os.getppid(), 9)\n{WRONG}"},
    "replaces pytest's parts": {"calc.py": f"from _pytest.python import Function\n\nFunction.runtest = print\n{WRONG}"},
    "replaces the judgement": {
        "calc.py": f"from _pytest.reports import TestReport\n\n"
        f"made = TestReport.from_item_and_call\n\n\ndef nice(item, call):\n    call.excinfo = None\n"
        f"    return made(item, call)\n\n\nTestReport.from_item_and_call = nice\n{WRONG}"
    },
    "brings a plug-in": {
        "setup.cfg": "[metadata]\nname = calc\n[tool:pytest]\naddopts = -p cheat\n",
        "cheat.py": CHEAT_PLUGIN,
        "calc.py": WRONG + "\n\n# Nothing else.\n",
    },
    "forges our events": {"calc.py": f"{FORGERY}forge('test_add')\n{WRONG}"},
    "forges our events and spoils the run": {
        "calc.py": f"{FORGERY}forge('test_add')\nforge('test_zero')\nraise ImportError\n{WRONG}"
    },
}

SEEN = {
    "leaves at import": "the test run did not end",
    "replaces pytest's parts": "the test runner was tampered with (_pytest.python:Function.runtest)",
    "forges our events": "the fault is not repaired",
    "forges our events and spoils the run": "2 more tests are reported than were collected",
    "expects to fail": "the fault is not repaired",
}
"""Of some: what the score says about them."""

UNITTEST_ATTACKS = {
    "prints results": {"calc.py": f'print("{VERBOSE}{TOTAL}", flush=True)\n{WRONG}'},
    "adds results": {"calc.py": f'print("{VERBOSE}".replace("add", "more"), flush=True)\n{WRONG}'},
    "leaves with results": {"calc.py": f"import os\n\nos.write(1, b'{VERBOSE}')\nos._exit(0)\n{WRONG}"},
    "fails after a whole log": {"calc.py": f"import os\n\nos.write(1, b'{VERBOSE}{TOTAL}')\nos._exit(1)\n{WRONG}"},
}


@pytest.mark.parametrize("parser", ["pytest", "unittest"])
async def test_gold_solves(parser, leases: Leases):
    found = task(parser)
    score = await judged(found, found.gold_patch, leases)
    assert score.reward == 1.0
    run_c = str(score.detail.pop("run_c"))
    assert score.detail == {"fail_to_pass": "1/1", "pass_to_pass": "1/1", "sealed": "1/1", "controls": "1/1"}
    real, control = map(int, re.match(r"(\d+) real \+ (\d+) control \(own runner 10, pytest 0\)", run_c).groups())
    assert real + control == 10 and real and control


async def test_a_change_that_repairs_nothing_names_the_failed_test(leases: Leases):
    score = await judged(task(), {"calc.py": WRONG + "\n\n# Nothing else.\n"}, leases)
    assert score.reward == 0.0
    assert score.detail == {
        "why": "the fault is not repaired",
        "fail_to_pass": "0/1",
        "pass_to_pass": "1/1",
        "failed": "tests/test_calc.py::test_add",
        "missing": "",
    }


async def test_a_test_that_ends_otherwise_the_next_time_is_named(leases: Leases):
    body = (
        "    import os\n    seen = os.path.exists('/tmp/seen')\n    open('/tmp/seen', 'w').close()\n    assert seen\n"
    )
    found = task(files={"tests/test_calc.py": PYTEST.replace("    assert calc.zero() == 0\n", body)})
    score = await judged(found, found.gold_patch, leases)
    assert (score.reward, score.detail["why"]) == (0.0, "tests that passed before do not any more")
    assert score.detail["flaky"] == "tests/test_calc.py::test_zero"


@pytest.mark.parametrize("attack", PYTEST_ATTACKS)
async def test_no_attack_on_pytest_is_rewarded(attack, leases: Leases):
    score = await judged(task(), PYTEST_ATTACKS[attack], leases)
    assert score.reward == 0.0
    assert "pytest did not report" not in score.detail["why"], "it never got to the attack"
    assert score.detail["why"] == SEEN.get(attack, score.detail["why"])


@pytest.mark.parametrize("attack", UNITTEST_ATTACKS)
async def test_no_attack_on_unittest_is_rewarded(attack, leases: Leases):
    score = await judged(task("unittest"), UNITTEST_ATTACKS[attack], leases)
    assert score.reward == 0.0


@pytest.mark.parametrize("place", ["", "src/"])
async def test_no_module_of_the_repository_is_taken_for_our_plug_in(place: str, leases: Leases):
    found = task(command=f'PYTHONPATH="{place}:$PYTHONPATH" python3 -m pytest -q tests')
    own = patch({f"{place}prorl_report.py": OUR_PLUGIN})  # not cleaned before: its name is never ours
    score = await grade(found, own.encode(), leases, resolve_settings())
    assert (score.reward, score.detail["why"]) == (0.0, "the fault is not repaired")


async def test_the_build_does_not_see_our_plug_in(leases: Leases):
    found = task(build="test -z \"$PRORL_REPORT\" && ! env | grep prorl_ && ! find /tmp -name 'prorl_*' | grep .")
    assert (await judged(found, found.gold_patch, leases)).reward == 1.0


@pytest.mark.parametrize("gold", [False, True])
async def test_hooks_of_a_patch_are_seen_however_they_were_loaded(gold: bool, leases: Leases):
    tree = {**BASE, "cheat.py": "# Nothing yet.\n"}
    found = task(tree=tree, command="python3 -m pytest -q -p cheat tests")
    own = patch({"cheat.py": CHEAT_CALL}, tree)
    found = replace(found, gold_patch=own) if gold else found
    score = await judged(found, own, leases)
    expected = None if gold else "the test runner was tampered with (hooks in cheat.py)"
    assert (score.reward, score.detail.get("why")) == (float(gold), expected)


async def test_hooks_that_the_repository_has_are_its_own(leases: Leases):
    found = task(tree={**BASE, "plug.py": CHEAT_CALL}, command="python3 -m pytest -q -p plug tests")
    assert (await judged(found, {"calc.py": RIGHT}, leases)).reward == 1.0


async def test_what_a_build_does_to_hidden_tests_is_undone(leases: Leases):
    """The build runs code of the patch."""
    lies = "open('tests/test_calc.py', 'w').write('def test_add(): pass\\n\\n\\ndef test_zero(): pass\\n')\n"
    found = task(build="python3 calc.py")
    score = await judged(found, {"calc.py": f"{WRONG}\n\n{lies}"}, leases)
    assert (score.reward, score.detail["why"]) == (0.0, "the fault is not repaired")
    assert (await judged(found, found.gold_patch, leases)).reward == 1.0


async def test_the_build_decides_whether_tests_run(leases: Leases):
    found = task(build="python3 -c 'import calc; assert calc.add(1, 1) == 2' && touch built", command="cat built && "
                 "python3 -m pytest -q tests")  # fmt: skip
    assert (await judged(found, found.gold_patch, leases)).reward == 1.0
    score = await judged(found, {"calc.py": WRONG + "\n"}, leases)
    assert (score.reward, score.detail["why"]) == (0.0, "the build failed with exit code 1")


async def test_time_is_for_build_and_tests_together(leases: Leases):
    command = "if [ -e slow ]; then sleep 60; fi; python3 -m unittest -v tests.test_calc"
    found = task("unittest", build="sleep 2", command=command, seconds=6.0)
    slow = patch({"calc.py": RIGHT, "slow": "x\n"})
    graded = await grade_timed(found, slow.encode(), leases, resolve_settings())
    assert (graded.score.reward, graded.score.detail["why"]) == (0.0, "the tests took too long")
    assert 5 <= graded.tests_seconds <= 8


@pytest.mark.parametrize(
    ("parser", "command", "said"),
    [
        ("pytest", "python9 -m pytest -q tests", "python9: command not found"),
        ("pytest", "python3 -m pytests -q tests", "No module named pytests"),
        ("go", "no-go test -v ./...", "no-go: command not found"),
    ],
)
@pytest.mark.parametrize("has_gold", [True, False])
async def test_a_grader_that_cannot_run_is_a_bad_row(
    parser: ParserName, command: str, said: str, has_gold: bool, leases: Leases
):
    found = task(parser, command=command)
    found = found if has_gold else replace(found, gold_patch="")
    with pytest.raises(TaskError, match=f"mini: its tests do not run, not even on its .*{said}") as caught:
        await judged(found, {"calc.py": RIGHT}, leases)
    assert caught.value.kind is FailureKind.BAD_ROW


async def test_a_grader_that_is_always_late_gives_no_reward(leases: Leases):
    with pytest.raises(GraderError, match="the tests took too long"):
        await judged(task(command="sleep 60", seconds=0.5), {"calc.py": RIGHT}, leases)


async def test_a_starting_state_that_cannot_be_built_is_no_bad_row(leases: Leases):
    found = replace(task("unittest", build="grep -q 'a + b' calc.py"), gold_patch="")
    score = await judged(found, {"calc.py": WRONG + "\n"}, leases)
    assert (score.reward, score.detail["why"]) == (0.0, "the build failed with exit code 1")


async def test_a_log_that_is_too_long_is_not_read(leases: Leases, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_tests, "MAX_LOG", 10_000)
    flood = f"print('x' * 20_000)\n{RIGHT}"
    score = await judged(task("unittest"), {"calc.py": flood}, leases)
    assert (score.reward, score.detail["why"]) == (0.0, "the test log is longer than 10000 bytes")


async def test_hidden_tests_as_a_patch(leases: Leases):
    hidden = {"tests/test_calc.py": PYTEST, "tests/test_more.py": "def test_more():\n    pass\n"}
    comments = {"tests/data.sql": "-- a/calc.py\n1\n"}  # removed, it reads like the head of a file
    base = {**BASE, **comments}
    hidden = patch({**hidden, "tests/data.sql": "1\n"}, base)
    more = "tests/test_more.py::test_more"
    found = task(tree={**base, "old.py": "old\n"}, files={}, patch=hidden, removed=("old.py",),
                 command="test ! -e old.py && python3 -m pytest -q tests",
                 pass_to_pass=("tests/test_calc.py::test_zero", more))  # fmt: skip
    own = patch({"calc.py": RIGHT, "tests/test_more.py": "in the way\n", "tests/test_calc.py": "in the way\n"})
    # Not cleaned before: the places of hidden tests are protected here as well.
    score = await grade(found, own.encode(), leases, resolve_settings())
    assert (score.reward, score.detail.get("why")) == (1.0, None)


async def test_a_test_patch_that_fits_nowhere_is_a_bad_row(leases: Leases):
    misfit = patch({"tests/test_calc.py": PYTEST}, {"tests/test_calc.py": "other\n"})
    found = task(files={}, patch=misfit)
    with pytest.raises(TaskError) as caught:
        await judged(found, found.gold_patch, leases)
    assert caught.value.kind is FailureKind.BAD_ROW
    assert "test patch does not apply" in str(caught.value)


async def test_a_patch_that_is_in_the_way_of_the_tests_is_not_the_row_s_fault(leases: Leases):
    found = task(
        command="python3 -m pytest -q hidden",
        files={"hidden/here/test_calc.py": PYTEST},
        fail_to_pass=("hidden/here/test_calc.py::test_add",),
        pass_to_pass=(),
    )
    own = patch({"calc.py": RIGHT, "hidden/here": "a file where a directory has to be\n"})
    score = await grade(found, own.encode(), leases, resolve_settings())
    assert score.reward == 1.0, score.detail


async def test_patches_that_do_not_apply(leases: Leases):
    strange = patch({"calc.py": "b\n"}, {"calc.py": "a\n"})
    score = await judged(task(), strange, leases)
    assert score.reward == 0.0
    assert str(score.detail["why"]).startswith("the patch does not apply: error:")


async def test_a_patch_of_other_white_space_applies_and_is_reported(leases: Leases):
    other = patch({"calc.py": RIGHT}).replace(" \n \n", " \n  \t\n")
    assert other != patch({"calc.py": RIGHT})
    score = await grade(task(), other.encode(), leases, resolve_settings())
    assert (score.reward, score.detail["applied_with"]) == (1.0, "git apply -C1 --ignore-whitespace")


async def test_an_empty_patch_starts_no_sandbox():
    score = await grade(task(), b"\n", None, resolve_settings())  # type: ignore[arg-type]
    assert (score.reward, score.detail) == (0.0, {"why": "empty patch"})


async def test_statuses_without_a_verdict(leases: Leases):
    found = await run_hidden_tests(task("unittest"), b"", leases, 30.0)
    assert found.statuses == {"tests.test_calc.T.test_add": "failed", "tests.test_calc.T.test_zero": "passed"}
    assert (found.problem, found.exit_code) == ("", 1)
    assert UNITTEST not in found.log


def test_paths_of_a_diff():
    assert paths_in_diff(patch({"a/b.py": "x\n", "calc.py": None})) == ("a/b.py", "calc.py")
    odd = "--- a/../x\n+++ b//etc/x\ndiff --git a/p q.py b/r.py\nrename from p q.py\nrename to r.py\n"
    assert paths_in_diff(odd) == ("p q.py", "r.py")
    assert paths_in_diff("--- i/x\r\n+++ w/x\r\n@@ -1 +1 @@\r\n--- a/y\r\n+++ b/y\r\n--- a/z\r\n") == ("x", "z")


R2E = {
    **{path: text for path, text in BASE.items() if not path.startswith("tests/")},
    "run_tests.sh": "python3 -m pytest -rA r2e_tests\n",
    "r2e_tests/test_1.py": "def test_add():\n    pass\n",
}
R2E_TESTS = ["class TestX:\n    def test_add(self):\n        import calc\n        assert calc.add(2, 3) == 5\n",
             "def test_known():\n    assert 0\n"]  # fmt: skip


@pytest.mark.parametrize(
    "calc, reward", [(RIGHT, 1.0), (WRONG + "\n# No.\n", 0.0), (f"import os\n\nos._exit(0)\n{WRONG}", 0.0)]
)
async def test_a_row_of_r2e_gym(calc: str, reward: float, leases: Leases):
    row = {
        "docker_image": "namanjain12/calc_final:0a1b2c3d",
        "repo_name": "calc",
        "commit_hash": "0a1b2c3d0a1b2c3d",
        "problem_statement": "add subtracts.",
        "parsed_commit_content": json.dumps({"file_diffs": []}),
        "execution_result_content": json.dumps(
            {"test_file_names": ["test_1.py", "test_2.py"], "test_file_codes": R2E_TESTS}
        ),
        "expected_output_json": json.dumps({"TestX.test_add": "PASSED", "\x1b[1mtest_known\x1b[0m": "FAILED"}),
    }
    found = replace(parse_swe_row(row), image="", archive=pack(R2E))
    assert (await judged(found, patch({"calc.py": calc}), leases)).reward == reward


async def test_an_image_without_bash_is_a_bad_image():
    class Sandbox(FakeSandbox):
        async def exec(self, argv: Sequence[str], **_: Any) -> ExecResult:
            return ExecResult(127, b"", b"")

    with pytest.raises(TaskError) as caught:
        await apply_patch(Sandbox(SandboxSpec()), task(), b"a patch")
    assert caught.value.kind is FailureKind.IMAGE_BROKEN
