"""The HTTP side of a service: its routes put together, with the token and the bounds around them."""

import sys

from fastapi import FastAPI

from prorl_gym import __version__
from prorl_gym.api.app_context import AppContext, PromptRenderer
from prorl_gym.api.http import openapi
from prorl_gym.api.http.error_responses import install_error_handlers
from prorl_gym.api.http.middleware import BearerAuth, BodyLimit, CrossSiteGuard
from prorl_gym.api.routes import nodes, pages, policy, rollouts, runs
from prorl_gym.api.routes import service as service_routes
from prorl_gym.rollout.service import RolloutService

_EMBEDDED_BODY_BYTES = 512 << 20
"""A row of 64 MiB, with each byte written as an escape sequence."""


def create_app(context: AppContext, token: str, max_body_bytes: int = 64 << 20) -> FastAPI:
    """Return the routes. The caller starts and stops the service.

    The token is required by every route but health and the pages without data; ``max_body_bytes`` is of one request.
    """
    others = (subject.router for subject in (rollouts, runs, policy, service_routes, pages))
    routers = (nodes.router, rollouts.embeddable, *others)
    app = openapi.DescribedApp(
        # Flat: ``include_router`` would compare each request twice, and not find all methods of a path.
        routes=[route for router in routers for route in router.routes],
        title="prorl-gym",
        version=__version__,
        description=openapi.DESCRIPTION,
        openapi_tags=openapi.TAGS,
        openapi_url=None,  # see ``pages``
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    app.state.context = context
    install_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(BearerAuth, token=token)
    app.add_middleware(CrossSiteGuard)
    return app


def create_embedded_app(service: RolloutService, render_prompt: PromptRenderer) -> FastAPI:
    """Return the routes to submit, read, acknowledge and cancel, for a server that embeds the service.

    They ask for no token, accept any number of pending rollouts, and show no task.
    """
    app = FastAPI(routes=rollouts.embeddable.routes, openapi_url=None, redirect_slashes=False)
    app.state.context = AppContext(service, render_prompt=render_prompt, max_pending=sys.maxsize)
    install_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=_EMBEDDED_BODY_BYTES)
    return app
