r"""The ``stem`` environment: rows, grading by rules and by a judge, and prompts. Answers are in ``\boxed{}``.

Rules decide first, in a worker process where an answer has to be parsed; where they cannot, a row may leave it to a
judge. An answer that hangs or crashes a grader is wrong, and the judge does not see it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from string import ascii_uppercase
from typing import Annotated, ClassVar, Literal, Self
from zlib import crc32

from pydantic import Field, model_validator

from prorl_gym.agents.protocol import Tool
from prorl_gym.agents.tools.agent_sandbox import SandboxSource
from prorl_gym.environments.answers.environment import (
    CPU_SECONDS,
    MAX_ANSWER,
    TOO_LONG,
    AnswerWorkers,
    BoxedAnswerEnvironment,
    wrong_score,
)
from prorl_gym.environments.judge import Judge
from prorl_gym.environments.math.environment import MathGrader
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.row_format import TaskRow
from prorl_gym.environments.stem.quantity_words import names_other_quantity
from prorl_gym.environments.stem.text_answers import chosen_option, is_right
from prorl_gym.environments.stem.text_normalization import comparison_key, separate_symbols, strip_fonts, strip_own_name
from prorl_gym.environments.worker_pool import WorkerPool
from prorl_gym.errors import FailureKind, GraderError, TaskError
from prorl_gym.records import Message, Score
from prorl_gym.settings import ResolvedSettings, RolloutSettings

SYSTEM_PROMPT = (
    "You answer questions from science and engineering. Reason step by step, and use the python tool whenever a "
    "computation is easier or safer to do by program. Give the final answer once, at the end, in \\boxed{}, either in "
    "your last message or as the answer of the finish tool. Put only the answer itself into the box: for multiple "
    "choice the letter of the right option, for a quantity one number with its unit, otherwise the expression or the "
    "few words that were asked for."
)
_SEARCH = "prorl_gym.contrib.search"
"""Module of the search tool, which is reached by name only."""
_SEARCH_PROMPT = " The search tool finds reference texts; they may be wrong, so check what matters."

Kind = Literal["choice", "numeric", "expression", "text"]
Text = Annotated[str, Field(min_length=1, max_length=MAX_ANSWER)]
Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_POSITIONAL = re.compile(
    r"\b(?:above|below|following|preceding|previous|former|latter)\b|\b[A-Z]\)?\s*+(?:and|or|&|,)\s*+\(?[A-Z]\b"
    r"|\b(?i:both|neither|only|all|none|options?|choices?|answers?|statements?)\b\s+(?:of\s+)?\(?[A-Z]\b"
    r"|\b(?i:all|none|both|neither)\s+(?:of\s+)?(?:these|them|those|the others?)\b"
)
"""Options that refer to others by place or letter: then the order of all is kept."""
_VARIANT = re.compile(r"\\var(?=(?:epsilon|theta|phi|rho|kappa|pi|sigma)(?![a-zA-Z]))")
"""Another shape of the same Greek letter."""
_MAX_REQUEST = 2000
"""Characters at the end of a question in which its request is searched."""
_VERDICTS: Mapping[str, Literal["right", "wrong", "open"]] = {"equal": "right", "different": "wrong", "unread": "open"}
"""Rule verdicts by the worker's verdicts of quantities."""


