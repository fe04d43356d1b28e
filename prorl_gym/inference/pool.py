"""A named pool of engines: admission, balancing, failover. What callers see is one engine that rarely fails.

A call that an engine fails is made again on another one, from the same ids, a bounded number of times. The engine
that failed is left alone until a trial in the background shows that it samples. When no engine is well, calls wait for
the first that recovers, up to a bound; when none has the model, for as long as it takes. What calls lose to engines
that fail is charged to no deadline.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from types import TracebackType
from typing import Self
from uuid import uuid4

from prorl_gym.deadlines import uncharged
from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.admission import Admission, AdmissionOptions
from prorl_gym.inference.balance.sticky import StickyLeastOutstanding
from prorl_gym.inference.failover import FAILS_OVER, Failover
from prorl_gym.inference.faults import CallTimedOut, ContextExceeded, EngineOverloaded, ModelMissing
from prorl_gym.inference.gate import Flight, Gate
from prorl_gym.inference.health import HealthWatch
from prorl_gym.inference.members import Member, PoolEngine, Roster
from prorl_gym.inference.protocol import (
    BalancePolicy,
    EngineHealth,
    EngineLoad,
    GenerationRequest,
    GenerationResult,
    Served,
)
from prorl_gym.inference.reuse import Reuse
from prorl_gym.inference.scrape import Scraper
from prorl_gym.inference.snapshot import PoolSnapshot

log = logging.getLogger(__name__)

_PATIENCE = 2.0
"""Times as long as expected that a call without an answer may have taken: batches fill, and contexts grow."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """What a pool does beside balancing."""

    scrape_seconds: float = 5.0
    """Between two looks at the engines' metrics."""
    salted: bool = False
    """Each policy version has prefix caches of its own: the engines take a ``cache_salt``."""
    router: bool = False
    """The one address is a router's, which knows engines and sessions itself: it is never left alone."""
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)


