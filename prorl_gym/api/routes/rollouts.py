"""Submit rollouts, look them up, cancel them, and read their records as they finish."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field, TypeAdapter
from starlette.responses import HTMLResponse, Response, StreamingResponse

from prorl_gym.api import openapi_examples as examples
from prorl_gym.api.app_context import AppContext
from prorl_gym.api.http.error_responses import ApiError
from prorl_gym.api.http.json_bodies import json_response, parse_json, read_json
from prorl_gym.api.http.middleware import HTML_HEADERS
from prorl_gym.api.http.openapi import JsonBody, describe
from prorl_gym.api.policy_control import PolicyControllers
from prorl_gym.api.routes import IDENTIFIER, OffsetQuery, RolloutPath, RunQuery, WantedRollouts
from prorl_gym.client.wire_models import (
    MAX_BATCH,
    MAX_CURSOR,
    AckBody,
    AckResponse,
    CancelBody,
    CancelResponse,
    DeliveredRecord,
    FirstPrompt,
    FirstPromptBody,
    PauseNotice,
    RolloutListResponse,
    RolloutResponse,
    RolloutSubmission,
    SubmitResponse,
    SubmittedRequestResponse,
    Unacknowledged,
)
from prorl_gym.errors import NotFoundError
from prorl_gym.pages.rollout_page import render_comparison, render_rollout
from prorl_gym.records import Rollout
from prorl_gym.rollout.ledger.encoding import encode_rollout
from prorl_gym.rollout.protocol import Delivery, ListPage, RolloutState, SortColumn
from prorl_gym.rollout.service import RolloutService

MAX_WAIT_SECONDS = 60.0
"""Seconds that one request may wait for a result."""

HEARTBEAT_SECONDS = 15.0
"""Seconds without a record after which a stream sends an empty line, so that both ends notice a dead connection."""

_RETRY_SECONDS = 5

_ONE = TypeAdapter(RolloutSubmission)
_MANY = TypeAdapter[list[RolloutSubmission]](Annotated[list[RolloutSubmission], Field(max_length=MAX_BATCH)])
_CANCEL = TypeAdapter(CancelBody)
_ACK = TypeAdapter(AckBody)
_FIRST_PROMPT = TypeAdapter(FirstPromptBody)


def add_routes(routes: APIRouter, context: AppContext) -> None:
    """Add the routes."""
    service = context.service

    @routes.post(
        "/v1/rollouts",
        **describe(
            "rollouts",
            "Submit one rollout, or a list, all or nothing",
            examples.ACCEPTED,
            errors=(409, 429, 503),
            model=SubmitResponse,
            description="All are on the disk.",
            body=JsonBody(RolloutSubmission, examples.SUBMISSIONS, is_list_allowed=True),
        ),
    )
    async def submit(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """When the answer comes, all are on the disk: a crash cannot lose them.

        Submitting the same rollout again is harmless (`duplicate` is then true). Another body for a known id is a
        conflict, and nothing in the list is accepted.
        """
        if service.pending >= context.max_pending:
            raise ApiError(
                429, f"{service.pending} rollouts are pending already.", "Send it again later.", _RETRY_SECONDS
            )
        body = await request.body()
        batch = parse_json(body, _MANY) if body.lstrip().startswith(b"[") else [parse_json(body, _ONE)]
        return json_response(SubmitResponse(accepted=tuple(await service.submit(batch))))

    @routes.get(
        "/v1/rollouts",
        **describe(
            "rollouts",
            "List rollouts, finished ones newest first",
            examples.ROLLOUT_LIST,
            errors=(422, 503),
            model=RolloutListResponse,
            description="A page of rollouts.",
        ),
    )
    async def listed(  # pyright: ignore[reportUnusedFunction]
        wanted: WantedRollouts,
        state: Annotated[RolloutState, Query(description="Which rollouts to list.")] = "finished",
        sort: Annotated[SortColumn, Query(description="Column to sort by; `finished`: by the cursor.")] = "finished",
        descending: Annotated[bool, Query(description="Largest or newest first.")] = True,
        limit: Annotated[int, Query(ge=1, le=1000, description="Most rollouts to return.")] = 100,
        offset: OffsetQuery = 0,
        before: Annotated[
            int,
            Query(
                ge=0,
                le=MAX_CURSOR,
                description="Only records before this cursor; 0: the newest. For the default order only.",
            ),
        ] = 0,
    ) -> Response:
        """Without tokens and messages. Includes rollouts whose records have been deleted.

        Pending rollouts sort by id, run, environment, problem or, with `took`, by their age.
        """
        if before and (sort, descending) != ("finished", True):
            raise ApiError(422, "'before' is for the default order only.", "Use 'offset' with any other order.")
        page = ListPage(sort, descending, before, offset, limit)
        return json_response(await service.list_rollouts(wanted, state, page))

    @routes.get(
        "/v1/rollouts/{rollout_id}",
        **describe(
            "rollouts",
            "Get the record of a rollout",
            examples.ROLLOUT_RESPONSE,
            errors=(404, 410, 422, 503),
            model=RolloutResponse,
            description="The record, or null while there is none.",
        ),
    )
    async def result(  # pyright: ignore[reportUnusedFunction]
        rollout_id: RolloutPath,
        wait: Annotated[
            float, Query(ge=0, le=MAX_WAIT_SECONDS, description="Seconds to wait for the record.", examples=[0])
        ] = 0.0,
    ) -> Response:
        """With `wait`, the answer comes as soon as the rollout ends, or is null after that many seconds."""
        rollout = await service.result(rollout_id, wait)
        record = "null" if rollout is None else encode_rollout(rollout)
        return Response(f'{{"rollout":{record}}}', media_type="application/json")

    @routes.get(
        "/v1/rollouts/{rollout_id}/request",
        **describe(
            "rollouts",
            "Get what was submitted",
            {"request": examples.SUBMISSION},
            errors=(404, 410, 422, 503),
            model=SubmittedRequestResponse,
        ),
    )
    async def request_of(rollout_id: RolloutPath) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Everything needed to run the rollout again. The task may contain the gold answer."""
        request = (await service.get_request(rollout_id)).to_json(canonical=True)
        return Response(f'{{"request":{request}}}', media_type="application/json")

    @routes.get(
        "/v1/rollouts/{rollout_id}/page",
        response_class=HTMLResponse,
        **describe(
            "rollouts",
            "Get a page about a rollout",
            "<!doctype html>...",
            errors=(404, 410, 422, 503),
            description="One HTML file.",
            media_type="text/html",
        ),
    )
    async def page(  # pyright: ignore[reportUnusedFunction]
        rollout_id: RolloutPath,
        beside: Annotated[
            str | None, Query(pattern=IDENTIFIER, description="Another rollout, to compare with.", examples=["a8"])
        ] = None,
    ) -> Response:
        """Turns, tool calls, observations and tokens, for people. The page is self-contained."""
        rollouts = [await _finished(service, name) for name in (rollout_id, beside) if name is not None]
        if beside is None:
            html = await asyncio.to_thread(render_rollout, rollouts[0], context.decode)
        else:
            html = await asyncio.to_thread(render_comparison, rollouts, context.decode)
        return HTMLResponse(html, headers=HTML_HEADERS)

    @routes.post(
        "/v1/cancel",
        **describe(
            "rollouts",
            "Cancel by id, group or run",
            examples.CANCELLED,
            errors=(503,),
            model=CancelResponse,
            body=JsonBody(CancelBody, examples.CANCEL),
        ),
    )
    async def cancel(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Ends the engine calls, processes, sandboxes and leases. Each rollout still gets its one record.

        The answer lists the cancelled rollouts: each ends without a reward, even if the service crashes. Unknown and
        finished ids are ignored. After a 503 nothing was cancelled, since it could not be written to the disk.
        """
        body = await read_json(request, _CANCEL)
        cancelled = await service.cancel(body.rollouts, groups=body.groups, runs=body.runs, reason=body.reason)
        return json_response(CancelResponse(cancelled=tuple(cancelled)))

    @routes.get(
        "/v1/stream",
        response_class=StreamingResponse,
        **describe(
            "records",
            "Stream records as they finish",
            examples.STREAM,
            errors=(422, 503),
            description="Lines of JSON.",
            media_type="application/x-ndjson",
            lines_of=(DeliveredRecord, PauseNotice),
        ),
    )
    async def stream(  # pyright: ignore[reportUnusedFunction]
        run: RunQuery = None,
        cursor: Annotated[
            int, Query(ge=0, le=MAX_CURSOR, description="Cursor of the last record seen; 0: from the first.")
        ] = 0,
        follow: Annotated[
            bool, Query(description="Wait for further records; otherwise end after the last one.")
        ] = True,
        ack: Annotated[bool, Query(description="Acknowledge all records up to `cursor`.")] = False,
    ) -> Response:
        """Each line is `{"cursor", "stale", "rollout"}`; each record comes once, in the order of writing.

        A record that is damaged on the disk does not end the stream: its line has `damaged` and a substitute without a
        reward.

        Resume after the last cursor seen. An empty line shows that the service is alive. The stream ends when the
        service stops. A slow reader does not slow down others.

        A line with `paused` instead of `rollout` says once, after 15 s without a record, that a pool of engines is
        paused: agents that call it wait until it is resumed.
        """
        if ack and cursor:
            await service.acknowledge(run, cursor)
        lines = _stream_lines(service, context.policies, run, cursor, follow=follow)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    @routes.post(
        "/v1/ack",
        **describe(
            "records",
            "Acknowledge records",
            examples.RELEASED,
            errors=(503,),
            model=AckResponse,
            body=JsonBody(AckBody, examples.ACK),
        ),
    )
    async def acknowledge(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Releases records: those up to a cursor, or those of some rollouts. Their space is reused."""
        body = await read_json(request, _ACK)
        released = await service.acknowledge(body.run, body.cursor)
        return json_response(AckResponse(released=released + await service.acknowledge_rollouts(body.rollouts)))

    @routes.get(
        "/v1/unacknowledged",
        **describe(
            "records",
            "List rollouts whose records were not acknowledged",
            examples.UNACKNOWLEDGED,
            errors=(422, 503),
            model=Unacknowledged,
        ),
    )
    async def unacknowledged(run: RunQuery = None) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Finished or not: what a trainer that lost its own state has to fetch or to expect."""
        return json_response(await service.unacknowledged(run))

    @routes.post(
        "/v1/first_prompt",
        **describe(
            "rollouts",
            "Render the first prompt of a row",
            examples.FIRST_PROMPT,
            model=FirstPrompt,
            body=JsonBody(FirstPromptBody, examples.FIRST_PROMPT_BODY),
        ),
    )
    async def first_prompt(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """For trainers that group rows by their prompts: a row whose rollout never ran has no other prompt."""
        body = await read_json(request, _FIRST_PROMPT)
        return json_response(context.render_prompt(body))


async def _finished(service: RolloutService, rollout_id: str) -> Rollout:
    rollout = await service.result(rollout_id)
    if rollout is None:
        raise NotFoundError(f"rollout {rollout_id} has no record yet.", "Look again when it is finished.")
    return rollout


async def _stream_lines(
    service: RolloutService, policies: PolicyControllers, run: str | None, cursor: int, *, follow: bool
) -> AsyncGenerator[bytes, None]:
    """Yield pages of records as lines; after ``HEARTBEAT_SECONDS`` without one, news of pauses and an empty line.

    Unread records stay in the ledger: at most one page is held here for a slow reader.
    """
    reported: set[tuple[str, float]] = set()
    while True:
        page = await service.read_page(run, cursor, HEARTBEAT_SECONDS if follow else 0.0)
        if page:
            stale = await _stale_cursors(service, run, page)
            yield "".join(_line(delivery, delivery.cursor in stale) for delivery in page).encode()
            cursor = page[-1].cursor
        elif not follow or service.is_shutting_down:
            return
        else:
            pauses = {(notice.paused, notice.since): notice for notice in policies.pause_notices()}
            news = [notice for pause, notice in pauses.items() if pause not in reported]
            reported = set(pauses)
            yield "".join(f"{notice.model_dump_json()}\n" for notice in news).encode() + b"\n"


def _line(delivery: Delivery, stale: bool) -> str:
    damaged = ',"damaged":true' if delivery.damage else ""
    marks = f'"stale":{"true" if stale else "false"}{damaged}'
    return f'{{"cursor":{delivery.cursor},{marks},"rollout":{delivery.record}}}\n'


async def _stale_cursors(service: RolloutService, run: str | None, page: Sequence[Delivery]) -> set[int]:
    """Return the cursors of those whose groups are further behind the policy than their run's demand allows."""
    demands = service.demands()
    bounded = demands.values() if run is None else [demands[run]] if run in demands else []
    if all(demand.max_staleness is None for demand in bounded):
        return set()
    stale: set[int] = set()
    after, last = page[0].cursor - 1, page[-1].cursor
    while after < last:
        members = await service.summaries(run, after=after, limit=2 * len(page))
        stale.update(member.cursor for member in members if service.is_stale(member))
        after = members[-1].cursor if members else last
    return stale
