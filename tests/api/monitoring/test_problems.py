"""What keeps rollouts from being made: on every page, with its cause and what to do, and once in the log."""

import logging

import aiohttp
import pytest
from api_stack import running, serving

from prorl_gym.api.monitoring.problems import ProblemLog, find_problem
from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply

GONE = EngineError(FailureKind.ENGINE_UNREACHABLE, "engine policy-0: the connection was refused.")


def engine(number: int = 0) -> FakeEngine:
    return FakeEngine(f"policy-{number}", lambda _: Reply((2,)))


async def test_one_engine_of_two_is_enough() -> None:
    async with running() as service, EnginePool("policy") as pool:
        gone = engine()
        gone.down_error = GONE
        pool.add_engine(gone)
        pool.add_engine(engine(1))
        await pool.check_health()
        assert find_problem(service, [pool]) == ""


async def test_the_status_has_the_cause_and_readiness_only_the_count() -> None:
    async with EnginePool("policy") as pool:
        gone = engine()
        gone.down_error = GONE
        pool.add_engine(gone)
        async with serving(pools=[pool]) as served, aiohttp.ClientSession() as stranger:
            await pool.check_health()
            _, status = await served.ask("GET", "/v1/status")
            async with stranger.get(served.url + "/readyz") as response:
                assert response.status == 200, "engines may come later: rollouts are accepted"
                assert await response.json() == {"ready": True, "problem": "0 of 1 engines of pool policy serve"}
    assert status["problem"] == (
        "0 of 1 engines of pool policy serve: engine policy-0: the connection was refused. Start them, or correct "
        "'engines' and 'model'; rollouts wait or are tried again."
    )
    assert status["ready"]


async def test_a_paused_policy_and_a_pool_without_engines() -> None:
    async with running() as service, EnginePool("policy") as pool:
        assert find_problem(service, [pool]).startswith("0 of 0 engines of pool policy serve: no engine of pool policy")
        pool.add_engine(engine())
        pool.gate.close()
        assert find_problem(service, [pool]).startswith("pool policy is paused: calls wait")


async def test_what_the_service_lacks_comes_first() -> None:
    async with running() as service, EnginePool("policy") as pool:
        service.begin_shutdown()
        assert find_problem(service, [pool]) == "The service is stopping."


def test_each_problem_is_logged_once_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = ProblemLog()
    for problem in ("", "0 of 1 engines serve: refused", "0 of 1 engines serve: refused", "", ""):
        log.report(problem)
    assert caplog.messages == ["0 of 1 engines serve: refused", "over: 0 of 1 engines serve"]
