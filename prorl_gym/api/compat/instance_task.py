"""An ``instance`` of the published server as a task of one of our environments.

Its instances are rows of verl's datasets: ``prompt``, ``reward_model.ground_truth``, ``extra_info``. An instance that
has our own row under ``task`` is used as it is.

Hidden tests of programs come in three forms, as an object or as its JSON text: ``{"inputs", "outputs", "fn_name"?}``
(TACO, APPS); a list of ``{"input", "output", "testtype"?, "metadata"?}`` (LiveCodeBench, Codeforces); a list of
``{"type", "fn_name"?, "input", "output"}`` (PrimeIntellect).
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from prorl_gym.api.http.error_responses import ApiError
from prorl_gym.errors import FailureKind, TaskError

DATA_SOURCES: Mapping[str, str] = {
    "deepscaler": "math",
    "deepcoder*": "code",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "livecodebench": "code",
    "swebench": "swe",
    "r2egym": "swe",
    "swegym": "swe",
    "scp116k": "stem",
    "stem": "stem",
}
"""Environment by ``data_source``; a ``*`` at the end matches any suffix."""

_NOT_TASK = frozenset({"data_source", "trajectory_id"})

_FUNCTION_WORDS = frozenset({"functional", "function_call"})


def resolve_environment(data_source: str, configured: Mapping[str, str]) -> str:
    """Return the environment of a data source: an exact name before a pattern, what is configured before the rest.

    Raises:
        ApiError: 400, it is in no table.
    """
    for table in (configured, DATA_SOURCES):
        if data_source in table:
            return table[data_source]
        patterns = [name for name in table if name.endswith("*") and data_source.startswith(name[:-1])]
        if patterns:
            return table[max(patterns, key=len)]
    known = ", ".join(sorted({*configured, *DATA_SOURCES}))
    raise ApiError(
        400,
        f"data_source '{data_source[:80]}' has no environment here.",
        f"Name one in http.compat.data_sources of the configuration. Known: {known[:800]}.",
    )


def convert_instance(environment: str, instance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row that the environment reads; its own ``parse`` judges it.

    Raises:
        TaskError: ``BAD_ROW``, the instance lacks what the row needs.
    """
    own = instance.get("task")
    if isinstance(own, Mapping):
        return dict(cast(Mapping[str, Any], own))
    convert = _CONVERTERS.get(environment)
    if convert is None:
        return {key: value for key, value in instance.items() if key not in _NOT_TASK}
    return convert(instance)


def _math_task(instance: Mapping[str, Any]) -> dict[str, Any]:
    gold = _ground_truth(instance)
    if isinstance(gold, list) and len(cast(list[Any], gold)) == 1:
        gold = cast(list[Any], gold)[0]
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        raise _bad_row(instance, "reward_model.ground_truth is no single answer", "Give one text or number.")
    return {"id": _instance_id(instance), "question": _question(instance), "answer": _format_scalar(gold)}


def _code_task(instance: Mapping[str, Any]) -> dict[str, Any]:
    question = _question(instance)
    try:
        tests = _convert_hidden_tests(_ground_truth(instance), question)
    except ValueError as error:
        raise _bad_row(
            instance, f"reward_model.ground_truth holds no tests ({error})", "See docs/migration.md."
        ) from None
    return {"id": _instance_id(instance), "question": question, "tests": tests}


_CONVERTERS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"math": _math_task, "code": _code_task}


def _question(instance: Mapping[str, Any]) -> str:
    """Return what the user asks. System messages are left out: the environment has its own, which names its tools."""
    prompt = instance.get("prompt")
    if isinstance(prompt, list):
        spoken = [_user_text(message) for message in cast(list[Any], prompt)]
        prompt = "\n\n".join(text for text in spoken if text)
    found = next((text for text in (prompt, instance.get("question"), instance.get("problem")) if text), None)
    if not isinstance(found, str):
        raise _bad_row(instance, "prompt holds no text of the user", "Give messages with role and content, or a text.")
    return found


def _user_text(message: object) -> str:
    """Return the text of a message of the user; of a list of parts, the texts among them."""
    if not isinstance(message, Mapping):
        return ""
    fields = cast(Mapping[str, Any], message)
    content = fields.get("content")
    if fields.get("role") != "user":
        return ""
    if isinstance(content, list):
        parts = [cast(Mapping[str, Any], part) for part in cast(list[Any], content) if isinstance(part, Mapping)]
        content = "\n".join(text for part in parts if isinstance(text := part.get("text"), str))
    return content if isinstance(content, str) else ""


def _ground_truth(instance: Mapping[str, Any]) -> Any:
    model = instance.get("reward_model")
    if isinstance(model, Mapping):
        return cast(Mapping[str, Any], model).get("ground_truth")
    return instance.get("ground_truth", instance.get("answer"))


def _instance_id(instance: Mapping[str, Any]) -> str:
    extra = instance.get("extra_info")
    index = cast(Mapping[str, Any], extra).get("index") if isinstance(extra, Mapping) else None
    name = instance.get("instance_id", index)
    return _format_scalar(name)[:200] if isinstance(name, str | int) else ""


