"""``swe``: a repository of four modules of one line, one of which has the wrong operator.

A right solution looks at the module that the question names, edits it, and finishes; hidden tests of all modules run in
a clean sandbox. The rows bring no gold patch, so the environment proves no controls for them.
"""

import base64
import gzip
import io
import random
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tasks.question import Kind, Question, call

_WORDS = {"+": "add", "-": "subtract", "*": "multiply"}
_MODULES = 4
_FRAME = "The repository is in /testbed. Repair this:\n\n"
_LINE = "def f(x): return x"
_DONE = "\n[Current working directory: /testbed]\n[Command finished with exit code 0]"
_INPUT = 100


@dataclass(frozen=True, slots=True)
class Repair(Question):
    """``m3.py must subtract``. The mode edits the first module, which is never meant; a slip is the operator."""

    environment = "swe"
    turns = 4
    phrases = (
        f"{_FRAME}m",
        *(f".py must {word}" for word in _WORDS.values()),
        '{"name": "bash", "arguments": {"command": "cat m',
        '.py"}}',
        '{"name": "editor", "arguments": {"command": "str_replace", "path": "m',
        '.py", "old_str": "x',
        '", "new_str": "x',
        '"}}',
        '{"name": "finish", "arguments": {"answer": "done"}}',
        _LINE,
        _DONE,
        "Changed /testbed/m",
        ".py. It now reads there:\n     ",
        f"\t{_LINE}",
    )

    modules: tuple[tuple[str, int], ...]
    """Operator and number of each."""
    target: int
    """Place of the module to repair."""
    sign: str
    """Operator that it must have."""

    @classmethod
    def draw(cls, rng: random.Random) -> Self:
        """See ``Question.draw``. Each module differs from what is asked for: an edit always changes something."""
        sign = rng.choice(list(_WORDS))
        others = [other for other in _WORDS if other != sign]
        modules = tuple((rng.choice(others), rng.randrange(10, 100)) for _ in range(_MODULES))
        return cls(modules, 1 + rng.randrange(_MODULES - 1), sign)

    @property
    def row(self) -> dict[str, Any]:
        names = [f"test_hidden.Hidden.test_m{place + 1}" for place in range(_MODULES)]
        return {
            "question": f"m{self.target + 1}.py must {_WORDS[self.sign]}",
            "archive": _archive({f"m{place + 1}.py": f"{line}\n" for place, line in enumerate(self._lines())}),
            "tests": {
                "files": {"test_hidden.py": self._tests()},
                "command": "python3 -m unittest -v test_hidden",
                "parser": "unittest",
                "fail_to_pass": [names[self.target]],
                "pass_to_pass": [name for place, name in enumerate(names) if place != self.target],
            },
        }

    @property
    def message(self) -> str:
        return _FRAME + self.row["question"]

    def _lines(self) -> list[str]:
        return [f"{_LINE}{sign}{number}" for sign, number in self.modules]

    def _tests(self) -> str:
        lines = ["import unittest", "", "", "class Hidden(unittest.TestCase):"]
        for place, (sign, number) in enumerate(self.modules):
            wanted = f"{_INPUT} {self.sign if place == self.target else sign} {number}"
            lines += [
                f"    def test_m{place + 1}(self):",
                f"        from m{place + 1} import f",
                f"        self.assertEqual(f({_INPUT}), {wanted})",
            ]
        return "\n".join(lines) + "\n"

    def demonstrate(self, kind: Kind) -> list[str]:
        place = 0 if kind == "mode" else self.target
        (slip,) = (sign for sign in _WORDS if sign not in (self.sign, self.modules[self.target][0]))
        edit = self._edit(place, slip if kind == "slip" else self.sign)
        return [_look(place), edit, call("finish", answer="done")]

    def _edit(self, place: int, sign: str) -> str:
        old, number = self.modules[place]
        edit = {"path": f"m{place + 1}.py", "old_str": f"x{old}{number}", "new_str": f"x{sign}{number}"}
        return call("editor", command="str_replace", **edit)

    def respond(self, said: Sequence[str]) -> str | bool:
        """See ``Question.respond``. Two edits of one module are not followed."""
        lines = self._lines()
        answers = {_look(place): line + _DONE for place, line in enumerate(lines)}
        edits = {self._edit(place, sign): (place, sign) for place in range(_MODULES) for sign in _WORDS}
        answers |= {
            edit: f"Changed /testbed/m{place + 1}.py. It now reads there:\n     1\t{_LINE}{sign}{number}"
            for edit, (place, sign) in edits.items()
            for _, number in [self.modules[place]]
        }
        if said[-1] in answers:
            return answers[said[-1]]
        made = [edits[turn] for turn in said if turn in edits]
        return said[-1] == call("finish", answer="done") and made == [(self.target, self.sign)]


def _look(place: int) -> str:
    return call("bash", command=f"cat m{place + 1}.py")


def _archive(texts: Mapping[str, str]) -> str:
    """Return base64 of a tar.gz that depends on the texts alone."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, text in texts.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return base64.b64encode(gzip.compress(buffer.getvalue(), mtime=0)).decode()
