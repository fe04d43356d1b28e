"""SIGKILL of a real service at random moments, round after round on one ledger, while a client works with it.

What ``tests/rollout/test_model_based.py`` checks from inside with fakes, seen from outside: real processes, sandboxes,
engine, HTTP and disk.
"""

import math
import random
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from killed_service import ENGINE, LOADING, SERVING, configure, example_requests, gone, place, started, who_sees

from prorl_gym.client import ServiceError, SyncClient, read_token
from prorl_gym.demand import Demand
from prorl_gym.records import Rollout, RolloutRequest

ROUNDS = 15
REPLICAS = 2
RUN = "default"


@dataclass
class Client:
    """What a trainer knows: every answer that it got, over all lives of the service."""

    dice: random.Random
    accepted: dict[str, RolloutRequest] = field(default_factory=dict[str, RolloutRequest])
    doubtful: list[list[RolloutRequest]] = field(default_factory=list[list[RolloutRequest]])
    cancelled: dict[str, float] = field(default_factory=dict[str, float])
    """When the life ended in which it was: later it cannot have completed."""
    records: dict[str, Rollout] = field(default_factory=dict[str, Rollout])
    cursor: int = 0

    def read(self, service: SyncClient) -> None:
        """Everything that is there, from where the last life left it."""
        for delivered in service.stream(cursor=self.cursor, follow=False):
            assert delivered.cursor > self.cursor
            self.cursor = delivered.cursor
            rollout = delivered.rollout
            assert rollout.rollout_id not in self.records, "a second record"
            self.records[rollout.rollout_id] = rollout

    def submit(self, service: SyncClient, batch: list[RolloutRequest]) -> None:
        self.doubtful.append(batch)
        answers = service.submit(batch)
        assert [answer.duplicate for answer in answers] == [one.rollout_id in self.accepted for one in batch]
        self.doubtful.remove(batch)
        self.accepted.update({one.rollout_id: one for one in batch})

    def work(self, service: SyncClient, fresh: list[RolloutRequest]) -> None:
        """Use the service until it is gone."""
        while True:
            match self.dice.randrange(6):
                case 0 | 1 if fresh:
                    size = self.dice.randrange(1, 9)
                    batch, fresh[:size] = fresh[:size], []
                    self.submit(service, batch)
                case 2 if self.accepted:
                    known = self.accepted[self.dice.choice(sorted(self.accepted))]
                    assert service.submit(known)[0].duplicate
                case 3 if self.accepted and self.dice.random() < 0.3:
                    name = self.dice.choice(sorted(self.accepted))
                    over = name in self.records
                    stopped = service.cancel([name])
                    assert not (over and stopped)
                    self.cancelled.update(dict.fromkeys(stopped, math.inf))
                case 4:
                    service.set_demand(RUN, Demand(groups=self.dice.choice([0, 2, 50])))
                case _:
                    self.read(service)

    def sent_again(self, service: SyncClient) -> None:
        """A client that got no answer sends the same again: each batch is there as a whole, or not at all."""
        for batch in self.doubtful:
            answers = service.submit(batch)
            known = {answer.duplicate for answer in answers}
            assert len(known) == 1, "half of a batch was accepted"
            self.accepted.update({one.rollout_id: one for one in batch})
        self.doubtful.clear()


def kill_soon(service: "subprocess.Popen[str]", seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, service.send_signal, [signal.SIGKILL])
    timer.start()
    return timer


@pytest.mark.release
@pytest.mark.timeout(600)
def test_a_service_that_is_killed_again_and_again_keeps_every_promise() -> None:
    client = Client(random.Random(2))
    oracle = ["engine", "oracle", "--port", "0", "--seed", "3", "--tokens-per-second", "400"]
    with place() as ground, started(oracle, ENGINE) as (_, engine):
        serve = configure(ground, engine)
        for number in range(ROUNDS):
            if number % 3 == 1:  # a life that may end while it loads
                with started(serve, LOADING) as (process, _):
                    kill_soon(process, client.dice.uniform(0.0, 3.0)).join()
                    assert process.wait(10) == -signal.SIGKILL
                assert gone(ground, 5.0), f"of the killed service there are still {who_sees(ground)}"
            with started(serve, SERVING) as (process, address):
                with SyncClient(address, token=token(ground), retry_seconds=0) as service:
                    client.sent_again(service)
                    timer = kill_soon(process, client.dice.uniform(0.3, 1.5))
                    with suppress(ServiceError):
                        client.work(service, example_requests(REPLICAS, f"k{number}-"))
                    timer.join()
                assert process.wait(10) == -signal.SIGKILL
            for name, until in client.cancelled.items():
                client.cancelled[name] = min(until, time.time())
            assert gone(ground, 5.0), f"of the killed service there are still {who_sees(ground)}"
        with started(serve, SERVING) as (process, address):
            with SyncClient(address, token=token(ground)) as service:
                client.sent_again(service)
                service.clear_demand(RUN)
                ends = {name: service.result(name, timeout=60) for name in client.accepted}
                client.read(service)
                held = service.status()
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)
        assert gone(ground, 5.0)
        assert list((ground / "scratch").glob("*/*")) == []
    assert client.accepted, "it was killed before anything was accepted: nothing is proved"
    assert {name: client.records[name] for name in client.accepted} == ends
    assert set(client.records) == set(client.accepted)
    assert (held.queued, held.running) == (0, 0)
    for name, rollout in client.records.items():
        status = rollout.outcome.status
        assert status in ("completed", "cancelled"), (name, rollout.outcome)
        assert status == "cancelled" or rollout.finished_at <= client.cancelled.get(name, math.inf), name
        assert rollout.reward == (1.0 if status == "completed" else None)  # the oracle plays gold
    assert any(retry.kind == "service_restarted" for rollout in ends.values() for retry in rollout.retries)


def token(ground: Path) -> str:
    return read_token(ground / "state" / "token")
