"""New weights, pauses, and the engines of a pool."""

from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from prorl_gym.api import contract, examples
from prorl_gym.api.body import parse_body, read_body
from prorl_gym.api.routes import PoolQuery
from prorl_gym.api.schema import (
    EngineAnswer,
    EngineBody,
    PauseBody,
    PausedAnswer,
    PolicyAnswer,
    PolicyBody,
    ResumeBody,
    UpdateAnswer,
)
from prorl_gym.api.serving import Serving
from prorl_gym.records import Record

_UPDATE = TypeAdapter(PolicyBody)
_PAUSE = TypeAdapter(PauseBody)
_RESUME = TypeAdapter(ResumeBody)
_ENGINE = TypeAdapter(EngineBody)

_STEERS = (*contract.GUARDED, *contract.WITH_BODY, 404, 409, 503)


def add(routes: APIRouter, serving: Serving) -> None:
    """Add the routes."""
    policies, limits = serving.policies, serving.limits

    async def read(request: Request) -> bytes:
        """Read a body; an empty one means that everything is left at its default."""
        return await read_body(request, limits.max_body_bytes) or b"{}"

    @routes.get(
        "/v1/policy",
        tags=["policy"],
        summary="Get what serves the policy",
        response_model=PolicyAnswer,
        responses=contract.answers(examples.POLICY, (*contract.GUARDED, 404, 422)),
    )
    async def look(pool: PoolQuery = "policy") -> Response:  # pyright: ignore[reportUnusedFunction]
        """Version, engines, whether it is paused, and the tokens to compute a reference for."""
        return _json((await policies.of(pool)).look())

    @routes.put(
        "/v1/policy",
        tags=["policy"],
        summary="Tell that the engines have new weights",
        response_model=UpdateAnswer,
        responses=contract.answers(examples.UPDATED, _STEERS, "Engines serve the new version."),
        openapi_extra=contract.body(PolicyBody, examples.UPDATE),
    )
    async def update(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Labels what is sampled from now on, gets older caches out of the way, lets each engine prove its weights.

        Pause before the weights change and resume after this, unless the engines tell themselves which weights sampled
        which token. An engine that cannot show the new weights serves nothing until it does (`quarantined`). The same
        body again repeats the answer. With `engines` the pool becomes exactly these.
        """
        body = parse_body(await read(request), _UPDATE)
        return _json(await (await policies.of(body.pool)).update(body))

    @routes.post(
        "/v1/policy/pause",
        tags=["policy"],
        summary="Pause the policy",
        response_model=PausedAnswer,
        responses=contract.answers(examples.PAUSED, _STEERS, "No call is on its way any more (but in mode `keep`)."),
        openapi_extra=contract.body(PauseBody, examples.PAUSE, required=False),
    )
    async def pause(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Rollouts wait between two model calls, and none of their deadlines pays for it."""
        body = parse_body(await read(request), _PAUSE)
        return _json(await (await policies.of(body.pool)).pause(body.mode))

    @routes.post(
        "/v1/policy/resume",
        tags=["policy"],
        summary="Let model calls begin again",
        response_model=PausedAnswer,
        responses=contract.answers(examples.RESUMED, _STEERS),
        openapi_extra=contract.body(ResumeBody, examples.RESUME, required=False),
    )
    async def resume(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Without a pause it does nothing."""
        body = parse_body(await read(request), _RESUME)
        return _json(await (await policies.of(body.pool)).resume())

    @routes.post(
        "/v1/engines",
        tags=["policy"],
        summary="Let an engine join",
        response_model=EngineAnswer,
        responses=contract.answers(examples.ENGINE, _STEERS),
        openapi_extra=contract.body(EngineBody, examples.ENGINE_BODY),
    )
    async def add(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """It has to show the weights of this version first, once the policy was updated.

        Only addresses of the service's allow-list are taken. One that is there already keeps its name.
        """
        body = parse_body(await read(request), _ENGINE)
        return _json((await policies.of(body.pool)).add_engine(body.url))

    @routes.delete(
        "/v1/engines/{name}",
        tags=["policy"],
        summary="Let an engine go",
        response_model=EngineAnswer,
        responses=contract.answers(examples.LEAVING, (*contract.GUARDED, 404, 422)),
    )
    async def remove(  # pyright: ignore[reportUnusedFunction]
        name: Annotated[str, Path(max_length=128, description="Of the engine.", examples=["policy-0"])],
        pool: PoolQuery = "policy",
    ) -> Response:
        """It gets no more calls and leaves when those that it has are over; its rollouts go on elsewhere."""
        return _json((await policies.of(pool)).remove_engine(name))


def _json(answer: Record) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")
