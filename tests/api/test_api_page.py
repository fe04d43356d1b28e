"""What the documentation says about the routes is what the code does."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.records import SCHEMA_VERSION

SCRIPT = Path(__file__).parents[2] / "scripts" / "api_page.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = spec_from_file_location("api_page", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_current(script: Any) -> None:
    assert script.page() == script.PAGE.read_text(encoding="utf-8"), "run: python scripts/api_page.py"
    assert f"`schema_version`, now {SCHEMA_VERSION}." in script.page()


def test_the_page_lists_the_routes_that_there_are(script: Any) -> None:
    rows = script.table(script.document()).splitlines()
    assert "| `POST /v1/rollouts` |" in script.page()
    assert set(rows) <= set(script.PAGE.read_text(encoding="utf-8").splitlines()), "run: python scripts/api_page.py"
