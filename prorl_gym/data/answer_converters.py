"""Converters of questions with answers: the ``math`` and the ``stem`` environment.

``math``: DeepScaleR and data sets in the same shape. ``stem``: SCP-116K, GPQA, and tables of multiple-choice questions.
Answers that no rule can compare are skipped: grading would call right answers wrong.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from random import Random
from string import ascii_uppercase
from typing import Any, Literal, cast

from prorl_gym.data.converters import Converter, UnusableRowError, has_fields
from prorl_gym.environments.answers import tex
from prorl_gym.environments.answers.tex import NoAnswerError, last_boxed
from prorl_gym.environments.math import answer_text
from prorl_gym.environments.math.answer_forms import WordAnswer
from prorl_gym.environments.math.answer_parser import parse_answer
from prorl_gym.environments.math.environment import MAX_ANSWER, MAX_GOLD_ANSWERS
from prorl_gym.environments.math.expressions import UnreadableExpressionError
from prorl_gym.environments.stem import text_answers
from prorl_gym.environments.stem.environment import StemRow
from prorl_gym.environments.stem.number_parser import UnreadableQuantityError
from prorl_gym.environments.stem.quantity import MAX_SPREAD, parse_quantity
from prorl_gym.environments.stem.text_answers import chosen_option
from prorl_gym.environments.stem.text_normalization import GREEK_COMMAND, separate_symbols, strip_fonts, strip_own_name

# --- math ---------------------------------------------------------------------------------------------------------

MAX_ANSWER_WORDS = 6
"""Most words of an answer in words; a longer one has too many wordings."""

_UNREADABLE = "the answer cannot be read"
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
    answers, solution = _answers(row.get("answer")), row.get("solution")
    if not answers and isinstance(solution, str):
        with suppress(NoAnswerError):
            answers = [last_boxed(solution)]
    return _row(row.get("problem"), answers, row)


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
    named: Any = row.get("id", row.get("unique_id"))
    is_named = isinstance(named, str | int) and not isinstance(named, bool) and str(named)
    return {
        "id": str(named) if is_named else f"math-{sha256(question.strip().encode()).hexdigest()[:16]}",
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
        return next((why for pattern, why in _KINDS_OF_UNREADABLE.items() if pattern.search(text)), _UNREADABLE)
    return None


def _answers(found: Any) -> list[str]:
    """Return the accepted answers, without dollar signs and boxes around them, each once."""
    texts: dict[str, None] = {}
    for item in cast(list[Any], found) if isinstance(found, list) else [found]:
        if isinstance(item, str | int | float) and not isinstance(item, bool):
            text = str(item).strip()
            try:
                texts[last_boxed(text)] = None
            except NoAnswerError:
                texts[text.strip("$").strip()] = None
    return [text for text in texts if text]


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


# --- stem ---------------------------------------------------------------------------------------------------------

MAX_ANSWER_LENGTH = 200
"""Characters of an answer that rules compare."""

GPQA_SEED = 0
"""Seed of the order of GPQA's options, which are published with the right one first."""

_GPQA_OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_ANSWERS = ("answer", "extracted_answer", "final_answer", "reference_answer")
_SOLUTIONS = ("matched_solution", "extracted_solution", "solution")
_OPTION = re.compile(r"^[ \t]*[(\[]?([A-Z])[)\].:][ \t]+(\S.*?)[ \t]*$", re.MULTILINE)
_SAID = re.compile(r"(?:final\s+|correct\s+)?answer\s*(?:is|:)\**\s*:?\s*(.{1,200}?)\s*\**\s*\.?\s*$", re.IGNORECASE)
_ASCII_WORDS = re.compile(r"[A-Za-z]{2,}")
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
    problem, answer = _first_text(row, ("problem",)), _answer(row)
    if not problem:
        raise UnusableRowError("no problem")
    question, options = _split_options(problem)
    if options:
        place = chosen_option(answer, options)
        if place is None:
            raise UnusableRowError("the answer names none of the options")
        return _stem_row(question, "choice", ascii_uppercase[place], options)
    kind = _kind(answer)
    return _stem_row(problem, kind, simplify_gold(answer) if kind == "expression" else answer)


def _choices(row: Mapping[str, Any]) -> dict[str, Any]:
    question = _first_text(row, ("question",))
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
    return _stem_row(question, "choice", ascii_uppercase[place % 26], options)


def _gpqa(row: Mapping[str, Any]) -> dict[str, Any]:
    """Shuffle the options here: ``StemRow.shuffle`` keeps the order of those that refer to others, the right one first.

    A question's order depends on the seed and its text, so it is the same in any selection of rows.
    """
    question, options = _first_text(row, ("Question",)), [_first_text(row, (name,)) for name in _GPQA_OPTIONS]
    if not question or not all(options):
        raise UnusableRowError("no question or no options")
    right = options[0]
    Random(f"{GPQA_SEED} {question}").shuffle(options)
    made = _stem_row(question, "choice", ascii_uppercase[options.index(right)], options)
    return made | {"id": _first_text(row, ("Record ID",)) or made["id"], "shuffle": False}


def _stem_row(
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


def _first_text(row: Mapping[str, Any], fields: Sequence[str]) -> str:
    """Return the first of these fields that is a text and not empty."""
    found = (row.get(field) for field in fields)
    return next((text.strip() for text in found if isinstance(text, str) and text.strip()), "")


def _answer(row: Mapping[str, Any]) -> str:
    answer = _first_text(row, _ANSWERS)
    if not answer:  # the solution itself where it has a box, else the answer that its last line names
        answer = _first_text(row, _SOLUTIONS)
        if "\\boxed" not in answer:
            found = _SAID.search(answer.rpartition("\n")[2])
            answer = found[1] if found else ""
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
    """Return the kind of row that can compare an answer: ``text`` only for a term or words."""
    bare = strip_fonts(answer)
    if _ELECTRONS.fullmatch(bare):
        return "text"
    if _is_quantity(answer):
        return "numeric"
    if text_answers.is_term(answer) or _HYBRID.fullmatch(answer) or _NAMED_COMPOUND.fullmatch(bare):
        return "text"
    words = _ASCII_WORDS.findall(re.sub(r"\\[a-zA-Z]+", " ", bare))
    if len(words) > MAX_ANSWER_WORDS:
        raise UnusableRowError("a long answer: no rule can compare it")
    in_words = bool(words) and _OPERATORS.search(GREEK_COMMAND.sub(" ", bare)) is None
    if in_words and _FREE_NUMBER.search(bare) is None:
        return "text"
    respelt = simplify_gold(answer)
    if not _FROM_TO.search(bare) and unreadable_reason(separate_symbols(respelt)) is None:
        return "expression"
    why = unreadable_reason(respelt) or _UNREADABLE
    if _FROM_TO.search(bare) or (why == _UNREADABLE and _RANGE.search(bare)):
        raise UnusableRowError("the answer is a range: no rule can compare it")
    if in_words and len(words) > 1 and why == _UNREADABLE:
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


CONVERTERS = {
    "math": (
        Converter(
            "deepscaler",
            lambda row: isinstance(row.get("problem"), str) and ("answer" in row or "solution" in row),
            _deepscaler,
        ),
        Converter("verl", has_fields("prompt", "reward_model"), _verl),
    ),
    "stem": (
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
    ),
}
