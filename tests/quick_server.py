"""uvicorn's server for tests: it does not look every tenth of a second whether its end has come, nor sleep there."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from prorl_gym.api.http.http_server import HttpServer
from prorl_gym.api.service_process import bind_socket


class QuickServer(uvicorn.Server):
    """Serves between ``begin`` and ``end``."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._over.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks and not self.force_exit:
            await asyncio.wait(self.server_state.tasks, timeout=10)
        await self.lifespan.shutdown()

    async def begin(self, listener: socket.socket) -> str:
        """Serve on a bound socket, return its address."""
        listener.listen()
        self._over = asyncio.Event()
        self._task = asyncio.create_task(self.serve(sockets=[listener]))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def end(self) -> None:
        """End as the server does on its own, or at once with ``force_exit``."""
        self.should_exit = True
        self._over.set()
        await asyncio.wait_for(self._task, 15)


class QuickHttpServer(HttpServer, QuickServer):
    """The same of the service's own server."""


@asynccontextmanager
async def listening(app: Any, lifespan: Any = "off") -> AsyncGenerator[str]:
    """Serve an app on a free port of the loopback; yield its address."""
    server = QuickServer(uvicorn.Config(app, log_config=None, log_level="error", lifespan=lifespan, access_log=False))
    with bind_socket("127.0.0.1", 0) as listener:
        try:
            yield await server.begin(listener)
        finally:
            await server.end()
