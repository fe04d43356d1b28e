"""Grading a STEM answer by rules, in a worker process where it has to be read, and by a judge where rules cannot tell.

An answer that hangs or crashes a grader is wrong, and no judge is asked about it. A grader that cannot work is no
verdict; a gold answer that cannot be read is a bad row.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Literal

from prorl_gym.environments.judge import Judge
from prorl_gym.environments.math.grader import MathGrader
from prorl_gym.environments.stem import text
from prorl_gym.environments.stem.choice import chosen
from prorl_gym.environments.stem.labels import names_another
from prorl_gym.environments.stem.rows import MAX_ANSWER, StemRow
from prorl_gym.environments.stem.spelling import unfonted
from prorl_gym.environments.worker import (
    WorkerDiedError,
    WorkerFailedError,
    WorkerPool,
    WorkerStuckError,
    WorkerTimeoutError,
    WorkerUnavailableError,
)
from prorl_gym.errors import FailureKind, GraderError, TaskError
from prorl_gym.records import Score

_NAME = re.compile(
    r"\|?\s*(?:(?:\\Delta|\u0394)\s*)?\\?[A-Za-z]+(?:\{\\?[A-Za-z]+\})?'?"
    r"(?:\s*\^\s*\{?\s*\\?(?:circ|degree|theta|ominus|prime|\u00b0|\*)\s*\}?)?(?:_(?:\w|\{[^{}=]{1,20}(?:\{[^{}=]{1,20}\})?[^{}=]{0,4}\}))?"
    r"\s*(?:\([A-Za-z]\))?\s*\|?"
)
_VARIANT = re.compile(r"\\var(?=(?:epsilon|theta|phi|rho|kappa|pi|sigma)(?![a-zA-Z]))")
"""Another shape of the same Greek letter."""

_HBAR = re.compile(r"\\hbar(?![a-zA-Z])|[ħℏ]")
_LETTERS_SIDE_BY_SIDE = re.compile(
    r"(?:\\(?:text|math|operatorname|mbox|end)[a-z]*\*?|_)\s*\{[^{}]*\}|\\begin\s*\{\w+\}(?:\{[clr|]*\})?|\\[a-zA-Z]+|(?<![a-zA-Z])[a-zA-Z]{2,3}(?![a-zA-Z])"
)
_NO_SYMBOLS = frozenset(
    "sin cos tan cot sec csc log exp ln lg max min gcd lcm mod lim det deg arg and or for all if is the not no let of "
    "pi inf any yes so odd".split()
)

CPU_SECONDS = 5.0
"""CPU time for one comparison; an ordinary one takes a millisecond."""

_LONGEST_REQUEST = 2000
"""Characters at the end of a question in which its request is looked for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the rules say."""

    verdict: Literal["right", "wrong", "open"]
    """``open``: not right by the rules, but they cannot exclude another wording."""
    why: str = ""


class StemGrader:
    """Compares answers with the gold one.

    Args:
        quantities: workers of ``prorl_gym.environments.stem.quantity:grade``.
        expressions: compares mathematical expressions.
        cpu_seconds: CPU time for one comparison of quantities.
    """

    def __init__(self, quantities: WorkerPool, expressions: MathGrader, cpu_seconds: float = CPU_SECONDS) -> None:
        self._quantities = quantities
        self._expressions = expressions
        self._cpu_seconds = cpu_seconds

    async def score(self, row: StemRow, answer: str, judge: Judge | None) -> Score:
        """Return 1.0 for a right answer, otherwise 0.0.

        Args:
            row: the task.
            answer: what was boxed.
            judge: asked where the row wants it and the rules cannot tell.

        Raises:
            GraderError: no worker can be started, or the row wants a judge and there is none or no verdict.
            TaskError: ``BAD_ROW``, the gold answer cannot be read.
        """
        found = await self.by_rules(row, answer)
        if found.verdict == "right":
            return Score(reward=1.0, detail={"by": "rules"})
        if found.verdict == "wrong" or not row.judge:
            return wrong(found.why)
        if judge is None:
            raise GraderError(
                f"stem row {row.id[:80] or 'without id'} wants a judge, and none is configured.",
                "Configure a pool 'judge' for the service, or drop 'judge' from the rows.",
            )
        if await judge.verdict(row.question, row.answer, answer):
            return Score(reward=1.0, detail={"by": "judge"})
        return wrong("the judge finds that it differs", by="judge")

    async def by_rules(self, row: StemRow, answer: str) -> Finding:
        """Compare without a judge. Raises as ``score``."""
        if len(answer) > MAX_ANSWER:
            return Finding("wrong", f"the answer is longer than {MAX_ANSWER} characters")
        match row.kind:
            case "choice":
                return _choice(row, answer)
            case "text":
                right = _may_be(answer, (row.answer, *row.accept)) and text.right(answer, row.answer, row.accept)
                return Finding("right") if right else Finding("open", "the answer differs")
            case "numeric":
                return await self._numeric(row, answer)
            case "expression":
                return await self._expression(row, answer)

    async def _expression(self, row: StemRow, answer: str) -> Finding:
        if "=" in answer and names_another(*map(unfonted, (answer, row.answer, row.question[-_LONGEST_REQUEST:]))):
            return Finding("wrong", "another quantity is named")
        answer = unnamed(answer) if "=" not in row.answer else answer
        gold, answer = (symbols_apart(_VARIANT.sub(r"\\", each)) for each in (row.answer, answer))
        score = await self._expressions.score(gold, answer, row.question)
        if score.reward == 1.0:
            return Finding("right")
        why = str(score.detail.get("why", "the answer differs"))
        return Finding("open" if why == "the answer differs" else "wrong", why)

    async def _numeric(self, row: StemRow, answer: str) -> Finding:
        try:
            result = await self._compare(row, answer)
        except WorkerDiedError:
            try:  # the machine may have been short of memory: a second try tells
                result = await self._compare(row, answer)
            except (WorkerDiedError, WorkerTimeoutError, WorkerFailedError):
                return await self._unless_gold_fails(row, "grading crashed")
        except WorkerTimeoutError:
            return await self._unless_gold_fails(row, "grading timed out")
        except WorkerFailedError:
            return await self._unless_gold_fails(row, "the answer could not be read")
        if result["verdict"] == "bad_gold":
            raise TaskError(
                FailureKind.BAD_ROW,
                f"stem row {row.id[:80] or 'without id'}: 'answer' is no single quantity ({result['why']}).",
                "Give a number with an optional unit, such as 9.81 m/s^2, or another 'kind'.",
            )
        verdicts: Mapping[str, Literal["right", "wrong", "open"]] = {"equal": "right", "unread": "open"}
        return Finding(verdicts.get(result["verdict"], "wrong"), result["why"])

    async def _unless_gold_fails(self, row: StemRow, why: str) -> Finding:
        try:
            if (await self._compare(row, row.answer))["verdict"] == "equal":
                return Finding("wrong", why)
            found = "it does not equal itself"
        except (WorkerTimeoutError, WorkerDiedError, WorkerFailedError) as error:
            found = str(error)
        raise GraderError(f"The stem grader fails on the gold answer alone: {found}.", "Check the row's 'answer'.")

    async def _compare(self, row: StemRow, answer: str) -> Mapping[str, Any]:
        body = {
            "gold": row.answer,
            "answer": answer,
            "question": row.question,
            "tolerance": row.tolerance,
            "absolute_tolerance": row.absolute_tolerance,
            "unit_optional": row.unit_optional,
        }
        try:
            return await self._quantities.call(body, cpu_seconds=self._cpu_seconds)
        except WorkerUnavailableError as error:
            raise GraderError(
                f"No stem grading worker can be started: {error}.", "Check that pint imports in this environment."
            ) from None
        except WorkerStuckError as error:
            raise GraderError(f"The stem grader got no CPU time: {error}.", "Look at the load of this node.") from None


def unnamed(answer: str) -> str:
    r"""Return an answer without the name that it gives to itself: ``|Z| = ...``, ``E_{\text{kin}} = ...``."""
    name, equals, rest = answer.partition("=")
    return rest if equals and "=" not in rest and _NAME.fullmatch(name.strip()) else answer


def symbols_apart(text: str) -> str:
    r"""Return a formula with its symbols apart: ``mg/k`` is a product, not milligrams over k."""
    return _LETTERS_SIDE_BY_SIDE.sub(_apart, _HBAR.sub(" h_{bar}", text))


def _apart(found: re.Match[str]) -> str:
    word = found[0]
    return word if not word.isalpha() or word in _NO_SYMBOLS else " ".join(word)


def _may_be(answer: str, texts: Iterable[str]) -> bool:
    """Whether an answer is short enough to be one of these texts: endless ones are not compared on the event loop."""
    return len(answer) <= 3 * max(map(len, texts)) + 200


def _choice(row: StemRow, answer: str) -> Finding:
    place = chosen(answer, row.shown()) if _may_be(answer, row.options) else None
    if place is None:
        return Finding("wrong", "the answer names no option, or more than one")
    return Finding("right") if ascii_uppercase[place] == row.right_letter() else Finding("wrong", "another option")


def wrong(why: str, *, by: str = "rules") -> Score:
    """Return the score of an answer that is not right."""
    return Score(reward=0.0, detail={"why": why, "by": by})
