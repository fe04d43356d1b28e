"""The service's end of the connection to one guest: requests, replies with descriptors, ends of children."""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from errno import E2BIG, EAGAIN, EINVAL
from typing import Any, Literal

from prorl_gym.errors import Evidence, FailureKind, SandboxError, UnusableSandboxError
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.guest import guest_messages
from prorl_gym.sandbox.guest.guest_messages import ChildStartError
from prorl_gym.sandbox.limit_breach import Breach

ChannelEndReason = Literal["closed", "died", "broken", "starved"]
"""``closed`` by this side; the guest ``died``; it was silent for too long or sent nonsense; it could not fork."""
_UNKNOWN = (None, None)


@dataclass(frozen=True, slots=True)
class GuestTimeouts:
    """Seconds that the guest of a sandbox, and what runs next to it, may take. Honest ones take far less."""

    answer: float = 120.0
    """To answer a request. Its slowest honest answer (a tree that does not die) takes 3 s."""
    ping: float = 10.0
    """To answer whether it is alive."""
    kill: float = 10.0
    """To report a child that it killed; then it is the sandbox that is broken."""
    file_stall: float = 20.0
    """For a file operation, in addition to the time for its bytes. An honest one takes milliseconds."""
    file_stall_after_kill: float = 60.0
    """The same once nothing else runs in the sandbox; what was killed may take the kernel a while to end."""
    python_start: float = 60.0
    python_interrupt: float = 1.0
    """For a cell to end itself after SIGINT."""


@dataclass(frozen=True, slots=True)
class GuestReply:
    """Answer of the guest. The receiver owns the descriptors."""

    fields: dict[str, Any]
    descriptors: list[int]


