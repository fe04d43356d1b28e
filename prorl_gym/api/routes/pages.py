"""Pages without data: the dashboard, which prompts for the token, and the description of the routes."""

from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from prorl_gym.api.http.error_responses import ApiError
from prorl_gym.api.http.middleware import DOCS_HEADERS, HTML_HEADERS

_DOCS = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>prorl-gym: routes</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><link rel="stylesheet" href="docs/ui.css"></head>
<body><div id="ui"></div><script src="docs/ui.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#ui", deepLinking: true});</script></body></html>
"""

_ASSETS = {
    "ui.js": ("swagger-ui-bundle.js", "text/javascript"),
    "ui.css": ("swagger-ui.css", "text/css"),
}

router = APIRouter(include_in_schema=False)


@router.get("/")
@router.head("/")
async def dashboard() -> Response:
    from prorl_gym.pages.dashboard import render_dashboard

    return HTMLResponse(render_dashboard(), headers=HTML_HEADERS)


@router.get("/openapi.json")
async def document(request: Request) -> Response:
    return Response(request.app.openapi_text, media_type="application/json")


@router.get("/docs")
@router.head("/docs")
async def docs() -> Response:
    return HTMLResponse(_DOCS, headers=DOCS_HEADERS)


@router.get("/docs/{name}")
async def asset(name: str) -> Response:
    if name not in _ASSETS:
        raise ApiError(404, "There is no such file.")
    file, media_type = _ASSETS[name]
    return Response(_asset(file), media_type=media_type, headers={"X-Content-Type-Options": "nosniff"})


@cache
def _asset(name: str) -> bytes:
    """Read a file of Swagger UI, which comes as a package: no page of ours loads anything from another site."""
    return (files("fastapi_swagger") / "resources" / name).read_bytes()
