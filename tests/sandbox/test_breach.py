"""Which limit a command ran into: the naming alone, then every limit on a real backend.

``limits.memory`` is what a process has in memory: real runtimes reserve far more, and start.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from sandbox_support import closing, needs_python

from prorl_gym.sandbox.limit_breach import Breach, classify_breach
from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_python]

MB = 1 << 20


@pytest.mark.parametrize(
    ("facts", "breach"),
    [
        pytest.param({"exit_code": 0}, None, id="well"),
        pytest.param({"exit_code": 1}, None, id="failed for its own reasons"),
        pytest.param({"exit_code": 0, "truncated": True}, Breach.OUTPUT, id="output"),
        pytest.param({"exit_code": 130, "timed_out": True}, Breach.WALL_CLOCK, id="timeout"),
        pytest.param({"exit_code": 152}, Breach.CPU, id="SIGXCPU"),
        pytest.param({"exit_code": 153}, Breach.FILE_SIZE, id="SIGXFSZ"),
        pytest.param({"exit_code": 0, "observed": [Breach.MEMORY_SANDBOX]}, Breach.MEMORY_SANDBOX, id="killed"),
        pytest.param({"exit_code": 0, "observed": [Breach.PROCESSES]}, None, id="reached and coped"),
        pytest.param({"exit_code": 1, "observed": [Breach.DISK]}, Breach.DISK, id="full and failed"),
        pytest.param(
            {"exit_code": 137, "timed_out": True, "output": "sh: fork: retry: Resource temporarily unavailable\n"},
            Breach.PROCESSES,
            id="bash retries until its timeout",
        ),
        pytest.param(
            {"exit_code": 0, "output": "sh: fork: retry: Resource temporarily unavailable\n"},
            Breach.PROCESSES,
            id="bash retried and made it",
        ),
        pytest.param({"exit_code": 0, "output": "MemoryError"}, None, id="words of a success"),
        pytest.param({"exit_code": 1, "output": "MemoryError" + " " * 9000}, None, id="words long before the end"),
        pytest.param({"exit_code": 1, "output": "MemoryError\n"}, Breach.MEMORY_PROCESS, id="words of a failure"),
    ],
)
async def test_naming(facts: dict[str, object], breach: Breach | None) -> None:
    assert classify_breach(**{"observed": (), **facts}) is breach  # type: ignore[arg-type]


LIMITS = SandboxLimits(
    memory=110 * MB,
    total_memory=120 * MB,
    processes=40,
    open_files=64,
    file_size=4 * MB,
    root_size=16 * MB,
    shm_size=1 * MB,
    output=4096,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tight(backend: NamespaceBackend) -> AsyncIterator[RunningSandbox]:
    async with closing(await backend.start_sandbox(SandboxSpec(limits=LIMITS))) as box:
        yield box


TWO_HOGS = """python3 -c '
import os, signal, time
children = []
for _ in range(2):  # each fits alone
    children.append(os.fork())
    if children[-1] == 0:
        hog = bytearray(90 << 20)
        time.sleep(30)
first = os.wait()[0]
children.remove(first)
os.kill(children[0], signal.SIGKILL)
os._exit(1)'"""

HOG_BESIDE_ANOTHER = """
import subprocess, time
beside = subprocess.Popen(["python3", "-c", "import time; b = bytearray(40 << 20); time.sleep(30)"])
b = bytearray(80 << 20)
time.sleep(30)
"""

COMMANDS = [
    pytest.param("python3 -c 'bytearray(2 << 30)'", Breach.MEMORY_PROCESS, id="memory_process"),
    pytest.param(TWO_HOGS, Breach.MEMORY_SANDBOX, id="memory_sandbox"),
    pytest.param("for i in {1..60}; do sleep 3 & done; wait", Breach.PROCESSES, id="processes"),
    pytest.param("python3 -c 'x = [open(\"/dev/null\") for _ in range(99)]'", Breach.OPEN_FILES, id="open_files"),
    pytest.param("head -c 9000000 /dev/zero > /tmp/big", Breach.FILE_SIZE, id="file_size"),
    pytest.param(
        'python3 -c \'open("/tmp/big", "wb").write(bytes(9000000))\'', Breach.FILE_SIZE, id="file_size ignored"
    ),
    pytest.param("head -c 3000000 /dev/zero > /dev/shm/full", Breach.DISK, id="disk shm"),
    pytest.param("seq 60000", Breach.OUTPUT, id="output"),
    pytest.param("sleep 30", Breach.WALL_CLOCK, id="wall_clock"),
    pytest.param("false", None, id="no limit at all"),
]
CLEAN = "rm -f /tmp/big /dev/shm/full"


def seconds_for(breach: Breach | None) -> float:
    return 1.0 if breach in (Breach.WALL_CLOCK, Breach.PROCESSES) else 25


