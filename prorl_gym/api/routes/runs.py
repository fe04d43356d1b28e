"""The demand of a run, and the state of its groups."""

from fastapi import APIRouter

from prorl_gym.api.http.openapi import AUTH_ERRORS, errors
from prorl_gym.api.routes import Context, JsonBody, JsonRoute, RunPath
from prorl_gym.client.wire_models import GroupsStatus, MismatchBody, MismatchHistory, MismatchReport
from prorl_gym.demand import Demand
from prorl_gym.errors import NotFoundError

router = APIRouter(route_class=JsonRoute, tags=["runs"], responses=AUTH_ERRORS | errors(422))


@router.put(
    "/v1/runs/{run}/demand",
    summary="Set a run's demand",
    response_description="The demand is in force, and survives a restart.",
    responses=errors(409, 413, 503),
)
async def put(context: Context, run: RunPath, body: JsonBody[Demand]) -> GroupsStatus:
    """Each demand replaces the one before. Groups whose rewards differ count; redundant groups are stopped.

    A `version` older than the pool's is refused (409): versions belong to the pool, not to the run.
    No member of an informative group is cut because its siblings were faster.
    """
    return await context.service.set_demand(run, body)


@router.get("/v1/runs/{run}/demand", summary="Get a run's demand", responses=errors(404))
async def get(context: Context, run: RunPath) -> Demand:
    """Without one (404), every accepted rollout runs to its end."""
    demand = context.service.groups.demands().get(run)
    if demand is None:
        raise NotFoundError(f"run {run} has no demand.", "Every accepted rollout of it runs.")
    return demand


@router.delete("/v1/runs/{run}/demand", summary="Delete a run's demand", responses=errors(503))
async def delete(context: Context, run: RunPath) -> GroupsStatus:
    """Cancels what the demand keeps of groups that have begun, parked agents among it. The rest runs to its end.

    Rollouts that the demand has cancelled stay cancelled.
    """
    return await context.service.set_demand(run, None)


@router.get("/v1/runs/{run}/groups", summary="Get the groups of a run")
async def groups(context: Context, run: RunPath) -> GroupsStatus:
    """Numbers of decided, undecided and stopped groups, and the time that stopping them saved."""
    return context.service.groups.status(run)


@router.post("/v1/runs/{run}/mismatch", summary="Report the mismatch of log-probs", responses=errors(413))
async def report(context: Context, run: RunPath, body: JsonBody[MismatchBody]) -> MismatchReport:
    """Differences of the trainer's log-probs and the served ones, over the batch of one update.

    Shown in `/v1/status`, `/metrics` and on the dashboard. Nothing is decided by it.
    """
    return context.mismatches.add(run, body)


@router.get("/v1/runs/{run}/mismatch", summary="Get the mismatch of log-probs")
async def mismatch(context: Context, run: RunPath) -> MismatchHistory:
    """Reports of the latest 256 updates of a run; empty after a restart."""
    return MismatchHistory(reports=context.mismatches.of_run(run))
