"""How a sandbox that fails while it is being built says so: one message on the control socket, then it exits."""

import json
import os
import socket

from prorl_gym.errors import FailureKind, SandboxError

_SHOWN = 600
"""Longest text of one line, in characters: the causes may quote a program's output."""


def report(control: socket.socket, error: BaseException) -> None:
    """Tell the service why there will be no sandbox. The reader may be gone already; then nobody needs to know."""
    message = {"type": "failed", **describe(error)}
    try:
        control.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL)
    except OSError:
        return


def describe(error: BaseException) -> dict[str, str]:
    """Return kind, cause and fix of an error as the message carries them."""
    if isinstance(error, SandboxError):
        return {"kind": error.kind.value, "what": error.what[:_SHOWN], "fix": error.fix[:_SHOWN]}
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        what = f"the sandbox could not be built: {error.strerror or error}{where}."
        return _unavailable(what, "Run `prorl-gym doctor`; it names what this machine lacks.")
    return _unavailable(
        f"the sandbox could not be built: {type(error).__name__}: {error}", "This is a defect; please report it."
    )


def _unavailable(what: str, fix: str) -> dict[str, str]:
    return {"kind": FailureKind.SANDBOX_UNAVAILABLE.value, "what": " ".join(what.split())[:_SHOWN], "fix": fix}


def close_all_except(*kept: int) -> None:
    """Close every descriptor but these: the sockets of other sandboxes must not leak into a new one."""
    low = 0
    for descriptor in sorted(kept):
        if low < descriptor:  # closerange(0, 0) would close everything
            os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))
