"""Controls: links between rollout and gradient, broken on purpose in the rollouts of a run.

A policy learns in spite of some of these faults, so that a curve cannot show them; a check has to name each.
``learn.py`` makes all of them from the last batch of a run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from random import Random
from typing import Literal

import torch
from audit import LearnError
from model import Decoder, token_logprobs
from sampler import Call, Sampler
from tasks import TurnEncoder, train_tokenizer
from train import MAX_MISMATCH, Batch, Learner, Sample, dapo_loss, mismatch_of, pack

from prorl_gym.errors import FailureKind
from prorl_gym.records import NOT_SAMPLED, Generation, Outcome, Rollout
from prorl_gym.trainers.checks import CheckError, check_advantages, check_moved, expected_advantages, normalize_group
from prorl_gym.trainers.mismatch import require_match

Rollouts = Sequence[Rollout]

UNCERTAIN = -0.01
"""Log-prob of a token for which 0.0 is plainly wrong."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """Breaks one link in some rollouts, and runs the check over them; each method raises ``CheckError``.

    Args:
        weights: of the policy versions that sampled the rollouts, and of older ones.
        language: of the tokenizer.
    """

    weights: Mapping[int, Decoder]
    language: TurnEncoder

    def learning_rate_0(self, rollouts: Rollouts) -> None:
        """Update with a learning rate of 0."""
        batch, model = _batch(rollouts), deepcopy(self._weights_of(max(self.weights)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        before = [one.detach().numpy().copy() for one in model.parameters()]
        dapo_loss(batch, token_logprobs(model, batch.ids))[0].backward()
        optimizer.step()
        check_moved(before, [one.detach().numpy() for one in model.parameters()])

    def rewards_shuffled(self, group: Rollouts) -> None:
        """Give each rollout the reward of another one."""
        rewards = [one.reward or 0.0 for one in group]
        Random(0).shuffle(rewards)
        check_advantages([group], _by_id(group, normalize_group(rewards)))

    def mask_shifted(self, rollouts: Rollouts) -> None:
        """Put the loss one token further on."""
        self._match(rollouts, lambda batch: replace(batch, mask=batch.mask.roll(1, 1)))

    def observations_unmasked(self, rollouts: Rollouts) -> None:
        """Put loss on everything behind the prompt."""
        self._match(
            rollouts, lambda batch: replace(batch, mask=((batch.mask.cumsum(1) > 0) & (batch.ids > 0)).to(batch.mask))
        )

    def previous_log_probs(self, rollouts: Rollouts) -> None:
        """Serve the log-probs of one version before."""
        self._match([self.previous_of(one) for one in rollouts])

    def log_prob_0(self, rollouts: Rollouts) -> None:
        """Fill in 0.0 for the least certain token of each rollout; near 0.0 it would change nothing."""
        changed = list[Rollout]()
        for one in rollouts:
            (segment,) = one.segments
            logprobs = list(segment.logprobs)
            least = min(range(len(logprobs)), key=lambda n, logprobs=logprobs: logprobs[n])  # observations have 0.0
            if logprobs[least] < UNCERTAIN:
                logprobs[least] = 0.0
            changed.append(_with(one, logprobs=logprobs))
        self._match(changed)

    def failure_as_0(self, group: Rollouts) -> None:
        """Train on a rollout that the infrastructure failed, with a reward of 0."""
        failed = _with_failure(group)
        check_advantages([failed], _by_id(failed, normalize_group([one.reward or 0.0 for one in failed])))

    def failure_counted(self, group: Rollouts) -> None:
        """Leave such a rollout out, and count it as 0 in its group's mean and deviation."""
        failed = _with_failure(group)
        advantages = _by_id(failed, normalize_group([one.reward or 0.0 for one in failed]))
        check_advantages([failed], {name: advantages[name] for name in expected_advantages(failed)})

    def history_retokenized(self, rollouts: Rollouts) -> None:
        """Let the engine see each earlier turn as other tokens of the same text."""
        self._match([self._served_by(self._weights_of, one, self.cut_otherwise) for one in rollouts])

    def prefix_cache_kept(self, rollouts: Rollouts) -> None:
        """Sample with the newest weights behind a prefix that the oldest ones computed."""
        new = max(self.weights)
        prompts = [segment.token_ids[: segment.mask.index(1)] for (segment,) in (one.segments for one in rollouts)]
        sampler = CacheKeepingSampler(deepcopy(self.weights[min(self.weights)]))
        try:
            for prompt in prompts:
                self._sample(sampler, prompt)
            sampler.load(self.weights[new].state_dict(), new).result()
            calls = [self._sample(sampler, prompt) for prompt in prompts]
        finally:
            sampler.close()
        self._match([_of_call(one, call) for one, call in zip(rollouts, calls, strict=True)])

    def engine_stale(self, rollouts: Rollouts) -> None:
        """Take every second rollout from an engine that did not load the last update."""
        self._match(
            [_sampled_by(f"engine-{n % 2}", self.previous_of(one) if n % 2 else one) for n, one in enumerate(rollouts)]
        )

    def previous_of(self, rollout: Rollout) -> Rollout:
        """Return a rollout with the log-probs of one version before."""
        return self._served_by(self._previous, rollout)

    def _match(self, rollouts: Rollouts, change: Callable[[Batch], Batch] = lambda batch: batch) -> None:
        require_match(mismatch_of(change(_batch(rollouts)), dict(self.weights)), MAX_MISMATCH)

    def _weights_of(self, version: int) -> Decoder:
        return self.weights.get(version, self.weights[max(self.weights)])

    def _previous(self, version: int) -> Decoder:
        return self.weights[max((one for one in self.weights if one < version), default=min(self.weights))]

    def _served_by(
        self,
        weights_of: Callable[[int], Decoder],
        rollout: Rollout,
        history_of: Callable[[list[int]], list[int]] = lambda ids: ids,
    ) -> Rollout:
        """Return a rollout with the log-probs that other weights, or another history of each turn, would give."""
        (segment,) = rollout.segments
        ids, logprobs = segment.token_ids, [0.0] * len(segment.token_ids)
        history, seen = list[int](), list[int]()
        for version, part in groupby(range(len(ids)), key=lambda n: segment.policy_versions[n]):
            places = list(part)
            tokens = [ids[n] for n in places]
            if version == NOT_SAMPLED:
                if seen:  # a turn is over, and is history from here
                    history = [*history[: -len(seen)], *history_of(seen)]
                seen = []
            else:
                with torch.inference_mode():
                    own = token_logprobs(weights_of(version), torch.tensor([[*history, *tokens]]))[0].tolist()
                for n, value in zip(places, own[len(history) :], strict=True):
                    logprobs[n] = value
                seen = [*seen, *tokens]
            history += tokens
        return _with(rollout, logprobs=logprobs)

    def cut_otherwise(self, ids: list[int]) -> list[int]:
        """Return other tokens of the same text: the shortest word of several characters becomes a token for each."""
        texts = [self.language.decode([token]) for token in ids]
        words = [n for n, text in enumerate(texts) if len(text) > 1 and not text.startswith("<")]
        if not words:
            return ids
        n = min(words, key=lambda place: len(texts[place]))
        return [*ids[:n], *(one for character in texts[n] for one in self.language.encode(character)), *ids[n + 1 :]]

    def _sample(self, sampler: Sampler, prompt: list[int]) -> Call:
        call = Call(list(prompt), 12, frozenset({self.language.end}), 1.0, Random(0))
        sampler.submit(call)
        return call.result.result()


