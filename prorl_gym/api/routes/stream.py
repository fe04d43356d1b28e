"""Read records as they finish, and say that they were received."""

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import TypeAdapter
from starlette.responses import JSONResponse, Response, StreamingResponse

from prorl_gym.api import contract, examples
from prorl_gym.api.body import parse_body, read_body
from prorl_gym.api.routes import RunQuery
from prorl_gym.api.schema import MAX_CURSOR, AckAnswer, AckBody, StreamLine
from prorl_gym.api.serving import Serving
from prorl_gym.rollout.protocol import Delivery
from prorl_gym.rollout.service import RolloutService

HEARTBEAT = 15.0
"""Seconds without a record after which a stream sends an empty line, so that both ends notice a dead connection."""

_ACK = TypeAdapter(AckBody)


def add(routes: APIRouter, serving: Serving) -> None:
    """Add the routes."""
    service, limits = serving.service, serving.limits

    @routes.get(
        "/v1/stream",
        tags=["records"],
        summary="Stream records as they finish",
        response_class=StreamingResponse,
        responses=contract.streamed("application/x-ndjson", examples.STREAM, StreamLine, (*contract.GUARDED, 422, 503)),
    )
    async def stream(  # pyright: ignore[reportUnusedFunction]
        run: RunQuery = None,
        cursor: Annotated[
            int, Query(ge=0, le=MAX_CURSOR, description="That of the last record seen; 0: from the first.")
        ] = 0,
        follow: Annotated[bool, Query(description="Wait for more; otherwise end with the last one there is.")] = True,
        ack: Annotated[
            bool, Query(description="All records up to `cursor` were received and need not be kept.")
        ] = False,
    ) -> Response:
        """Each line is `{"cursor", "stale", "rollout"}`; each record comes once, in the order of writing.

        A record that is damaged on the disk stops nothing: its line has `damaged` and a stand-in without a reward.

        Resume after the last cursor seen. An empty line says that the service is alive. The stream ends when the
        service stops. A reader that does not read costs nobody else anything.
        """
        if ack and cursor:
            await service.acknowledge(run, cursor)
        return StreamingResponse(_chunks(service, run, cursor, follow=follow), media_type="application/x-ndjson")

    @routes.post(
        "/v1/ack",
        tags=["records"],
        summary="Acknowledge records",
        response_model=AckAnswer,
        responses=contract.answers(examples.RELEASED, (*contract.GUARDED, *contract.WITH_BODY, 503)),
        openapi_extra=contract.body(AckBody, examples.ACK),
    )
    async def acknowledge(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Records up to this cursor were received. They need not be kept, and their space is used again."""
        body = parse_body(await read_body(request, limits.max_body_bytes), _ACK)
        return JSONResponse({"released": await service.acknowledge(body.run, body.cursor)})


async def _chunks(
    service: RolloutService, run: str | None, cursor: int, *, follow: bool
) -> AsyncGenerator[bytes, None]:
    """Turn records into lines, as many at once as there are, with an empty line when there is nothing for a while.

    What a reader does not take stays in the ledger: no more than one page waits here for it.
    """
    while True:
        page = await service.read(run, cursor, HEARTBEAT if follow else 0.0)
        if page:
            stale = await _stale(service, run, page)
            yield "".join(_line(delivery, delivery.cursor in stale) for delivery in page).encode()
            cursor = page[-1].cursor
        elif not follow or service.refusing:
            return
        else:
            yield b"\n"


def _line(delivery: Delivery, stale: bool) -> str:
    damaged = ',"damaged":true' if delivery.damaged else ""
    marks = f'"stale":{"true" if stale else "false"}{damaged}'
    return f'{{"cursor":{delivery.cursor},{marks},"rollout":{delivery.record}}}\n'


async def _stale(service: RolloutService, run: str | None, page: Sequence[Delivery]) -> set[int]:
    """Return the cursors of those whose groups are further behind the policy than their run's demand allows."""
    await service.recovered()
    demands = service.demands()
    bounded = demands.values() if run is None else [demands[run]] if run in demands else []
    if all(demand.max_staleness is None for demand in bounded):
        return set()
    stale: set[int] = set()
    after, last = page[0].cursor - 1, page[-1].cursor
    while after < last:
        members = await service.members(run, after=after, limit=2 * len(page))
        stale.update(member.cursor for member in members if service.is_stale(member))
        after = members[-1].cursor if members else last
    return stale
