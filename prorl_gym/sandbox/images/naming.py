"""Which image a row of a data set needs: the naming habits of the published collections, or a template of one's own.

Sources: SWE-bench publishes ``swebench/sweb.eval.x86_64.<instance>`` with ``__`` written ``_1776_``; SWE-Gym
``xingyaoww/sweb.eval.x86_64.<instance>`` with ``__`` written ``_s_``; rows of R2E-Gym carry the name itself.
"""

import re
import string
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.images.reference import DOCKER

Row = Mapping[str, Any]
Template = Callable[[Row], str]

_IMAGE_KEYS = ("image", "docker_image", "image_name")
_NESTED = ("instance", "task", "metadata", "verifier_metadata", "extra_info")
_ROW = TypeAdapter(dict[str, Any])


class _Missing(Exception):
    """A row lacks a key. Args: its name."""


def _field(row: Row, name: str) -> str:
    """Return a field of a row, at its top or one level below."""
    for place in (row, *(row.get(nest) for nest in _NESTED)):
        if isinstance(place, Mapping):
            value = cast(Mapping[str, Any], place).get(name)
            if isinstance(value, str) and value:
                return value
    raise _Missing(name)


def _swe_bench(row: Row) -> str:
    return f"swebench/sweb.eval.x86_64.{_field(row, 'instance_id').replace('__', '_1776_').lower()}:latest"


def _swe_gym(row: Row) -> str:
    return f"xingyaoww/sweb.eval.x86_64.{_field(row, 'instance_id').replace('__', '_s_').lower()}:latest"


def _r2e_gym(row: Row) -> str:
    return _field(row, "docker_image")


def _as_written(row: Row) -> str:
    for key in _IMAGE_KEYS:
        try:
            return _field(row, key)
        except _Missing:
            continue
    raise _Missing(" or ".join(_IMAGE_KEYS))


TEMPLATES: dict[str, Template] = {
    "row": _as_written,
    "swe-bench": _swe_bench,
    "swe-gym": _swe_gym,
    "r2e-gym": _r2e_gym,
}


def template_of(name: str) -> Template:
    """Return a naming template by its name, or make one from a pattern such as ``team/{repo}:{commit}``.

    Raises:
        ConfigError: it is neither.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    keys = [key for _, key, _, _ in string.Formatter().parse(name) if key is not None]
    if not keys or not all(re.fullmatch(r"\w+", key) for key in keys):
        raise ConfigError(
            f"--template {name!r} is unknown.", f"Known: {', '.join(TEMPLATES)}, or a pattern like 'team/{{key}}:v1'."
        )
    return lambda row: name.format(**{key: _field(row, key) for key in keys})


def images_of(rows: Path, template: Template) -> list[str]:
    """Return the images that the rows of a JSONL file need, each once, in their order.

    Raises:
        ConfigError: the file or a row cannot be read, or a row lacks what the template needs.
    """
    found: dict[str, None] = {}
    for where, row in _rows(rows):
        try:
            image = template(row)
        except _Missing as missing:
            raise ConfigError(
                f"{where}: the row has no {missing}.", "Choose another --template; see `prorl-gym images sync --help`."
            ) from None
        remote = not image.startswith("/") and "://" not in image
        found[f"{DOCKER}{image}" if remote else image] = None
    return list(found)


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _ROW.validate_json(line)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).", "Check the path.") from None
    except ValidationError:
        raise ConfigError(f"{path}: one of its lines is no JSON object.", "Give one row per line.") from None
