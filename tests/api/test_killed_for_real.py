"""SIGKILL of a real service, with a real engine, sandboxes and ledger, between accept and finish; then a restart."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from killed_service import ENGINE, SERVING, announcement, below, configure, example_requests, place, started, survivors

from prorl_gym.client import SyncClient, read_token
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend

REPLICAS = 6


@pytest.mark.slow  # services are started for real; killing one that is not is among the default tests
def test_a_killed_service_loses_nothing_and_leaves_nothing() -> None:
    with place() as ground, started(["engine", "oracle", "--port", "0", "--seed", "3"], ENGINE) as (_, engine):
        scratch, state = ground / "scratch", ground / "state"
        serve = configure(ground, engine)
        wanted = example_requests(REPLICAS)
        with started(serve, SERVING) as (service, address):
            with SyncClient(address, token=read_token(state / "token")) as client:
                client.submit(wanted)
                next(client.stream())  # some are done, most are not
                handles = below(service.pid)
                assert handles, "no spawner, no sandboxes: nothing to prove"
                service.send_signal(signal.SIGKILL)
            assert survivors(handles, 5.0) == 0
        for handle in handles:
            os.close(handle)
        assert str(ground) not in Path("/proc/self/mountinfo").read_text()
        with started(serve, SERVING) as (service, address):
            token = read_token(state / "token")
            with SyncClient(address, token=token) as client:
                rollouts = [client.result(request.rollout_id, timeout=60) for request in wanted]
                next(client.stream())  # which the end of the service ends
                service.send_signal(signal.SIGTERM)
                log, _ = service.communicate(timeout=20)
        assert service.returncode == 0 and token not in log
        records = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        assert records and all({"time", "level", "logger", "message"} <= set(one) for one in records)
        assert {rollout.outcome.status for rollout in rollouts} == {"completed"}
        assert {rollout.reward for rollout in rollouts} == {1.0}  # the oracle plays gold
        assert any(retry.kind == "service_restarted" for rollout in rollouts for retry in rollout.retries)
        assert leftovers(scratch) == []


@pytest.mark.slow
def test_a_second_signal_cuts_off_and_the_next_start_makes_it_again() -> None:
    oracle = ["engine", "oracle", "--port", "0", "--tokens-per-second", "1"]
    with place() as ground, started(oracle, ENGINE) as (_, engine):
        serve, wanted = configure(ground, engine), example_requests(1)[0]
        with started(serve, SERVING) as (service, address):
            with SyncClient(address, token=read_token(ground / "state" / "token")) as client:
                client.submit(wanted)
                while client.status().capacity.run == 0:
                    pass
            service.send_signal(signal.SIGINT)
            waits = announcement(service, "(stopping.*)")[1]
            assert "waiting up to 600 s for 1 running rollouts; 0 wait for the next start" in waits
            service.send_signal(signal.SIGINT)
            service.communicate(timeout=20)
            assert service.returncode == 0
        with started(serve, SERVING) as (service, address):
            with SyncClient(address, token=read_token(ground / "state" / "token")) as client:
                assert client.poll_result(wanted.rollout_id) is None
                assert client.cancel([wanted.rollout_id]) == [wanted.rollout_id]
                rollout = client.result(wanted.rollout_id, timeout=10)
        assert (rollout.outcome.status, rollout.retries) == ("cancelled", [])
        assert rollout.attempt >= 1, "the numbers of attempts that were cut off stay used"


def leftovers(scratch: Path) -> list[Path]:
    async def reap() -> None:
        backend = NamespaceBackend("userns", SandboxConfig(scratch=scratch))
        try:
            await backend.reap()
        finally:
            await backend.close()

    asyncio.run(reap())
    return list(scratch.iterdir())
