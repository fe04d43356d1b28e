import base64
import hashlib

import pytest
from page_reader import Page

from prorl_gym.pages import rollout_page
from prorl_gym.pages.html_page import PageAssets, render_page

PLAIN = PageAssets("body { margin: 0 }", "console.log(1 < 2)", "<main></main>\n")
OTHER = PageAssets("p { margin: 0 }", "console.log(2)", "")

HOSTILE = ["</script><script>alert(1)</script>", "<!--<script>", "\u2028\u2029", "&lt;/script>"]
FORBIDDEN = [
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"),
    *("http:", "https:"),
]


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.mark.parametrize("design", [PLAIN, rollout_page.ROLLOUT_ASSETS], ids=["plain", "trajectory"])
def test_nothing_may_run_but_what_was_built(design: PageAssets) -> None:
    page = Page(render_page(design, "title", {}))
    assert page.policy["script-src"] == [digest(text) for text in page.programs]
    assert page.policy["style-src"] == [digest(text) for text in page.styles]
    assert page.policy["default-src"] == page.policy["base-uri"] == page.policy["form-action"] == ["'none'"]
    assert page.policy["connect-src"] == ["'none'"]


def test_a_page_in_a_frame_stands_under_the_policy_of_its_parent() -> None:
    policy = Page(render_page(PLAIN, "title", framed=[OTHER], may_connect=True)).policy
    assert policy["script-src"] == [digest(PLAIN.script), digest(OTHER.script)]
    assert policy["connect-src"] == ["'self'"]


@pytest.mark.parametrize("design", [PLAIN, rollout_page.ROLLOUT_ASSETS], ids=["plain", "trajectory"])
def test_pages_load_nothing_and_style_nothing_inline(design: PageAssets) -> None:
    page = Page(render_page(design, "title", {}))
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "style"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    programs = "".join(page.programs).replace("http://www.w3.org/2000/svg", "")
    assert not [used for used in FORBIDDEN if used in programs]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_data_cannot_leave_its_element(hostile: str) -> None:
    page = Page(render_page(PLAIN, hostile, {hostile: [hostile]}))
    assert page.data == {hostile: [hostile]}
    assert len(page.programs) == 1


def test_half_a_surrogate_pair_is_no_reason_to_fail() -> None:
    assert Page(render_page(PLAIN, "title", ["\ud800"])).data == ["?"]
