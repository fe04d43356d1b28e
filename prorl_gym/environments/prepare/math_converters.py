"""Rows of mathematical data sets: DeepScaleR's and those in the same shape."""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, cast

from prorl_gym.environments.answers.tex import NoAnswerError, last_boxed
from prorl_gym.environments.math import answer_text
from prorl_gym.environments.math.answer_forms import WordAnswer
from prorl_gym.environments.math.answer_parser import parse_answer
from prorl_gym.environments.math.environment import MAX_ANSWER, MAX_GOLD_ANSWERS
from prorl_gym.environments.math.expressions import UnreadableExpressionError
from prorl_gym.environments.prepare import Converter, UnusableRowError, has_fields

MAX_ANSWER_WORDS = 6
"""Of an answer in words; a longer one has too many wordings."""

UNREADABLE = "the answer cannot be read"
"""Where no more is known about why."""

_WORD = re.compile(r"[^\W\d_]{2,}")
_SPLIT_DECIMAL = re.compile(r"(?<=\d)\s+\.\s+(?=\d)")
_ABOUT = re.compile(r"^(?:\\text\s*\{\s*)?(?:approximately|approx\.?|about|roughly)(?:\s*\})?\s+", re.IGNORECASE)
_CLAUSE = re.compile(
    r"[\s,$]*(?:\\text\w*\s*\{\s*)?,?\s*\b(?:for|where|with)\b(?:\\text\w*|\\in(?![a-z])|\\mathbb"
    r"|\\(?:quad|,|;| )|[\s{}$,]|\b(?:all|any|every|each|some|is|are|and|be|being|of|the|an|arbitrary|fixed|real"
    r"|numbers?|constants?|values?|[a-zA-Z])\b)+\.?$"
)
"""A clause about where an answer holds that restricts nothing: ``for all real x``, ``where c is a constant``."""

_KINDS_OF_UNREADABLE = {
    re.compile(pattern, re.IGNORECASE): reason
    for pattern, reason in {
        r"\\(?:forall|exists|nexists|subset\w*|supset\w*|perp|parallel|cong|sim|Rightarrow|iff|implies|notin)(?![a-zA-Z])|[∀∃⊂⊆⊥∥]":
            "the answer is a statement, not a value",
        r"\bat (?:least|most)\b|\b(?:more|less|fewer|greater) than\b|\bbetween\b|\bup to\b":
            "the answer is a bound in words",
        r"\b(?:if|otherwise|when)\b|\\begin\s*\{(?:cases|array|aligned)\}": "the answer has cases that cannot be read",
        r"\b(?:for|where|with|such that)\b": "the answer has a condition in words",
        r"\\text\w*\s*\{[^}]*\band\b|\d\D*\band\b\D*\d": "the answer joins several quantities by words",
        r"\b(?:is|are|on)\b|\\lim(?![a-z])": "the answer is a statement, not a value",
        r"\d[^,;]*[a-zA-Z%][^,;]*(?:[,;]|\\times|\d')[^,;]*\d": "the answer holds several quantities",
    }.items()
}  # fmt: skip


