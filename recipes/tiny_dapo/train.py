"""Asynchronous DAPO over the rollout service: one policy, one domain.

Rollouts are sampled while the learner learns. Groups are taken as they become complete, those without a signal are
dropped, and each update is published to the engine between two turns of the rollouts under way.
"""

import asyncio
import io
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from time import monotonic, process_time

import numpy as np
import torch
from aiohttp import ClientSession
from audit import LearnError, check_segments
from model import Decoder, padded, token_logprobs
from tasks import Question, questions

from prorl_gym.client import Client, CompletedGroup, GroupsDroppedError, GroupStream
from prorl_gym.demand import Demand
from prorl_gym.records import BatchMismatch, Mismatch, Rollout, RolloutRequest, Segment
from prorl_gym.settings import RolloutSettings
from prorl_gym.trainers.checks import (
    check_advantages,
    check_gradient,
    check_history,
    check_moved,
    expected_advantages,
)
from prorl_gym.trainers.mismatch import measure_mismatch, require_match

GROUP_SIZE = 8
GROUPS = 8
"""Informative groups of one update."""
AHEAD = 16
"""Groups kept submitted, so that the service works while the learner does."""
MINIBATCHES = 2
LEARNING_RATE = 2e-4
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
MAX_STALENESS = 2
MAX_MISMATCH = 1e-4
RUN = "learn"
STALL_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory to learn from."""

    rollout: Rollout
    segment: Segment
    advantage: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples as tensors ``[sample, token]``, padded on the right."""

    samples: Sequence[Sample]
    ids: torch.Tensor
    mask: torch.Tensor
    served: torch.Tensor
    versions: torch.Tensor
    advantages: torch.Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """What one update looked like; the reward is the mean over all groups taken, those without a signal included."""

    reward: float
    groups: int
    mismatch: Mismatch
    staleness: float
    clipped: float
    waited: float
    seconds: float
    cpu_seconds: float
    """Of the checks and the update, without the exchange with the service."""


def samples_of(group: CompletedGroup) -> list[Sample]:
    """Return the rollouts of a group with their advantages, normalised over the group."""
    rollouts = [rollout for rollout in group.rollouts if not rollout.masked]
    rewards = torch.tensor([rollout.reward for rollout in rollouts])
    advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
    return [
        Sample(rollout, segment, advantage)
        for rollout, advantage in zip(rollouts, advantages.tolist(), strict=True)
        for segment in rollout.segments
    ]


def group_requests(domain: type[Question], seed: int, first: int, asked: Iterable[Question]) -> list[RolloutRequest]:
    """Return the rollouts of new groups, a question each, numbered from ``first`` on."""
    return [
        RolloutRequest(
            rollout_id=f"{RUN}-{group}-{replica}",
            run_id=RUN,
            group_id=f"group-{group}",
            group_size=GROUP_SIZE,
            replica=replica,
            environment=domain.environment,
            task=question.row,
            settings=RolloutSettings(seed=seed * 1_000_000 + group, **domain.limits()),
        )
        for group, question in enumerate(asked, first)
        for replica in range(GROUP_SIZE)
    ]


def pack(samples: Sequence[Sample]) -> Batch:
    """Lay samples out as tensors."""
    segments = [sample.segment for sample in samples]
    return Batch(
        samples,
        ids=padded([segment.token_ids for segment in segments]),
        mask=padded([segment.mask for segment in segments], torch.float64),
        served=padded([segment.logprobs for segment in segments], torch.float64),
        versions=padded([segment.policy_versions for segment in segments]),
        advantages=torch.tensor([sample.advantage for sample in samples])[:, None],
    )