@pytest.mark.parametrize(("command", "breach"), COMMANDS)
async def test_exec_names_it(tight: RunningSandbox, command: str, breach: Breach | None) -> None:
    result = await tight.exec(["bash", "-c", command], timeout=seconds_for(breach))
    await tight.exec(["sh", "-c", CLEAN], timeout=10)
    assert result.breach is breach, result


@pytest.mark.parametrize(("command", "breach"), COMMANDS)
async def test_shell_names_it(tight: RunningSandbox, command: str, breach: Breach | None) -> None:
    shell = await tight.shell()
    result = await shell.run_command(command, timeout=seconds_for(breach))
    await tight.exec(["sh", "-c", CLEAN], timeout=10)
    assert result.breach is breach, result
    assert (await shell.run_command("echo still here", timeout=10)).output == "still here\n"


async def test_cpu_time_is_named(backend: NamespaceBackend) -> None:
    async with closing(await backend.start_sandbox(SandboxSpec(limits=SandboxLimits(cpu_seconds=1)))) as box:
        shell = await box.shell()
        direct, below = await asyncio.gather(
            box.exec(["sh", "-c", "while :; do :; done"], timeout=60),
            shell.run_command("sh -c 'while :; do :; done'", timeout=60),
        )
    assert (direct.breach, direct.timed_out) == (Breach.CPU, False), direct
    assert (below.breach, below.timed_out, below.restarted) == (Breach.CPU, False, False), below


async def test_full_root_is_named(tight: RunningSandbox) -> None:
    filler = "for i in 1 2 3 4 5 6; do head -c 4000000 /dev/zero > /tmp/f$i || exit 1; done"
    result = await tight.exec(["sh", "-c", filler + " 2>/dev/null"], timeout=20)  # nothing but the fact can tell
    await tight.exec(["sh", "-c", "rm -f /tmp/f*"], timeout=10)
    assert result.exit_code == 1 and result.breach is Breach.DISK, result


async def test_python_session_names_them(tight: RunningSandbox) -> None:
    python = await tight.python()
    assert (await python.run_cell("bytearray(2 << 30)", timeout=20)).breach is Breach.MEMORY_PROCESS
    assert (await python.run_cell("while True: pass", timeout=0.3)).breach is Breach.WALL_CLOCK
    result = await python.run_cell(HOG_BESIDE_ANOTHER, timeout=25)
    assert result.breach is Breach.MEMORY_SANDBOX and result.restarted, result
    assert (await python.run_cell("1 + 1", timeout=20)).output == "2\n"


@pytest.mark.default
async def test_only_the_hog_dies(tight: RunningSandbox) -> None:
    innocent = asyncio.ensure_future(tight.exec(["sh", "-c", "sleep 1; echo lived"], timeout=30))
    hog = await tight.exec(["python3", "-c", "import time; b = bytearray(300 << 20); time.sleep(30)"], timeout=25)
    assert hog.breach in (Breach.MEMORY_PROCESS, Breach.MEMORY_SANDBOX) and hog.exit_code == 137, hog
    assert (await innocent).stdout == b"lived\n" and (await innocent).breach is None


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
async def roomy(backend: NamespaceBackend) -> AsyncIterator[RunningSandbox]:
    limits = SandboxLimits(memory=200 * MB, total_memory=400 * MB)
    async with closing(await backend.start_sandbox(SandboxSpec(limits=limits))) as box:
        yield box


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["/usr/bin/python3", "-c", RESERVE], b"True\nTrue\n"),
        pytest.param(["node", "-e", WEB_ASSEMBLY], b"65536\n", marks=pytest.mark.node),
        pytest.param(["java", "-Xmx8g", "-version"], b"", marks=pytest.mark.java),
    ],
    ids=["mappings", "node", "java"],
)
async def test_what_is_reserved_is_no_memory(roomy: RunningSandbox, argv: list[str], shown: bytes) -> None:
    result = await roomy.exec(argv, timeout=60)
    assert (result.exit_code, result.stdout) == (0, shown), result


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(
            ["/usr/bin/python3", "-c", "import time; b = bytearray(b'1') * (300 << 20); time.sleep(30)"],
            marks=pytest.mark.default,
        ),
        pytest.param(["node", "-e", HOARD], marks=pytest.mark.node),
    ],
    ids=["python", "node"],
)
async def test_what_is_touched_is(roomy: RunningSandbox, argv: list[str]) -> None:
    result = await roomy.exec(argv, timeout=60)
    assert (result.exit_code, result.breach) == (137, Breach.MEMORY_PROCESS), result


async def test_a_command_may_have_less(roomy: RunningSandbox) -> None:
    hold = ["/usr/bin/python3", "-c", "import time; b = bytearray(b'1') * (100 << 20); time.sleep(3)"]
    narrow = await roomy.exec(hold, timeout=60, limits=replace(roomy.spec.limits, memory=60 * MB))
    assert (narrow.exit_code, narrow.breach) == (137, Breach.MEMORY_PROCESS), narrow
    assert (await roomy.exec(hold, timeout=60)).exit_code == 0
