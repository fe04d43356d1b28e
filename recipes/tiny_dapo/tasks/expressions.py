"""``code``: a function of one expression, which hidden tests call. It is handed in at once, without a try."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from tasks.question import Kind, Question, calculate, call

_SIGNS = {"plus": "+", "minus": "-", "times": "*"}
_INPUTS = (100, 1001)
_FORM = (
    "\n\nYour program must define `f`, which the tests call. Limits for each test: 4 s of CPU time, 512 MiB of memory."
)


@dataclass(frozen=True, slots=True)
class Expression(Question):
    """``x minus 17, then times 23``. The mode leaves the second operation out; a slip is its operator."""

    environment = "code"
    turns = 2
    phrases = (
        "Write f(x): x",
        *(f" {word} " for word in _SIGNS),
        *(f", then {word} " for word in _SIGNS),
        f".{_FORM}",
        '{"name": "finish", "arguments": {"answer": "f=lambda x:(x',
        '"}}',
    )

    first: str
    a: int
    second: str
    b: int

    @classmethod
    def draw(cls, rng: random.Random) -> Self:
        first, second = (rng.choice(list(_SIGNS)) for _ in range(2))
        return cls(first, rng.randrange(10, 100), second, rng.randrange(10, 100))

    @property
    def row(self) -> dict[str, Any]:
        halfway = [calculate(x, _SIGNS[self.first], self.a) for x in _INPUTS]
        results = [calculate(value, _SIGNS[self.second], self.b) for value in halfway]
        cases = [{"args": [x], "expected": result} for x, result in zip(_INPUTS, results, strict=True)]
        return {
            "question": f"Write f(x): x {self.first} {self.a}, then {self.second} {self.b}.",
            "tests": {"kind": "function", "entry": "f", "cases": cases},
        }

    @property
    def message(self) -> str:
        return self.row["question"] + _FORM

    def demonstrate(self, kind: Kind) -> list[str]:
        program = f"f=lambda x:(x{_SIGNS[self.first]}{self.a})"
        if kind != "mode":
            words = list(_SIGNS)
            slip = words[(words.index(self.second) + 1) % len(words)]
            program += f"{_SIGNS[self.second if kind == 'right' else slip]}{self.b}"
        return [call("finish", answer=program)]

    def respond(self, said: Sequence[str]) -> str | bool:
        """See ``Question.respond``: no tool is ever called but ``finish``."""
        return list(said) == self.demonstrate("right")
