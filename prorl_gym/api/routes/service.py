"""The service's status, for people, supervisors, dashboards and Prometheus; and its maintenance."""

import time

from fastapi import APIRouter
from starlette.responses import Response

from prorl_gym import __version__
from prorl_gym.api.http.openapi import AUTH_ERRORS, errors
from prorl_gym.api.monitoring.history import find_problem, pool_problem
from prorl_gym.api.policy_control import pool_status
from prorl_gym.api.routes import Context
from prorl_gym.client.wire_models import (
    DispatchResponse,
    HistoryResponse,
    LivenessResponse,
    ReadinessResponse,
    ServiceStatus,
)

router = APIRouter(tags=["service"])


@router.post("/v1/hold", summary="Hold: start no further rollouts", responses=AUTH_ERRORS)
async def hold(context: Context) -> DispatchResponse:
    """Running rollouts go on, and submissions are still accepted. A restart ends the hold."""
    context.service.hold_dispatch()
    return DispatchResponse(held=True)


@router.post("/v1/release", summary="End a hold", responses=AUTH_ERRORS)
async def release(context: Context) -> DispatchResponse:
    """Does nothing without a hold."""
    context.service.release_dispatch()
    return DispatchResponse(held=False)


@router.get("/v1/status", summary="Get the service's status", responses=AUTH_ERRORS | errors(503))
async def status(context: Context) -> ServiceStatus:
    """Occupancy, engines, sandboxes, groups, outcomes of rollouts, and the ledger's contents."""
    dispatch, counters = await context.service.status(), context.counters
    controllers = context.policies
    return ServiceStatus(
        **dict(dispatch.model_copy(update={"problem": find_problem(context.service, context.pools)})),
        version=__version__,
        uptime_seconds=round(time.monotonic() - context.started_at, 3),
        pools=tuple(
            controllers[pool.name].pool_status() if pool.name in controllers else pool_status(pool)
            for pool in context.pools
        ),
        ended=tuple(counters.outcome_counts()),
        rewards=tuple(counters.reward_means()),
        sampled_tokens=counters.sampled_tokens,
        wasted_tokens=counters.wasted_tokens,
        mismatches=context.mismatches.latest(),
        sandboxes=context.count_sandboxes(),
        nodes=None if context.nodes is None else context.nodes.status(),
        ledger=await context.service.ledger.usage(),
        event_loop_lag_seconds=context.history.lag.max_seconds,
    )


@router.get("/v1/history", summary="Get figures over time", responses=AUTH_ERRORS)
async def history(context: Context) -> HistoryResponse:
    """The last hour, one number every few seconds per column; empty after a restart."""
    return context.history.snapshot()


_METRICS = {
    "description": "Prometheus' text form, version 0.0.4.",
    "content": {"text/plain": {"schema": {"type": "string"}, "example": "# TYPE prorl_ready gauge\nprorl_ready 1.0\n"}},
}


@router.get(
    "/metrics",
    summary="Get the metrics",
    response_class=Response,
    responses=AUTH_ERRORS | errors(503) | {200: _METRICS},
)
async def metrics(context: Context) -> Response:
    """For Prometheus, whose configuration names the token as `authorization: {credentials_file: ...}`."""
    return Response(await context.metrics.render(), media_type="text/plain; version=0.0.4")


@router.get("/livez", summary="Check whether the service is alive")
@router.head("/livez", include_in_schema=False)
async def live() -> LivenessResponse:
    """Answers as long as the event loop runs. Needs no token."""
    return LivenessResponse()


_UNREADY = {
    "model": ReadinessResponse,
    "description": "The service is stopping or cannot write; /v1/status has the reason.",
}


@router.get(
    "/readyz",
    summary="Check whether rollouts are accepted and started",
    response_model_exclude_defaults=True,
    responses={503: _UNREADY},
)
@router.head("/readyz", include_in_schema=False)
async def ready(context: Context, response: Response) -> ReadinessResponse:
    """Also without any engine: engines may still be loading, or be registered later.

    `problem` then says so, without a cause, since this route needs no token.
    """
    is_ready = not context.service.problem
    response.status_code = 200 if is_ready else 503
    return ReadinessResponse(ready=is_ready, problem=pool_problem(context.pools).partition(":")[0])
