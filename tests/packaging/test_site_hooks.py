"""``scripts/site_hooks.py``: where links of the repository's pages lead in the site, and which fail its build."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
ADDRESS = "https://example.invalid/owner/prorl-gym/"


@pytest.fixture(scope="module")
def hooks() -> dict[str, Any]:
    return runpy.run_path(str(REPOSITORY / "scripts/site_hooks.py"))


@pytest.mark.parametrize(
    ("target", "source", "expected"),
    [
        ("ledger.md#the-disk-budget", "docs/tokens.md", "ledger.md#the-disk-budget"),
        ("docs/ledger.md", "README.md", "ledger.md"),
        ("docs/images/dashboard-light.png", "README.md", "images/dashboard-light.png"),
        ("../README.md", "docs/tokens.md", "index.md"),
        ("environments/prorl_math/README.md", "README.md", "environments/math.md"),
        ("../../docs/environments.md", "environments/prorl_taskdir/README.md", "../environments.md"),
        ("curve.png", "recipes/tiny_dapo/README.md", "curve.png"),
        ("../LICENSE", "docs/tokens.md", "https://example.invalid/owner/prorl-gym/blob/main/LICENSE"),
        ("recipes/nemo_rl/", "README.md", "https://example.invalid/owner/prorl-gym/tree/main/recipes/nemo_rl"),
        ("https://arxiv.org/abs/1", "README.md", "https://arxiv.org/abs/1"),
        ("#limits", "README.md", "#limits"),
    ],
)
def test_a_link_leads_to_its_page(hooks: dict[str, Any], target: str, source: str, expected: str) -> None:
    assert hooks["resolve"](target, source, ADDRESS) == expected


@pytest.mark.parametrize("target", ["nothing.md", "../nothing", "../../outside.md", "../tests/nothing.py"])
def test_a_link_to_nothing_fails(hooks: dict[str, Any], target: str) -> None:
    with pytest.raises(hooks["DeadLinkError"], match=re.escape(target)):
        hooks["resolve"](target, "docs/tokens.md", None)


def test_a_link_that_leaves_the_site_is_text_without_a_repository(hooks: dict[str, Any]) -> None:
    text = "See [the *licence*](../LICENSE) and [the ledger](ledger.md).\n"
    assert hooks["rewrite"](text, "docs/tokens.md", None) == "See the *licence* and [the ledger](ledger.md).\n"


def test_an_image_that_is_a_link(hooks: dict[str, Any]) -> None:
    text = "[![A page](docs/images/dashboard-light.png)](docs/metrics.md)\n"
    expected = "[![A page](images/dashboard-light.png)](metrics.md)\n"
    assert hooks["rewrite"](text, "README.md", None) == expected


def test_code_is_left_alone(hooks: dict[str, Any]) -> None:
    text = "```python\nx[0](nothing)\n```\n[ledger](ledger.md)\n~~~~\n[x](nothing)\n~~~\n[y](nothing)\n~~~~\n"
    assert hooks["rewrite"](text, "docs/tokens.md", None) == text


def test_every_link_of_a_page_leads_to_a_file(hooks: dict[str, Any]) -> None:
    pages = [*(page for page in hooks["PAGES"] if page.endswith(".md")), *(f"docs/{page.name}" for page in DOCS)]
    for source in pages:
        hooks["rewrite"]((REPOSITORY / source).read_text("utf-8"), source, ADDRESS)
