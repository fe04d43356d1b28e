"""Runs the service behind uvicorn, on our own event loop, until a signal."""

import asyncio
import logging
import resource
import signal
import socket

from prorl_gym.api.app import create_app
from prorl_gym.api.app_context import AppContext
from prorl_gym.api.build import LoadedService, build_service, load_or_create_token
from prorl_gym.api.config import NODE_FIELDS, ServiceConfig
from prorl_gym.api.http.http_server import HttpServer
from prorl_gym.api.monitoring.tracing import RolloutTracer
from prorl_gym.errors import ConfigError
from prorl_gym.logs import register_secret
from prorl_gym.rollout.nodes.ray_nodes import RayCluster, RayLaunch, keep_nodes_placed
from prorl_gym.sandbox.protocol import sandbox_count_of

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
    """Load, serve, and stop: the first signal drains running rollouts, a second one cuts them off.

    Raises what ``build_service`` does, and ``ConfigError`` when the address is in use.
    """
    signals = StopSignals()
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # every connection is one (see ``HttpServer``)
    token = await asyncio.to_thread(load_or_create_token, config.token_file)
    register_secret(token)
    # Bound first: an address in use ends the start before anything is loaded.
    with bind_socket(config.http.host, config.http.port) as listener:
        tracing = RolloutTracer.from_environment()
        placing = None
        try:
            _LOG.info("loading tokenizer and sandboxes: connections are refused until then")
            service = await _load_until_signal(config, token, tracing, signals)
            if service is None:
                _LOG.info("stopped while loading")
                return
            if ray is not None:
                placing = asyncio.create_task(
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
                await service.serve_until_signal(listener)
            finally:
                await service.stop()
        finally:
            if placing is not None:
                placing.cancel()
                await asyncio.wait({placing})
            if tracing is not None:
                await asyncio.to_thread(tracing.close)


async def _load_until_signal(
    config: ServiceConfig, token: str, tracing: RolloutTracer | None, signals: StopSignals
) -> "_ServiceProcess | None":
    """Build and start the service; ``None``: a signal came first."""

    async def load() -> _ServiceProcess:
        built = await build_service(config)
        if tracing is not None:  # without an await after the start: no record is missed
            built.service.record_observers.append(tracing.export_rollout)
        return _ServiceProcess(built, config, token, signals)

    loading = asyncio.create_task(load())
    stopping = asyncio.create_task(signals.drain_requested.wait())
    try:
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        loading.cancel()  # does nothing when it is done
        await asyncio.wait({loading})
    return None if loading.cancelled() else loading.result()


class _ServiceProcess:
    def __init__(self, built: LoadedService, config: ServiceConfig, token: str, signals: StopSignals) -> None:
        self._built = built
        self._config = config
        self._token = token
        self._signals = signals
        self._context = AppContext(
            built.service,
            pools=built.pools,
            weight_updaters=built.weight_updaters,
            registries=built.registries,
            count_sandboxes=lambda: sandbox_count_of(built.backend),
            decode=built.codec.decode,
            render_prompt=built.render_prompt,
            max_pending=config.http.max_pending,
            history_interval_seconds=config.http.history_seconds,
            nodes=built.nodes,
            node_config="" if built.nodes is None else config.model_dump_json(include=NODE_FIELDS),
        )

    async def serve_until_signal(self, listener: socket.socket) -> None:
        """Answer requests on a bound socket until a signal.

        Raises ``ConfigError``: another process has begun to listen on the address.
        """
        host, port = listener.getsockname()[:2]
        try:
            listener.listen()
        except OSError as error:
            raise ConfigError(
                f"{host}:{port}: cannot listen there any more ({error.strerror}).", "Set another port, or 0."
            ) from None
        context = self._context
        async with context.history:
            server = HttpServer(create_app(context, self._token, self._config.http.max_body_bytes))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            stopping = asyncio.create_task(self._signals.drain_requested.wait())
            _LOG.info("serving on http://%s:%d, token in %s", host, port, self._config.token_file)
            try:
                await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
                status = await self._built.service.status()
                _LOG.info(
                    "stopping: waiting up to %g s for %d running rollouts; %d wait for the next start;"
                    " signal again to stop now",
                    *(self._config.http.stop_seconds, status.running, status.queued),
                )
                if self._built.nodes is not None:
                    await self.stop()  # nodes report over HTTP until their work is done
                self._built.service.begin_shutdown()  # ends the open streams, for which the server would wait
                server.should_exit = True
                await serving
                for policy in context.policies.values():
                    await policy.close()

    async def stop(self) -> None:
        """Drain; after some time or at the second signal, leave the rest to the next start. Idempotent."""
        closing = asyncio.create_task(self._built.close())
        hurry = asyncio.create_task(self._signals.abort_requested.wait())
        seconds = self._config.http.stop_seconds
        await asyncio.wait({closing, hurry}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not closing.done():
            _LOG.warning("cutting off running rollouts; the next start retries them")
            await self._built.service.abort_drain()
        await closing


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; connections to it are refused until it listens. Port 0: any free one.

    Raises ``ConfigError``: the address is in use or not of this host.
    """
    # The protocol is named: only then asyncio disables Nagle's algorithm, which delays answers by 40 ms.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"{host}:{port}: cannot listen there ({error.strerror}).", "Set http.port to a free one, or 0."
        ) from None
    return bound
