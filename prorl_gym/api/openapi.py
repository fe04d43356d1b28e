"""The OpenAPI document: what FastAPI knows of the routes, the models of the bodies, and the token."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse, Response

from prorl_gym.api.auth import OPEN_PATHS
from prorl_gym.api.contract import REF
from prorl_gym.api.schema import ErrorAnswer

DESCRIPTION = """Rollouts of multi-turn agents as a service.

Submit rollouts, read their records as they finish, say what you still want, and tell when the weights change. What was
accepted is on the disk; each accepted id gets exactly one record, whatever happens in between.

**Stability.** Everything under `/v1` keeps its meaning: routes, fields and the record only grow. Ignore fields that you
do not know. A change that would break a reader gets `/v2`; both are then served for at least one minor release. The
record has a version of its own, `schema_version`.
"""

TAGS = [
    {"name": "rollouts", "description": "Submit, look, cancel."},
    {"name": "records", "description": "Read records as they finish, and say that they were received."},
    {"name": "runs", "description": "What a trainer still wants of a run."},
    {"name": "policy", "description": "New weights, pauses, engines."},
    {"name": "service", "description": "How the service is."},
]


def install(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Let the app tell its document.

    Args:
        app: with all its routes.
        models: that routes name by reference.
    """
    framework = app.openapi

    def completed() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = _completed(framework(), models)
            for route in app.routes:
                if isinstance(route, APIRoute) and route.include_in_schema:
                    _exemplify(document, route)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = completed  # the way that FastAPI documents: https://fastapi.tiangolo.com/how-to/extending-openapi/

    @cache  # rendering takes milliseconds, and no token is asked for
    def text() -> bytes:
        return bytes(JSONResponse(completed()).body)

    @app.get("/openapi.json", include_in_schema=False)
    async def document() -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(text(), media_type="application/json")


def _completed(document: dict[str, Any], models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    components: dict[str, Any] = document.setdefault("components", {})
    components["schemas"] = {**schemas.get("$defs", {}), **components.get("schemas", {})}
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "The content of the service's token file."}
    }
    document["security"] = [{"token": []}]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if path in OPEN_PATHS:
                operation["security"] = []
    return document


def _exemplify(document: dict[str, Any], route: APIRoute) -> None:
    """Put the examples in as they are: the framework leaves out what is null in them."""
    for method in route.methods or ():
        operation = document["paths"][route.path_format][method.lower()]
        for status, answer in route.responses.items():
            told = operation["responses"][str(status)]["content"]
            if answer.get("model") is ErrorAnswer:  # JSON, whatever the route answers when all is well
                told.clear()
                told["application/json"] = {"schema": {"$ref": REF.format(model=ErrorAnswer.__name__)}}
            for media_type, content in answer["content"].items():
                told[media_type]["example"] = content["example"]
        if route.openapi_extra:
            operation["requestBody"]["content"] = route.openapi_extra["requestBody"]["content"]
