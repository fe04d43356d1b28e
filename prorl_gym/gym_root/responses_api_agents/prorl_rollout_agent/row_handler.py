# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""Answers the rows of one agent: each becomes a rollout of the service, and its record a complete Gym result.

A rollout that does not measure the policy (it failed for reasons the model did not cause, was cancelled, or sampled
nothing) is masked, not an HTTP error (``on_failure: mask``). ``on_failure: raise`` answers 503 instead, for trainers
that dispatch rows again and ignore masks.
"""

import asyncio
import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import Any, Literal, cast
from uuid import uuid4

import orjson
from pydantic import BaseModel, ConfigDict

from prorl_gym._gym_compat import capture_rollout_id
from prorl_gym.client import UnacknowledgedRollout
from prorl_gym.errors import CancelReason, NotFoundError, ProrlError, TaskError
from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.service_connection import ServiceConnection
from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.step_early_stop import (
    EarlyStopConfig,
    GroupMember,
    RowOutcome,
    StepEarlyStop,
)
from prorl_gym.records import Outcome, Rollout, RolloutRequest
from prorl_gym.settings import RolloutSettings
from prorl_gym.trainers.gym_request import GroupResolver, RowDefaults, row_digest, to_rollout_request
from prorl_gym.trainers.gym_result import Placeholder, to_gym_result
from prorl_gym.trainers.gym_trajectory import compaction_observations, to_gym_trajectory, trajectory_identity

_LOG = logging.getLogger(__name__)

OVERTAKE_SECONDS = 0.1
"""Longest time in seconds by which a row that is posted again may overtake the end of its first caller's connection."""

ORPHAN_TTL_SECONDS = 24 * 3600.0
"""Seconds for which the record of an orphan is kept for its row."""

_MAX_GROUPS = 4096
"""Groups whose rewards are kept, for masked rows."""

_MAX_PLACEHOLDERS = 256
"""First prompts that are kept: the rows of a group share one."""


@dataclass(slots=True, eq=False)
class RowClaim:
    """The rollout of a posted row, or of an orphan."""

    row_digest: str
    rollout_id: str
    run_id: str = ""
    request: RolloutRequest | None = None
    """Request of this process; ``None`` for a new rollout or one that an earlier process submitted."""
    submission: "asyncio.Future[None] | None" = None
    """Done when the service has accepted the request; ``None`` where there is no request."""
    is_orphan: bool = False
    """Set when the claim was taken from the orphans."""
    is_finished: bool = False
    """Whether the rollout has its record."""
    timer: asyncio.TimerHandle | None = None
    """Ends an orphan."""


