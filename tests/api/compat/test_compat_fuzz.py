"""Everything that the document of the published routes allows, and much that it does not, never finds a defect."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import schemathesis
from compat_support import TOKEN, published
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from loopback_service import entered_in_a_thread
from schemathesis.specs.openapi import checks

from prorl_gym.api.compat.config import CompatConfig

# A stopped port, or one without engines, is a 503 by design: what is asked for is that no answer is a 500, and that
# each is described.
CHECKS = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]

HEADERS = {"Authorization": f"Bearer {TOKEN}"}

HOW = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


@asynccontextmanager
async def serve() -> AsyncIterator[str]:
    async with published(config=CompatConfig(data_sources={"*": "scripted"}), max_body_bytes=1 << 20) as served:
        yield served.url


@pytest.fixture
def url() -> Iterator[str]:
    with entered_in_a_thread(serve()) as address:  # the fuzzer is synchronous
        yield address


def fuzz(url: str, how: settings) -> set[int]:
    """Ask every route in all ways; return the statuses that were answered."""
    found: set[int] = set()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=HEADERS)
    for operation in [cast("Any", one).ok() for one in schema.get_all_operations()]:
        how(given(data=st.data())(asker(operation, found)))()
    return found


def asker(operation: Any, found: set[int]) -> Any:
    """Return what asks one route in one way."""

    def ask(data: st.DataObject) -> None:
        mode = data.draw(st.sampled_from(list(schemathesis.GenerationMode)))
        case = data.draw(operation.as_strategy(generation_mode=mode))
        response = case.call_and_validate(headers=HEADERS, timeout=10, checks=CHECKS)
        assert response.status_code != 500
        found.add(response.status_code)

    return ask


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_request_finds_a_defect(url: str) -> None:
    assert {200, 422} <= fuzz(url, HOW)
