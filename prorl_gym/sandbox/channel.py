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
from prorl_gym.sandbox.breach import Breach
from prorl_gym.sandbox.guest import wire
from prorl_gym.sandbox.shielding import finish

ChannelEnd = Literal["closed", "died", "broken", "starved"]
"""``closed`` by this side; the guest ``died``; it was silent for too long or made no sense; it could not fork."""

_UNKNOWN = (None, None)

_ANSWER_SECONDS = 120.0
"""A guest that has not answered by then never will. Its slowest honest answer (a tree that does not die) takes 3 s."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the guest answered. The receiver owns the descriptors."""

    fields: dict[str, Any]
    descriptors: list[int]


class StartFailure(OSError):
    """The guest could not start a child, or was not asked to. ``stage``: ``cwd``, ``confine`` or ``exec``."""

    def __init__(self, code: int, stage: str, words: str = "") -> None:
        super().__init__(code, words or os.strerror(code))
        self.stage = stage


class Channel:
    """One connection, on one event loop. A channel that closes is a sandbox that is lost."""

    @classmethod
    def attach(cls, sock: socket.socket) -> "Channel":
        """Take over the service's end of the socket pair, on the running loop."""
        return cls(sock, asyncio.get_running_loop())

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = loop
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._breaches: dict[int, dict[Breach, None]] = {}
        self._kills: dict[int, tuple[bool | None, bool | None]] = {}
        self._disk_full = False
        self.memory_kills: Callable[[], Awaitable[int]] | None = None
        """Asks how many processes of the sandbox the kernel killed at the limit of its cgroup, where there is one."""
        self._memory_kills = 0
        self._outbox: deque[bytes] = deque()
        self._hello: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._lost: SandboxError | None = None
        self.end: ChannelEnd | None = None
        """How it came to its end."""
        loop.add_reader(sock.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        """Whether the guest is gone, or ``close`` was called."""
        return self._lost is not None

    def lost(self) -> bool:
        """Whether the guest is gone, as far as the kernel knows this moment: its end closes when it dies."""
        if self._lost is None:
            self._readable()
        return self.closed

    async def ready(self) -> dict[str, Any]:
        """Wait for the guest's first message and return it.

        Raises:
            SandboxError: the sandbox failed to start; the error is the guest's own where it could tell.
        """
        return await asyncio.shield(self._hello)

    async def request(self, op: str, **fields: Any) -> Reply:
        """Ask the guest. It answers promptly, so this is carried through even when the caller is cancelled.

        A cancelled caller gets no reply; a child that was started by it is killed, and descriptors are closed.

        Raises:
            OSError: the guest's, as seen inside; ``E2BIG`` when the request is too long.
            StartFailure: of a child.
            SandboxError: ``SANDBOX_LOST``.
        """
        answer = self._ask(op, fields)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await finish(self._discard(answer))
            raise

    async def start(self, op: str, **fields: Any) -> Reply:
        """Ask the guest for a child. A guest that cannot fork has an end at hand that nobody inside asked for.

        The kernel forks no more (``ENOMEM``) from the moment that the first process of the sandbox died; the guest may
        live a little longer. The channel closes then, so that nothing takes the sandbox for one that lives.

        Raises:
            OSError: ``E2BIG``; ``EINVAL`` for a request that makes no sense.
            StartFailure: the child could not become what it should.
            SandboxError: ``SANDBOX_LOST``.
        """
        try:
            return await self.request(op, **fields)
        except OSError as error:
            if isinstance(error, StartFailure) or error.errno in (E2BIG, EINVAL):
                raise
            why = f"can start nothing any more ({error.strerror})"
            if error.errno == EAGAIN:  # which payloads at their limit of processes cause; all else is the host's
                raise UnusableSandboxError(f"the sandbox {why}.") from None
            self.close(why, "starved")
            raise SandboxError(FailureKind.SANDBOX_LOST, f"the sandbox {why}.") from None

    def exit_of(self, pid: int) -> "asyncio.Future[int]":
        """Return the future end of a child: its exit code, or minus the signal that ended it. Ask once."""
        exited = self._exits[pid]  # often done already: reply and end may come in one go
        exited.add_done_callback(lambda done: self._exits.pop(pid) if self._exits.get(pid) is done else None)
        return exited

    def take_breaches(self, pid: int) -> list[Breach]:
        """Return the limits that a child was seen to run into since the last call, first one first.

        A root that is full at this moment is one that everything runs into.

        The guest tells of a breach before it kills for it. So, once the effect has been seen on another descriptor,
        the news is in the socket at the latest, and is read here.
        """
        if self._lost is None:
            self._readable()
        seen = list(self._breaches.pop(pid, ()))
        return [*seen, Breach.DISK] if self._disk_full and Breach.DISK not in seen else seen

    def was_struck(self, pid: int) -> bool | None:
        """Whether SIGKILL was sent from inside to a child that ended, or by us; ``None``: not known."""
        return self._kills.get(pid, _UNKNOWN)[0]

    def sent_kill(self, pid: int) -> bool:
        """Whether SIGKILL was sent from inside to a child that ended or by anything below it, or may have been."""
        return self._kills.get(pid, _UNKNOWN) != (False, False)

    async def evidence_of_kill(self, pid: int) -> Evidence | None:
        """Return what is known about a child that SIGKILL ended; ``None``: a limit, the payload or we did it.

        A kernel that kills at the limit of the sandbox's cgroup does so for a limit, which ``take_breaches`` then has.
        """
        if self._lost is None:
            self._readable()
        if self._breaches.get(pid) or self.was_struck(pid) is not False:
            return None
        if self.memory_kills is not None and (kills := await self.memory_kills()) > self._memory_kills:
            self._memory_kills = kills
            self._breaches.setdefault(pid, {})[Breach.MEMORY_SANDBOX] = None
            return None
        return Evidence.SANDBOX_LOST_UNEXPLAINED

    def close(self, reason: str = "was closed", end: ChannelEnd = "closed") -> None:
        """Let go of the guest, which ends it; everything that still waits hears ``SANDBOX_LOST``."""
        if self._lost is not None:
            return
        self.end = end
        self._lost = SandboxError(FailureKind.SANDBOX_LOST, f"the sandbox {reason}.")
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._fail_all(self._lost)

    def _ask(self, op: str, fields: dict[str, Any]) -> "asyncio.Future[Reply]":
        if self._lost is not None:
            raise self._lost
        self._number += 1
        packet = wire.encode({"id": self._number, "op": op, **fields})
        if len(packet) > wire.MAX_REQUEST:
            raise OSError(E2BIG, f"arguments and environment exceed {wire.MAX_REQUEST} bytes; use stdin or a file")
        answer: asyncio.Future[Reply] = self._loop.create_future()
        self._waiting[self._number] = answer
        overdue = self._loop.call_later(_ANSWER_SECONDS, self.close, "does not answer", "broken")
        answer.add_done_callback(lambda _: overdue.cancel())
        self._outbox.append(packet)
        self._flush()
        return answer

    async def _discard(self, answer: "asyncio.Future[Reply]") -> None:
        try:
            reply = await answer
        except (OSError, SandboxError):
            return
        for descriptor in reply.descriptors:
            os.close(descriptor)
        if "pid" in reply.fields and not self.closed:
            await self._ask("kill_tree", {"pid": reply.fields["pid"]})

    def _flush(self) -> None:
        while self._outbox:
            try:
                wire.send(self._socket, self._outbox[0])
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._flush)
                return
            except OSError:  # the guest is gone; the reader finds out and tells everybody
                self._outbox.clear()
                break
            self._outbox.popleft()
        self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        while self._lost is None:
            try:
                received = wire.receive(self._socket)
            except BlockingIOError:
                return
            except OSError as error:  # it died with a request unread
                return self.close(f"broke its connection ({error})", "died")
            except wire.PacketError as error:
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
            raise ValueError("descriptors that nobody asked for")
        match message.get("type"):
            case "reply":
                self._on_reply(message, descriptors)
            case "exit":
                exited = self._exits.get(int(message["pid"]))  # kept: its starter may not have asked for it yet
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
                self._on_failed(message)
            case other:
                self.close(f"sent an unknown message ({other!r})", "broken")

    def _on_reply(self, message: dict[str, Any], descriptors: Sequence[int]) -> None:
        answer = self._waiting[int(message["id"])]
        if "errno" in message:
            if descriptors:
                raise ValueError("an error with descriptors")
            code = int(message["errno"])
            staged = "stage" in message
            failure = StartFailure(code, str(message["stage"])) if staged else OSError(code, str(message["text"]))
            answer.set_exception(failure)
        else:
            if "pid" in message:  # before any later packet can bring its end
                self._exits[int(message["pid"])] = self._loop.create_future()
            answer.set_result(Reply(message, list(descriptors)))
        del self._waiting[int(message["id"])]

    def _on_failed(self, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        known = FailureKind(kind) if kind in list(FailureKind) else FailureKind.SANDBOX_UNAVAILABLE
        error = SandboxError(known, str(message.get("what", ""))[:2000], str(message.get("fix", ""))[:2000])
        if not self._hello.done():
            self._hello.set_exception(error)
            self._hello.exception()  # a start that was cancelled does not ask

    def _fail_all(self, error: SandboxError) -> None:
        pending = [*self._waiting.values(), *self._exits.values(), self._hello]
        self._waiting.clear()  # the exits stay: a starter that has its reply has yet to ask for the end
        for future in pending:
            if not future.done():
                future.set_exception(error)
                future.exception()  # not everybody who waited is still there
