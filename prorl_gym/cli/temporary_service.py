"""A service that lives as long as one command: it evaluates a model behind an address."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prorl_gym.errors import ConfigError, ProrlError

if TYPE_CHECKING:
    from prorl_gym.client import SyncClient

_ADDRESS_LINE = re.compile(r"serving on (http://[\w.:\[\]-]+)")
_STOP_TIMEOUT_SECONDS = 60.0


@contextmanager
def temporary_service(config: Mapping[str, Any]) -> Generator["SyncClient", None, None]:
    """Start a service on a free port with a state directory of its own; stop it and remove everything at the end.

    ``state`` and ``http`` of the configuration are set here. It ends with this process, however that ends; only SIGKILL
    leaves its directory behind. Raises ``ConfigError`` if it does not start; the message ends with its last output.
    """
    from prorl_gym.client import SyncClient
    from prorl_gym.client.service_credentials import read_token

    with tempfile.TemporaryDirectory(prefix="prorl-evaluate-") as place:
        state = Path(place) / "state"
        file = Path(place) / "service.yaml"
        whole = {**config, "state": str(state), "http": {"stop_seconds": 1.0}, "log": {"format": "plain"}}
        file.write_text(json.dumps(whole), encoding="utf-8")  # JSON is YAML
        child = subprocess.Popen(
            [sys.executable, "-m", "prorl_gym.cli.temporary_service", str(os.getpid()), str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            address = _wait_until_ready(child, f"{file}: ")
            with SyncClient(address, token=read_token(state / "token")) as client:
                yield client
        finally:
            child.terminate()
            try:
                child.wait(_STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            finally:  # after a second Ctrl-C too
                child.kill()
                child.wait()


def _wait_until_ready(child: "subprocess.Popen[str]", place: str) -> str:
    """Return the address, which is logged once the service answers.

    Errors leave out ``place``: the user did not write that file.
    """
    assert child.stdout is not None
    output: deque[str] = deque(maxlen=4)
    for line in child.stdout:
        output.append(line.strip())
        if address := _ADDRESS_LINE.search(line):
            # Keep reading: a full pipe would block it.
            threading.Thread(target=deque, args=(child.stdout, 0), name="own-service-log", daemon=True).start()
            return address[1]
    last = " ".join(output).replace(place, "")
    raise ConfigError(f"The service does not start: {last[-500:]}", "Fix that, and start again.")


if __name__ == "__main__":  # serve until a signal comes or the parent ends, even by SIGKILL
    from prorl_gym.cli.serve import serve
    from prorl_gym.sandbox.syscalls import set_parent_death_signal

    set_parent_death_signal(signal.SIGTERM)
    try:
        if os.getppid() == int(sys.argv[1]):  # otherwise the parent ended before the signal was set
            serve(Path(sys.argv[2]), port=0)
    except ProrlError as error:
        sys.exit(str(error))
