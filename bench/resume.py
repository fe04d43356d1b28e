"""What it saves to resume after a turn: tokens and worker-seconds where the service is killed again and again.

Rollouts of nine turns, eight of them with a shell command in a real sandbox, at an engine of fixed speed. The service
(``prorl-gym serve``) gets SIGKILL at random moments, the same with and without ``resume``, and is started again until
every rollout has its record. Worker-seconds are the rollouts in a stage, summed over time.
"""

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import aiohttp
import yaml
from _paced_engine import MODEL
from _report import SHORT, Figure, Report, StartConditions, figure, peer, report
from _rollout_systems import BENCH, READY_SECONDS, read_line, running, wait_answering

from prorl_gym.cli.demo.stack import free_ports
from prorl_gym.client import Client, read_token
from prorl_gym.records import Rollout, RolloutRequest

ROLLOUTS, AT_WORK = (4, 2) if SHORT else (24, 6)
"""Of all rollouts, so many are at work at once: a kill finds them at different turns."""
TURNS = 8
"""Of each rollout, before the one that hands in."""
COMMAND_SECONDS = 0.2
TOKENS_PER_SECOND = 150.0
KILLED_EVERY = (6.0,) if SHORT else (12.0, 6.0, 3.0)
"""Mean seconds of a service's life, from the moment that it is ready."""
SEEDS = (1,) if SHORT else (1, 2)
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Measured:
    """What a set of rollouts took, until all had their records."""

    kills: int
    tokens_per_token: float
    """Sampled by the engine for each one that was delivered."""
    worker_seconds: float
    """Of each rollout."""
    resumed_turns: float
    """Of each rollout."""


def row() -> dict[str, Any]:
    """Return the task: each command adds to what those before left in the sandbox."""
    step = {
        "text": "I take a step, and look at what all the steps before it have left behind in this sandbox.",
        "tool": "bash",
        "arguments": {"command": f"sleep {COMMAND_SECONDS}; echo done >> steps; wc -l < steps"},
    }
    program = "print(sum(map(int, input().split())))"
    finish = {"text": "", "tool": "finish", "arguments": {"answer": program}}
    return {
        "id": "resume",
        "question": "Read integers from one line and print their sum.",
        "solution": program,
        "tests": {"kind": "stdio", "cases": [{"stdin": "1 2 3", "stdout": "6"}]},
        "gold_steps": [*[step] * TURNS, finish],
    }


