"""What ``prorl-gym doctor`` says about the programs of this host, beside the sandboxes."""

import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from rich.console import Console

from prorl_gym.sandbox.findings import Finding, Verdict

_OLDEST = (3, 11)
_GYMS_OLDEST = (3, 13, 14)
_SANDBOX_PYTHON = "/usr/bin/python3"


def host_facts() -> list[Finding]:
    """Return what this host has and lacks; starts nothing."""
    bash = shutil.which("bash", path="/usr/bin:/bin")
    has_python = os.access(_SANDBOX_PYTHON, os.X_OK)
    return [
        _python(),
        _gym(),
        Finding(
            _SANDBOX_PYTHON,
            _verdict(has_python),
            os.path.realpath(_SANDBOX_PYTHON) if has_python else "not there: sandboxes of the host's /usr need it",
            "apt install python3, or give images of your own.",
        ),
        Finding("bash", _verdict(bash is not None), bash or "not in /usr/bin or /bin", "apt install bash."),
    ]


def _verdict(there: bool) -> Verdict:
    return "yes" if there else "no"


def wide_console() -> Console:
    """Return a console that does not cut lines for a file or a pipe, which have no width."""
    console = Console()
    return console if console.is_terminal else Console(width=400)


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding(
        "python",
        _verdict(sys.version_info >= _OLDEST),
        f"{found} ({sys.executable})",
        "prorl-gym needs Python 3.11 or newer.",
    )


def _gym() -> Finding:
    """NeMo Gym is one way to use the package, so that it is missing is for information."""
    try:
        there = find_spec("nemo_gym") is not None
        detail = version("nemo-gym")
    except PackageNotFoundError:
        there, detail = False, ""
    if not there:
        wanted = ".".join(map(str, _GYMS_OLDEST))
        return Finding("NeMo Gym", "info", f"not installed here (pip install nemo-gym, Python {wanted} or newer)")
    return Finding("NeMo Gym", "yes", detail)
