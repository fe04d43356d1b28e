"""Rows of the ``code`` environment."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from prorl_gym.environments.rows import TaskRow


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class StdioCase(_Strict):
    """A program reads ``stdin`` and must print ``stdout``."""

    stdin: str = ""
    stdout: str


class StdioTests(_Strict):
    """Hidden tests of a whole program."""

    kind: Literal["stdio"]
    cases: Annotated[tuple[StdioCase, ...], Field(min_length=1)]


class FunctionCase(_Strict):
    """``entry(*args)`` must return ``expected``."""

    args: list[Any]
    expected: Any


class FunctionTests(_Strict):
    """Hidden tests of a function."""

    kind: Literal["function"]
    entry: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)?$")]
    """Name of a function, or ``Class.method``; the class is made without arguments."""
    cases: Annotated[tuple[FunctionCase, ...], Field(min_length=1)]


class CodeRow(TaskRow):
    """A programming task."""

    tests: Annotated[StdioTests | FunctionTests, Field(discriminator="kind")]
    """Hidden tests. The expected results never leave the service's side."""
    time_limit: Annotated[float, Field(gt=0, le=600)] = 4.0
    """CPU seconds for one test, rounded up."""
    memory_limit: Annotated[int, Field(ge=64 << 20)] = 512 << 20
    """Address space of the program in bytes, the interpreter's own included."""
    language: Literal["python"] = "python"
    solution: str = ""
    """A program that passes; used as the gold answer where there are no ``gold_steps``."""
