"""The dashboard's page, and that the service it is tried against speaks as the real one does."""

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
