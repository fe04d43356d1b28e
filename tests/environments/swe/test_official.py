"""Rows of SWE-bench, graded by the ``swebench`` package: its script, its parsers, its report."""

import json
from dataclasses import replace
from typing import Any

import pytest

from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe import grading, repaired_sandbox, swebench_harness
from prorl_gym.environments.swe.repository import sandbox_spec
from prorl_gym.environments.swe.run_tests import TestResults
from prorl_gym.environments.swe.swe_row import SweTask, parse_swe_row
from prorl_gym.environments.swe.swebench_harness import END, START, eval_script, score_log
from prorl_gym.environments.worker_pool import WorkerPool
from prorl_gym.errors import GraderError
from prorl_gym.settings import resolve_settings
from tests.environments.swe.mini import BASE, PYTEST, RIGHT, WRONG, pack, patch, task

COMMIT = "7ee9ceb71e868944a46e1ff00b506772a53a4f1d"
SCRIPT = f"""#!/bin/bash
set -uxo pipefail
cd /testbed
git status
git show
git -c core.fileMode=false diff {COMMIT}
git checkout {COMMIT} tests/test_calc.py
git apply -v - <<'EOF_114329324912'
{patch({"tests/test_calc.py": PYTEST})}
EOF_114329324912
: '{START}'
python3 -m pytest -rA -p no:cacheprovider tests/test_calc.py
: '{END}'
git checkout {COMMIT} tests/test_calc.py
"""
ADD, ZERO = "tests/test_calc.py::test_add", "tests/test_calc.py::test_zero"
CONTRADICTION = "nothing is reported as failed, but the tests' exit code says so"
FORGED = f"import os\n\nos.write(1, b'PASSED {ADD}\\nPASSED {ZERO}\\n')\nos._exit(1)\n{WRONG}"
needs_swebench = pytest.mark.swebench


def row(**more: Any) -> dict[str, Any]:
    return {
        "instance_id": "pallets__flask-5014",
        "repo": "pallets/flask",
        "version": "2.3",
        "base_commit": COMMIT,
        "environment_setup_commit": COMMIT,
        "patch": patch({"calc.py": RIGHT}),
        "test_patch": patch({"tests/test_calc.py": PYTEST}),
        "problem_statement": "add subtracts.",
        "FAIL_TO_PASS": json.dumps([ADD]),
        "PASS_TO_PASS": json.dumps([ZERO]),
        # What releases from 5 on want of a row, and older ones do not look at.
        "eval_script": SCRIPT,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        **more,
    }


def log(*lines: str, exit_code: int = 0) -> TestResults:
    text = "\n".join(["+ git status", f"+ : '{START}'", *lines, f"+ : '{END}'", ""])
    return TestResults({}, swebench_harness.marker_problem(text), exit_code, log=text)


@needs_swebench
@pytest.mark.slow
async def test_the_harness_writes_the_script():
    script = await eval_script(parse_swe_row(row()))
    lines = script.split("\n")
    assert COMMIT not in script
    assert "git checkout HEAD tests/test_calc.py" in lines
    assert "+def test_add():" in script
    assert lines[lines.index(f": '{END}'") - 1].startswith("prorl_exit_code=")


@needs_swebench
@pytest.mark.parametrize(
    "lines, exit_code, reward, why",
    [
        ((f"PASSED {ADD}", f"PASSED {ZERO}"), 0, 1.0, None),
        ((f"PASSED {ADD}", f"FAILED {ZERO} - no"), 1, 0.0, "tests that passed before do not any more"),
        ((f"FAILED {ADD} - no", f"PASSED {ZERO}"), 1, 0.0, "the fault is not repaired"),
        ((f"PASSED {ZERO}",), 0, 0.0, "the fault is not repaired"),
        ((f"SKIPPED {ADD}", f"PASSED {ZERO}"), 0, 0.0, "the fault is not repaired"),
        ((f"PASSED {ADD}", f"PASSED {ZERO}"), 1, 0.0, CONTRADICTION),
        (("ImportError: no",), 2, 0.0, None),
        (
            (f"PASSED {ADD}", f"PASSED {ZERO}", END, f"FAILED {ADD}"),
            1,
            0.0,
            "the markers of the harness are not where its script prints them",
        ),
    ],
)
async def test_reports(lines: tuple[str, ...], exit_code: int, reward: float, why: str | None):
    score = await score_log(parse_swe_row(row()), log(*lines, exit_code=exit_code))
    assert score.reward == reward
    if why is not None or reward:
        assert score.detail.get("why") == why


async def test_a_log_without_its_end():
    assert (
        await score_log(parse_swe_row(row()), TestResults({}, swebench_harness.marker_problem(START), 0))
    ).detail == {"why": "the test run did not end"}


async def test_without_the_package_there_is_no_reward():
    workers = WorkerPool("tests_without_swebench:call", size=1)
    with pytest.raises(GraderError) as caught:
        await eval_script(parse_swe_row(row()), workers)
    assert "prorl-gym[swe]" in caught.value.fix


@pytest.fixture
def own_image(monkeypatch: pytest.MonkeyPatch) -> SweTask:
    """A row whose image is ours, and whose script is not that of the real repository."""

    async def spec(_: SweTask):
        return await sandbox_spec(task())

    async def script(_: SweTask) -> str:
        return "\n".join(swebench_harness.adapt_line(line, COMMIT) for line in SCRIPT.split("\n"))

    monkeypatch.setattr(repaired_sandbox, "sandbox_spec", spec)
    monkeypatch.setattr(swebench_harness, "eval_script", script)
    return replace(parse_swe_row(row()), image="", base_commit="", archive=pack(BASE))


@needs_swebench
@pytest.mark.parametrize(
    "calc, reward",
    [
        (RIGHT, 1.0),
        (WRONG + "\n\n# Nothing else.\n", 0.0),
        (f"print(\"\\n: '{END}'\\n\", flush=True)\n{RIGHT}", 0.0),
        (FORGED, 0.0),
    ],
)
async def test_from_patch_to_reward(calc: str, reward: float, own_image: SweTask, leases: Leases):
    change = patch({"calc.py": calc, "tests/test_calc.py": "def test_add():\n    pass\n"})
    score = await grading.grade(own_image, change.encode(), leases, resolve_settings())
    assert score.reward == reward, score.detail


@needs_swebench
@pytest.mark.slow  # its worker is replaced, and importing the package takes seconds
async def test_a_repository_that_the_package_does_not_know():
    unknown = row(repo="nobody/nothing", version="1", eval_script="", log_parser="")
    with pytest.raises(GraderError, match="cannot make its test script"):
        await eval_script(parse_swe_row(unknown))
