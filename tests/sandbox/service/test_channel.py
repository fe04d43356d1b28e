import asyncio
import os
import socket
from collections.abc import AsyncIterator
from errno import E2BIG, ENOENT
from typing import Any

import pytest
from sandbox_support import fails_as

from prorl_gym.errors import FailureKind
from prorl_gym.sandbox.guest import guest_messages
from prorl_gym.sandbox.guest.guest_messages import ChildStartError
from prorl_gym.sandbox.service.guest_channel import GuestChannel


class Guest:
    """The other end, answering as told."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.asked: list[dict[str, Any]] = []

    async def next(self) -> dict[str, Any]:
        received = await asyncio.to_thread(guest_messages.receive_packet, self.socket)
        assert received is not None
        self.asked.append(received[0])
        return received[0]

    def tell(self, descriptors: list[int] | None = None, **message: Any) -> None:
        guest_messages.send_packet(self.socket, guest_messages.encode_packet(message), descriptors or ())


@pytest.fixture
async def pair() -> AsyncIterator[tuple[GuestChannel, Guest]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(5)
    channel = GuestChannel(ours)
    yield channel, Guest(theirs)
    channel.close()
    theirs.close()


async def test_replies_find_their_requests(pair: tuple[GuestChannel, Guest]) -> None:
    channel, guest = pair
    first, second = (asyncio.ensure_future(channel.request("ping", n=n)) for n in (1, 2))
    one, two = await guest.next(), await guest.next()
    guest.tell(type="reply", id=two["id"], n=two["n"])
    guest.tell(type="reply", id=one["id"], n=one["n"])
    assert ((await first).fields["n"], (await second).fields["n"]) == (1, 2)


async def test_errors_are_the_guests(pair: tuple[GuestChannel, Guest]) -> None:
    channel, guest = pair
    for message, error in (
        ({"errno": ENOENT, "text": "gone"}, OSError),
        ({"errno": ENOENT, "stage": "exec"}, ChildStartError),
    ):
        request = asyncio.ensure_future(channel.request("read", path="x"))
        guest.tell(type="reply", id=(await guest.next())["id"], **message)
        with pytest.raises(error) as raised:
            await request
        assert raised.value.errno == ENOENT


async def test_too_long_a_request_is_not_sent(pair: tuple[GuestChannel, Guest]) -> None:
    channel, guest = pair
    for call in (channel.request, channel.start_child):
        with pytest.raises(OSError, match="use stdin or a file") as raised:
            await call("spawn", argv=["x" * 200_000])
        assert raised.value.errno == E2BIG
    guest.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        guest_messages.receive_packet(guest.socket)
    assert not channel.is_closed


async def test_an_exit_right_behind_its_reply_is_kept(pair: tuple[GuestChannel, Guest]) -> None:
    channel, guest = pair
    request = asyncio.ensure_future(channel.request("spawn"))
    number = (await guest.next())["id"]
    guest.tell(type="reply", id=number, pid=7)
    guest.tell(type="exit", pid=7, status=-9)
    reply = await request
    exited = channel.exit_future(reply.fields["pid"])
    assert await asyncio.wait_for(exited, 5) == -9


async def test_a_child_of_a_lost_sandbox_has_lost_it_too(pair: tuple[GuestChannel, Guest]) -> None:
    """The reply is there and so is the end of the connection, before the child's starter had its turn."""
    channel, guest = pair
    request = asyncio.ensure_future(channel.request("spawn"))
    guest.tell(type="reply", id=(await guest.next())["id"], pid=7)
    guest.socket.close()
    reply = await request
    assert channel.is_closed
    with fails_as(FailureKind.SANDBOX_LOST):
        await channel.exit_future(reply.fields["pid"])


async def test_end_of_file_is_a_lost_sandbox(pair: tuple[GuestChannel, Guest]) -> None:
    channel, guest = pair
    request = asyncio.ensure_future(channel.request("ping"))
    await guest.next()
    guest.socket.close()
    for call in (request, channel.wait_ready(), channel.request("ping")):
        with fails_as(FailureKind.SANDBOX_LOST):
            await call
    assert channel.is_closed


async def test_a_failed_start_reports_why(pair: tuple[GuestChannel, Guest]) -> None:
    channel, guest = pair
    guest.tell(type="failed", kind="image_broken", what="no /bin/sh", fix="Rebuild it.")
    guest.socket.close()
    with fails_as(FailureKind.IMAGE_BROKEN, match=r"no /bin/sh\nRebuild it\."):
        await channel.wait_ready()


async def test_an_unawaited_child_is_killed_and_its_pipes_closed(pair: tuple[GuestChannel, Guest]) -> None:
    channel, guest = pair
    request = asyncio.ensure_future(channel.request("spawn"))
    number = (await guest.next())["id"]
    request.cancel()
    await asyncio.sleep(0)
    reader, writer = os.pipe()
    guest.tell([writer], type="reply", id=number, pid=7)
    os.close(writer)
    kill = await guest.next()
    assert (kill["op"], kill["pid"]) == ("kill_tree", 7)
    guest.tell(type="reply", id=kill["id"], gone=True)
    with pytest.raises(asyncio.CancelledError):
        await request
    assert os.read(reader, 1) == b""  # end of file: no copy of the write end is left
    os.close(reader)


async def test_exits_of_strangers_are_ignored(pair: tuple[GuestChannel, Guest]) -> None:
    channel, guest = pair
    guest.tell(type="exit", pid=99, status=0)
    guest.tell(type="hello")
    await channel.wait_ready()
    assert not channel.is_closed
