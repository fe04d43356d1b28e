"""The service's end of the spawner: starts it, requests sandboxes, receives how they ended."""

import asyncio
import fcntl
import logging
import os
import re
import resource
import shutil
import socket
import stat
import sys
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from errno import ETOOMANYREFS
from pathlib import Path
from signal import SIGKILL
from typing import Any, TypeVar

import prorl_gym
from prorl_gym.errors import Evidence, FailureKind, SandboxError
from prorl_gym.sandbox.guest.guest_messages import MAX_PACKET, PacketError, encode_packet, receive_packet, send_packet
from prorl_gym.sandbox.spawner.scratch import Reaped
from prorl_gym.sandbox.spawner.spawner_protocol import LaunchRequest

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_EXIT_SECONDS = 10.0
_START_SECONDS = 30.0
_INHERITED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
_MFD_EXEC = 0x10
"""Since Linux 6.3: executable although ``vm.memfd_noexec`` is 1."""
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_SIGKILL_STATUSES = (-SIGKILL, 128 + SIGKILL)
"""Exit codes of the process itself, and of one that passes on the end of the process below it."""
_LIBPYTHON = re.compile(r"^\S+ r\S+ .* (/.*)/libpython[^/]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SandboxExit:
    """How the process ended that holds a sandbox, and the evidence that this is about a lost sandbox.

    No process inside a pid namespace can end its pid 1 by a signal. So an init that SIGKILL ended was killed from
    outside: by a person, by a program, or by the kernel when memory ran out. Any other end explains nothing.
    """

    code: int
    """Its exit code, or minus the signal that ended it."""
    oom_kills: int = 0
    """Processes that the kernel killed in its cgroup because that was at its limit."""

    @property
    def evidence(self) -> Evidence:
        if self.code not in _SIGKILL_STATUSES:
            return Evidence.SANDBOX_LOST_UNEXPLAINED
        return Evidence.LIMIT_BREACHED if self.oom_kills else Evidence.SANDBOX_KILLED_OUTSIDE


class SpawnerLostError(SandboxError):
    """The spawner died, and every sandbox with it; another one may do."""

    def __init__(self) -> None:
        super().__init__(
            FailureKind.SANDBOX_UNAVAILABLE, "the sandbox spawner died.", "The service's log has its last lines."
        )


@dataclass(frozen=True, slots=True)
class TemplateRequest:
    program: str
    packages: str
    """Directory of IPython, or ""."""
    env: dict[str, str]
    """Complete environment."""


class SpawnerClient:
    """One spawner process, on one event loop.

    ``on_note`` gets the id of a sandbox that is weaker than usual, and why.
    """

    def __init__(
        self, connection: socket.socket, process: asyncio.subprocess.Process, on_note: Callable[[str, str], None]
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._process = process
        self._on_note = on_note
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[bytes, int | None, str]] = deque()
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._removals: dict[str, asyncio.Future[None]] = {}
        self._exits: dict[str, asyncio.Future[SandboxExit | None]] = {}
        self._pending_reaps: deque[asyncio.Future[Reaped]] = deque()
        self._pending_oom_counts: deque[asyncio.Future[int]] = deque()
        self._template: asyncio.Future[str] | None = None
        """Runner of cells of the template's workers; "" when it could not be started."""
        self.pid = process.pid
        self.is_lost = False
        """Whether the spawner is gone. Every sandbox of it is, too: the kernel killed them with it."""
        self._loop.add_reader(connection.fileno(), self._on_readable)

    @classmethod
    async def start_spawner(
        cls, scratch: Path, uid: int, on_note: Callable[[str, str], None], cgroup: str = "off"
    ) -> "SpawnerClient":
        """Start a spawner and wait until it has dropped its privileges and cleaned up after dead ones.

        ``scratch`` is made when missing; sandboxes get ``uid`` when this process is root; ``cgroup`` is ``auto``,
        ``off``, or the cgroup to divide up among sandboxes.
        """
        # A sandbox takes several descriptors, and a process with a low limit may send none while another process of its
        # uid, such as a payload, has many of them in unread messages.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with _spawner_interpreter(os.geteuid() or uid) as (program, environment):
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # the current directory is no place to import from
                    "-m",
                    "prorl_gym.sandbox.backends.spawner_main",
                    *(str(theirs.fileno()), str(scratch), str(uid), str(uid), cgroup),
                    executable=program,
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # a Ctrl-C in the terminal is the service's business
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        client = cls(ours, process, on_note)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await client._ready
        except BaseException as error:
            await client.close()
            if isinstance(error, TimeoutError):
                raise _unavailable(f"the sandbox spawner did not start within {_START_SECONDS:.0f} s.") from None
            raise
        return client

    def launch(self, launch: LaunchRequest, guest: socket.socket) -> "asyncio.Future[SandboxExit | None]":
        """Request a sandbox; the outcome is the first message on the channel whose other end is ``guest``.

        Returns how the sandbox ended, once it has; ``None`` when the spawner is gone, and every sandbox with it. Raises
        ``SpawnerLostError``, or ``SandboxError`` when the spec is too long to send.
        """
        packet = encode_packet({"op": "start", **launch.to_json()})
        if self.is_lost:
            raise SpawnerLostError
        if len(packet) > MAX_PACKET:
            raise _unavailable(f"the sandbox's spec has {len(packet)} bytes; at most {MAX_PACKET} can be sent.")
        self._removals[launch.id] = self._loop.create_future()
        end = self._exits[launch.id] = self._loop.create_future()
        self._enqueue(packet, os.dup(guest.fileno()), launch.id)
        return end

    def stop(self, sandbox_id: str) -> None:
        """Have a sandbox killed. Does not wait: ending the namespaces takes the kernel up to a second or so."""
        self._enqueue(encode_packet({"op": "stop", "id": sandbox_id}), None)

    async def wait_ended(self, sandbox_id: str) -> None:
        """Wait until a sandbox that is ending has ended; ``SpawnerLostError`` when the spawner ended it, and is gone.

        Nothing earlier shows that: of the two sockets that a dead spawner leaves, either may be seen to close first.
        """
        if (future := self._removals.get(sandbox_id)) is not None:
            await asyncio.wait([future])
        if self.is_lost:
            raise SpawnerLostError

    async def wait_idle(self) -> None:
        """Wait until every process of every sandbox is reaped and every directory removed."""
        if self._removals:
            await asyncio.wait(list(self._removals.values()))

    async def reap(self) -> Reaped:
        """Clean up after dead services now."""
        return await self._request({"op": "reap"}, self._pending_reaps)

    async def count_oom_kills(self, sandbox_id: str) -> int:
        """Return how many processes of a sandbox the kernel has killed at the limit of its cgroup; 0 without one."""
        return await self._request({"op": "memory", "id": sandbox_id}, self._pending_oom_counts)

    def open_template(self, sandbox_id: str, start: TemplateRequest) -> socket.socket | None:
        """Request a fork of the template of python workers; ``None``, and one is started, while none is ready."""
        template = self._ensure_template(start)
        if not template.done() or not template.result():
            return None
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._enqueue(encode_packet({"op": "python", "id": sandbox_id}), theirs.detach())
        return line

    async def wait_template(self, start: TemplateRequest) -> bool:
        """Start the template of python workers unless one runs; wait until it is ready. Whether there is one then."""
        return bool(await asyncio.shield(self._ensure_template(start)))

    def _ensure_template(self, start: TemplateRequest) -> "asyncio.Future[str]":
        if self._template is None:
            self._template = self._loop.create_future()
            self._enqueue(encode_packet({"op": "template", **asdict(start)}), None)
        return self._template

    async def _request(self, message: dict[str, Any], pending: "deque[asyncio.Future[_Answer]]") -> _Answer:
        if self.is_lost:
            raise SpawnerLostError
        answer: asyncio.Future[_Answer] = self._loop.create_future()
        pending.append(answer)
        self._enqueue(encode_packet(message), None)
        return await answer

    async def close(self) -> None:
        """End the spawner, and with it every sandbox; wait until all are gone. Idempotent."""
        self._disconnect()
        try:
            async with asyncio.timeout(_EXIT_SECONDS):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()  # its sandboxes die with it
            await self._process.wait()

    def _enqueue(self, packet: bytes, descriptor: int | None, starts: str = "") -> None:
        """Queue a packet; the descriptor is ours to close once it is sent. ``starts``: id of the sandbox to start."""
        if self.is_lost:
            if descriptor is not None:
                os.close(descriptor)
            return
        self._outbox.append((packet, descriptor, starts))
        self._flush()

    def _flush(self) -> None:
        while self._outbox:
            packet, descriptor, starts = self._outbox[0]
            descriptors = [] if descriptor is None else [descriptor]
            try:
                send_packet(self._connection, packet, descriptors)
            except BlockingIOError:
                self._loop.add_writer(self._connection.fileno(), self._flush)
                return
            except OSError as error:
                if error.errno != ETOOMANYREFS or descriptor is None:
                    self._disconnect()
                    return
                # A process of our uid has too many descriptors in unread messages. This start fails, when its guest's
                # end is closed below; the spawner and its sandboxes are none the worse.
                if starts:
                    self._removals.pop(starts).set_result(None)
                    self._exits.pop(starts).cancel()
            self._outbox.popleft()
            if descriptor is not None:
                os.close(descriptor)
        self._loop.remove_writer(self._connection.fileno())

    def _on_readable(self) -> None:
        while not self.is_lost:
            try:
                received = receive_packet(self._connection)
            except BlockingIOError:
                return
            except (OSError, PacketError):
                received = None
            if received is None:
                self._disconnect()
            else:
                self._handle(received[0])

    def _handle(self, message: dict[str, Any]) -> None:
        match message["event"]:
            case "ready":
                log.info("sandboxes: %s", message["cgroups"])
                self._ready.set_result(message)
            case "failed":
                self._ready.set_exception(SandboxError(FailureKind(message["kind"]), message["what"], message["fix"]))
            case "note":
                self._on_note(message["id"], message["text"])
            case "ended":
                if (end := self._exits.pop(message["id"], None)) is not None:
                    end.set_result(SandboxExit(message["code"], message["oom_kills"]))
            case "gone":
                self._exits.pop(message["id"], None)  # one that never began has no end
                if (future := self._removals.pop(message["id"], None)) is not None:
                    future.set_result(None)
            case "reaped":
                self._pending_reaps.popleft().set_result(
                    Reaped(message["removed"], message["killed"], message["alive"])
                )
            case "template":
                if self._template is not None and self._template.done() and self._template.result():
                    self._template = None  # it worked and has ended: the next request starts another
                elif self._template is not None and not self._template.done():
                    self._template.set_result(message["runner"])
            case "memory":
                if not (asked := self._pending_oom_counts.popleft()).done():  # not cancelled
                    asked.set_result(message["kills"])
            case other:
                raise ValueError(f"the spawner sent {other!r}")

    def _disconnect(self) -> None:
        """Close the spawner's socket, which also ends a spawner that is still running."""
        if self.is_lost:
            return
        self.is_lost = True
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
        self._connection.close()
        for _, descriptor, _ in self._outbox:
            if descriptor is not None:
                os.close(descriptor)
        self._outbox.clear()
        for future in self._removals.values():
            future.set_result(None)
        self._removals.clear()
        for end in self._exits.values():
            end.set_result(None)
        self._exits.clear()
        failed = SpawnerLostError()
        for waiting in (self._ready, *self._pending_reaps, *self._pending_oom_counts):
            if not waiting.done():
                waiting.set_exception(failed)
                waiting.exception()  # some callers that waited are gone
        if self._template is not None and not self._template.done():
            self._template.set_result("")
        self._pending_reaps.clear()
        self._pending_oom_counts.clear()


@contextmanager
def _spawner_interpreter(uid: int) -> Generator[tuple[str, dict[str, str]], None, None]:
    """Yield the program that the spawner is run from, out of reach of payloads of ``uid``, and its environment."""
    # Small: what the spawner holds, every init holds, one kernel bug away from a payload.
    environment = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
    python_path = (str(Path(prorl_gym.__path__[0]).parent), os.environ.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, python_path))
    if not is_writable_by(sys.executable, uid):
        yield sys.executable, environment
        return
    places = [place for place in (libpython_directory(), environment.get("LD_LIBRARY_PATH")) if place]
    try:
        with _sealed_copy(sys.executable) as program:
            yield program, {**environment, **({"LD_LIBRARY_PATH": os.pathsep.join(places)} if places else {})}
    except PermissionError as error:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"{sys.executable} could be changed by sandboxes, and cannot be run from memory ({error.strerror}).",
            "Set the sysctl vm.memfd_noexec below 2, or use a python that belongs to another user.",
        ) from None


def is_writable_by(path: str, uid: int) -> bool:
    """Whether processes of ``uid`` could write to a file, or be allowed to by its group or by all."""
    found = os.stat(path)
    return found.st_uid == uid or bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


@contextmanager
def _sealed_copy(path: str) -> Generator[str, None, None]:
    """Copy a program into sealed memory; yield the path by which children of this process can execute it."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        copy = os.memfd_create("python", flags | _MFD_EXEC)
    except OSError:  # an older kernel, which has no such flag and does not need it
        copy = os.memfd_create("python", flags)
    try:
        with open(path, "rb") as source, open(copy, "wb", closefd=False) as target:
            shutil.copyfileobj(source, target)
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
        yield f"/proc/{os.getpid()}/fd/{copy}"
    finally:
        os.close(copy)


def libpython_directory() -> str | None:
    """Return the directory of this process's libpython: the copy no longer finds it by its own place (``$ORIGIN``)."""
    found = _LIBPYTHON.search(Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape"))
    return found[1] if found else None


def _unavailable(what: str) -> SandboxError:
    return SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "The service's log has its last lines.")
