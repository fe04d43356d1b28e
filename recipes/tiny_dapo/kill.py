"""Kill anything: the same learning twice, once undisturbed, once with SIGKILL of service, engines and trainer.

    python kill.py --service PATH/TO/prorl-gym

Deterministic learning: the groups of an update are fixed, each rollout has its seed, groups are taken in the order in
which they were submitted, and an update waits for all of its groups. The trainer keeps weights, optimizer and cursors
in a checkpoint, from which it and the engines start. Both runs have to end with the same rollouts and the same weights,
bit by bit.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, aclosing
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from aiohttp import ClientError
from audit import LearnError
from learn import HERE, SERVICE_NICENESS, say, service_config
from model import Decoder, token_logprobs
from processes import Process
from stack import script_parser, start_weights, write_report
from tasks import Sum, questions, write_tokenizer
from train import GROUP_SIZE, MAX_MISMATCH, RUN, Learner, group_requests

from prorl_gym.client import Client, CompletedGroup, read_token
from prorl_gym.errors import ProrlError
from prorl_gym.free_ports import free_ports

ENGINES = 2
GROUPS = 4
"""Of an update."""
VICTIMS = ("trainer", "engine 0", "service", "engine 1")
KILLS = 12
PUBLISHES, RETRY_SECONDS = 20, 0.5


# --- the trainer ------------------------------------------------------------------------------------------------------


@dataclass
class OrderedLearner(Learner):
    """Learns from fixed groups in a fixed order; every rollout of an update is sampled with the same weights."""

    engines: Sequence[str] = ()

    async def publish_as(self, version: int) -> None:
        """Have the pool serve our weights as this version, whatever was killed in between."""
        self.version = version
        self.weights = {version: deepcopy(self.model).eval()}
        for _ in range(PUBLISHES):
            try:
                policy = await self.client.policy()
                if policy.version >= version:  # published before this trainer was killed, perhaps in the pause
                    await self.client.resume()
                    return
                with torch.inference_mode():
                    reference = token_logprobs(self.model, torch.tensor([policy.probe_ids]))[0, 1:].tolist()
                async with self.client.weight_update(version, mode="drain", reference=reference):
                    await self.load_weights()
                return
            except ProrlError as error:
                say(f"publish {version}: again after: {error}")
                await asyncio.sleep(RETRY_SECONDS)
        raise LearnError(f"weights: version {version} could not be published")

    async def load_weights(self) -> None:
        """Load our weights into every engine that answers; one that does not loads the checkpoint at its start."""
        for engine in self.engines:
            self.engine = engine
            try:
                await super().load_weights()
            except ClientError as error:
                say(f"{engine} takes no weights now: {error!r}")

    async def gather(self, update: int, cursor: int, used: int) -> list[CompletedGroup]:
        """Submit the groups of an update, or find them submitted, and return them in their order."""
        first = update * GROUPS
        asked = islice(questions(Sum, self.seed), first, first + GROUPS)
        await self.client.submit(group_requests(self.domain, self.seed, first, asked))
        found: dict[str | None, CompletedGroup] = {}
        async with aclosing(self.client.stream_groups(RUN, cursor, used_cursor=used)) as stream:
            while len(found) < GROUPS:
                group = await anext(stream)
                found[group.group_id] = group
                self._resume, self._used = group.resume_cursor, group.cursor
        return [found[f"group-{number}"] for number in range(first, first + GROUPS)]

    def with_own_logprobs(self, group: CompletedGroup) -> CompletedGroup:
        """Replace the served log-probs by our own of the same weights.

        An engine's differ in their last bits with the batch that a token was sampled in, which is another one in each
        run: the largest difference is checked, and not learnt from.
        """
        rollouts = []
        for rollout in group.rollouts:
            segments = []
            for segment in rollout.segments:
                with torch.inference_mode():
                    own = token_logprobs(self.weights[self.version], torch.tensor([segment.token_ids]))[0].tolist()
                own = [value if sampled else 0.0 for value, sampled in zip(own, segment.mask, strict=True)]
                gap = max((abs(a - b) for a, b in zip(own, segment.logprobs, strict=True)), default=0.0)
                if gap > MAX_MISMATCH:
                    raise LearnError(f"mismatch: {rollout.rollout_id} differs by {gap:.3g} nats")
                segments.append(segment.model_copy(update={"logprobs": own}))
            rollouts.append(rollout.model_copy(update={"segments": segments}))
        return CompletedGroup(group.group_id, tuple(rollouts), group.cursor, group.resume_cursor)

    async def learn_update(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Make the update that follows a checkpoint, and return the next checkpoint."""
        version = saved["version"]
        await self.publish_as(version)
        groups = await self.gather(version - 1, saved["cursor"], saved["used"])
        informative = [self.with_own_logprobs(group) for group in groups if len(set(group.rewards)) > 1]
        self._rng = random.Random(f"minibatches {self.seed} {version}")
        if informative:
            self.learn_from(informative)
        return {
            "version": version + 1,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "cursor": self._resume,
            "used": self._used,
            "digests": [*saved["digests"], digest_of(groups)],
            "retries": saved["retries"] + sum(len(one.retries) for group in groups for one in group.rollouts),
        }


