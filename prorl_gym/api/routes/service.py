"""The service's status, for people, supervisors, dashboards and Prometheus; and its maintenance."""

import time

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from prorl_gym import __version__
from prorl_gym.api import openapi_examples as examples
from prorl_gym.api.app_context import AppContext
from prorl_gym.api.http.json_bodies import json_response
from prorl_gym.api.http.openapi import describe
from prorl_gym.api.policy_control import pool_status
from prorl_gym.client.wire_models import (
    DispatchResponse,
    HistoryResponse,
    LivenessResponse,
    ReadinessResponse,
    ServiceStatus,
)

_READINESS = describe(
    "service",
    "Check whether rollouts are accepted and started",
    {"ready": True, "problem": "0 of 2 engines of pool policy serve"},
    model=ReadinessResponse,
    description="Rollouts are accepted and started.",
    is_public=True,
)
_READINESS["responses"][503] = {
    "model": ReadinessResponse,
    "description": "The service is stopping or cannot write; /v1/status has the reason.",
    "content": {"application/json": {"example": {"ready": False}}},
}


def add_routes(routes: APIRouter, context: AppContext) -> None:
    """Add the routes."""
    service = context.service

    @routes.post(
        "/v1/hold",
        **describe("service", "Hold: start no further rollouts", examples.DISPATCH_PAUSED, model=DispatchResponse),
    )
    async def hold() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Running rollouts go on, and submissions are still accepted. A restart ends the hold."""
        service.hold_dispatch()
        return json_response(DispatchResponse(held=True))

    @routes.post(
        "/v1/release",
        **describe("service", "End a hold", examples.DISPATCH_RESUMED, model=DispatchResponse),
    )
    async def release() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Does nothing without a hold."""
        service.release_dispatch()
        return json_response(DispatchResponse(held=False))

    @routes.get(
        "/v1/status",
        **describe("service", "Get the service's status", examples.STATUS, errors=(503,), model=ServiceStatus),
    )
    async def status() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Occupancy, engines, sandboxes, groups, outcomes of rollouts, and the ledger's contents."""
        return json_response(await _service_status(context))

    @routes.get(
        "/v1/history",
        **describe("service", "Get figures over time", examples.HISTORY, model=HistoryResponse),
    )
    async def history() -> Response:  # pyright: ignore[reportUnusedFunction]
        """The last hour, one number every few seconds per column; empty after a restart."""
        return json_response(context.history.snapshot())

    @routes.get(
        "/metrics",
        response_class=Response,
        **describe(
            "service",
            "Get the metrics",
            examples.METRICS,
            errors=(503,),
            description="Prometheus' text form, version 0.0.4.",
            media_type="text/plain",
        ),
    )
    async def metrics() -> Response:  # pyright: ignore[reportUnusedFunction]
        """For Prometheus, whose configuration names the token as `authorization: {credentials_file: ...}`."""
        return Response(await context.metrics.render(), media_type="text/plain; version=0.0.4")

    @routes.get(
        "/livez",
        **describe(
            "service", "Check whether the service is alive", {"live": True}, model=LivenessResponse, is_public=True
        ),
    )
    @routes.head("/livez", include_in_schema=False)
    async def live() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Answers as long as the event loop runs. Needs no token."""
        return JSONResponse({"live": True})

    @routes.get("/readyz", **_READINESS)
    @routes.head("/readyz", include_in_schema=False)
    async def ready() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Also without any engine: engines may still be loading, or be registered later.

        `problem` then says so, without a cause, since this route needs no token.
        """
        is_ready = not service.problem
        headline = context.engine_problem.partition(":")[0]
        answer = {"ready": is_ready, "problem": headline} if headline else {"ready": is_ready}
        return JSONResponse(answer, 200 if is_ready else 503)


async def _service_status(context: AppContext) -> ServiceStatus:
    status, counters = await context.service.status(), context.counters
    controllers = context.policies.by_pool
    return ServiceStatus(
        **dict(status.model_copy(update={"problem": context.problem})),
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
        ledger=await context.service.usage(),
        event_loop_lag_seconds=context.history.lag.max_seconds,
    )