@dataclass(slots=True)
class RowDeduplicator:
    """Assigns a rollout to each row that Gym posts: a new one, or the orphan of an equal row.

    Gym knows no rollout ids. It posts an equal row either to repeat a request whose answer it did not get (a dropped
    connection, a restart, ``gym eval run --resume``) or for another sample (the next epoch, a prompt posted many
    times). Only delivery tells the two apart: an equal row gets the oldest *orphan*, a rollout that was accepted, whose
    answer was not delivered and for which no caller waits. Without one it gets a new rollout.

    The id ``<row digest>-<agent>-<nonce>-<counter>`` lets a restarted agent find its orphans among the rollouts that
    are not acknowledged. One case is not covered: a caller that received an answer and died before it stored it posts
    the row again and gets another rollout, as in the next epoch.

    An orphan without a record is cancelled (``on_abandoned``) when no equal row comes in time, so that a dropped
    ``/run`` cancels its rollout. One with a record is kept for long, since it costs nothing, and then given up
    (``on_expired``). Needs an event loop; ``close`` at the end.
    """

    agent: str
    on_abandoned: Callable[[str], None]
    on_expired: Callable[[str], None]
    orphan_ttl_seconds: float = ORPHAN_TTL_SECONDS
    _orphans: dict[str, dict[str, RowClaim]] = field(default_factory=dict[str, dict[str, RowClaim]])
    """By the row's digest and by id, oldest first."""
    _orphans_by_id: dict[str, RowClaim] = field(default_factory=dict[str, RowClaim])
    _orphan_added: asyncio.Event = field(default_factory=asyncio.Event)
    _nonce: str = field(default_factory=lambda: uuid4().hex[:8])
    _counter: "count[int]" = field(default_factory=count)

    async def wait_for_orphan(self, row_digest: str, seconds: float) -> None:
        """Wait until a row with this digest has an orphan, for at most these seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while row_digest not in self._orphans:
                    await self._orphan_added.wait()

    def claim_rollout(self, row_digest: str) -> RowClaim:
        """Return the rollout of a row with this digest: its oldest orphan, or a new one."""
        orphans = self._orphans.get(row_digest)
        if not orphans:
            return RowClaim(row_digest, self._new_id(row_digest))
        claim = next(iter(orphans.values()))
        self._remove_orphan(claim)
        claim.is_orphan = True
        return claim

    def assign_new_rollout(self, claim: RowClaim) -> None:
        """Give a claim another rollout, when the service does not know the one it had."""
        claim.rollout_id, claim.is_orphan, claim.is_finished = self._new_id(claim.row_digest), False, False
        claim.request = claim.submission = None

    def add_orphan(self, claim: RowClaim, grace_seconds: float) -> None:
        """Add the rollout of a caller that left without the answer; cancel it after the grace if it has no record."""
        self._orphans.setdefault(claim.row_digest, {})[claim.rollout_id] = claim
        self._orphans_by_id[claim.rollout_id] = claim
        self._orphan_added.set()
        self._orphan_added = asyncio.Event()
        self._start_timer(claim, grace_seconds)

    def mark_finished(self, rollout_id: str) -> None:
        """Keep an orphan that has its record now; other rollouts are ignored."""
        claim = self._orphans_by_id.get(rollout_id)
        if claim is not None and not claim.is_finished:
            claim.is_finished, claim.request = True, None  # the record has what is needed of the request
            self._start_timer(claim, 0.0)

    def restore_orphans(self, rollouts: Iterable[UnacknowledgedRollout]) -> int:
        """Add what an earlier process of this agent submitted and did not acknowledge; return how many there are.

        They are kept like those with a record: the callers that lost that process need time to come back.
        """
        restored = 0
        for rollout in rollouts:
            digest, *rest = rollout.rollout_id.split("-")
            if len(rest) == 3 and rest[0] == self._agent_digest:
                restored += 1
                self.add_orphan(RowClaim(digest, rollout.rollout_id, rollout.run_id, is_finished=True), 0.0)
        return restored

    def close(self) -> None:
        for claim in self._orphans_by_id.values():
            if claim.timer is not None:
                claim.timer.cancel()

    @property
    def _agent_digest(self) -> str:
        return hashlib.blake2b(self.agent.encode(), digest_size=4).hexdigest()

    def _new_id(self, row_digest: str) -> str:
        return f"{row_digest}-{self._agent_digest}-{self._nonce}-{next(self._counter)}"

    def _start_timer(self, claim: RowClaim, grace_seconds: float) -> None:
        if claim.timer is not None:
            claim.timer.cancel()
        seconds, on_end = (
            (self.orphan_ttl_seconds, self.on_expired) if claim.is_finished else (grace_seconds, self.on_abandoned)
        )

        def end_orphan() -> None:
            self._remove_orphan(claim)
            on_end(claim.rollout_id)

        claim.timer = asyncio.get_running_loop().call_later(seconds, end_orphan)

    def _remove_orphan(self, claim: RowClaim) -> None:
        if claim.timer is not None:
            claim.timer.cancel()
        del self._orphans_by_id[claim.rollout_id]
        del self._orphans[claim.row_digest][claim.rollout_id]
        if not self._orphans[claim.row_digest]:
            del self._orphans[claim.row_digest]


class AgentOptions(BaseModel):
    """Options of an agent that apply to all its rows."""

    environment: str | None = None
    """Environment of rows that name none."""
    on_failure: Literal["mask", "raise"] = "mask"
    num_generations: int | None = None
    """Rollouts per prompt; rows are put into groups when it is set."""
    evaluation: bool = False
    settings: RolloutSettings = RolloutSettings()
    """Sampling and limits for rows that do not set them."""
    repost_seconds: float = 30.0
    """Seconds for which a rollout goes on after its caller left, in case an equal row is posted."""
    early_stop: EarlyStopConfig | None = None
    """Stop groups of which a step has no use. Needs ``num_generations``, and ``use_dynamic_sampling`` in the recipe."""


class AgentProfile(AgentOptions):
    """An agent as its row handler knows it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    agent: str
    """Name of the agent's instance; also the run of rows that name none."""
    is_observed: bool = False
    """Gym collects evidence of what agents do: answers hold their trajectory in Gym's form."""


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """The HTTP answer to a row, and its rollout."""

    status: int
    body: bytes
    claim: RowClaim | None = None
    """``None`` when no rollout was accepted."""


