"""``prorl-gym plan``: a pilot's records in; nodes, sandboxes, memory, disk and hours out."""

from collections.abc import Iterator

import pytest
import sample_records
from loopback_service import TOKEN, in_a_thread
from typer.testing import CliRunner

from prorl_gym.cli.main import app
from prorl_gym.cli.service_client.plan import PilotCosts, plan_for_hours, plan_for_nodes
from prorl_gym.client import SyncClient
from prorl_gym.errors import ConfigError, FailureKind
from prorl_gym.records import Retry, RolloutRequest, StageTime

COSTS = PilotCosts(
    rollouts=100,
    work_seconds=60.0,
    processor_seconds=6.0,
    longest_seconds=360.0,
    sampled_tokens=1000.0,
    record_bytes=1e4,
)


def test_hours_follow_from_nodes() -> None:
    made = plan_for_nodes(COSTS, rollouts=12_000, nodes=2, sandboxes_per_node=50)
    assert (made.sandboxes, made.hours) == (100, pytest.approx((7200 + 360) / 3600))
    assert made.tokens_per_second == pytest.approx(12_000 * 1000 / 7200)
    assert made.busy_cores == pytest.approx(12_000 * 6 / 7200 / 2)
    assert made.ledger_bytes == 12_000 * 1e4


def test_fewest_nodes_that_end_in_time() -> None:
    made = plan_for_hours(COSTS, rollouts=12_000, hours=2.1, sandboxes_per_node=50)
    assert made.nodes == 2 and made.hours <= 2.1
    assert plan_for_hours(COSTS, rollouts=12_000, hours=2.09, sandboxes_per_node=50).nodes == 3


def test_a_small_run_uses_no_more_sandboxes_than_rollouts() -> None:
    assert plan_for_nodes(COSTS, rollouts=10, nodes=4, sandboxes_per_node=50).sandboxes == 10


def test_a_rollout_that_takes_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="the longest rollout took 360 s"):
        plan_for_hours(COSTS, rollouts=10, hours=0.1, sandboxes_per_node=50)


def test_costs_count_attempts_that_were_made_again() -> None:
    stages = {"init": StageTime(seconds=1.0), "run": StageTime(seconds=20.0), "eval": StageTime(seconds=3.0)}
    lost = Retry(attempt=0, kind=FailureKind.NODE_LOST, stage="run", message="", sampled_tokens=5, seconds=6.0)
    plain = sample_records.record("plain", stages=stages)
    retried = sample_records.record("retried", stages=stages, retries=[lost])
    costs = PilotCosts.of([plain, retried])
    assert (costs.rollouts, costs.work_seconds, costs.processor_seconds, costs.longest_seconds) == (2, 27.0, 4.0, 30.0)
    assert costs.sampled_tokens == plain.sampled_tokens + 5 / 2


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with in_a_thread() as address, SyncClient(address, token=TOKEN) as client:
        ids = [one.rollout_id for one in client.submit([RolloutRequest(environment="scripted", task={"turns": 2})] * 1)]
        client.result(ids[0], timeout=20)
        yield address


def test_the_command_prints_what_a_run_needs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_GYM_URL", url)
    monkeypatch.setenv("PRORL_GYM_TOKEN", TOKEN)
    result = CliRunner().invoke(app, ["plan", "1000", "--nodes", "2", "--sandboxes", "8", "--sandbox-mib", "1024"])
    assert result.exit_code == 0, result.output
    lines = dict(line.split(maxsplit=1) for line in result.output.splitlines())
    assert lines["nodes"] == "2, with 16 sandboxes at once"
    assert lines["memory"] == "8.0 GiB of each node in sandboxes"
    for arguments in (["plan", "10"], ["plan", "10", "--nodes", "1", "--hours", "1"], ["plan", "10", "--run", "none"]):
        with pytest.raises(ConfigError):
            CliRunner().invoke(app, arguments, catch_exceptions=False)
