"""The dashboard against the real routes of a service on fakes: what each says is what the other reads."""

from typing import Any

import pytest
from chromium_pages import opened, whole
from loopback_service import TOKEN, in_a_thread

from prorl_gym.client import SyncClient
from prorl_gym.demand import Demand
from prorl_gym.records import RolloutRequest

pytestmark = [pytest.mark.chromium, pytest.mark.slow]


def test_rollouts_are_listed_and_their_trajectories_shown(browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_GYM_TOKEN", TOKEN)
    with in_a_thread() as url, SyncClient(url) as client:
        client.set_demand("default", Demand(groups=3))
        for number in range(8):
            place = {"group_id": f"g{number // 4}", "group_size": 4, "replica": number % 4}
            task = {"reward": float(number % 2)}
            client.submit(RolloutRequest(rollout_id=f"r{number}", environment="scripted", task=task, **place))
            client.result(f"r{number}", 20)
        with opened(browser, f"{url}/#token={TOKEN}") as page:
            page.get_by_role("button", name="8 finished", exact=True).wait_for()
            whole(page)
            assert page.locator("#health").text_content() == "ready"
            text = " ".join(page.locator("#board").all_inner_texts())
            assert "decided: ready" in text
            assert "policy-1" in text
            assert page.locator("#problems tbody tr").count() == 2
            page.locator("#rows").focus()
            page.keyboard.press("Enter")
            frame = page.frame_locator("#trajectory")
            assert (frame.locator("h1").text_content() or "").endswith("/ r7")
            frame.get_by_role("button", name="Tokens").click()
            assert frame.locator("#stream").is_visible()
