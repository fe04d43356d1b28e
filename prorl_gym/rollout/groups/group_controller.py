"""Carries out on the event loop what the schedulers of the runs decide.

It is called for everything that happens to rollouts, in order, by the service and its dispatcher, and acts through the
dispatcher. Runs without a demand have no scheduler: of their rollouts it only remembers the stage.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields

from prorl_gym.client.wire_models import AcceptedRollout, GroupsStatus, RolloutSummary
from prorl_gym.demand import Demand
from prorl_gym.errors import ConflictError, ProrlError, ShuttingDownError
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.groups.group import IDENTITY, Replacement, Replica
from prorl_gym.rollout.groups.group_scheduler import GroupActions, GroupScheduler
from prorl_gym.rollout.ledger.encoding import outcome_detail
from prorl_gym.rollout.ledger.ledger_config import LedgerError, StuckDiskError
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.protocol import AttemptMoved, RecoveredRollout, StageEntered
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
    """Holds the schedulers of all runs. Only the service calls it; ``accept_batch`` accepts replacements."""

    def __init__(self, ledger: SqliteLedger, dispatcher: Dispatcher, accept_batch: AcceptBatch) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._accept_batch = accept_batch
        self.schedulers: dict[str, GroupScheduler] = {}
        """By run; one without a demand has none."""
        self._opening: dict[str, list[tuple[RolloutSummary, float]]] = {}
        self._replicas: dict[str, Replica] = {}
        self._timers: dict[str, tuple[float, asyncio.TimerHandle]] = {}
        self._demand_tasks: dict[str, asyncio.Task[None]] = {}
        self._versions: dict[str, int] = {}
        """Policy versions by pool of engines."""
        self._stopped = False
        dispatcher.settler.stage_observers.append(self._on_stage_event)

    # --- calls of the service -----------------------------------------------------------------------------------

    async def recover(self, pendings: Sequence[RecoveredRollout]) -> None:
        """Restore the stored demands. ``on_recovered`` follows with the pending rollouts."""
        self._versions = dict(await self._ledger.policy_versions())
        under_way = {(pending.run_id, pending.group_id) for pending in pendings}
        for run_id, demand in (await self._ledger.demands()).items():
            self.raise_policy_version(demand.version or 0, demand.pool)
            busy = {group_id for run, group_id in under_way if run == run_id and group_id is not None}
            self.schedulers[run_id], _ = await self._replay_finished(run_id, demand, busy)
        for scheduler in self.schedulers.values():
            scheduler.set_policy_version(self._version_for(scheduler.demand))

    async def set_demand(self, run_id: str, demand: Demand | None) -> None:
        """Store a demand and act on it, in the order of the calls. Raises ``ConflictError``, ``LedgerError``."""
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
        if version <= self._versions.get(pool, 0):
            return
        self._versions[pool] = version
        for scheduler in [each for each in self.schedulers.values() if each.demand.pool == pool]:
            scheduler.set_policy_version(version)
            self._run_decisions(scheduler)

    def demands(self) -> Mapping[str, Demand]:
        return {run_id: scheduler.demand for run_id, scheduler in self.schedulers.items()}

    def status(self, run_id: str) -> GroupsStatus:
        scheduler = self.schedulers.get(run_id)
        if scheduler is None:
            return GroupsStatus(run_id=run_id, version=self._versions.get("policy", 0))
        return scheduler.status()

    def is_stale(self, member: RolloutSummary) -> bool:
        """Whether a rollout's group is further behind the policy than its run's demand allows."""
        scheduler = self.schedulers.get(member.run_id)
        return scheduler is not None and scheduler.is_stale(member)

    def has_demand_for(self, requests: Sequence[RolloutRequest]) -> bool:
        """Whether any of these belongs to a run with a demand, which may hold it back."""
        return any(request.run_id in self.schedulers or request.run_id in self._opening for request in requests)

    def stop(self) -> None:
        """Decide nothing more: what runs is drained or left to the next start."""
        self._stopped = True
        for run_id in list(self._timers):
            self._stop_timer(run_id)

    # --- events -------------------------------------------------------------------------------------------------

    def on_recovered(self, entries: Sequence[PendingRollout]) -> None:
        """Track these, after ``recover`` and before the dispatcher starts."""
        self.on_accepted(entries)
        for scheduler in list(self.schedulers.values()):
            self._run_decisions(scheduler)

    def on_accepted(self, entries: Sequence[PendingRollout]) -> None:
        """Track these, before the dispatcher can begin any of them."""
        schedulers: dict[str, GroupScheduler] = {}
        for entry in entries:
            if entry.group_id is None or entry.evaluation:
                continue
            replica = Replica(*IDENTITY(entry), position=entry.position, cancel_reason=entry.cancel_reason)
            self._replicas[entry.rollout_id] = replica
            if (scheduler := self.schedulers.get(replica.run_id)) is not None:
                schedulers[scheduler.run_id] = scheduler
                with self._contain_defects(scheduler):
                    scheduler.on_accepted(replica)
        for scheduler in schedulers.values():
            self._run_decisions(scheduler)

    def on_finished(self, cursor: int, rollout: Rollout) -> None:
        self._replicas.pop(rollout.rollout_id, None)
        run_id = rollout.run_id
        if run_id not in self.schedulers and run_id not in self._opening:
            return
        worked = rollout.stages.get("run")
        end = (_summary_of(rollout, cursor), 0.0 if worked is None else worked.seconds)
        if run_id in self._opening:
            self._opening[run_id].append(end)
        else:
            scheduler = self.schedulers[run_id]
            with self._contain_defects(scheduler):
                scheduler.on_finished(*end)
            self._run_decisions(scheduler)

    def _on_stage_event(self, event: AttemptMoved) -> None:
        replica = self._replicas.get(event.rollout_id)
        scheduler = None if replica is None else self.schedulers.get(replica.run_id)
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
        self, before: asyncio.Task[None] | None, begun: "asyncio.Future[None]", run_id: str, demand: Demand | None
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        if begun.done():  # its caller has given up
            return
        begun.set_result(None)
        await self._ledger.set_demand(run_id, demand)
        scheduler = self.schedulers.get(run_id)
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
        self.schedulers[run_id] = scheduler
        self._run_decisions(scheduler)

    async def _replay_finished(self, run_id: str, demand: Demand, busy: Container[str]) -> tuple[GroupScheduler, int]:
        """Return a scheduler after everything that has ended in a run, and its cursor. ``busy`` groups are open."""
        scheduler = GroupScheduler(run_id, demand, self._version_for(demand))
        cursor = 0
        while page := await self._ledger.summaries(run_id, after=cursor, limit=_PAGE):
            for member in page:
                scheduler.on_finished(member)
            scheduler.settle_rewarded(exclude=busy)
            cursor = page[-1].cursor
        return scheduler, cursor

    def _require_current_version(self, run_id: str, demand: Demand) -> None:
        """Raise ``ConflictError`` for a demand of a version that its pool has left behind, maybe in another run."""
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
        del self.schedulers[scheduler.run_id]
        self._stop_timer(scheduler.run_id)
        actions = GroupActions()
        actions.resume([each for each in self._replicas.values() if each.run_id == scheduler.run_id and each.is_live])
        self._apply_actions(scheduler, actions)

    @contextmanager
    def _contain_defects(self, scheduler: GroupScheduler) -> Generator[None, None, None]:
        """A defect in the scheduler of a run costs that run its demand until the next start, and not the service."""
        try:
            yield
        except Exception:
            _LOG.exception(
                "run %s: its groups are not looked after any more; all of its rollouts go on", scheduler.run_id
            )
            if self.schedulers.get(scheduler.run_id) is scheduler:
                self._close_scheduler(scheduler)

    # --- actions ----------------------------------------------------------------------------------------------

    def _run_decisions(self, scheduler: GroupScheduler) -> None:
        if self._stopped or self.schedulers.get(scheduler.run_id) is not scheduler:
            return
        with self._contain_defects(scheduler):
            self._apply_actions(scheduler, scheduler.decide(time.time()))
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
            self._dispatcher.spawn(self._dispatcher.runner.park(actions.park))
        if actions.unpark:
            self._dispatcher.spawn(self._dispatcher.runner.unpark(actions.unpark))
        for replacement in actions.replacements:
            self._dispatcher.spawn(self._submit_replacement(scheduler, replacement))

    def _find_pending(self, ids: Sequence[str]) -> list[PendingRollout]:
        return [entry for name in ids if (entry := self._dispatcher.pending.by_id.get(name)) is not None]

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
    outcome = rollout.outcome
    detail = outcome_detail(outcome)
    same = {name: getattr(rollout, name) for name in _SAME_FIELDS}
    return RolloutSummary(
        cursor=cursor, status=outcome.status, detail=detail, cause=outcome.cause, released=False, **same
    )


_SAME_FIELDS = {field.name for field in fields(RolloutSummary)} - {"cursor", "status", "detail", "cause", "released"}
"""Fields of a summary that a record has too."""
