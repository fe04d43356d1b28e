"""The template of python workers (``guest/python_template.py``) as a child of the spawner."""

import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.guest.fork_exec import close_all_except
from prorl_gym.sandbox.guest.guest_messages import PacketError, encode_packet, receive_packet, send_packet
from prorl_gym.sandbox.spawner.kernel_files import raise_oom_score
from prorl_gym.sandbox.spawner.runtime_supervisor import guest_bundle, sealed_memfd

_BOOT = "import sys; from prorl_gym.sandbox.guest.python_template import main; main(sys.argv[1:])"
"""Run with ``-c``, as a fresh worker is, so that ``sys.path`` begins as it does there."""


class TemplateProcess:
    """A started template, which forks workers on request.

    Args:
        program: path of the interpreter.
        packages: directory of IPython, or "".
        env: complete environment: that of sandboxes over the host's ``/usr``.
        directory: for temporary files while it loads; made here, and removed by the caller.

    Raises:
        OSError: it could not be forked.
    """

    def __init__(self, program: str, packages: str, env: Mapping[str, str], directory: Path) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        bundle = sealed_memfd("guest", guest_bundle())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _exec_template(program, packages, {**env, "TMPDIR": str(directory)}, theirs.fileno(), bundle)
        finally:
            theirs.close()
            os.close(bundle)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when it is ready, and when it has ended."""
        return self._socket.fileno()

    def receive_runner(self) -> str:
        """Return what its workers run cells with ("ipython" or "console"), once it is readable; "": it has ended."""
        try:
            received = receive_packet(self._socket)
        except (OSError, PacketError):
            received = None
        return "" if received is None else str(received[0]["runner"])

    def request_worker(self, guest_socket: int, cgroup: int | None) -> None:
        """Request the fork of a worker. A template that cannot do so closes the guest's socket, which the guest sees.

        Args:
            guest_socket: descriptor of the guest's socket, from which the worker is configured.
            cgroup: descriptor of the directory of the sandbox's cgroup, if it has one.
        """
        try:
            send_packet(self._socket, encode_packet({}), [guest_socket] if cgroup is None else [guest_socket, cgroup])
        except OSError:
            return  # it has ended; its socket is readable

    def close(self) -> None:
        """Kill it and wait for its end; workers that it forked go on."""
        self._socket.close()
        os.kill(self.pid, signal.SIGKILL)  # our child and not waited for: it exists
        os.waitpid(self.pid, 0)


def _exec_template(program: str, packages: str, env: Mapping[str, str], connection: int, bundle: int) -> None:
    """In the child: become the template. Never returns."""
    try:
        syscalls.set_dumpable(True)  # as after every exec; a file of /proc belongs to the host's root otherwise
        raise_oom_score()
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        for standard in (1, 2):  # as a worker has them: Python's streams remember whether they can seek
            os.dup2(os.pipe()[1], standard)
        close_all_except(0, 1, 2, connection, bundle)
        os.setsid()
        for descriptor in (connection, bundle):
            os.set_inheritable(descriptor, True)
        path = f"/proc/self/fd/{bundle}"
        os.execve(program, ["python3", "-c", _BOOT, str(connection), packages, path], {**env, "PYTHONPATH": path})
    finally:
        os._exit(127)
