"""The service: accepts rollouts durably, and hands their terminal records out.

The ledger keeps the bodies and the truth, a runner does the work, the dispatcher sees each rollout through. This is
the facade that trainers, NeMo Gym and the HTTP routes talk to.
"""

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, ConflictError, NotFoundError, ProrlError, ShuttingDownError, TaskError
from prorl_gym.records import Record, Rollout, RolloutRequest
from prorl_gym.rollout.dispatcher import AFTER_BREAKING, Dispatcher
from prorl_gym.rollout.entries import Entry
from prorl_gym.rollout.groups.conductor import Conductor
from prorl_gym.rollout.groups.group import Verdict
from prorl_gym.rollout.groups.report import GroupsStatus
from prorl_gym.rollout.protocol import (
    Accepted,
    Capacity,
    Delivery,
    Job,
    Ledger,
    LedgerUsage,
    Member,
    Parked,
    Runner,
    StageEntered,
)
from prorl_gym.rollout.retry import RetryConfig

_LOADING = "The service is loading its tokenizer and sandboxes: it accepts rollouts, and begins them after that."

_SLICE = 2048
"""Rollouts that are put into memory without a pause for others."""

_PAGE = 32
"""Records read for a stream at once: they may be large."""


class ServiceStatus(Record):
    """A look at the service."""

    ready: bool
    problem: str = ""
    """What keeps it from being ready."""
    queued: int
    """Waiting in the ledger, and between attempts."""
    running: int
    """With the runner, or being written."""
    finished: int
    """Terminal records written since the start."""
    paused: bool = False
    """Nothing new is begun (``RolloutService.pause``); that is no problem."""
    capacity: Capacity


