# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""Connects an agent to the rollout service: submits in batches, streams records, acknowledges.

An agent keeps one connection for each kind of call and one for each run's stream, however many rows it has: one per row
would cost a descriptor on both sides, and Gym's own client has 1,024 for one host. Requests that come during a
submission form the next one, and a submission is retried until the service has room. A stream that broke resumes after
``GET /v1/unacknowledged``, which lists what has ended and what the service still knows. A record is acknowledged soon
after Gym has the answer, so that after a restart the same list has every rollout that was accepted and not delivered.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from prorl_gym.backoff import backoff_delay
from prorl_gym.client import Client, ServiceError, UnacknowledgedRollout
from prorl_gym.errors import CancelReason, ConflictError, FailureKind, NotFoundError, ProrlError, TaskError
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.trainers.gym_result import Placeholder

_LOG = logging.getLogger(__name__)

SERVICE_PATH = "/service"
"""Where the rollout server mounts the routes of its service."""

_BATCH_REQUESTS = 512
"""Requests of one submission."""

_BATCH_IDS = 4096
"""Ids of one cancel or acknowledgement."""

ACKNOWLEDGE_SECONDS = 0.1
"""Seconds for which acknowledgements are collected: each call syncs the service's disk twice, and rows wait for it. An
agent that is killed meanwhile counts these rows as not delivered."""

CLOSE_SECONDS = 1.0
"""Longest time in seconds to send the last acknowledgements: the service may have stopped first."""

_RELEASE_SECONDS = 1.0
"""Seconds for which records of abandoned rollouts are collected before they are acknowledged: each call is a commit."""

_FETCHES = 16
"""Records that are fetched by id at once."""

FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 5.0
"""Seconds before a stream is opened again; doubled after each failure."""

ItemT = TypeVar("ItemT")


