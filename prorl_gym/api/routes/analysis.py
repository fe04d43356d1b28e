"""Aggregates over the ledger's finished rollouts: they are the same after a restart."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from prorl_gym.api import openapi_examples as examples
from prorl_gym.api.app_context import AppContext
from prorl_gym.api.http.json_bodies import json_response
from prorl_gym.api.http.openapi import describe
from prorl_gym.api.routes import OffsetQuery, WantedRollouts
from prorl_gym.client.wire_models import AnalysisResponse, ProblemsResponse
from prorl_gym.rollout.protocol import ProblemOrder


def add_routes(routes: APIRouter, context: AppContext) -> None:
    """Add the routes."""
    service = context.service

    @routes.get(
        "/v1/analysis",
        **describe(
            "rollouts",
            "Get rewards by policy version, and causes of zeros and failures",
            examples.ANALYSIS,
            errors=(422, 503),
            model=AnalysisResponse,
        ),
    )
    async def analysis(wanted: WantedRollouts) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Over the newest 100,000 finished rollouts of the run, of those that match."""
        return json_response(await service.analyze(wanted))

    @routes.get(
        "/v1/problems",
        **describe(
            "rollouts",
            "Get rewards by problem",
            examples.PROBLEMS,
            errors=(422, 503),
            model=ProblemsResponse,
        ),
    )
    async def problems(  # pyright: ignore[reportUnusedFunction]
        wanted: WantedRollouts,
        order: Annotated[ProblemOrder, Query(description="By the newest record, the mean reward, or the name.")] = (
            "newest"
        ),
        limit: Annotated[int, Query(ge=1, le=200, description="Most problems to return.")] = 50,
        offset: OffsetQuery = 0,
    ) -> Response:
        """One entry per row of a data set, or per group where rows have no name, with the rewards of its rollouts."""
        return json_response(await service.list_problems(wanted, order, offset, limit))
