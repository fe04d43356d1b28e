"""The configuration loader: typed, strict, and helpful about misspelt keys.

Each package defines its own model; ``api``, ``cli`` and ``gym_root`` compose them. This module only reads a model and
reports its errors.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from prorl_gym.errors import ConfigError
from prorl_gym.logs import redact


class ConfigModel(BaseModel):
    """Base of every configuration model: unknown keys are refused, values cannot be changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


Model = TypeVar("Model", bound=BaseModel)


def load_config(model: type[Model], source: Path | Mapping[str, Any], source_name: str = "") -> Model:
    """Read a configuration from a YAML file or a mapping, which messages call ``source_name``.

    Raises ``ConfigError``: the file is missing or not YAML, a key is unknown (the nearest valid one is named), or a
    value does not fit.
    """
    if isinstance(source, Path):
        source_name, data = source_name or str(source), _read_yaml(source)
    else:
        source_name, data = source_name or "the configuration", source
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise config_error_of(error, model, source_name) from None


def _read_yaml(path: Path) -> Mapping[str, Any]:
    import yaml  # not needed by the client and the trainers, which run where only pydantic and aiohttp are

    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).", "Check the path.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({error}).", "Check indentation and quotes there.") from None
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected keys and values, found {type(data).__name__}.")
    return data  # pyright: ignore[reportUnknownVariableType]


def config_error_of(error: ValidationError, model: type[BaseModel], source_name: str) -> ConfigError:
    """Turn pydantic's report into one message of at most two lines about the first fault."""
    # An unknown key first: it is often the misspelling of the one that is missing.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"]]
    key = ".".join(path) or "(top level)"
    known = _model_at(model, path[:-1]).model_fields
    if first["type"] == "extra_forbidden":
        close = get_close_matches(path[-1], sorted(known), n=1)
        fix = f"Did you mean '{close[0]}'?" if close else f"Valid keys here: {', '.join(sorted(known))}."
        return ConfigError(f"{source_name}: unknown key '{key}'.", fix)
    if first["type"] == "missing":
        described = known[path[-1]].description if path[-1] in known else None
        fix = f"Add it: {described}" if described else "Add it."
        return ConfigError(f"{source_name}: required key '{key}' is missing.", fix)
    reason = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    found = first.get("input")
    return ConfigError(
        f"{source_name}: '{key}' is wrong: {reason}.",
        f"Found {'nothing' if found is None else redact(repr(found))}."[:200],
    )


def _model_at(model: type[BaseModel], path: list[str]) -> type[BaseModel]:
    """Return the model below ``path``; walks nested models, ignoring list positions and dictionary keys."""
    for part in path:
        field = model.model_fields.get(part)
        if field is not None:
            model = _model_in(field.annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Find the model in an annotation such as ``list[Model] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(cast(Any, annotation)))), None)
