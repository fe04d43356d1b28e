"""Rows of the ``code`` environment."""

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from prorl_gym.environments.row_format import StrictModel, TaskRow

Shape = Literal["value", "linked list", "tree", "literal"]
"""How a JSON value is handed over: as it is; as a ``ListNode`` made of an array; as a ``TreeNode`` made of an array
in level order with nulls for missing children; as the value of a Python literal, given as text."""


class StdioCase(StrictModel):
    """A program reads ``stdin`` and must print ``stdout``."""

    stdin: str = ""
    stdout: str

    @field_validator("stdin", "stdout")
    @classmethod
    def _has_bytes(cls, text: str) -> str:
        text.encode()  # half of a surrogate pair has none: a ``ValueError``
        return text


class StdioTests(StrictModel):
    """Hidden tests of a whole program."""

    kind: Literal["stdio"]
    cases: Annotated[tuple[StdioCase, ...], Field(min_length=1)]
    compare: Literal["lines", "tokens", "exact"] = "lines"
    """``lines``: white space at the end of lines and empty lines at the end do not count. ``tokens``: no white space
    counts. In both a number that is expected with a point or an exponent may differ by 1e-6. ``exact``: every byte
    counts, but a missing or additional line feed at the very end."""


class FunctionCase(StrictModel):
    """``entry(*args)`` must return ``expected``."""

    args: list[Any]
    expected: Any


class FunctionTests(StrictModel):
    """Hidden tests of a function."""

    kind: Literal["function"]
    entry: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)?$")]
    """Name of a function, or ``Class.method``; the class is made without arguments."""
    result: Annotated[str, Field(pattern=r"^(return|argument \d)$")] = "return"
    """Value that is compared: the one that the function returns, or ``argument 0`` (and so on) after the call, for
    functions that work in place."""
    args_as: tuple[Shape, ...] = ()
    """Shape of each argument; those that are not named are plain values."""
    result_as: Shape = "value"
    unwrap: bool = False
    """An expected list of one element also stands for the element: data sets that wrap results do not always."""
    cases: Annotated[tuple[FunctionCase, ...], Field(min_length=1)]


class ScriptCase(StrictModel):
    """A script must end without an exception."""

    script: str


class ScriptTests(StrictModel):
    """Hidden tests of a function by scripts of assertions. Its arguments and results must be Python literals."""

    kind: Literal["script"]
    entry: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
    """Name of the function, which the scripts call."""
    setup: str = ""
    """What precedes each script."""
    cases: Annotated[tuple[ScriptCase, ...], Field(min_length=1)]


MAX_UNPACKED_TESTS = 256 << 20
"""Bytes of the JSON of packed tests."""


def pack_tests(tests: Mapping[str, Any]) -> dict[str, str]:
    """Return tests in their packed form: those of some public tasks are hundreds of megabytes of digits."""
    return {"packed": base64.b64encode(zlib.compress(json.dumps(tests).encode())).decode()}


class CodeRow(TaskRow):
    """A programming task."""

    tests: Annotated[StdioTests | FunctionTests | ScriptTests, Field(discriminator="kind")]
    """Hidden tests, or ``{"packed": ...}``: their JSON, compressed by zlib, in base64. The expected results never leave
    the service's side."""
    checker: str = ""
    """Python source with ``check(input, expected, output) -> bool``, for tasks with several right answers; it takes the
    place of the comparison. For functions it gets the arguments, the expected value and the result."""
    partial: bool = False
    """The reward is the share of the tests that pass, not all or nothing."""
    time_limit: Annotated[float, Field(gt=0, le=600)] = 4.0
    """CPU seconds for one test, rounded up."""
    memory_limit: Annotated[int, Field(ge=64 << 20)] = 512 << 20
    """Bytes of memory that a process touches, the interpreter's own included."""
    runner: Literal["plain", "livecodebench"] = "plain"
    """``livecodebench``: Python begins with the imports and limits of LiveCodeBench's runner
    (lcb_runner/evaluation/testing_util.py), and outputs and results are compared as there: lines without white space
    around them, or else their words as decimals; results with ``==``. ``compare`` does not count."""
    language: Literal["python", "cpp"] = "python"
    """``cpp``: C++17; the grading image must have g++ as well as python3."""
    starter_code: str = ""
    """Code that the program has to begin with; part of the prompt."""
    solution: str = ""
    """A program that passes; used as the gold answer where there are no ``gold_steps``."""

    @field_validator("tests", mode="before")
    @classmethod
    def _unpack(cls, tests: Any) -> Any:
        fields: Mapping[str, Any] = cast(Mapping[str, Any], tests) if isinstance(tests, Mapping) else {}
        if set(fields) != {"packed"}:
            return cast(Any, tests)
        unpacker = zlib.decompressobj()
        try:
            data = unpacker.decompress(base64.b64decode(fields["packed"], validate=True), MAX_UNPACKED_TESTS)
            if not unpacker.unconsumed_tail:
                return json.loads(data)
        except (zlib.error, ValueError, TypeError, RecursionError):
            raise ValueError("packed tests must be base64 of compressed JSON") from None
        raise ValueError(f"packed tests may hold {MAX_UNPACKED_TESTS} bytes")

    @model_validator(mode="after")
    def _functions_are_python(self) -> "CodeRow":
        if self.language == "cpp" and not isinstance(self.tests, StdioTests):
            raise ValueError(f"tests of kind '{self.tests.kind}' call Python; use kind 'stdio' with language 'cpp'")
        if self.checker and isinstance(self.tests, ScriptTests):
            raise ValueError("tests of kind 'script' have no results that a checker could compare")
        return self
