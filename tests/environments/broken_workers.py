"""Functions for worker processes that misbehave, one way each."""

import os
import time
from typing import Any


def obey(body: Any) -> Any:
    """Do what the body says."""
    if body == "loop":
        while True:
            pass
    if body == "sleep":
        time.sleep(600)
    if body == "die":
        os.abort()
    if body == "eat":
        return len([bytearray(1 << 20) for _ in range(10_000)])
    if body == "raise":
        raise ValueError("no")
    if body == "environment":
        return sorted(os.environ)
    if body == "pid":
        return os.getpid()
    return {"equal": True, "echo": body}
