"""Write the routes of ``docs/api.md`` out of the OpenAPI document: ``python scripts/api_page.py``.

The page is committed; a test compares it with what this prints.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prorl_gym.api.app import create_app
from prorl_gym.api.app_context import AppContext
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend, FakePolicySource, environment_lookup
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

PAGE = Path(__file__).parent.parent / "docs" / "api.md"

HEAD = """# HTTP API

The API of `prorl-gym serve`, by default on `http://127.0.0.1:8770`. `scripts/api_page.py` writes everything from
"Words" on from the OpenAPI document; the service serves it at `/openapi.json` and, with every model and example, at
`/docs`.

Under `/v1` everything only grows: ignore fields that you do not know. A change that would break a reader gets `/v2`,
and both are served for at least one minor release. The record (`Rollout`) has its own `schema_version`, now 1. It
rises when a field changes its meaning or a closed list of words gets a new one. Bodies are strict: an unknown field
is an error. Repeating a request is harmless. `/metrics`, `/v1/history` and pages may change in any release.

## The token

Every route needs `Authorization: Bearer TOKEN` except `/livez`, `/readyz`, `/`, `/docs` and `/openapi.json`, which
hold no data. The first start creates the token in the file `token` of the service's `state` (mode 0600). Requests
from pages of other sites are refused (403). Keep the token out of command lines:

```bash
cd ~/.local/state/prorl-gym; (umask 077; echo "Authorization: Bearer $(cat token)" > header)
T="@$PWD/header"; U=http://127.0.0.1:8770; cd -
curl -s -H "$T" "$U/v1/rollouts" -X POST \\
  -d '{"rollout_id": "a7", "run_id": "step-7", "environment": "math", "task": {"question": "6*7?", "answer": "42"}}'
curl -s -H "$T" "$U/v1/rollouts/a7?wait=60"
curl -sN -H "$T" "$U/v1/stream?run=step-7&cursor=41&ack=true"
```

## Errors and streams

Every error is `{"error": {"what": ..., "fix": ...}}`, with the failure's `kind` where a request can only fail. Retry
after 429 and 503 (after `Retry-After` seconds); all others need another request. A failed rollout is no error of the
API.

Each line of a stream is `{"cursor", "stale", "rollout"}`; a damaged record has `damaged` and no reward. An empty line
is sent after 15 s without a record; before it, a line with `paused` says once which pool is paused. Ignore other
lines. Continue from the last cursor seen; with `ack=true`, that acknowledges everything up to it.
"""

TABLE_HEAD = "|route|what it does|body|answer|errors|\n|---|---|---|---|---|\n"
ELSEWHERE = ("RolloutSettings", "BatchMismatch", "PolicyUpdateBody", "PauseBody")
"""Models of bodies that other pages explain."""
OWN_ERRORS = ("404", "409", "410", "429")
"""Errors that tell routes apart; the others are explained once."""

WORDS_HEAD = """The closed lists. Another word in a body is refused; answers of a later release may have more.

