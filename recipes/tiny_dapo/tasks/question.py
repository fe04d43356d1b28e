"""What every domain of the recipe has: questions, the traces of the warm-up, and what a tool would answer.

An environment asks the questions and grades the answers; nothing here replaces it. What a tool answers is computed here
for the warm-up alone, whose traces hold it and whose gate is checked without sandboxes.
"""

import json
import operator
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

ENVIRONMENTS = Path(__file__).resolve().parents[3] / "environments"
HELD_OUT = 256
MAX_TOKENS = 180
"""Tokens of a trajectory, which the model's context holds."""

Kind = Literal["mode", "slip", "right"]
MIXTURE: Mapping[Kind, int] = {"mode": 63, "slip": 13, "right": 24}
"""Percentages of the traces. The most frequent kind is wrong, so the greedy policy is; a slip is wrong in one choice;
some are right, so sampling finds what to learn from."""

CALL, CALL_END, BOX = '{"name": "python", "arguments": {"code": "', '"}}', "\\boxed{"
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_OPERATION = re.compile(
    re.escape(f"<tool_call>{CALL}") + r"(-?\d+)([+\-*/])(\d+)" + re.escape(f"{CALL_END}</tool_call>")
)


class Question(ABC):
    """A question of one domain; a subclass is the domain. Subclasses are frozen data classes."""

    environment: ClassVar[str]
    """The environment that asks and grades, as it ships."""
    turns: ClassVar[int]
    turn_tokens: ClassVar[int] = 24
    phrases: ClassVar[Sequence[str]]
    """Fixed strings of prompts, turns and observations: a few tokens each."""

    @classmethod
    @abstractmethod
    def draw(cls, rng: random.Random) -> Self:
        """Return a random question. No wrong trace may solve it by luck."""

    @property
    @abstractmethod
    def row(self) -> dict[str, Any]:
        """The row that the environment reads."""

    @property
    def message(self) -> str:
        """The user's message that the environment makes of the row."""
        return self.row["question"]

    @abstractmethod
    def demonstrate(self, kind: Kind) -> list[str]:
        """Return the turns of the assistant in a trace of the warm-up."""

    @abstractmethod
    def respond(self, said: Sequence[str]) -> str | bool:
        """Return what the tool answers to the last turn of the assistant, or, at an end, whether it is solved."""

    @classmethod
    def limits(cls) -> dict[str, Any]:
        """Return the limits of a rollout, which keep it inside the model's small context."""
        return {"max_turns": cls.turns, "max_turn_tokens": cls.turn_tokens, "max_tokens": MAX_TOKENS}


QuestionT = TypeVar("QuestionT", bound=Question)


def questions(domain: type[QuestionT], seed: int) -> Iterator[QuestionT]:
    """Yield questions for ever, none of them held out."""
    held = set(held_out(domain))
    return (question for question in _draw(domain, f"training {seed}") if question not in held)


def held_out(domain: type[QuestionT], count: int = HELD_OUT) -> list[QuestionT]:
    """Return the first of the questions that are never trained on: the same for every seed."""
    held: dict[QuestionT, None] = {}
    for question in _draw(domain, "held out"):
        held[question] = None
        if len(held) == HELD_OUT:
            break
    return list(islice(held, count))


def _draw(domain: type[QuestionT], seed: str) -> Iterator[QuestionT]:
    rng = random.Random(seed)
    while True:
        yield domain.draw(rng)


@cache
def shipped_prompt(environment: str) -> tuple[str, str]:
    """Return the system prompt that an environment ships with, and its tools as the chat template shows them."""
    examples = ENVIRONMENTS / f"prorl_{environment}/data/example.jsonl"
    shipped = json.loads(examples.read_text(encoding="utf-8").partition("\n")[0])["responses_create_params"]
    return shipped["input"][0]["content"], "".join(f" {tool['name']}" for tool in shipped["tools"])


def call(tool: str, **arguments: str) -> str:
    """Return a turn that calls a tool."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def boxed(answer: object) -> str:
    """Return a turn that hands in an answer."""
    return f"{BOX}{answer}}}"


def calculate(a: int, sign: str, b: int) -> Any:
    """Return the result of one operation."""
    return _OPERATORS[sign](a, b)


def python_answer(turn: str) -> str | None:
    """Return what the python tool answers to a call of one operation; ``None``: the turn is no such call."""
    found = _OPERATION.fullmatch(turn)
    if found is None or (found[2] == "/" and int(found[3]) == 0):
        return None
    return str(calculate(int(found[1]), found[2], int(found[3])))
