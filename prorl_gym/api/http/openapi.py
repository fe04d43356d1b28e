"""The OpenAPI document: what FastAPI generates, with the errors, the token, and an example of every body and answer."""

from functools import cached_property
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse

from prorl_gym.api.http.middleware import PUBLIC_PATHS
from prorl_gym.client.wire_models import ErrorResponse

DESCRIPTION = """Rollouts of multi-turn agents as a service.

Submit rollouts, read their records as they finish, set the demand of a run, and report new weights. What was accepted
is on the disk; each accepted id gets exactly one record, even after a crash.

**Stability.** Everything under `/v1` keeps its meaning: routes, fields and the record only grow. Ignore fields that you
do not know. A change that would break a reader gets `/v2`; both are then served for at least one minor release. The
record has a version of its own, `schema_version`.
"""

TAGS = [
    {"name": "rollouts", "description": "Submit, look up, cancel."},
    {"name": "records", "description": "Read records as they finish, and acknowledge them."},
    {"name": "runs", "description": "The demand of a run, and its groups."},
    {"name": "policy", "description": "New weights, pauses, engines."},
    {"name": "service", "description": "Status, metrics and maintenance."},
]

_ERRORS = {
    401: "No token, or a wrong one.",
    403: "Sent by a page of another site, or an engine that is not on the allow-list.",
    404: "Nothing has that name.",
    409: "The request conflicts with the current state.",
    410: "The rollout existed; its record has been deleted.",
    413: "The body is too large.",
    422: "A field or a parameter is wrong.",
    429: "Too much is pending, or the ledger's budget is used up: send it again after the seconds of Retry-After.",
    500: "A defect of the service; see its log.",
    503: "The service is stopping, or its disk failed or is full: send it again after the seconds of Retry-After.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return errors of a route, for FastAPI's ``responses``."""
    return {status: {"model": ErrorResponse, "description": _ERRORS[status]} for status in statuses}


AUTH_ERRORS = errors(401, 403, 500)
"""Errors of every route that needs the token."""


class DescribedApp(FastAPI):
    """An application whose OpenAPI document is complete."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            schemas = document["components"]["schemas"]
            document["components"]["securitySchemes"] = {
                "token": {"type": "http", "scheme": "bearer", "description": "The content of the service's token file."}
            }
            document["security"] = [{"token": []}]
            stream = document["paths"]["/v1/stream"]["get"]["responses"]["200"]["content"]
            stream["application/x-ndjson"]["itemSchema"] = stream.pop("application/json")["schema"]
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    if path in PUBLIC_PATHS:
                        operation["security"] = []
                    for described in (operation.get("requestBody", {}), *operation["responses"].values()):
                        for content in described.get("content", {}).values():
                            if "example" not in content:
                                content["example"] = _example(content["schema"], schemas)
        return super().openapi()

    @cached_property
    def openapi_text(self) -> bytes:
        """The document as JSON: rendering takes milliseconds, and its route needs no token."""
        return bytes(JSONResponse(self.openapi()).body)


def _example(schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    """Return the schema's own example, or one composed of those of its fields."""
    if "examples" in schema:
        return schema["examples"][0]
    if "$ref" in schema:
        return _example(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return next((_example(one, schemas) for one in schema["anyOf"] if _holds_objects(one, schemas)), None)
    match schema.get("type"):
        case "object":
            needed = schema.get("required", ())
            return {
                name: _example(field, schemas)
                for name, field in schema.get("properties", {}).items()
                if name in needed or "examples" in field or _holds_objects(field, schemas)
            }
        case "array":
            return [_example(schema["items"], schemas)] if _holds_objects(schema, schemas) else []
        case "string":
            return ""
        case "boolean":
            return schema.get("const", False)
        case _:
            return 0


def _holds_objects(schema: dict[str, Any], schemas: dict[str, Any]) -> bool:
    if "$ref" in schema:
        return schemas[schema["$ref"].rpartition("/")[2]].get("type") == "object"
    inner = schema.get("anyOf", [schema["items"]] if "items" in schema else [])
    return any(_holds_objects(one, schemas) for one in inner)
