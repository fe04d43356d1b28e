"""Running the service behind uvicorn, on our own event loop, until a signal."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.types import Scope

from prorl_gym.api.app import app_of, make_serving
from prorl_gym.api.auth import has_bearer, load_or_make_token
from prorl_gym.api.compat.auth import has_compat_token
from prorl_gym.api.compat.config import CompatConfig
from prorl_gym.api.config import ServiceConfig
from prorl_gym.api.connections import Connections, HttpServer
from prorl_gym.api.opening import Opened, open_service
from prorl_gym.api.serving import Limits, Serving
from prorl_gym.api.tracing import Tracing
from prorl_gym.errors import ConfigError
from prorl_gym.logs import register_secret
from prorl_gym.sandbox.protocol import live_in

if TYPE_CHECKING:
    from prorl_gym.api.build import Built

_LOG = logging.getLogger(__name__)


class _Signals:
    """The first SIGINT or SIGTERM asks for an orderly end, the second one for an immediate one."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._note)

    def _note(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def serve(config: ServiceConfig) -> None:
    """Accept, load, serve, and stop: the first signal drains what is in hand, a second one cuts it off.

    Raises:
        ProrlError: see ``build_service``; or the address is taken.
    """
    signals = _Signals()
    token = await asyncio.to_thread(load_or_make_token, config.token_file)
    register_secret(token)
    with ExitStack() as sockets:
        listener = sockets.enter_context(listen(config.http.host, config.http.port))
        compat = config.http.compat
        published = compat and sockets.enter_context(listen(compat.host, compat.port, "http.compat.port"))
        service = _Service(await open_service(config), token, listener, published, signals)
        tracing = Tracing.open()
        if tracing is not None:
            service.opened.service.observe(tracing.note)
        try:
            await service.answer()
        finally:
            await _stop(service, config.http.stop_seconds, signals)
            if tracing is not None:
                await asyncio.to_thread(tracing.close)


class _Service:
    """A service behind its sockets: it answers while it loads what it needs to begin rollouts.

    Args:
        opened: accepts rollouts.
        token: asked for by its routes.
        listener: of its own routes.
        published: of the routes of the published server, if it has them: they answer once everything is loaded.
        signals: end it.
    """

    def __init__(
        self,
        opened: Opened,
        token: str,
        listener: socket.socket,
        published: socket.socket | None,
        signals: _Signals,
    ) -> None:
        self.opened = opened
        self._token = token
        self._listener = listener
        self._published = published
        self._signals = signals
        self._built: Built | None = None
        self._connections = Connections()
        self._servers: list[HttpServer] = []
        self._answering: list[asyncio.Task[None]] = []

    async def answer(self) -> None:
        """Answer requests until a signal.

        Raises:
            ProrlError: what it needs to begin rollouts cannot be loaded.
        """
        config = self.opened.config.http
        serving = make_serving(
            self.opened.service,
            sandboxes=lambda: None if self._built is None else live_in(self._built.backend),
            limits=Limits(config.max_body_bytes, config.max_pending),
            history_seconds=config.history_seconds,
        )
        async with serving.history:
            self._open("serving", app_of(serving, self._token), has_bearer, self._listener)
            loading = asyncio.create_task(self._load(serving))
            stopping = asyncio.create_task(self._signals.first.wait())
            try:
                await asyncio.wait({loading, stopping, *self._answering}, return_when=asyncio.FIRST_COMPLETED)
                if loading.done() and loading.exception() is None:
                    await asyncio.wait({stopping, *self._answering}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
                loading.cancel()
                await asyncio.wait({loading})
                if self._built is None:
                    await serving.policies.close()  # requests wait for pools that will not come
                await self._close()
                await serving.policies.close()
            if not loading.cancelled():
                loading.result()

    async def close(self) -> None:
        """Stop the service (see ``Built.close``)."""
        if self._built is None:
            await self.opened.service.stop(drain=False)
        else:
            await self._built.close()

    async def _load(self, serving: Serving) -> None:
        built = self._built = await load(self.opened)
        serving.load(built.pools, built.lifecycles, built.fleets, built.decode)
        if self._published is not None:
            app = await _compat_app(built, self.opened.config, self._token)
            self._open("published routes", app, has_compat_token, self._published)
        _LOG.info("tokenizer and sandboxes are loaded: accepted rollouts begin")

    def _open(
        self, name: str, app: FastAPI, has_token: Callable[[Scope, bytes], bool], listener: socket.socket
    ) -> None:
        """Answer on a socket from now on."""
        token = self._token.encode("ascii")
        server = HttpServer(app, lambda scope: has_token(scope, token), self._connections)
        self._servers.append(server)
        self._answering.append(asyncio.create_task(server.serve(sockets=[listener])))
        host, port = listener.getsockname()[:2]
        _LOG.info("%s on http://%s:%d, token in %s", name, host, port, self.opened.config.token_file)

    async def _close(self) -> None:
        """Answer what was asked, then close the sockets."""
        status = await self.opened.service.status()
        _LOG.info(
            "stopping: waiting up to %g s for %d rollouts in hand; %d wait for the next start;"
            " signal again to stop now",
            *(self.opened.config.http.stop_seconds, status.running, status.queued),
        )
        self.opened.service.refuse()  # ends the open streams, for which the server would wait
        for server in self._servers:
            server.should_exit = True
        await asyncio.gather(*self._answering)


async def load(opened: Opened) -> "Built":
    """See ``build.load``."""
    await asyncio.to_thread(import_module, "prorl_gym.api.build")  # takes so long that requests would wait for it
    from prorl_gym.api import build

    return await build.load(opened)


async def _compat_app(built: "Built", config: ServiceConfig, token: str) -> FastAPI:
    """Return the routes of the published server, ready to take calls."""
    from prorl_gym.api.compat.app import create_compat_app
    from prorl_gym.api.compat.port import CompatPort

    limits = config.http
    fleet = built.fleets[built.pool.name]
    port = CompatPort(
        built.service,
        limits.compat or CompatConfig(),
        built.environments,
        built.pool,
        fleet,
        max_pending=limits.max_pending,
    )
    await port.start()
    return create_compat_app(port, token, max_body_bytes=limits.max_body_bytes)


async def _stop(service: _Service, seconds: float, signals: _Signals) -> None:
    """Drain; past the time or at the second signal, leave the rest to the next start."""
    closing = asyncio.create_task(service.close())
    hurry = asyncio.create_task(signals.second.wait())
    await asyncio.wait({closing, hurry}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not closing.done():
        _LOG.warning("cutting off what is in hand; the next start makes it again")
        await service.opened.service.cut_off()
    await closing


def listen(host: str, port: int, key: str = "http.port") -> socket.socket:
    """Return a listening socket.

    Args:
        host: address.
        port: 0 takes a free one.
        key: of the configuration, for the message.

    Raises:
        ConfigError: the address is taken or not ours.
    """
    # Named: only then asyncio switches Nagle's algorithm off, with which answers wait 40 ms for acknowledgements.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{host}:{port}: cannot listen there ({error.strerror}).", f"Set {key} to a free one, or 0."
        ) from None
    return listener
