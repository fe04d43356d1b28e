"""Submit rollouts, look at them, cancel them."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field, TypeAdapter
from starlette.responses import HTMLResponse, JSONResponse, Response

from prorl_gym.api import contract, examples
from prorl_gym.api.answers import Refusal
from prorl_gym.api.body import parse_body, read_body
from prorl_gym.api.guard import HTML_HEADERS
from prorl_gym.api.routes import GroupQuery, RolloutPath, RunQuery
from prorl_gym.api.schema import (
    MAX_BATCH,
    MAX_CURSOR,
    AcceptedAnswer,
    CancelAnswer,
    CancelBody,
    ListAnswer,
    RequestAnswer,
    ResultAnswer,
    Submission,
)
from prorl_gym.api.serving import Serving
from prorl_gym.errors import NotFoundError
from prorl_gym.pages.rollout import render_rollout
from prorl_gym.rollout.encoding import encode_request, encode_rollout

LONGEST_WAIT = 60.0
"""Seconds that one request may wait for a result."""

_RETRY_AFTER = 5

_ONE = TypeAdapter(Submission)
_MANY = TypeAdapter[list[Submission]](Annotated[list[Submission], Field(max_length=MAX_BATCH)])
_CANCEL = TypeAdapter(CancelBody)
_LIST = TypeAdapter(ListAnswer)


def add(routes: APIRouter, serving: Serving) -> None:
    """Add the routes."""
    service, limits = serving.service, serving.limits

    @routes.post(
        "/v1/rollouts",
        tags=["rollouts"],
        summary="Submit one rollout, or a list, all or nothing",
        response_model=AcceptedAnswer,
        responses=contract.answers(
            examples.ACCEPTED, (*contract.GUARDED, *contract.WITH_BODY, 409, 429, 503), "All are on the disk."
        ),
        openapi_extra=contract.body(Submission, examples.SUBMISSIONS, many=True),
    )
    async def submit(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The answer means that all are on the disk: a crash cannot lose them.

        Sending the same rollout again is harmless (`duplicate` is true then); another body for a known id is a
        conflict, and nothing of the list is taken.
        """
        if service.pending >= limits.max_pending:
            raise Refusal(429, f"{service.pending} rollouts are pending already.", "Send it again later.", _RETRY_AFTER)
        body = await read_body(request, limits.max_body_bytes)
        batch = parse_body(body, _MANY) if body.lstrip().startswith(b"[") else [parse_body(body, _ONE)]
        accepted = await service.submit(batch)
        return JSONResponse({"accepted": [answer.model_dump() for answer in accepted]})

    @routes.get(
        "/v1/rollouts",
        tags=["rollouts"],
        summary="List finished rollouts, newest first",
        response_model=ListAnswer,
        responses=contract.answers(examples.LISTED, (*contract.GUARDED, 422, 503), "A page of them."),
    )
    async def listed(  # pyright: ignore[reportUnusedFunction]
        run: RunQuery = None,
        group: GroupQuery = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="The most to return.")] = 100,
        before: Annotated[int, Query(ge=0, le=MAX_CURSOR, description="Only before this cursor; 0: from now.")] = 0,
    ) -> Response:
        """Without their tokens and messages, also those whose records are not kept any more."""
        groups = None if group is None else [group]
        found = await service.members(run, groups=groups, after=before, limit=limit, newest_first=True)
        answer = ListAnswer(rollouts=found, before=found[-1].cursor if len(found) == limit else None)
        return Response(_LIST.dump_json(answer), media_type="application/json")

    @routes.get(
        "/v1/rollouts/{rollout_id}",
        tags=["rollouts"],
        summary="Get the record of a rollout",
        response_model=ResultAnswer,
        responses=contract.answers(
            examples.RESULT, (*contract.GUARDED, 404, 410, 422, 503), "The record, or null while there is none."
        ),
    )
    async def result(  # pyright: ignore[reportUnusedFunction]
        rollout_id: RolloutPath,
        wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait for it.", examples=[0])] = 0.0,
    ) -> Response:
        """With `wait` the answer comes as soon as the rollout ends, or with null after so many seconds."""
        rollout = await service.result(rollout_id, wait)
        record = "null" if rollout is None else encode_rollout(rollout)
        return Response(f'{{"rollout":{record}}}', media_type="application/json")

    @routes.get(
        "/v1/rollouts/{rollout_id}/request",
        tags=["rollouts"],
        summary="Get what was submitted",
        response_model=RequestAnswer,
        responses=contract.answers({"request": examples.SUBMISSION}, (*contract.GUARDED, 404, 410, 422, 500, 503)),
    )
    async def request_of(rollout_id: RolloutPath) -> Response:  # pyright: ignore[reportUnusedFunction]
        """With its task, which may hold the gold answer. What is needed to make the same rollout again."""
        request = encode_request(await service.request(rollout_id))  # a task may hold half a surrogate pair
        return Response(f'{{"request":{request}}}', media_type="application/json")

    @routes.get(
        "/v1/rollouts/{rollout_id}/page",
        tags=["rollouts"],
        summary="Get a page about a rollout",
        response_class=HTMLResponse,
        responses=contract.text(
            "text/html", "<!doctype html>...", (*contract.GUARDED, 404, 410, 422, 503), "One file of HTML."
        ),
    )
    async def page(rollout_id: RolloutPath) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Turns, tool calls, observations and tokens, for people. The page needs nothing else and may be kept."""
        rollout = await service.result(rollout_id)
        if rollout is None:
            raise NotFoundError(f"rollout {rollout_id} has no record yet.", "Look again when it is finished.")
        html = await asyncio.to_thread(render_rollout, rollout, serving.decode)
        return HTMLResponse(html, headers=HTML_HEADERS)

    @routes.post(
        "/v1/cancel",
        tags=["rollouts"],
        summary="Cancel by id, group or run",
        response_model=CancelAnswer,
        responses=contract.answers(examples.CANCELLED, (*contract.GUARDED, *contract.WITH_BODY, 503)),
        openapi_extra=contract.body(CancelBody, examples.CANCEL),
    )
    async def cancel(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Engine call, processes, sandbox and lease all end. Each rollout still gets its one record.

        The answer lists what this stopped: each ends as cancelled, without a reward, also over a crash. Unknown and
        finished ids are ignored. A 503 says that nothing was cancelled, since it could not be written down.
        """
        body = parse_body(await read_body(request, limits.max_body_bytes), _CANCEL)
        cancelled = await service.cancel(body.rollouts, groups=body.groups, runs=body.runs)
        return JSONResponse({"cancelled": cancelled})
