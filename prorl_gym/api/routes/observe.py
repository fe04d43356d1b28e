"""How the service is: for people, supervisors, dashboards and Prometheus."""

import time

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from prorl_gym import __version__
from prorl_gym.api import contract, examples
from prorl_gym.api.policies import pool_state
from prorl_gym.api.schema import HistoryAnswer, LiveAnswer, PoolState, ReadyAnswer, StatusAnswer
from prorl_gym.api.serving import Serving


def add(routes: APIRouter, serving: Serving) -> None:
    """Add the routes."""
    service = serving.service

    @routes.get(
        "/v1/status",
        tags=["service"],
        summary="Get what is going on",
        response_model=StatusAnswer,
        responses=contract.answers(examples.STATUS, (*contract.GUARDED, 503)),
    )
    async def status() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Occupancy, engines, sandboxes, groups, how rollouts ended, and what the ledger holds."""
        return Response((await _status(serving)).model_dump_json(), media_type="application/json")

    @routes.get(
        "/v1/history",
        tags=["service"],
        summary="Get figures over time",
        response_model=HistoryAnswer,
        responses=contract.answers(examples.HISTORY, contract.GUARDED),
    )
    async def history() -> Response:  # pyright: ignore[reportUnusedFunction]
        """The last hour, one number every few seconds per column; it begins anew with the service."""
        return Response(serving.history.answer().model_dump_json(), media_type="application/json")

    @routes.get(
        "/metrics",
        tags=["service"],
        summary="Get the metrics",
        response_class=Response,
        responses=contract.text(
            "text/plain", examples.METRICS, (*contract.GUARDED, 503), "Prometheus' text form, version 0.0.4."
        ),
    )
    async def metrics() -> Response:  # pyright: ignore[reportUnusedFunction]
        """For Prometheus, which takes the token as `authorization: {credentials_file: ...}`."""
        return Response(await serving.metrics.page(), media_type="text/plain; version=0.0.4")

    @routes.get(
        "/livez",
        tags=["service"],
        summary="Ask whether it lives",
        response_model=LiveAnswer,
        responses=contract.answers({"live": True}, ()),
    )
    @routes.head("/livez", include_in_schema=False)
    async def live() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Answers as long as the event loop turns. Needs no token."""
        return JSONResponse({"live": True})

    @routes.get(
        "/readyz",
        tags=["service"],
        summary="Ask whether rollouts are accepted and begin",
        response_model=ReadyAnswer,
        responses={
            **contract.answers({"ready": True}, (), "Rollouts are accepted and begin."),
            503: {
                "model": ReadyAnswer,
                "description": "It is loading, stopping or cannot write; the reason is on /v1/status.",
                "content": {"application/json": {"example": {"ready": False}}},
            },
        },
    )
    @routes.head("/readyz", include_in_schema=False)
    async def ready() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Tells yes or no only, since it needs no token, and so must cost nothing either.

        A service that is loading its tokenizer and sandboxes says no, though it accepts rollouts already.
        """
        is_ready = not service.problem
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


async def _status(serving: Serving) -> StatusAnswer:
    status, tally = await serving.service.status(), serving.tally
    return StatusAnswer(
        **dict(status),
        version=__version__,
        uptime_seconds=round(time.monotonic() - serving.started, 3),
        pools=_pools(serving),
        ended=tally.ended(),
        rewards=tally.rewards(),
        sampled_tokens=tally.sampled_tokens,
        wasted_tokens=tally.wasted_tokens,
        sandboxes=serving.sandboxes(),
        ledger=await serving.service.usage(),
        event_loop_lag_seconds=serving.history.lag.longest,
    )


def _pools(serving: Serving) -> list[PoolState]:
    """Return all pools, with the addresses of the engines where they are known."""
    fleets = {name: desk.fleet for name, desk in serving.policies.all.items()}
    return [pool_state(pool, fleets.get(pool.name)) for pool in serving.pools]
