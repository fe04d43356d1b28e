"""The OpenAPI document is complete, and its examples are what the models read."""

from typing import Any

import pytest
from api_stack import TOKEN, running
from fastapi import FastAPI
from fastapi.testclient import TestClient
from jsonschema import Draft202012Validator

from prorl_gym.api.app import create_app
from prorl_gym.api.app_context import AppContext
from prorl_gym.api.http.middleware import PUBLIC_PATHS


@pytest.fixture
async def app() -> FastAPI:
    async with running() as service:
        return create_app(AppContext(service), TOKEN)


@pytest.fixture
def document(app: FastAPI) -> Any:
    return app.openapi()


BARE = {"/v1/hold", "/v1/release"}
"""Say everything by their name."""


def operations(document: Any) -> list[tuple[str, str, Any]]:
    return [(method, path, operation) for path, item in document["paths"].items() for method, operation in item.items()]


def test_every_route_is_described(document: Any) -> None:
    for method, path, operation in operations(document):
        name = f"{method} {path}"
        assert operation["summary"] and operation["description"] and operation["tags"], name
        assert ("requestBody" in operation) == (method in ("post", "put") and path not in BARE), name
        assert operation.get("security") == ([] if path in PUBLIC_PATHS else None), name
        statuses = set(operation["responses"])
        assert "200" in statuses, name
        assert path in PUBLIC_PATHS or {"401", "403", "500"} <= statuses, name
        if "{" in path or operation.get("parameters") or "requestBody" in operation:
            assert "422" in statuses, name


def test_every_body_and_answer_has_an_example_that_fits_its_schema(document: Any) -> None:
    checked = 0
    for method, path, operation in operations(document):
        contents = [(f"{status}", answer.get("content", {})) for status, answer in operation["responses"].items()]
        if "requestBody" in operation:
            contents.append(("body", operation["requestBody"]["content"]))
        for where, content in contents:
            for media_type, described in content.items():
                assert "example" in described, f"{method} {path} {where}"
                if media_type == "application/json":
                    schema = {**described["schema"], "components": document["components"]}
                    Draft202012Validator(schema).validate(described["example"])
                    checked += 1
    assert checked > 100


def test_pages_without_data_need_no_token_and_load_nothing_from_elsewhere(app: FastAPI) -> None:
    browser = TestClient(app)
    docs = browser.get("/docs")
    assert docs.status_code == 200
    assert "http" not in docs.text
    assert "frame-ancestors 'none'" in docs.headers["Content-Security-Policy"]
    assert browser.get("/openapi.json").json()["info"]["title"] == "prorl-gym"
    assert b"SwaggerUIBundle" in browser.get("/docs/ui.js").content
    assert browser.get("/docs/ui.css").headers["content-type"].startswith("text/css")
    assert browser.head("/docs").content == b""
