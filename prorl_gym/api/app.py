"""The HTTP side of a service: its routes put together, with the token and the bounds around them."""

import sys

from fastapi import APIRouter, FastAPI

from prorl_gym import __version__
from prorl_gym.api.app_context import AppContext, PromptRenderer
from prorl_gym.api.http import openapi
from prorl_gym.api.http.error_responses import install_error_handlers
from prorl_gym.api.http.middleware import BearerAuth, BodyLimit, CrossSiteGuard
from prorl_gym.api.routes import analysis, nodes, pages, policy, rollouts, runs
from prorl_gym.api.routes import service as service_routes
from prorl_gym.client.wire_models import Body, DeliveredRecord, PauseNotice, RolloutSubmission
from prorl_gym.demand import Demand
from prorl_gym.rollout.service import RolloutService

_EMBEDDED_PATHS = frozenset(
    {
        "/v1/rollouts",
        "/v1/rollouts/{rollout_id}",
        "/v1/cancel",
        "/v1/stream",
        "/v1/ack",
        "/v1/unacknowledged",
        "/v1/first_prompt",
    }
)

_EMBEDDED_BODY_BYTES = 512 << 20
"""A row of 64 MiB, with each byte written as an escape sequence."""


def create_app(context: AppContext, token: str, max_body_bytes: int = 64 << 20) -> FastAPI:
    """Return the routes.

    Args:
        context: what the routes share. The caller starts and stops the service.
        token: bearer token, required by every route but health and the pages without data.
        max_body_bytes: of one request.
    """
    app = FastAPI(
        title="prorl-gym",
        version=__version__,
        description=openapi.DESCRIPTION,
        openapi_tags=openapi.TAGS,
        openapi_url=None,  # ``install_openapi`` answers it
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    install_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(BearerAuth, token=token)
    app.add_middleware(CrossSiteGuard)
    for subject in (nodes, rollouts, analysis, runs, policy, service_routes, pages):
        subject.add_routes(app.router, context)
    openapi.install_openapi(app, (RolloutSubmission, Demand, DeliveredRecord, PauseNotice, *Body.__subclasses__()))
    return app


def create_embedded_app(service: RolloutService, render_prompt: PromptRenderer) -> FastAPI:
    """Return the routes to submit, read, acknowledge and cancel, for a server that embeds the service.

    They ask for no token, accept any number of pending rollouts, and show no task.
    """
    routes = APIRouter()
    context = AppContext.create(service, render_prompt=render_prompt, max_pending=sys.maxsize)
    rollouts.add_routes(routes, context)
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    install_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=_EMBEDDED_BODY_BYTES)
    app.router.routes += [route for route in routes.routes if getattr(route, "path", "") in _EMBEDDED_PATHS]
    return app
