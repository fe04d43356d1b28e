"""The mismatch that a trainer reports: through the client to the status, the metrics, the history and the table."""

import math
from dataclasses import replace

import pytest
from api_stack import TOKEN, serving

from prorl_gym.api.monitoring import history
from prorl_gym.api.monitoring.history import History, MismatchReports, RolloutCounters
from prorl_gym.client import Client
from prorl_gym.client.wire_models import MismatchBody
from prorl_gym.records import BatchMismatch, Mismatch

SMALL = Mismatch(tokens=30, max_abs_diff=1e-5, mean_abs_diff=1e-6, kl=1e-9, mult_prob_error=1.000001, zeros=0)
LARGE = replace(SMALL, tokens=10, max_abs_diff=1.5, kl=0.25)
BATCH = BatchMismatch(
    total=replace(LARGE, tokens=40, mean_abs_diff=0.5, mult_prob_error=1.25),
    by_version={-1: SMALL, 6: SMALL, 7: LARGE},
    by_position={"turn 1": SMALL, "turns 16-": LARGE},
    by_engine={"policy-0": SMALL},
)


async def test_a_report_is_shown_where_the_reward_is() -> None:
    async with serving() as served, Client(served.url, token=TOKEN) as client:
        assert await client.mismatch("run") == ()
        assert (await client.status()).mismatches == ()
        await client.report_mismatch("other", 3, replace(BATCH, total=SMALL))
        await client.report_mismatch("run", 7, BATCH)
        (report,) = await client.mismatch("run")
        assert (report.run_id, report.version, report.mismatch) == ("run", 7, BATCH)
        assert [one.run_id for one in (await client.status()).mismatches] == ["other", "run"]
        async with served.http.get(served.url + "/metrics") as response:
            page = await response.text()
    for line in (
        "prorl_mismatch_reports_total 2.0",
        'prorl_mismatch_max_abs_diff{position="turn 1"} 1e-05',
        'prorl_mismatch_max_abs_diff{position="turns 16-"} 1.5',
        "prorl_mismatch_mean_abs_diff 0.5",
        "prorl_mismatch_kl 0.25",
        "prorl_mismatch_mult_prob_error 1.25",
    ):
        assert f"\n{line}\n" in page


async def test_what_is_no_number_arrives() -> None:
    broken = replace(BATCH, total=replace(LARGE, max_abs_diff=math.nan, kl=math.inf))
    async with serving() as served, Client(served.url, token=TOKEN) as client:
        await client.report_mismatch("run", 1, broken)
        (report,) = await client.mismatch("run")
        assert math.isnan(report.mismatch.total.max_abs_diff) and math.isnan(report.mismatch.total.kl)
        _, answer = await served.ask("GET", "/v1/status")
        assert answer["mismatches"][0]["mismatch"]["total"]["max_abs_diff"] is None


async def test_a_position_that_there_is_not_is_refused() -> None:
    async with serving() as served, Client(served.url, token=TOKEN) as client:
        with pytest.raises(ValueError, match="no position is called turn 99"):
            await client.report_mismatch("run", 1, replace(BATCH, by_position={"turn 99": SMALL}))
        body = MismatchBody(version=1, mismatch=BATCH).model_dump(mode="json")
        body["mismatch"]["by_position"]["turn 99"] = body["mismatch"]["total"]
        status, answer = await served.ask("POST", "/v1/runs/run/mismatch", body)
    assert status == 422
    assert "no position is called turn 99" in answer["error"]["what"]


def test_a_repeated_report_replaces_the_one_of_its_version() -> None:
    reports = MismatchReports()
    for version, batch in ((1, BATCH), (2, BATCH), (1, replace(BATCH, total=SMALL))):
        reports.add("run", MismatchBody(version=version, mismatch=batch))
    assert [(one.version, one.mismatch.total) for one in reports.of_run("run")] == [(2, BATCH.total), (1, SMALL)]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_RUNS", 2)
    monkeypatch.setattr(history, "MAX_VERSIONS", 3)
    reports = MismatchReports()
    for run in "abc":
        for version in range(5):
            reports.add(run, MismatchBody(version=version, mismatch=BATCH))
    assert reports.of_run("a") == ()
    assert [one.version for one in reports.of_run("c")] == [2, 3, 4]
    assert [(one.run_id, one.version) for one in reports.latest()] == [("b", 4), ("c", 4)]
    assert reports.count == 15


async def test_a_sample_has_the_report_that_came_last() -> None:
    async with serving() as served:
        reports = MismatchReports()
        history = History(served.service, RolloutCounters(), (), reports)
        await history.record_sample()
        reports.add("run", MismatchBody(version=1, mismatch=BATCH))
        await history.record_sample()
        await history.record_sample()
        columns = history.snapshot().columns
    assert columns["mismatch_max_abs_diff"] == [None, 1.5, 1.5]
    assert columns["mismatch_kl"] == [None, 0.25, 0.25]
