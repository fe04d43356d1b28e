"""New weights behind a pool: pause calls, label versions, drop caches, and check that every engine has the weights.

A trainer loads weights into engines by its own means. Around that it calls::

    await updater.pause("abort")              # no call is in flight any more
    ...                                       # load; engines answer again at the end
    await updater.update(7)                   # labels, caches, check
    await updater.resume()

A turn that a pause cuts short continues from the same ids under the new version, and each of its tokens is labelled
with the version that sampled it. No engine serves a version before its caches of older ones are dropped or salted and
its log-probs agree with the others'; until then it is quarantined, with the reason, and checked again.
"""

import asyncio
import logging
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from prorl_gym.backoff import backoff_delay
from prorl_gym.errors import ProrlError
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.balance.members import PoolMember
from prorl_gym.inference.weights.weight_check import (
    TOLERANCE,
    CheckResult,
    Fingerprint,
    WeightCheck,
    changed_weights_reason,
    find_invalid_engines,
    find_stale_engines,
    has_moved,
    make_probe_token_ids,
    median_fingerprint,
)

log = logging.getLogger(__name__)

PauseMode = Literal["abort", "drain", "keep"]
"""Treatment of calls in flight: cut short, waited for, or left to the engine, which continues them."""


class WeightUpdateError(ProrlError):
    """The policy cannot be paused or updated like this, or no engine has the new weights."""


@dataclass(frozen=True, slots=True)
class WeightUpdateOptions:
    """Times in seconds."""

    abort_seconds: float = 30.0
    """Longest wait for the calls that were stopped."""
    first_retry_seconds: float = 0.05
    """First delay before a stop, a cache reset or a probe is tried again; it doubles."""
    max_retry_seconds: float = 10.0
    """Longest such delay."""
    max_cache_resets: int = 8
    """Tries to drop an engine's cache, which fails while blocks are held."""
    tolerance: float = TOLERANCE
    """Mean distance of log-probs in nats beyond which engines disagree. See ``weight_check``."""

    def retry_delay(self, turn: int) -> float:
        return backoff_delay(turn, first=self.first_retry_seconds, longest=self.max_retry_seconds)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    version: int
    serving: tuple[str, ...]
    quarantined: dict[str, str]
    """Engines that do not serve it, and why."""
    unverified: tuple[str, ...]
    """Engines that serve it unchecked: they cannot return log-probs of a prompt."""


@dataclass(slots=True)
class Pause:
    """A pause that is in force. Times are Unix seconds."""

    since: float
    expires_at: float | None
    """``None``: it does not expire, or a pause or an update is under way."""


