"""A service to be killed: ``python busy_service.py BACKEND COUNT SCRATCH``.

Starts busy sandboxes, prints one JSON line with the pids involved, then waits for ever.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import cast

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

# Children that leave their session, their parent and their process group, and one that keeps forking.
BUSY = """
sleep 1000 & setsid sleep 1000 & (setsid sh -c 'sleep 1000 & sleep 1000' &) ; (exec -a disguised sleep 1000 &)
trap '' TERM INT HUP
while :; do sleep 0.05; done &
"""


async def main(name: BackendName, count: int, scratch: str) -> None:
    config = SandboxConfig(scratch=Path(scratch), uid=os.stat(scratch).st_uid)
    backend = NamespaceBackend(name, config)
    boxes = [await backend.start_sandbox(SandboxSpec()) for _ in range(count)]
    for box in boxes:
        await (await box.shell()).run_command(BUSY, timeout=10)
        await (await box.python()).run_cell("import subprocess; subprocess.Popen(['sleep', '1000'])", timeout=30)
    print(json.dumps({"spawner": await backend.spawner_pid(), "boxes": [box.id for box in boxes]}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(cast(BackendName, sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
