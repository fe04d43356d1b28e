"""The HTTP side of a service: its routes put together, with the token, the bounds and the observers around them."""

from collections.abc import Callable, Mapping, Sequence

from fastapi import FastAPI

from prorl_gym import __version__
from prorl_gym.api import openapi
from prorl_gym.api.answers import install
from prorl_gym.api.auth import BearerAuth
from prorl_gym.api.fleet import Fleet
from prorl_gym.api.guard import SameSite
from prorl_gym.api.history import History
from prorl_gym.api.metrics import Metrics
from prorl_gym.api.policies import Policies
from prorl_gym.api.routes import dispatch, observe, pages, policy, rollouts, runs, stream
from prorl_gym.api.schema import (
    AckBody,
    CancelBody,
    EngineBody,
    PauseBody,
    PolicyBody,
    ResumeBody,
    StreamLine,
    Submission,
)
from prorl_gym.api.serving import Decode, Limits, Serving
from prorl_gym.api.tally import Tally
from prorl_gym.demand import Demand
from prorl_gym.inference.lifecycle import PolicyLifecycle
from prorl_gym.inference.pool import EnginePool
from prorl_gym.rollout.service import RolloutService

_NAMED = (Submission, CancelBody, AckBody, PolicyBody, PauseBody, ResumeBody, EngineBody, Demand, StreamLine)
"""Models that routes name by reference."""


def create_app(
    service: RolloutService,
    token: str,
    *,
    pools: Sequence[EnginePool] = (),
    lifecycles: Mapping[str, PolicyLifecycle] | None = None,
    fleets: Mapping[str, Fleet] | None = None,
    sandboxes: Callable[[], int | None] = lambda: None,
    decode: Decode | None = None,
    max_body_bytes: int = 64 << 20,
    max_pending: int = 100_000,
) -> FastAPI:
    """Return the routes over a service that the caller starts and stops.

    See ``make_serving`` and ``Serving.load``.
    """
    serving = make_serving(service, sandboxes=sandboxes, limits=Limits(max_body_bytes, max_pending))
    serving.load(pools, lifecycles or {}, fleets or {}, decode)
    return app_of(serving, token)


def app_of(serving: Serving, token: str) -> FastAPI:
    """Return the routes.

    Args:
        serving: what they stand on; the service itself is started and stopped by somebody else.
        token: bearer token that every route but health and the pages without data asks for.
    """
    app = FastAPI(
        title="prorl-gym",
        version=__version__,
        description=openapi.DESCRIPTION,
        openapi_tags=openapi.TAGS,
        openapi_url=None,  # ``openapi.install`` answers it
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    app.state.serving = serving
    install(app)
    app.add_middleware(BearerAuth, token=token)
    app.add_middleware(SameSite)
    for subject in (rollouts, stream, runs, policy, dispatch, observe, pages):
        subject.add(app.router, serving)
    openapi.install(app, _NAMED)
    return app


def make_serving(
    service: RolloutService,
    *,
    sandboxes: Callable[[], int | None] = lambda: None,
    limits: Limits | None = None,
    history_seconds: float = 5.0,
) -> Serving:
    """Put together what the routes stand on, and let it watch the service. ``Serving.load`` adds what loads slowly.

    Args:
        service: what they talk to.
        sandboxes: tells how many are alive; ``None``: nobody knows.
        limits: see there.
        history_seconds: between two samples; nothing is sampled before ``Serving.history`` is entered.
    """
    tally = Tally()
    pools: list[EnginePool] = []
    metrics = Metrics(service, tally, pools, sandboxes)
    history = History(service, tally, pools, seconds=history_seconds)
    history.lag.observers.append(metrics.lagged)
    service.observe(tally.note)
    service.observe(metrics.note)
    return Serving(service, limits or Limits(), tally, metrics, history, Policies(), pools, sandboxes)