class WeightUpdater:
    """Pauses and updates one pool. Not to be used by two trainers at once."""

    def __init__(self, pool: EnginePool, vocab_size: int, options: WeightUpdateOptions | None = None) -> None:
        self.probe_token_ids = make_probe_token_ids(vocab_size)
        """The probe: a trainer's reference is the log-prob of each of these ids but the first."""
        self._pool = pool
        self._options = options or WeightUpdateOptions()
        self._weight_check = WeightCheck(
            self.probe_token_ids, pool.options.salt_cache, self._options.max_cache_resets, self._options.retry_delay
        )
        self.pause_in_force: Pause | None = None
        self._expire_seconds: float | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._has_updated_in_pause = False
        self._is_busy = False
        self._is_checking = False
        """The fleet is being checked, or the check was cancelled: no engine is accepted before it is repeated."""
        self._has_updated = False
        self._fingerprints: dict[PoolMember, Fingerprint] = {}
        """Fingerprints of the version that is served now, of each accepted engine."""
        self._previous_fingerprints: dict[PoolMember, Fingerprint] = {}
        """Fingerprints of the version before it."""
        self._rejected_fingerprints: dict[PoolMember, Fingerprint] = {}
        """Fingerprints of the engines in quarantine, as last read."""
        self._reference_logprobs: Fingerprint | None = None
        self._caches_dropped = False
        self._recheck_tasks: dict[PoolMember, asyncio.Task[None]] = {}
        pool.members.on_join = self._quarantine_joining

    @property
    def paused(self) -> bool:
        return self.pause_in_force is not None

    async def pause(self, mode: PauseMode = "abort", expire_seconds: float | None = None) -> None:
        """Let no call begin; when this returns, none is in flight either, except in mode ``keep``.

        Rollouts wait between two calls, which is charged to none of their deadlines. A second call while it is paused
        changes the mode and the time of expiry: the pause ends by itself, as ``resume`` ends it, so many seconds after
        this call or the last update; ``None``: never. The clock stands still while a pause or an update is under way.

        Raises ``WeightUpdateError``: ``keep``, and an engine at work does not report which weights sample which token;
        an engine does not end its calls. The policy stays paused then; ``resume`` undoes it.
        """
        with self._exclusive(), self._expiry_stopped():
            self._expire_seconds = expire_seconds
            if self.pause_in_force is None:
                self.pause_in_force = Pause(time.time(), None)
                self._has_updated_in_pause = False
                self._pool.gate.close()
            if mode == "keep":
                self._require_reported_versions("Pause with 'abort' or 'drain'.")
                self._pool.gate.pause_deadlines()
            elif mode == "drain":
                await self._pool.gate.wait_until_idle()
            else:
                await self._abort()
            # Engines that have no fingerprint yet show it while they have the old weights.
            members = [one for one in self._pool.members.all if one.is_serving and one not in self._fingerprints]
            shown = await asyncio.gather(*map(self._weight_check.read_fingerprint, members))
            for member, one in zip(members, shown, strict=True):
                if one.fingerprint is not None:
                    self._fingerprints[member] = one.fingerprint

    async def resume(self) -> None:
        """Let calls begin again. Without a pause it does nothing.

        After a pause without an update, an engine serves again once it has shown that its weights did not change.
        """
        self._end_pause_checked()

    async def update(
        self,
        version: int,
        *,
        reference_logprobs: Fingerprint | None = None,
        caches_dropped: bool = False,
        require_pause: bool = False,
    ) -> UpdateResult:
        """Label, drop caches and check, once the engines have new weights and answer again. A pause stays in force.

        The ``version`` is above the one before; the same again where an update left no engine serving, and in the first
        update since the start, which then says what the engines hold already. ``reference_logprobs`` are the trainer's
        own of ``probe_ids`` but the first. ``caches_dropped``: the prefix caches were dropped when the weights were
        loaded (NeMo-RL's server does that). ``require_pause``: refuse the update when the pause in which the weights
        were loaded is over.

        Raises ``WeightUpdateError``: calls are in flight on engines that do not report which weights sample which
        token; the pool is not paused and ``require_pause``; the version does not grow; weights that the engines had
        before the service's start were replaced without a pause and without a reference, or the reference has another
        length; or no engine is left that has the weights, and then nothing serves the new version.
        """
        with self._exclusive(), self._expiry_stopped():
            if require_pause and not self.paused:
                self._recheck_weights("weights were loaded without a pause: it has not shown yet which ones it has")
                raise WeightUpdateError(
                    f"pool {self._pool.name}: its pause is over (expired, resumed, or the service was restarted), so "
                    "calls may have run while the weights changed.",
                    "Pause, load and update again, with an 'expire_seconds' that is longer than loading takes.",
                )
            self._validate_update(version, reference_logprobs)
            self._require_reported_versions("Pause the policy before its weights change.")
            self._has_updated_in_pause = True
            self._pool.gate.close()
            try:
                return await self._update(version, reference_logprobs, caches_dropped)
            finally:
                self._pool.gate.open()

    async def close(self) -> None:
        """Stop all checks and let calls begin. Idempotent."""
        self._pool.members.on_join = None
        rechecks, self._recheck_tasks = list(self._recheck_tasks.values()), {}
        for task in rechecks:
            task.cancel()
        await asyncio.gather(*rechecks, return_exceptions=True)
        self._end_pause()

    def _end_pause(self) -> None:
        if self.pause_in_force is not None:
            self._stop_expiry()
            self.pause_in_force = None
            self._pool.gate.open()

    def _end_pause_checked(self) -> None:
        """End the pause; if it had no update, the weights may have changed without a word."""
        if self.pause_in_force is not None and not self._has_updated_in_pause:
            self._recheck_weights("a pause ended without an update: it has not shown yet that it has the same weights")
        self._end_pause()

    def _recheck_weights(self, reason: str) -> None:
        """Let no engine serve before it has shown the weights with which it was accepted."""
        for member in self._pool.members.all:
            if member.is_serving and member in self._fingerprints:
                self._quarantine(member, reason)

    @contextmanager
    def _expiry_stopped(self) -> Generator[None, None, None]:
        """Stop the clock of the pause for the block, and restart it at its end."""
        self._stop_expiry()
        try:
            yield
        finally:
            if self.pause_in_force is not None and self._expire_seconds is not None:
                loop = asyncio.get_running_loop()
                self._expiry = loop.call_later(self._expire_seconds, self._expire, self._expire_seconds)
                self.pause_in_force.expires_at = time.time() + self._expire_seconds

    def _stop_expiry(self) -> None:
        timer, self._expiry = self._expiry, None
        if timer is not None:
            timer.cancel()
            if self.pause_in_force is not None:
                self.pause_in_force.expires_at = None

    def _expire(self, seconds: float) -> None:
        log.warning("pool %s: its pause has expired: no update and no resume within %g s", self._pool.name, seconds)
        self._end_pause_checked()

    async def _abort(self) -> None:
        """Cut every call short. Repeated: an engine ignores a stop that arrives before its call."""
        gate, turn = self._pool.gate, 0
        try:
            async with asyncio.timeout(self._options.abort_seconds):
                while gate.calls:
                    for flight in gate.calls:
                        flight.is_cut_short = True
                    await asyncio.gather(*(self._pool.cancel(flight.request_id) for flight in gate.calls))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._options.retry_delay(turn)):
                            await gate.wait_until_idle()
                    turn += 1
        except TimeoutError:
            names = sorted({flight.member.name for flight in gate.calls})
            raise WeightUpdateError(
                f"pool {self._pool.name}: {', '.join(names)[:200]} did not end {len(gate.calls)} calls within "
                f"{self._options.abort_seconds:g} s.",
                "Remove the engine, or pause with 'drain'.",
            ) from None

    async def _update(self, version: int, reference_logprobs: Fingerprint | None, caches_dropped: bool) -> UpdateResult:
        members = self._pool.members.all
        for task in self._recheck_tasks.values():
            task.cancel()
        self._recheck_tasks.clear()
        if version > self._pool.version or not self._has_updated:  # a repeated one has the fingerprints before it
            # Rejected ones too: an engine that was refused and does not move either is still stale.
            known = {**self._rejected_fingerprints, **self._fingerprints}
            self._previous_fingerprints = {one: seen for one, seen in known.items() if self._pool.members.has(one)}
        self._fingerprints, self._rejected_fingerprints = {}, {}
        self._reference_logprobs, self._caches_dropped = reference_logprobs, caches_dropped
        self._pool.set_version(version)
        for member in members:
            member.quarantine_reason = f"it has not shown version {version}"  # stays so if this is cancelled
        self._is_checking = self._has_updated = True
        shown = await asyncio.gather(*(self._weight_check.check_engine(one, caches_dropped) for one in members))
        self._apply_results(members, dict(zip(members, shown, strict=True)))
        self._is_checking = False
        serving = [member for member in members if member.is_serving]
        quarantined = {member.name: member.quarantine_reason for member in members if member.quarantine_reason}
        self._log_result(version, members, quarantined)
        if not serving:
            first = next((member.out_of_service_reason for member in members), "it has no engines")
            raise WeightUpdateError(
                f"pool {self._pool.name}: no engine has version {version} ({first[:200]}).",
                "Load the weights again and update once more; until then nothing is sampled.",
            )
        unproven = tuple(member.name for member in serving if member not in self._fingerprints)
        return UpdateResult(version, tuple(member.name for member in serving), quarantined, unproven)

    def _apply_results(self, members: list[PoolMember], shown: dict[PoolMember, CheckResult]) -> None:
        now = {member.name: one.fingerprint for member, one in shown.items() if one.fingerprint is not None}
        # Engines that joined since are compared with the others' earlier median: many may bring the same old weights.
        then = median_fingerprint(list(self._previous_fingerprints.values())) if self._previous_fingerprints else None
        known = ((member, self._previous_fingerprints.get(member, then)) for member in members)
        before = {member.name: one for member, one in known if one is not None}
        wrong = find_invalid_engines(
            now, before, reference_logprobs=self._reference_logprobs, tolerance=self._options.tolerance
        )
        for member in members:
            reason = shown[member].problem or wrong.get(member.name, "")
            if reason:
                self._quarantine(member, reason, shown[member].fingerprint)
            else:
                self._accept(member, shown[member].fingerprint)

    def _log_result(self, version: int, members: list[PoolMember], quarantined: dict[str, str]) -> None:
        pool = self._pool.name
        for name, reason in quarantined.items():
            log.warning("pool %s: engine %s is quarantined: %s", pool, name, reason)
        both = [member for member in members if member in self._fingerprints and member in self._previous_fingerprints]
        if both and not any(
            has_moved(self._fingerprints[member], self._previous_fingerprints[member]) for member in both
        ):
            log.warning("pool %s: version %d moved no engine's log-probs: was it loaded?", pool, version)

    def _quarantine_joining(self, member: PoolMember) -> None:
        """Quarantine an engine that joins or comes back: it may have the weights that it was started with."""
        # It is checked already; or no update was made yet, so every engine has the weights that it was started with.
        if member.quarantine_reason or not (self._has_updated or self._fingerprints):
            return
        self._quarantine(member, "it came (back) and has not shown yet that it has the weights")

    def _accept(self, member: PoolMember, fingerprint: Fingerprint | None) -> None:
        member.quarantine_reason = ""
        self._rejected_fingerprints.pop(member, None)
        if fingerprint is not None:
            self._fingerprints[member] = fingerprint

    def _quarantine(self, member: PoolMember, reason: str, fingerprint: Fingerprint | None = None) -> None:
        member.quarantine_reason = reason
        if fingerprint is not None:
            self._rejected_fingerprints[member] = fingerprint
        if (recheck := self._recheck_tasks.get(member)) is None or recheck.done():
            self._recheck_tasks[member] = asyncio.create_task(self._recheck_until_valid(member, self._pool.version))

    async def _recheck_until_valid(self, member: PoolMember, version: int) -> None:
        turn = 0
        while self._pool.members.has(member) and self._pool.version == version:
            # While the fleet is being checked, one engine alone cannot be compared.
            if not (member.unhealthy_reason or self._is_checking):
                # What an accepted engine has cached is of this version.
                is_cache_valid = self._caches_dropped or member in self._fingerprints
                shown = await self._weight_check.check_engine(member, is_cache_valid)
                problem = shown.problem or self._compare_with_fleet(member, shown)
                if not problem:
                    self._accept(member, shown.fingerprint)
                    log.info("pool %s: engine %s is out of quarantine", self._pool.name, member.name)
                    self._pool.members.changes.notify_all()
                    return
                self._quarantine(member, problem, shown.fingerprint)
            await asyncio.sleep(self._options.retry_delay(turn))
            turn += 1

    def _compare_with_fleet(self, member: PoolMember, shown: CheckResult) -> str:
        """Compare an engine with itself if it was accepted before, else with accepted engines, else with all."""
        if shown.fingerprint is None:
            return ""
        if (own := self._fingerprints.get(member)) is not None:
            return changed_weights_reason(shown.fingerprint, own, self._previous_fingerprints.get(member))
        others = {
            one: seen for one, seen in self._fingerprints.items() if self._pool.members.has(one)
        } or self._rejected_fingerprints
        now = {one.name: seen for one, seen in others.items()} | {member.name: shown.fingerprint}
        before = {one.name: seen for one, seen in self._previous_fingerprints.items()}
        # An engine that was accepted when there was no other to compare with may turn out to have the old weights.
        for name, reason in find_stale_engines(now, before, self._reference_logprobs).items():
            found = self._pool.members.get(name)
            if found is not None and found is not member and not found.quarantine_reason:
                self._quarantine(found, reason, self._fingerprints.pop(found))
        return find_invalid_engines(
            now, before, reference_logprobs=self._reference_logprobs, tolerance=self._options.tolerance
        ).get(member.name, "")

    def _require_reported_versions(self, fix: str) -> None:
        silent = sorted({flight.member.name for flight in self._pool.gate.calls if not flight.member.reports_versions})
        if silent:
            raise WeightUpdateError(
                f"pool {self._pool.name}: {', '.join(silent)[:200]} does not report which weights sampled which token.",
                fix,
            )

    def _validate_update(self, version: int, reference_logprobs: Fingerprint | None) -> None:
        current = self._pool.version
        is_repeated = version == current and not (self._has_updated and self._pool.members.serving_names)
        if version <= current and not is_repeated:
            raise WeightUpdateError(
                f"pool {self._pool.name}: version {version} does not follow {current}.",
                f"Versions belong to the pool, whichever run or step they come from: the next one is {current + 1}.",
            )
        # It says what the engines hold: there is nothing to compare with but each other.
        is_first = not self._has_updated and current in (0, version)
        if reference_logprobs is None and not (self.paused or self._fingerprints or is_first):
            raise WeightUpdateError(
                f"pool {self._pool.name}: it serves version {current} since the service was started, and neither what "
                "its engines computed before nor what they should compute is known.",
                "Pause before the weights change, or give a reference.",
            )
        if reference_logprobs is not None and len(reference_logprobs) != len(self.probe_token_ids) - 1:
            raise WeightUpdateError(
                f"pool {self._pool.name}: the reference has {len(reference_logprobs)} log-probs, not "
                f"{len(self.probe_token_ids) - 1}.",
                "Give one for each of probe_ids but the first.",
            )

    @contextmanager
    def _exclusive(self) -> Generator[None, None, None]:
        if self._is_busy:
            raise WeightUpdateError(
                f"pool {self._pool.name}: another pause or update is under way.", "Wait for it, then try again."
            )
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False