class StemRow(TaskRow):
    """A question from science or engineering."""

    kind: Kind
    """How the answer is compared."""
    answer: Text
    """The gold answer; stays on the service's side. ``choice``: the letter of the right option, by the order of
    ``options``. ``numeric``: a number with an optional unit, for example ``9.81 m/s^2``. ``expression``: LaTeX."""
    options: tuple[Text, ...] = ()
    """``choice`` only: 2 to 26 options, all different."""
    shuffle: bool = False
    """``choice`` only: show the options in an order that depends on nothing but the row. Options that refer to others
    by place (``all of the above``, ``both A and B``) keep the order as it is."""
    tolerance: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.01
    """``numeric`` only: relative to the gold number."""
    absolute_tolerance: Tolerance = 0.0
    """``numeric`` only: in the gold answer's unit. The wider of both holds."""
    unit_optional: bool = False
    """``numeric`` only: an answer without a unit is read in the gold answer's; otherwise it is wrong."""
    accept: tuple[Text, ...] = ()
    """``text`` only: further right answers."""
    judge: bool = False
    """Let the judge grade an answer that the rules neither accept nor rule out; not for ``choice``."""

    @model_validator(mode="after")
    def _fields_fit_the_kind(self) -> Self:
        if self.kind == "choice":
            if not 2 <= len(self.options) <= len(ascii_uppercase):
                raise ValueError("kind 'choice' needs 2 to 26 'options'")
            if self.answer not in tuple(ascii_uppercase[: len(self.options)]):
                raise ValueError(f"'answer' of a choice is a letter from A to {ascii_uppercase[len(self.options) - 1]}")
            if len({comparison_key(option) for option in self.options}) != len(self.options):
                raise ValueError("two of the 'options' are the same")
        elif self.options or self.shuffle:
            raise ValueError("'options' and 'shuffle' are for kind 'choice'")
        if self.accept and self.kind != "text":
            raise ValueError("'accept' is for kind 'text'")
        if self.judge and self.kind == "choice":
            raise ValueError("'judge' is for open answers, not for kind 'choice'")
        return self

    def option_order(self) -> tuple[int, ...]:
        """Return the places of the options in the row, in the order in which they are shown."""
        places = range(len(self.options))
        if not self.shuffle or any(map(_POSITIONAL.search, self.options)):
            return tuple(places)

        def key(place: int) -> bytes:
            text = f"{self.question}\0{self.options[place]}"
            return blake2b(text.encode(errors="replace"), digest_size=16).digest()

        return tuple(sorted(places, key=key))

    def shown_options(self) -> list[str]:
        """Return the options as they are shown, the first as (A)."""
        return [self.options[place] for place in self.option_order()]

    def right_letter(self) -> str:
        """Return the letter of the right option among those shown."""
        return ascii_uppercase[self.option_order().index(ascii_uppercase.index(self.answer))]


@dataclass(frozen=True, slots=True)
class RuleVerdict:
    """A verdict by rules alone."""

    verdict: Literal["right", "wrong", "open"]
    """``open``: not right by the rules, but they cannot exclude another wording."""
    why: str = ""


class StemGrader:
    """Compares answers with the gold one, quantities in workers of ``prorl_gym.environments.stem.quantity:grade``."""

    def __init__(
        self,
        quantities: WorkerPool | None = None,
        expressions: MathGrader | None = None,
    ) -> None:
        pool = quantities or WorkerPool("prorl_gym.environments.stem.quantity:grade")
        self._workers = AnswerWorkers(pool, "stem", lambda result: result["verdict"] == "equal", CPU_SECONDS)
        self._expressions = expressions or MathGrader()

    async def score(self, row: StemRow, answer: str, judge: Judge | None) -> Score:
        """Return 1.0 for a right answer, otherwise 0.0. The judge decides if the row requires it and the rules cannot.

        Raises ``GraderError``: no worker can be started, or the row requires a judge and there is none or no verdict;
        ``TaskError`` (``BAD_ROW``): the gold answer cannot be read.
        """
        found = await self.grade_by_rules(row, answer)
        if found.verdict == "right":
            return Score(reward=1.0, detail={"by": "rules"})
        if found.verdict == "wrong" or not row.judge:
            return wrong_score(found.why, by="rules")
        if judge is None:
            raise GraderError(
                f"stem row {row.id[:80] or 'without id'} requires a judge, and none is configured.",
                "Configure a pool 'judge' for the service, or drop 'judge' from the rows.",
            )
        if await judge.is_equivalent(row.question, row.answer, answer):
            return Score(reward=1.0, detail={"by": "judge"})
        return wrong_score("the judge finds that it differs", by="judge")

    async def grade_by_rules(self, row: StemRow, answer: str) -> RuleVerdict:
        """Compare without a judge. Raises as ``score``."""
        if len(answer) > MAX_ANSWER:
            return RuleVerdict("wrong", TOO_LONG)
        match row.kind:
            case "choice":
                place = chosen_option(answer, row.shown_options()) if _is_short_enough(answer, row.options) else None
                if place is None:
                    return RuleVerdict("wrong", "the answer names no option, or more than one")
                is_gold = ascii_uppercase[place] == row.right_letter()
                return RuleVerdict("right") if is_gold else RuleVerdict("wrong", "another option")
            case "text":
                texts = (row.answer, *row.accept)
                right = _is_short_enough(answer, texts) and is_right(answer, *texts)
                return RuleVerdict("right") if right else RuleVerdict("open", "the answer differs")
            case "numeric":
                return await self._grade_quantity(row, answer)
            case "expression":
                return await self._grade_expression(row, answer)

    async def _grade_expression(self, row: StemRow, answer: str) -> RuleVerdict:
        request = row.question[-_MAX_REQUEST:]
        if "=" in answer and names_other_quantity(*map(strip_fonts, (answer, row.answer, request))):
            return RuleVerdict("wrong", "another quantity is named")
        answer = strip_own_name(answer) if "=" not in row.answer else answer
        gold, answer = (separate_symbols(_VARIANT.sub(r"\\", each)) for each in (row.answer, answer))
        score = await self._expressions.score(gold, answer, row.question)
        if score.reward == 1.0:
            return RuleVerdict("right")
        why = str(score.detail.get("why", "the answer differs"))
        return RuleVerdict("open" if why == "the answer differs" else "wrong", why)

    async def _grade_quantity(self, row: StemRow, answer: str) -> RuleVerdict:
        fields = ("question", "tolerance", "absolute_tolerance", "unit_optional")
        rules = {"gold": row.answer, **{field: getattr(row, field) for field in fields}}
        result = await self._workers.compare({**rules, "answer": answer}, [{**rules, "answer": row.answer}])
        if isinstance(result, str):
            return RuleVerdict("wrong", result)
        if result["verdict"] == "bad_gold":
            raise TaskError(
                FailureKind.BAD_ROW,
                f"stem row {row.id[:80] or 'without id'}: 'answer' is no single quantity ({result['why']}).",
                "Give a number with an optional unit, such as 9.81 m/s^2, or another 'kind'.",
            )
        return RuleVerdict(_VERDICTS[result["verdict"]], result["why"])


