"""Requests of nodes to the head (``prorl_gym/rollout/nodes``). For ``prorl-gym node`` of the same release only."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path
from starlette.responses import Response

from prorl_gym.api.http.error_responses import ApiError
from prorl_gym.api.routes import IDENTIFIER, Context, JsonBody, JsonRoute
from prorl_gym.rollout.nodes.node_runners import NodeRunners
from prorl_gym.rollout.nodes.wire import ExchangeBody, JoinBody, JoinResponse, LeaveBody

router = APIRouter(route_class=JsonRoute, include_in_schema=False)
"""Not in the OpenAPI document: the routes change with every release."""


async def _get_nodes(context: Context) -> NodeRunners:
    if context.nodes is None:
        raise ApiError(404, "This service has no nodes.", "Add 'nodes: {}' to its configuration.")
    return context.nodes


_Nodes = Annotated[NodeRunners, Depends(_get_nodes)]
_NodePath = Annotated[str, Path(pattern=IDENTIFIER)]


@router.post("/v1/nodes/{name}/exchange")  # first, since a busy head has no more frequent request
async def exchange(nodes: _Nodes, name: _NodePath, body: JsonBody[ExchangeBody]) -> Response:
    return Response(await nodes.exchange(name, body), media_type="application/json")


@router.get("/v1/nodes/config")
async def config(context: Context, _: _Nodes) -> Response:
    """The service's configuration, as far as it concerns nodes."""
    return Response(context.node_config, media_type="application/json")


@router.post("/v1/nodes/{name}/join")
async def join(nodes: _Nodes, name: _NodePath, body: JsonBody[JoinBody]) -> JoinResponse:
    return nodes.join(name, body)


@router.post("/v1/nodes/{name}/leave")
async def leave(nodes: _Nodes, name: _NodePath, body: JsonBody[LeaveBody]) -> None:
    nodes.leave(name, body)