class RolloutService:
    """All of it lives on one event loop. ``start`` (or ``accept`` and ``begin``) first, ``stop`` at the end; each once.

    Args:
        ledger: remembers; the service closes it.
        runner: works; the service closes it. One that comes later is given to ``begin``, and a ``LoadingRunner`` here.
        config: retries.
        shares: weights of environments, which are served in fair shares of worker-seconds. See ``fair``.
    """

    def __init__(
        self,
        ledger: Ledger,
        runner: Runner,
        config: RetryConfig | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self._ledger = ledger
        self._runner = runner
        self._dispatcher = Dispatcher(ledger, runner, config or RetryConfig(), self._note, shares)
        self._entries = self._dispatcher.entries
        self._groups = Conductor(ledger, self._dispatcher, self._admit)
        self._news = asyncio.Event()
        self._unread = 0
        """Pending rollouts that are in the ledger only, as long as it was not read."""
        self._early: list[RolloutRequest] = []
        """Accepted meanwhile."""
        self._recovery: asyncio.Task[None] | None = None
        self._recovered = False
        self._accepting = False
        self._started = False
        self._refusing = False
        self._ended = False
        self._finished = 0
        self._observers: list[Callable[[Rollout], None]] = []

    async def start(self) -> None:
        """Accept rollouts, and begin them: ``accept`` and ``begin`` in one.

        Raises:
            LedgerError: the file cannot be used.
        """
        await self.accept()
        await self.begin(self._runner)

    async def accept(self) -> None:
        """Accept rollouts from now on; none begins before ``begin``. Costs the same however much is pending.

        Raises:
            LedgerError: the file cannot be used.
        """
        self._unread = (await self._ledger.usage()).pending
        self._accepting = True

    async def recovered(self) -> None:
        """Wait until what the ledger remembers is in memory. The first call reads it, if the service was started.

        Raises:
            LedgerError: the file cannot be used.
        """
        if self._recovery is None:
            if not self._accepting or self._refusing:
                return
            self._recovery = self._dispatcher.spawn(self._recover())
        await asyncio.shield(self._recovery)

    async def begin(self, runner: Runner) -> None:
        """Hand what is accepted to this runner from now on. After ``accept``.

        Raises:
            LedgerError: the file cannot be used.
        """
        await self.recovered()
        self._runner = runner
        self._dispatcher.use(runner)
        self._dispatcher.start()
        self._started = True

    async def stop(self, *, drain: bool = True) -> None:
        """End. What waits in the ledger stays there, accepted, for the next start. Idempotent.

        Args:
            drain: finish what the runner has in hand; otherwise its attempts are cut off and made again by the next
                start.
        """
        if self._ended:
            return
        self._ended = True
        self.refuse()
        self._groups.stop()
        await self._dispatcher.stop(drain=drain)
        await self._ledger.close()

    async def cut_off(self) -> None:
        """Turn a ``stop`` that is draining into one that is not."""
        await self._dispatcher.cut_off()

    def pause(self) -> None:
        """Begin no further rollouts, for maintenance; accept and finish as ever. Ends with a restart. Idempotent."""
        self._dispatcher.pause()

    def resume(self) -> None:
        """End a ``pause``. Idempotent."""
        self._dispatcher.resume()

    def refuse(self) -> None:
        """Take no more work, answer who waits, end the streams. The first step of ``stop``; may come long before."""
        self._refusing = True
        for entry in self._entries.all():
            entry.answer(None)
        self._groups.refuse()
        self._tell()

    async def submit(self, requests: Sequence[RolloutRequest]) -> list[Accepted]:
        """Accept a batch, all or nothing. When this returns, a crash cannot lose it.

        Raises:
            ConflictError: an id was submitted before with another body.
            TaskError: a task is not JSON, or an environment is not known here.
            LedgerError: nothing can be remembered now.
            ShuttingDownError: the service is stopping, was not started, or is broken.
        """
        if not self._accepting or self._refusing:
            raise ShuttingDownError("The service takes no more work.", "Submit again when it is back.")
        self._must_work()
        await self._must_offer(requests)
        # Shielded: a caller that goes away after the commit must not leave a rollout that nobody runs.
        answer = await asyncio.shield(self._dispatcher.spawn(self._admit(requests)))
        if isinstance(answer, ProrlError):
            raise answer
        return answer

    async def result(self, rollout_id: str, wait: float = 0.0) -> Rollout | None:
        """Return the terminal record, or ``None`` when there is none after ``wait`` seconds.

        Raises:
            NotFoundError: never accepted.
            ShuttingDownError: the service broke; the rollout will end after a restart.
        """
        await self.recovered()
        entry = self._entries.get(rollout_id)
        if entry is None:
            found = await self._ledger.get(rollout_id)
            entry = self._entries.get(rollout_id)
            if not isinstance(found, Rollout) and entry is None:
                found = await self._ledger.get(rollout_id)  # it may have been written between the two looks
            if isinstance(found, Rollout) or entry is None:
                return found if isinstance(found, Rollout) else None
        if wait <= 0 or self._refusing:
            return None
        self._must_work()
        waiter: asyncio.Future[Rollout | None] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        try:
            async with asyncio.timeout(wait):
                return await waiter
        except TimeoutError:
            return None
        finally:
            if waiter in entry.waiters:
                entry.waiters.remove(waiter)

    async def cancel(
        self,
        rollout_ids: Sequence[str] = (),
        *,
        groups: Sequence[str] = (),
        runs: Sequence[str] = (),
        reason: CancelReason = CancelReason.CLIENT,
    ) -> list[str]:
        """Cancel what is named by id, group or run and has no record yet; return the ids that this stops.

        Groups and runs together mean these groups of these runs: runs may name their groups alike.

        Each that is returned gets a terminal record that says so, without a reward, also over a restart. Unknown and
        finished ones are ignored.

        Raises:
            LedgerError: it cannot be remembered now; nothing was cancelled.
        """
        await self.recovered()
        chosen = [entry for entry in self._entries.select(rollout_ids, groups, runs) if entry.cancel is None]
        if not chosen:
            return []
        stopped = await asyncio.shield(self._dispatcher.spawn(self._dispatcher.cancel(chosen, reason)))
        return [entry.rollout_id for entry in stopped]

    async def stream(
        self, run_id: str | None = None, cursor: int = 0, *, follow: bool = True
    ) -> AsyncGenerator[Delivery, None]:
        """Yield terminal records past ``cursor`` in the order in which they were written, each once.

        Args:
            run_id: only of this run.
            cursor: that of the last record the reader has seen.
            follow: wait for more instead of ending; ends when the service stops.
        """
        while True:
            page = await self.read(run_id, cursor, None if follow else 0.0)
            if not page:
                return
            for delivery in page:
                yield delivery
            cursor = page[-1].cursor

    async def read(self, run_id: str | None = None, cursor: int = 0, wait: float | None = None) -> list[Delivery]:
        """Return the next records past ``cursor``, a bounded number of them: one step of ``stream``.

        Args:
            run_id: only of this run.
            cursor: that of the last record the reader has seen.
            wait: seconds to wait for the first; ``None``: until there is one. An empty list says that there was none
                in time, or that the service stops.
        """
        deadline = None if wait is None else asyncio.get_running_loop().time() + wait
        while not self._refusing:
            news = self._news  # before the look, so that what is written during it is news
            page = await self._ledger.finished(run_id, cursor, _PAGE)
            if page or wait == 0.0:
                return page
            try:
                async with asyncio.timeout_at(deadline):
                    await news.wait()
            except TimeoutError:
                return []
        return []

    @property
    def refusing(self) -> bool:
        """Whether it stops: it takes no work, and streams end."""
        return self._refusing

    async def request(self, rollout_id: str) -> RolloutRequest:
        """Return what was accepted under this id, also after it is finished.

        Raises:
            NotFoundError: never accepted; ``GoneError``: not kept any more.
            UnreadableRecordError: this release cannot read it.
        """
        found = await self._ledger.requests([rollout_id])
        if not found:
            await self._ledger.get(rollout_id)  # raises what is the matter with it
            raise NotFoundError(f"rollout {rollout_id} was never accepted, or its request is not kept any more.")
        return found[0]

    async def members(
        self,
        run_id: str | None = None,
        *,
        groups: Sequence[str] | None = None,
        after: int = 0,
        limit: int = 1000,
        newest_first: bool = False,
    ) -> list[Member]:
        """See ``Ledger.members``."""
        return await self._ledger.members(run_id, groups=groups, after=after, limit=limit, newest_first=newest_first)

    async def acknowledge(self, run_id: str | None, cursor: int) -> int:
        """See ``Ledger.acknowledge``."""
        return await self._ledger.acknowledge(run_id, cursor)

    async def usage(self) -> LedgerUsage:
        """See ``Ledger.usage``."""
        return await self._ledger.usage()

    async def status(self) -> ServiceStatus:
        """Report what is going on."""
        count = self._entries.count()
        return ServiceStatus(
            ready=not self.problem,
            problem=self.problem,
            queued=self._unread + count["queued"] + count["waiting"],
            running=count["handing"] + count["running"] + count["ending"],
            finished=self._finished,
            paused=self._dispatcher.paused,
            capacity=await self._runner.capacity(),
        )

    @property
    def problem(self) -> str:
        """Why it takes no work; empty while it does. Costs nothing, however much is pending."""
        if self._refusing or not self._accepting:
            return "The service is stopping." if self._refusing else "The service was not started."
        return self._dispatcher.problem if self._started else _LOADING

    @property
    def pending(self) -> int:
        """How many rollouts have no terminal record yet."""
        return self._unread + len(self._entries)

    def observe(self, observer: Callable[[Rollout], None]) -> None:
        """Call this with every terminal record after it is written (metrics). It must be quick and not raise."""
        self._observers.append(observer)

    def watch(self, observer: Callable[[StageEntered | Parked], None]) -> None:
        """Call this with every stage that is entered, and when agents are parked. It must be quick and not raise."""
        self._dispatcher.watch(observer)

    # --- groups: see ``prorl_gym.demand`` -------------------------------------------------------------------------

    async def set_demand(self, run_id: str, demand: Demand | None) -> GroupsStatus:
        """Note what a trainer wants of a run from now on, ``None``: everything again. Survives a restart.

        Raises:
            LedgerError: it cannot be remembered; what held before holds.
            ShuttingDownError: the service is stopping, was not started, or is broken.
        """
        if not self._accepting or self._refusing:
            raise ShuttingDownError("The service takes no more demands.", "Send it again when it is back.")
        self._must_work()
        await self.recovered()
        await self._groups.set_demand(run_id, demand)
        return self._groups.status(run_id)

    def demands(self) -> Mapping[str, Demand]:
        """Return the demands that hold, by run."""
        return self._groups.demands()

    def groups(self, run_id: str) -> GroupsStatus:
        """Report on the groups of a run; one without a demand has none."""
        return self._groups.status(run_id)

    async def policy_version(self, version: int, pool: str = "policy") -> None:
        """Take notice of the version that a pool's engines serve: what can only become too old by it is cancelled.

        It is remembered: engines outlive this service, and what they sample after its restart has that version too.

        Raises:
            LedgerError: it cannot be remembered now; tell it again.
        """
        await self.recovered()
        await self._ledger.set_version(pool, version)
        self._groups.raise_version(version, pool)

    def is_stale(self, member: Member) -> bool:
        """Whether a rollout's group is further behind the policy than its run's demand allows."""
        return self._groups.is_stale(member)

    async def verdict(self, rollout_id: str) -> Verdict:
        """Wait until the group of a rollout is judged for good, and return how.

        ``ungrouped`` is the answer, at once, for evaluation, for a rollout without a group, and in a run without a
        demand; also when the demand is withdrawn meanwhile.

        Raises:
            NotFoundError: never accepted, or not kept any more.
            ShuttingDownError: the service stops before; ask again after its restart.
        """
        await self.recovered()
        asked = self._entries.get(rollout_id) or await self.request(rollout_id)
        return await self._groups.verdict(asked.run_id, asked.group_id, evaluation=asked.evaluation)

    async def _admit(self, requests: Sequence[RolloutRequest]) -> list[Accepted] | ConflictError | TaskError:
        """Accept a batch, or return what is wrong with it: the caller's mistake is none of ours, so not for the log."""
        if self._refusing:
            raise ShuttingDownError("The service takes no more work.", "Submit again when it is back.")
        async with self._dispatcher.begin_ahead(len(requests)) as may_begin:
            begun: Sequence[Job] = ()
            try:
                if may_begin and not self._groups.look_after(requests):
                    answers, begun = await self._ledger.accept_and_begin(requests)
                else:
                    answers = await self._ledger.accept(requests)
            except (ConflictError, TaskError) as error:
                return error
        fresh = [request for request, answer in zip(requests, answers, strict=True) if not answer.duplicate]
        if self._recovered:
            self._take_up(fresh, {job.request.rollout_id: job for job in begun})
        else:  # behind what is older, which is not in memory yet
            self._early += fresh
            self._unread += len(fresh)
        return answers

    async def _must_offer(self, requests: Sequence[RolloutRequest]) -> None:
        """Refuse environments that this service does not have, unless the rollout was accepted when it had them."""
        unknown: dict[str, TaskError] = {}
        for name in {request.environment for request in requests}:
            try:
                self._runner.must_offer(name)
            except TaskError as error:
                unknown[name] = error
        strange = {request.rollout_id: request for request in requests if request.environment in unknown}
        if not strange:
            return
        for request in await self._ledger.requests(list(strange)):
            del strange[request.rollout_id]
        for rollout_id, request in strange.items():
            error = unknown[request.environment]
            raise TaskError(error.kind, f"rollout {rollout_id}: {error.what}", error.fix)

    async def _recover(self) -> None:
        with _no_garbage():
            pendings = await self._ledger.recover()
            await self._groups.recover(pendings)
            entries: list[Entry] = []
            for start in range(0, len(pendings), _SLICE):
                entries += map(Entry.of, pendings[start : start + _SLICE])
                await asyncio.sleep(0)  # others have their turn between two slices
            self._dispatcher.recover(entries)
            self._groups.begin(pendings)
        self._recovered = True
        self._unread = 0
        early, self._early = self._early, []
        self._take_up(early, {})

    def _take_up(self, accepted: Sequence[RolloutRequest], begun: Mapping[str, Job]) -> None:
        """Track what was accepted, but for what the reading of the ledger found already."""
        fresh = [request for request in accepted if request.rollout_id not in self._entries]
        for request in fresh:
            self._dispatcher.take_up(Entry.of(request), begun.get(request.rollout_id))
        self._groups.accepted(fresh)  # at once: what is held must not be handed out before

    def _must_work(self) -> None:
        if self._dispatcher.broken:
            raise ShuttingDownError(self._dispatcher.broken, AFTER_BREAKING)

    def _note(self, cursor: int, rollout: Rollout) -> None:
        self._finished += 1
        self._groups.finished(cursor, rollout)
        for observer in self._observers:
            observer(rollout)
        self._tell()

    def _tell(self) -> None:
        """Wake everybody who waits for news; who looks again waits for the next."""
        self._news.set()
        self._news = asyncio.Event()


@contextmanager
def _no_garbage() -> Generator[None, None, None]:
    """Keep the garbage collector from looking again and again at a hundred thousand rollouts that all stay."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was:
            gc.enable()
