"""A named pool of engines: admission, balancing, failover. To callers it is one engine that rarely fails.

A call that an engine fails is retried on another one, from the same ids, a bounded number of times. The engine
that failed gets no calls until a trial in the background shows that it samples. When no engine is well, calls wait for
the first that recovers, up to a bound; when none has the model, for as long as it takes. Time that calls lose to
failing engines is charged to no deadline.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from types import TracebackType
from typing import Self
from uuid import uuid4

from prorl_gym.deadlines import paused_deadline
from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.admission import Admission, AdmissionOptions, AdmissionSnapshot
from prorl_gym.inference.balance.cache_estimate import PrefixReuse
from prorl_gym.inference.balance.call_gate import CallExecutor, CallGate, InFlightCall
from prorl_gym.inference.balance.health_monitor import FAILOVER_KINDS, FailoverOptions, HealthMonitor, MetricsScraper
from prorl_gym.inference.balance.members import PoolEngine, PoolMember, PoolMembers
from prorl_gym.inference.balance.simple_policies import StickyLeastOutstanding
from prorl_gym.inference.protocol import (
    BalancePolicy,
    CallOutcome,
    CallTimedOut,
    ContextExceeded,
    EngineHealth,
    EngineOverloaded,
    GenerationRequest,
    GenerationResult,
    ModelMissing,
)
from prorl_gym.records import EngineLoad

log = logging.getLogger(__name__)

_SLOW_CALL_FACTOR = 2.0
"""A call without an answer may take this many times as long as expected: batches fill, and contexts grow."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    scrape_interval_seconds: float = 5.0
    """Between two reads of the engines' metrics."""
    salt_cache: bool = False
    """Each policy version has prefix caches of its own: the engines take a ``cache_salt``."""
    is_router: bool = False
    """The one address is a router's, which balances engines and sessions itself: it is never taken out of service."""
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    name: str
    version: int
    paused: bool
    failovers: int
    reusable_tokens: int
    """Prompt tokens sent that had been computed before."""
    unavailable_reason: str
    waiting_rollouts: int
    admission: AdmissionSnapshot
    engines: tuple[PoolMember, ...]
    """Live: their state changes after the snapshot."""


