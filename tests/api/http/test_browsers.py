"""What pages of other sites can make a browser do here: nothing."""

import pytest
from api_stack import TOKEN, running
from fastapi.testclient import TestClient

from prorl_gym.api.app import create_app
from prorl_gym.api.app_context import AppContext


@pytest.fixture
async def browser() -> TestClient:
    async with running() as service:
        app = create_app(AppContext(service), TOKEN)
        return TestClient(app, "http://localhost:8770", headers={"Authorization": f"Bearer {TOKEN}"})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://localhost:8770", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost:9999"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}, 403),
    ],
)
def test_requests_of_other_sites_are_refused(browser: TestClient, headers: dict[str, str], status: int) -> None:
    assert browser.get("/openapi.json", headers=headers).status_code == status


def test_a_form_of_another_site_changes_nothing(browser: TestClient) -> None:
    headers = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    answer = browser.post("/v1/cancel", headers=headers, content='{"runs": ["default"]}')
    assert (answer.status_code, answer.json()["error"]["what"]) == (403, "Another site's page sent this request.")


def test_no_other_site_may_read_an_answer(browser: TestClient) -> None:
    answer = browser.options("/v1/rollouts", headers={"Access-Control-Request-Method": "POST"})
    assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, POST")
    assert "Access-Control-Allow-Origin" not in answer.headers
