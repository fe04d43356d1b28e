"""The guest of the ``local`` backend: a plain process with resource limits and nothing more.

``python -m prorl_gym.sandbox.guest.local DESCRIPTOR OPTIONS`` where OPTIONS is JSON: limits, workdir, env.
"""

import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import replace

from prorl_gym.sandbox.guest.server import GuestOptions, serve
from prorl_gym.sandbox.guest.tree import ProcessTable
from prorl_gym.sandbox.protocol import SandboxLimits


def limit_resources(limits: SandboxLimits, hand_over: Callable[[int], None]) -> None:
    """Apply what works without a namespace. RLIMIT_NPROC would count every process of this user, so it is left out.

    There is no filter of calls, and so no listener to hand over.
    """
    for kind, wanted in (
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_FSIZE, limits.file_size),
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (value, value))


def main(descriptor: str, options: str) -> None:
    """Serve until the service is gone, then kill everything that was started."""
    control = socket.socket(fileno=int(descriptor))
    os.set_inheritable(control.fileno(), False)
    given = json.loads(options)
    limits = replace(SandboxLimits(), **given["limits"])
    os.setsid()
    os.chdir(given["workdir"])
    proc_fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        env, workdir = given["env"], given["workdir"]
        serve(control, GuestOptions(limits, workdir, env, proc_fd, False, limit_resources, is_isolated=False))
    finally:
        ProcessTable(proc_fd).kill_descendants(os.getpid())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
