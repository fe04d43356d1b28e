"""Runs the service behind uvicorn, on our own event loop, until a signal."""

import asyncio
import logging
import resource
import signal
import socket
from importlib import import_module
from typing import TYPE_CHECKING

from prorl_gym.api.app import app_from_context
from prorl_gym.api.app_context import AppContext
from prorl_gym.api.config import ServiceConfig
from prorl_gym.api.http.http_server import HttpServer
from prorl_gym.api.monitoring.tracing import RolloutTracer
from prorl_gym.api.startup import AcceptingService, load_or_create_token, open_service
from prorl_gym.errors import ConfigError
from prorl_gym.logs import register_secret
from prorl_gym.rollout.nodes.ray_nodes import RayCluster, RayLaunch, keep_nodes_placed
from prorl_gym.sandbox.protocol import sandbox_count_of

if TYPE_CHECKING:
    from prorl_gym.api.build import LoadedService

_LOG = logging.getLogger(__name__)


class StopSignals:
    """The first SIGINT or SIGTERM drains, the second one stops at once."""

    def __init__(self) -> None:
        self.drain_requested = asyncio.Event()
        self.abort_requested = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.abort_requested if self.drain_requested.is_set() else self.drain_requested).set()


async def serve(config: ServiceConfig, ray: RayCluster | None = None) -> None:
    """Accept, load, serve, and stop: the first signal drains running rollouts, a second one cuts them off.

    Args:
        config: of the service.
        ray: where to place nodes, if on Ray.

    Raises:
        ProrlError: see ``build_service``; or the address is in use.
    """
    signals = StopSignals()
    _raise_open_file_limit()
    token = await asyncio.to_thread(load_or_create_token, config.token_file)
    register_secret(token)
    with open_listener(config.http.host, config.http.port) as listener:
        service = _ServiceProcess(await open_service(config), token, listener, signals)
        tracing = RolloutTracer.from_environment()
        if tracing is not None:
            service.accepting.service.add_record_observer(tracing.export_rollout)
        placing = ray and asyncio.create_task(
            keep_nodes_placed(
                RayLaunch(
                    address=ray.address,
                    memory=ray.memory,
                    host=config.http.host,
                    port=listener.getsockname()[1],
                    token=token,
                    log_level=config.log.level,
                    log_format=config.log.format,
                )
            )
        )
        try:
            await service.serve_until_signal()
        finally:
            await stop_service(service, signals)
            if placing is not None:
                placing.cancel()
                await asyncio.wait({placing})
            if tracing is not None:
                await asyncio.to_thread(tracing.close)


def _raise_open_file_limit() -> None:
    """Let this process open as many files as the system does: every connection is one (see ``HttpServer``)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _ServiceProcess:
    """A service behind its socket: it answers while it loads its tokenizer, engines and sandboxes.

    Args:
        accepting: accepts rollouts.
        token: required by its routes.
        listener: of its routes.
        signals: stop it.
    """

    def __init__(self, accepting: AcceptingService, token: str, listener: socket.socket, signals: StopSignals) -> None:
        self.accepting = accepting
        self._token = token
        self._listener = listener
        self._signals = signals
        self._loaded: LoadedService | None = None

    async def serve_until_signal(self) -> None:
        """Answer requests until a signal.

        Raises:
            ProrlError: what it needs to begin rollouts cannot be loaded.
        """
        config = self.accepting.config.http
        context = AppContext.create(
            self.accepting.service,
            count_sandboxes=lambda: None if self._loaded is None else sandbox_count_of(self._loaded.backend),
            max_pending=config.max_pending,
            history_interval_seconds=config.history_seconds,
            node_config="" if self.accepting.config.nodes is None else self.accepting.config.to_node_json(),
            find_nodes=lambda: None if self._loaded is None else self._loaded.nodes,
        )
        async with context.history:
            app = app_from_context(context, self._token, config.max_body_bytes)
            server = HttpServer(app)
            serving = asyncio.create_task(server.serve(sockets=[self._listener]))
            host, port = self._listener.getsockname()[:2]
            _LOG.info("serving on http://%s:%d, token in %s", host, port, self.accepting.config.token_file)
            loading = asyncio.create_task(self._load(context))
            stopping = asyncio.create_task(self._signals.drain_requested.wait())
            try:
                await asyncio.wait({loading, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
                if loading.done() and loading.exception() is None:
                    await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
                loading.cancel()
                await asyncio.wait({loading})
                if self._loaded is None:
                    await context.policies.close()  # requests wait for pools that will not be loaded
                await self._log_stop()
                if self.accepting.config.nodes is not None:
                    await stop_service(self, self._signals)  # nodes report over HTTP until their work is done
                self.accepting.service.begin_shutdown()  # ends the open streams, for which the server would wait
                server.should_exit = True
                await serving
                await context.policies.close()
            if not loading.cancelled():
                loading.result()

    async def close(self) -> None:
        """Stop the service (see ``LoadedService.close``)."""
        if self._loaded is None:
            await self.accepting.service.stop(drain=False)
        else:
            await self._loaded.close()

    async def _load(self, context: AppContext) -> None:
        built = self._loaded = await load_service(self.accepting)
        context.attach_pools(built.pools, built.weight_updaters, built.registries, built.decode, built.render_prompt)
        _LOG.info("tokenizer and sandboxes are loaded: accepted rollouts begin")

    async def _log_stop(self) -> None:
        status = await self.accepting.service.status()
        _LOG.info(
            "stopping: waiting up to %g s for %d rollouts in hand; %d wait for the next start;"
            " signal again to stop now",
            *(self.accepting.config.http.stop_seconds, status.running, status.queued),
        )


async def load_service(accepting: AcceptingService) -> "LoadedService":
    """See ``build.load_service``."""
    await asyncio.to_thread(import_module, "prorl_gym.api.build")  # takes so long that requests would wait for it
    from prorl_gym.api import build

    return await build.load_service(accepting)


async def stop_service(service: _ServiceProcess, signals: StopSignals) -> None:
    """Drain; after some time or at the second signal, leave the rest to the next start. Idempotent."""
    seconds = service.accepting.config.http.stop_seconds
    closing = asyncio.create_task(service.close())
    hurry = asyncio.create_task(signals.abort_requested.wait())
    await asyncio.wait({closing, hurry}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not closing.done():
        _LOG.warning("cutting off running rollouts; the next start makes them again")
        await service.accepting.service.abort_drain()
    await closing


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Args:
        host: address.
        port: 0 takes a free one.

    Raises:
        ConfigError: the address is in use or not of this host.
    """
    # The protocol is named: only then asyncio disables Nagle's algorithm, which delays answers by 40 ms.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{host}:{port}: cannot listen there ({error.strerror}).", "Set http.port to a free one, or 0."
        ) from None
    return listener
