"""Write the routes of ``docs/api.md`` out of the OpenAPI document: ``python scripts/api_page.py``.

The page is committed; a test compares it with what this prints.
"""

import json
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

The API of `prorl-gym serve`, by default on `http://127.0.0.1:8770`. `scripts/api_page.py` generates the routes below
from the OpenAPI document, which the service has at `/openapi.json` and, for trying it out, at `/docs` (Swagger UI, part
of the package; nothing is loaded from elsewhere).

## Stability

- Everything under `/v1` keeps its meaning: routes, parameters, bodies and answers only grow. Ignore fields that you do
  not know. A change that would break a reader gets `/v2`, and both are served for at least one minor release.
- The record (`rollout`) has a version of its own, `schema_version`, now 1. It rises when a field changes its meaning or
  disappears, or when a closed list of words (an outcome's status, a failure's kind) gets a new one; not when a field is
  added. Records of earlier versions stay readable.
- Bodies are strict: an unknown field is an error (422), since a misspelt one would be ignored silently.
- Repeating a request is harmless: a rollout's id with the same body, an acknowledgement, a demand, the same
  `PUT /v1/policy`.
- `/metrics`, `/v1/history` and the pages for people may change in any release ([the metrics](metrics.md)).

## The token

Every route needs `Authorization: Bearer TOKEN` except `/livez` and `/readyz` (no causes), and `/`, `/docs` and
`/openapi.json`, which contain no data: the dashboard prompts for the token and keeps it in its tab. The first start
creates the token, in the file `token` in the service's `state` (mode 0600). On a cluster node every user can reach
127.0.0.1: loopback alone protects nothing. There is no cookie, and requests from pages of other sites are refused
(403); `OPTIONS` answers 405, so other origins cannot read anything either.

On a machine with other users, keep the token out of command lines, which `ps` shows to all of them. In the examples
below, curl reads its header from a file:

```bash
cd ~/.local/state/prorl-gym; (umask 077; echo "Authorization: Bearer $(cat token)" > header)
T="@$PWD/header"; U=http://127.0.0.1:8770; cd -
```

## Errors

Every error is `{"error": {"what": ..., "fix": ...}}`: one line each, never a traceback. A request that can only make
a failed rollout has the failure's `kind` beside them. Retry after 429 and 503 (after `Retry-After` seconds, if
present); all others need another request. A failed rollout is not an error of the API: the failure is in its record.

## Streams

```bash
curl -sN -H "$T" "$U/v1/stream?run=step-7&cursor=41&ack=true"
```

Each line is a record with its cursor; an empty line is sent after 15 s without one. Before it, a line with `paused` and
without `rollout` says once for each pause which pool is paused, and until when; ignore further lines without `rollout`.
After a broken connection, continue from the last cursor seen. Records are kept until they are acknowledged or expire:
with `ack=true`, reading from a cursor acknowledges everything up to it; `POST /v1/ack` does so without reading.

## History

`/v1/history` has the columns `queued`, `running`, `runner_queue`, `init`, `run`, `eval`, `parked` (rollouts),
`finished_per_second`, `tokens_per_second`, `mean_reward` (of the rollouts that ended since the previous point),
`event_loop_lag_seconds` (the longest of the last minute), `mismatch_max_abs_diff` and `mismatch_kl` (of the batch that
a trainer reported last, if one has), and for each engine `engine.NAME.in_flight`, `.kv_usage`, `.hit_rate`,
`.version`. There is a point every `http.history_seconds`, and the last 720 are kept.
"""

TABLE_HEAD = "| route | what it does |\n|---|---|\n"


WORDS_HEAD = """The fields with a closed list of words. A body with another word is refused. Answers of a later release
may have further words; a record only with a higher `schema_version`.

| field | words |
|---|---|
"""


def document() -> Any:
    """Return the OpenAPI document."""
    runner = InProcessRunner(environment_lookup(), FakePolicySource(), EmptyBackend())
    context = AppContext.create(RolloutService(MemoryLedger(), runner))
    return create_app(context, "token").openapi()


def operations(openapi: Any) -> list[tuple[str, str, Any]]:
    """Return method, path and operation of every route."""
    return [
        (method.upper(), path, operation)
        for path, item in openapi["paths"].items()
        for method, operation in item.items()
    ]


def table(openapi: Any) -> str:
    """Return all routes, one per line."""
    rows = [f"| `{method} {path}` | {operation['summary']} |" for method, path, operation in operations(openapi)]
    return TABLE_HEAD + "\n".join(rows) + "\n"


def curl(method: str, path: str, operation: Any) -> str:
    """Return a command that asks this route."""
    examples = {one["name"]: one.get("schema", {}).get("examples") for one in operation.get("parameters", [])}
    for name, values in examples.items():
        path = path.replace("{" + name + "}", str(values[0]) if values else "")
    given = "" if method == "GET" else f" -X {method}"
    body = operation.get("requestBody")
    if body is not None:
        text = json.dumps(body["content"]["application/json"]["example"])
        given += f" \\\n  -d '{text}'"
    return f'curl -s -H "$T" "$U{path}"{given}'


def described(method: str, path: str, operation: Any) -> Iterator[str]:
    """Yield the paragraphs about one route."""
    yield f"### `{method} {path}`\n\n{operation['description']}\n"
    rows = [
        f"| `{one['name']}` | {one.get('description', '')} | {default_of(one)} |"
        for one in operation.get("parameters", [])
    ]
    if rows:
        yield "| parameter | meaning | default |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    yield f"```bash\n{curl(method, path, operation)}\n```\n"
    for media_type, content in operation["responses"]["200"]["content"].items():
        if media_type == "application/json":
            yield f"```json\n{json.dumps(content['example'], indent=1)}\n```\n"
    wrong = [status for status in operation["responses"] if status != "200"]
    if wrong:
        yield f"Errors: {', '.join(sorted(wrong))}.\n"


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
        f"| {', '.join(names)} | {', '.join(f'`{word}`' if word else 'empty' for word in found)} |"
        for found, names in fields.items()
    ]
    return WORDS_HEAD + "\n".join(rows) + "\n"


def page() -> str:
    """Return the whole of ``docs/api.md``."""
    told = document()
    routes = [part for operation in operations(told) for part in described(*operation)]
    return "\n".join([HEAD, "## Words\n", words(told), "## Routes\n", table(told), *routes])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
