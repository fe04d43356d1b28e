"""One agent's rows, from what Gym posted to what Gym is told. The answer to a row is always a complete Gym result.

A rollout that failed for reasons the model did not cause is masked, not an HTTP error (``on_failure: mask``).
``on_failure: raise`` answers 503 instead, for trainers that re-dispatch rows.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol
from uuid import uuid4

import orjson

from prorl_gym.errors import CancelReason, Cause, NotFoundError, ProrlError, TaskError
from prorl_gym.gym_root.resources_servers.prorl_rollout.claims import Claim, Claims
from prorl_gym.gym_root.resources_servers.prorl_rollout.rounds import Rounds, Row, Verdict
from prorl_gym.gym_root.wire import Profile
from prorl_gym.records import Message, Outcome, Rollout, RolloutRequest
from prorl_gym.trainers.gym import Placeholder, to_gym_result
from prorl_gym.trainers.gym_items import messages_of
from prorl_gym.trainers.gym_rows import Groups, RowDefaults, row_key, to_request

_LOG = logging.getLogger(__name__)

_GROUPS = 4096
"""Groups of which the rewards are remembered, for masked rows."""

_PLACEHOLDERS = 256
"""First prompts that are remembered: the rows of a group share one."""


class Rollouts(Protocol):
    """What a desk needs of the hosted service."""

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Accept these, all or nothing, however long it takes.

        Raises:
            TaskError: a task is not JSON.
            LedgerError: nothing can be accepted before somebody repairs the ledger.
            ShuttingDownError: the server stops.
        """
        ...

    async def result(self, rollout_id: str) -> Rollout:
        """Wait for a record.

        Raises:
            NotFoundError: never accepted, or not kept any more.
            ShuttingDownError: the server stops.
        """
        ...

    def delivered(self, rollout_ids: Sequence[str]) -> None:
        """Gym has the answers of these, or nobody will ask for them again."""
        ...

    def cancel_later(self, rollout_ids: Sequence[str], reason: CancelReason) -> None:
        """Stop rollouts; each still gets its record."""
        ...

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[list[int], int]:
        """Return the ids of a first prompt, and the terminator's id."""
        ...


@dataclass(slots=True, eq=False)
class Post:
    """A posted row."""

    row: dict[str, Any]
    claim: Claim | None
    """``None``: the row was not accepted, ``refusal`` says why."""
    refusal: ProrlError | None = None


class GroupRewards:
    """Rewards of the finished members of the latest groups."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, dict[int, tuple[str, float | None]]] = OrderedDict()
        """Rollout id and reward by replica."""

    def note(self, rollout: Rollout) -> None:
        """Remember how a member ended."""
        if rollout.group_id is None:
            return
        members = self._groups.setdefault(rollout.group_id, {})
        before, reward = members.get(rollout.replica, (rollout.rollout_id, None))
        if before != rollout.rollout_id and reward is not None:
            members.clear()  # Gym numbers prompts anew in each epoch: this is the same prompt again
        members[rollout.replica] = (rollout.rollout_id, rollout.reward)
        self._groups.move_to_end(rollout.group_id)
        if len(self._groups) > _GROUPS:
            self._groups.popitem(last=False)

    def mean(self, group_id: str | None) -> float:
        """Return the mean reward of a group's finished members; 0 when none is known."""
        members = self._groups.get(group_id or "", {})
        rewards = [reward for _, reward in members.values() if reward is not None]
        return fmean(rewards) if rewards else 0.0


