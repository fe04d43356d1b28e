"""Converters of science questions: SCP-116K, GPQA, and tables of multiple-choice questions.

SCP-116K gives a problem and a worked solution. The answer is a field of its own where a later edition has one,
otherwise what the solution boxes or names as the answer. Answers that no rule can compare are skipped: grading would
call right answers wrong.
"""

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from random import Random
from string import ascii_uppercase
from typing import Any, Literal, cast

from prorl_gym.environments.answers import tex
from prorl_gym.environments.answers.tex import NoAnswerError, last_boxed
from prorl_gym.environments.prepare import Converter, UnusableRowError, has_fields
from prorl_gym.environments.prepare.math_converters import (
    MAX_ANSWER_WORDS,
    UNREADABLE,
    simplify_gold,
    unreadable_reason,
)
from prorl_gym.environments.stem import text_answers
from prorl_gym.environments.stem.environment import StemRow
from prorl_gym.environments.stem.number_parser import UnreadableQuantityError
from prorl_gym.environments.stem.quantity import MAX_SPREAD, parse_quantity
from prorl_gym.environments.stem.text_answers import chosen_option
from prorl_gym.environments.stem.text_normalization import GREEK_COMMAND, separate_symbols, strip_fonts, strip_own_name

MAX_ANSWER_LENGTH = 200
"""Characters of an answer that rules compare."""

GPQA_SEED = 0
"""Seed of the order of GPQA's options, which are published with the right one first."""

_GPQA_OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_ANSWERS = ("answer", "extracted_answer", "final_answer", "reference_answer")
_SOLUTIONS = ("matched_solution", "extracted_solution", "solution")
_OPTION = re.compile(r"^[ \t]*[(\[]?([A-Z])[)\].:][ \t]+(\S.*?)[ \t]*$", re.MULTILINE)
_SAID = re.compile(r"(?:final\s+|correct\s+)?answer\s*(?:is|:)\**\s*:?\s*(.{1,200}?)\s*\**\s*\.?\s*$", re.IGNORECASE)
_WORDS = re.compile(r"[A-Za-z]{2,}")
_OPERATORS = re.compile(r"\\[a-zA-Z]+|[=^_+*/<>|]|(?<![a-zA-Z'])[b-zB-HJ-Z](?![a-zA-Z']|-[a-z]{2})")
_NAMED_COMPOUND = re.compile(r"(?:\(?[\dRSEZDLNO,+]+\)?-)+[a-z][a-z-]{3,}(?: [a-z]+)?")
_ELECTRONS = re.compile(r"(?:\[[A-Z][a-z]\]\s*)?(?:\d[spdf]\s*\^\s*\{?\s*\d{1,2}\s*\}?\s*)+")
_HYBRID = re.compile(
    rf"\\(?:{tex.alternation(tex.UPRIGHT)})"
    r"\s*\{\s*(?:sp|s)\s*\}\s*\^?.*|(?:d\s*\^?\s*\{?2?\}?\s*)?sp(?:\s*\^\s*\{?\s*[23]\s*\}?|[23])?d?\d?"
)
_RANGE = re.compile(r"\d\D{0,20}(?:\bto\b|\.\.|[\u2013\u2014]|--|-)\s*\D{0,4}\d|\bbetween\b|\\[lg]eq?(?![a-z])|[<>]")
_FROM_TO = re.compile(r"\d\D{0,20}\bto\b\s*\d|\bbetween\b")
_FREE_NUMBER = re.compile(r"(?<![\w'\-])\d+(?:[.:,]\d+)*(?![\w'\-])|^\d+[A-Za-z]+$")
_COMPUTED = re.compile(r"\\(?:[dt]?frac|sqrt|pi)(?![a-zA-Z])")
_SET_UPRIGHT = re.compile(
    rf"\\(?:{tex.alternation(tex.UPRIGHT)}|unit|si|SI|qty)\s*\{{|"
    r"\\(?:circ|degree|%|Omega)"
    r"|(?:\\pi|\}|\u03c0)\s+(?:[cdmk]m|rad|k?Hz|kg|sr|ft|in|units?)\b"
)


def _scp(row: Mapping[str, Any]) -> dict[str, Any]:
    problem, answer = _text(row, ("problem",)), _answer(row)
    if not problem:
        raise UnusableRowError("no problem")
    question, options = _split_options(problem)
    if options:
        place = chosen_option(answer, options)
        if place is None:
            raise UnusableRowError("the answer names none of the options")
        return _row(question, "choice", ascii_uppercase[place], options)
    kind = _kind(answer)
    return _row(problem, kind, simplify_gold(answer) if kind == "expression" else answer)


