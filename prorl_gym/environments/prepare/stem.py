"""Converters of science questions: SCP-116K, and tables of multiple-choice questions.

SCP-116K gives a problem and a worked solution. The answer is a field of its own where a later edition has one,
otherwise what the solution boxes or says to be the answer. What no rule could compare is skipped: a row whose right
answers are called wrong teaches nothing.
"""

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from string import ascii_uppercase
from typing import Any, Literal, cast

from pydantic import ValidationError

from prorl_gym.environments import tex
from prorl_gym.environments.math.boxed import NoAnswerError, last_boxed
from prorl_gym.environments.prepare import Skipped
from prorl_gym.environments.prepare.math import MOST_WORDS, UNREADABLE, complaint, plainer
from prorl_gym.environments.stem import text
from prorl_gym.environments.stem.choice import chosen
from prorl_gym.environments.stem.grader import symbols_apart, unnamed
from prorl_gym.environments.stem.quantity import WIDEST_SPREAD
from prorl_gym.environments.stem.reading import read
from prorl_gym.environments.stem.rows import StemRow
from prorl_gym.environments.stem.spelling import GREEK_COMMAND, unfonted
from prorl_gym.environments.stem.tokens import Unreadable

LONGEST = 200
"""Characters of an answer that rules compare."""

_ANSWERS = ("answer", "extracted_answer", "final_answer", "reference_answer")
_SOLUTIONS = ("matched_solution", "extracted_solution", "solution")
_OPTION = re.compile(r"^[ \t]*[(\[]?([A-Z])[)\].:][ \t]+(\S.*?)[ \t]*$", re.MULTILINE)
_SAID = re.compile(r"(?:final\s+|correct\s+)?answer\s*(?:is|:)\**\s*:?\s*(.{1,200}?)\s*\**\s*\.?\s*$", re.IGNORECASE)
_WORDS = re.compile(r"[A-Za-z]{2,}")
_OPERATORS = re.compile(r"\\[a-zA-Z]+|[=^_+*/<>|]|(?<![a-zA-Z'])[b-zB-HJ-Z](?![a-zA-Z']|-[a-z]{2})")
_NAMED_COMPOUND = re.compile(r"(?:\(?[\dRSEZDLNO,+]+\)?-)+[a-z][a-z-]{3,}(?: [a-z]+)?")
_ELECTRONS = re.compile(r"(?:\[[A-Z][a-z]\]\s*)?(?:\d[spdf]\s*\^\s*\{?\s*\d{1,2}\s*\}?\s*)+")
_HYBRID = re.compile(
    rf"\\(?:{tex.any_of(tex.UPRIGHT)})"
    r"\s*\{\s*(?:sp|s)\s*\}\s*\^?.*|(?:d\s*\^?\s*\{?2?\}?\s*)?sp(?:\s*\^\s*\{?\s*[23]\s*\}?|[23])?d?\d?"
)
_RANGE = re.compile(r"\d\D{0,20}(?:\bto\b|\.\.|[\u2013\u2014]|--|-)\s*\D{0,4}\d|\bbetween\b|\\[lg]eq?(?![a-z])|[<>]")
_FROM_TO = re.compile(r"\d\D{0,20}\bto\b\s*\d|\bbetween\b")
_FREE_NUMBER = re.compile(r"(?<![\w'\-])\d+(?:[.:,]\d+)*(?![\w'\-])|^\d+[A-Za-z]+$")
_COMPUTED = re.compile(r"\\(?:[dt]?frac|sqrt|pi)(?![a-zA-Z])")
_SET_UPRIGHT = re.compile(
    rf"\\(?:{tex.any_of(tex.UPRIGHT)}|unit|si|SI|qty)\s*\{{|"
    r"\\(?:circ|degree|%|Omega)"
    r"|(?:\\pi|\}|\u03c0)\s+(?:[cdmk]m|rad|k?Hz|kg|sr|ft|in|units?)\b"
)


class _Unusable(Exception):
    """Why a row cannot be used; see ``Skipped``."""


class _Scp:
    """Rows with ``problem`` and an answer or a solution."""

    name = "scp"

    def fits(self, row: Mapping[str, Any]) -> bool:
        """See ``Converter.fits``."""
        return "problem" in row and any(field in row for field in (*_ANSWERS, *_SOLUTIONS))

    def convert(self, row: Mapping[str, Any]) -> Mapping[str, Any] | Skipped:
        """See ``Converter.convert``."""
        try:
            return _checked(_scp(row))
        except _Unusable as why:
            return Skipped(str(why))


class _Choices:
    """Rows with ``question``, ``options`` or ``choices``, and the answer as letter, place or text."""

    name = "choices"

    def fits(self, row: Mapping[str, Any]) -> bool:
        """See ``Converter.fits``."""
        return "question" in row and ("options" in row or "choices" in row)

    def convert(self, row: Mapping[str, Any]) -> Mapping[str, Any] | Skipped:
        """See ``Converter.convert``."""
        try:
            return _checked(_choices(row))
        except _Unusable as why:
            return Skipped(str(why))


CONVERTERS = (_Choices(), _Scp())