class GroupRewards:
    """Rewards of the finished members of the latest groups."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, dict[int, tuple[str, float | None]]] = OrderedDict()
        """Rollout id and reward by replica."""

    def record_rollout(self, rollout: Rollout) -> None:
        """Add the reward of a member that has ended."""
        if rollout.group_id is None:
            return
        members = self._groups.setdefault(rollout.group_id, {})
        known_id, reward = members.get(rollout.replica, (rollout.rollout_id, None))
        if known_id != rollout.rollout_id and reward is not None:
            members.clear()  # Gym numbers prompts from 0 in each epoch: another group has the same id
        members[rollout.replica] = (rollout.rollout_id, rollout.reward)
        self._groups.move_to_end(rollout.group_id)
        if len(self._groups) > _MAX_GROUPS:
            self._groups.popitem(last=False)

    def mean(self, group_id: str | None) -> float:
        """Return the mean reward of a group's finished members; 0 when none is known."""
        members = self._groups.get(group_id or "", {})
        rewards = [reward for _, reward in members.values() if reward is not None]
        return fmean(rewards) if rewards else 0.0


class RowHandler:
    """Answers the rows of one agent. Needs an event loop; ``close`` at the end."""

    def __init__(
        self,
        profile: AgentProfile,
        url: str,
        token: str = "none",
        connect: Callable[..., ServiceConnection] = ServiceConnection,
    ) -> None:
        self._profile = profile
        self._deduplicator = RowDeduplicator(
            profile.agent,
            lambda rollout_id: self._service.abandon(rollout_id),
            lambda rollout_id: self._service.acknowledge([rollout_id]),
        )
        self._service = connect(url, token, profile.agent, self._on_listed, self._deduplicator.mark_finished)
        self._has_restored = False
        self._callers: Counter[str] = Counter()
        """Callers that wait for a row, by its digest."""
        # Groups that are resolved by content get numbers, which must not repeat those of an earlier process.
        self._groups = GroupResolver(f"{profile.agent}-{uuid4().hex[:6]}", size=profile.num_generations)
        self._defaults = RowDefaults(
            environment=profile.environment,
            run_id=profile.agent,
            settings=profile.settings,
            evaluation=profile.evaluation,
        )
        self._placeholders: dict[bytes, asyncio.Task[Placeholder]] = {}
        self._rewards = GroupRewards()
        self._early_stop: StepEarlyStop | None = None
        if profile.early_stop is not None:
            self._early_stop = StepEarlyStop(
                profile.early_stop, lambda rollout_ids: self._service.cancel(rollout_ids, CancelReason.REDUNDANT)
            )

    async def answer_row(self, row: dict[str, Any]) -> RowAnswer:
        """Return the answer to a row when its rollout has ended, however long that takes.

        Every answer needs ``mark_delivered`` or ``mark_disconnected`` afterwards. A cancelled call counts as
        disconnected.
        """
        await self._service.wait_listed()
        digest = row_digest(row)
        if self._callers[digest]:
            await self._deduplicator.wait_for_orphan(digest, OVERTAKE_SECONDS)
        self._callers[digest] += 1
        claim = self._deduplicator.claim_rollout(digest)
        member: GroupMember | None = None
        is_accepted = False
        try:
            record = await self._accept(row, claim)
            is_accepted = True
            if claim.request is not None:
                member = self._track_row(claim.request)
            rollout = await self._wait_for_record(row, claim, record)
            claim.is_finished = True
            self._rewards.record_rollout(rollout)
            if member is None:
                member = self._track_row(rollout)
            outcome: RowOutcome = "own"
            if self._early_stop is not None:
                outcome = await self._early_stop.wait_settled(member, rollout)
            return RowAnswer(*await self._result_reply(row, rollout, outcome), claim)
        except asyncio.CancelledError:
            self._deduplicator.add_orphan(claim, self._profile.repost_seconds)
            raise
        except ProrlError as error:
            return RowAnswer(*await self._error_reply(row, error), claim if is_accepted else None)
        except Exception as error:
            _LOG.exception("a row could not be answered")
            text = f"A defect of prorl_rollout_agent ({type(error).__name__}); see its log."
            return RowAnswer(500, text.encode(), claim if is_accepted else None)
        finally:
            self._callers[digest] -= 1
            if not self._callers[digest]:
                del self._callers[digest]
            self._service.drop_record(claim.rollout_id)
            if self._early_stop is not None and member is not None:
                self._early_stop.remove_row(member)

    def mark_delivered(self, answer: RowAnswer) -> None:
        """Acknowledge the rollout of an answer that Gym has received."""
        if answer.claim is not None:
            self._service.acknowledge([answer.claim.rollout_id])

    def mark_disconnected(self, answer: RowAnswer) -> None:
        """Keep the rollout of an answer that did not arrive for an equal row."""
        if answer.claim is not None:
            self._deduplicator.add_orphan(answer.claim, self._profile.repost_seconds)

    async def close(self) -> None:
        self._deduplicator.close()
        await self._service.close()

    async def _accept(self, row: Mapping[str, Any], claim: RowClaim) -> "asyncio.Future[Rollout]":
        """Wait until the service has accepted the rollout of a row; return the future of its record."""
        is_new = claim.submission is None and not claim.is_orphan
        if is_new:
            claim.request = to_rollout_request(row, claim.rollout_id, self._defaults, self._groups)
            claim.run_id = claim.request.run_id
        record = self._service.expect_record(claim.rollout_id, claim.run_id)  # it may end before the call returns
        if is_new and claim.request is not None:
            claim.submission = self._service.submit(claim.request)
        if claim.submission is not None:
            await asyncio.shield(claim.submission)
        if claim.is_orphan:
            self._service.fetch_record(claim.rollout_id)
        return record

    async def _wait_for_record(
        self, row: Mapping[str, Any], claim: RowClaim, record: "asyncio.Future[Rollout]"
    ) -> Rollout:
        while True:
            try:
                rollout = await record
            except NotFoundError:  # the service was restarted without its ledger, or the record expired
                pass
            else:
                if rollout.outcome.reason is not CancelReason.DISCONNECTED:
                    return rollout
                self._service.acknowledge([claim.rollout_id])  # an earlier process had abandoned it
            self._service.drop_record(claim.rollout_id)
            self._deduplicator.assign_new_rollout(claim)
            record = await self._accept(row, claim)

    def _track_row(self, row: GroupMember) -> GroupMember:
        if self._early_stop is not None:
            self._early_stop.add_row(row)
        return row

    def _on_listed(self, rollouts: Sequence[UnacknowledgedRollout]) -> None:
        if not self._has_restored:
            self._has_restored = True
            if number := self._deduplicator.restore_orphans(rollouts):
                _LOG.info("%d rollouts of an earlier process wait for their rows", number)

    # --- answers ----------------------------------------------------------------------------------------------------

    async def _error_reply(self, row: Mapping[str, Any], error: ProrlError) -> tuple[int, bytes]:
        """Return a masked result for a bad row, and 503 for any other error, after which Gym may try again."""
        if not isinstance(error, TaskError):
            return 503, orjson.dumps({"detail": str(error)})
        now = time.time()
        rejected = Rollout(
            rollout_id=f"refused-{uuid4().hex}",
            run_id="refused",
            group_id=None,
            group_size=1,
            replica=0,
            environment="unknown",
            outcome=Outcome(status="failed", kind=error.kind, stage="queue", message=str(error)),
            accepted_at=now,
            finished_at=now,
        )
        return await self._result_reply(row, rejected, "own")

    async def _result_reply(self, row: Mapping[str, Any], rollout: Rollout, outcome: RowOutcome) -> tuple[int, bytes]:
        mean = self._rewards.mean(rollout.group_id)
        placeholder = None
        if not any(segment.token_ids for segment in rollout.segments):
            placeholder = await self._placeholder(row)
        result = to_gym_result(
            rollout, row, placeholder=placeholder, is_group_stopped=outcome == "stopped", group_mean_reward=mean
        )
        measures_policy = rollout.reward is not None and not result["prorl_placeholder"]
        if self._profile.on_failure == "raise" and outcome == "own" and not measures_policy:
            return 503, orjson.dumps({"detail": result["mask_reason"], "failure_kind": result["failure_kind"]})
        if self._profile.is_observed:
            names = trajectory_identity(row, capture_rollout_id(row), rollout)
            result["ng_trajectory"] = to_gym_trajectory(rollout, *names, model=result["response"]["model"])
            if (compactions := compaction_observations(rollout)) is not None:
                result["ng_agent_observations"] = compactions
        return 200, orjson.dumps(result)

    async def _placeholder(self, row: Mapping[str, Any]) -> Placeholder:
        """Return the ids of a row's first prompt, for a rollout that never had one."""
        given: Any = row.get("responses_create_params")
        params = cast("Mapping[str, Any]", given if isinstance(given, Mapping) else {})
        prompt = {"input": params.get("input"), "tools": params.get("tools")}
        key = orjson.dumps(prompt, option=orjson.OPT_SORT_KEYS)
        if key not in self._placeholders:
            if len(self._placeholders) == _MAX_PLACEHOLDERS:
                del self._placeholders[next(iter(self._placeholders))]
            self._placeholders[key] = asyncio.ensure_future(self._render_or_empty(prompt))
        return await asyncio.shield(self._placeholders[key])

    async def _render_or_empty(self, prompt: Mapping[str, Any]) -> Placeholder:
        try:
            return await self._service.render_prompt(prompt)
        except Exception as error:  # rows and templates are not ours; the row is masked either way
            _LOG.warning("a row's first prompt cannot be rendered: %s: %s", type(error).__name__, error)
            return Placeholder()
