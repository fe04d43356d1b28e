"""Everything that the OpenAPI document allows, and much that it does not: no 5xx, and every answer is as described."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from loopback_service import TOKEN, in_a_thread
from schemathesis import checks as server
from schemathesis.specs.openapi import checks

from prorl_gym.client import SyncClient
from prorl_gym.records import RolloutRequest

# Not among them: that all that fits is accepted (a schema cannot say that replica < group_size), and that a query has
# no parameter beyond those that a route knows.
CHECKS = [
    server.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]

QUICK = settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
LONG = settings(QUICK, max_examples=100)


@pytest.fixture
def url() -> Iterator[str]:
    with in_a_thread() as address, SyncClient(address, token=TOKEN) as client:  # the fuzzer is synchronous
        client.submit(RolloutRequest(rollout_id="a7", environment="scripted", task={}))
        client.result("a7", timeout=10)
        yield address


def fuzz(url: str, how: settings) -> int:
    """Ask every route in all ways; return how many there were."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [cast("Any", found).ok() for found in schema.get_all_operations()]
    for operation in operations:
        how(given(data=st.data())(asker(operation)))()
    return len(operations)


def asker(operation: Any) -> Any:
    """Return what asks one route in one way."""

    def ask_it(data: Any) -> None:
        mode = data.draw(st.sampled_from(list(schemathesis.GenerationMode)))
        case = data.draw(operation.as_strategy(generation_mode=mode))
        query = dict(case.query or {})
        if operation.path == "/v1/stream":
            query["follow"] = "false"  # it would never end otherwise
        if "wait" in query:
            query["wait"] = "0"
        case.query = query
        case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=10, checks=CHECKS)

    return ask_it


@pytest.mark.slow
def test_no_request_breaks_it(url: str) -> None:
    assert fuzz(url, QUICK) >= 20


@pytest.mark.release
@pytest.mark.timeout(600)
def test_many_requests_do_not_break_it(url: str) -> None:
    fuzz(url, LONG)
