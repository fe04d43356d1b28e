"""Unix sockets against TCP loopback for the channels as they are: the guest's control channel, and the shell.

Both run on the ``local`` backend's guest, which shares the host's network. The control channel is a connected socket
either way. The shell's descriptors cannot travel over TCP: there, and for comparison over Unix sockets, a relay as a
guest would have to be one carries nonces and reports.
"""

import asyncio
import json
import os
import select
import socket
import sys
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Any

from _load import times_ms
from _report import Figure, figure, peer

from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec, Shell
from prorl_gym.sandbox.service.guest_channel import GuestChannel, GuestReply
from prorl_gym.sandbox.service.operations.shell import PersistentShell

_GUEST = "prorl_gym.sandbox.guest.container_entry"
_WARM_UP = 20


def connected_pair(kind: str) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection: ``packets`` and ``unix`` (stream) are Unix sockets, ``tcp`` is loopback."""
    if kind != "tcp":
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET if kind == "packets" else socket.SOCK_STREAM)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for end in (ours, theirs):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


class RelayedChannel(GuestChannel):
    """A channel whose shells are reached through a relay in another process."""

    def __init__(self, sock: socket.socket, kind: str) -> None:
        super().__init__(sock)
        self._kind = kind
        self.relays: list[asyncio.subprocess.Process] = []

    async def request(self, op: str, **fields: Any) -> GuestReply:
        """Ask the guest; a shell's nonces and reports come back as ends of connections of the wanted kind."""
        reply = await super().request(op, **fields)
        if op != "shell" or not self._kind:
            return reply
        master, nonces, reports, text = reply.descriptors
        (write, nonce_source), (read, report_sink) = connected_pair(self._kind), connected_pair(self._kind)
        inside = (nonce_source.fileno(), nonces, reports, report_sink.fileno())
        command = (sys.executable, __file__, *map(str, inside))
        self.relays.append(await asyncio.create_subprocess_exec(*command, pass_fds=inside))
        for end in (nonce_source, report_sink):
            end.close()
        os.close(nonces)
        os.close(reports)
        return GuestReply(reply.fields, [master, write.detach(), read.detach(), text])


def relay(pairs: dict[int, int]) -> None:
    """Carry bytes from each key to its value until one ends."""
    poll = select.poll()
    for source in pairs:
        poll.register(source, select.POLLIN)
    while True:
        for source, _ in poll.poll():
            data = os.read(source, 65536)
            if not data:
                return
            os.write(pairs[source], data)


async def time_echoes(shell: Shell, count: int) -> list[float]:
    """Return ms of each ``echo hi`` in a shell."""

    async def echo() -> None:
        result = await shell.run_command("echo hi", timeout=30)
        if (result.output, result.exit_code) != ("hi\n", 0):
            raise RuntimeError(f"echo hi answered {result}")

    return await times_ms(count, echo, _WARM_UP)


async def _measure(control: str, relayed: str, count: int) -> tuple[list[float], list[float]]:
    """Return ms of pings of the guest and of ``echo hi`` in its shell."""
    ours, theirs = connected_pair(control)
    with TemporaryDirectory() as directory:
        spec = SandboxSpec(workdir=directory)
        env = {"PATH": os.defpath, "HOME": directory, "LANG": "C.UTF-8"}
        options = json.dumps({"limits": asdict(SandboxLimits()), "workdir": directory, "env": env})
        with theirs:
            guest = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _GUEST, str(theirs.fileno()), options), pass_fds=[theirs.fileno()]
            )
        channel = RelayedChannel(ours, relayed)
        try:
            await channel.wait_ready()
            pings = await times_ms(count, lambda: channel.request("ping"), _WARM_UP)
            echoes: list[float] = []
            if control == "packets":  # descriptors travel beside these alone
                shell = PersistentShell(channel, spec)
                echoes = await time_echoes(shell, count)
                await shell.close()
        finally:
            channel.close()
            await guest.wait()
            for each in channel.relays:
                await each.wait()  # it ends with the connections
        return pings, echoes


async def measure(count: int) -> list[Figure]:
    pings, direct = await _measure("packets", "", count)
    tcp_pings, _ = await _measure("tcp", "", count)
    _, unix = await _measure("packets", "unix", count)
    _, tcp = await _measure("packets", "tcp", count)
    return [
        figure(
            "control channel: round trip to the guest, Unix socket",
            pings,
            "ms",
            peers=[peer("the same guest over TCP loopback", tcp_pings)],
        ),
        figure(
            "shell channel: echo hi, descriptors handed over by a Unix socket",
            direct,
            "ms",
            peers=[peer("relayed over Unix sockets", unix), peer("relayed over TCP loopback", tcp)],
        ),
    ]


if __name__ == "__main__":
    source, sink, other_source, other_sink = map(int, sys.argv[1:])
    relay({source: sink, other_source: other_sink})
