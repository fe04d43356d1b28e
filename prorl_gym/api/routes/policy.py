"""New weights, pauses, and the engines of a pool."""

from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from prorl_gym.api import openapi_examples as examples
from prorl_gym.api.app_context import AppContext
from prorl_gym.api.http.json_bodies import json_response, read_json
from prorl_gym.api.http.openapi import JsonBody, describe
from prorl_gym.api.routes import PoolQuery
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

_UPDATE = TypeAdapter(PolicyUpdateBody)
_PAUSE = TypeAdapter(PauseBody)
_RESUME = TypeAdapter(ResumeBody)
_ENGINE = TypeAdapter(EngineBody)

_DEFAULTS = b"{}"
"""Replaces an empty body."""


def add_routes(routes: APIRouter, context: AppContext) -> None:
    """Add the routes."""
    policies = context.policies

    @routes.get(
        "/v1/policy",
        **describe("policy", "Get the policy's status", examples.POLICY, errors=(404, 422), model=PolicyStatus),
    )
    async def look(pool: PoolQuery = "policy") -> Response:  # pyright: ignore[reportUnusedFunction]
        """Version, engines, whether it is paused, and the tokens of the weight check."""
        return json_response(policies.get_controller(pool).policy_status())

    @routes.put(
        "/v1/policy",
        **describe(
            "policy",
            "Report that the engines have new weights",
            examples.UPDATED,
            errors=(404, 409, 503),
            model=PolicyUpdateResponse,
            description="Engines serve the new version.",
            body=JsonBody(PolicyUpdateBody, examples.UPDATE),
        ),
    )
    async def update(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Labels later tokens with the version, drops or bypasses older caches, checks each engine's weights.

        Pause before the weights change and resume after this call, unless the engines report which weights sampled
        which token. An engine that fails the weight check serves no calls until it passes (`quarantined`). Repeating
        the same body repeats the answer. With `engines`, the pool becomes exactly these.

        Versions belong to the pool and only grow: the next one is above that of `GET /v1/policy`, whichever run or step
        it comes from. The first one needs no pause: it says what the engines hold, and may be 0.
        """
        body = await read_json(request, _UPDATE, empty=_DEFAULTS)
        await context.service.wait_until_claimed()
        return json_response(await policies.get_controller(body.pool).update(body))

    @routes.post(
        "/v1/policy/pause",
        **describe(
            "policy",
            "Pause the policy",
            examples.PAUSED,
            errors=(404, 409),
            model=PauseResponse,
            description="No call is running any more (except in mode `keep`).",
            body=JsonBody(PauseBody, examples.PAUSE, is_required=False),
        ),
    )
    async def pause(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Rollouts wait between two model calls; the wait does not count against their deadlines.

        The pause ends by itself after `expire_seconds`. Send it again to change the mode or to have more time.
        """
        body = await read_json(request, _PAUSE, empty=_DEFAULTS)
        await context.service.wait_until_claimed()
        return json_response(await policies.get_controller(body.pool).pause(body.mode, body.expire_seconds))

    @routes.post(
        "/v1/policy/resume",
        **describe(
            "policy",
            "Resume the policy",
            examples.RESUMED,
            errors=(404, 409),
            model=PauseResponse,
            body=JsonBody(ResumeBody, examples.RESUME, is_required=False),
        ),
    )
    async def resume(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Does nothing without a pause.

        After a pause without an update, each engine first has to show that its weights are those of before.
        """
        body = await read_json(request, _RESUME, empty=_DEFAULTS)
        return json_response(await policies.get_controller(body.pool).resume())

    @routes.post(
        "/v1/engines",
        **describe(
            "policy",
            "Register an engine",
            examples.ENGINE,
            errors=(404, 409),
            model=EngineRegistration,
            body=JsonBody(EngineBody, examples.ENGINE_BODY),
        ),
    )
    async def add(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """If the policy was updated before, the engine must pass the weight check of the current version first.

        Only addresses on the service's allow-list are accepted. A registered engine keeps its name.
        """
        body = await read_json(request, _ENGINE, empty=_DEFAULTS)
        return json_response(policies.get_controller(body.pool).register_engine(body.url))

    @routes.delete(
        "/v1/engines/{name}",
        **describe(
            "policy",
            "Deregister an engine",
            examples.DRAINING_ENGINE,
            errors=(404, 422),
            model=EngineRegistration,
        ),
    )
    async def remove(  # pyright: ignore[reportUnusedFunction]
        name: Annotated[str, Path(max_length=128, description="Name of the engine.", examples=["policy-0"])],
        pool: PoolQuery = "policy",
    ) -> Response:
        """It gets no more calls and is removed when its last call ends; its rollouts continue on other engines."""
        return json_response(policies.get_controller(pool).deregister_engine(name))
