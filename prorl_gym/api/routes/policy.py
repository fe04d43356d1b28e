"""New weights, pauses, and the engines of a pool."""

from typing import Annotated

from fastapi import APIRouter, Path

from prorl_gym.api.http.openapi import AUTH_ERRORS, errors
from prorl_gym.api.routes import Context, JsonBody, JsonRoute, PoolQuery
from prorl_gym.client.wire_models import (
    EngineBody,
    EngineRegistration,
    PauseBody,
    PauseResponse,
    PolicyStatus,
    PolicyUpdateBody,
    PolicyUpdateResponse,
    ResumeBody,
)

router = APIRouter(route_class=JsonRoute, tags=["policy"], responses=AUTH_ERRORS | errors(404, 422))


@router.get("/v1/policy", summary="Get the policy's status")
async def look(context: Context, pool: PoolQuery = "policy") -> PolicyStatus:
    """Version, engines, whether it is paused, and the tokens of the weight check."""
    return context.get_policy(pool).policy_status()


@router.put(
    "/v1/policy",
    summary="Report that the engines have new weights",
    response_description="Engines serve the new version.",
    responses=errors(409, 413, 503),
)
async def update(context: Context, body: JsonBody[PolicyUpdateBody]) -> PolicyUpdateResponse:
    """Labels later tokens with the version, drops or bypasses older caches, checks each engine's weights.

    Pause before the weights change and resume after this call, unless the engines report which weights sampled
    which token. An engine that fails the weight check serves no calls until it passes (`quarantined`). Repeating
    the same body repeats the answer. With `engines`, the pool becomes exactly these.

    Versions belong to the pool and only grow: the next one is above that of `GET /v1/policy`, whichever run or step
    it comes from. The first one needs no pause: it says what the engines hold, and may be 0.
    """
    await context.service.wait_until_claimed()
    return await context.get_policy(body.pool).update(body)


@router.post(
    "/v1/policy/pause",
    summary="Pause the policy",
    response_description="No call is running any more (except in mode `keep`).",
    responses=errors(409, 413),
)
async def pause(context: Context, body: JsonBody[PauseBody] = PauseBody()) -> PauseResponse:  # noqa: B008, it is frozen
    """Rollouts wait between two model calls; the wait does not count against their deadlines.

    The pause ends by itself after `expire_seconds`. Send it again to change the mode or to have more time.
    """
    await context.service.wait_until_claimed()
    return await context.get_policy(body.pool).pause(body.mode, body.expire_seconds)


@router.post("/v1/policy/resume", summary="Resume the policy", responses=errors(409, 413))
async def resume(context: Context, body: JsonBody[ResumeBody] = ResumeBody()) -> PauseResponse:  # noqa: B008, it is frozen
    """Does nothing without a pause.

    After a pause without an update, each engine first has to show that its weights are those of before.
    """
    return await context.get_policy(body.pool).resume()


@router.post("/v1/engines", summary="Register an engine", responses=errors(409, 413))
async def add(context: Context, body: JsonBody[EngineBody]) -> EngineRegistration:
    """If the policy was updated before, the engine must pass the weight check of the current version first.

    Only addresses on the service's allow-list are accepted. A registered engine keeps its name.
    """
    return context.get_policy(body.pool).registry.register(body.url)


@router.delete("/v1/engines/{name}", summary="Deregister an engine")
async def remove(
    context: Context,
    name: Annotated[str, Path(max_length=128, description="Name of the engine.", examples=["policy-0"])],
    pool: PoolQuery = "policy",
) -> EngineRegistration:
    """It gets no more calls and is removed when its last call ends; its rollouts continue on other engines."""
    return context.get_policy(pool).registry.deregister(name)