class GuestChannel:
    """The connection to one guest, on the running event loop. A channel that closes is a sandbox that is lost."""

    def __init__(self, sock: socket.socket, timeouts: GuestTimeouts | None = None) -> None:
        self.timeouts = timeouts or GuestTimeouts()
        sock.setblocking(False)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._last_request_id = 0
        self._pending_replies: dict[int, asyncio.Future[GuestReply]] = {}
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._breaches: dict[int, dict[Breach, None]] = {}
        self._kills: dict[int, tuple[bool | None, bool | None]] = {}
        self._disk_full = False
        self.count_oom_kills: Callable[[], Awaitable[int]] | None = None
        """Returns how many processes of the sandbox the kernel killed at the limit of its cgroup."""
        self._oom_kills = 0
        self._outbox: deque[tuple[bytes, int | None]] = deque()
        self._hello: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._lost_error: SandboxError | None = None
        self.end_reason: ChannelEndReason | None = None
        """How it came to its end."""
        self._loop.add_reader(sock.fileno(), self._on_readable)

    @property
    def is_closed(self) -> bool:
        return self._lost_error is not None

    def is_lost(self) -> bool:
        """Whether the guest is gone. Reads the socket first: the kernel closes it when the guest dies."""
        self._on_readable()
        return self.is_closed

    async def wait_ready(self) -> dict[str, Any]:
        """Return the guest's first message. Raises its own error when the sandbox failed to start."""
        return await asyncio.shield(self._hello)

    async def request(self, op: str, *, descriptor: int | None = None, **fields: Any) -> GuestReply:
        """Send a request, and a copy of a descriptor, to the guest. It answers promptly.

        So this completes even when the caller is cancelled. A cancelled caller gets no reply; a child that was started
        by it is killed, and descriptors are closed. Raises ``ChildStartError``; ``OSError`` as seen inside (``E2BIG``
        when the request is too long); ``SandboxError`` (SANDBOX_LOST).
        """
        answer = self._send_request(op, fields, descriptor)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await run_shielded(self._discard_reply(answer))
            raise

    async def start_child(self, op: str, **fields: Any) -> GuestReply:
        """Have the guest start a child. A guest that cannot fork is about to end, and not by its payload's doing.

        The kernel forks no more (``ENOMEM``) from the moment that the first process of the sandbox died; the guest may
        live a little longer. The channel closes then, so that nothing takes the sandbox for one that lives. Raises as
        ``request``; of ``OSError`` only ``E2BIG``, and ``EINVAL`` for a request that makes no sense.
        """
        try:
            return await self.request(op, **fields)
        except OSError as error:
            if isinstance(error, ChildStartError) or error.errno in (E2BIG, EINVAL):
                raise
            why = f"can start nothing any more ({error.strerror})"
            if error.errno == EAGAIN:  # which payloads at their limit of processes cause; all else is the host's
                raise UnusableSandboxError(f"the sandbox {why}.") from None
            self.close(why, "starved")
            raise SandboxError(FailureKind.SANDBOX_LOST, f"the sandbox {why}.") from None

    def exit_future(self, pid: int) -> "asyncio.Future[int]":
        """Return the future end of a child: its exit code, or minus the signal that ended it. Call once."""
        exited = self._exits[pid]  # often done already: reply and end may come in one go
        exited.add_done_callback(lambda done: self._exits.pop(pid) if self._exits.get(pid) is done else None)
        return exited

    def pop_breaches(self, pid: int) -> list[Breach]:
        """Return the limits that a child was seen to run into since the last call, first one first.

        A root that is full at this moment is one that everything runs into. The guest reports a breach before it kills
        for it: once the effect has been seen on another descriptor, the report is in the socket, and is read here.
        """
        self._on_readable()
        seen = list(self._breaches.pop(pid, ()))
        return [*seen, Breach.DISK] if self._disk_full and Breach.DISK not in seen else seen

    def was_killed_inside(self, pid: int) -> bool | None:
        """Whether the SIGKILL or SIGTERM that ended a child was sent from inside, or by us; ``None``: not known."""
        return self._kills.get(pid, _UNKNOWN)[0]

    def may_involve_inside_kill(self, pid: int) -> bool:
        """Whether that signal was sent from inside to a child that ended or by anything below it, or may have been."""
        return self._kills.get(pid, _UNKNOWN) != (False, False)

    async def kill_evidence(self, pid: int) -> Evidence | None:
        """Return what is known about a child that one of them ended; ``None``: a limit, the payload or we did it.

        A kernel that kills at the limit of the sandbox's cgroup does so for a limit, which ``pop_breaches`` then has.
        """
        self._on_readable()
        if self._breaches.get(pid) or self.was_killed_inside(pid) is not False:
            return None
        if self.count_oom_kills is not None and (kills := await self.count_oom_kills()) > self._oom_kills:
            self._oom_kills = kills
            self._breaches.setdefault(pid, {})[Breach.MEMORY_SANDBOX] = None
            return None
        return Evidence.PROGRAM_KILLED_OUTSIDE

    def close(self, reason: str = "was closed", end_reason: ChannelEndReason = "closed") -> None:
        """Close the connection, which ends the guest; every waiting call raises ``SANDBOX_LOST``."""
        if self._lost_error is not None:
            return
        self.end_reason = end_reason
        self._lost_error = SandboxError(FailureKind.SANDBOX_LOST, f"the sandbox {reason}.")
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._clear_outbox()
        pending = [*self._pending_replies.values(), *self._exits.values(), self._hello]
        self._pending_replies.clear()  # the exits stay: a starter that has its reply has yet to fetch the end
        for future in pending:
            if not future.done():
                future.set_exception(self._lost_error)
                future.exception()  # some callers that waited are gone

    def _send_request(
        self, op: str, fields: dict[str, Any], descriptor: int | None = None
    ) -> "asyncio.Future[GuestReply]":
        if self._lost_error is not None:
            raise self._lost_error
        self._last_request_id += 1
        packet = guest_messages.encode_packet({"id": self._last_request_id, "op": op, **fields})
        if len(packet) > guest_messages.MAX_REQUEST:
            raise OSError(
                E2BIG, f"arguments and environment exceed {guest_messages.MAX_REQUEST} bytes; use stdin or a file"
            )
        answer: asyncio.Future[GuestReply] = self._loop.create_future()
        self._pending_replies[self._last_request_id] = answer
        overdue = self._loop.call_later(self.timeouts.answer, self.close, "does not answer", "broken")
        answer.add_done_callback(lambda _: overdue.cancel())
        self._outbox.append((packet, None if descriptor is None else os.dup(descriptor)))
        self._flush()
        return answer

    async def _discard_reply(self, answer: "asyncio.Future[GuestReply]") -> None:
        try:
            reply = await answer
        except (OSError, SandboxError):
            return
        for descriptor in reply.descriptors:
            os.close(descriptor)
        if "pid" in reply.fields and not self.is_closed:
            await self._send_request("kill_tree", {"pid": reply.fields["pid"]})

    def _flush(self) -> None:
        while self._outbox:
            packet, descriptor = self._outbox[0]
            try:
                guest_messages.send_packet(self._socket, packet, () if descriptor is None else (descriptor,))
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._flush)
                return
            except OSError:  # the guest is gone; the reader fails every waiting call
                self._clear_outbox()
                break
            self._outbox.popleft()
            if descriptor is not None:
                os.close(descriptor)
        self._loop.remove_writer(self._socket.fileno())

    def _clear_outbox(self) -> None:
        for _, descriptor in self._outbox:
            if descriptor is not None:
                os.close(descriptor)
        self._outbox.clear()

    def _on_readable(self) -> None:
        while self._lost_error is None:
            try:
                received = guest_messages.receive_packet(self._socket)
            except BlockingIOError:
                return
            except OSError as error:  # it died with a request unread
                return self.close(f"broke its connection ({error})", "died")
            except guest_messages.PacketError as error:
                return self.close(f"broke its connection ({error})", "broken")
            if received is None:
                return self.close("died", "died")
            message, descriptors = received
            try:
                self._handle(message, descriptors)
            except (KeyError, TypeError, ValueError, OverflowError):
                for descriptor in descriptors:
                    os.close(descriptor)
                return self.close("sent a message that makes no sense", "broken")

    def _handle(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if descriptors and message["type"] != "reply":
            raise ValueError("unrequested descriptors")
        match message.get("type"):
            case "reply":
                self._on_reply(message, descriptors)
            case "exit":
                exited = self._exits.get(int(message["pid"]))  # kept: its starter may not have fetched it yet
                if exited is not None and not exited.done():
                    self._kills[int(message["pid"])] = message.get("struck"), message.get("sent")
                    exited.set_result(int(message["status"]))
            case "breach":
                self._breaches.setdefault(int(message["pid"]), {})[Breach(message["breach"])] = None
            case "disk":
                self._disk_full = bool(message["full"])
            case "hello":
                if not self._hello.done():
                    self._hello.set_result(message)
            case "failed":
                if not self._hello.done():
                    kind = message.get("kind")
                    known = FailureKind(kind) if kind in list(FailureKind) else FailureKind.SANDBOX_UNAVAILABLE
                    what, fix = str(message.get("what", ""))[:2000], str(message.get("fix", ""))[:2000]
                    self._hello.set_exception(SandboxError(known, what, fix))
                    self._hello.exception()  # marks it as retrieved: a cancelled start does not await it
            case other:
                self.close(f"sent an unknown message ({other!r})", "broken")

    def _on_reply(self, message: dict[str, Any], descriptors: Sequence[int]) -> None:
        answer = self._pending_replies[int(message["id"])]
        if "errno" in message:
            if descriptors:
                raise ValueError("an error with descriptors")
            code = int(message["errno"])
            staged = "stage" in message
            failure = ChildStartError(code, str(message["stage"])) if staged else OSError(code, str(message["text"]))
            answer.set_exception(failure)
        else:
            if "pid" in message:  # before any later packet can bring its end
                self._exits[int(message["pid"])] = self._loop.create_future()
            answer.set_result(GuestReply(message, list(descriptors)))
        del self._pending_replies[int(message["id"])]