def digest_of(groups: Sequence[CompletedGroup]) -> str:
    """Return a hash of what was sampled and what it was worth."""
    found = hashlib.sha256()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        said = [[one.token_ids, one.mask, one.policy_versions] for one in rollout.segments]
        found.update(json.dumps([rollout.rollout_id, rollout.reward, rollout.outcome.status, said]).encode())
    return found.hexdigest()[:16]


def weights_of(model: Decoder) -> str:
    """Return a hash of the weights, bit by bit."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()[:16]


def save(file: Path, saved: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all."""
    partial = file.with_suffix(".partial")
    torch.save(saved, partial)
    partial.replace(file)


async def train(arguments: argparse.Namespace) -> None:
    """Learn from where the checkpoint is to the last update."""
    saved = torch.load(arguments.checkpoint, weights_only=True)
    model = Decoder(saved["model"]["head.weight"].shape[0]).double()
    model.load_state_dict(saved["model"])
    async with Client(arguments.url, token=read_token(arguments.token)) as client:
        learner = OrderedLearner(client, "", model, Sum, arguments.seed, engines=arguments.engine)
        if "optimizer" in saved:
            learner.optimizer.load_state_dict(saved["optimizer"])
        say(f"resumed at update {saved['version'] - 1}")
        while saved["version"] <= arguments.updates:
            saved = await learner.learn_update(saved)
            save(arguments.checkpoint, saved)
            await client.acknowledge(RUN, saved["cursor"])
            say(f"update {saved['version'] - 1}: rollouts {saved['digests'][-1]}, weights {weights_of(model)}")


# --- what starts and kills --------------------------------------------------------------------------------------------