def _deepscaler(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read ``problem``, ``answer`` and ``solution``: DeepScaleR's JSON, MATH and AIME collections alike.

    The answer may be a text, a number or several of them; without one, the last box of the solution counts. The
    solution itself is not kept: nothing needs it, and what is not in a row cannot leak.
    """
    return _row(row.get("problem"), _answers(row.get("answer")) or _boxed(row.get("solution")), row)


def _verl(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the training form of verl and Polar: ``prompt`` as messages, ``reward_model.ground_truth`` as the answer."""
    model = _decoded(row["reward_model"])
    truth = cast(Mapping[str, Any], model).get("ground_truth") if isinstance(model, Mapping) else None
    return _row(_question(_decoded(row["prompt"])), _answers(_decoded(truth)), row)


def _row(question: Any, answers: list[str], row: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(question, str) or not question.strip():
        raise UnusableRowError("no problem")
    if not answers:
        raise UnusableRowError("no answer")
    answers = [simplify_gold(answer) for answer in answers]
    if len(answers) > MAX_GOLD_ANSWERS or max(map(len, answers)) > MAX_ANSWER:
        raise UnusableRowError("answer too long")
    if reason := next(filter(None, map(unreadable_reason, answers)), None):
        raise UnusableRowError(reason)
    return {
        "id": _id(question, row),
        "question": question.strip(),
        "answer": answers[0] if len(answers) == 1 else answers,
    }


def simplify_gold(answer: str) -> str:
    """Return a gold answer that cannot be read in a spelling that can, where there is one, otherwise as it is."""
    if len(answer) > MAX_ANSWER or unreadable_reason(answer) is None:
        return answer
    respelt = _ABOUT.sub("", _SPLIT_DECIMAL.sub(".", answer)).strip()
    respelt = _CLAUSE.sub("", respelt).strip("$ ") or respelt
    return respelt if unreadable_reason(respelt) is None else answer


def unreadable_reason(answer: str) -> str | None:
    """Return why no rule could compare a model's answer with this one; ``None`` where rules can."""
    text = answer_text.normalize_latex(answer)
    prose = len(_WORD.findall(answer_text.strip_text_macros(text))) > MAX_ANSWER_WORDS
    try:
        found = parse_answer(text)
    except (UnreadableExpressionError, ArithmeticError, ValueError, RecursionError):
        found = None
    unreadable = found is None or not answer_text.has_content(text)
    if prose and (unreadable or isinstance(found, WordAnswer)):
        return "the answer is prose"
    if unreadable:
        return next((why for pattern, why in _KINDS_OF_UNREADABLE.items() if pattern.search(text)), UNREADABLE)
    return None


def _id(question: str, row: Mapping[str, Any]) -> str:
    named: Any = row.get("id", row.get("unique_id"))
    if isinstance(named, str | int) and not isinstance(named, bool) and str(named):
        return str(named)
    return f"math-{sha256(question.strip().encode()).hexdigest()[:16]}"


def _answers(found: Any) -> list[str]:
    """Return the accepted answers, without dollar signs and boxes around them, each once."""
    items = cast(list[Any], found) if isinstance(found, list) else [found]
    texts = [_text(item) for item in items]
    return list(dict.fromkeys(text for text in texts if text))


def _text(item: Any) -> str:
    if isinstance(item, bool) or not isinstance(item, str | int | float):
        return ""
    text = str(item).strip()
    try:
        return last_boxed(text)
    except NoAnswerError:
        return text.strip("$").strip()


def _boxed(solution: Any) -> list[str]:
    try:
        return [last_boxed(solution)] if isinstance(solution, str) else []
    except NoAnswerError:
        return []


def _question(prompt: Any) -> str | None:
    """Return the last message of the user."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        return None
    messages = [cast(Mapping[str, Any], each) for each in cast(list[Any], prompt) if isinstance(each, Mapping)]
    texts = [message.get("content") for message in messages if message.get("role") == "user"]
    return texts[-1] if texts and isinstance(texts[-1], str) else None


def _decoded(value: Any) -> Any:
    """Return the value of a text of JSON: the published files spell nested fields either way.

    ``[1, 2]`` stays a text: it is an interval or a list, not two answers of which either would do.
    """
    if not isinstance(value, str) or value[:1] not in ("[", "{"):
        return value
    try:
        found: Any = json.loads(value)
    except (ValueError, RecursionError):
        return value
    items = cast(list[object], found) if isinstance(found, list) else []
    return cast(Any, found) if all(isinstance(item, str | dict) for item in items) else value


CONVERTERS = (
    Converter(
        "deepscaler",
        lambda row: isinstance(row.get("problem"), str) and ("answer" in row or "solution" in row),
        _deepscaler,
    ),
    Converter("verl", has_fields("prompt", "reward_model"), _verl),
)
