"""A listening socket inside a sandbox: no other sandbox reaches it, nor does this host."""

import asyncio
import socket

import pytest

from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_only_the_sandbox_itself_reaches_the_port(box: RunningSandbox, backend: NamespaceBackend) -> None:
    other = await backend.start_sandbox(SandboxSpec())
    try:
        # Bound but not listening: the host refuses connections to the port that the sandbox listens on.
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            port = silent.getsockname()[1]
            connect = ["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}"]
            with await box.listen(port) as listener:
                assert listener.getsockname() == ("127.0.0.1", port)
                assert (await other.exec(connect, timeout=20)).exit_code != 0
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(silent.getsockname(), timeout=5)
                assert (await box.exec(connect, timeout=20)).exit_code == 0
    finally:
        await other.close()


async def test_the_end_of_a_sandbox_cuts_its_connections(backend: NamespaceBackend) -> None:
    loop = asyncio.get_running_loop()
    doomed = await backend.start_sandbox(SandboxSpec())
    with await doomed.listen(0) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        program = asyncio.ensure_future(
            doomed.exec(["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}; read -r line <&3"], timeout=60)
        )
        async with asyncio.timeout(20):
            connection, _ = await loop.sock_accept(listener)
            with connection:
                await doomed.close()
                assert await loop.sock_recv(connection, 1) == b""
    await asyncio.gather(program, return_exceptions=True)
