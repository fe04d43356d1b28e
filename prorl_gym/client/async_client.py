"""The client for code on an event loop."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

from prorl_gym.client.group_stream import GroupStream
from prorl_gym.client.record_stream import Acknowledger, RecordStream, read_deliveries
from prorl_gym.client.service_credentials import read_token, service_url, token_source
from prorl_gym.client.transport import LONG_POLL_SECONDS, Transport
from prorl_gym.client.wire_models import (
    DEFAULT_EXPIRE_SECONDS,
    AcceptedRollout,
    AckResponse,
    CancelResponse,
    DemandResponse,
    EngineRegistration,
    FirstPrompt,
    GroupsStatus,
    IgnoredResponse,
    MismatchBody,
    MismatchHistory,
    MismatchReport,
    PauseMode,
    PolicyStatus,
    PolicyUpdateResponse,
    RolloutListResponse,
    RolloutResponse,
    ServiceStatus,
    SubmitResponse,
    SubmittedRequestResponse,
    Unacknowledged,
)
from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, NotFoundError, ProrlError
from prorl_gym.records import BatchMismatch, Rollout, RolloutRequest

_LOG = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")
"""The form of ids. Anything else is unknown, and must not become part of an address."""

BATCH_ROLLOUTS = 512
"""Rollouts in one submission."""

BATCH_BYTES = 8 << 20
"""Bytes of one submission: well below the default ``http.max_body_bytes`` of a service."""


@dataclass(slots=True)
class WeightUpdate:
    """A change of weights under way (``Client.weight_update``)."""

    version: int
    """Policy version of the new weights."""
    result: PolicyUpdateResponse | None = None
    """Which engines serve them; present after the block."""


class Client:
    """Asynchronous client. Use it as a context manager, on one event loop.

    Every call is repeated for ``retry_seconds`` when the service is not reachable, restarts or is busy; that is
    harmless for all of them. A stream or a wait counts the seconds from each success; the pauses double from
    ``retry_delay`` to 5 s. No call raises anything but the package's own errors: ``ServiceError`` when the service
    refuses or is not reached, others where stated.

    ``url`` defaults to ``$PRORL_GYM_URL`` or the local address; ``token`` to the environment's or the service's file.
    """

    def __init__(
        self, url: str | None = None, *, token: str | None = None, retry_seconds: float = 60.0, retry_delay: float = 0.2
    ) -> None:
        found = token if token is not None else read_token()
        token_from = "its caller" if token is not None else token_source()
        self._transport = Transport(service_url(url), found, token_from, retry_seconds, retry_delay)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._transport.close()

    # --- rollouts ---------------------------------------------------------------------------------------------------

    async def submit(self, requests: RolloutRequest | Sequence[RolloutRequest]) -> list[AcceptedRollout]:
        """Submit rollouts. When this returns, the service has them on its disk.

        Many are sent in several batches; each is accepted whole or not at all. After an error some batches may have
        been accepted: submitting everything again is harmless.

        Raises ``ConflictError`` (an id was submitted before with another body), ``TaskError`` (a task is not JSON, or
        its environment is unknown) and ``BusyError`` (no room for more, for longer than ``retry_seconds``).
        """
        batch = [requests] if isinstance(requests, RolloutRequest) else requests
        accepted: list[AcceptedRollout] = []
        for body in encode_batches(batch):
            answer = await self._transport.call("POST", "/v1/rollouts", SubmitResponse, body=body)
            accepted += answer.accepted
        return accepted

    async def result(self, rollout_id: str, timeout: float | None = None) -> Rollout:
        """Wait for the terminal record, also over a restart of the service.

        Raises ``TimeoutError`` (not finished after ``timeout`` seconds), ``NotFoundError`` (never accepted) and
        ``GoneError`` (its record was released).
        """
        async with asyncio.timeout(timeout):
            while True:
                rollout = await self.poll_result(rollout_id, wait=LONG_POLL_SECONDS)
                if rollout is not None:
                    return rollout

    async def poll_result(self, rollout_id: str, wait: float = 0.0) -> Rollout | None:
        """Return the terminal record, or ``None`` when there is none after ``wait`` seconds (at most 60)."""
        path = f"/v1/rollouts/{_path_part(rollout_id)}"
        return (await self._transport.call("GET", path, RolloutResponse, query={"wait": f"{wait:g}"})).rollout

    async def request(self, rollout_id: str) -> RolloutRequest:
        """Return what was submitted under this id, with its task, which may hold the gold answer.

        Raises ``NotFoundError`` (never accepted) and ``GoneError`` (not kept any more).
        """
        path = f"/v1/rollouts/{_path_part(rollout_id)}/request"
        return (await self._transport.call("GET", path, SubmittedRequestResponse)).request

    async def page(self, rollout_id: str) -> str:
        """Return a page of a finished rollout, token by token, as one HTML file."""
        page = await self._transport.call_raw("GET", f"/v1/rollouts/{_path_part(rollout_id)}/page")
        return page.decode("utf-8", "replace")

    async def rollouts(
        self,
        run_id: str | None = None,
        *,
        group: str | None = None,
        prefix: str | None = None,
        limit: int = 100,
        before: int = 0,
    ) -> RolloutListResponse:
        """Return a page of finished rollouts without their records, newest first, and the cursor of the next page.

        ``before``: only those that finished before this cursor, which is ``before`` of the page read last.
        """
        query = {"limit": str(limit), "run": run_id, "group": group, "prefix": prefix}
        query |= {"before": str(before) if before else None}
        return await self._transport.call("GET", "/v1/rollouts", RolloutListResponse, query=_without_none(query))

    async def cancel(
        self,
        rollout_ids: Sequence[str] = (),
        *,
        groups: Sequence[str] = (),
        runs: Sequence[str] = (),
        reason: CancelReason = CancelReason.CLIENT,
    ) -> list[str]:
        """Cancel by id, group or run; return the ids that this stopped. Each still gets its record, with the reason."""
        body = {"rollouts": list(rollout_ids), "groups": list(groups), "runs": list(runs), "reason": reason}
        return list((await self._transport.call("POST", "/v1/cancel", CancelResponse, body=_json(body))).cancelled)

    # --- streams ----------------------------------------------------------------------------------------------------

    def stream(
        self, run_id: str | None = None, cursor: int = 0, *, follow: bool = True, acknowledge: bool = False
    ) -> RecordStream:
        """Yield records past ``cursor`` as rollouts finish, each once; a broken connection is resumed.

        Without ``follow`` it ends with the last record there is. With ``acknowledge``, records are acknowledged now and
        then: one counts as received when the next one is read.
        """
        return RecordStream(
            lambda after: read_deliveries(self._transport, run_id, after, follow=follow),
            cursor,
            self._acknowledger(run_id, acknowledge),
        )

    def stream_groups(
        self, run_id: str, cursor: int = 0, *, used_cursor: int = 0, follow: bool = True, acknowledge: bool = False
    ) -> GroupStream:
        """Yield the groups of a run as they become complete (see ``prorl_gym.client.group_stream``).

        To continue after a restart of the trainer, keep ``resume_cursor`` and ``cursor`` of the last group it used:
        ``stream_groups(run, resume_cursor, used_cursor=cursor)`` yields what came after it, and nothing twice. With
        ``acknowledge``, the records of groups that are over are acknowledged when the next group is read.

        Reading raises ``GroupsDroppedError`` when the run's demand cancelled groups and nothing else of the run is
        pending, so that no group would come. The next read waits for what is submitted from now on.
        """

        async def replacements() -> int:
            demand = await self.demand(run_id)
            return 0 if demand is None else demand.replace

        async def is_over(seen: int) -> bool:
            newest = (await self.rollouts(run_id, limit=1)).rollouts
            if newest and newest[0].cursor > seen:
                return False  # there is more to read
            states = (await self.groups(run_id)).states
            return not states.get("open", 0) and not states.get("informative", 0)

        records = self.stream(run_id, cursor, follow=follow)
        acknowledger = self._acknowledger(run_id, acknowledge)
        return GroupStream(records, used_cursor, replacements, acknowledger, run_id, is_over if follow else None)

    async def acknowledge(self, run_id: str | None, cursor: int) -> int:
        """Acknowledge the records of a run (``None``: of all) up to this cursor; return how many this released."""
        body = _json({"run": run_id, "cursor": cursor})
        return (await self._transport.call("POST", "/v1/ack", AckResponse, body=body)).released

    async def acknowledge_rollouts(self, rollout_ids: Sequence[str]) -> int:
        """Acknowledge the records of these rollouts, in any order; return how many this released."""
        body = _json({"rollouts": list(rollout_ids)})
        return (await self._transport.call("POST", "/v1/ack", AckResponse, body=body)).released

    async def unacknowledged(self, run_id: str | None = None) -> Unacknowledged:
        """List the rollouts of a run (``None``: of all) whose records were not acknowledged, finished or not."""
        query = _without_none({"run": run_id})
        return await self._transport.call("GET", "/v1/unacknowledged", Unacknowledged, query=query)

    async def first_prompt(self, messages: Sequence[Any] | str, tools: Sequence[Mapping[str, Any]] = ()) -> FirstPrompt:
        """Render the first prompt of a row (items of OpenAI's Responses API), of which no rollout has to be made."""
        body = _json({"input": messages, "tools": tools})
        return await self._transport.call("POST", "/v1/first_prompt", FirstPrompt, body=body)

    # --- the demand of a run ----------------------------------------------------------------------------------------

    async def set_demand(self, run_id: str, demand: Demand) -> GroupsStatus:
        """Set a run's demand; this replaces the one before."""
        body = demand.model_dump_json(exclude_unset=True).encode()
        return await self._transport.call("PUT", f"/v1/runs/{_path_part(run_id)}/demand", GroupsStatus, body=body)

    async def demand(self, run_id: str) -> Demand | None:
        """Return the demand of a run; ``None``: everything is wanted."""
        try:
            return (await self._transport.call("GET", f"/v1/runs/{_path_part(run_id)}/demand", DemandResponse)).root
        except NotFoundError:
            return None

    async def clear_demand(self, run_id: str) -> None:
        """Delete the demand of a run: parked agents and their groups are cancelled, everything else runs to its end."""
        await self._transport.call("DELETE", f"/v1/runs/{_path_part(run_id)}/demand", IgnoredResponse)

    async def groups(self, run_id: str) -> GroupsStatus:
        return await self._transport.call("GET", f"/v1/runs/{_path_part(run_id)}/groups", GroupsStatus)

    # --- mismatch of log-probs --------------------------------------------------------------------------------------

    async def report_mismatch(self, run_id: str, version: int, mismatch: BatchMismatch) -> None:
        """Report a ``trainers.mismatch.measure_mismatch``, to be shown next to the reward.

        ``version`` is of the policy that learns from the batch; a later report of the same version replaces this one.
        """
        body = MismatchBody(version=version, mismatch=mismatch).model_dump_json().encode()
        await self._transport.call("POST", f"/v1/runs/{_path_part(run_id)}/mismatch", IgnoredResponse, body=body)

    async def mismatch(self, run_id: str) -> tuple[MismatchReport, ...]:
        """Return what was reported of the latest updates of a run, since the service started."""
        path = f"/v1/runs/{_path_part(run_id)}/mismatch"
        return (await self._transport.call("GET", path, MismatchHistory)).reports

    # --- policy and engines -----------------------------------------------------------------------------------------

    async def policy(self, pool: str = "policy") -> PolicyStatus:
        """Return the version of a pool, and the engines that serve it."""
        return await self._transport.call("GET", "/v1/policy", PolicyStatus, query={"pool": pool})

    @asynccontextmanager
    async def weight_update(
        self,
        version: int | None = None,
        *,
        mode: PauseMode | None = "abort",
        expire_seconds: float | None = DEFAULT_EXPIRE_SECONDS,
        reference: Sequence[float] | None = None,
        caches_dropped: bool = False,
        engines: Sequence[str] | None = None,
        pool: str = "policy",
    ) -> AsyncGenerator[WeightUpdate, None]:
        """Pause a pool, let the block load new weights into its engines, report them, and resume.

        When the block raises, nothing is reported: the pool is resumed, and each engine serves again once it has shown
        that it still has the weights of before. The same holds when this process dies, after ``expire_seconds``
        (``None``: never), which have to be more than the block takes.

        ``version`` is the next one of the pool by default. ``mode`` says what happens to running calls; ``None``: no
        pause, for engines that report which weights sampled which token, and for the first version. The rest is as of
        ``update_policy``.

        Raises ``ConflictError``: the version does not follow that of the pool, no engine has the new weights, or the
        pause was over before the update. Load again in a new block.
        """
        update = WeightUpdate((await self.policy(pool)).version + 1 if version is None else version)
        try:
            if mode is not None:
                await self.pause(mode, expire_seconds=expire_seconds, pool=pool)
            yield update
            update.result = await self.update_policy(
                update.version,
                reference=reference,
                caches_dropped=caches_dropped,
                require_pause=mode is not None,
                engines=engines,
                pool=pool,
            )
        except BaseException:
            if mode is not None:
                try:
                    await self.resume(pool)
                except ProrlError as error:  # logged, so that it does not hide the error that came first
                    _LOG.error("pool %s stays paused until its pause expires: %s", pool, error)
            raise
        if mode is not None:
            await self.resume(pool)

    async def update_policy(
        self,
        version: int,
        *,
        reference: Sequence[float] | None = None,
        caches_dropped: bool = False,
        require_pause: bool = False,
        engines: Sequence[str] | None = None,
        pool: str = "policy",
    ) -> PolicyUpdateResponse:
        """Report that the engines have new weights; the service drops caches, checks it, and labels tokens from now on.

        ``weight_update`` does this with the pause around it. ``PolicyUpdateBody`` has the meaning of each parameter;
        without ``engines`` they stay the same.

        Raises ``ConflictError``: the version does not follow that of the pool, no engine has the new weights, or the
        policy was not paused.
        """
        body = {
            "version": version,
            "pool": pool,
            "reference": None if reference is None else list(reference),
            "caches_dropped": caches_dropped,
            "require_pause": require_pause,
            "engines": None if engines is None else list(engines),
        }
        return await self._transport.call("PUT", "/v1/policy", PolicyUpdateResponse, body=_json(_without_none(body)))

    async def pause(
        self,
        mode: PauseMode = "abort",
        *,
        expire_seconds: float | None = DEFAULT_EXPIRE_SECONDS,
        pool: str = "policy",
    ) -> None:
        """Let no engine call begin; when this returns none is running, except in mode ``keep``. Deadlines stop.

        The pause ends by itself after ``expire_seconds`` (``None``: never); another call restarts the time.
        """
        body = {"mode": mode, "expire_seconds": expire_seconds, "pool": pool}
        await self._transport.call("POST", "/v1/policy/pause", IgnoredResponse, body=_json(body))

    async def resume(self, pool: str = "policy") -> None:
        """Let engine calls begin again. Does nothing without a pause."""
        await self._transport.call("POST", "/v1/policy/resume", IgnoredResponse, body=_json({"pool": pool}))

    async def hold(self) -> None:
        """Begin no further rollouts, for maintenance; running ones go on. Ends with the service's restart."""
        await self._transport.call("POST", "/v1/hold", IgnoredResponse)

    async def release(self) -> None:
        """End a ``hold``."""
        await self._transport.call("POST", "/v1/release", IgnoredResponse)

    async def add_engine(self, url: str) -> EngineRegistration:
        """Register an engine; its address must be on the service's allow-list."""
        return await self._transport.call("POST", "/v1/engines", EngineRegistration, body=_json({"url": url}))

    async def remove_engine(self, name: str) -> EngineRegistration:
        """Deregister an engine: it finishes its calls and leaves."""
        return await self._transport.call("DELETE", f"/v1/engines/{quote(name, safe='')}", EngineRegistration)

    async def status(self) -> ServiceStatus:
        return await self._transport.call("GET", "/v1/status", ServiceStatus)

    def _acknowledger(self, run_id: str | None, wanted: bool) -> Acknowledger:
        return Acknowledger((lambda seen: self.acknowledge(run_id, seen)) if wanted else None)


def encode_batches(
    requests: Sequence[RolloutRequest], max_rollouts: int = BATCH_ROLLOUTS, max_bytes: int = BATCH_BYTES
) -> Iterator[bytes]:
    """Yield JSON lists of requests, in order; one that is too large by itself is sent alone. Raises ``TaskError``."""
    batch: list[bytes] = []
    filled = 0
    for request in requests:
        body = request.to_json().encode("ascii")
        if batch and (len(batch) == max_rollouts or filled + len(body) > max_bytes):
            yield b"[" + b",".join(batch) + b"]"
            batch, filled = [], 0
        batch.append(body)
        filled += len(body) + 1
    if batch:
        yield b"[" + b",".join(batch) + b"]"


def _path_part(name: str) -> str:
    """Return an id as part of an address. Raises ``NotFoundError`` for what has not the form of an id."""
    if _ID.fullmatch(name) is None:
        raise NotFoundError(f"'{name[:80]}' is no id.", "Ids are letters, digits and . _ : - (at most 128).")
    return name


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode("ascii")


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
