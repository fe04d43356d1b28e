"""How well the stages of different rollouts overlap: work done over what the slots of the slowest stage could do.

The real service, ledger and runner in this process; the stages' work is sleeping, so that all slots are virtual. The
look begins when a fifth of the rollouts are finished and ends at four fifths. Work inside it is counted exactly: each
wait counts with the share of it that lies inside, at the length that was asked for.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _service_work as work

from prorl_gym.records import Rollout
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend, FakePolicySource, environment_lookup


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of one mix, in % of the bound."""

    steady: float
    whole: float
    """From the first submission to the last record, with filling up and draining."""


async def measure_overlap(mix: work.Mix, directory: Path) -> Overlap:
    """Run a mix.

    Raises:
        RuntimeError: another stage than its name says turned out to be the slowest.
    """
    environment = work.TimedEnvironment(record=True)
    ledger = await SqliteLedger.open(LedgerConfig(path=directory / f"{mix.slowest}.sqlite"))
    find: Any = environment_lookup(environment)  # pyright: ignore[reportArgumentType]
    slots = RunnerConfig(init=work.SLOTS["init"], run=work.SLOTS["run"], eval=work.SLOTS["eval"])
    service = RolloutService(ledger, InProcessRunner(find, FakePolicySource(), EmptyBackend(), slots))
    finished: list[float] = []
    done = asyncio.Event()

    def note(rollout: Rollout) -> None:
        finished.append(time.monotonic())
        if len(finished) == work.MIXED:
            done.set()

    service.add_record_observer(note)
    await service.start()
    began = time.monotonic()
    await service.submit(work.mixed(mix, mix.slowest))
    await done.wait()
    await service.stop()
    first, last = (finished[int(share * work.MIXED) - 1] for share in work.STEADY)
    spans = environment.spans
    slowest = mix.slowest
    bounds = {stage: sum(span.seconds for span in of) / work.SLOTS[stage] for stage, of in spans.items()}
    if slowest != max(bounds, key=lambda stage: bounds[stage]):
        raise RuntimeError(f"{mix.name}: {bounds}")
    worked = _inside(spans[slowest], first, last)
    return Overlap(
        100 * worked / (work.SLOTS[slowest] * (last - first)), 100 * bounds[slowest] / (finished[-1] - began)
    )


def _inside(spans: Sequence[work.Span], first: float, last: float) -> float:
    """Return seconds of work between two moments."""
    total = 0.0
    for span in spans:
        lies = max(0.0, min(span.ended, last) - max(span.began, first))
        total += span.seconds * lies / (span.ended - span.began)
    return total
