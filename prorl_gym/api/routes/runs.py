"""The demand of a run, and the state of its groups."""

from fastapi import APIRouter, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from prorl_gym.api import openapi_examples as examples
from prorl_gym.api.app_context import AppContext
from prorl_gym.api.http.json_bodies import json_response, read_json
from prorl_gym.api.http.openapi import JsonBody, describe
from prorl_gym.api.routes import RunPath
from prorl_gym.client.wire_models import GroupsStatus, MismatchBody, MismatchHistory, MismatchReport
from prorl_gym.demand import Demand
from prorl_gym.errors import NotFoundError

_DEMAND = TypeAdapter(Demand)
_MISMATCH = TypeAdapter(MismatchBody)


def add_routes(routes: APIRouter, context: AppContext) -> None:
    """Add the routes."""
    service = context.service

    @routes.put(
        "/v1/runs/{run}/demand",
        **describe(
            "runs",
            "Set a run's demand",
            examples.GROUPS,
            errors=(409, 503),
            model=GroupsStatus,
            description="The demand is in force, and survives a restart.",
            body=JsonBody(Demand, examples.DEMAND),
        ),
    )
    async def put(run: RunPath, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Each demand replaces the one before. Groups whose rewards differ count; redundant groups are stopped.

        A `version` older than the pool's is refused (409): versions belong to the pool, not to the run.
        No member of an informative group is cut because its siblings were faster.
        """
        return json_response(await service.set_demand(run, await read_json(request, _DEMAND)))

    @routes.get(
        "/v1/runs/{run}/demand",
        **describe(
            "runs",
            "Get a run's demand",
            examples.DEMAND,
            errors=(404, 422),
            model=Demand,
            description="The demand that is in force.",
        ),
    )
    async def get(run: RunPath) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Without one (404), every accepted rollout runs to its end."""
        demand = service.demands().get(run)
        if demand is None:
            raise NotFoundError(f"run {run} has no demand.", "Every accepted rollout of it runs.")
        return json_response(demand)

    @routes.delete(
        "/v1/runs/{run}/demand",
        **describe("runs", "Delete a run's demand", examples.GROUPS, errors=(422, 503), model=GroupsStatus),
    )
    async def delete(run: RunPath) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Cancels what the demand keeps of groups that have begun, parked agents among it. The rest runs to its end.

        Rollouts that the demand has cancelled stay cancelled.
        """
        return json_response(await service.set_demand(run, None))

    @routes.get(
        "/v1/runs/{run}/groups",
        **describe("runs", "Get the groups of a run", examples.GROUPS, errors=(422,), model=GroupsStatus),
    )
    async def groups(run: RunPath) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Numbers of decided, undecided and stopped groups, and the time that stopping them saved."""
        return json_response(service.groups_status(run))

    @routes.post(
        "/v1/runs/{run}/mismatch",
        **describe(
            "runs",
            "Report the mismatch of log-probs",
            examples.MISMATCH_REPORT,
            model=MismatchReport,
            description="The report is kept.",
            body=JsonBody(MismatchBody, examples.MISMATCH),
        ),
    )
    async def report(run: RunPath, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Differences of the trainer's log-probs and the served ones, over the batch of one update.

        Shown in `/v1/status`, `/metrics` and on the dashboard. Nothing is decided by it.
        """
        return json_response(context.mismatches.add(run, await read_json(request, _MISMATCH)))

    @routes.get(
        "/v1/runs/{run}/mismatch",
        **describe(
            "runs",
            "Get the mismatch of log-probs",
            {"reports": [examples.MISMATCH_REPORT]},
            errors=(422,),
            model=MismatchHistory,
        ),
    )
    async def mismatch(run: RunPath) -> Response:  # pyright: ignore[reportUnusedFunction]
        """What was reported of the latest 256 updates of a run; empty after a restart."""
        return json_response(MismatchHistory(reports=context.mismatches.of_run(run)))
