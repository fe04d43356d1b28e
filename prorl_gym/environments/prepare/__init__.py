"""Conversion of public data sets to our rows: a converter for each format, found by the name of the environment.

``CONVERTERS`` of a module are those of one environment, the most particular first. ``prorl-gym prepare`` applies the
first one that matches a row (``pipeline``). Converters read no files and start nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from prorl_gym.errors import ConfigError

_MODULES = {
    "code": "prorl_gym.environments.prepare.code_converters",
    "math": "prorl_gym.environments.prepare.math_converters",
    "stem": "prorl_gym.environments.prepare.stem_converters",
    "swe": "prorl_gym.environments.prepare.swe_converters",
}


@dataclass(frozen=True, slots=True)
class Skipped:
    """Why a row of a data set makes no row of ours."""

    reason: str
    """A few fixed words without values of the row: rows are counted by it."""


class UnusableRowError(Exception):
    """A row of a data set makes no row of ours; the message is the reason that ``Skipped`` gives."""


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

    def convert(self, row: Mapping[str, Any]) -> Mapping[str, Any] | Skipped:
        """Return our row, or why it cannot be used: one bad row must not end the conversion of a file."""
        try:
            made = self.read(row)
            if self.row_model is not None:
                self.row_model.model_validate(made)
        except UnusableRowError as why:
            return Skipped(str(why))
        except ValidationError:
            return Skipped(f"not a row of the {self.environment} environment")
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError):
            return Skipped("a field is missing or malformed")
        return made


def has_fields(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return whether a row has all of these fields, as a function of the row."""
    return lambda row: all(name in row for name in names)


def environment_names() -> list[str]:
    """Return the names of all environments that have converters, sorted."""
    return sorted(_MODULES)


def converters_for(environment: str) -> Sequence[Converter]:
    """Return the converters of an environment, the most particular first.

    Raises:
        ConfigError: it has none.
    """
    if environment not in _MODULES:
        close = get_close_matches(environment, environment_names(), n=1)
        hint = f"Did you mean '{close[0]}'?" if close else f"Known: {', '.join(environment_names())}."
        raise ConfigError(f"There is no converter for an environment '{environment[:80]}'.", hint)
    return cast(Sequence[Converter], import_module(_MODULES[environment]).CONVERTERS)


def select_converters(environment: str, format_name: str) -> Sequence[Converter]:
    """Return the converters to try: the one of this name, or with ``auto`` all of them.

    Raises:
        ConfigError: the environment has no converter of this name.
    """
    known = converters_for(environment)
    if format_name == "auto":
        return known
    chosen = [converter for converter in known if converter.name == format_name]
    if not chosen:
        spelled = ", ".join(["auto", *(converter.name for converter in known)])
        raise ConfigError(f"'{format_name[:80]}' is no format of {environment} rows.", f"Known: {spelled}.")
    return chosen
