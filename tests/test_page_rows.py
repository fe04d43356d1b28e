"""Every request that a page shows is one that its environment takes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.environments import registry

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "environments").glob("*/README.md")]
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CURL_BODY = re.compile(r"-d '(.*?)'", re.DOTALL)


def requests_in(page: str) -> Iterator[dict[str, Any]]:
    """Every object with an environment and a task in the page's blocks: alone, on a line, or sent by curl."""
    for block in _BLOCK.findall(page):
        for text in (block, *block.splitlines(), *_CURL_BODY.findall(block)):
            try:
                yield from _requests(json.loads(text))
            except ValueError:  # prose, a command, or an abbreviated row
                continue


def _requests(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict) and isinstance(value.get("environment"), str) and isinstance(value.get("task"), dict):
        yield value
    for inner in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from _requests(inner)


SHOWN = [(page.relative_to(ROOT), request) for page in PAGES for request in requests_in(page.read_text("utf-8"))]


def test_pages_show_requests() -> None:
    assert {str(page) for page, _ in SHOWN} >= {"docs/api.md", "docs/environments.md"}


@pytest.mark.parametrize(
    ("page", "request_shown"),
    SHOWN,
    ids=[f"{page}-{request['environment']}-{n}" for n, (page, request) in enumerate(SHOWN)],
)
def test_the_environment_takes_it(page: Path, request_shown: dict[str, Any]) -> None:
    registry.get(request_shown["environment"]).parse_row(request_shown["task"])
