"""Write ``docs/configuration.md`` out of the configuration models: ``python scripts/configuration_page.py``.

The page is committed; a test compares it with what this prints.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from prorl_gym.api.config import ServiceConfig

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration of the service

The keys of `prorl-gym serve --config FILE`, and of NeMo Gym's `+prorl_service.KEY=VALUE`, written by
`scripts/configuration_page.py` from the models in the code. The smallest file is in
[First steps](get-started.md#a-service). Unknown keys are refused; the error names the nearest valid one.

Sampling and limits (`settings`) have one precedence: request > environment > run (`runs.<run id>`) > service.
"""


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside an annotation such as ``Model | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := model_in(part))), None)


def default_of(field: FieldInfo) -> str:
    """Return the default as a reader of YAML would write it."""
    if field.is_required():
        return "**required**"
    if field.default is PydanticUndefined:
        return ""
    value = field.default
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def text_of(field: FieldInfo) -> str:
    """Return the first sentences that a field says about itself, on one line: up to 150 characters, at least one."""
    first, *others = re.split(r"(?<=\.) (?=[A-Z`])", " ".join((field.description or "").split()).replace("``", "`"))
    for one in others:
        if len(f"{first} {one}") > 150:
            break
        first = f"{first} {one}"
    return first


def title_of(path: str) -> str:
    """Return the heading of a model's keys."""
    return f"`{path.rstrip('.')}`" if path else "Top level"


def sections(
    model: type[BaseModel], seen: dict[type[BaseModel], str], path: str = "", about: str = ""
) -> Iterator[str]:
    """Yield one table per model, the outer one first, with what its own field says above it; each model once."""
    inner: list[tuple[str, FieldInfo, type[BaseModel]]] = []
    rows: list[str] = []
    for name, field in model.model_fields.items():
        found = model_in(field.annotation)
        if found is not None and name != "runs":
            inner.append((f"{path}{name}.", field, found))
            continue
        text = text_of(field).replace("|", "\\|")
        rows.append(f"|`{name}`|{default_of(field)}|{text}|")
    if rows and model in seen:
        yield f"\n## {title_of(path)}\n\n{about}The keys of {seen[model]}.\n"
        return
    seen[model] = title_of(path)
    if rows:
        yield f"\n## {title_of(path)}\n\n{about}|key|default|meaning|\n|---|---|---|\n" + "\n".join(rows) + "\n"
    for below, field, found in inner:
        yield from sections(found, seen, below, f"{text_of(field)}\n\n" if field.description else "")


def page() -> str:
    """Return the whole page."""
    return HEAD + "".join(sections(ServiceConfig, {}))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
