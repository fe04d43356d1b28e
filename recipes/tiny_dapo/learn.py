"""``make learn``: one policy, one domain, one seed, from nothing, through the service. Ends with PASS or FAIL and why.

Starts an engine and a rollout service on free ports of 127.0.0.1, warms a policy up, lets it learn, evaluates it before
and after on held-out questions, and stops both.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import torch
from audit import LearnError
from controls import check_controls
from curve import draw, summary
from engine import MODEL
from evaluate import Account, account_of, accuracy
from processes import Process, server
from tasks import DOMAINS, HELD_OUT, Question, held_out, write_tokenizer
from train import RUN, Learner
from warmup import WarmPolicy, WarmupError, warm_up

from prorl_gym.client import Client, read_token
from prorl_gym.errors import ProrlError

HERE = Path(__file__).parent
SERVICE_NICENESS = 5
"""Nicer than the learner: asynchronous training on two cores would otherwise wait for its own rollouts."""


@dataclass(frozen=True, slots=True)
class Goal:
    """How long to learn, and what has to come of it."""

    updates: int
    questions: int
    greedy: float
    """By how much the greedy accuracy has to rise."""
    sampled: float
    probe_every: int
    """Updates between two greedy evaluations of a few questions, for the curve."""
    reached: float = 0.0
    """What the greedy accuracy has to be in the end."""


FULL = Goal(updates=24, questions=HELD_OUT, greedy=0.6, sampled=0.3, probe_every=8)
EASIER = Goal(updates=16, questions=128, greedy=0.4, sampled=0.3, probe_every=4, reached=0.8)
SHORT = Goal(updates=8, questions=128, greedy=0.2, sampled=0.1, probe_every=8)
PROBED = 64


@dataclass
class Report:
    """What the closing line and the curve are made of."""

    seed: int
    environment: str = "math"
    greedy: list[tuple[int, float]] = field(default_factory=list)
    """Update and accuracy."""
    sampled: list[tuple[int, float]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    mismatch: float = 0.0
    rollouts: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    wall: dict[str, float] = field(default_factory=dict)
    """Seconds of warm-up, evaluation, learning (exchange with the service included) and waiting for rollouts."""
    cpu: dict[str, float] = field(default_factory=dict)
    """Seconds of the trainer's parts, the engine, the service, and its children: sandboxes and graders."""
    idle: float = 0.0
    """Share of the updates' wall clock that the trainer waited for rollouts."""
    load: float = 0.0
    """Of the machine at the end, mean of 5 minutes; this run is part of it."""


def closing_line(report: Report, problem: str) -> str:
    """Return the line that says how it went."""
    if problem:
        return f"learn: FAIL {' '.join(problem.split())}"
    (_, greedy), *_, (_, greedy_after) = report.greedy
    (_, sampled), *_, (_, sampled_after) = report.sampled
    return (
        f"learn: PASS greedy {greedy:.2f} -> {greedy_after:.2f}, sampled {sampled:.2f} -> {sampled_after:.2f}, "
        f"mismatch {report.mismatch:.1g}, rollouts {report.rollouts}, seconds {report.seconds:.0f}"
    )


@contextmanager
def measured(report: Report, part: str) -> Iterator[None]:
    """Add what the block takes to the report: wall clock, and the trainer's own CPU seconds."""
    started, cpu = monotonic(), process_time()
    try:
        yield
    finally:
        report.wall[part] = report.wall.get(part, 0.0) + monotonic() - started
        report.cpu[part] = report.cpu.get(part, 0.0) + process_time() - cpu


def add_costs(report: Report) -> None:
    """Add the costs of the updates, and the rest of the trainer's CPU time."""
    waited, seconds, cpu = (sum(step[part] for step in report.steps) for part in ("waited", "seconds", "cpu_seconds"))
    report.wall |= {"learning": seconds - waited, "waiting": waited}
    trainer = {"warm-up", "evaluation"} & report.cpu.keys()
    report.cpu |= {"learning": cpu, "exchange": process_time() - cpu - sum(report.cpu[part] for part in trainer)}
    report.idle = waited / seconds if seconds else 0.0
    report.load = os.getloadavg()[1]


def service_config(domain: type[Question], engine: str, tokenizer: Path, state: Path) -> dict[str, object]:
    """Return the configuration of the service: the environment as it ships."""
    return {
        "inference": {"engines": [engine], "model": MODEL, "tokenizer": str(tokenizer)},
        "environments": [domain.environment],
        "runner": {"run": 16},  # more agents would only take the learner's share of the cores
        "state": str(state),
        "http": {"port": 0, "stop_seconds": 5.0},
        "log": {"format": "plain"},
    }