class _Batcher(Generic[ItemT]):
    """Sends items in batches of at most ``size``: items that are added during one batch form the next ones.

    ``send`` must not raise. The first batch waits ``delay`` seconds, to collect more items.
    """

    def __init__(self, send: Callable[[list[ItemT]], Awaitable[None]], size: int, delay: float = 0.0) -> None:
        self._send = send
        self._size = size
        self._delay = delay
        self._items: list[ItemT] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, items: Iterable[ItemT]) -> None:
        self._items += items
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self.send_all(self._delay))

    async def send_all(self, delay: float = 0.0) -> None:
        await asyncio.sleep(delay)
        while self._items:
            batch = self._items[: self._size]
            await self._send(batch)
            del self._items[: len(batch)]

    async def close(self) -> None:
        """Stop sending; a batch that was under way is among what is left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


class ServiceConnection:
    """Connections to one rollout service. Needs one event loop; ``close`` at the end.

    Gym's own servers take any token. The stream of ``run_id`` is opened first. ``on_listed`` gets all rollouts of the
    service that are not acknowledged, each time they are listed; ``on_finished`` the id of each rollout that ended.
    """

    def __init__(
        self,
        url: str,
        token: str,
        run_id: str,
        on_listed: Callable[[Sequence[UnacknowledgedRollout]], None],
        on_finished: Callable[[str], None],
    ) -> None:
        # Calls are retried without end, streams by ``_follow``.
        self._client = Client(url, token=token, retry_seconds=math.inf)
        self._stream_client = Client(url, token=token, retry_seconds=0.0)
        self._run_id = run_id
        self._on_listed = on_listed
        self._on_finished = on_finished
        self._listed = asyncio.Event()
        self._streams: dict[str, asyncio.Task[None]] = {}
        """By run."""
        self._records: dict[str, asyncio.Future[Rollout]] = {}
        """Expected records, by rollout id."""
        self._submissions: dict[str, asyncio.Future[None]] = {}
        """Requests that are not accepted yet, by rollout id."""
        self._abandoned: set[str] = set()
        """Cancelled rollouts whose records are acknowledged when they come."""
        self._fetch_slots = asyncio.Semaphore(_FETCHES)
        self._fetches: set[asyncio.Task[None]] = set()
        self._requests = _Batcher(self._submit, _BATCH_REQUESTS)
        self._cancels = _Batcher(self._cancel, _BATCH_IDS)
        self._acknowledgements = _Batcher(self._acknowledge, _BATCH_IDS, ACKNOWLEDGE_SECONDS)
        self._releases = _Batcher(self._acknowledge, _BATCH_IDS, _RELEASE_SECONDS)

    async def wait_listed(self) -> None:
        """Wait until the service has listed what an earlier process left; the first call connects."""
        self._open_stream(self._run_id)
        await self._listed.wait()

    def expect_record(self, rollout_id: str, run_id: str) -> "asyncio.Future[Rollout]":
        """Return the future of a record. Call it before the request is submitted, and ``drop_record`` at the end.

        The future raises ``NotFoundError`` when the service does not know the rollout any more.
        """
        self._open_stream(run_id)
        self._records[rollout_id] = record = asyncio.get_running_loop().create_future()
        return record

    def drop_record(self, rollout_id: str) -> None:
        record = self._records.pop(rollout_id, None)
        if record is not None:
            record.cancel()

    def submit(self, request: RolloutRequest) -> "asyncio.Future[None]":
        """Submit a request; return a future that is done when it is accepted.

        The future raises ``TaskError`` for a bad request, another ``ProrlError`` when the service refuses.
        """
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        accepted.add_done_callback(_mark_retrieved)  # its caller may have left
        self._submissions[request.rollout_id] = accepted
        self._requests.add([request])
        return accepted

    def fetch_record(self, rollout_id: str) -> None:
        """Fetch the record of a rollout that was accepted before, for the future of ``expect_record``."""
        task = asyncio.get_running_loop().create_task(self._fetch(rollout_id))
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)

    async def render_prompt(self, prompt: Mapping[str, Any]) -> Placeholder:
        """Return the first prompt of a row's ``responses_create_params``.

        Raises ``ProrlError`` if it cannot be rendered.
        """
        found = await self._stream_client.first_prompt(prompt.get("input") or [], prompt.get("tools") or [])
        return Placeholder(found.prompt_token_ids, found.terminator_id)

    def acknowledge(self, rollout_ids: Iterable[str]) -> None:
        """Acknowledge records, in the background."""
        self._acknowledgements.add(rollout_ids)

    def cancel(self, rollout_ids: Iterable[str], reason: CancelReason) -> None:
        """Cancel rollouts, in the background; one that is not accepted yet is cancelled when it is."""
        for rollout_id in rollout_ids:
            accepted = self._submissions.get(rollout_id)
            if accepted is None:
                self._cancels.add([(rollout_id, reason)])
            else:
                accepted.add_done_callback(lambda _, rollout_id=rollout_id: self.cancel([rollout_id], reason))

    def abandon(self, rollout_id: str) -> None:
        """Cancel a rollout whose record will not be used."""
        self._abandoned.add(rollout_id)
        self.cancel([rollout_id], CancelReason.DISCONNECTED)

    async def close(self) -> None:
        tasks = {*self._streams.values(), *self._fetches}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for batcher in (self._requests, self._cancels, self._acknowledgements, self._releases):
            await batcher.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._acknowledgements.send_all()
        await self._client.close()
        await self._stream_client.close()

    # --- streams ----------------------------------------------------------------------------------------------------

    def _open_stream(self, run_id: str) -> None:
        if run_id not in self._streams:
            self._streams[run_id] = asyncio.get_running_loop().create_task(self._follow(run_id))

    async def _follow(self, run_id: str) -> None:
        failures = 0
        while True:
            try:
                stream = self._stream_client.stream(run_id, await self._list_unacknowledged())
                failures = 0
                while True:
                    delivered = await stream.read_next()
                    rollout_id = delivered.rollout.rollout_id
                    damaged = ServiceError(f"rollout {rollout_id}: its record is damaged.")
                    self._resolve(rollout_id, damaged if delivered.damaged else delivered.rollout)
                    self._handle_finished(rollout_id)
            except ProrlError as error:  # Gym may be starting its servers, or one of them again
                _LOG.warning("no stream of run %s: %s", run_id, error)
            await asyncio.sleep(backoff_delay(failures, first=FIRST_BACKOFF_SECONDS, longest=MAX_BACKOFF_SECONDS))
            failures += 1

    async def _list_unacknowledged(self) -> int:
        """Process what is not acknowledged; return the cursor from which streams go on."""
        accepted = self._records.keys() - self._submissions.keys()
        found = await self._stream_client.unacknowledged()
        for rollout in found.rollouts:
            if rollout.finished and rollout.rollout_id in self._records:
                self.fetch_record(rollout.rollout_id)
            elif rollout.finished:
                self._handle_finished(rollout.rollout_id)
        for rollout_id in accepted - {rollout.rollout_id for rollout in found.rollouts}:
            self._resolve(rollout_id, NotFoundError(f"rollout {rollout_id} was lost with the service's ledger."))
        self._on_listed(found.rollouts)
        self._listed.set()
        return found.cursor

    def _handle_finished(self, rollout_id: str) -> None:
        self._on_finished(rollout_id)
        if rollout_id in self._abandoned:
            self._abandoned.discard(rollout_id)
            self._releases.add([rollout_id])

    async def _fetch(self, rollout_id: str) -> None:
        async with self._fetch_slots:
            try:
                rollout = await self._client.poll_result(rollout_id)
            except ProrlError as error:
                self._resolve(rollout_id, error)
            else:
                if rollout is not None:
                    self._resolve(rollout_id, rollout)

    def _resolve(self, rollout_id: str, found: Rollout | ProrlError) -> None:
        record = self._records.get(rollout_id)
        if record is None or record.done():
            return
        if isinstance(found, Rollout):
            record.set_result(found)
        else:
            record.set_exception(found)
            _mark_retrieved(record)

    # --- calls ------------------------------------------------------------------------------------------------------

    async def _submit(self, requests: list[RolloutRequest]) -> None:
        try:
            await self._client.submit(requests)
        except ProrlError as error:
            refusal = error if isinstance(error, TaskError | ConflictError) else None  # of what the requests hold
            if isinstance(error, ServiceError) and error.status in (413, 422):
                refusal = TaskError(FailureKind.BAD_ROW, error.what, error.fix)
            if refusal is not None and len(requests) > 1:
                half = len(requests) // 2
                await self._submit(requests[:half])
                await self._submit(requests[half:])
                return
            for request in requests:
                self._submissions.pop(request.rollout_id).set_exception(refusal or error)
        else:
            for request in requests:
                self._submissions.pop(request.rollout_id).set_result(None)

    async def _cancel(self, cancels: list[tuple[str, CancelReason]]) -> None:
        for reason in {reason for _, reason in cancels}:
            try:
                await self._client.cancel([rollout_id for rollout_id, why in cancels if why is reason], reason=reason)
            except ProrlError as error:
                _LOG.error("rollouts could not be cancelled: %s", error)

    async def _acknowledge(self, rollout_ids: list[str]) -> None:
        try:
            await self._client.acknowledge_rollouts(rollout_ids)
        except ProrlError as error:
            _LOG.error("records could not be acknowledged: %s", error)


def _mark_retrieved(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()
