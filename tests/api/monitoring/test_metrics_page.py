"""The metrics: names and units by convention, bounded labels, and a page about them that is current."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from api_stack import ask, serving
from prometheus_client.parser import text_string_to_metric_families

SCRIPT = Path(__file__).parents[3] / "scripts" / "metrics_page.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = spec_from_file_location("metrics_page", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_current(script: Any) -> None:
    assert script.page() == script.PAGE.read_text(encoding="utf-8"), "run: python scripts/metrics_page.py"


async def test_names_and_types_are_as_prometheus_wants_them(script: Any) -> None:
    families = list(text_string_to_metric_families(await script.example()))
    assert len(families) == len({family.name for family in families}) > 30
    for family in families:
        assert re.fullmatch(r"prorl_[a-z][a-z0-9_]*", family.name)
        assert family.type in ("counter", "gauge", "histogram")
        assert family.documentation.endswith(".")
        assert not re.search(r"_(count|sum|bucket|total|info)$", family.name) or family.name == "prorl_build_info"
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent)$", family.name), "base units"
        labels = {name for sample in family.samples for name in sample.labels}
        assert labels.isdisjoint({"run", "run_id", "group", "group_id", "rollout", "rollout_id"}), "without a bound"


async def test_stages_are_counted_with_their_wait_apart() -> None:
    async with serving() as served:
        await served.ask("POST", "/v1/rollouts", [ask("a"), ask("b", run="hang")])
        await served.ask("GET", "/v1/rollouts/a?wait=10")
        await served.ask("POST", "/v1/cancel", {"rollouts": ["b"]})
        await served.ask("GET", "/v1/rollouts/b?wait=10")
        async with served.http.get(served.url + "/metrics") as response:
            page = await response.text()
    assert 'prorl_stage_seconds_count{environment="scripted",stage="run"}' in page
    assert 'prorl_stage_queue_seconds_count{stage="run"}' in page
    assert "prorl_cancel_seconds_count 1.0" in page
    assert 'kind="client",status="cancelled"} 1.0' in page
    assert 'prorl_ledger_rollouts{state="kept"} 2.0' in page
