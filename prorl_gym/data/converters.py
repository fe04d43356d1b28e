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
    r"|ability|subject|title|agent_ref|hash_id|(?:sub)?(?:field|domain|topic|category)|discipline|tags?|(?:problem_|question_)?type|level|difficulty"
    r"|is_calculation|question_concept|meta_info|metamap_phrases|synthetic|solutions?|explanation|rationale|cot_content"
)
"""Columns about the origin, kind and solution of a row, which change neither question nor answer."""


FRAME_LEFT_OUT = {"left_out": ["what NeMo Gym's prompt says and offers beside the question"]}

LEFT_OUT = "left_out"
"""Key of a converted row for what the converter took out of its question; ``convert_rows`` counts and removes it."""


_FORM_REQUEST = "a request for another form of the answer"
_GYM_PYTHON_TOOLS = ("stateful_python_code_exec", "execute_python")


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


def user_text(row: Mapping[str, Any]) -> str:
    """Return what the user says in the prompt of one of NeMo Gym's own rows.

    A system message before it and a Python tool are left out: our prompts have their own. Raises ``UnusableRowError``
    for more turns, anything but text, or other tools.
    """
    params = row["responses_create_params"]
    if any(tool.get("name") not in _GYM_PYTHON_TOOLS for tool in params.get("tools") or ()):
        raise UnusableRowError("a row with tools of its own")
    messages = params["input"] if isinstance(params["input"], list) else [{"role": "user", "content": params["input"]}]
    if [message["role"] for message in messages] not in (["user"], ["system", "user"], ["developer", "user"]):
        raise UnusableRowError("a prompt with more than instructions and a question")
    content = messages[-1]["content"]
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    if [part["type"] for part in parts] != ["input_text"]:
        raise UnusableRowError("a message that is more than text")
    return parts[0]["text"]


def refused_format(row: Mapping[str, Any]) -> str | None:
    """Return the name of a format that is known and cannot be read, with the reason."""
    return next((f"{name}: {why}" for name, matches, why in _REFUSED if matches(row)), None)


def without_requests(question: str, requests: Sequence[str]) -> tuple[str, dict[str, list[str]]]:
    """Return a question without what a data set says about the form of the answer, and what to add to the row."""
    plain = question
    for request in requests:
        plain = plain.replace(request, "")
    return (question, {}) if plain == question else (plain.strip(), {LEFT_OUT: [_FORM_REQUEST]})


def has_fields(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return whether a row has all of these fields, as a function of the row."""
    return lambda row: all(name in row for name in names)


_REFUSED: Sequence[tuple[str, Callable[[Mapping[str, Any]], bool], str]] = (
    ("BFCL (bfcl-eval 2026)",
     lambda row: isinstance(row.get("question"), list) and ("function" in row or "involved_classes" in row),
     "its answers are calls of functions, which no environment grades"),
    ("answers of BFCL (bfcl-eval 2026)", lambda row: {*row} - {"source"} == {"id", "ground_truth"},
     "its answers are calls of functions, which no environment grades"),
    ("BigCodeBench (0.2.5)", has_fields("instruct_prompt", "entry_point", "test"),
     "its tests share files, mocks and libraries with the program, which could forge them"),
    ("NeMo Gym (0.7)", has_fields("responses_create_params"), "a server that this environment does not replace"),
)  # fmt: skip
"""Formats that are recognised to be refused: name, whether a row has its fields, and why."""


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
