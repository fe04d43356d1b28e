"""What the service tells the spawner about one sandbox, and the packets between the two.

Both ends are our own code, yet the service may be root and the spawner is not: the service never acts on anything but
the fields read here.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prorl_gym.sandbox.protocol import Mount, SandboxLimits, SandboxSpec

BackendName = Literal["userns", "apptainer", "bwrap", "apptainer-plain"]

PACKET_LIMIT = 192 << 10
"""Largest packet, in bytes: below the default send buffer of a Unix socket."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One sandbox to start."""

    id: str
    backend: BackendName
    spec: SandboxSpec
    program: str = ""
    """Path of Apptainer or bubblewrap, for backends that use one."""
    lower: tuple[str, ...] = ()
    """Directories of the image, topmost first; none for the host's ``/usr``. ``apptainer-plain`` also takes one SIF."""

    def to_json(self) -> dict[str, Any]:
        """Return the form that travels."""
        return {
            "id": self.id,
            "backend": self.backend,
            "spec": _spec_to_json(self.spec),
            "program": self.program,
            "lower": self.lower,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Launch":
        """Read the form that travels."""
        return cls(data["id"], data["backend"], _spec_from_json(data["spec"]), data["program"], tuple(data["lower"]))


def _spec_to_json(spec: SandboxSpec) -> dict[str, Any]:
    return {
        "image": spec.image,
        "workdir": spec.workdir,
        "env": dict(spec.env),
        "mounts": [[mount.source, mount.target] for mount in spec.mounts],
        "limits": asdict(spec.limits),
        "network": spec.network,
    }


def _spec_from_json(data: Mapping[str, Any]) -> SandboxSpec:
    return SandboxSpec(
        image=data["image"],
        workdir=data["workdir"],
        env=data["env"],
        mounts=tuple(Mount(source, target) for source, target in data["mounts"]),
        limits=SandboxLimits(**data["limits"]),
        network=data["network"],
    )


def pack(message: Mapping[str, Any]) -> bytes:
    """Encode a packet."""
    return json.dumps(message, separators=(",", ":")).encode()


def send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one packet with descriptors.

    Raises:
        OSError: the other end is gone, or (on a non-blocking socket) its buffer is full.
    """
    socket.send_fds(connection, [pack(message)], list(descriptors), socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive one packet with at most one descriptor; ``None`` at the end of the stream.

    Raises:
        OSError: also ``BlockingIOError`` on a non-blocking socket with nothing to read.
    """
    data, descriptors, flags, _ = socket.recv_fds(connection, PACKET_LIMIT, 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None, descriptors
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError("a packet was cut")
    return json.loads(data), descriptors