class Desk:
    """Serves the rows of one agent's instance, over as many channels as it opens.

    Args:
        profile: what the agent says about all its rows.
        rollouts: makes them.
        claims: which rollout a row means; shared by all desks.
    """

    def __init__(self, profile: Profile, rollouts: Rollouts, claims: Claims) -> None:
        self.profile = profile
        self._rollouts = rollouts
        self._claims = claims
        # Rows whose group is found by their content alone name it by a counter: not to be mixed with an earlier one's.
        self._groups = Groups(f"{profile.agent}-{uuid4().hex[:6]}", size=profile.num_generations)
        self._defaults = RowDefaults(
            environment=profile.environment,
            run_id=profile.agent,
            settings=profile.settings,
            evaluation=profile.evaluation,
        )
        self._placeholders: dict[bytes, Placeholder] = {}
        self._rewards = GroupRewards()
        early = profile.early_stop
        self._rounds = None if early is None else Rounds(early, self._redundant)

    def claim(self, row: dict[str, Any]) -> Post:
        """Find the rollout of a row, or what is wrong with the row. A new one is yet to be submitted."""
        claim = self._claims.claim(row_key(row))
        if not claim.known:
            try:
                claim.request = self._read(row, claim)
            except TaskError as error:
                return Post(row, None, error)
        return Post(row, claim)

    async def answer(self, post: Post) -> tuple[int, bytes]:
        """Wait for the rollout of a row; return the HTTP status and the body that Gym is to get."""
        claim = post.claim
        if claim is None:
            return self._refuse(post.row, post.refusal)
        entered: Row | None = claim.request
        self._enter(entered)
        try:
            rollout = await self._result(post.row, claim)
            claim.settled = True
            self._rewards.note(rollout)
            if entered is None:
                entered = rollout
                self._enter(entered)
            verdict: Verdict = "own" if self._rounds is None else await self._rounds.verdict(entered, rollout)
            return self._told(post.row, rollout, verdict)
        except ProrlError as error:
            return self._refuse(post.row, error)
        finally:
            if self._rounds is not None and entered is not None:
                self._rounds.leave(entered)

    async def _result(self, row: Mapping[str, Any], claim: Claim) -> Rollout:
        try:
            return await self._rollouts.result(claim.rollout_id)
        except NotFoundError:  # an earlier process died before the ledger knew it, or its record was given up
            self._rollouts.delivered([claim.rollout_id])
            self._claims.renew(claim)
            claim.request = self._read(row, claim)
            await self._rollouts.submit([claim.request])
            return await self._rollouts.result(claim.rollout_id)

    def _read(self, row: Mapping[str, Any], claim: Claim) -> RolloutRequest:
        return to_request(row, claim.rollout_id, self._defaults, self._groups)

    def _enter(self, row: Row | None) -> None:
        if self._rounds is not None and row is not None:
            self._rounds.enter(row)

    def _refuse(self, row: Mapping[str, Any], error: ProrlError | None) -> tuple[int, bytes]:
        """A bad row is a masked result that names what is wrong; with anything else Gym may try again."""
        if isinstance(error, TaskError):
            return self._told(row, _refused(error), "own")
        return 503, orjson.dumps({"detail": str(error)})

    def _told(self, row: Mapping[str, Any], rollout: Rollout, verdict: Verdict) -> tuple[int, bytes]:
        blameless = rollout.outcome.status == "failed" and rollout.outcome.cause is not Cause.POLICY
        if blameless and self.profile.on_failure == "raise" and verdict == "own":
            return 503, orjson.dumps({"detail": f"{rollout.outcome.kind}: {rollout.outcome.message}"})
        placeholder = None
        if not any(segment.token_ids for segment in rollout.segments):
            placeholder = self._placeholder(row)
        mean = self._rewards.mean(rollout.group_id)
        result = to_gym_result(rollout, row, placeholder=placeholder, stopped=verdict == "stopped", group_mean=mean)
        return 200, orjson.dumps(result)

    def _placeholder(self, row: Mapping[str, Any]) -> Placeholder:
        """Return the ids of a row's first prompt, for a rollout that never got as far as having one."""
        given: Any = row.get("responses_create_params")
        params: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        key = orjson.dumps([params.get("input"), params.get("tools")], option=orjson.OPT_SORT_KEYS)
        if key not in self._placeholders:
            if len(self._placeholders) == _PLACEHOLDERS:
                del self._placeholders[next(iter(self._placeholders))]
            self._placeholders[key] = self._render(params)
        return self._placeholders[key]

    def _render(self, params: Mapping[str, Any]) -> Placeholder:
        try:
            messages = messages_of(params.get("input") or []) or [Message(role="user", content="")]
            ids, terminator = self._rollouts.prompt_ids(messages, params.get("tools") or [])
        except Exception as error:  # rows and templates come from anywhere; the row is masked either way
            _LOG.warning("a row's first prompt cannot be rendered: %s: %s", type(error).__name__, error)
            return Placeholder()
        return Placeholder(tuple(ids), terminator)

    def _redundant(self, rollout_ids: Sequence[str]) -> None:
        self._rollouts.cancel_later(rollout_ids, CancelReason.REDUNDANT)


def _refused(error: TaskError) -> Rollout:
    """The record of a row that could not even be submitted."""
    now = time.time()
    return Rollout(
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
