r"""The rollouts of ``bench peers``: what the agent does, how many are made, which figures are wanted. Fixed beforehand.

``question``: one python call, then the answer in ``\boxed{}``. ``shell``: twenty commands on a small project, three of
them edits, then its hidden tests, which must pass.
"""

import base64
from dataclasses import dataclass
from typing import Any

from _report import SHORT

ENGINE_SECONDS = 0.02
CALLERS = 32
"""Of the closed loop that rates are compared at; the open loop has half of that rate."""
RUNS = 1 if SHORT else 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many rollouts of a work are made in one run."""

    warm_up: int
    closed: dict[int, int]
    open: int

    def scaled(self, factor: float) -> "Sizes":
        """Return fewer: for a slow system, or to try the bench."""
        return Sizes(
            max(2, round(self.warm_up * factor)),
            {callers: max(3, round(count * factor)) for callers, count in self.closed.items()},
            max(3, round(self.open * factor)),
        )


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    environment: str
    row: dict[str, Any]
    calls: int
    sizes: Sizes

    @property
    def engine_ms(self) -> float:
        return self.calls * ENGINE_SECONDS * 1000


QUESTION, ANSWER = "What is 12345 * 6789?", "83810205"
CODE = "print(12345 * 6789)"

FILES = {
    "stats/__init__.py": 'from stats.core import mean, median, spread\n\n__all__ = ["mean", "median", "spread"]\n',
    "stats/core.py": (
        '"""Figures of a sample."""\n\n\n'
        "def mean(values):\n    return sum(values) / (len(values) + 1)\n\n\n"
        "def median(values):\n    return values[len(values) // 2]\n\n\n"
        "def spread(values):\n    return max(values)\n"
    ),
    "README.md": "# stats\n\nMean, median and spread of a sample.\n",
}
TESTS = """import unittest

from stats import mean, median, spread


class Figures(unittest.TestCase):
    def test_mean(self):
        self.assertEqual(mean([1, 2, 3, 6]), 3)

    def test_median(self):
        self.assertEqual(median([9, 1, 5]), 5)

    def test_spread(self):
        self.assertEqual(spread([4, 1, 9]), 8)


if __name__ == "__main__":
    unittest.main()
"""
PREPARE = (
    "git init -q . && git add -A && git -c user.name=a -c user.email=a@example.org commit -qm start"
    " && mkdir logs && touch logs/empty"
)
COMMANDS = (
    "ls -la",
    "git log --oneline | head -n 5",
    "cat README.md",
    "find . -name '*.py' | sort",
    "cat stats/core.py",
    "grep -n 'def ' stats/core.py",
    "python3 -c 'from stats import mean; print(mean([1, 2, 3, 6]))'",
    "sed -i 's/(len(values) + 1)/len(values)/' stats/core.py",
    "git diff --stat",
    "python3 -c 'from stats import mean; print(mean([1, 2, 3, 6]))'",
    "sed -i 's/values\\[len(values)/sorted(values)[len(values)/' stats/core.py",
    "sed -n '8,10p' stats/core.py",
    "python3 -c 'from stats import median; print(median([9, 1, 5]))'",
    "sed -i 's/max(values)$/max(values) - min(values)/' stats/core.py",
    "git diff | cat",
    "python3 -c 'from stats import spread; print(spread([4, 1, 9]))'",
    "wc -l stats/*.py",
    "grep -rn 'median' . --include='*.py'",
    "git status --short",
    "python3 -m compileall -q stats",
)
"""What the agent runs; paths are relative to the project."""
TEST_COMMAND = "python3 /tests/hidden.py"


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


_STEPS = [
    {"text": "I compute it.", "tool": "python", "arguments": {"code": CODE}},
    {"text": "The product is \\boxed{{observation}}."},
]
_QUESTION_ROW = {"id": "product", "question": QUESTION, "answer": ANSWER, "gold_steps": _STEPS}


def _shell_row() -> dict[str, Any]:
    steps = [{"tool": "bash", "arguments": {"command": command}} for command in COMMANDS]
    steps.append({"tool": "finish", "arguments": {"answer": "The three functions are repaired."}})
    files = [{"kind": "file", "path": f"/app/{path}", "data": _base64(text)} for path, text in FILES.items()]
    return {
        "id": "stats",
        "question": "The functions mean, median and spread of the package `stats` are wrong. Repair them.",
        "gold_steps": steps,
        "setup": [*files, {"kind": "run", "command": PREPARE, "cwd": "/app"}],
        "verifier": {
            "files": [{"kind": "file", "path": "/tests/hidden.py", "data": _base64(TESTS)}],
            "command": f"PYTHONPATH=/app {TEST_COMMAND}",
            "reward": "exit",
        },
    }


SCALE = 0.1 if SHORT else 1.0
_ASKED = Sizes(48, {1: 60, CALLERS: 300, 128: 200}, 200).scaled(SCALE)
_WORKED = Sizes(8, {1: 8, CALLERS: 96}, 48).scaled(SCALE)
QUESTION_WORK = Work("one question", "math", _QUESTION_ROW, 2, _ASKED)
SHELL_WORK = Work("shell task", "taskdir", _shell_row(), len(COMMANDS) + 1, _WORKED)
WORKS = (QUESTION_WORK, SHELL_WORK)
MINI_WORK = {
    "engine_seconds": ENGINE_SECONDS,
    "files": FILES,
    "prepare": PREPARE,
    "commands": COMMANDS,
    "task": SHELL_WORK.row["question"],
    "tests": TESTS,
    "test_command": TEST_COMMAND,
}
"""The shell task for a peer that runs it by itself."""
