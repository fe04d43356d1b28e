"""``math``: sums of three numbers. A right solution takes two calls of the python tool, one for each operation."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from tasks.question import BOX, CALL, CALL_END, Kind, Question, boxed, calculate, call, python_answer


@dataclass(frozen=True, slots=True)
class Sum(Question):
    """``a op b op c?`` with numbers of two digits. The mode stops after one call; a slip is the second operator."""

    environment = "math"
    turns = 4
    phrases = (CALL, CALL_END, BOX)

    a: int
    first: str
    b: int
    second: str
    c: int

    @classmethod
    def draw(cls, rng: random.Random) -> Self:
        a, b, c = (rng.randrange(10, 100) for _ in range(3))
        return cls(a, rng.choice("+-"), b, rng.choice("+-"), c)

    @property
    def halfway(self) -> int:
        """Result of the first operation."""
        return calculate(self.a, self.first, self.b)

    @property
    def answer(self) -> int:
        """The right answer."""
        return calculate(self.halfway, self.second, self.c)

    @property
    def row(self) -> dict[str, Any]:
        question = f"{self.a}{self.first}{self.b}{self.second}{self.c}?"
        return {"question": question, "answer": str(self.answer)}

    def demonstrate(self, kind: Kind) -> list[str]:
        said = [call("python", code=f"{self.a}{self.first}{self.b}")]
        if kind == "mode":
            return [*said, boxed(self.halfway)]
        second = self.second if kind == "right" else "+-".replace(self.second, "")
        said.append(call("python", code=f"{self.halfway}{second}{self.c}"))
        return [*said, boxed(calculate(self.halfway, second, self.c))]

    def respond(self, said: Sequence[str]) -> str | bool:
        observed = python_answer(said[-1])
        return said[-1] == boxed(self.answer) if observed is None else observed
