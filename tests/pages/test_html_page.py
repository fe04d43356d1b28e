import base64
import hashlib

import pytest
from fake_service import busy
from page_reader import Page
from pydantic import TypeAdapter

from prorl_gym.client.wire_models import (
    AnalysisResponse,
    GroupsStatus,
    HistoryResponse,
    ProblemsResponse,
    RolloutListResponse,
    ServiceStatus,
)
from prorl_gym.pages import dashboard, rollout_page
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


PAGE = Page(dashboard.render_dashboard())


def test_it_may_ask_its_own_server_only_and_run_its_two_programs_only() -> None:
    assert PAGE.policy["connect-src"] == ["'self'"]
    assert PAGE.policy["script-src"] == [dashboard.DASHBOARD_ASSETS.hashes[1], rollout_page.ROLLOUT_ASSETS.hashes[1]]
    assert PAGE.policy["style-src"] == [dashboard.DASHBOARD_ASSETS.hashes[0], rollout_page.ROLLOUT_ASSETS.hashes[0]]
    assert len(PAGE.programs) == 1


def test_frames_have_no_origin() -> None:
    (frame,) = (attributes for tag, attributes in PAGE.tags if tag == "iframe")
    assert frame["sandbox"] == "allow-scripts"
    assert 'sandbox: "allow-scripts"' in PAGE.programs[0]


def test_it_holds_no_data_and_no_inline_style() -> None:
    assert not [attributes for _, attributes in PAGE.tags if attributes.get("id") == "data"]
    assert not [attributes for _, attributes in PAGE.tags if "style" in attributes or "onclick" in attributes]


@pytest.mark.parametrize("run", ["grpo-7b", "eval-17"])
def test_the_service_it_is_tried_against_speaks_as_the_real_one(run: str) -> None:
    world = busy(100)
    ServiceStatus.model_validate(world.status)
    GroupsStatus.model_validate(world.groups[run])
    HistoryResponse.model_validate(world.history)
    assert AnalysisResponse.model_validate(world.answer("/v1/analysis", {"run": run})[1]).finished > 0
    assert ProblemsResponse.model_validate(world.answer("/v1/problems", {"run": run})[1]).total > 0
    assert len(RolloutListResponse.model_validate(world.answer("/v1/rollouts", {"limit": "20"})[1]).rollouts) == 20
    known = {
        name
        for model in (ServiceStatus, GroupsStatus, HistoryResponse, RolloutListResponse)
        for name in model.model_fields
    }
    assert not {*world.status, *world.groups[run], *world.history, "rollouts", "before"} - known
    member = TypeAdapter(RolloutListResponse).json_schema()["$defs"]["RolloutSummary"]["properties"]
    assert set(world.members[0]) == set(member)