class EnginePool:
    """Several engines with the same weights, as one.

    Args:
        name: of the pool, for messages (``policy``, ``judge``).
        policy: decides which engine serves a call.
        failover: how hard to try.
        max_model_len: context in tokens; learnt from the engines when it is not given.
        version: policy version of tokens sampled from now on.
        options: see there.
    """

    def __init__(
        self,
        name: str,
        *,
        policy: BalancePolicy | None = None,
        failover: Failover | None = None,
        max_model_len: int | None = None,
        version: int = 0,
        options: PoolOptions | None = None,
    ) -> None:
        self.name = name
        self.max_model_len = max_model_len
        self.failovers = 0
        """Calls that were made again on another engine."""
        self.options = options or PoolOptions()
        self.roster = Roster()
        self.gate = Gate(self.roster.changes)
        self._policy = policy or StickyLeastOutstanding()
        self._failover = failover or Failover()
        self._version = version
        self._admission = Admission(name, self.options.admission)
        self._reuse = Reuse()
        self._health = HealthWatch(name, self.roster, self._failover, self._learn)
        self._scraper = Scraper(name, self.roster, self.options.scrape_seconds, self._seen, self._restarted)
        self.unserved = 0
        """Rollouts that wait because no engine has the model."""
        self._closed = False

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def engines(self) -> list[str]:
        """Names of all engines."""
        return [member.name for member in self.roster.all]

    @property
    def healthy(self) -> list[str]:
        """Names of the engines that take calls."""
        return self.roster.serving

    @property
    def lacking(self) -> str:
        """Why no engine could serve a call even if all were well: there is none, or none has the model; else empty."""
        if self.roster.serving:
            return ""
        staying = [member for member in self.roster.all if not member.draining]
        without = [member.trouble for member in staying if member.lacks_model]
        if staying and not without:
            return ""
        return f"no engine of pool {self.name} has the model: {without[0] if without else 'it has no engines.'}"

    @property
    def version(self) -> int:
        """Policy version of tokens sampled from now on."""
        return self._version

    def start(self) -> None:
        """Begin to read the engines' figures. Idempotent; ``async with`` does it."""
        self._scraper.start()

    def set_version(self, version: int) -> None:
        """Label what is sampled from now on; calls in flight keep the version they began with.

        What engines have cached was computed with other weights and is counted on no more.
        """
        self._version = version
        for member in self.roster.all:
            member.engine.version = version
            self._policy.drop(member.name)
        self._reuse.clear()

    def add(self, engine: PoolEngine) -> None:
        """Take an engine into service.

        Raises:
            ValueError: the name is taken.
        """
        if self.roster.get(engine.name) is not None:
            raise ValueError(f"pool {self.name} already has an engine {engine.name}")
        engine.version = self._version
        self.roster.add(Member(engine))

    async def drain(self, name: str) -> None:
        """Give an engine no more calls and wait until those that it has are over; then it can be removed.

        Its rollouts move to other engines at their next turns. Unknown names are ignored.
        """
        member = self.roster.get(name)
        if member is not None:
            member.draining = True
            self._policy.drop(name)
            await self.gate.idle(member)

    async def remove(self, name: str) -> None:
        """Take an engine out of service and close it. Calls in flight on it fail over. Unknown names are ignored."""
        member = self.roster.pop(name)
        if member is None:
            return
        self._health.give_up(member)
        self._lost(member)
        await member.engine.close()
        self.roster.changes.announce()

    async def room(self, session_id: str) -> None:
        """Wait until a rollout that has not begun would find room, or be the first to wait for it.

        It is counted from then on: it makes a call, or ``forget`` is called.
        """
        await self._until_served()
        await self._admission.room(session_id)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample on the engine that the policy picks, failing over from the same ids.

        Raises:
            EngineError: the last engine's, when attempts or patience are used up; ``ENGINE_REFUSED`` at once.
            ContextExceeded: prompt and answer do not fit into the engine's context.
        """
        cut_short = False
        try:
            await self._admission.enter(request)
            result = await self._generate(request)
            cut_short = result.finish_reason == "abort"
            return result
        finally:
            self._admission.leave(request.session_id, cut_short=cut_short)

    def flight(self, request_id: str) -> Flight | None:
        """Return a call that an engine is working on."""
        return self.gate.find(request_id)

    async def is_sampling(self, member: Member, max_tokens: int, seconds: float) -> bool:
        """Whether the engine of a call that was given up without an answer can have been sampling for it.

        It can if it samples now (a few tokens of its own, or its counters move, or it answers other calls), and if at
        its pace the call may have needed so long. An engine that does not sample is taken out of service.

        Args:
            member: the engine.
            max_tokens: that the call asked for.
            seconds: that it took.
        """
        if not self.roster.has(member):
            return False
        answered = member.calls
        before, shown = await asyncio.gather(self._generated(member), self._health.try_out(member))
        if isinstance(shown, EngineError):
            after = 0 if not before else await self._generated(member)
            if after <= before and member.calls == answered:
                self._failed(member, shown)
                return False
        expected = member.pace.expected(max_tokens, 0.0 if isinstance(shown, EngineError) else shown)
        if not 0 < _PATIENCE * expected < seconds:
            return True
        member.failures += 1
        log.warning("pool %s: engine %s lost a call: %.1f s without an answer", self.name, member.name, seconds)
        return False

    async def cancel(self, request_id: str) -> bool:
        """Stop a call; its ``generate`` returns what could be salvaged.

        Returns:
            Whether an engine was working on it: only then is there anything to wait for.
        """
        flight = self.gate.find(request_id)
        if flight is None:
            return False
        await flight.member.engine.cancel(flight.attempt_id)
        return True

    def rest(self, session_id: str) -> None:
        """Let others have the place of a rollout that makes no call for a while; its next one asks for it again."""
        self._admission.rest(session_id)

    def forget(self, session_id: str) -> None:
        """The rollout is over: its place, and the one near its cached prefix, are given up."""
        self._policy.forget(session_id)
        self._reuse.forget(session_id)
        self._admission.forget(session_id)

    async def check(self) -> dict[str, EngineHealth]:
        """Ask every engine how it is; those that are not well are left out until a probe finds them well."""
        return await self._health.check()

    async def look(self) -> None:
        """Read the engines' figures now, beside the regular looks."""
        await self._scraper.look()

    def snapshot(self) -> PoolSnapshot:
        """Return how the pool stands."""
        return PoolSnapshot(
            name=self.name,
            version=self._version,
            paused=self.gate.shut,
            failovers=self.failovers,
            reusable_tokens=self._reuse.tokens,
            lacking=self.lacking,
            unserved=self.unserved,
            admission=self._admission.snapshot(),
            engines=tuple(member.snapshot() for member in self.roster.all),
        )

    async def close(self) -> None:
        """Stop probing and close every engine; calls that wait for one fail. Idempotent."""
        self._closed = True
        self._admission.close()
        await self._scraper.close()
        await self._health.close()
        members = [self.roster.pop(member.name) or member for member in self.roster.all]
        await asyncio.gather(*(member.engine.close() for member in members))
        self.roster.changes.announce()

    async def _generate(self, request: GenerationRequest) -> GenerationResult:
        tried: set[str] = set()
        last: EngineError | None = None
        failures = 0
        while last is None or failures < self._failover.attempts:
            self.failovers += last is not None
            member = await self._pick(request, tried, last)
            try:
                return await self._call(member, request)
            except EngineError as error:
                if not _moves_on(error):
                    raise
                last = error
                if isinstance(error, ModelMissing):
                    continue  # no attempt of the call: the engine is asked again once it has the model
                tried.add(member.name)
                failures += 1
                if self.options.router and failures < self._failover.attempts:
                    with uncharged():
                        await asyncio.sleep(self._failover.rest(failures - 1, _asked_rest(error)))
        raise last

    async def _pick(self, request: GenerationRequest, tried: set[str], last: EngineError | None) -> Member:
        """Reserve a place on an engine, one that this call was not yet tried on if there is any."""
        while self.gate.shut or not self.roster.serving:
            if self._closed:
                raise self._nobody()
            await self.gate.opened(lambda: self._closed)
            if not self.gate.shut:
                await self._until_served()
                await self._wait_for_one(last)
        serving = self.roster.serving
        fresh = [name for name in serving if name not in tried]
        steady = [name for name in fresh if (member := self.roster.get(name)) is not None and member.has_room]
        chosen = self.roster.get(self._policy.choose(request, steady or fresh or serving))
        assert chosen is not None
        return chosen

    async def _call(self, member: Member, request: GenerationRequest) -> GenerationResult:
        """Make one attempt. The reservation is returned exactly once, however it ends."""
        served, began = Served(), monotonic()
        # An engine may still hold the id of a lost attempt.
        attempt = replace(request, request_id=uuid4().hex, cache_salt=self._salt(request))
        with self.gate.flight(request.request_id, attempt.request_id, member) as flight:
            try:
                result = await member.engine.generate(attempt)
                served = Served(sampled=len(result.token_ids), cached=result.cached_tokens)
                if result.token_ids:  # one that was stopped without a token shows nothing
                    member.answered(request, result, monotonic() - began)
                self._reuse.served(request, result)
                return replace(result, paused=flight.cut and result.finish_reason == "abort")
            except ContextExceeded as error:
                if self.max_model_len is None:  # never overrule what is configured or what the model list says
                    self.max_model_len = error.max_model_len
                raise
            except EngineError as error:
                if isinstance(error, CallTimedOut):
                    error.in_progress = await self._takes_longer(member, request.max_tokens, monotonic() - began)
                if _moves_on(error):
                    served = Served(failed=True)
                    flight.refund()
                    self._failed(member, error)
                raise
            finally:
                self._policy.release(request, member.name, served)

    async def _takes_longer(self, member: Member, max_tokens: int, seconds: float) -> bool:
        """Whether an engine samples, and would need longer than that for so many tokens."""
        if member.pace.expected(max_tokens) <= seconds:
            return False
        return not isinstance(await self._health.try_out(member), EngineError)

    async def _generated(self, member: Member) -> int:
        """Read how many tokens an engine has sampled since it started; 0 where it does not tell."""
        try:
            async with asyncio.timeout(self._failover.trial_seconds):
                load = await member.engine.load()
        except TimeoutError:
            return 0
        return 0 if load is None else load.generated

    def _salt(self, request: GenerationRequest) -> str | None:
        if not self.options.salted:
            return request.cache_salt
        version = f"v{self._version}"
        return version if request.cache_salt is None else f"{request.cache_salt}/{version}"

    async def _until_served(self) -> None:
        """Wait while no engine has the model, for as long as it takes: the log, the status and the metrics say so."""
        if not self.lacking:
            return
        if not self.unserved:
            log.warning("pool %s: rollouts wait: %s", self.name, self.lacking)
        self.unserved += 1
        try:
            with uncharged():
                await self.roster.changes.until(lambda: self._closed or not self.lacking)
        finally:
            self.unserved -= 1

    async def _wait_for_one(self, last: EngineError | None) -> None:
        """Wait until some engine takes calls, or calls have to wait for something else.

        Raises:
            EngineError: none recovered in time.
        """

        def is_over() -> bool:
            return bool(self.roster.serving or self.gate.shut or self._closed or self.lacking)

        try:
            with uncharged():
                async with asyncio.timeout(self._failover.wait_seconds):
                    await self.roster.changes.until(is_over)
        except TimeoutError:
            raise last or self._nobody() from None

    def _nobody(self) -> EngineError:
        details = [member.reason for member in self.roster.all] or ["it has no engines"]
        return EngineError(
            FailureKind.ENGINE_UNREACHABLE,
            f"pool {self.name}: no engine was well for {self._failover.wait_seconds:g} s ({details[0][:200]}).",
            "Start the engines, or correct 'engines'.",
        )

    def _failed(self, member: Member, error: EngineError) -> None:
        log.warning("pool %s: engine %s failed: %s", self.name, member.name, error.what)
        member.failures += 1
        member.lacks_model = isinstance(error, ModelMissing)
        if self.options.router and not member.lacks_model:
            return
        if error.kind is FailureKind.ENGINE_UNREACHABLE:
            self._lost(member)
        self._health.take_out(member, error.what, _asked_rest(error))

    def _lost(self, member: Member) -> None:
        """What the engine had cached is gone."""
        self._policy.drop(member.name)
        self._reuse.drop(member.name)

    def _restarted(self, member: Member) -> None:
        log.warning("pool %s: engine %s was started again", self.name, member.name)
        self._lost(member)
        self.roster.arrived(member)

    def _seen(self, loads: Mapping[str, EngineLoad]) -> None:
        for name, load in loads.items():
            self._policy.observe(name, load)
        serving = self.roster.serving
        told = {name: load for name, load in loads.items() if name in serving}
        self._admission.observe(told, self._reuse.of(told), len(serving))

    def _learn(self, health: EngineHealth) -> None:
        if health.max_model_len is not None:
            self.max_model_len = min(health.max_model_len, self.max_model_len or health.max_model_len)


def _moves_on(error: EngineError) -> bool:
    """Whether another engine may answer what this one did not."""
    if isinstance(error, CallTimedOut) and error.in_progress:
        return False
    return error.kind in FAILS_OVER or isinstance(error, ModelMissing)


def _asked_rest(error: EngineError) -> float | None:
    return error.retry_after if isinstance(error, EngineOverloaded) else None


def describe(health: dict[str, EngineHealth]) -> Sequence[str]:
    """Return one line per engine that is not well, for start-up messages."""
    return [f"{name}: {state.detail}" for name, state in health.items() if not state.ok]
