"""What the documentation says about the routes is what the code does."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import EnumType
from typing import Any, Literal, get_args, get_origin

import pytest
from page_scripts import load_script
from pydantic import BaseModel

from prorl_gym.client import wire_models
from prorl_gym.records import SCHEMA_VERSION


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("api_page")


def test_the_page_names_the_version_of_records(script: Any) -> None:
    assert f"`schema_version`, now {SCHEMA_VERSION}." in script.HEAD


def closed_lists(annotation: Any, seen: set[Any]) -> Iterator[tuple[str, ...]]:
    """Yield the words of every literal and enumeration in a type, in its fields and in theirs."""
    if isinstance(annotation, EnumType):
        yield tuple(annotation)
    elif get_origin(annotation) is Literal:
        yield tuple(one for one in get_args(annotation) if isinstance(one, str))
    elif isinstance(annotation, type) and annotation not in seen:
        seen.add(annotation)
        if issubclass(annotation, BaseModel):
            inner = [field.annotation for field in annotation.model_fields.values()]
        else:
            inner = [field.type for field in fields(annotation)] if is_dataclass(annotation) else []
        for one in inner:
            yield from closed_lists(one, seen)
    for one in get_args(annotation):
        yield from closed_lists(one, seen)


def test_every_closed_list_of_words_is_in_the_document_and_on_the_page(script: Any) -> None:
    seen: set[Any] = set()
    models = [
        one for one in vars(wire_models).values() if isinstance(one, type) and one.__module__ == wire_models.__name__
    ]
    expected = {found for model in models for found in closed_lists(model, seen) if found}
    assert len(expected) > 10
    document = script.document()
    schemas = document["components"]["schemas"]
    listed = {
        found
        for schema in schemas.values()
        for field in schema.get("properties", {}).values()
        if (found := script.words_of(field, schemas))
    }
    assert expected <= listed
    page = script.PAGE.read_text(encoding="utf-8")
    for found in listed:
        assert f"|{', '.join(f'`{word}`' if word else 'empty' for word in found)}|" in page
