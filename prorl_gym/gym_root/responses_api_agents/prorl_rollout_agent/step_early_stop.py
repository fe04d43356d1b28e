# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""Stops the groups of which a training step has no use, for trainers whose rows must all come back.

NeMo-RL posts the rows of a step at once and waits for all of them. Rows are held until their group is *settled*: all
its rollouts have ended. When as many groups of the round are informative (their rewards differ) as a step trains on,
the groups that are not settled are *stopped*: their rollouts are cancelled, and all their rows are answered with reward
0, masked. A trainer with dynamic sampling drops groups of equal rewards and never learns from them.

A group comes back as one, which a ``Demand`` does not promise: a group of which a row was answered with its own reward
is never stopped. A round begins with the first row and ends when all its rows are answered. Rows without a group, and
evaluation, are neither held nor stopped.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.settings import Seconds

_LOG = logging.getLogger(__name__)

GroupMember = RolloutRequest | Rollout
"""A row's request, or its record where only that is known; both name the group."""

RowOutcome = Literal["own", "stopped"]
"""Whether a row is answered with its own rollout, or as a member of a stopped group."""


class EarlyStopConfig(BaseModel):
    """Early stop of a step's groups. Off unless configured.

    The recipe has to set ``use_dynamic_sampling: true``: the rows of a stopped group have reward 0 and a mask, and only
    a trainer that drops groups without a spread of rewards learns nothing from them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    informative_groups: Annotated[int, Field(ge=1)]
    """Groups whose rewards differ that a round needs: the recipe's ``num_prompts_per_step``."""
    spare: Annotated[int, Field(ge=0)] = 0
    """Further such groups that are completed first, which softens the preference for fast prompts."""
    age_seconds: Seconds = 900.0
    """Age from which a group is finished although the round has enough, so that slow prompts are not sorted out. Also
    how long rows are held for members of their group that were never posted."""
    epsilon: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    """Rewards that are no further apart are equal."""


@dataclass(slots=True)
class _Group:
    size: int
    settled: "asyncio.Future[RowOutcome]"
    posted_ids: set[str] = field(default_factory=set[str])
    """Ids of its rollouts."""
    rewards: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """Rewards of the rollouts that have ended; ``None`` for a masked one."""
    open_rows: int = 0
    """Rows that were not answered yet."""
    is_overdue: bool = False
    """Whether it is older than ``age_seconds``."""
    overdue_timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class StepEarlyStop:
    """Holds and stops the rows of one agent, round by round; ``on_redundant`` cancels rollouts by their ids."""

    config: EarlyStopConfig
    on_redundant: Callable[[Sequence[str]], None]
    informative_groups: int = 0
    """Groups of this round whose rewards differ."""
    stopped_groups: int = 0
    """Groups of this round that were stopped."""
    _groups: dict[str, _Group] = field(default_factory=dict[str, _Group])
    _open_rows: int = 0

    def applies_to(self, row: GroupMember) -> bool:
        """Whether a row may be held or stopped."""
        return row.group_id is not None and row.group_size > 1 and not row.evaluation

    def add_row(self, row: GroupMember) -> None:
        """Add a row whose rollout was accepted; if its group is not needed, the rollout is cancelled."""
        if not self.applies_to(row):
            return
        assert row.group_id is not None
        group = self._groups.get(row.group_id)
        if group is None:
            loop = asyncio.get_running_loop()
            group = self._groups[row.group_id] = _Group(row.group_size, loop.create_future())
            group.overdue_timer = loop.call_later(self.config.age_seconds, self._mark_overdue, group)
        group.posted_ids.add(row.rollout_id)
        group.open_rows += 1
        self._open_rows += 1
        if group.settled.done() and group.settled.result() == "stopped":
            self.on_redundant([row.rollout_id])
        elif self._has_enough and len(group.posted_ids) == 1:
            self._stop_group(group)

    async def wait_settled(self, row: GroupMember, rollout: Rollout) -> RowOutcome:
        """Wait until the group of a rollout that has ended is settled; return how its row is answered."""
        group = self._groups.get(row.group_id or "")
        if group is None or not self.applies_to(row):
            return "own"
        if not group.settled.done():
            group.rewards[rollout.rollout_id] = None if rollout.masked else rollout.reward
            if len(group.rewards) >= group.size:
                self._settle_group(group)
        return await asyncio.shield(group.settled)

    def remove_row(self, row: GroupMember) -> None:
        """Remove a row that was answered, or whose caller left."""
        group = self._groups.get(row.group_id or "")
        if group is None or not self.applies_to(row):
            return
        group.open_rows -= 1
        self._open_rows -= 1
        if row.rollout_id not in group.rewards:  # its caller left; an equal row is added again
            group.posted_ids.discard(row.rollout_id)
            self._release_incomplete(group)
        if group.open_rows == 0 and (group.settled.done() or not group.rewards):
            self._remove_group(row.group_id or "")
        if self._open_rows == 0:
            if self.stopped_groups:
                _LOG.info("round over: %d informative groups, %d stopped", self.informative_groups, self.stopped_groups)
            for group_id in tuple(self._groups):
                self._remove_group(group_id)
            self.informative_groups = self.stopped_groups = 0

    @property
    def _has_enough(self) -> bool:
        return self.informative_groups >= self.config.informative_groups + self.config.spare

    def _settle_group(self, group: _Group) -> None:
        rewards = [reward for reward in group.rewards.values() if reward is not None]
        if rewards and max(rewards) - min(rewards) > self.config.epsilon:
            self.informative_groups += 1
        group.settled.set_result("own")
        if self._has_enough:
            for other in self._groups.values():
                if not other.settled.done() and not other.is_overdue:
                    self._stop_group(other)

    def _stop_group(self, group: _Group) -> None:
        self.stopped_groups += 1
        group.settled.set_result("stopped")
        self.on_redundant([rollout_id for rollout_id in group.posted_ids if rollout_id not in group.rewards])

    def _mark_overdue(self, group: _Group) -> None:
        group.is_overdue = True
        self._release_incomplete(group)

    def _release_incomplete(self, group: _Group) -> None:
        """Answer the rows of an overdue group of which some were never posted."""
        if group.is_overdue and not group.settled.done() and len(group.posted_ids) < group.size:
            _LOG.warning("a group has %d of %d rows; they are answered as they end", len(group.posted_ids), group.size)
            group.settled.set_result("own")

    def _remove_group(self, group_id: str) -> None:
        group = self._groups.pop(group_id)
        if group.overdue_timer is not None:
            group.overdue_timer.cancel()