class CacheKeepingSampler(Sampler):
    """An engine that keeps its prefix cache when it loads weights."""

    def _forget(self) -> None:
        pass


Unit = Literal["rollout", "group", "batch"]
"""What a control is made in: rollout by rollout, in a whole group, in the batch of an update."""

UNMASKED, RETOKENIZED = "observations unmasked", "history re-tokenised between turns"
"""Cannot be made in rollouts of one turn."""

CONTROLS: Mapping[str, tuple[Callable[[Breaker, Rollouts], None], Unit, str]] = {
    "learning rate 0": (Breaker.learning_rate_0, "batch", "learning rate"),
    "rewards shuffled": (Breaker.rewards_shuffled, "group", "advantages"),
    "mask shifted by one": (Breaker.mask_shifted, "rollout", "mask"),
    UNMASKED: (Breaker.observations_unmasked, "rollout", "mask"),
    "log-probs of the previous version": (Breaker.previous_log_probs, "rollout", "mismatch"),
    "one log-prob replaced by 0.0": (Breaker.log_prob_0, "rollout", "zero log-prob"),
    "infrastructure failure recorded as 0": (Breaker.failure_as_0, "group", "failures"),
    "failure counted in its group": (Breaker.failure_counted, "group", "failures"),
    RETOKENIZED: (Breaker.history_retokenized, "rollout", "mismatch"),
    "prefix cache kept across an update": (Breaker.prefix_cache_kept, "rollout", "mismatch"),
    "weights of one engine stale": (Breaker.engine_stale, "rollout", "mismatch"),
}
"""Control -> how it is made, in what, and the check that has to find it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """How a control was found."""

    control: str
    check: str
    rollouts: int
    """How many the check needed."""
    message: str


def check_controls(learner: Learner) -> list[Finding]:
    """Make every control from the last batch of a learner.

    Raises:
        LearnError: a control is not found, or not by the check that is there for it.
    """
    assert learner.batch is not None
    rollouts = [sample.rollout for sample in learner.batch.samples]
    breaker = Breaker(learner.weights, TurnEncoder(train_tokenizer(learner.domain)))
    has_history = any(len(segment.generations) > 1 for one in rollouts for segment in one.segments)
    return [find(name, breaker, rollouts) for name in CONTROLS if has_history or name not in (UNMASKED, RETOKENIZED)]


def find(name: str, breaker: Breaker, rollouts: Rollouts) -> Finding:
    """Make a control in more and more rollouts until a check finds it.

    Raises:
        LearnError: none does, or another one.
    """
    attempt, unit, check = CONTROLS[name]
    for count, part in _parts(rollouts, unit):
        try:
            attempt(breaker, part)
        except CheckError as error:
            if error.check != check:
                raise LearnError(f"control: {name} is found as {error.what}") from None
            return Finding(name, check, count, error.what)
    raise LearnError(f"control: no check finds {name} in {len(rollouts)} rollouts")


def _parts(rollouts: Rollouts, unit: Unit) -> Iterator[tuple[int, Rollouts]]:
    """Yield rollouts to make a control in, and how many were looked at by then."""
    if unit == "rollout":
        yield from ((count, rollouts[:count]) for count in range(1, len(rollouts) + 1))
    elif unit == "batch":
        yield len(rollouts), rollouts
    else:
        count = 0
        for _, members in groupby(rollouts, key=lambda one: one.group_id):
            group = list(members)
            count += len(group)
            yield count, group


def _batch(rollouts: Rollouts) -> Batch:
    return pack([Sample(one, segment, 1.0) for one in rollouts for segment in one.segments])


def _by_id(rollouts: Rollouts, values: Sequence[float]) -> dict[str, float]:
    return {one.rollout_id: value for one, value in zip(rollouts, values, strict=True)}


def _with(rollout: Rollout, **fields: object) -> Rollout:
    """Return a rollout whose only segment has other fields."""
    (segment,) = rollout.segments
    return rollout.model_copy(update={"segments": [segment.model_copy(update=fields)]})


def _with_failure(group: Rollouts) -> list[Rollout]:
    """Return a group in which the infrastructure failed one of the members with the lowest reward."""
    worst = min(group, key=lambda one: one.reward or 0.0)
    outcome = Outcome(status="failed", kind=FailureKind.ENGINE_TIMEOUT, stage="run")
    failed = worst.model_copy(update={"outcome": outcome, "score": None})
    return [failed if one is worst else one for one in group]


def _sampled_by(engine: str, rollout: Rollout) -> Rollout:
    (segment,) = rollout.segments
    calls = [call.model_copy(update={"engine": engine}) for call in segment.generations]
    return _with(rollout, generations=calls)


def _of_call(rollout: Rollout, call: Call) -> Rollout:
    """Return a rollout of one turn, which a call sampled."""
    start, count = len(call.ids) - len(call.logprobs), len(call.logprobs)
    return _with(
        rollout,
        token_ids=call.ids,
        mask=[0] * start + [1] * count,
        logprobs=[0.0] * start + call.logprobs,
        policy_versions=[NOT_SAMPLED] * start + call.versions,
        generations=[
            Generation(start=start, end=len(call.ids), turn=0, finish_reason="stop", engine="engine-0", seconds=0.0)
        ],
    )
