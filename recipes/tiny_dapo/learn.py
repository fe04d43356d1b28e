"""``make learn``: one policy, one task, one seed, from nothing, through the service. Ends with one line, PASS or FAIL.

Starts an engine and a rollout service on free ports of 127.0.0.1, warms a policy up, lets it learn, evaluates it before
and after on held-out questions, and stops both.
"""

import argparse
import asyncio
import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic

import torch
from audit import LearnError
from curve import draw
from engine import MODEL
from evaluate import Account, account_of, accuracy
from model import CONTEXT
from tasks import HELD_OUT, held_out, write_tokenizer
from train import MAX_MISMATCH, RUN, Learner, mismatch_of
from warmup import TURN_TOKENS, TURNS, WarmPolicy, WarmupError, warm_up

from prorl_gym.client import Client, read_token
from prorl_gym.errors import ProrlError
from prorl_gym.trainers.mismatch import MismatchError, require_match

HERE = Path(__file__).parent
_ANNOUNCED = re.compile(r"serving on (http://[\w.:]+(?:/v1)?)")
_PR_SET_PDEATHSIG = 1
STOP_SECONDS = 30.0


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


FULL = Goal(updates=24, questions=HELD_OUT, greedy=0.6, sampled=0.3, probe_every=8)
SHORT = Goal(updates=8, questions=128, greedy=0.2, sampled=0.1, probe_every=8)
PROBED = 64


@dataclass
class Report:
    """What the closing line and the curve are made of."""

    seed: int
    greedy: list[tuple[int, float]] = field(default_factory=list)
    """Update and accuracy."""
    sampled: list[tuple[int, float]] = field(default_factory=list)
    steps: list[dict[str, object]] = field(default_factory=list)
    mismatch: float = 0.0
    rollouts: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_seconds: float = 0.0


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
def server(
    name: str, command: Sequence[str], log: Path, niceness: int = 0, announced: re.Pattern[str] = _ANNOUNCED
) -> Iterator[str]:
    """Run a server while the context is open; yield the address that it announces.

    It ends with this process, whatever ends that.

    Raises:
        LearnError: it does not start.
    """

    def prepare() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        os.setpgid(0, 0)  # Ctrl-C reaches this process, which stops it
        os.nice(niceness)

    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=prepare,
        env=env,
        text=True,
        errors="replace",
    )
    assert child.stdout is not None
    written: list[str] = []
    try:
        with log.open("w", encoding="utf-8") as output:
            for line in child.stdout:
                written.append(line.strip())
                print(line, end="", file=output, flush=True)
                if found := announced.search(line):
                    break
            else:
                raise LearnError(f"{name}: it does not start: {' '.join(written[-3:])[-400:]}")
            copier = threading.Thread(target=output.writelines, args=(child.stdout,), daemon=True)
            copier.start()
            try:
                yield found[1]
            finally:
                child.terminate()
                try:
                    child.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    child.kill()
                copier.join(STOP_SECONDS)
    finally:
        child.kill()
        child.wait()


def service_config(engine: str, tokenizer: Path, state: Path) -> dict[str, object]:
    """Return the configuration of the service: the math environment as it ships, within the model's small context."""
    return {
        "inference": {"engines": [engine], "model": MODEL, "tokenizer": str(tokenizer)},
        "environments": ["math"],
        "runner": {"run": 16},  # more agents would only take the learner's share of the cores
        "settings": {"max_turns": TURNS, "max_turn_tokens": TURN_TOKENS, "max_tokens": CONTEXT - 12},
        "state": str(state),
        "http": {"port": 0, "stop_seconds": 5.0},
        "log": {"format": "plain"},
    }


async def learn(client: Client, engine: str, warm: WarmPolicy, goal: Goal, report: Report) -> None:
    """Evaluate, learn, evaluate again, and judge.

    Raises:
        LearnError: a check failed or the goal was missed; the message names the reason.
    """
    asked = held_out(goal.questions)

    async def evaluate(update: int) -> None:
        report.greedy.append((update, await accuracy(client, f"greedy-{update}", asked, 0.0)))
        report.sampled.append((update, await accuracy(client, f"sampled-{update}", asked, 1.0)))
        say(f"update {update}: greedy {report.greedy[-1][1]:.3f}, sampled {report.sampled[-1][1]:.3f}")

    learner = Learner(client, engine.removesuffix("/v1"), warm.model, report.seed)
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
            report.greedy.append((update, await accuracy(client, f"probe-{update}", asked[:PROBED], 0.0)))
            say(f"update {update}: greedy {report.greedy[-1][1]:.3f} of {PROBED}")
    await client.cancel(runs=[RUN])  # what was submitted ahead
    await evaluate(goal.updates)
    account = await account_of(client, RUN, learner.submitted)
    report.rollouts, report.ends = account.submitted, dict(account.ends)
    check_controls(learner)
    judge(report, goal, account)


def check_controls(learner: Learner) -> None:
    """Make two faults that a policy learns in spite of; the mismatch check has to see both.

    Raises:
        LearnError: it does not.
    """
    batch, weights = learner.batch, learner.weights
    assert batch is not None
    seen = (batch.mask.cumsum(1) > 0) & (batch.ids > 0)
    previous = {version: weights.get(version - 1, model) for version, model in weights.items()}
    faults = {
        "unmasked observations": (replace(batch, mask=seen.float()), weights),
        "log-probs of the previous version": (batch, previous),
    }
    for name, (faulty, computed_with) in faults.items():
        try:
            require_match(mismatch_of(faulty, computed_with), MAX_MISMATCH)
        except MismatchError as error:
            say(f"control, {name}: found ({error.what})")
            continue
        raise LearnError(f"control: the mismatch check does not find {name}")


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


def run(arguments: argparse.Namespace, work: Path, report: Report) -> None:
    """Start both servers, warm up and learn.

    Raises:
        LearnError, WarmupError, ProrlError: naming what is wrong.
    """
    goal = SHORT if arguments.short else FULL
    language = write_tokenizer(work / "tokenizer")
    engine_command = [sys.executable, str(HERE / "engine.py"), "--tokenizer", str(work / "tokenizer")]
    with server("engine", engine_command, arguments.out / "engine.log") as engine:
        config = work / "service.yaml"
        config.write_text(json.dumps(service_config(engine, work / "tokenizer", work / "state")), encoding="utf-8")
        service_command = [str(arguments.service), "serve", "--config", str(config)]
        # Nicer than the learner: asynchronous training on two cores would otherwise wait for its own rollouts.
        with server("service", service_command, arguments.out / "service.log", niceness=5) as service:
            warm = warm_up(language, report.seed)

            async def session() -> None:
                async with Client(service, token=read_token(work / "state" / "token")) as client:
                    await learn(client, engine, warm, goal, report)

            asyncio.run(session())


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def main() -> None:
    """Run once; print the closing line; exit with 0 or 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--service", type=Path, required=True, help="the prorl-gym command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="fewer updates, and a lower goal")
    parser.add_argument("--out", type=Path, default=Path("results/tiny_dapo"), help="logs, figures and the curve")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(1)
    started, report, problem = monotonic(), Report(arguments.seed), ""
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
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    report.cpu_seconds = sum(one.ru_utime + one.ru_stime for one in used)
    (arguments.out / "report.json").write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    if report.steps:
        draw(asdict(report), arguments.out / "curve.png")
    say(f"ends {report.ends}, CPU seconds {report.cpu_seconds:.0f}; logs and figures in {arguments.out}")
    say(closing_line(report, problem))
    sys.exit(1 if problem else 0)


if __name__ == "__main__":
    main()
