"""Small repositories with a fault, hidden tests, and patches: one for grading, one for the agent's side."""

import base64
import io
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prorl_gym.data.sdist.source_tree import SourceFile, pack_tree
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.grading import grade
from prorl_gym.environments.swe.patch_filter import filter_patch
from prorl_gym.environments.swe.swe_row import ParserName, SweTask, TestPlan, git_diff, parse_swe_row
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


def packed(files: Mapping[str, str]) -> bytes:
    return pack_tree({path: SourceFile(text.encode()) for path, text in files.items()})


def pack(files: Mapping[str, str]) -> str:
    return base64.b64encode(packed(files)).decode()


def unpack(archive: str) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]


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


def task(parser: ParserName = "pytest", tree: Mapping[str, str] = BASE, **changes: object) -> SweTask:
    return SweTask(
        id="mini",
        question="add subtracts.",
        image="",
        workdir="/testbed",
        base_commit="",
        archive=pack(tree),
        tests=plan(parser, **changes),
        gold_patch=patch({"calc.py": RIGHT}),
        source="generic",
        raw={},
    )


def patch(changes: Mapping[str, str | None], base: Mapping[str, str] = BASE) -> str:
    """Return a diff: ``None`` removes a file."""
    return "".join(git_diff(path, base.get(path, ""), text or "") for path, text in changes.items())


TREE = {
    "src/answer.py": "def answer():\n    return 41\n",
    "src/gone.py": "old = True\n",
    "tests/test_answer.py": "def test():\n    pass\n",
    "data.bin": "\0\1\2",
    ".gitignore": "*.log\nbuild/\n",
    "kept.log": "packed though ignored\n",
    "docs/with blank.txt": "text\n",
}
"""What the agent finds of the task below."""


def row(**more: Any) -> dict[str, Any]:
    tests = {"command": "true", "parser": "unittest", "fail_to_pass": ["a"]}
    return {"id": "t1", "question": "answer() must be 42.", "tests": tests, **more}


def archived() -> SweTask:
    return parse_swe_row(row(archive=pack(TREE)))


async def judged(task: SweTask, change: Mapping[str, str | None] | str, leases: Leases) -> Score:
    """Grade a change the way the environment does: cleaned first."""
    raw = change if isinstance(change, str) else patch(change)
    return await grade(task, filter_patch(raw.encode(), task).patch, leases, resolve_settings())
