"""Conversion of public data sets to our rows: a converter for each format, found by the name of the environment.

``CONVERTERS`` of a module has them by environment, the most particular first. ``prorl-gym prepare`` applies the first
one that matches a row (``pipeline``). Converters read no files and start nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from prorl_gym.errors import ConfigError

MODULES = {
    "code": "prorl_gym.data.code_converters",
    "math": "prorl_gym.data.answer_converters",
    "stem": "prorl_gym.data.answer_converters",
    "swe": "prorl_gym.data.code_converters",
}


class UnusableRowError(Exception):
    """A row of a data set makes no row of ours.

    The message says why in a few fixed words without values of the row: rows are counted by it.
    """


@dataclass(frozen=True, slots=True)
class Converter:
    """Turns rows of one public format into rows of one environment."""

    name: str
    """As ``--format`` names it, for example ``swebench``."""
    matches: Callable[[Mapping[str, Any]], bool]
    """Whether a row has the fields of this format; decides when no format is named."""
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Returns the row as the environment reads it, its ``id`` set. Raises ``UnusableRowError``."""
    row_model: type[BaseModel] | None = None
    """Checks what ``read`` returns."""
    environment: str = ""
    """Name of the environment whose rows ``row_model`` describes."""

    def convert(self, row: Mapping[str, Any]) -> Mapping[str, Any] | str:
        """Return our row, or why it cannot be used: one bad row must not end the conversion of a file."""
        try:
            made = self.read(row)
            if self.row_model is not None:
                self.row_model.model_validate(made)
        except UnusableRowError as why:
            return str(why)
        except ValidationError:
            return f"not a row of the {self.environment} environment"
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError):
            return "a field is missing or malformed"
        return made


def has_fields(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return whether a row has all of these fields, as a function of the row."""
    return lambda row: all(name in row for name in names)


def select_converters(environment: str, format_name: str = "auto") -> Sequence[Converter]:
    """Return the converters of an environment to try: the one of this name, or all, the most particular first.

    Raises ``ConfigError`` if the environment has no converter, or none of this name.
    """
    if environment not in MODULES:
        close = get_close_matches(environment, MODULES, n=1)
        hint = f"Did you mean '{close[0]}'?" if close else f"Known: {', '.join(MODULES)}."
        raise ConfigError(f"There is no converter for an environment '{environment[:80]}'.", hint)
    known = cast(Sequence[Converter], import_module(MODULES[environment]).CONVERTERS[environment])
    if format_name == "auto":
        return known
    chosen = [converter for converter in known if converter.name == format_name]
    if not chosen:
        spelled = ", ".join(["auto", *(converter.name for converter in known)])
        raise ConfigError(f"'{format_name[:80]}' is no format of {environment} rows.", f"Known: {spelled}.")
    return chosen
