"""Carries out on the event loop what the schedulers of the runs decide.

It hears of everything that happens to rollouts from the service and its dispatcher, in order, and acts through the
dispatcher. Runs without a demand have no scheduler: of their rollouts it only remembers the stage.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager

from prorl_gym.client.wire_models import AcceptedRollout, GroupsStatus, GroupState, RolloutSummary
from prorl_gym.demand import Demand
from prorl_gym.errors import ConflictError, ProrlError, ShuttingDownError
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.groups.group import Group, GroupVerdict, Replacement, Replica, judge_group, was_unneeded
from prorl_gym.rollout.groups.group_actions import GroupActions
from prorl_gym.rollout.groups.group_report import groups_status
from prorl_gym.rollout.groups.group_scheduler import GroupScheduler
from prorl_gym.rollout.ledger.encoding import outcome_detail
from prorl_gym.rollout.ledger.ledger_config import LedgerError, StuckDiskError
from prorl_gym.rollout.protocol import AttemptMoved, Ledger, RecoveredRollout, StageEntered
from prorl_gym.rollout.scheduling.dispatcher import Dispatcher
from prorl_gym.rollout.scheduling.pending import PendingRollout

_LOG = logging.getLogger(__name__)

_PAGE = 1000

_REPLACEMENT_RETRY_SECONDS = 5.0
"""Before a replacement that the ledger had no room for is tried again."""

_DEMAND_WAIT_SECONDS = 15.0
"""How long a demand waits for an earlier one of its run."""

AcceptBatch = Callable[[Sequence[RolloutRequest]], Awaitable[list[AcceptedRollout] | ProrlError]]
"""Accepts rollouts, or returns what is wrong with them."""


class GroupController:
    """Of all runs. Only the service talks to it.

    Args:
        ledger: remembers demands and how rollouts ended.
        dispatcher: holds, cancels and parks.
        accept_batch: accepts replacements.
    """

    def __init__(self, ledger: Ledger, dispatcher: Dispatcher, accept_batch: AcceptBatch) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._accept_batch = accept_batch
        self._schedulers: dict[str, GroupScheduler] = {}
        self._opening: dict[str, list[tuple[RolloutSummary, float]]] = {}
        self._replicas: dict[str, Replica] = {}
        self._waiters = VerdictWaiters()
        self._timers: dict[str, tuple[float, asyncio.TimerHandle]] = {}
        self._demand_tasks: dict[str, asyncio.Task[None]] = {}
        self._versions: dict[str, int] = {}
        """Of the policy, by pool of engines."""
        self._stopped = False
        dispatcher.add_stage_observer(self._on_stage_event)

    # --- calls of the service -----------------------------------------------------------------------------------

    async def recover(self, pendings: Sequence[RecoveredRollout]) -> None:
        """Restore the demands that the ledger remembers. ``on_recovered`` follows with the pending rollouts."""
        self._versions = dict(await self._ledger.policy_versions())
        under_way = {(pending.run_id, pending.group_id) for pending in pendings}
        for run_id, demand in (await self._ledger.demands()).items():
            self.raise_policy_version(demand.version or 0, demand.pool)
            busy = {group_id for run, group_id in under_way if run == run_id and group_id is not None}
            self._schedulers[run_id], _ = await self._replay_finished(run_id, demand, busy)
        for scheduler in self._schedulers.values():
            scheduler.set_policy_version(self._version_for(scheduler.demand))

    async def set_demand(self, run_id: str, demand: Demand | None) -> None:
        """Remember a demand, then act on it. Calls for one run take effect in the order in which they were made.

        Raises:
            ConflictError: it is for a version older than its pool's.
            LedgerError: it cannot be remembered; then it does not hold.
        """
        if demand is not None and demand != self.demands().get(run_id):  # one that is sent again is harmless
            self._require_current_version(run_id, demand)
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        before = self._demand_tasks.get(run_id)
        turn = self._demand_tasks[run_id] = self._dispatcher.spawn(self._apply_demand(before, begun, run_id, demand))
        turn.add_done_callback(
            lambda _: self._demand_tasks.pop(run_id) if self._demand_tasks.get(run_id) is turn else None
        )
        await asyncio.wait({begun}, timeout=_DEMAND_WAIT_SECONDS)
        if not begun.done():
            begun.cancel()
            what = f"run {run_id}: the demand before this one is not in force yet; the ledger's disk does not answer."
            raise StuckDiskError(what, "Nothing was done. Look at the disk, and send it again.")
        await asyncio.shield(turn)

    def raise_policy_version(self, version: int, pool: str) -> None:
        """Act on a new version of the policy that the engines of a pool serve."""
        if version <= self._versions.get(pool, 0):
            return
        self._versions[pool] = version
        for scheduler in [each for each in self._schedulers.values() if each.demand.pool == pool]:
            scheduler.set_policy_version(version)
            self._run_decisions(scheduler)

    def demands(self) -> Mapping[str, Demand]:
        """Return the demands that hold, by run."""
        return {run_id: scheduler.demand for run_id, scheduler in self._schedulers.items()}

    def status(self, run_id: str) -> GroupsStatus:
        """Report on the groups of a run."""
        scheduler = self._schedulers.get(run_id)
        return (
            GroupsStatus(run_id=run_id, version=self._versions.get("policy", 0))
            if scheduler is None
            else groups_status(scheduler)
        )

    def is_stale(self, member: RolloutSummary) -> bool:
        """Whether the group of a rollout is older than its run's demand allows."""
        scheduler = self._schedulers.get(member.run_id)
        return scheduler is not None and scheduler.is_stale(member)

    def has_demand_for(self, requests: Sequence[RolloutRequest]) -> bool:
        """Whether any of these belongs to a run with a demand, which may hold it back."""
        return any(request.run_id in self._schedulers or request.run_id in self._opening for request in requests)

    async def wait_for_verdict(self, run_id: str, group_id: str | None, *, evaluation: bool) -> GroupVerdict:
        """Wait until a group is judged for good, and return how; ``ungrouped`` in a run without a demand.

        Raises:
            ShuttingDownError: the service stops before.
        """
        scheduler = self._schedulers.get(run_id)
        if scheduler is None or group_id is None or evaluation:
            return "ungrouped"
        settled = scheduler.results.get(group_id)
        if settled is not None:
            return verdict_of(settled.state)
        if group_id not in scheduler.groups:  # judged long ago: the same records give the same verdict
            members = await self._ledger.summaries(run_id, groups=[group_id])
            return verdict_of_summaries(members, group_id, scheduler.demand.epsilon)
        return await self._waiters.wait(run_id, group_id)

    def reject_waiters(self) -> None:
        """Answer every waiter for a verdict with ``ShuttingDownError``, from now on."""
        self._waiters.reject_all()

    def stop(self) -> None:
        """Decide nothing more: what is in hand is drained or left to the next start."""
        self._stopped = True
        self.reject_waiters()
        for run_id in list(self._timers):
            self._stop_timer(run_id)

    # --- events -------------------------------------------------------------------------------------------------

    def on_recovered(self, entries: Sequence[PendingRollout]) -> None:
        """After ``recover``: these are pending. Called before the dispatcher starts."""
        self.on_accepted(entries)
        for scheduler in list(self._schedulers.values()):
            self._run_decisions(scheduler)

    def on_accepted(self, entries: Sequence[PendingRollout]) -> None:
        """These are pending from now on. Called before the dispatcher can begin any of them."""
        schedulers: dict[str, GroupScheduler] = {}
        for entry in entries:
            if entry.group_id is None or entry.evaluation:
                continue
            replica = self._replicas[entry.rollout_id] = Replica(
                entry.rollout_id,
                entry.run_id,
                entry.group_id,
                entry.group_size,
                entry.environment,
                entry.stands_in_for,
                entry.position,
                cancel_reason=entry.cancel_reason,
            )
            if (scheduler := self._schedulers.get(replica.run_id)) is not None:
                schedulers[scheduler.run_id] = scheduler
                with self._contain_defects(scheduler):
                    scheduler.on_accepted(replica)
        for scheduler in schedulers.values():
            self._run_decisions(scheduler)

    def on_finished(self, cursor: int, rollout: Rollout) -> None:
        """This rollout has its record."""
        self._replicas.pop(rollout.rollout_id, None)
        run_id = rollout.run_id
        if run_id not in self._schedulers and run_id not in self._opening:
            return
        worked = rollout.stages.get("run")
        end = (
            _summary_of(rollout, cursor),
            0.0 if worked is None else worked.seconds,
        )
        if run_id in self._opening:
            self._opening[run_id].append(end)
        else:
            scheduler = self._schedulers[run_id]
            with self._contain_defects(scheduler):
                scheduler.on_finished(*end)
            self._run_decisions(scheduler)

    def _on_stage_event(self, event: AttemptMoved) -> None:
        replica = self._replicas.get(event.rollout_id)
        scheduler = None if replica is None else self._schedulers.get(replica.run_id)
        if scheduler is None:
            return
        with self._contain_defects(scheduler):
            if isinstance(event, StageEntered):
                scheduler.on_stage_entered(event.rollout_id)
            else:
                scheduler.on_parking_changed(event.rollout_id)
        self._run_decisions(scheduler)

    # --- schedulers --------------------------------------------------------------------------------------------------

    async def _apply_demand(
        self,
        before: asyncio.Task[None] | None,
        begun: "asyncio.Future[None]",
        run_id: str,
        demand: Demand | None,
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        if begun.done():  # its caller has given up
            return
        begun.set_result(None)
        await self._ledger.set_demand(run_id, demand)
        scheduler = self._schedulers.get(run_id)
        if demand is None:
            if scheduler is not None:
                with self._contain_defects(scheduler):
                    self._apply_actions(scheduler, scheduler.withdraw_demand())
                    self._close_scheduler(scheduler)
            return
        if scheduler is None:
            await self._open_scheduler(run_id, demand)
        else:
            scheduler.set_demand(demand)
            scheduler.set_policy_version(self._version_for(demand))
            self._run_decisions(scheduler)
        self.raise_policy_version(demand.version or 0, demand.pool)

    async def _open_scheduler(self, run_id: str, demand: Demand) -> None:
        """Begin to judge the groups of a run that is under way."""
        missed = self._opening[run_id] = []
        busy = {replica.group_id for replica in self._replicas.values() if replica.run_id == run_id}
        try:
            scheduler, read = await self._replay_finished(run_id, demand, busy)
        finally:
            del self._opening[run_id]
        for member, worked in missed:  # those that ended while the others were read
            if member.cursor > read:
                scheduler.on_finished(member, worked)
        for replica in self._replicas.values():
            if replica.run_id == run_id:
                scheduler.on_accepted(replica, before_demand=True)
        scheduler.set_policy_version(self._version_for(demand))
        self._schedulers[run_id] = scheduler
        self._run_decisions(scheduler)

    async def _replay_finished(self, run_id: str, demand: Demand, busy: Container[str]) -> tuple[GroupScheduler, int]:
        """Return a scheduler with everything that has ended in a run, and the cursor up to which that is.

        Args:
            run_id: the run.
            demand: what is wanted of it.
            busy: its groups of which something is still pending.
        """
        scheduler = GroupScheduler(run_id, demand, self._version_for(demand))
        cursor = 0
        while page := await self._ledger.summaries(run_id, after=cursor, limit=_PAGE):
            for member in page:
                scheduler.on_finished(member)
            scheduler.settle_rewarded(exclude=busy)
            cursor = page[-1].cursor
        return scheduler, cursor

    def _require_current_version(self, run_id: str, demand: Demand) -> None:
        """Refuse a demand of a version that its pool has left behind, maybe in another run.

        Raises:
            ConflictError: it is.
        """
        current = self._version_for(demand)
        if demand.version is not None and demand.version < current:
            raise ConflictError(
                f"run {run_id}: its demand is for version {demand.version} of pool {demand.pool}, which is at version "
                f"{current}.",
                "Versions belong to the pool and never go back, whichever run reports them: take the version of "
                "GET /v1/policy, or leave it out.",
            )

    def _version_for(self, demand: Demand) -> int:
        return self._versions.get(demand.pool, 0)

    def _close_scheduler(self, scheduler: GroupScheduler) -> None:
        """End the decisions about a run: everything of it goes on that is not being stopped."""
        del self._schedulers[scheduler.run_id]
        self._stop_timer(scheduler.run_id)
        actions = GroupActions()
        actions.resume([each for each in self._replicas.values() if each.run_id == scheduler.run_id and each.is_live])
        self._apply_actions(scheduler, actions)
        self._waiters.resolve_run(scheduler.run_id, "ungrouped")

    @contextmanager
    def _contain_defects(self, scheduler: GroupScheduler) -> Generator[None, None, None]:
        """A defect in the scheduler of a run costs that run its demand until the next start, and not the service."""
        try:
            yield
        except Exception:
            _LOG.exception(
                "run %s: its groups are not looked after any more; all of its rollouts go on", scheduler.run_id
            )
            if self._schedulers.get(scheduler.run_id) is scheduler:
                self._close_scheduler(scheduler)

    # --- actions ----------------------------------------------------------------------------------------------

    def _run_decisions(self, scheduler: GroupScheduler) -> None:
        if self._stopped or self._schedulers.get(scheduler.run_id) is not scheduler:
            return
        with self._contain_defects(scheduler):
            self._apply_actions(scheduler, scheduler.decide(time.time()))
            self._set_timer(scheduler)

    def _set_timer(self, scheduler: GroupScheduler) -> None:
        tick, running = scheduler.next_decision_at(), self._timers.get(scheduler.run_id)
        if running is not None and running[0] == tick:
            return
        self._stop_timer(scheduler.run_id)
        if tick is not None:
            pause = max(0.0, tick - time.time())
            timer = asyncio.get_running_loop().call_later(pause, self._tick, scheduler)
            self._timers[scheduler.run_id] = tick, timer

    def _tick(self, scheduler: GroupScheduler) -> None:
        self._timers.pop(scheduler.run_id, None)
        self._run_decisions(scheduler)

    def _stop_timer(self, run_id: str) -> None:
        if (running := self._timers.pop(run_id, None)) is not None:
            running[1].cancel()

    def _apply_actions(self, scheduler: GroupScheduler, actions: GroupActions) -> None:
        entries = self._dispatcher.pending
        for entry in self._find_pending(actions.hold):
            entries.hold(entry)
        for entry in self._find_pending(actions.release):
            entries.release(entry)
        for reason, ids in actions.cancel.items():
            chosen = [entry for entry in self._find_pending(ids) if entry.cancel_reason is None]
            for entry in chosen:
                entry.cancel_reason = reason
            if chosen:
                self._dispatcher.spawn(self._dispatcher.cancel_unneeded(chosen, reason))
        if actions.park:
            self._dispatcher.spawn(self._dispatcher.park(self._find_pending(actions.park)))
        if actions.unpark:
            self._dispatcher.spawn(self._dispatcher.unpark(self._find_pending(actions.unpark)))
        for replacement in actions.replacements:
            self._dispatcher.spawn(self._submit_replacement(scheduler, replacement))
        for group_id, state in actions.settled:
            self._waiters.resolve(scheduler.run_id, group_id, verdict_of(state))

    def _find_pending(self, ids: Sequence[str]) -> list[PendingRollout]:
        return [entry for name in ids if (entry := self._dispatcher.pending.get(name)) is not None]

    async def _submit_replacement(self, scheduler: GroupScheduler, replacement: Replacement) -> None:
        """Submit a replacement. Its id is always the same, so that after a crash the same one is submitted again."""
        again_at: float | None = None
        try:
            originals = await self._ledger.requests([replacement.stands_in_for])
            if originals:
                answers = await self._accept_batch([replacement.to_request(originals[0])])
                if isinstance(answers, list) and (not answers[0].duplicate or replacement.rollout_id in self._replicas):
                    return
                problem = answers if isinstance(answers, ConflictError) else "it ended before"
            else:
                problem = "its request is not kept any more"
            _LOG.error("no replacement for rollout %s: %s", replacement.stands_in_for, problem)
        except ShuttingDownError:
            return
        except LedgerError as error:
            again_at = time.time() + _REPLACEMENT_RETRY_SECONDS
            _LOG.warning("no replacement for rollout %s yet: %s", replacement.stands_in_for, error)
        scheduler.on_replacement_refused(replacement, again_at)
        self._run_decisions(scheduler)


def _summary_of(rollout: Rollout, cursor: int) -> RolloutSummary:
    """Return what the ledger keeps of a record that was just written."""
    return RolloutSummary(
        cursor=cursor,
        rollout_id=rollout.rollout_id,
        run_id=rollout.run_id,
        group_id=rollout.group_id,
        group_size=rollout.group_size,
        replica=rollout.replica,
        environment=rollout.environment,
        evaluation=rollout.evaluation,
        stands_in_for=rollout.stands_in_for,
        status=rollout.outcome.status,
        detail=outcome_detail(rollout.outcome),
        cause=rollout.outcome.cause,
        reward=rollout.reward,
        masked=rollout.masked,
        oldest_version=rollout.oldest_version,
        turns=rollout.turns,
        sampled_tokens=rollout.sampled_tokens,
        accepted_at=rollout.accepted_at,
        finished_at=rollout.finished_at,
        released=False,
        begun_at=rollout.begun_at,
        row_id=rollout.row_id,
        why=rollout.why,
    )


class VerdictWaiters:
    """Of all runs: each waiter is answered once."""

    def __init__(self) -> None:
        self._waiters: dict[tuple[str, str], list[asyncio.Future[GroupVerdict]]] = {}
        self._rejecting = False

    async def wait(self, run_id: str, group_id: str) -> GroupVerdict:
        """Wait for the verdict on a group that is not judged.

        Raises:
            ShuttingDownError: the service stops before.
        """
        if self._rejecting:
            raise _stopping_error()
        waiter: asyncio.Future[GroupVerdict] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault((run_id, group_id), [])
        waiters.append(waiter)
        try:
            return await waiter
        finally:
            waiters.remove(waiter)
            if not waiters and self._waiters.get((run_id, group_id)) is waiters:
                del self._waiters[run_id, group_id]

    def resolve(self, run_id: str, group_id: str, verdict: GroupVerdict) -> None:
        """Answer the waiters for this group."""
        for waiter in self._waiters.get((run_id, group_id), ()):
            if not waiter.done():
                waiter.set_result(verdict)

    def resolve_run(self, run_id: str, verdict: GroupVerdict) -> None:
        """Answer the waiters for any group of a run."""
        for run, group_id in list(self._waiters):
            if run == run_id:
                self.resolve(run, group_id, verdict)

    def reject_all(self) -> None:
        """Answer every waiter, from now on, with ``ShuttingDownError``."""
        self._rejecting = True
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(_stopping_error())


def _stopping_error() -> ShuttingDownError:
    return ShuttingDownError(
        "The service stops before the group has a verdict.", "Wait for it again after the restart."
    )


def verdict_of(state: GroupState) -> GroupVerdict:
    """Return the verdict that a final state is."""
    if state == "ready":
        return "informative"
    if state in ("open", "informative"):  # of a group that was never submitted as a whole
        return "short"
    return state


def verdict_of_summaries(members: Sequence[RolloutSummary], group_id: str, epsilon: float) -> GroupVerdict:
    """Judge a group by how all of its rollouts ended, in the order of their cursors."""
    group = Group(group_id, 0)
    for member in members:
        replica = Replica.from_summary(member)
        if not (was_unneeded(member) and group.is_complete_without(replica)):
            group.add_replica(replica)
    return verdict_of(judge_group(group.ends() or [], group.size, epsilon))
