"""Which controls a row has: what was proven with the gold patch, stored in the row or kept by the service.

Offsets count characters of the hidden test file as the row has it.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Runner = Literal["own", "pytest"]
PROCESSES = 10
"""Of run C."""
Offset = Annotated[int, Field(ge=0)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Edit(_Model):
    """Replaces one stretch of a test file. With it the test must fail on the right repair."""

    start: Offset
    end: Offset
    text: str

    def apply(self, source: str) -> str:
        """Return the source with this edit made."""
        return source[: self.start] + self.text + source[self.end :]


class Seal(_Model):
    """A comparison with a literal: the literal leaves the file, the value is emitted and compared by the judge."""

    start: Offset
    """Of what is replaced: the whole assertion."""
    end: Offset
    value_start: Offset
    """Of the expression whose value is emitted."""
    value_end: Offset
    expected: str
    """Source of the literal."""
    blanks: tuple[tuple[Offset, Offset], ...] = ()
    """Where the literal stands when a name is written in the assertion."""
    each: bool = False
    """``expected`` is a list that has one value for each time that the site is reached, in order."""
    contains: bool = False
    """``expected`` must be in the value; otherwise it must equal it."""


class TestFunction(_Model):
    """A test function and what was proven about it."""

    path: str
    """Of its file, below the working directory."""
    name: str
    """By which it is run, without a parameter: ``test_one``, ``TestGroup::test_two``."""
    defined: str
    """Where it is written in the file; another class than in ``name`` when the test is inherited."""
    runner: Runner = "pytest"
    """What calls it when it runs alone: the minimal runner of ours, or pytest."""
    variants: tuple[Edit, ...] = ()
    """Controls: each changes one place of the function; where several do it in one place, each in another way."""
    beside: bool = False
    """Whether its controls also fail in a file that holds originals and controls side by side."""
    alone: bool = False
    """Of other tests than those of ``fail_to_pass``: whether it passes alone and its controls fail there."""
    seals: tuple[Seal, ...] = ()

    __test__ = False


class ControlPlan(_Model):
    """Controls of a row."""

    functions: tuple[TestFunction, ...] = ()
    """Test functions of ``fail_to_pass``, those without any control among them."""
    others: tuple[TestFunction, ...] = ()
    """A sample of the other test functions that have a control, half of them from the same files where it can be."""
    absent: tuple[str, ...] = ()
    """Hidden test files that are removed when one function runs alone."""
    texts: Mapping[str, str] = {}
    """Text of the test files that the row brings as a patch or does not bring."""
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
    def twins(self) -> tuple[TestFunction, ...]:
        """Functions whose controls may run beside originals."""
        return tuple(each for each in (*self.functions, *self.others) if each.beside and each.variants)

    @property
    def bystanders(self) -> tuple[TestFunction, ...]:
        """Other functions that may run alone."""
        return tuple(each for each in self.others if each.alone and each.variants)

    @property
    def is_checking(self) -> bool:
        """Whether any function of ``fail_to_pass`` has a control or a sealed value."""
        return bool(self.controlled or self.sealed)

    @property
    def uncovered(self) -> tuple[str, ...]:
        """What of ``fail_to_pass`` has neither."""
        bare = [f"{each.path}::{each.name}" for each in self.functions if not each.variants and not each.seals]
        return (*bare, *self.unknown)

    @property
    def total(self) -> int:
        """How many test functions ``fail_to_pass`` names."""
        return len(self.functions) + len(self.unknown)
