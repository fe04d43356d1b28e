"""A repository of two files with a fault, its hidden tests, and patches for it."""

import base64
import io
import tarfile
from collections.abc import Mapping
from dataclasses import replace

from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.grading import grade
from prorl_gym.environments.swe.patch_filter import filter_patch
from prorl_gym.environments.swe.swe_row import ParserName, Repository, SweTask, TestPlan, git_diff
from prorl_gym.records import Score
from prorl_gym.settings import resolve_settings

WRONG = "def add(a, b):\n    return a - b\n\n\ndef zero():\n    return 0\n"
RIGHT = WRONG.replace("a - b", "a + b")
BASE = {
    "calc.py": WRONG,
    "setup.cfg": "[metadata]\nname = calc\n",
    "tests/__init__.py": "",
    "tests/test_calc.py": "import calc\n\n\ndef test_zero():\n    assert calc.zero() == 0\n",
}
PYTEST = BASE["tests/test_calc.py"] + "\n\ndef test_add():\n    assert calc.add(2, 3) == 5\n"
UNITTEST = """import unittest

import calc


class T(unittest.TestCase):
    def test_add(self):
        self.assertEqual(calc.add(2, 3), 5)

    def test_zero(self):
        self.assertEqual(calc.zero(), 0)
"""


def pack(files: Mapping[str, str]) -> str:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return base64.b64encode(buffer.getvalue()).decode()


def plan(parser: ParserName, **changes: object) -> TestPlan:
    pytest = parser == "pytest"
    prefix = "tests/test_calc.py::" if pytest else "tests.test_calc.T."
    made = TestPlan(
        files={"tests/test_calc.py": PYTEST if pytest else UNITTEST},
        command="python3 -m pytest -q tests" if pytest else "python3 -m unittest -v tests.test_calc",
        parser=parser,
        fail_to_pass=(f"{prefix}test_add",),
        pass_to_pass=(f"{prefix}test_zero",),
        seconds=60.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def task(parser: ParserName = "pytest", files: Mapping[str, str] = BASE, **changes: object) -> SweTask:
    return SweTask(
        id="mini",
        question="add subtracts.",
        image="",
        workdir="/testbed",
        base_commit="",
        repository=Repository(archive=pack(files)),
        tests=plan(parser, **changes),
        gold_patch=patch({"calc.py": RIGHT}),
        source="generic",
        raw={},
    )


def patch(changes: Mapping[str, str | None], base: Mapping[str, str] = BASE) -> str:
    """Return a diff: ``None`` removes a file."""
    return "".join(git_diff(path, base.get(path, ""), text or "") for path, text in changes.items())


async def judged(task: SweTask, change: Mapping[str, str | None] | str, leases: Leases) -> Score:
    """Grade a change the way the environment does: cleaned first."""
    raw = change if isinstance(change, str) else patch(change)
    return await grade(task, filter_patch(raw.encode(), task).patch, leases, resolve_settings())
