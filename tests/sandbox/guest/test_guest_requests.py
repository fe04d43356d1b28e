"""Requests that make no sense: the guest answers them or ignores them, and goes on."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prorl_gym.sandbox.guest import guest_messages
from prorl_gym.sandbox.protocol import SandboxLimits

pytestmark = pytest.mark.timeout(60)

OPERATIONS = ("ping", "spawn", "shell", "signal", "kill_tree", "transfer", "kill_payload", "listen")
FIELDS = ("argv", "env", "cwd", "limits", "stdin", "merge", "channel", "pid", "since", "signal", "what", "path")
LATER_FIELDS = ("mode", "size", "limit", "port", "name")

_TEXT = st.text(st.characters(exclude_characters="/"), max_size=20) | st.sampled_from(
    ["\ud800", "a\0b", "read", "write", "list", "/tmp", ""]
)
_NUMBER = st.sampled_from([0, -1, 1 << 70]) | st.floats()
_SIMPLE = st.none() | st.booleans() | _NUMBER | _TEXT
_VALUE = _SIMPLE | st.lists(_SIMPLE, max_size=4) | st.dictionaries(_TEXT, _SIMPLE, max_size=4)
_REQUEST = st.fixed_dictionaries(
    {"op": st.sampled_from(OPERATIONS) | _VALUE},
    optional={name: _VALUE for name in FIELDS + LATER_FIELDS},
)


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[socket.socket]:
    """The service's end of a guest without a sandbox around it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    place = tmp_path_factory.mktemp("guest")
    options = {"limits": asdict(SandboxLimits()), "workdir": str(place), "env": {}}
    with theirs:
        command = [
            sys.executable,
            "-m",
            "prorl_gym.sandbox.guest.container_entry",
            str(theirs.fileno()),
            json.dumps(options),
        ]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=Path.cwd())
    ours.settimeout(30)
    assert guest_messages.receive_packet(ours) == ({"type": "hello"}, [])
    with ours:
        yield ours
    assert process.wait(30) == 0


def is_answering(guest: socket.socket) -> bool:
    """Ask for a sign of life; whatever comes before it is thrown away."""
    guest_messages.send_packet(guest, guest_messages.encode_packet({"id": 0, "op": "ping"}))
    while (received := guest_messages.receive_packet(guest)) is not None:
        message, descriptors = received
        for fd in descriptors:
            os.close(fd)
        if message == {"type": "reply", "id": 0}:
            return True
    return False


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=_REQUEST)
def test_a_request_that_makes_no_sense_ends_nothing(guest: socket.socket, request: dict[str, Any]) -> None:
    guest_messages.send_packet(guest, guest_messages.encode_packet({**request, "id": 1}))
    assert is_answering(guest)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(packet=st.binary(min_size=1, max_size=200) | _VALUE.map(lambda value: json.dumps(value).encode()))
def test_a_packet_that_is_no_request_ends_nothing(guest: socket.socket, packet: bytes) -> None:
    guest.send(packet)
    assert is_answering(guest)


def test_received_descriptors_are_close_on_exec() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        guest_messages.send_packet(ours, guest_messages.encode_packet({"id": 1}), [ours.fileno()])
        received = guest_messages.receive_packet(theirs)
    assert received is not None
    message, (descriptor,) = received
    assert message == {"id": 1} and not os.get_inheritable(descriptor)
    os.close(descriptor)
