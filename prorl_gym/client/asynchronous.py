"""The client for code on an event loop."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from prorl_gym.client.answers import (
    AcceptedAll,
    Anything,
    Asked,
    Cancelled,
    EngineAdded,
    GroupsStatus,
    Listed,
    Looked,
    PauseMode,
    PolicyStatus,
    Released,
    Rollouts,
    StatedDemand,
    Status,
    Submission,
    Updated,
)
from prorl_gym.client.batches import bodies
from prorl_gym.client.groups import GroupStream
from prorl_gym.client.streams import Acknowledger, RecordStream, deliveries
from prorl_gym.client.token import read_token, service_url, token_place
from prorl_gym.client.transport import LONG_POLL, Transport
from prorl_gym.demand import Demand
from prorl_gym.errors import NotFoundError
from prorl_gym.records import Rollout, RolloutRequest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")
"""What ids look like. Another one is unknown, and must not become part of an address."""


class Client:
    """Asynchronous client. Use it as a context manager, on one event loop.

    Every call is repeated when the service is not there, starts again or is busy; that is harmless for all of them.
    None raises anything but the package's own errors (and ``TimeoutError`` where it says so).

    Args:
        url: address of the service; ``$PRORL_GYM_URL``, or the port that it takes by default, when left out.
        token: bearer token; read from the environment or the service's file by default.
        patience: seconds for which one call is repeated; a stream or a wait counts them anew after each success.
        pause: seconds before the first repetition; doubles each time, up to 5.
    """

    def __init__(
        self, url: str | None = None, *, token: str | None = None, patience: float = 60.0, pause: float = 0.2
    ) -> None:
        found = token if token is not None else read_token()
        token_from = "its caller" if token is not None else token_place()
        self._transport = Transport(service_url(url), found, token_from, patience, pause)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._transport.close()

    # --- rollouts ---------------------------------------------------------------------------------------------------

    async def submit(self, requests: RolloutRequest | Sequence[RolloutRequest]) -> list[Submission]:
        """Submit rollouts. When this returns, the service has them on its disk.

        Many are sent in several batches; each is accepted whole or not at all. After an error some batches may have
        been accepted: submitting everything again is harmless.

        Raises:
            ConflictError: an id was submitted before with another body.
            TaskError: a task is not JSON.
            BusyError: the service has no room for more, for longer than this client is patient.
            ServiceError: refused, or not reached.
        """
        batch = [requests] if isinstance(requests, RolloutRequest) else requests
        accepted: list[Submission] = []
        for body in bodies(batch):
            answer = await self._transport.call("POST", "/v1/rollouts", AcceptedAll, body=body)
            accepted += [Submission(one.rollout_id, one.duplicate) for one in answer.accepted]
        return accepted

    async def result(self, rollout_id: str, timeout: float | None = None) -> Rollout:
        """Wait for the terminal record, also over a restart of the service.

        Args:
            rollout_id: of an accepted rollout.
            timeout: seconds; for ever by default.

        Raises:
            TimeoutError: it is not finished yet.
            NotFoundError: never accepted; ``GoneError``: its record was released.
            ServiceError: refused, or not reached.
        """
        async with asyncio.timeout(timeout):
            while True:
                rollout = await self.look(rollout_id, wait=LONG_POLL)
                if rollout is not None:
                    return rollout

    async def look(self, rollout_id: str, wait: float = 0.0) -> Rollout | None:
        """Return the terminal record, or ``None`` when there is none after ``wait`` seconds (at most 60)."""
        path = f"/v1/rollouts/{_part(rollout_id)}"
        return (await self._transport.call("GET", path, Looked, query={"wait": f"{wait:g}"})).rollout

    async def request(self, rollout_id: str) -> RolloutRequest:
        """Return what was submitted under this id, with its task: handle it as the gold answer that it may hold.

        Raises:
            NotFoundError: never accepted; ``GoneError``: it is not kept any more.
            ServiceError: refused, or not reached.
        """
        path = f"/v1/rollouts/{_part(rollout_id)}/request"
        return (await self._transport.call("GET", path, Asked)).request

    async def page(self, rollout_id: str) -> str:
        """Return a page of a finished rollout, token by token, as one HTML file."""
        return (await self._transport.text("GET", f"/v1/rollouts/{_part(rollout_id)}/page")).decode("utf-8", "replace")

    async def rollouts(
        self, run_id: str | None = None, *, group: str | None = None, limit: int = 100, before: int = 0
    ) -> list[Listed]:
        """List finished rollouts without their records, newest first.

        Args:
            run_id: only of this run.
            group: only of this group.
            limit: the most to return.
            before: only those that finished before the one with this cursor, to go on with a list.
        """
        query = {"limit": str(limit), "run": run_id, "group": group, "before": str(before) if before else None}
        answer = await self._transport.call("GET", "/v1/rollouts", Rollouts, query=_given(query))
        return list(answer.rollouts)

    async def cancel(
        self, rollout_ids: Sequence[str] = (), *, groups: Sequence[str] = (), runs: Sequence[str] = ()
    ) -> list[str]:
        """Cancel by id, group or run; return the ids that this stopped. Each still gets its record."""
        body = {"rollouts": list(rollout_ids), "groups": list(groups), "runs": list(runs)}
        return list((await self._transport.call("POST", "/v1/cancel", Cancelled, body=_json(body))).cancelled)

    # --- streams ----------------------------------------------------------------------------------------------------

    def stream(
        self, run_id: str | None = None, cursor: int = 0, *, follow: bool = True, acknowledge: bool = False
    ) -> RecordStream:
        """Yield records as rollouts finish, each once; a broken connection is resumed.

        Args:
            run_id: only of this run.
            cursor: that of the last record seen, to go on after it.
            follow: wait for more; otherwise end with the last record there is.
            acknowledge: tell the service, now and then, that it need not keep what was received: a record counts as
                that when the next one is asked for.
        """
        return RecordStream(
            lambda after: deliveries(self._transport, run_id, after, follow=follow),
            cursor,
            self._acknowledger(run_id, acknowledge),
        )

    def groups_of(
        self, run_id: str, cursor: int = 0, *, used: int = 0, follow: bool = True, acknowledge: bool = False
    ) -> GroupStream:
        """Yield the groups of a run as they become complete; see ``prorl_gym.client.groups`` for when they are.

        To go on after a restart of the trainer, keep ``resume`` and ``cursor`` of the last group that it used:
        ``groups_of(run, resume, used=cursor)`` gives what came after it, and nothing twice.

        Args:
            run_id: the run.
            cursor: go on after this record.
            used: groups that were complete at this cursor are left out.
            follow: wait for more; otherwise end with the last record there is.
            acknowledge: tell the service that it need not keep the records of groups that are over, once the next
                group is asked for.

        Raises (while it is read):
            GroupsDroppedError: the run's demand cancelled groups and nothing else of the run is under way, so that
                no group would come. Asked again, it waits for what is submitted from now on.
        """

        async def replacements() -> int:
            demand = await self.demand(run_id)
            return 0 if demand is None else demand.replace

        async def is_over(seen: int) -> bool:
            newest = await self.rollouts(run_id, limit=1)
            if newest and newest[0].cursor > seen:
                return False  # more is to be read
            states = (await self.groups(run_id)).states
            return not states.get("open", 0) and not states.get("informative", 0)

        records = self.stream(run_id, cursor, follow=follow)
        acknowledger = self._acknowledger(run_id, acknowledge)
        return GroupStream(records, used, replacements, acknowledger, run_id, is_over if follow else None)

    async def acknowledge(self, run_id: str | None, cursor: int) -> int:
        """Tell the service that it need not keep the records of a run (``None``: of all) up to this cursor.

        Returns:
            How many records this released.
        """
        body = _json({"run": run_id, "cursor": cursor})
        return (await self._transport.call("POST", "/v1/ack", Released, body=body)).released

    # --- what a trainer wants ---------------------------------------------------------------------------------------

    async def set_demand(self, run_id: str, demand: Demand) -> GroupsStatus:
        """Say what is still wanted of a run; this replaces what was said before."""
        body = demand.model_dump_json(exclude_unset=True).encode()
        return await self._transport.call("PUT", f"/v1/runs/{_part(run_id)}/demand", GroupsStatus, body=body)

    async def demand(self, run_id: str) -> Demand | None:
        """Return what was said to be wanted of a run; ``None``: everything."""
        try:
            return await self._transport.call("GET", f"/v1/runs/{_part(run_id)}/demand", StatedDemand)
        except NotFoundError:
            return None

    async def clear_demand(self, run_id: str) -> None:
        """Want everything of a run again."""
        await self._transport.call("DELETE", f"/v1/runs/{_part(run_id)}/demand", Anything)

    async def groups(self, run_id: str) -> GroupsStatus:
        """Return how the groups of a run stand."""
        return await self._transport.call("GET", f"/v1/runs/{_part(run_id)}/groups", GroupsStatus)

    # --- policy and engines -----------------------------------------------------------------------------------------

    async def policy(self) -> PolicyStatus:
        """Return the policy's version, and the engines that serve it."""
        return await self._transport.call("GET", "/v1/policy", PolicyStatus)

    async def update_policy(
        self,
        version: int,
        *,
        reference: Sequence[float] | None = None,
        caches_dropped: bool = False,
        engines: Sequence[str] | None = None,
    ) -> Updated:
        """Say that the engines have new weights; the service drops caches, proves it, and labels tokens from now on.

        Args:
            version: of the policy, above the one before.
            reference: the trainer's own log-probs of ``PolicyStatus.probe_ids`` but the first.
            caches_dropped: whoever loaded the weights has dropped the prefix caches.
            engines: addresses of all engines there are from now on; the same as before when left out.

        Raises:
            ServiceError: no engine has the new weights, or the policy was not paused.
        """
        body = {
            "version": version,
            "reference": None if reference is None else list(reference),
            "caches_dropped": caches_dropped,
            "engines": None if engines is None else list(engines),
        }
        return await self._transport.call("PUT", "/v1/policy", Updated, body=_json(_given(body)))

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Let no engine call begin; when this returns none is under way, but in mode ``keep``. Deadlines stop."""
        await self._transport.call("POST", "/v1/policy/pause", Anything, body=_json({"mode": mode}))

    async def resume(self) -> None:
        """Let engine calls begin again."""
        await self._transport.call("POST", "/v1/policy/resume", Anything)

    async def hold(self) -> None:
        """Let no further rollout begin, for maintenance; those under way go on. Ends with the service's restart."""
        await self._transport.call("POST", "/v1/hold", Anything)

    async def release(self) -> None:
        """End a ``hold``."""
        await self._transport.call("POST", "/v1/release", Anything)

    async def add_engine(self, url: str) -> EngineAdded:
        """Register an engine; its address must be on the service's allow-list."""
        return await self._transport.call("POST", "/v1/engines", EngineAdded, body=_json({"url": url}))

    async def remove_engine(self, name: str) -> EngineAdded:
        """Let an engine finish its calls and go."""
        return await self._transport.call("DELETE", f"/v1/engines/{quote(name, safe='')}", EngineAdded)

    async def status(self) -> Status:
        """Return a look at the service."""
        return await self._transport.call("GET", "/v1/status", Status)

    def _acknowledger(self, run_id: str | None, wanted: bool) -> Acknowledger:
        return Acknowledger((lambda seen: self.acknowledge(run_id, seen)) if wanted else None)


def _part(name: str) -> str:
    """Return an id as part of an address.

    Raises:
        NotFoundError: no id looks like that.
    """
    if _NAME.fullmatch(name) is None:
        raise NotFoundError(f"'{name[:80]}' is no id.", "Ids are letters, digits and . _ : - (at most 128).")
    return name


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode("ascii")


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not ``None``."""
    return {name: value for name, value in fields.items() if value is not None}