def _format_scalar(value: str | float) -> str:
    """Spell a value. Python refuses to spell an integer of thousands of digits, which is no answer."""
    return value if isinstance(value, str) else f"{value:.17g}" if isinstance(value, float) else _format_integer(value)


def _format_integer(value: int) -> str:
    return str(value) if value.bit_length() <= 4096 else ""


def _bad_row(instance: Mapping[str, Any], what: str, fix: str) -> TaskError:
    return TaskError(FailureKind.BAD_ROW, f"instance {_instance_id(instance) or 'without id'}: {what}.", fix)


def _convert_hidden_tests(ground_truth: Any, question: str) -> dict[str, Any]:
    """Return hidden tests as ``tests`` of a row of the ``code`` environment.

    Args:
        ground_truth: ``reward_model.ground_truth``.
        question: a task that shows ``class Solution`` is tested on that class.

    Raises:
        ValueError: it has none of the forms.
    """
    if isinstance(ground_truth, str):
        ground_truth = _parse_json(ground_truth, "it is no JSON")
    if isinstance(ground_truth, Mapping):
        return _from_columns(cast(Mapping[str, Any], ground_truth), question)
    if isinstance(ground_truth, list) and ground_truth:
        cases = cast(list[Any], ground_truth)
        if all(isinstance(case, Mapping) for case in cases):
            return _from_cases(cast(list[Mapping[str, Any]], cases), question)
    raise ValueError("it is neither an object nor a list of cases")


def _from_columns(truth: Mapping[str, Any], question: str) -> dict[str, Any]:
    inputs, outputs = truth.get("inputs"), truth.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("'inputs' and 'outputs' must be lists")
    pairs = list(zip(cast(list[Any], inputs), cast(list[Any], outputs), strict=False))
    if not pairs or len(cast(list[Any], inputs)) != len(cast(list[Any], outputs)):
        raise ValueError("'inputs' and 'outputs' are empty or of different lengths")
    if truth.get("fn_name"):
        # The expected value is often wrapped into a list of one.
        cases = [(given, _unwrap_singleton(expected)) for given, expected in pairs]
        return _function_tests(truth["fn_name"], cases, question)
    return _stdio_tests(pairs)


def _from_cases(cases: list[Mapping[str, Any]], question: str) -> dict[str, Any]:
    kinds = {case.get("testtype", case.get("type")) in _FUNCTION_WORDS for case in cases}
    if len(kinds) != 1:
        raise ValueError("its cases are of different kinds")
    if not kinds.pop():
        return _stdio_tests([(case.get("input", ""), case.get("output")) for case in cases])
    first = cases[0]
    metadata = first.get("metadata")
    name = first.get("fn_name") or (
        cast(Mapping[str, Any], metadata).get("func_name") if isinstance(metadata, Mapping) else None
    )
    if first.get("type") in _FUNCTION_WORDS:
        return _function_tests(
            name, [(case.get("input"), _unwrap_singleton(case.get("output"))) for case in cases], question
        )
    return _function_tests(
        name, [(_parse_arguments(case.get("input")), _parse_value(case.get("output"))) for case in cases], question
    )


def _stdio_tests(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    cases = [{"stdin": _join_lines(given), "stdout": _join_lines(expected)} for given, expected in pairs]
    return {"kind": "stdio", "cases": cases}


def _function_tests(name: Any, pairs: list[tuple[Any, Any]], question: str) -> dict[str, Any]:
    if not isinstance(name, str):
        raise ValueError("it does not name the function")
    cases: list[dict[str, Any]] = []
    for given, expected in pairs:
        if not isinstance(given, list):
            raise ValueError("the arguments of a call must be a list")
        cases.append({"args": cast(list[Any], given), "expected": expected})
    entry = f"Solution.{name}" if "class Solution" in question and "." not in name else name
    return {"kind": "function", "entry": entry, "cases": cases}


def _join_lines(text: Any) -> str:
    """Return text as a program reads or prints it; some rows have it as a list of lines."""
    if isinstance(text, list) and all(isinstance(line, str) for line in cast(list[Any], text)):
        return "\n".join(cast(list[str], text))
    if not isinstance(text, str):
        raise ValueError("'input' and 'output' of a case must be texts")
    return text


def _parse_arguments(text: Any) -> list[Any]:
    """Return arguments, each on a line of its own, in JSON."""
    return [_parse_json(line, "an argument is no JSON") for line in _join_lines(text).split("\n") if line.strip()]


def _parse_value(text: Any) -> Any:
    return _parse_json(_join_lines(text), "an expected value is no JSON")


def _unwrap_singleton(expected: Any) -> Any:
    if not isinstance(expected, list):
        return expected
    whole = cast(list[Any], expected)
    return whole[0] if len(whole) == 1 else whole


def _parse_json(text: str, complaint: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(complaint) from None
