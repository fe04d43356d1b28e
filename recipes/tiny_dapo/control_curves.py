"""What accuracy does while a link is broken and no check looks: ``python control_curves.py --out controls.json``.

In process, without the service: one policy, warmed up once, learns with each fault from the same questions. Rollouts
are one update old. ``controls.py`` has the checks that find these faults.
"""

import argparse
import json
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from random import Random

import torch
from controls import CONTROLS, RETOKENIZED, Breaker, CacheKeepingSampler
from model import Decoder, token_logprobs
from sampler import Call, Sampler
from tasks import Sum, TurnEncoder, held_out, questions, train_tokenizer
from train import GROUP_SIZE, LEARNING_RATE, MINIBATCHES, Batch, Sample, dapo_loss, pack
from warmup import accuracy, warm_up

from prorl_gym.records import NOT_SAMPLED, Outcome, Rollout, Score, Segment
from prorl_gym.trainers.checks import expected_advantages, normalize_group

UPDATES, GROUPS, QUESTIONS = 15, 16, 256
FAILED_SHARE = 1 / 16
"""Of the rollouts, where the infrastructure fails some, whatever the policy does."""


@dataclass
class Trajectory:
    """A rollout under way."""

    question: Sum
    engine: Sampler
    seen: list[int]
    """What the engine is given: not what is recorded where a history is tokenised again."""
    calls: list[tuple[int, Call]] = field(default_factory=list)
    """With the length of what was recorded before each."""
    ids: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    is_right: bool = False

    def record(self, name: str, group: str) -> Rollout:
        """Return its record."""
        mask, versions, logprobs = [0] * len(self.ids), [NOT_SAMPLED] * len(self.ids), [0.0] * len(self.ids)
        for start, call in self.calls:
            end = start + len(call.logprobs)
            mask[start:end], versions[start:end] = [1] * len(call.logprobs), call.versions
            logprobs[start:end] = call.logprobs
        segment = Segment.model_validate(
            {"token_ids": self.ids, "mask": mask, "logprobs": logprobs, "policy_versions": versions}
            | {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprob_kind": "raw"}
        )
        identity = {"rollout_id": name, "run_id": "curve", "group_id": group, "group_size": GROUP_SIZE, "replica": 0}
        ended = {"outcome": Outcome(status="completed"), "accepted_at": 0.0, "finished_at": 0.0}
        score = Score(reward=float(self.is_right))
        return Rollout.model_validate(
            {**identity, **ended, "environment": "math", "score": score, "segments": [segment]}
        )


class FaultyRun:
    """A run with one fault.

    Args:
        fault: a name of ``CONTROLS``; ``none``: no fault.
        model: to start from.
        language: of the tokenizer.
    """

    def __init__(self, fault: str, model: Decoder, language: TurnEncoder) -> None:
        self._fault, self._model, self._language = fault, deepcopy(model), language
        rate = 0.0 if fault == "learning rate 0" else LEARNING_RATE
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=rate, betas=(0.9, 0.95))
        kind = CacheKeepingSampler if fault == "prefix cache kept across an update" else Sampler
        self._engines = [kind(deepcopy(model)) for _ in range(2)]
        self._breaker = Breaker({0: deepcopy(model)}, language)
        self._asked, self._random = questions(Sum, 0), Random(0)

    def learn(self) -> dict[str, object]:
        """Learn; return accuracies at the end and the mean reward of each update."""
        rewards, waiting = list[float](), self._play(0)
        for update in range(UPDATES):
            rollouts, waiting = waiting, self._play(update + 1)
            rewards.append(sum(one.reward or 0.0 for one in rollouts) / len(rollouts))
            self._update(rollouts)
            self._publish(update + 1)
        for engine in self._engines:
            engine.close()
        asked = held_out(Sum, QUESTIONS)
        sampled, greedy = (accuracy(self._model, self._language, asked, temperature) for temperature in (1.0, 0.0))
        return {"sampled": sampled, "greedy": greedy, "rewards": rewards}

    def _play(self, number: int) -> list[Rollout]:
        """Sample the rollouts of one update, half of them on each engine."""
        asked = [question for question in islice(self._asked, GROUPS) for _ in range(GROUP_SIZE)]
        played = [
            Trajectory(question, self._engines[n % 2], self._language.prompt(question))
            for n, question in enumerate(asked)
        ]
        under_way = played
        for one in played:
            one.ids = list(one.seen)
        for turn in range(Sum.turns):
            for n, one in enumerate(under_way):
                random = Random(f"{number} {turn} {n}")
                call = Call(list(one.seen), Sum.turn_tokens, frozenset({self._language.end}), 1.0, random)
                one.calls.append((len(one.ids), call))
                one.engine.submit(call)
            under_way = [one for one in under_way if self._answer(one)]
        return [one.record(f"{number}-{n}", f"{number}-{n // GROUP_SIZE}") for n, one in enumerate(played)]

    def _answer(self, one: Trajectory) -> bool:
        """Take a turn's tokens, and the tool's answer; return whether another turn follows."""
        turn = one.calls[-1][1].result.result().sampled
        one.ids += turn
        one.seen += self._breaker.cut_otherwise(turn) if self._fault == RETOKENIZED else turn
        if turn[-1] != self._language.end:
            return False
        one.said.append(self._language.decode(turn[:-1]))
        answer = one.question.respond(one.said)
        if not isinstance(answer, str):
            one.is_right = answer
            return False
        one.ids += self._language.result(answer)
        one.seen += self._language.result(answer)
        return True

    def _update(self, rollouts: list[Rollout]) -> None:
        samples = list[Sample]()
        for _, members in groupby(rollouts, key=lambda one: one.group_id):
            group = list(members)
            if len({one.reward for one in group}) > 1:
                advantages = self._advantages(group)
                samples += [
                    Sample(one, one.segments[0], advantages[one.rollout_id])
                    for one in group
                    if one.rollout_id in advantages
                ]
        if len(samples) < MINIBATCHES:
            return  # no group has a signal
        self._random.shuffle(samples)
        for place in range(MINIBATCHES):
            batch = self._broken(pack(samples[place::MINIBATCHES]))
            loss, _ = dapo_loss(batch, token_logprobs(self._model, batch.ids))
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()

    def _advantages(self, group: list[Rollout]) -> dict[str, float]:
        """Return the advantages of the rollouts to train on, wrong if that is the fault."""
        rewards = [one.reward or 0.0 for one in group]
        names = [one.rollout_id for one in group]
        if self._fault == "rewards shuffled":
            self._random.shuffle(rewards)
        elif self._fault not in ("infrastructure failure recorded as 0", "failure counted in its group"):
            return expected_advantages(group)
        failed = [self._random.random() < FAILED_SHARE and "failure" in self._fault for _ in group]
        values = normalize_group([0.0 if lost else reward for reward, lost in zip(rewards, failed, strict=True)])
        is_left_out = self._fault == "failure counted in its group"
        return {
            name: value for name, value, lost in zip(names, values, failed, strict=True) if not (lost and is_left_out)
        }

    def _broken(self, batch: Batch) -> Batch:
        match self._fault:
            case "mask shifted by one":
                return replace(batch, mask=batch.mask.roll(1, 1))
            case "observations unmasked":
                return replace(batch, mask=((batch.mask.cumsum(1) > 0) & (batch.ids > 0)).to(batch.mask))
            case "one log-prob replaced by 0.0":
                last = batch.mask.shape[1] - 1 - batch.mask.flip(1).argmax(1)
                return replace(batch, served=batch.served.scatter(1, last[:, None], 0.0))
            case "log-probs of the previous version":
                served = [self._breaker.previous_of(sample.rollout).segments[0] for sample in batch.samples]
                return pack([replace(one, segment=segment) for one, segment in zip(batch.samples, served, strict=True)])
            case _:
                return batch

    def _publish(self, version: int) -> None:
        for n, engine in enumerate(self._engines):
            is_stale = n == 1 and self._fault == "weights of one engine stale"
            weights = self._breaker.weights[0] if is_stale else self._model
            engine.load(weights.state_dict(), version).result()
        self._breaker = Breaker({**self._breaker.weights, version: deepcopy(self._model)}, self._language)


def main() -> None:
    """Learn with every fault, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the warm-up")
    parser.add_argument("--out", type=Path, default=Path("results/controls.json"))
    parser.add_argument("--only", nargs="*", default=["none", *CONTROLS], help="names of faults")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    language = TurnEncoder(train_tokenizer(Sum))
    warm = warm_up(Sum, language, arguments.seed)
    found = dict[str, object]()
    for fault in arguments.only:
        found[fault] = reached = FaultyRun(fault, warm.model, language).learn()
        print(f"{fault}: sampled {reached['sampled']:.2f}, greedy {reached['greedy']:.2f}", flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