class StemEnvironment(BoxedAnswerEnvironment[StemRow]):
    """Implements ``Environment[StemRow]``.

    ``search`` gives agents a search tool: by default what ``PRORL_GYM_SEARCH`` names, usually none. It is the same for
    every rollout of a service, so that a group's prompts are.
    """

    name = "stem"
    row_model = StemRow
    settings = RolloutSettings(max_turns=8, eval_seconds=300.0)
    score_detail: ClassVar[Mapping[str, str]] = {"by": "rules"}
    guess = "I believe that it is"

    def __init__(self, grader: StemGrader | None = None, search: Tool | None = None) -> None:
        self._grader = grader or StemGrader()
        self._search = search or import_module(_SEARCH).configured_search()
        self.prompt = SYSTEM_PROMPT + (_SEARCH_PROMPT if self._search is not None else "")

    def messages(self, task: StemRow) -> tuple[Message, ...]:
        options = zip(ascii_uppercase, task.shown_options(), strict=False)
        listed = "\n".join(f"({letter}) {text}" for letter, text in options)
        question = f"{task.question}\n\n{listed}" if task.kind == "choice" else task.question
        return Message(role="system", content=self.prompt), Message(role="user", content=question)

    def tools(self, sandbox: SandboxSource, settings: ResolvedSettings) -> Sequence[Tool]:
        python, finish = super().tools(sandbox, settings)
        return (python, finish) if self._search is None else (python, self._search, finish)

    async def grade(self, task: StemRow, answer: str, leases: Leases) -> Score:
        return await self._grader.score(task, answer, leases.get_judge())

    def gold_answer(self, task: StemRow) -> str:
        return task.right_letter() if task.kind == "choice" else task.answer

    def accepted_answers(self, task: StemRow) -> Sequence[str]:
        return (self.gold_answer(task), *task.accept)

    def wrong_answer(self, task: StemRow, seed: int) -> str:
        draw = crc32(f"{seed}:{task.question}".encode(errors="replace"))
        match task.kind:
            case "choice":
                others = [letter for letter in ascii_uppercase[: len(task.options)] if letter != task.right_letter()]
                return others[draw % len(others)]
            case "text":
                return f"substance number {draw % 97}"
            case "numeric":
                return f"{1 + draw % 97} kg^7"
            case "expression":
                return f"{1 + draw % 97}+\\sqrt{{9973}}"


def _is_short_enough(answer: str, texts: Iterable[str]) -> bool:
    """Whether an answer is short enough to be one of these texts: endless ones are not compared on the event loop."""
    return len(answer) <= 3 * max(map(len, texts)) + 200