| field | words |
|---|---|
"""


def document() -> Any:
    """Return the OpenAPI document."""
    runner = InProcessRunner(environment_lookup(), FakePolicySource(), EmptyBackend())
    context = AppContext(RolloutService(MemoryLedger(), runner))
    return create_app(context, "token").openapi()


def operations(openapi: Any) -> list[tuple[str, str, Any]]:
    """Return method, path and operation of every route."""
    return [
        (method.upper(), path, operation)
        for path, item in openapi["paths"].items()
        for method, operation in item.items()
    ]


def models_of(content: Any) -> str:
    """Return the names of the models in a body or an answer."""
    names: list[str] = []
    for media_type, one in (content or {}).items():
        found = dict.fromkeys(re.findall(r"#/components/schemas/(\w+)", json.dumps(one.get("schema", {}))))
        names += [f"`{name}`" for name in found] or ["" if media_type == "application/json" else media_type]
    return ", ".join(dict.fromkeys(names))


def table(openapi: Any) -> str:
    """Return all routes, one per line: what it does, the model of its body, that of its answer, its own errors."""
    rows: list[str] = []
    for method, path, operation in operations(openapi):
        body = models_of(operation.get("requestBody", {}).get("content"))
        answer = models_of(operation["responses"]["200"].get("content"))
        errors = ", ".join(sorted(status for status in operation["responses"] if status in OWN_ERRORS))
        rows.append(f"|`{method} {path}`|{operation['summary']}|{body}|{answer}|{errors}|")
    return TABLE_HEAD + "\n".join(rows) + "\n"


def notes(openapi: Any) -> str:
    """Return what is to be known about routes that change something beyond their line."""
    found = ((method, path, operation.get("description", "")) for method, path, operation in operations(openapi))
    return "".join(
        f"- `{method} {path.removeprefix('/v1')}`: {sentences(text, 1)}\n"
        for method, path, text in found
        if text and method != "GET"
    )


def sentences(text: str, count: int) -> str:
    """Return the first sentences of a text, on one line."""
    return " ".join(re.split(r"(?<=\.) (?=[A-Z`\"])", " ".join(text.replace("``", "`").split()))[:count])


def parameters(openapi: Any) -> str:
    """Return the parameters of all routes, one per line; those of the same meaning together."""
    routes: dict[tuple[str, str, str], list[str]] = {}
    for _, path, operation in operations(openapi):
        for one in operation.get("parameters", []):
            if one["in"] == "query":
                key = (one["name"], one.get("description", ""), default_of(one))
                routes.setdefault(key, []).append(f"`{path.removeprefix('/v1/')}`")
    names: dict[tuple[str, str, str], list[str]] = {}
    for (name, text, default), of in routes.items():
        names.setdefault((", ".join(of), text, default), []).append(f"`{name}`")
    rows = [f"|{', '.join(every)}|{of}|{text}|{default}|" for (of, text, default), every in names.items()]
    return "|parameter|of|meaning|default|\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def bodies(openapi: Any) -> str:
    """Return the fields of all models that requests send, with their meaning, once."""
    schemas = openapi["components"]["schemas"]
    wanted: dict[str, None] = {}
    todo = [operation["requestBody"] for _, _, operation in operations(openapi) if "requestBody" in operation]
    while todo:
        for name in re.findall(r"#/components/schemas/(\w+)", json.dumps(todo.pop(0))):
            if name not in wanted and "properties" in schemas[name] and name not in ELSEWHERE:
                wanted[name] = None
                todo.append(schemas[name])
    return "\n".join(f"**`{name}`**: {'; '.join(map_fields(schemas[name]))}.\n" for name in wanted)


def map_fields(schema: Any) -> Iterator[str]:
    """Yield the fields of a model: name, whether it is required, meaning."""
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        text = sentences(field.get("description", ""), 1).rstrip(".")
        yield f"`{name}`{' (required)' if name in required else ''}{f' {text}' if text else ''}"


def default_of(parameter: Any) -> str:
    """Return the default of a parameter as it is written in a query."""
    if parameter["required"]:
        return "**required**"
    value = parameter["schema"].get("default")
    return "" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def words_of(schema: Any, schemas: Any) -> tuple[str, ...]:
    """Return the words that a field may have, itself or in its items; none: any."""
    if "$ref" in schema:
        target = schemas[schema["$ref"].rpartition("/")[2]]
        return tuple(target.get("enum", ()))
    if "enum" in schema:
        return tuple(one for one in schema["enum"] if isinstance(one, str))
    inner = [schema[key] for key in ("items", "propertyNames") if isinstance(schema.get(key), dict)]
    return next((found for one in (*inner, *schema.get("anyOf", ())) if (found := words_of(one, schemas))), ())


def words(openapi: Any) -> str:
    """Return every field that has a closed list of words, fields with the same list together."""
    schemas = openapi["components"]["schemas"]
    fields: dict[tuple[str, ...], list[str]] = {}
    for model, schema in sorted(schemas.items()):
        for name, field in schema.get("properties", {}).items():
            if found := words_of(field, schemas):
                fields.setdefault(found, []).append(f"`{model}.{name}`")
    rows = [
        f"|{', '.join(names)}|{', '.join(f'`{word}`' if word else 'empty' for word in found)}|"
        for found, names in fields.items()
    ]
    return WORDS_HEAD + "\n".join(rows) + "\n"


def page() -> str:
    """Return the whole of ``docs/api.md``."""
    openapi = document()
    return "\n".join(
        [
            HEAD,
            "## Words\n",
            words(openapi),
            "## Routes\n",
            "Any route may answer 401, 403, 413 (body too large), 422, 500 and 503.\n",
            table(openapi),
            notes(openapi),
            "## Query parameters\n",
            parameters(openapi),
            "## Bodies\n",
            "`RolloutSettings` has the keys of [settings](configuration.md#settings); `BatchMismatch` is what"
            " [`measure_mismatch`](client.md#before-you-train-on-a-batch) returns;"
            " those of `PolicyUpdateBody` and `PauseBody` are the arguments of [`weight_update`](policy-updates.md).\n",
            bodies(openapi),
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