def _scp(row: Mapping[str, Any]) -> dict[str, Any]:
    problem, answer = _text(row, ("problem",)), _answer(row)
    if not problem:
        raise _Unusable("no problem")
    question, options = _split_options(problem)
    if options:
        place = chosen(answer, options)
        if place is None:
            raise _Unusable("the answer names none of the options")
        return _row(question, "choice", ascii_uppercase[place], options)
    kind = _kind(answer)
    return _row(problem, kind, plainer(answer) if kind == "expression" else answer)


def _choices(row: Mapping[str, Any]) -> dict[str, Any]:
    question = _text(row, ("question",))
    given = row.get("options", row.get("choices"))
    if isinstance(given, Mapping):
        given = list(cast(Mapping[str, Any], given).values())
    if not question or not isinstance(given, list | tuple):
        raise _Unusable("no question or no options")
    options = [str(option).strip() for option in cast(Sequence[Any], given)]
    answer = next((row[field] for field in ("answer", "answer_index", "label") if row.get(field) is not None), None)
    if isinstance(answer, int) and not isinstance(answer, bool):
        place = answer if 0 <= answer < len(options) else None
    else:
        place = chosen(str(answer), options) if answer is not None else None
    if place is None:
        raise _Unusable("the answer names none of the options")
    return _row(question, "choice", ascii_uppercase[place % 26], options)


def _row(
    question: str,
    kind: Literal["choice", "numeric", "expression", "text"],
    answer: str,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    name = sha256("\0".join((question, *options)).encode(errors="replace")).hexdigest()[:12]
    made: dict[str, Any] = {"id": f"stem-{name}", "question": question, "kind": kind}
    if options:
        made |= {"options": list(options), "shuffle": True}
    return made | {"answer": answer}


def _checked(made: dict[str, Any]) -> dict[str, Any]:
    try:
        StemRow.model_validate(made)
    except ValidationError:
        raise _Unusable("not a row of the stem environment") from None
    return made


def _text(row: Mapping[str, Any], fields: Sequence[str]) -> str:
    """Return the first of these fields that is a text and not empty."""
    found = (row.get(field) for field in fields)
    return next((text.strip() for text in found if isinstance(text, str) and text.strip()), "")


def _answer(row: Mapping[str, Any]) -> str:
    answer = _text(row, _ANSWERS) or _concluded(_text(row, _SOLUTIONS))
    try:
        answer = last_boxed(answer)
    except NoAnswerError:
        answer = answer.strip()
        if answer.count("$") == 2:
            answer = answer.removeprefix("$").removesuffix("$").strip() if answer[0] == answer[-1] == "$" else answer
    if not answer:
        raise _Unusable("the solution tells no final answer")
    if len(answer) > LONGEST or "\n" in answer:
        raise _Unusable("a long answer: no rule can compare it")
    return answer


def _concluded(solution: str) -> str:
    """Return what a solution boxes, or says to be the answer in its last line."""
    if "\\boxed" in solution:
        return solution
    found = _SAID.search(solution.rpartition("\n")[2])
    return found[1] if found else ""


def _split_options(problem: str) -> tuple[str, list[str]]:
    """Return a question and the options that it ends with: lines that begin with (A), (B) and so on."""
    found = list(_OPTION.finditer(problem))
    letters = "".join(match[1] for match in found)
    if len(found) < 2 or letters != ascii_uppercase[: len(found)] or not problem[: found[0].start()].strip():
        return problem, []
    if problem[found[-1].end() :].strip():
        return problem, []
    return problem[: found[0].start()].strip(), [match[2] for match in found]


def _kind(answer: str) -> Literal["numeric", "expression", "text"]:
    """Return how an answer is compared: as what can read it; as a short text only where it is a term or words.

    Raises:
        _Unusable: nothing can read it, and it is no short text.
    """
    bare = unfonted(answer)
    if _ELECTRONS.fullmatch(bare):
        return "text"
    if _is_quantity(answer):
        return "numeric"
    if text.is_term(answer) or _HYBRID.fullmatch(answer) or _NAMED_COMPOUND.fullmatch(bare):
        return "text"
    words = _WORDS.findall(re.sub(r"\\[a-zA-Z]+", " ", bare))
    if len(words) > MOST_WORDS:
        raise _Unusable("a long answer: no rule can compare it")
    in_words = bool(words) and _OPERATORS.search(GREEK_COMMAND.sub(" ", bare)) is None
    if in_words and _FREE_NUMBER.search(bare) is None:
        return "text"
    respelt = plainer(answer)
    if not _FROM_TO.search(bare) and complaint(symbols_apart(respelt)) is None:
        return "expression"
    why = complaint(respelt) or UNREADABLE
    if _FROM_TO.search(bare) or (why == UNREADABLE and _RANGE.search(bare)):
        raise _Unusable("the answer is a range: no rule says which value counts")
    if in_words and len(words) > 1 and why == UNREADABLE:
        return "text"  # step 2 of glycolysis
    raise _Unusable(why)


def _is_quantity(answer: str) -> bool:
    r"""Whether an answer is a number with a unit, not a formula: in ``\\frac{1}{2}kA^2`` letters are variables."""
    try:
        found = read(answer)
    except Unreadable:
        return False
    if "=" in unnamed(unfonted(answer)):
        return False  # an equation, not a value with its name
    computed = _COMPUTED.search(answer) is not None
    if computed and (found[0].spread or (found[0].unit.given and not _SET_UPRIGHT.search(answer))):
        return False
    return found[0].spread <= WIDEST_SPREAD and (any(map(str.isdigit, answer)) or not found[0].label)
