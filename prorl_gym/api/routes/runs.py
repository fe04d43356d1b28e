"""What a trainer still wants of a run."""

from fastapi import APIRouter, Request
from pydantic import BaseModel, TypeAdapter
from starlette.responses import Response

from prorl_gym.api import contract, examples
from prorl_gym.api.body import parse_body, read_body
from prorl_gym.api.routes import RunPath
from prorl_gym.api.serving import Serving
from prorl_gym.demand import Demand
from prorl_gym.errors import NotFoundError
from prorl_gym.rollout.groups.report import GroupsStatus

_DEMAND = TypeAdapter(Demand)


def add(routes: APIRouter, serving: Serving) -> None:
    """Add the routes."""
    service, limits = serving.service, serving.limits
    responses = (*contract.GUARDED, 422, 503)

    @routes.put(
        "/v1/runs/{run}/demand",
        tags=["runs"],
        summary="Say what is still wanted of a run",
        response_model=GroupsStatus,
        responses=contract.answers(examples.GROUPS, (*responses, 413), "It is in force, and kept over a restart."),
        openapi_extra=contract.body(Demand, examples.DEMAND),
    )
    async def put(run: RunPath, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Each demand replaces the one before. Groups whose rewards differ count; what is redundant is stopped.

        No member of an informative group is cut because its siblings were faster.
        """
        body = parse_body(await read_body(request, limits.max_body_bytes), _DEMAND)
        return _json(await service.set_demand(run, body))

    @routes.get(
        "/v1/runs/{run}/demand",
        tags=["runs"],
        summary="Get what is wanted of a run",
        response_model=Demand,
        responses=contract.answers(examples.DEMAND, (*responses, 404), "The demand that is in force."),
    )
    async def get(run: RunPath) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Without one (404) everything that was accepted is made to its end."""
        await service.recovered()
        demand = service.demands().get(run)
        if demand is None:
            raise NotFoundError(f"run {run} has no demand.", "Everything that was accepted of it is made.")
        return _json(demand)

    @routes.delete(
        "/v1/runs/{run}/demand",
        tags=["runs"],
        summary="Want everything of a run again",
        response_model=GroupsStatus,
        responses=contract.answers(examples.GROUPS, responses),
    )
    async def delete(run: RunPath) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Every accepted rollout is made to its end, as without a demand. Cancelled ones stay cancelled."""
        return _json(await service.set_demand(run, None))

    @routes.get(
        "/v1/runs/{run}/groups",
        tags=["runs"],
        summary="Get the groups of a run",
        response_model=GroupsStatus,
        responses=contract.answers(examples.GROUPS, responses),
    )
    async def groups(run: RunPath) -> Response:  # pyright: ignore[reportUnusedFunction]
        """How many are decided, undecided and dropped, and what stopping them saved."""
        await service.recovered()
        return _json(service.groups(run))


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")
