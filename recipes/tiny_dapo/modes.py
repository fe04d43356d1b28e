"""One recipe in several modes, side by side: ``python modes.py --service PATH/TO/prorl-gym``.

- ``async``: the recipe as it is. Rollouts are sampled while the learner learns; staleness is at most 2.
- ``sync``: 16 groups are submitted for each update. Once 8 of them teach something the rest is terminated, and nothing
  runs while the learner learns. ``sync-all``: without early termination; every group runs to its end.
- ``coupled``: as ``sync``, with the service inside the trainer's process, on its event loop (``embedded.py``).
  ``coupled-async``: as ``async``, likewise: the rollouts stand still while the learner computes.

All start from the same weights and ask the same questions in the same order. The coupled modes import the service.
"""

import argparse
import asyncio
import json
import os
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from curve import modes_table
from evaluate import accuracy
from learn import SERVICE_NICENESS, say, service_config
from stack import script_parser, stack, start_weights, tiny_engine, write_report
from tasks import Sum, held_out, write_tokenizer
from train import AHEAD, GROUP_SIZE, GROUPS, RUN, STALL_SECONDS, Learner

from prorl_gym.client import Client, CompletedGroup, GroupsDroppedError, GroupStream
from prorl_gym.demand import Demand, RedundantHandling

MODES = ("async", "sync", "sync-all", "coupled", "coupled-async")


class KeepingClient(Client):
    """Acknowledges nothing, so that every record can be counted at the end."""

    async def acknowledge(self, run_id: str | None, cursor: int) -> int:
        """Do nothing."""
        return 0


@dataclass
class SyncLearner(Learner):
    """Submits what one update needs, waits for it, and learns while nothing runs."""

    early: bool = True
    """Whether the rest is terminated once enough groups teach something."""

    async def _gather(self, stream: GroupStream) -> tuple[list[CompletedGroup], list[CompletedGroup]]:
        taken, informative = list[CompletedGroup](), list[CompletedGroup]()
        first = len(self.submitted) // GROUP_SIZE
        while len(informative) < GROUPS:
            if self.early:
                await self.client.set_demand(RUN, self._demand())
            await self._submit(AHEAD)
            self._under_way = AHEAD
            while self._under_way and not (self.early and len(informative) >= GROUPS):
                try:
                    async with asyncio.timeout(STALL_SECONDS):
                        group = await anext(stream)
                except GroupsDroppedError:
                    break
                self._resume, self._used = group.resume_cursor, group.cursor
                if int(str(group.group_id).removeprefix("group-")) < first:
                    continue  # complete just before the rest of the update before was terminated
                self._under_way -= 1
                taken.append(group)
                if len(set(group.rewards)) > 1:
                    informative.append(group)
        await self.client.cancel(runs=[RUN])
        return taken, informative[:GROUPS]

    def _demand(self) -> Demand:
        return Demand(
            groups=GROUPS,
            after=self._used,
            version=self.version,
            max_staleness=0,
            redundant=RedundantHandling(run="kill"),
        )


@asynccontextmanager
async def running(
    mode: str, command: Path, work: Path, out: Path, niceness: int
) -> AsyncGenerator[tuple[Client, str], None]:
    """Run engine and service as the mode wants it; yield a client and the engine's address."""
    if not mode.startswith("coupled"):
        with stack(command, work, out, niceness=niceness) as found:
            async with KeepingClient(found.service, token=found.token) as client:
                yield client, found.engine
        return
    from embedded import embedded_client

    write_tokenizer(Sum, work / "tokenizer")
    with tiny_engine(work, out) as engine:
        config = service_config(Sum, engine, work / "tokenizer", work / "state")
        async with embedded_client(config) as client:
            yield client, engine.removesuffix("/v1")


async def measure(mode: str, client: Client, learner: Learner, updates: int, questions: int) -> dict[str, Any]:
    """Learn, and return the figures of the run."""
    await learner.publish()
    asked = held_out(Sum, questions)
    greedy = [await accuracy(client, "greedy-0", asked, 0.0)]
    steps = []
    async for step in learner.learn(updates):
        steps.append(step)
        say(
            f"{mode} {len(steps)}: reward {step.reward:.2f} of {step.groups}, {step.seconds:.1f} s "
            f"({step.waited:.1f} s waiting), staleness {step.staleness:.2f}"
        )
    await client.cancel(runs=[RUN])
    greedy.append(await accuracy(client, "greedy", asked, 0.0))
    ends, worker_seconds = Counter[str](), 0.0
    async for delivered in client.stream(RUN, follow=False):
        ends[delivered.rollout.outcome.status] += 1
        worker_seconds += delivered.rollout.worked_seconds
    seconds = sum(step.seconds for step in steps)
    ended = sum(ends.values()) - ends["cancelled"]
    return {
        "updates": updates,
        "rollouts_per_second": round(ended / seconds, 2),
        "seconds_per_update": round(seconds / updates, 2),
        "idle_share": round(sum(step.waited for step in steps) / seconds, 3),
        "worker_seconds_per_update": round(worker_seconds / updates, 1),
        "cut": f"{ends['cancelled']} of {sum(ends.values())}",
        "staleness": round(fmean(step.staleness for step in steps), 2),
        "reward_last_half": round(fmean(step.reward for step in steps[updates // 2 :]), 3),
        "greedy": f"{greedy[0]:.2f} -> {greedy[1]:.2f}",
        "mismatch": float(f"{max(step.mismatch.max_abs_diff for step in steps):.1g}"),
        "rewards": [round(step.reward, 3) for step in steps],
        "ends": dict(ends),
        "load": [round(one, 1) for one in os.getloadavg()],
    }


async def run(mode: str, arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run one mode from the start."""
    language = write_tokenizer(Sum, work / "tokenizer")
    model = start_weights(language, arguments.seed, arguments.out / f"warm-{arguments.seed}.pt")
    async with running(mode, arguments.service, work, arguments.out, arguments.niceness) as (client, engine):
        if mode.endswith("async"):
            learner = Learner(client, engine, model, Sum, arguments.seed)
        else:
            learner = SyncLearner(client, engine, model, Sum, arguments.seed, early=not mode.endswith("-all"))
        return await measure(mode, client, learner, arguments.updates, arguments.questions)


def main() -> None:
    """Run the modes, one after the other; add their figures to the report; print the table."""
    parser = script_parser(__doc__, Path("results/tiny_modes"), updates=12, questions=64)
    parser.add_argument("--mode", action="append", choices=MODES, help="all of them by default")
    parser.add_argument("--niceness", type=int, default=SERVICE_NICENESS, help="of the service, where it is a process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = arguments.out / "modes.json"
    reports: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    found = reports.setdefault(f"service at niceness {arguments.niceness}", {})
    for mode in arguments.mode or MODES:
        with tempfile.TemporaryDirectory(prefix="prorl-modes-") as work:
            Path(work).chmod(0o755)
            found[mode] = asyncio.run(run(mode, arguments, Path(work)))
        write_report(report, reports)
    print(modes_table(reports))


if __name__ == "__main__":
    main()
