"""What nodes ask of the head (``prorl_gym/rollout/nodes``). For ``prorl-gym node`` of the same release only."""

from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from prorl_gym.api.app_context import AppContext
from prorl_gym.api.http.error_responses import ApiError
from prorl_gym.api.http.json_bodies import json_response, read_json
from prorl_gym.api.routes import IDENTIFIER
from prorl_gym.rollout.nodes.node_runners import NodeRunners
from prorl_gym.rollout.nodes.wire import ExchangeBody, JoinBody, LeaveBody

_JOIN = TypeAdapter(JoinBody)
_EXCHANGE = TypeAdapter(ExchangeBody)
_LEAVE = TypeAdapter(LeaveBody)

_NodePath = Annotated[str, Path(pattern=IDENTIFIER)]


def add_routes(routes: APIRouter, context: AppContext) -> None:
    """Add the routes. The OpenAPI document leaves them out: they change with every release."""

    def head() -> NodeRunners:
        if context.nodes is None:
            raise ApiError(404, "This service has no nodes.", "Add 'nodes: {}' to its configuration.")
        return context.nodes

    async def exchange(request: Request) -> Response:
        body, nodes = await read_json(request, _EXCHANGE), head()
        answer = await nodes.exchange(request.path_params["name"], body)
        return Response(answer, media_type="application/json")

    # Most requests of a busy head: without FastAPI's work on parameters, and the first that is looked at.
    routes.add_route("/v1/nodes/{name}/exchange", exchange, methods=["POST"], include_in_schema=False)

    @routes.get("/v1/nodes/config", include_in_schema=False)
    async def config() -> Response:  # pyright: ignore[reportUnusedFunction]
        """The service's configuration, as far as it concerns nodes."""
        head()
        return Response(context.node_config, media_type="application/json")

    @routes.post("/v1/nodes/{name}/join", include_in_schema=False)
    async def join(request: Request, name: _NodePath) -> Response:  # pyright: ignore[reportUnusedFunction]
        body, nodes = await read_json(request, _JOIN), head()
        return json_response(nodes.join(name, body))

    @routes.post("/v1/nodes/{name}/leave", include_in_schema=False)
    async def leave(request: Request, name: _NodePath) -> Response:  # pyright: ignore[reportUnusedFunction]
        body, nodes = await read_json(request, _LEAVE), head()
        nodes.leave(name, body)
        return Response("{}", media_type="application/json")
