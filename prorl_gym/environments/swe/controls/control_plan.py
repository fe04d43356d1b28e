"""The controls of a row: proven with the gold patch, stored in the row or cached by the service.

A control is a hidden test with one wrong value, which a right repair fails.

Offsets count characters of the hidden test file as the row has it.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

ControlRunner = Literal["own", "pytest"]
"""Caller of a test function that runs alone: our minimal runner, or pytest."""
MAX_CONTROL_RUNS = 10
"""Processes of run C."""
Offset = Annotated[int, Field(ge=0)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Edit(_Model):
    """Replaces one span of a test file. With it the test must fail on the right repair."""

    start: Offset
    end: Offset
    text: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


class SealedValue(_Model):
    """A comparison with a literal: the literal is removed from the file, the value is emitted and compared outside."""

    start: Offset
    """Start of the whole assertion, which is replaced."""
    end: Offset
    value_start: Offset
    """Start of the expression whose value is emitted."""
    value_end: Offset
    expected: str
    """Source of the literal."""
    blanks: tuple[tuple[Offset, Offset], ...] = ()
    """Spans of the literal when the assertion has a name for it."""
    each: bool = False
    """``expected`` is a list with one value for each time that the assertion is reached, in order."""
    contains: bool = False
    """``expected`` must be in the value; otherwise it must equal it."""


class TestFunction(_Model):
    """A test function and what was proven about it."""

    path: str
    """Path of its file, below the working directory."""
    name: str
    """Name for the runner, without a parameter: ``test_one``, ``TestGroup::test_two``."""
    defined: str
    """Name of its definition in the file; another class than in ``name`` when the test is inherited."""
    runner: ControlRunner = "pytest"
    variants: tuple[Edit, ...] = ()
    """Controls: each changes one place of the function; several at one place differ."""
    beside: bool = False
    """Whether its controls also fail in an interleaved file, which holds originals and controls."""
    alone: bool = False
    """Only for tests that ``fail_to_pass`` does not name: whether it passes alone and its controls fail there."""
    seals: tuple[SealedValue, ...] = ()

    __test__ = False

    @property
    def test_id(self) -> str:
        """Path and name, joined as pytest does."""
        return f"{self.path}::{self.name}"


class ControlPlan(_Model):
    """Controls of a row."""

    functions: tuple[TestFunction, ...] = ()
    """Test functions of ``fail_to_pass``, those without any control among them."""
    others: tuple[TestFunction, ...] = ()
    """A sample of the other test functions that have a control, half of them from the same files where possible."""
    absent: tuple[str, ...] = ()
    """Hidden test files that are removed when one function runs alone."""
    texts: Mapping[str, str] = {}
    """Text of the test files that are not in the row's ``files``."""
    unknown: tuple[str, ...] = ()
    """Names in ``fail_to_pass`` for which no test function was found."""

    @property
    def controlled(self) -> tuple[TestFunction, ...]:
        """Functions of ``fail_to_pass`` that have a control."""
        return tuple(each for each in self.functions if each.variants)

    @property
    def sealed(self) -> tuple[TestFunction, ...]:
        """Functions of ``fail_to_pass`` that have a sealed value."""
        return tuple(each for each in self.functions if each.seals)

    @property
    def interleavable(self) -> tuple[TestFunction, ...]:
        """Functions whose controls may run in a file with their originals."""
        return tuple(each for each in (*self.functions, *self.others) if each.beside and each.variants)

    @property
    def standalone_others(self) -> tuple[TestFunction, ...]:
        """Other functions that may run alone."""
        return tuple(each for each in self.others if each.alone and each.variants)

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Tests of ``fail_to_pass`` with neither."""
        return (*(each.test_id for each in self.functions if not each.variants and not each.seals), *self.unknown)

    @property
    def total(self) -> int:
        """How many test functions ``fail_to_pass`` names."""
        return len(self.functions) + len(self.unknown)
