"""Bodies are strict: what the OpenAPI document does not allow is refused, and no value is converted into another."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, TypeAdapter

from prorl_gym.api import openapi_examples
from prorl_gym.api.http.error_responses import ApiError
from prorl_gym.api.http.json_bodies import parse_json
from prorl_gym.client.wire_models import (
    AckBody,
    CancelBody,
    EngineBody,
    MismatchBody,
    PauseBody,
    PolicyUpdateBody,
    ResumeBody,
    RolloutSubmission,
)
from prorl_gym.demand import Demand

BODIES: list[tuple[type[BaseModel], Any]] = [
    (
        RolloutSubmission,
        openapi_examples.SUBMISSION | {"settings": {"temperature": 0.5, "max_turns": 3, "mask_overlong": ["turns"]}},
    ),
    (CancelBody, openapi_examples.CANCEL),
    (AckBody, openapi_examples.ACK),
    (PolicyUpdateBody, openapi_examples.UPDATE),
    (PauseBody, openapi_examples.PAUSE),
    (ResumeBody, openapi_examples.RESUME),
    (EngineBody, openapi_examples.ENGINE_BODY),
    (MismatchBody, openapi_examples.MISMATCH),
    (Demand, openapi_examples.DEMAND | {"redundant": {"park_seconds": 5.0}, "replace": 1}),
]
VALUES: list[Any] = [
    "1",
    "1.5",
    "yes",
    "true",
    "",
    0,
    1,
    1.5,
    -1,
    True,
    False,
    None,
    [],
    ["1"],
    [1],
    [True],
    {},
    {"a": 1},
]


def spoiled(body: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The body with each of its fields, also those that it leaves out, set to each value in turn; nested ones too."""
    found: list[dict[str, Any]] = []
    for name in {*body, *schema.get("properties", {})}:
        found += [{**body, name: value} for value in VALUES]
        if isinstance(body.get(name), dict) and name != "task":
            found += [{**body, name: inner} for inner in spoiled(body[name], {})]
    return found


@pytest.mark.parametrize(("model", "body"), BODIES, ids=[model.__name__ for model, _ in BODIES])
def test_what_the_schema_does_not_allow_is_refused(model: type[BaseModel], body: dict[str, Any]) -> None:
    adapter = TypeAdapter(model)
    schema = adapter.json_schema()
    validator: Any = Draft202012Validator(schema)
    assert validator.is_valid(body)
    parse_json(json.dumps(body).encode(), adapter)
    refused = 0
    for other in spoiled(body, schema):
        if not validator.is_valid(other):
            with pytest.raises(ApiError) as caught:
                parse_json(json.dumps(other).encode(), adapter)
            assert caught.value.status == 422
            refused += 1
    assert refused > 10


@pytest.mark.parametrize(
    ("model", "change"),
    [
        (AckBody, {"cursor": True}),
        (AckBody, {"cursor": "3"}),
        (RolloutSubmission, {"group_size": "1"}),
        (RolloutSubmission, {"evaluation": "yes"}),
        (RolloutSubmission, {"evaluation": 1}),
        (RolloutSubmission, {"settings": {"temperature": "0.5"}}),
        (Demand, {"replace": True}),
        (PolicyUpdateBody, {"caches_dropped": 1}),
    ],
)
def test_no_value_is_converted(model: type[BaseModel], change: dict[str, Any]) -> None:
    body = next(body for known, body in BODIES if known is model)
    with pytest.raises(ApiError):
        parse_json(json.dumps({**body, **change}).encode(), TypeAdapter(model))
