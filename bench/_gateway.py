"""Jupyter Kernel Gateway as a python tool: over HTTP and a WebSocket on TCP loopback, on the host."""

import asyncio
import json
import os
import socket
import time
from uuid import uuid4

import aiohttp

_TRIES = 200


async def measure(cells: int) -> tuple[float, list[float]] | None:
    """Return ms until the first ``1+1`` was answered, and of later ones; ``None`` where it is not installed."""
    python = os.environ.get("PRORL_BENCH_GATEWAY")
    if python is None:
        return None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.perf_counter()
    gateway = await asyncio.create_subprocess_exec(
        *(python, "-m", "kernel_gateway", f"--KernelGatewayApp.port={port}"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            kernel = await _kernel(client)
            async with client.ws_connect(f"/api/kernels/{kernel}/channels") as connection:
                await _cell(connection)
                ready = (time.perf_counter() - began) * 1000
                times: list[float] = []
                for _ in range(cells):
                    asked = time.perf_counter()
                    await _cell(connection)
                    times.append((time.perf_counter() - asked) * 1000)
                return ready, times
    finally:
        gateway.terminate()
        await gateway.wait()


async def _kernel(client: aiohttp.ClientSession) -> str:
    for _ in range(_TRIES):  # it says nothing when it is up
        try:
            async with client.post("/api/kernels") as answer:
                return (await answer.json())["id"]
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(0.05)
    raise RuntimeError("the kernel gateway did not come up")


async def _cell(connection: aiohttp.ClientWebSocketResponse) -> None:
    number = uuid4().hex
    header = {"msg_id": number, "msg_type": "execute_request", "username": "", "session": number, "version": "5.3"}
    content = {"code": "1+1", "silent": False, "store_history": False, "allow_stdin": False}
    empty: dict[str, str] = {}
    message = {"header": header, "parent_header": empty, "metadata": empty, "content": content, "channel": "shell"}
    await connection.send_str(json.dumps(message))
    async for packet in connection:
        reply = json.loads(packet.data)
        if reply["msg_type"] == "execute_reply" and reply["parent_header"].get("msg_id") == number:
            if reply["content"]["status"] != "ok":
                raise RuntimeError(f"the kernel answered {reply['content']}")
            return
