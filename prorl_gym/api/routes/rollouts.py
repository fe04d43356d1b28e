"""Submit rollouts, look them up, cancel them, and read their records as they finish."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import Field, TypeAdapter, WrapValidator
from starlette.responses import HTMLResponse, Response, StreamingResponse

from prorl_gym.api.http.error_responses import DISK_RETRY_SECONDS, ApiError
from prorl_gym.api.http.middleware import HTML_HEADERS
from prorl_gym.api.http.openapi import AUTH_ERRORS, errors
from prorl_gym.api.policy_control import PolicyController
from prorl_gym.api.routes import (
    IDENTIFIER,
    Context,
    JsonBody,
    JsonRoute,
    OffsetQuery,
    RolloutPath,
    RunQuery,
    WantedRollouts,
)
from prorl_gym.client.wire_models import (
    MAX_BATCH,
    MAX_CURSOR,
    AckBody,
    AckResponse,
    AnalysisResponse,
    CancelBody,
    CancelResponse,
    DeliveredRecord,
    FirstPrompt,
    FirstPromptBody,
    PauseNotice,
    ProblemsResponse,
    RolloutListResponse,
    RolloutResponse,
    RolloutSubmission,
    SubmitResponse,
    SubmittedRequestResponse,
    Unacknowledged,
)
from prorl_gym.errors import NotFoundError
from prorl_gym.pages.rollout_page import render_rollout
from prorl_gym.records import Rollout
from prorl_gym.rollout.ledger.encoding import encode_rollout
from prorl_gym.rollout.ledger.ledger_config import DamagedLedgerError, LedgerError
from prorl_gym.rollout.protocol import Delivery, ListPage, ProblemOrder, RolloutState, SortColumn
from prorl_gym.rollout.service import RolloutService

_LOG = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 60.0
"""Seconds that one request may wait for a result."""

HEARTBEAT_SECONDS = 15.0
"""Seconds without a record after which a stream sends an empty line, so that both ends notice a dead connection."""

_RETRY_SECONDS = 5

embeddable = APIRouter(route_class=JsonRoute, responses=AUTH_ERRORS | errors(422, 503))
"""Also for a server that embeds the service: they show no task."""
router = APIRouter(tags=["rollouts"], responses=AUTH_ERRORS | errors(404, 410, 422, 503))

_Batch = Annotated[list[RolloutSubmission], Field(max_length=MAX_BATCH)]
_ONE = TypeAdapter(JsonBody[RolloutSubmission])
_MANY = TypeAdapter(JsonBody[_Batch])


def _read_submission(body: bytes, _: object) -> RolloutSubmission | _Batch:
    # A union would name the fields that are wrong in either form.
    return (_MANY if body.lstrip().startswith(b"[") else _ONE).validate_python(body)


async def _require_room(context: Context) -> None:
    pending = context.service.pending
    if pending >= context.max_pending:
        raise ApiError(429, f"{pending} rollouts are pending already.", "Send it again later.", _RETRY_SECONDS)


@embeddable.post(
    "/v1/rollouts",
    tags=["rollouts"],
    summary="Submit one rollout, or a list, all or nothing",
    response_description="All are on the disk.",
    responses=errors(409, 413, 429),
    dependencies=[Depends(_require_room)],
)
async def submit(
    context: Context, body: Annotated[RolloutSubmission | _Batch, WrapValidator(_read_submission)]
) -> SubmitResponse:
    """When the answer comes, all are on the disk: a crash cannot lose them.

    Submitting the same rollout again is harmless (`duplicate` is then true). Another body for a known id is a
    conflict, and nothing in the list is accepted.
    """
    batch = body if isinstance(body, list) else [body]
    return SubmitResponse(accepted=tuple(await context.service.submit(batch)))


@embeddable.get(
    "/v1/rollouts",
    tags=["rollouts"],
    summary="List rollouts, finished ones newest first",
    response_description="A page of rollouts.",
)
async def listed(
    context: Context,
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
) -> RolloutListResponse:
    """Without tokens and messages. Includes rollouts whose records have been deleted.

    Pending rollouts sort by id, run, environment, problem or, with `took`, by their age.
    """
    if before and (sort, descending) != ("finished", True):
        raise ApiError(422, "'before' is for the default order only.", "Use 'offset' with any other order.")
    page = ListPage(sort, descending, before, offset, limit)
    return await context.service.list_rollouts(wanted, state, page)


@embeddable.get(
    "/v1/rollouts/{rollout_id}",
    tags=["rollouts"],
    summary="Get the record of a rollout",
    response_description="The record, or null while there is none.",
    response_model=RolloutResponse,
    responses=errors(404, 410),
)
async def result(
    context: Context,
    rollout_id: RolloutPath,
    wait: Annotated[
        float, Query(ge=0, le=MAX_WAIT_SECONDS, description="Seconds to wait for the record.", examples=[0])
    ] = 0.0,
) -> Response:
    """With `wait`, the answer comes as soon as the rollout ends, or is null after that many seconds."""
    rollout = await context.service.result(rollout_id, wait)
    record = "null" if rollout is None else encode_rollout(rollout)
    return Response(f'{{"rollout":{record}}}', media_type="application/json")


@router.get(
    "/v1/rollouts/{rollout_id}/request", summary="Get what was submitted", response_model=SubmittedRequestResponse
)
async def request_of(context: Context, rollout_id: RolloutPath) -> Response:
    """Everything needed to run the rollout again. The task may contain the gold answer."""
    request = (await context.service.get_request(rollout_id)).to_json(canonical=True)
    return Response(f'{{"request":{request}}}', media_type="application/json")


_PAGE = {
    "description": "One HTML file.",
    "content": {"text/html": {"schema": {"type": "string"}, "example": "<!doctype html>..."}},
}


@router.get(
    "/v1/rollouts/{rollout_id}/page",
    summary="Get a page about a rollout",
    response_class=Response,
    responses={200: _PAGE},
)
async def page(
    context: Context,
    rollout_id: RolloutPath,
    beside: Annotated[
        str | None, Query(pattern=IDENTIFIER, description="Another rollout, to compare with.", examples=["a8"])
    ] = None,
) -> Response:
    """Turns, tool calls, observations and tokens, for people. The page is self-contained."""
    rollouts: list[Rollout] = []
    for name in (rollout_id, *([] if beside is None else [beside])):
        rollout = await context.service.result(name)
        if rollout is None:
            raise NotFoundError(f"rollout {name} has no record yet.", "Look again when it is finished.")
        rollouts.append(rollout)
    html = await asyncio.to_thread(render_rollout, rollouts[0], context.decode, *rollouts[1:])
    return HTMLResponse(html, headers=HTML_HEADERS)


@embeddable.post("/v1/cancel", tags=["rollouts"], summary="Cancel by id, group or run", responses=errors(413))
async def cancel(context: Context, body: JsonBody[CancelBody]) -> CancelResponse:
    """Ends the engine calls, processes, sandboxes and leases. Each rollout still gets its one record.

    The answer lists the cancelled rollouts: each ends without a reward, even if the service crashes. Unknown and
    finished ids are ignored. After a 503 nothing was cancelled, since it could not be written to the disk.
    """
    cancelled = await context.service.cancel(body.rollouts, groups=body.groups, runs=body.runs, reason=body.reason)
    return CancelResponse(cancelled=tuple(cancelled))


_STREAM_EXAMPLE = """{"cursor": 41, "stale": false, "rollout": {"rollout_id": "a7", "...": "..."}}
{"paused": "policy", "since": 1760000000.0, "expires_at": 1760000600.0}
"""
_LINES = {
    "description": "Lines of JSON.",
    "model": DeliveredRecord | PauseNotice,  # of a line: ``DescribedApp`` puts it there
    "content": {"application/x-ndjson": {"example": _STREAM_EXAMPLE}},
}


@embeddable.get(
    "/v1/stream",
    tags=["records"],
    summary="Stream records as they finish",
    response_class=Response,
    responses={200: _LINES},
)
async def stream(
    context: Context,
    run: RunQuery = None,
    cursor: Annotated[
        int, Query(ge=0, le=MAX_CURSOR, description="Cursor of the last record seen; 0: from the first.")
    ] = 0,
    follow: Annotated[bool, Query(description="Wait for further records; otherwise end after the last one.")] = True,
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
        await context.service.ledger.acknowledge(run, cursor)
    lines = _stream_lines(context.service, context.policies, run, cursor, follow=follow)
    return StreamingResponse(lines, media_type="application/x-ndjson")


@embeddable.post("/v1/ack", tags=["records"], summary="Acknowledge records", responses=errors(413))
async def acknowledge(context: Context, body: JsonBody[AckBody]) -> AckResponse:
    """Releases records: those up to a cursor, or those of some rollouts. Their space is reused."""
    released = await context.service.ledger.acknowledge(body.run, body.cursor)
    return AckResponse(released=released + await context.service.ledger.acknowledge_rollouts(body.rollouts))


@embeddable.get("/v1/unacknowledged", tags=["records"], summary="List rollouts whose records were not acknowledged")
async def unacknowledged(context: Context, run: RunQuery = None) -> Unacknowledged:
    """Finished or not: what a trainer that lost its own state has to fetch or to expect."""
    return await context.service.ledger.unacknowledged(run)


@embeddable.post(
    "/v1/first_prompt", tags=["rollouts"], summary="Render the first prompt of a row", responses=errors(413)
)
async def first_prompt(context: Context, body: JsonBody[FirstPromptBody]) -> FirstPrompt:
    """For trainers that group rows by their prompts: a row whose rollout never ran has no other prompt."""
    return context.render_prompt(body)


@router.get("/v1/analysis", summary="Get rewards by policy version, and causes of zeros and failures")
async def analysis(context: Context, wanted: WantedRollouts) -> AnalysisResponse:
    """Over the newest 100,000 finished rollouts of the run, of those that match."""
    return await context.service.ledger.analyze(wanted)


@router.get("/v1/problems", summary="Get rewards by problem")
async def problems(
    context: Context,
    wanted: WantedRollouts,
    order: Annotated[ProblemOrder, Query(description="By the newest record, the mean reward, or the name.")] = "newest",
    limit: Annotated[int, Query(ge=1, le=200, description="Most problems to return.")] = 50,
    offset: OffsetQuery = 0,
) -> ProblemsResponse:
    """One entry per row of a data set, or per group where rows have no name, with the rewards of its rollouts."""
    return await context.service.ledger.list_problems(wanted, order, offset, limit)


async def _stream_lines(
    service: RolloutService, policies: Mapping[str, PolicyController], run: str | None, cursor: int, *, follow: bool
) -> AsyncGenerator[bytes, None]:
    """Yield pages of records as lines; after ``HEARTBEAT_SECONDS`` without one, news of pauses and an empty line.

    Unread records stay in the ledger: at most one page is held here for a slow reader. While the disk fails it waits.
    """
    reported: set[tuple[str, float]] = set()
    while True:
        try:
            page = await service.read_page(run, cursor, HEARTBEAT_SECONDS if follow else 0.0)
            stale = await _stale_cursors(service, run, page) if page else set[int]()
        except DamagedLedgerError:
            raise
        except LedgerError as error:
            if service.is_shutting_down:
                return
            _LOG.debug("a stream waits: %s", error)
            yield b"\n"
            await asyncio.sleep(DISK_RETRY_SECONDS)
            continue
        if page:
            yield "".join(_line(delivery, delivery.cursor in stale) for delivery in page).encode()
            cursor = page[-1].cursor
        elif not follow or service.is_shutting_down:
            return
        else:
            pauses = {
                (name, pause.since): PauseNotice(paused=name, since=pause.since, expires_at=pause.expires_at)
                for name, policy in policies.items()
                if (pause := policy.updater.pause_in_force) is not None
            }
            news = [notice for pause, notice in pauses.items() if pause not in reported]
            reported = set(pauses)
            yield "".join(f"{notice.model_dump_json()}\n" for notice in news).encode() + b"\n"


def _line(delivery: Delivery, stale: bool) -> str:
    damaged = ',"damaged":true' if delivery.damage else ""
    marks = f'"stale":{"true" if stale else "false"}{damaged}'
    return f'{{"cursor":{delivery.cursor},{marks},"rollout":{delivery.record}}}\n'


async def _stale_cursors(service: RolloutService, run: str | None, page: Sequence[Delivery]) -> set[int]:
    """Return the cursors of those whose groups are further behind the policy than their run's demand allows."""
    demands = service.groups.demands()
    bounded = demands.values() if run is None else [demands[run]] if run in demands else []
    if all(demand.max_staleness is None for demand in bounded):
        return set()
    stale: set[int] = set()
    after, last = page[0].cursor - 1, page[-1].cursor
    while after < last:
        members = await service.ledger.summaries(run, after=after, limit=2 * len(page))
        stale.update(member.cursor for member in members if service.groups.is_stale(member))
        after = members[-1].cursor if members else last
    return stale
