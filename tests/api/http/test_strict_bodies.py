"""Bodies are strict: what the OpenAPI document does not allow is refused, and no value is converted into another."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, TypeAdapter, ValidationError

from prorl_gym.api.routes import JsonBody
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

FIGURES = {"tokens": 8, "max_abs_diff": 0.1, "mean_abs_diff": 0.01, "kl": 0.001, "mult_prob_error": 1.01, "zeros": 0}
BATCH = {
    **{"total": FIGURES, "by_version": {"7": FIGURES}},
    **{"by_position": {"turn 1": FIGURES}, "by_engine": {"policy-0": FIGURES}},
}
SETTINGS = {"temperature": 0.5, "max_turns": 3, "mask_overlong": ["turns"]}
SUBMISSION = {
    **{"rollout_id": "a7", "run_id": "step-7", "group_id": "prompt-3", "group_size": 8, "replica": 0},
    **{"environment": "math", "task": {"question": "What is 6 times 7?", "answer": "42"}, "settings": SETTINGS},
}
DEMAND = {"groups": 64, "after": 41, "version": 8, "redundant": {"run": "park", "park_seconds": 5.0}, "replace": 1}
BODIES: list[tuple[type[BaseModel], Any]] = [
    (RolloutSubmission, SUBMISSION),
    (CancelBody, {"runs": ["step-7"], "groups": ["prompt-3"]}),
    (AckBody, {"run": "step-7", "cursor": 41}),
    (PolicyUpdateBody, {"version": 8, "require_pause": True, "engines": ["http://10.0.0.1:8000/v1"]}),
    (PauseBody, {"mode": "abort", "expire_seconds": 600}),
    (ResumeBody, {}),
    (EngineBody, {"url": "http://10.0.0.3:8000/v1"}),
    (MismatchBody, {"version": 8, "mismatch": BATCH}),
    (Demand, DEMAND),
]
TEXTS = ["1", "1.5", "yes", "true", ""]
VALUES: list[Any] = [*TEXTS, 0, 1, 1.5, -1, True, False, None, [], ["1"], [1], [True], {}, {"a": 1}]


def spoiled(body: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The body with each of its fields, also those that it leaves out, set to each value in turn; nested ones too."""
    found: list[dict[str, Any]] = []
    for name in {*body, *schema.get("properties", {})}:
        found += [{**body, name: value} for value in VALUES]
        if isinstance(body.get(name), dict) and name != "task":
            found += [{**body, name: inner} for inner in spoiled(body[name], {})]
    return found


def reader_of(model: type[BaseModel]) -> TypeAdapter[Any]:
    form: Any = JsonBody
    return TypeAdapter(form[model])


@pytest.mark.parametrize(("model", "body"), BODIES, ids=[model.__name__ for model, _ in BODIES])
def test_what_the_schema_does_not_allow_is_refused(model: type[BaseModel], body: dict[str, Any]) -> None:
    adapter = TypeAdapter(model)
    schema = adapter.json_schema()
    validator: Any = Draft202012Validator(schema)
    assert validator.is_valid(body)
    reader = reader_of(model)
    reader.validate_python(json.dumps(body).encode())
    refused = 0
    for other in spoiled(body, schema):
        if not validator.is_valid(other):
            with pytest.raises(ValidationError):
                reader.validate_python(json.dumps(other).encode())
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
    with pytest.raises(ValidationError):
        reader_of(model).validate_python(json.dumps({**body, **change}).encode())
