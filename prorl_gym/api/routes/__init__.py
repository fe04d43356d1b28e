"""The routes: a router per subject, whose handlers have the application's ``AppContext`` as ``Context``."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Path, Query, Request
from fastapi.routing import APIRoute
from pydantic import GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema
from starlette.responses import Response

from prorl_gym.api.app_context import AppContext
from prorl_gym.client.wire_models import MAX_VERSION
from prorl_gym.rollout.protocol import RewardClass, RolloutFilter


async def _get_context(request: Request) -> AppContext:
    return request.app.state.context


Context = Annotated[AppContext, Depends(_get_context)]

IDENTIFIER = r"^[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}$"

RunQuery = Annotated[
    str | None, Query(pattern=IDENTIFIER, description="Only records of this run.", examples=["step-7"])
]
RolloutPath = Annotated[str, Path(pattern=IDENTIFIER, description="Id of a rollout.", examples=["a7"])]
RunPath = Annotated[str, Path(pattern=IDENTIFIER, description="Id of a run.", examples=["step-7"])]
PoolQuery = Annotated[str, Query(max_length=64, description="Pool of engines.", examples=["policy"])]
OffsetQuery = Annotated[int, Query(ge=0, le=100_000, description="How many to skip.")]
_WordQuery = Annotated[str | None, Query(max_length=256, description="Only rollouts with exactly this.")]


def _wanted_rollouts(
    run: RunQuery = None,
    group: Annotated[
        str | None, Query(pattern=IDENTIFIER, description="Only records of this group.", examples=["prompt-3"])
    ] = None,
    prefix: Annotated[
        str | None, Query(pattern=IDENTIFIER, description="Only rollouts whose id has this prefix.", examples=["a7"])
    ] = None,
    environment: _WordQuery = None,
    problem: _WordQuery = None,
    evaluation: Annotated[bool | None, Query(description="Only rollouts of an evaluation, or only the others.")] = None,
    status: _WordQuery = None,
    detail: _WordQuery = None,
    why: Annotated[str | None, Query(max_length=1024, description="Only rollouts with exactly this reason.")] = None,
    version: Annotated[
        int | None, Query(ge=0, le=MAX_VERSION, description="Only rollouts whose oldest policy version is this.")
    ] = None,
    reward: Annotated[RewardClass | None, Query(description="Only rewards above zero, others, or none.")] = None,
    text: Annotated[
        str | None, Query(max_length=256, description="Part of an id, a problem, a group, a detail or a reason.")
    ] = None,
) -> RolloutFilter:
    return RolloutFilter(
        run_id=run,
        group_id=group,
        prefix=prefix,
        environment=environment,
        problem=problem,
        evaluation=evaluation,
        status=status,
        detail=detail,
        why=why,
        version=version,
        reward=reward,
        text=text,
    )


WantedRollouts = Annotated[RolloutFilter, Depends(_wanted_rollouts)]
"""Parameters of a route that choose rollouts."""

BodyT = TypeVar("BodyT")


class _StrictJson:
    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        model: TypeAdapter[Any] = TypeAdapter(source)
        return core_schema.no_info_wrap_validator_function(
            lambda body, _: model.validate_json(body, strict=True), handler(source)
        )


JsonBody = Annotated[BodyT, _StrictJson()]
"""The body of a ``JsonRoute``. Nothing is converted: "1" is no number, 1 is no boolean."""


class _RawRequest(Request):
    async def json(self) -> bytes:
        return await self.body()


class JsonRoute(APIRoute):
    """Leaves the parsing of bodies to their models, whatever their Content-Type.

    FastAPI's own parsing has no bound of depth, and of what it returns strict models refuse lists and enums.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_raw(request: Request) -> Response:
            raw = _RawRequest(request.scope, request.receive)
            await raw.body()  # FastAPI would make a 400 of what ``BodyLimit`` raises
            return await handle(raw)

        return handle_raw