def processes(arguments: argparse.Namespace, work: Path, out: Path) -> dict[str, Process]:
    """Return service, engines and trainer of one run, none of them started."""
    service_port, *ports = free_ports(1 + ENGINES)
    checkpoint, config = work / "checkpoint.pt", work / "service.yaml"
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    settings: dict[str, Any] = service_config(Sum, f"{urls[0]}/v1", work / "tokenizer", work / "state")
    settings["inference"]["engines"] = [f"{url}/v1" for url in urls]
    settings["http"]["port"] = service_port
    settings["retry"] = {"restarts": 100, "attempts": 10}  # more often than anything is killed
    config.write_text(json.dumps(settings), encoding="utf-8")
    engine = [sys.executable, str(HERE / "engine.py"), "--tokenizer", str(work / "tokenizer")]
    trainer = [sys.executable, str(HERE / "kill.py"), "--service", str(arguments.service), "--train"]
    trainer += ["--url", f"http://127.0.0.1:{service_port}", "--token", str(work / "state" / "token")]
    trainer += ["--checkpoint", str(checkpoint), "--updates", str(arguments.updates), "--seed", str(arguments.seed)]
    trainer += [part for url in urls for part in ("--engine", url)]
    engines = {
        f"engine {number}": [*engine, "--port", str(port), "--checkpoint", str(checkpoint)]
        for number, port in enumerate(ports)
    }
    service = [str(arguments.service), "serve", "--config", str(config)]
    resumed, path = re.compile("resumed at update"), {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return {
        **{name: Process(name, command, out / f"{name.replace(' ', '-')}.log") for name, command in engines.items()},
        "service": Process("service", service, out / "service.log", SERVICE_NICENESS),
        "trainer": Process("trainer", trainer, out / "trainer.log", announced=resumed, env=path),
    }


def learn(arguments: argparse.Namespace, kills: int) -> dict[str, Any]:
    """Learn once, killing something that often; return what came of it.

    Raises:
        LearnError: the trainer failed, or something does not start again.
    """
    name = "killed" if kills else "undisturbed"
    out = arguments.out / name
    out.mkdir(parents=True, exist_ok=True)
    dice, killed = random.Random(arguments.seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="prorl-kill-") as place, ExitStack() as started:
        work = Path(place)
        work.chmod(0o755)
        language = write_tokenizer(Sum, work / "tokenizer")
        model = start_weights(language, arguments.seed, arguments.out / f"warm-{arguments.seed}.pt")
        begin = {"version": 1, "model": model.state_dict(), "cursor": 0, "used": 0, "digests": [], "retries": 0}
        save(work / "checkpoint.pt", begin)
        all_of_them = processes(arguments, work, out)
        for one in all_of_them.values():
            one.start()
            started.callback(one.kill)
            one.wait_ready()
        began, trainer = monotonic(), all_of_them["trainer"]
        victims = (VICTIMS[number % len(VICTIMS)] for number in range(kills))
        while True:
            victim = next(victims, None)
            try:
                code = trainer.child.wait(None if victim is None else dice.uniform(0.2, 2.5))
            except subprocess.TimeoutExpired:
                assert victim is not None
                say(f"{monotonic() - began:6.1f} s: SIGKILL of {victim}")
                all_of_them[victim].kill()
                all_of_them[victim].start()
                all_of_them[victim].wait_ready()
                killed[victim] += 1
                continue
            if code:
                raise LearnError(f"{name}: the trainer ended with {code}: see {trainer.log}")
            break
        saved = torch.load(work / "checkpoint.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        return {
            "kills": dict(killed),
            "seconds": round(monotonic() - began, 1),
            "updates": len(saved["digests"]),
            "rollouts": len(saved["digests"]) * GROUPS * GROUP_SIZE,
            "attempts_made_again": saved["retries"],
            "weights": weights_of(model),
            "rollouts_by_update": saved["digests"],
        }


def main() -> None:
    """Learn twice, and compare."""
    parser = script_parser(__doc__, Path("results/tiny_kill"), updates=16)
    parser.add_argument("--kills", type=int, default=KILLS)
    trainer = parser.add_argument_group("the trainer's own process")
    trainer.add_argument("--train", action="store_true")
    trainer.add_argument("--url")
    trainer.add_argument("--token", type=Path)
    trainer.add_argument("--checkpoint", type=Path)
    trainer.add_argument("--engine", action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.train:
        asyncio.run(train(arguments))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    undisturbed, killed = learn(arguments, 0), learn(arguments, arguments.kills)
    same = {name: undisturbed[name] == killed[name] for name in ("rollouts_by_update", "weights")}
    done = sum(killed["kills"].values())
    write_report(arguments.out / "kill.json", {"same": same, "undisturbed": undisturbed, "killed": killed})
    passed = all(same.values()) and done >= arguments.kills
    say(f"kill: {'PASS' if passed else 'FAIL'} {done} of {arguments.kills} kills, the same {same}")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