def dapo_loss(batch: Batch, logprobs: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the token-level loss with a higher clip upwards, and the share of tokens that it clips."""
    ratio = (logprobs - batch.served).exp()
    plain = ratio * batch.advantages
    bounded = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * batch.advantages
    gain = torch.minimum(plain, bounded)
    tokens = batch.mask.sum()
    return -(gain * batch.mask).sum() / tokens, float(((bounded < plain) * batch.mask).sum() / tokens)


def mismatch_of(batch: Batch, weights: dict[int, Decoder]) -> BatchMismatch:
    """Compare served log-probs with our own, computed with the weights that sampled each token."""
    own = torch.zeros_like(batch.served)
    with torch.inference_mode():
        for version in batch.versions[batch.mask > 0].unique().tolist():
            model = weights.get(version, weights[max(weights)])
            own = torch.where(batch.versions == version, token_logprobs(model, batch.ids), own)
    segments = [sample.segment for sample in batch.samples]
    own_rows, masks = (
        [row[: len(segment.token_ids)].numpy() for row, segment in zip(rows, segments, strict=True)]
        for rows in (own, batch.mask)
    )
    return measure_mismatch(segments, own_rows, masks)


@dataclass
class Learner:
    """Learns one run of the service. ``engine`` is the address that takes weights; ``batch`` is the last one."""

    client: Client
    engine: str
    model: Decoder
    domain: type[Question]
    seed: int
    submitted: list[str] = field(default_factory=list)
    batch: Batch | None = None
    max_mismatch: float = MAX_MISMATCH

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
        self.weights: dict[int, Decoder] = {}  # the versions whose tokens may still come
        self._questions, self._rng = questions(self.domain, self.seed), random.Random(f"minibatches {self.seed}")
        self.version = 0  # of the weights that the engines were given last
        self._resume = self._used = self._under_way = 0

    async def learn(self, updates: int) -> AsyncIterator[Step]:
        """Make updates, and yield each. Raises ``LearnError`` or ``MismatchError`` when a check fails."""
        async with aclosing(self.client.stream_groups(RUN, self._resume, used_cursor=self._used)) as stream:
            for _ in range(updates):
                started = monotonic()
                taken, informative = await self._gather(stream)
                waited = monotonic() - started
                before = process_time()
                found, clipped = self.learn_from(informative)
                cpu_seconds = process_time() - before
                ages = ((self.version - version) * one.tokens for version, one in found.by_version.items())
                age = sum(ages) / found.total.tokens
                await self.client.report_mismatch(RUN, self.version, found)
                await self.publish()
                await self.client.acknowledge(RUN, self._resume)
                yield Step(
                    reward=fmean(reward for group in taken for reward in group.rewards),
                    groups=len(taken),
                    mismatch=found.total,
                    staleness=age,
                    clipped=clipped,
                    waited=waited,
                    seconds=monotonic() - started,
                    cpu_seconds=cpu_seconds,
                )

    async def publish(self) -> None:
        """Give the engine our weights as the next version. Calls under way stop, and go on with the new weights."""
        policy = await self.client.policy()
        self.version = policy.version + 1
        self.weights[self.version] = deepcopy(self.model).eval()
        self.weights.pop(self.version - MAX_STALENESS - 2, None)
        with torch.inference_mode():
            reference = token_logprobs(self.model, torch.tensor([policy.probe_ids]))[0, 1:].tolist()
        async with self.client.weight_update(self.version, reference=reference):
            await self.load_weights()

    async def load_weights(self) -> None:
        """Load our weights into the engine."""
        saved = io.BytesIO()
        torch.save(self.model.state_dict(), saved)
        async with ClientSession(self.engine, raise_for_status=True) as session:
            await session.post("/load_weights", params={"version": self.version}, data=saved.getvalue())

    async def _gather(self, stream: GroupStream) -> tuple[list[CompletedGroup], list[CompletedGroup]]:
        """Return the groups taken, and those of them that teach something."""
        taken, informative = list[CompletedGroup](), list[CompletedGroup]()
        await self._top_up()
        while len(informative) < GROUPS:
            if self._under_way < GROUPS:
                await self._top_up()
            try:
                async with asyncio.timeout(STALL_SECONDS):
                    group = await anext(stream)
            except GroupsDroppedError:  # all that were left had become too old
                self._under_way = 0
                continue
            except TimeoutError:
                raise LearnError(f"rollouts: no group became complete within {STALL_SECONDS:g} s") from None
            self._resume, self._used = group.resume_cursor, group.cursor
            self._under_way -= 1
            taken.append(group)
            if not group.stale and len(set(group.rewards)) > 1:
                informative.append(group)
        return taken, informative

    async def _top_up(self) -> None:
        """Submit what is missing, after a demand for as many groups: what is ahead is not redundant."""
        demand = Demand(groups=AHEAD, after=self._used, version=self.version, max_staleness=MAX_STALENESS)
        status = await self.client.set_demand(RUN, demand)
        self._under_way = status.ready + sum(status.states.get(state, 0) for state in ("open", "informative"))
        await self._submit(max(0, AHEAD - self._under_way))

    async def _submit(self, missing: int) -> None:
        """Submit so many new groups."""
        first = len(self.submitted) // GROUP_SIZE
        requests = group_requests(self.domain, self.seed, first, islice(self._questions, missing))
        await self.client.submit(requests)
        self.submitted += [request.rollout_id for request in requests]
        self._under_way += missing

    def learn_from(self, groups: Sequence[CompletedGroup]) -> tuple[BatchMismatch, float]:
        """Check a batch and take one pass over it; return its mismatch and the share of tokens that was clipped."""
        members = [group.rollouts for group in groups]
        check_segments(members)
        check_history(members)
        self.batch = pack([sample for group in groups for sample in samples_of(group)])
        found = mismatch_of(self.batch, self.weights)
        require_match(found, self.max_mismatch)
        check_advantages(members, {sample.rollout.rollout_id: sample.advantage for sample in self.batch.samples})
        expected = {name: value for group in members for name, value in expected_advantages(group).items()}
        order = self._rng.sample(self.batch.samples, len(self.batch.samples))
        clipped = 0.0
        for part in (pack(order[place::MINIBATCHES]) for place in range(MINIBATCHES)):
            before = self._weights_now()
            logprobs = token_logprobs(self.model, part.ids)
            logprobs.retain_grad()
            loss, share = dapo_loss(part, logprobs)
            self.optimizer.zero_grad()
            loss.backward()
            assert logprobs.grad is not None
            check_gradient(
                [(sample.rollout, sample.segment) for sample in part.samples],
                expected,
                [*logprobs.detach().numpy()],
                [*logprobs.grad.numpy()],
                clip_low=CLIP_LOW,
                clip_high=CLIP_HIGH,
            )
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            check_moved(before, self._weights_now())
            clipped += share / MINIBATCHES
        return found, clipped

    def _weights_now(self) -> list[np.ndarray]:
        return [parameter.detach().numpy().copy() for parameter in self.model.parameters()]
