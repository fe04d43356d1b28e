"""Conversion of public data sets to our rows: a converter for each format, found by the name of the environment.

``CONVERTERS`` of a module has them by environment, the most particular first. ``prorl-gym prepare`` applies the first
one that matches a row (``pipeline``). Each names its source and the columns it reads; of the others only those that
change neither question nor answer may be left out. Converters read no files and start nothing.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
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


METADATA = re.compile(
    r"(?:(?:problem|question|task|doc|original|source|dataset|sample|row)_)?(?:id|idx|index)|uu?id|unique_id"
    r"|source|src|data_source|dataset|url|link|license|split|date|year|author|lang|language|competition|contest"
    r"|ability|subject|(?:sub)?(?:field|domain|topic|category)|discipline|tags?|(?:problem_|question_)?type|level|difficulty"
    r"|is_calculation|question_concept|meta_info|metamap_phrases|synthetic|solutions?|explanation|rationale|cot_content"
)
"""Columns about the origin, kind and solution of a row, which change neither question nor answer."""


LEFT_OUT = "left_out"
"""Key of a converted row for what the converter took out of its question; ``convert_rows`` counts and removes it."""


_FORM_REQUEST = "a request for another form of the answer"


class UnusableRowError(Exception):
    """A row of a data set makes no row of ours.

    The message says why in a few fixed words without values of the row: rows are counted by it.
    """


@dataclass(frozen=True, slots=True)
class Converter:
    """Turns rows of one public format into rows of one environment."""

    name: str
    """As ``--format`` names it, for example ``swebench``."""
    source: str
    """Whose format it is, and where that is defined."""
    fields: Collection[str]
    """Columns that ``read`` sees."""
    matches: Callable[[Mapping[str, Any]], bool]
    """Whether a row has the fields of this format; decides when no format is named."""
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Returns the row as the environment reads it, its ``id`` set. Raises ``UnusableRowError``."""
    metadata: re.Pattern[str] = METADATA
    """Names of the columns that are left out because they cannot matter."""
    row_model: type[BaseModel] | None = None
    """Checks what ``read`` returns."""
    environment: str = ""
    """Name of the environment whose rows ``row_model`` describes."""

    def convert(self, row: Mapping[str, Any]) -> Mapping[str, Any] | str:
        """Return our row, or why it cannot be used: one bad row must not end the conversion of a file.

        A column that is neither read nor metadata makes a row unusable unless it is empty there.
        """
        other = self.unread_fields(row)
        if unknown := next((name for name in other if not self.metadata.fullmatch(name)), None):
            return f"'{self.name}' has no field '{unknown[:40]}'; where it cannot matter, give --leave-out"
        try:
            made = self.read({name: row[name] for name in self.fields if name in row})
            if self.row_model is not None:
                self.row_model.model_validate({name: value for name, value in made.items() if name != LEFT_OUT})
        except UnusableRowError as why:
            return str(why)
        except ValidationError:
            return f"not a row of the {self.environment} environment"
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError):
            return "a field is missing or malformed"
        return made

    def unread_fields(self, row: Mapping[str, Any]) -> list[str]:
        """Return the columns of a row that hold something and are not read."""
        return [name for name, value in row.items() if name not in self.fields and value not in (None, "", [], {})]


def question_of_prompt(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a prompt: what the system message says, and the one question.

    Raises ``UnusableRowError`` for a prompt with more turns or with anything but text.
    """
    if isinstance(prompt, str):
        return prompt
    if [message["role"] for message in prompt] not in (["user"], ["system", "user"]):
        raise UnusableRowError("a prompt with more than a system message and a question" if prompt else "no problem")
    others = [value for message in prompt for name, value in message.items() if name not in ("role", "content")]
    if any(others) or not all(isinstance(message["content"], str) for message in prompt):
        raise UnusableRowError("a message that is more than text")
    return "\n\n".join(filter(None, (message["content"].strip() for message in prompt)))


def without_requests(question: str, requests: Sequence[str]) -> tuple[str, dict[str, list[str]]]:
    """Return a question without what a data set says about the form of the answer, and what to add to the row."""
    plain = question
    for request in requests:
        plain = plain.replace(request, "")
    return (question, {}) if plain == question else (plain.strip(), {LEFT_OUT: [_FORM_REQUEST]})


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