def _choices(row: Mapping[str, Any]) -> dict[str, Any]:
    question = _text(row, ("question",))
    given = row.get("options", row.get("choices"))
    if isinstance(given, Mapping):
        given = list(cast(Mapping[str, Any], given).values())
    if not question or not isinstance(given, list | tuple):
        raise UnusableRowError("no question or no options")
    options = [str(option).strip() for option in cast(Sequence[Any], given)]
    answer = next((row[field] for field in ("answer", "answer_index", "label") if row.get(field) is not None), None)
    if isinstance(answer, int) and not isinstance(answer, bool):
        place = answer if 0 <= answer < len(options) else None
    else:
        place = chosen_option(str(answer), options) if answer is not None else None
    if place is None:
        raise UnusableRowError("the answer names none of the options")
    return _row(question, "choice", ascii_uppercase[place % 26], options)


def _gpqa(row: Mapping[str, Any]) -> dict[str, Any]:
    """Shuffle the options here: ``StemRow.shuffle`` keeps the order of those that refer to others, the right one first.

    A question's order depends on the seed and its text, so it is the same in any selection of rows.
    """
    question, options = _text(row, ("Question",)), [_text(row, (name,)) for name in _GPQA_OPTIONS]
    if not question or not all(options):
        raise UnusableRowError("no question or no options")
    right = options[0]
    Random(f"{GPQA_SEED} {question}").shuffle(options)
    made = _row(question, "choice", ascii_uppercase[options.index(right)], options)
    return made | {"id": _text(row, ("Record ID",)) or made["id"], "shuffle": False}


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


def _text(row: Mapping[str, Any], fields: Sequence[str]) -> str:
    """Return the first of these fields that is a text and not empty."""
    found = (row.get(field) for field in fields)
    return next((text.strip() for text in found if isinstance(text, str) and text.strip()), "")


def _answer(row: Mapping[str, Any]) -> str:
    answer = _text(row, _ANSWERS) or _final_answer(_text(row, _SOLUTIONS))
    try:
        answer = last_boxed(answer)
    except NoAnswerError:
        answer = answer.strip()
        if answer.count("$") == 2:
            answer = answer.removeprefix("$").removesuffix("$").strip() if answer[0] == answer[-1] == "$" else answer
    if not answer:
        raise UnusableRowError("the solution names no final answer")
    if len(answer) > MAX_ANSWER_LENGTH or "\n" in answer:
        raise UnusableRowError("a long answer: no rule can compare it")
    return answer


def _final_answer(solution: str) -> str:
    """Return the solution itself where it has a box, else the answer that its last line names."""
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
    """Return the kind of row that can compare an answer: ``text`` only for a term or words.

    Raises:
        UnusableRowError: nothing can read it, and it is no short text.
    """
    bare = strip_fonts(answer)
    if _ELECTRONS.fullmatch(bare):
        return "text"
    if _is_quantity(answer):
        return "numeric"
    if text_answers.is_term(answer) or _HYBRID.fullmatch(answer) or _NAMED_COMPOUND.fullmatch(bare):
        return "text"
    words = _WORDS.findall(re.sub(r"\\[a-zA-Z]+", " ", bare))
    if len(words) > MAX_ANSWER_WORDS:
        raise UnusableRowError("a long answer: no rule can compare it")
    in_words = bool(words) and _OPERATORS.search(GREEK_COMMAND.sub(" ", bare)) is None
    if in_words and _FREE_NUMBER.search(bare) is None:
        return "text"
    respelt = simplify_gold(answer)
    if not _FROM_TO.search(bare) and unreadable_reason(separate_symbols(respelt)) is None:
        return "expression"
    why = unreadable_reason(respelt) or UNREADABLE
    if _FROM_TO.search(bare) or (why == UNREADABLE and _RANGE.search(bare)):
        raise UnusableRowError("the answer is a range: no rule can compare it")
    if in_words and len(words) > 1 and why == UNREADABLE:
        return "text"  # step 2 of glycolysis
    raise UnusableRowError(why)


def _is_quantity(answer: str) -> bool:
    r"""Whether an answer is a number with a unit, not a formula: in ``\\frac{1}{2}kA^2`` letters are variables."""
    try:
        found = parse_quantity(answer)
    except UnreadableQuantityError:
        return False
    if "=" in strip_own_name(strip_fonts(answer)):
        return False  # an equation, not a value with its name
    computed = _COMPUTED.search(answer) is not None
    if computed and (found[0].spread or (found[0].unit.is_given and not _SET_UPRIGHT.search(answer))):
        return False
    return found[0].spread <= MAX_SPREAD and (any(map(str.isdigit, answer)) or not found[0].label)


CONVERTERS = (
    Converter("gpqa", has_fields("Question", *_GPQA_OPTIONS), _gpqa, StemRow, "stem"),
    Converter(
        "choices",
        lambda row: "question" in row and ("options" in row or "choices" in row),
        _choices,
        StemRow,
        "stem",
    ),
    Converter(
        "scp",
        lambda row: "problem" in row and any(field in row for field in (*_ANSWERS, *_SOLUTIONS)),
        _scp,
        StemRow,
        "stem",
    ),
)