class Worker:
    """Adds up the rollouts at work over time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self, client: Client) -> None:
        """Look at the service until cancelled."""
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            stages = (await client.status()).capacity
            now = loop.time()
            self.seconds, last = self.seconds + (stages.init + stages.run + stages.eval) * (now - last), now
            await asyncio.sleep(_POLL_SECONDS)  # the service has no event for it


async def measure(engine: str, directory: Path, seed: int, killed_every: float, *, resume: bool) -> Measured:
    """Make the rollouts with a service that is killed at random moments."""
    dice, worker, kills = random.Random(seed), Worker(), 0
    requests = [RolloutRequest(environment="code", task=row()) for _ in range(ROLLOUTS)]
    before = await sampled_tokens(engine)
    rollouts: list[Rollout] | None = None
    while rollouts is None:
        life = dice.expovariate(1 / killed_every)
        rollouts = await live(engine, directory, requests, worker, life, resume=resume)
        kills += rollouts is None
    if any(rollout.reward != 1.0 for rollout in rollouts):
        raise RuntimeError(f"not all rollouts were solved: {[rollout.outcome for rollout in rollouts]}")
    tokens = await sampled_tokens(engine) - before
    return Measured(
        kills,
        tokens / sum(rollout.sampled_tokens for rollout in rollouts),
        worker.seconds / ROLLOUTS,
        mean(rollout.resumed_turns for rollout in rollouts),
    )


async def live(
    engine: str,
    directory: Path,
    requests: Sequence[RolloutRequest],
    worker: Worker,
    seconds: float,
    *,
    resume: bool,
) -> list[Rollout] | None:
    """Run one life of the service, so long at most; return the records, ``None`` if it was killed before."""
    (port,) = free_ports(1)
    config = {
        "inference": {"engines": [engine], "model": MODEL, "tokenizer": "small"},
        "sandbox": {"backend": "userns", "scratch": str(directory / "sandboxes")},
        "runner": {"queue": AT_WORK, "init": AT_WORK, "ready": 0, "run": AT_WORK},
        "retry": {"restarts": 10_000},
        "settings": {"resume": resume},
        "state": str(directory),
        "http": {"port": port, "stop_seconds": 10},
    }
    (directory / "service.yaml").write_text(yaml.safe_dump(config))
    log, address = directory / "service.log", f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "prorl_gym", "serve", "--config", str(directory / "service.yaml")]
    async with running(argv, log) as child:
        await wait_answering(f"{address}/readyz", child, log)
        async with Client(address, token=read_token(directory / "token")) as client:
            watching = asyncio.create_task(worker.watch(client))
            try:
                async with asyncio.timeout(seconds):
                    await client.submit(requests)  # a duplicate from the second life on
                    return list(await asyncio.gather(*(client.result(each.rollout_id) for each in requests)))
            except TimeoutError:
                return None
            finally:
                os.kill(child.pid, signal.SIGKILL)
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)


async def sampled_tokens(engine: str) -> float:
    """Ask the engine how many tokens it has sampled."""
    async with aiohttp.ClientSession() as session, session.get(f"{engine.removesuffix('/v1')}/sampled") as response:
        return (await response.json())["tokens"]


async def measure_all() -> list[Figure]:
    """Measure every rate of kills, with and without."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="prorl-bench-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o711)  # sandboxes have another uid when this is root
        directory = Path(name)
        rows = directory / "rows.jsonl"
        prompt = [{"role": "user", "content": row()["question"]}]
        rows.write_text(
            json.dumps({"responses_create_params": {"input": prompt}, "environment": "code", "task": row()}) + "\n"
        )
        log = directory / "engine.log"
        async with running(
            [sys.executable, str(BENCH / "_paced_engine.py"), str(rows), "--tokens-per-second", str(TOKENS_PER_SECOND)],
            log,
        ) as child:
            engine = await read_line(child, log, READY_SECONDS)
            for killed_every in KILLED_EVERY:
                figures += await measure_rate(engine, directory, killed_every)
    return figures


async def measure_rate(engine: str, directory: Path, killed_every: float) -> list[Figure]:
    """Measure one rate of kills, with and without, over all seeds."""
    arms: dict[bool, list[Measured]] = {True: [], False: []}
    for seed in SEEDS:
        for resume, measured in arms.items():
            state = directory / f"{killed_every}-{seed}-{resume}"
            state.mkdir(0o711)
            measured.append(await measure(engine, state, seed, killed_every, resume=resume))
            print(f"killed every {killed_every:g} s, seed {seed}, resume {resume}: {measured[-1]}", file=sys.stderr)
    ours, plain = arms[True], arms[False]
    life = f"service killed every {killed_every:g} s on average"
    return [
        figure(
            *(f"{life}: tokens sampled for each one delivered", [one.tokens_per_token for one in ours], ""),
            better="lower",
            backend="userns",
            peers=[peer("without resume", [one.tokens_per_token for one in plain])],
        ),
        figure(
            *(f"{life}: worker-seconds of a rollout", [one.worker_seconds for one in ours], "s"),
            better="lower",
            backend="userns",
            peers=[peer("without resume", [one.worker_seconds for one in plain])],
        ),
        figure(
            *(f"{life}: kills until all {ROLLOUTS} rollouts were done", [one.kills for one in ours], ""),
            better="lower",
            backend="userns",
            peers=[peer("without resume", [one.kills for one in plain])],
        ),
        figure(
            f"{life}: turns of a rollout, of {TURNS + 1}, that its last attempt resumed",
            [one.resumed_turns for one in ours],
            "",
            better="higher",
            backend="userns",
        ),
    ]


def run() -> Report:
    """Measure with and without resuming."""
    begun = StartConditions.capture()
    return report("resume", asyncio.run(measure_all()), begun=begun)


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
