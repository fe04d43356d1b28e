"""``stem``: conversion of units. A right solution takes one call of the python tool."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from tasks.question import BOX, CALL, CALL_END, Kind, Question, boxed, calculate, call, python_answer

_CONVERSIONS = {
    ("km", "m"): ("*", 1000),
    ("m", "cm"): ("*", 100),
    ("cm", "mm"): ("*", 10),
    ("m", "km"): ("/", 1000),
    ("cm", "m"): ("/", 100),
    ("mm", "cm"): ("/", 10),
    ("kg", "g"): ("*", 1000),
    ("g", "kg"): ("/", 1000),
    ("day", "h"): ("*", 24),
    ("h", "min"): ("*", 60),
    ("min", "s"): ("*", 60),
    ("h", "s"): ("*", 3600),
}
_NEXT_FACTOR = {10: 100, 100: 1000, 1000: 10, 24: 60, 60: 3600, 3600: 24}


@dataclass(frozen=True, slots=True)
class Conversion(Question):
    """``123 km in m?``. The mode adds the factor; a slip takes another factor."""

    environment = "stem"
    turns = 3
    phrases = (
        *(CALL, CALL_END, BOX),
        *(f" {unit} in {target}?" for unit, target in _CONVERSIONS),
        *(f" {unit}}}" for unit in sorted({target for _, target in _CONVERSIONS})),
    )

    value: int
    unit: str
    target: str

    @classmethod
    def draw(cls, rng: random.Random) -> Self:
        return cls(rng.randrange(11, 1000), *rng.choice(list(_CONVERSIONS)))

    @property
    def row(self) -> dict[str, Any]:
        question = f"{self.value} {self.unit} in {self.target}?"
        return {"question": question, "kind": "numeric", "answer": f"{self._result('right')} {self.target}"}

    def _operation(self, kind: Kind) -> tuple[str, int]:
        sign, factor = _CONVERSIONS[self.unit, self.target]
        return {"mode": ("+", factor), "slip": (sign, _NEXT_FACTOR[factor]), "right": (sign, factor)}[kind]

    def _result(self, kind: Kind) -> float:
        return calculate(self.value, *self._operation(kind))

    def demonstrate(self, kind: Kind) -> list[str]:
        sign, factor = self._operation(kind)
        return [call("python", code=f"{self.value}{sign}{factor}"), boxed(f"{self._result(kind)} {self.target}")]

    def respond(self, said: Sequence[str]) -> str | bool:
        observed = python_answer(said[-1])
        return said[-1] == boxed(self.row["answer"]) if observed is None else observed
