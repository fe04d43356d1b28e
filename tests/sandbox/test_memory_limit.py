"""``limits.memory`` is what a process has in memory: real runtimes reserve far more, and start."""

import os
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from prorl_gym.sandbox.limit_breach import Breach
from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="the host has no /usr/bin/python3"),
]

MB = 1 << 20
RESERVE = """
import ctypes, mmap
c = ctypes.CDLL(None)
c.mmap.restype = ctypes.c_void_p
c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for protection in (0, 3):
    print(c.mmap(None, 64 << 30, protection, 0x4022, -1, 0) != ctypes.c_void_p(-1).value)
"""
WEB_ASSEMBLY = "console.log(new WebAssembly.Memory({initial: 1, maximum: 65536}).buffer.byteLength)"
"""V8 reserves 10 GB for one such memory."""
HOARD = "const kept = []; for (;;) kept.push(new Uint8Array(1 << 24).fill(1))"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tight(backend: NamespaceBackend) -> AsyncIterator[RunningSandbox]:
    limits = SandboxLimits(memory=200 * MB, total_memory=400 * MB)
    box = await backend.start_sandbox(SandboxSpec(limits=limits))
    yield box
    await box.close()


async def test_what_is_reserved_is_no_memory(tight: RunningSandbox) -> None:
    result = await tight.exec(["/usr/bin/python3", "-c", RESERVE], timeout=30)
    assert result.stdout == b"True\nTrue\n", result


@pytest.mark.default
async def test_what_is_touched_is(tight: RunningSandbox) -> None:
    result = await tight.exec(
        ["/usr/bin/python3", "-c", "import time; b = bytearray(b'1') * (300 << 20); time.sleep(30)"], timeout=60
    )
    assert (result.exit_code, result.breach) == (137, Breach.MEMORY_PROCESS), result


async def test_a_command_may_have_less(tight: RunningSandbox) -> None:
    hold = ["/usr/bin/python3", "-c", "import time; b = bytearray(b'1') * (100 << 20); time.sleep(3)"]
    narrow = await tight.exec(hold, timeout=60, limits=replace(tight.spec.limits, memory=60 * MB))
    assert (narrow.exit_code, narrow.breach) == (137, Breach.MEMORY_PROCESS), narrow
    assert (await tight.exec(hold, timeout=60)).exit_code == 0


@pytest.mark.node
async def test_node_reserves_more_than_it_may_have(tight: RunningSandbox) -> None:
    result = await tight.exec(["node", "-e", WEB_ASSEMBLY], timeout=60)
    assert (result.exit_code, result.stdout) == (0, b"65536\n"), result


@pytest.mark.node
async def test_node_that_takes_too_much_is_named(tight: RunningSandbox) -> None:
    result = await tight.exec(["node", "-e", HOARD], timeout=60)
    assert (result.exit_code, result.breach) == (137, Breach.MEMORY_PROCESS), result


@pytest.mark.java
async def test_java_starts_with_a_heap_larger_than_it_may_have(tight: RunningSandbox) -> None:
    result = await tight.exec(["java", "-Xmx8g", "-version"], timeout=60)
    assert result.exit_code == 0, result
