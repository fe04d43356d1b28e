"""A service that never rests: ``python cycle_service.py BACKEND SCRATCH LANES``.

Each lane starts a sandbox, uses it and stops it, for ever. Prints the spawner's pid, then a line per cycle. A sandbox
that is killed meanwhile is a cycle, too: what matters is what is left behind.
"""

import asyncio
import itertools
import sys
from pathlib import Path

from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend

SHARED_BYTES = 8 << 20
"""Written to /dev/shm in every fourth cycle."""
_LISTEN = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('/tmp/s'); s.listen(); time.sleep(1000)"


async def use(backend: NamespaceBackend, number: int) -> None:
    box = await backend.start_sandbox(SandboxSpec())
    try:
        match number % 4:
            case 0:
                await box.exec(["sh", "-c", f'setsid sleep 1000 & setsid python3 -c "{_LISTEN}" & :'], timeout=20)
            case 1:
                await (await box.shell()).run_command("sleep 1000 & cd /usr; echo $?", timeout=20)
            case 2:
                await box.write_file("file", b"x" * 100_000)
            case _:
                await box.exec(["sh", "-c", f"head -c {SHARED_BYTES} /dev/zero > /dev/shm/kept"], timeout=20)
    finally:
        await box.close()


async def lane(backend: NamespaceBackend) -> None:
    for number in itertools.count():
        try:
            await use(backend, number)
            print("used", flush=True)
        except SandboxError as error:
            print("lost", error.kind, flush=True)


async def main(name: str, scratch: str, lanes: int) -> None:
    backend = NamespaceBackend("apptainer" if name == "apptainer" else "userns", SandboxConfig(scratch=Path(scratch)))
    print(await backend.spawner_pid(), flush=True)
    async with asyncio.TaskGroup() as group:
        for _ in range(lanes):
            group.create_task(lane(backend))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
