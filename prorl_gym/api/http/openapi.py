"""The OpenAPI document: the declarations of the routes, and the document that FastAPI generates from them.

``json_bodies`` reads the bodies, so FastAPI does not have their models: a route names the schema of its body, and
``install_openapi`` adds it to the document's components.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse, Response

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


_ERRORS: Mapping[int, tuple[str, str, str]] = {
    400: (
        "The request names nothing that this service has.",
        "pool 'judge' is not one of this service.",
        "It has: policy.",
    ),
    401: (
        "No token, or a wrong one.",
        "The bearer token is missing or wrong.",
        "Send the content of the service's token file in the Authorization header, after 'Bearer'.",
    ),
    403: (
        "Sent by a page of another site, or an engine that is not on the allow-list.",
        "Another site's page sent this request.",
        "Open the service's own page.",
    ),
    404: ("Nothing has that name.", "rollout a7 was never accepted.", ""),
    409: (
        "The request conflicts with the current state.",
        "rollout a7 was submitted before with another body.",
        "Send the same body again, or use a fresh rollout_id.",
    ),
    410: (
        "The rollout existed; its record has been deleted.",
        "The record of rollout a7 was acknowledged and is not kept any more.",
        "Raise ledger.keep_days to keep records for longer.",
    ),
    411: ("The body's length differs from its header.", "The Content-Length header is wrong.", ""),
    413: ("The body is too large.", "The body is larger than 67108864 bytes.", "Send fewer rollouts at once."),
    422: (
        "A field or a parameter is wrong.",
        "The field 'task' of the body is wrong: Field required.",
        "See /docs for the form.",
    ),
    429: (
        "Too much is pending, or the ledger's budget is used up: send it again after the seconds of Retry-After.",
        "100000 rollouts are pending already.",
        "Send it again later.",
    ),
    500: (
        "A defect of the service; see its log.",
        "The service is at fault.",
        "Its log has the traceback; please report it.",
    ),
    503: (
        "The service is stopping, or its disk failed or is full: send it again after the seconds of Retry-After.",
        "The service takes no more work.",
        "Submit again when it is back.",
    ),
}
"""Status -> when it is sent, and an example of ``what`` and ``fix``."""

_AUTH_ERRORS = (401, 403, 500)
"""Errors of every route that needs the token."""

_BODY_ERRORS = (413, 422)

_SCHEMA_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class JsonBody:
    """The body that a route reads."""

    model: type[BaseModel]
    example: Any
    is_list_allowed: bool = False
    """Whether a list of bodies is accepted too."""
    is_required: bool = True
    """Whether an empty body is an error."""

    def declare(self) -> dict[str, Any]:
        """Return the ``openapi_extra`` of the route."""
        schema: dict[str, Any] = {"$ref": _SCHEMA_REF.format(model=self.model.__name__)}
        if self.is_list_allowed:
            schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
        content = {"application/json": {"schema": schema, "example": self.example}}
        return {"requestBody": {"required": self.is_required, "content": content}}


def describe(
    tag: str,
    summary: str,
    example: Any,
    *,
    errors: Sequence[int] = (),
    model: type[BaseModel] | None = None,
    description: str = "Done.",
    body: JsonBody | None = None,
    media_type: str = "application/json",
    lines_of: Sequence[type[BaseModel]] = (),
    is_public: bool = False,
) -> dict[str, Any]:
    """Return what a route declares, as arguments of FastAPI's decorator.

    Args:
        tag: part of the document.
        summary: one line.
        example: of the answer.
        errors: further statuses of the route, beside those of the token and the body.
        model: of a JSON answer.
        description: of the answer.
        body: body of the request.
        media_type: of the answer.
        lines_of: models of the lines, if the answer is a stream of lines.
        is_public: whether it needs no token.
    """
    statuses = {*errors, *(() if is_public else _AUTH_ERRORS), *(() if body is None else _BODY_ERRORS)}
    content: dict[str, Any] = {"example": example}
    if lines_of:
        content["itemSchema"] = {"anyOf": [{"$ref": _SCHEMA_REF.format(model=one.__name__)} for one in lines_of]}
    elif media_type.startswith("text/"):
        content["schema"] = {"type": "string"}
    return {
        "tags": [tag],
        "summary": summary,
        "response_model": model,
        "responses": {
            200: {"description": description, "content": {media_type: content}},
            **{status: _error_response(status) for status in sorted(statuses)},
        },
        "openapi_extra": None if body is None else body.declare(),
    }


def _error_response(status: int) -> dict[str, Any]:
    description, what, fix = _ERRORS[status]
    example = {"error": {"what": what, "fix": fix}}
    return {"model": ErrorResponse, "description": description, "content": {"application/json": {"example": example}}}


def install_openapi(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Answer ``/openapi.json`` with the whole document.

    Args:
        app: with all its routes.
        models: models that routes reference by name.
    """
    framework = app.openapi

    def completed() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = _complete(framework(), models)
            for route in app.routes:
                if isinstance(route, APIRoute) and route.include_in_schema:
                    _add_examples(document, route)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = completed  # the way that FastAPI documents: https://fastapi.tiangolo.com/how-to/extending-openapi/

    @cache  # rendering takes milliseconds, and the route needs no token
    def text() -> bytes:
        return bytes(JSONResponse(completed()).body)

    @app.get("/openapi.json", include_in_schema=False)
    async def document() -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(text(), media_type="application/json")


def _complete(document: dict[str, Any], models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_SCHEMA_REF)
    components: dict[str, Any] = document.setdefault("components", {})
    components["schemas"] = {**schemas.get("$defs", {}), **components.get("schemas", {})}
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "The content of the service's token file."}
    }
    document["security"] = [{"token": []}]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if path in PUBLIC_PATHS:
                operation["security"] = []
    return document


def _add_examples(document: dict[str, Any], route: APIRoute) -> None:
    """Insert the examples unchanged: the framework leaves out their null fields."""
    for method in route.methods or ():
        operation = document["paths"][route.path_format][method.lower()]
        for status, answer in route.responses.items():
            described = operation["responses"][str(status)]["content"]
            if answer.get("model") is ErrorResponse:  # JSON, also where the route answers in text
                described.clear()
                described["application/json"] = {"schema": {"$ref": _SCHEMA_REF.format(model=ErrorResponse.__name__)}}
            for media_type, content in answer["content"].items():
                described[media_type]["example"] = content["example"]
        if route.openapi_extra:
            operation["requestBody"]["content"] = route.openapi_extra["requestBody"]["content"]