async def learn(
    client: Client, engine: str, domain: type[Question], warm: WarmPolicy, goal: Goal, report: Report
) -> None:
    """Evaluate, learn, evaluate again, and judge.

    Raises:
        LearnError: a check failed or the goal was missed; the message names the reason.
    """
    asked = held_out(domain, goal.questions)

    async def evaluate(update: int) -> None:
        with measured(report, "evaluation"):
            report.greedy.append((update, await accuracy(client, f"greedy-{update}", asked, 0.0)))
            report.sampled.append((update, await accuracy(client, f"sampled-{update}", asked, 1.0)))
        say(f"update {update}: greedy {report.greedy[-1][1]:.3f}, sampled {report.sampled[-1][1]:.3f}")

    learner = Learner(client, engine.removesuffix("/v1"), warm.model, domain, report.seed)
    await learner.publish()
    await evaluate(0)
    steps = learner.learn(goal.updates)
    update = 0
    async for step in steps:
        update += 1
        report.steps.append(asdict(step))
        report.mismatch = max(report.mismatch, step.mismatch.max_abs_diff)
        say(
            f"update {update}: reward {step.reward:.2f} of {step.groups} groups, staleness {step.staleness:.1f}, "
            f"clipped {step.clipped:.1%}, mismatch {step.mismatch.max_abs_diff:.1e}, "
            f"{step.seconds:.1f} s ({step.waited:.1f} s waiting)"
        )
        if update % goal.probe_every == 0 and update < goal.updates:
            with measured(report, "evaluation"):
                report.greedy.append((update, await accuracy(client, f"probe-{update}", asked[:PROBED], 0.0)))
            say(f"update {update}: greedy {report.greedy[-1][1]:.3f} of {PROBED}")
    await client.cancel(runs=[RUN])  # what was submitted ahead
    await evaluate(goal.updates)
    account = await account_of(client, RUN, learner.submitted)
    report.rollouts, report.ends = account.submitted, dict(account.ends)
    for found in check_controls(learner):
        say(f"control, {found.control}: found after {found.rollouts} rollouts, {found.message}")
    judge(report, goal, account)


def judge(report: Report, goal: Goal, account: Account) -> None:
    """Compare what was reached with the goal.

    Raises:
        LearnError: naming what was missed.
    """
    if account.lost:
        raise LearnError(f"rollouts: {account.lost} of {account.submitted} lost ({dict(account.ends)})")
    for name, values, wanted in (("greedy", report.greedy, goal.greedy), ("sampled", report.sampled, goal.sampled)):
        gained = values[-1][1] - values[0][1]
        if gained < wanted:
            raise LearnError(
                f"{name}: accuracy {values[0][1]:.2f} -> {values[-1][1]:.2f} on {goal.questions} held-out questions, "
                f"wanted +{wanted:g}"
            )
    if report.greedy[-1][1] < goal.reached:
        raise LearnError(f"greedy: accuracy {report.greedy[-1][1]:.2f} in the end, wanted {goal.reached:g}")


def run(arguments: argparse.Namespace, work: Path, report: Report) -> None:
    """Start both servers, warm up and learn.

    Raises:
        LearnError, WarmupError, ProrlError: naming what is wrong.
    """
    domain = DOMAINS[arguments.domain]
    goal = SHORT if arguments.short else FULL if arguments.domain == "math" else EASIER
    language = write_tokenizer(domain, work / "tokenizer")
    engine_command = [sys.executable, str(HERE / "engine.py"), "--tokenizer", str(work / "tokenizer")]
    with server(Process("engine", engine_command, arguments.out / "engine.log"), report.cpu) as engine:
        config = work / "service.yaml"
        config.write_text(
            json.dumps(service_config(domain, engine, work / "tokenizer", work / "state")), encoding="utf-8"
        )
        service_command = [str(arguments.service), "serve", "--config", str(config)]
        serving = Process("service", service_command, arguments.out / "service.log", SERVICE_NICENESS)
        with server(serving, report.cpu) as service:
            with measured(report, "warm-up"):
                warm = warm_up(domain, language, report.seed)

            async def session() -> None:
                async with Client(service, token=read_token(work / "state" / "token")) as client:
                    await learn(client, engine, domain, warm, goal, report)

            asyncio.run(session())


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def main() -> None:
    """Run once; print the closing line; exit with 0 or 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--service", type=Path, required=True, help="the prorl-gym command")
    parser.add_argument("--domain", choices=list(DOMAINS), default="math")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="fewer updates, and a lower goal")
    parser.add_argument("--out", type=Path, default=Path("results/tiny_dapo"), help="logs, figures and the curve")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(1)
    started, report, problem = monotonic(), Report(arguments.seed, arguments.domain), ""
    try:
        with tempfile.TemporaryDirectory(prefix="prorl-learn-") as work:
            run(arguments, Path(work), report)
    except (LearnError, WarmupError, ProrlError) as error:
        problem = str(error)
    except KeyboardInterrupt:
        problem = "interrupted"
    except Exception as error:  # a run that crashes has its closing line, too
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}"
    report.seconds = monotonic() - started
    add_costs(report)
    (arguments.out / "report.json").write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    if report.steps:
        draw([summary(asdict(report))], arguments.out / "curve.png")
    say(f"ends {report.ends}, CPU seconds {sum(report.cpu.values()):.0f}; logs and figures in {arguments.out}")
    say(closing_line(report, problem))
    sys.exit(1 if problem else 0)


if __name__ == "__main__":
    main()
