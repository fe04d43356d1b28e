"""Small SWE tasks for the tests of the agent's side."""

import base64
import io
import tarfile
from collections.abc import Mapping
from typing import Any

from prorl_gym.environments.swe.swe_row import SweTask, parse_swe_row

TREE = {
    "src/answer.py": "def answer():\n    return 41\n",
    "src/gone.py": "old = True\n",
    "tests/test_answer.py": "def test():\n    pass\n",
    "data.bin": "\0\1\2",
    ".gitignore": "*.log\nbuild/\n",
    "kept.log": "packed though ignored\n",
    "docs/with blank.txt": "text\n",
}


def packed(tree: Mapping[str, str] = TREE) -> bytes:
    """The same bytes each time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in tree.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def row(**more: Any) -> dict[str, Any]:
    tests = {"command": "true", "parser": "unittest", "fail_to_pass": ["a"]}
    return {"id": "t1", "question": "answer() must be 42.", "tests": tests, **more}


def archived(tree: Mapping[str, str] = TREE, **more: Any) -> SweTask:
    return parse_swe_row(row(archive=base64.b64encode(packed(tree)).decode(), **more))
