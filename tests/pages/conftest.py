"""One browser for the tests of a module."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from chromium_pages import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with chromium() as started:
        yield started
