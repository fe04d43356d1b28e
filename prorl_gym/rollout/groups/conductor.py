"""Carries out on the event loop what the books of the runs decide.

It hears of everything that happens to rollouts from the service and its dispatcher, in order, and acts through the
dispatcher. Runs without a demand have no book: of their rollouts it only remembers the stage.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager

from prorl_gym.demand import Demand
from prorl_gym.errors import ConflictError, ProrlError, ShuttingDownError
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.dispatcher import Dispatcher
from prorl_gym.rollout.encoding import member_of
from prorl_gym.rollout.entries import Entry
from prorl_gym.rollout.groups.book import Book
from prorl_gym.rollout.groups.decisions import Decisions
from prorl_gym.rollout.groups.group import Verdict
from prorl_gym.rollout.groups.replica import Replica, StandIn
from prorl_gym.rollout.groups.report import GroupsStatus, report
from prorl_gym.rollout.groups.verdicts import VerdictWaiters, judged, verdict_of
from prorl_gym.rollout.ledger_file import LedgerError, StuckDiskError
from prorl_gym.rollout.protocol import Accepted, Ledger, Member, Parked, Pending, StageEntered

_LOG = logging.getLogger(__name__)

_PAGE = 1000
_AGAIN_SECONDS = 5.0
"""Before a stand-in that the ledger had no room for is tried again."""

_TURN_SECONDS = 15.0
"""How long a demand waits for an earlier one of its run."""

Admit = Callable[[Sequence[RolloutRequest]], Awaitable[list[Accepted] | ProrlError]]
"""Accepts rollouts, or returns what is wrong with them."""


class Conductor:
    """Of all runs. Only the service talks to it.

    Args:
        ledger: remembers demands and how rollouts ended.
        dispatcher: holds, cancels and parks.
        admit: accepts stand-ins.
    """

    def __init__(self, ledger: Ledger, dispatcher: Dispatcher, admit: Admit) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._admit = admit
        self._books: dict[str, Book] = {}
        self._opening: dict[str, list[tuple[Member, float]]] = {}
        self._replicas: dict[str, Replica] = {}
        self._waiters = VerdictWaiters()
        self._timers: dict[str, tuple[float, asyncio.TimerHandle]] = {}
        self._turns: dict[str, asyncio.Task[None]] = {}
        self._versions: dict[str, int] = {}
        """Of the policy, by pool of engines."""
        self._stopped = False
        dispatcher.watch(self._seen)

    # --- what the service asks ----------------------------------------------------------------------------------

    async def recover(self, pendings: Sequence[Pending]) -> None:
        """Open the books of the runs that the ledger remembers a demand of. ``begin`` follows with what is pending."""
        self._versions = dict(await self._ledger.versions())
        under_way = {(pending.run_id, pending.group_id) for pending in pendings}
        for run_id, demand in (await self._ledger.demands()).items():
            self.raise_version(demand.version or 0, demand.pool)
            busy = {group_id for run, group_id in under_way if run == run_id and group_id is not None}
            self._books[run_id], _ = await self._read(run_id, demand, busy)
        for book in self._books.values():
            book.set_version(self._version_for(book.demand))

    async def set_demand(self, run_id: str, demand: Demand | None) -> None:
        """Remember a demand, then act on it. Calls for one run take effect in the order in which they were made.

        Raises:
            LedgerError: it cannot be remembered; then it does not hold.
        """
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        before = self._turns.get(run_id)
        turn = self._turns[run_id] = self._dispatcher.spawn(self._take_turn(before, begun, run_id, demand))
        turn.add_done_callback(lambda _: self._turns.pop(run_id) if self._turns.get(run_id) is turn else None)
        await asyncio.wait({begun}, timeout=_TURN_SECONDS)
        if not begun.done():
            begun.cancel()
            what = f"run {run_id}: the demand before this one is not in force yet; the ledger's disk does not answer."
            raise StuckDiskError(what, "Nothing was done. Look at the disk, and send it again.")
        await asyncio.shield(turn)

    def raise_version(self, version: int, pool: str) -> None:
        """Act on a new version of the policy that the engines of a pool serve."""
        if version <= self._versions.get(pool, 0):
            return
        self._versions[pool] = version
        for book in [each for each in self._books.values() if each.demand.pool == pool]:
            book.set_version(version)
            self._act(book)

    def demands(self) -> Mapping[str, Demand]:
        """Return the demands that hold, by run."""
        return {run_id: book.demand for run_id, book in self._books.items()}

    def status(self, run_id: str) -> GroupsStatus:
        """Report on the groups of a run."""
        book = self._books.get(run_id)
        return GroupsStatus(run_id=run_id, version=self._versions.get("policy", 0)) if book is None else report(book)

    def is_stale(self, member: Member) -> bool:
        """Whether the group of a rollout is older than its run's demand allows."""
        book = self._books.get(member.run_id)
        return book is not None and book.is_stale(member)

    def look_after(self, requests: Sequence[RolloutRequest]) -> bool:
        """Whether any of these belongs to a run with a demand, which may hold it back."""
        return any(request.run_id in self._books or request.run_id in self._opening for request in requests)

    async def verdict(self, run_id: str, group_id: str | None, *, evaluation: bool) -> Verdict:
        """Wait until a group is judged for good, and return how; ``ungrouped`` where nobody asks about groups.

        Raises:
            ShuttingDownError: the service stops before.
        """
        book = self._books.get(run_id)
        if book is None or group_id is None or evaluation:
            return "ungrouped"
        settled = book.results.get(group_id)
        if settled is not None:
            return verdict_of(settled.state)
        if group_id not in book.groups:  # judged long ago: the same records give the same verdict
            members = await self._ledger.members(run_id, groups=[group_id])
            return judged(members, group_id, book.demand.epsilon)
        return await self._waiters.wait(run_id, group_id)

    def refuse(self) -> None:
        """Answer who waits for a verdict: there will be none from this service."""
        self._waiters.refuse()

    def stop(self) -> None:
        """Decide nothing more: what is in hand is drained or left to the next start."""
        self._stopped = True
        self.refuse()
        for run_id in list(self._timers):
            self._stop_timer(run_id)

    # --- what it is told ----------------------------------------------------------------------------------------

    def begin(self, pendings: Sequence[Pending]) -> None:
        """After ``recover``: these are pending. Told before the dispatcher starts."""
        self.accepted(pendings)
        for book in list(self._books.values()):
            self._act(book)

    def accepted(self, sources: Sequence[RolloutRequest | Pending]) -> None:
        """These are owed a record from now on. Told before the dispatcher can begin any of them."""
        books: dict[str, Book] = {}
        for source in sources:
            replica = Replica.of(source)
            if replica is None:
                continue
            self._replicas[replica.rollout_id] = replica
            if (book := self._books.get(replica.run_id)) is not None:
                books[book.run_id] = book
                with self._defects_of(book):
                    book.accepted(replica)
        for book in books.values():
            self._act(book)

    def finished(self, cursor: int, rollout: Rollout) -> None:
        """This rollout has its record."""
        self._replicas.pop(rollout.rollout_id, None)
        run_id = rollout.run_id
        if run_id not in self._books and run_id not in self._opening:
            return
        worked = rollout.stages.get("run")
        end = (
            member_of(rollout, rollout, cursor, accepted_at=rollout.accepted_at, released=False),
            0.0 if worked is None else worked.seconds,
        )
        if run_id in self._opening:
            self._opening[run_id].append(end)
        else:
            book = self._books[run_id]
            with self._defects_of(book):
                book.finished(*end)
            self._act(book)

    def _seen(self, event: StageEntered | Parked) -> None:
        replica = self._replicas.get(event.rollout_id)
        if replica is None:
            return
        book = self._books.get(replica.run_id)
        if book is None:
            _follow(replica, event)
            return
        with self._defects_of(book):
            if isinstance(event, StageEntered):
                book.entered(event.rollout_id, event.stage, event.at)
            else:
                book.parked(event.rollout_id, event.parked)
        self._act(book)

    # --- books --------------------------------------------------------------------------------------------------

    async def _take_turn(
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
        book = self._books.get(run_id)
        if demand is None:
            if book is not None:
                self._close(book)
            return
        if book is None:
            await self._open(run_id, demand)
        else:
            book.set_demand(demand)
            book.set_version(self._version_for(demand))
            self._act(book)
        self.raise_version(demand.version or 0, demand.pool)

    async def _open(self, run_id: str, demand: Demand) -> None:
        """Begin to judge the groups of a run that is under way."""
        missed = self._opening[run_id] = []
        busy = {replica.group_id for replica in self._replicas.values() if replica.run_id == run_id}
        try:
            book, read = await self._read(run_id, demand, busy)
        finally:
            del self._opening[run_id]
        for member, worked in missed:  # those that ended while the others were read
            if member.cursor > read:
                book.finished(member, worked)
        for replica in self._replicas.values():
            if replica.run_id == run_id:
                book.accepted(replica, earlier=True)
        book.set_version(self._version_for(demand))
        self._books[run_id] = book
        self._act(book)

    async def _read(self, run_id: str, demand: Demand, busy: Container[str]) -> tuple[Book, int]:
        """Return a book with everything that has ended in a run, and the cursor up to which that is.

        Args:
            run_id: the run.
            demand: what is wanted of it.
            busy: its groups of which something is still pending.
        """
        book = Book(run_id, demand, self._version_for(demand))
        cursor = 0
        while page := await self._ledger.members(run_id, after=cursor, limit=_PAGE):
            for member in page:
                book.finished(member)
            book.settle_rewarded(besides=busy)
            cursor = page[-1].cursor
        return book, cursor

    def _version_for(self, demand: Demand) -> int:
        return self._versions.get(demand.pool, 0)

    def _close(self, book: Book) -> None:
        """Let everything of a run go on that is not being stopped: nobody asks about its groups any more."""
        del self._books[book.run_id]
        self._stop_timer(book.run_id)
        decisions = Decisions()
        decisions.free([each for each in self._replicas.values() if each.run_id == book.run_id and each.live])
        self._carry_out(book, decisions)
        self._waiters.answer_run(book.run_id, "ungrouped")

    @contextmanager
    def _defects_of(self, book: Book) -> Generator[None, None, None]:
        """A defect of ours in the book of a run costs that run its demand until the next start, not the service."""
        try:
            yield
        except Exception:
            _LOG.exception("run %s: its groups are not looked after any more; all of its rollouts go on", book.run_id)
            if self._books.get(book.run_id) is book:
                self._close(book)

    # --- decisions ----------------------------------------------------------------------------------------------

    def _act(self, book: Book) -> None:
        if self._stopped or self._books.get(book.run_id) is not book:
            return
        with self._defects_of(book):
            self._carry_out(book, book.decide(time.time()))
            self._set_timer(book)

    def _set_timer(self, book: Book) -> None:
        tick, running = book.next_tick(), self._timers.get(book.run_id)
        if running is not None and running[0] == tick:
            return
        self._stop_timer(book.run_id)
        if tick is not None:
            pause = max(0.0, tick - time.time())
            timer = asyncio.get_running_loop().call_later(pause, self._tick, book)
            self._timers[book.run_id] = tick, timer

    def _tick(self, book: Book) -> None:
        self._timers.pop(book.run_id, None)
        self._act(book)

    def _stop_timer(self, run_id: str) -> None:
        if (running := self._timers.pop(run_id, None)) is not None:
            running[1].cancel()

    def _carry_out(self, book: Book, decisions: Decisions) -> None:
        entries = self._dispatcher.entries
        for entry in self._entries(decisions.hold):
            entries.hold(entry)
        for entry in self._entries(decisions.allow):
            entries.allow(entry)
        for reason, ids in decisions.cancel.items():
            chosen = [entry for entry in self._entries(ids) if entry.cancel is None]
            for entry in chosen:
                entry.cancel = reason
            if chosen:
                self._dispatcher.spawn(self._dispatcher.drop(chosen, reason))
        if decisions.park:
            self._dispatcher.spawn(self._dispatcher.park(self._entries(decisions.park)))
        if decisions.unpark:
            self._dispatcher.spawn(self._dispatcher.unpark(self._entries(decisions.unpark)))
        for stand_in in decisions.stand_ins:
            self._dispatcher.spawn(self._send(book, stand_in))
        for group_id, state in decisions.settled:
            self._waiters.answer(book.run_id, group_id, verdict_of(state))

    def _entries(self, ids: Sequence[str]) -> list[Entry]:
        return [entry for name in ids if (entry := self._dispatcher.entries.get(name)) is not None]

    async def _send(self, book: Book, stand_in: StandIn) -> None:
        """Submit a stand-in. Its id is always the same, so that after a crash the same one is submitted again."""
        again_at: float | None = None
        try:
            originals = await self._ledger.requests([stand_in.stands_in_for])
            if originals:
                answers = await self._admit([stand_in.request(originals[0])])
                if isinstance(answers, list) and (not answers[0].duplicate or stand_in.rollout_id in self._replicas):
                    return
                problem = answers if isinstance(answers, ConflictError) else "it ended before"
            else:
                problem = "its request is not kept any more"
            _LOG.error("no stand-in for rollout %s: %s", stand_in.stands_in_for, problem)
        except ShuttingDownError:
            return
        except LedgerError as error:
            again_at = time.time() + _AGAIN_SECONDS
            _LOG.warning("no stand-in for rollout %s yet: %s", stand_in.stands_in_for, error)
        book.refused(stand_in, again_at)
        self._act(book)


def _follow(replica: Replica, event: StageEntered | Parked) -> None:
    """Note where a rollout is of which nobody asks about the group."""
    if isinstance(event, StageEntered):
        replica.stage, replica.since, replica.parked = event.stage, event.at, False
    else:
        replica.parked = event.parked