class EnginePool:
    """Several engines with the same weights, as one. ``max_model_len`` is learnt from them when it is not given."""

    def __init__(
        self,
        name: str,
        *,
        balance_policy: BalancePolicy | None = None,
        failover: FailoverOptions | None = None,
        max_model_len: int | None = None,
        version: int = 0,
        options: PoolOptions | None = None,
    ) -> None:
        self.name = name
        self.max_model_len = max_model_len
        self.failovers = 0
        """Calls that were retried on another engine."""
        self.options = options or PoolOptions()
        self.members = PoolMembers()
        self.gate = CallGate(self.members.changes)
        self._balance_policy = balance_policy or StickyLeastOutstanding()
        self._failover = failover or FailoverOptions()
        self.version = version
        """Policy version of tokens sampled from now on."""
        self._admission = Admission(name, self.options.admission)
        self._prefix_reuse = PrefixReuse()
        self._health = HealthMonitor(name, self.members, self._failover, self._on_healthy)
        self._scraper = MetricsScraper(
            *(name, self.members, self.options.scrape_interval_seconds),
            on_loads=self._on_loads,
            on_restart=self._on_engine_restart,
            on_silence=self._health.check,
        )
        self.waiting_rollouts = 0
        """Rollouts that wait because no engine has the model."""
        self._closed = False

    async def __aenter__(self) -> Self:
        self.start_scraping()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def engines(self) -> list[str]:
        return [member.name for member in self.members.all]

    @property
    def healthy(self) -> list[str]:
        """Names of the engines that take calls."""
        return self.members.serving_names

    @property
    def unavailable_reason(self) -> str:
        """Why no engine could serve a call even if all were well: there is none, or none has the model; else empty."""
        if self.members.serving_names:
            return ""
        staying = [member for member in self.members.all if not member.draining]
        without = [member.unhealthy_reason for member in staying if member.lacks_model]
        if staying and not without:
            return ""
        return f"no engine of pool {self.name} has the model: {without[0] if without else 'it has no engines.'}"

    @property
    def problem(self) -> str:
        """Why nothing is sampled now, and what to do, in one line; empty while calls are taken."""
        if self.gate.is_closed:
            return f"pool {self.name} is paused: calls wait until the pause ends or POST /v1/policy/resume."
        if self.members.serving_names:
            return ""
        staying = [member for member in self.members.all if not member.draining]
        reason = self.unavailable_reason or staying[0].out_of_service_reason
        return (
            f"0 of {len(staying)} engines of pool {self.name} serve: {reason.rstrip('.')}. "
            "Start them, or correct 'engines' and 'model'; rollouts wait or are tried again."
        )

    def start_scraping(self) -> None:
        """Begin to read the engines' figures. Idempotent; ``async with`` does it."""
        self._scraper.start()

    def set_version(self, version: int) -> None:
        """Label what is sampled from now on; calls in flight keep the version they began with.

        Estimates of the caches are dropped: what is cached was computed with other weights.
        """
        self.version = version
        for member in self.members.all:
            member.engine.version = version
            self._balance_policy.invalidate_cache(member.name)
        self._prefix_reuse.invalidate_all()

    def add_engine(self, engine: PoolEngine) -> None:
        """Take an engine into service. Raises ``ValueError``: the name is taken."""
        if self.members.get(engine.name) is not None:
            raise ValueError(f"pool {self.name} already has an engine {engine.name}")
        engine.version = self.version
        self.members.add(PoolMember(engine))

    async def drain_engine(self, name: str) -> None:
        """Give an engine no more calls and wait until those in flight are over. Unknown names are ignored."""
        member = self.members.get(name)
        if member is not None:
            member.draining = True
            self._balance_policy.invalidate_cache(name)
            await self.gate.wait_until_idle(member)

    async def remove_engine(self, name: str) -> None:
        """Take an engine out of service and close it. Calls in flight on it fail over. Unknown names are ignored."""
        member = self.members.pop(name)
        if member is None:
            return
        self._health.stop_probing(member)
        self._invalidate_cache(member)
        await member.engine.close()
        self.members.changes.notify_all()

    async def wait_for_room(self, session_id: str) -> None:
        """Wait until a new rollout would find room; it counts from then on, until ``forget_session``."""
        await self._wait_for_model()
        await self._admission.wait_for_room(session_id)

    async def generate(self, request: GenerationRequest, executor: CallExecutor | None = None) -> GenerationResult:
        """Sample on the engine that the policy picks, failing over from the same ids.

        An ``executor`` makes the calls from another machine; of the prompt, only its length is used here then. Raises
        ``EngineError``: the last engine's, when attempts or time are used up; ``ENGINE_REFUSED`` at once;
        ``ContextExceeded``: prompt and answer do not fit into the engine's context.
        """
        cut_short = False
        try:
            if not await self._admission.begin_call(request):
                # What it lost while it waited is the price of the wait: as a sign of overload it would lengthen it.
                self._prefix_reuse.forget_context(request.session_id)
            result = await self._generate(request, executor)
            cut_short = result.finish_reason == "abort"
            return result
        finally:
            self._admission.end_call(request.session_id, cut_short=cut_short)

    def find_call(self, request_id: str) -> InFlightCall | None:
        return self.gate.find_call(request_id)

    async def may_have_sampled(self, member: PoolMember, max_tokens: int, seconds: float) -> bool:
        """Whether the engine of a call that got no answer in so many seconds can have been sampling for it.

        It can if it samples now (a few tokens of its own, or its counters move, or it answers other calls), and if at
        its pace the call may have needed so long. An engine that does not sample is taken out of service.
        """
        if not self.members.has(member):
            return False
        answered = member.calls
        before, shown = await asyncio.gather(self._read_sampled_count(member), self._health.run_trial(member))
        if isinstance(shown, EngineError):
            after = 0 if not before else await self._read_sampled_count(member)
            if after <= before and member.calls == answered:
                self._on_engine_failure(member, shown)
                return False
        expected = member.pace.expected_seconds(max_tokens, 0.0 if isinstance(shown, EngineError) else shown)
        if not 0 < _SLOW_CALL_FACTOR * expected < seconds:
            return True
        member.failures += 1
        log.warning("pool %s: engine %s lost a call: %.1f s without an answer", self.name, member.name, seconds)
        return False

    async def cancel(self, request_id: str) -> bool:
        """Stop a call, whose ``generate`` returns what could be salvaged; whether an engine was working on it."""
        flight = self.gate.find_call(request_id)
        if flight is None:
            return False
        await flight.stop()
        return True

    def release_slot(self, session_id: str) -> None:
        """Free the slot of a rollout that makes no call for a while; its next call requests one again."""
        self._admission.release_slot(session_id)

    def forget_session(self, session_id: str) -> None:
        """Forget a rollout that is over: its slot, and its home near its cached prefix."""
        self._balance_policy.forget_session(session_id)
        self._prefix_reuse.forget_session(session_id)
        self._admission.forget_session(session_id)

    async def check_health(self) -> dict[str, EngineHealth]:
        """Check every engine; those that are not well get no calls until a probe finds them well."""
        members = self.members.all
        answers = await asyncio.gather(*map(self._health.check, members))
        return {member.name: health for member, health in zip(members, answers, strict=True)}

    async def measure_paces(self) -> dict[str, float]:
        """Return the seconds that a token takes on each engine that samples a few now."""
        members = [member for member in self.members.all if not member.unhealthy_reason]
        shown = await asyncio.gather(*map(self._health.run_trial, members))
        return {member.name: pace for member, pace in zip(members, shown, strict=True) if isinstance(pace, float)}

    def snapshot(self) -> PoolSnapshot:
        return PoolSnapshot(
            name=self.name,
            version=self.version,
            paused=self.gate.is_closed,
            failovers=self.failovers,
            reusable_tokens=self._prefix_reuse.reusable_tokens,
            unavailable_reason=self.unavailable_reason,
            waiting_rollouts=self.waiting_rollouts,
            admission=self._admission.snapshot(),
            engines=tuple(self.members.all),
        )

    async def close(self) -> None:
        """Stop probing and close every engine; calls that wait for one fail. Idempotent."""
        self._closed = True
        self._admission.close()
        await self._scraper.close()
        await self._health.close()
        members = [self.members.pop(member.name) or member for member in self.members.all]
        await asyncio.gather(*(member.engine.close() for member in members))
        self.members.changes.notify_all()

    async def _generate(self, request: GenerationRequest, executor: CallExecutor | None) -> GenerationResult:
        tried: set[str] = set()
        last: EngineError | None = None
        failures = 0
        while last is None or failures < self._failover.max_attempts:
            self.failovers += last is not None
            member = await self._pick_member(request, tried, last)
            try:
                return await self._call_member(member, request, executor)
            except EngineError as error:
                if not _may_fail_over(error):
                    raise
                last = error
                if isinstance(error, ModelMissing):
                    continue  # counts as no attempt: the engine is tried again once it has the model
                tried.add(member.name)
                failures += 1
                if self.options.is_router and failures < self._failover.max_attempts:
                    with paused_deadline():
                        await asyncio.sleep(self._failover.backoff_seconds(failures - 1, _retry_after(error)))
        raise last

    async def _pick_member(self, request: GenerationRequest, tried: set[str], last: EngineError | None) -> PoolMember:
        """Reserve a slot on an engine, one that this call was not yet tried on if there is any."""
        while self.gate.is_closed or not (serving := self.members.serving_names):
            if self._closed:
                raise self._no_engine_error()
            if self.gate.is_closed:
                with paused_deadline():
                    await self.members.changes.wait_for(lambda: self._closed or not self.gate.is_closed)
            if not self.gate.is_closed:
                await self._wait_for_model()
                await self._wait_for_engine(last)
        fresh = [name for name in serving if name not in tried]
        steady = [name for name in fresh if (member := self.members.get(name)) is not None and member.may_take_call]
        chosen = self.members.get(self._balance_policy.choose(request, steady or fresh or serving))
        assert chosen is not None
        return chosen

    async def _call_member(
        self, member: PoolMember, request: GenerationRequest, executor: CallExecutor | None
    ) -> GenerationResult:
        """Make one attempt. The reservation is returned exactly once, however it ends."""
        served, began = CallOutcome(), monotonic()
        salt = request.cache_salt
        if self.options.salt_cache:
            salt = f"v{self.version}" if salt is None else f"{salt}/v{self.version}"
        # An engine may still hold the id of a lost attempt.
        attempt = replace(request, request_id=uuid4().hex, cache_salt=salt)
        with self.gate.track_call(request.request_id, attempt.request_id, member, executor) as flight:
            self._prefix_reuse.begin_call(request, member.name)
            try:
                result = await (executor.generate(member, attempt) if executor else member.engine.generate(attempt))
                served = CallOutcome(sampled_tokens=len(result.token_ids), cached_tokens=result.cached_tokens)
                if result.token_ids:  # one that was stopped without a token shows nothing
                    member.record_answer(request, result, monotonic() - began)
                return replace(result, aborted_by_pause=flight.is_cut_short and result.finish_reason == "abort")
            except ContextExceeded as error:
                if self.max_model_len is None:  # never override the configuration or the model list
                    self.max_model_len = error.max_model_len
                raise
            except EngineError as error:
                seconds = monotonic() - began
                # At its pace it may need longer than that for so many tokens.
                expected = member.pace.expected_seconds(request.max_tokens)
                if isinstance(error, CallTimedOut) and expected > seconds:
                    if not isinstance(await self._health.run_trial(member), EngineError):
                        error = CallTimedOut(member.name, seconds, request.max_tokens, expected)
                if _may_fail_over(error):
                    served = CallOutcome(failed=True)
                    flight.refund_deadline()
                    self._on_engine_failure(member, error)
                raise error
            finally:
                self._balance_policy.release(request, member.name, served)
                self._prefix_reuse.end_call(request, member.name, served.sampled_tokens)

    async def _read_sampled_count(self, member: PoolMember) -> int:
        """Read how many tokens an engine has sampled since it started; 0 where it does not report it."""
        try:
            async with asyncio.timeout(self._failover.trial_seconds):
                load = await member.engine.read_load()
        except TimeoutError:
            return 0
        return 0 if load is None else load.generated

    async def _wait_for_model(self) -> None:
        """Wait, without a limit, while no engine has the model; the log, the status and the metrics show it."""
        if not self.unavailable_reason:
            return
        if not self.waiting_rollouts:
            log.warning("pool %s: rollouts wait: %s", self.name, self.unavailable_reason)
        self.waiting_rollouts += 1
        try:
            with paused_deadline():
                await self.members.changes.wait_for(lambda: self._closed or not self.unavailable_reason)
        finally:
            self.waiting_rollouts -= 1

    async def _wait_for_engine(self, last: EngineError | None) -> None:
        """Wait until some engine takes calls, or calls have to wait for something else; raise if none does in time."""

        def is_over() -> bool:
            return bool(self.members.serving_names or self.gate.is_closed or self._closed or self.unavailable_reason)

        try:
            with paused_deadline():
                async with asyncio.timeout(self._failover.recovery_seconds):
                    await self.members.changes.wait_for(is_over)
        except TimeoutError:
            raise last or self._no_engine_error() from None

    def _no_engine_error(self) -> EngineError:
        details = [member.out_of_service_reason for member in self.members.all] or ["it has no engines"]
        return EngineError(
            FailureKind.ENGINE_UNREACHABLE,
            f"pool {self.name}: no engine was well for {self._failover.recovery_seconds:g} s ({details[0][:200]}).",
            "Start the engines, or correct 'engines'.",
        )

    def _on_engine_failure(self, member: PoolMember, error: EngineError) -> None:
        log.warning("pool %s: engine %s failed: %s", self.name, member.name, error.what)
        member.failures += 1
        member.lacks_model = isinstance(error, ModelMissing)
        if self.options.is_router and not member.lacks_model:
            return
        if error.kind is FailureKind.ENGINE_UNREACHABLE:
            self._invalidate_cache(member)
        failed_at_once = error.kind is not FailureKind.ENGINE_TIMEOUT
        self._health.take_out_of_service(member, error.what, _retry_after(error), failed_at_once=failed_at_once)

    def _invalidate_cache(self, member: PoolMember) -> None:
        self._balance_policy.invalidate_cache(member.name)
        self._prefix_reuse.invalidate_cache(member.name)

    def _on_engine_restart(self, member: PoolMember) -> None:
        log.warning("pool %s: engine %s was restarted", self.name, member.name)
        self._invalidate_cache(member)
        self.members.announce_member(member)

    def _on_loads(self, loads: Mapping[str, EngineLoad]) -> None:
        for name, load in loads.items():
            self._balance_policy.observe_load(name, load)
        serving = self.members.serving_names
        served = {name: load for name, load in loads.items() if name in serving}
        self._admission.observe_loads(served, self._prefix_reuse.reusable_tokens_on(served), len(serving))

    def _on_healthy(self, health: EngineHealth) -> None:
        if health.max_model_len is not None:
            self.max_model_len = min(health.max_model_len, self.max_model_len or health.max_model_len)


def _may_fail_over(error: EngineError) -> bool:
    """Whether another engine may answer what this one did not."""
    if isinstance(error, CallTimedOut) and error.in_progress:
        return False
    return error.kind in FAILOVER_KINDS or isinstance(error, ModelMissing)


def _retry_after(error: EngineError) -> float | None:
    return error.retry_after if isinstance(error, EngineOverloaded) else None
