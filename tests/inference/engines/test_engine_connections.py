"""Connections to engines are kept: a turn does not pay for a new one."""

import asyncio

from fake_vllm import FakeVllm

from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.testing.inference.engine_conformance import request


async def test_calls_share_a_connection() -> None:
    async with FakeVllm() as server:
        host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
        connections = 0

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.close()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            server_reader, server_writer = await asyncio.open_connection(host, int(port))
            await asyncio.gather(forward(reader, server_writer), forward(server_reader, writer))

        async with await asyncio.start_server(accept, "127.0.0.1") as counted:
            address = f"http://127.0.0.1:{counted.sockets[0].getsockname()[1]}/v1"
            engine = VllmEngine("e", address, VllmOptions(model="m", vocab_size=100, request_seconds=5.0))
            for _ in range(10):
                await engine.generate(request())
            await engine.close()
    assert (len(server.bodies), connections) == (10, 1)
