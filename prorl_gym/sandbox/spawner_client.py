"""The service's end of the spawner: starts it, asks it for sandboxes, hears what became of them."""

import asyncio
import contextlib
import logging
import os
import resource
import socket
import sys
from collections import deque
from collections.abc import Callable, Generator
from errno import ETOOMANYREFS
from pathlib import Path
from typing import Any

import prorl_gym
from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import sealed_python
from prorl_gym.sandbox.launch import PACKET_LIMIT, Launch, pack, receive
from prorl_gym.sandbox.loss import End
from prorl_gym.sandbox.reaper import Reaped

log = logging.getLogger(__name__)

_EXIT_SECONDS = 10.0
_START_SECONDS = 30.0
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")


class SpawnerLostError(SandboxError):
    """The spawner died, and every sandbox with it; another one may do."""

    def __init__(self) -> None:
        super().__init__(
            FailureKind.SANDBOX_UNAVAILABLE, "the sandbox spawner died.", "The service's log has its last words."
        )


class SpawnerClient:
    """One spawner process, on one event loop.

    Args:
        connection: our end of its socket.
        process: the spawner.
        on_note: called with sandbox id and text when a sandbox is weaker than usual.
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
        self._gone: dict[str, asyncio.Future[None]] = {}
        self._ends: dict[str, asyncio.Future[End | None]] = {}
        self._reaps: deque[asyncio.Future[Reaped]] = deque()
        self._memory: deque[asyncio.Future[int]] = deque()
        self._lost = False
        self._loop.add_reader(connection.fileno(), self._readable)

    @classmethod
    async def start(
        cls, scratch: Path, uid: int, on_note: Callable[[str, str], None], cgroup: str = "off"
    ) -> "SpawnerClient":
        """Start a spawner and wait until it has dropped its privileges and cleaned up after dead ones.

        Args:
            scratch: directory of the sandboxes' directories; made when missing.
            uid: uid and gid of sandboxes when this process is root.
            on_note: see the class.
            cgroup: ``auto``, ``off``, or the cgroup to divide up among sandboxes.

        Raises:
            SandboxError: it cannot run here.
        """
        _raise_descriptor_limit()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with _interpreter(os.geteuid() or uid) as (program, environment):
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # the current directory is no place to import from
                    "-m",
                    "prorl_gym.sandbox.spawner",
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

    @property
    def pid(self) -> int:
        """The spawner's pid."""
        return self._process.pid

    @property
    def lost(self) -> bool:
        """Whether the spawner is gone. Every sandbox of it is, too: the kernel killed them with it."""
        return self._lost

    def launch(self, launch: Launch, guest: socket.socket) -> "asyncio.Future[End | None]":
        """Ask for a sandbox; the outcome is the first message on the channel whose other end is ``guest``.

        Returns:
            How the sandbox ended, once it has; ``None`` when the spawner is gone, and every sandbox with it.

        Raises:
            SpawnerLostError: the spawner is gone.
            SandboxError: the spec is too long to send.
        """
        packet = pack({"op": "start", **launch.to_json()})
        if self._lost:
            raise SpawnerLostError
        if len(packet) > PACKET_LIMIT:
            raise _unavailable(f"the sandbox's spec has {len(packet)} bytes; at most {PACKET_LIMIT} can be sent.")
        self._gone[launch.id] = self._loop.create_future()
        end = self._ends[launch.id] = self._loop.create_future()
        self._post(packet, os.dup(guest.fileno()), launch.id)
        return end

    def stop(self, sandbox_id: str) -> None:
        """Have a sandbox killed. Does not wait: ending the namespaces takes the kernel up to a second or so."""
        self._post(pack({"op": "stop", "id": sandbox_id}), None)

    async def outlive(self, sandbox_id: str) -> None:
        """Wait until a sandbox that is ending has ended.

        Raises:
            SpawnerLostError: that was the spawner's doing, which is gone. Nothing earlier can tell: of the two sockets
                that a dead spawner leaves, either may be seen to close first.
        """
        if (future := self._gone.get(sandbox_id)) is not None:
            await asyncio.wait([future])
        if self._lost:
            raise SpawnerLostError

    async def idle(self) -> None:
        """Wait until every process of every sandbox is reaped and every directory removed."""
        if self._gone:
            await asyncio.wait(list(self._gone.values()))

    async def reap(self) -> Reaped:
        """Clean up after dead services now.

        Raises:
            SpawnerLostError: the spawner is gone.
        """
        answer: asyncio.Future[Reaped] = self._loop.create_future()
        if self._lost:
            raise SpawnerLostError
        self._reaps.append(answer)
        self._post(pack({"op": "reap"}), None)
        return await answer

    async def memory_kills(self, sandbox_id: str) -> int:
        """Return how many processes of a sandbox the kernel has killed at the limit of its cgroup; 0 without one.

        Raises:
            SpawnerLostError: the spawner is gone.
        """
        answer: asyncio.Future[int] = self._loop.create_future()
        if self._lost:
            raise SpawnerLostError
        self._memory.append(answer)
        self._post(pack({"op": "memory", "id": sandbox_id}), None)
        return await answer

    async def close(self) -> None:
        """End the spawner, and with it every sandbox; wait until all are gone. Idempotent."""
        self._lose()
        try:
            async with asyncio.timeout(_EXIT_SECONDS):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()  # its sandboxes die with it
            await self._process.wait()

    def _post(self, packet: bytes, descriptor: int | None, starts: str = "") -> None:
        """Queue a packet; the descriptor is ours to close once it is sent. ``starts``: id of the sandbox to start."""
        if self._lost:
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
                socket.send_fds(self._connection, [packet], descriptors, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._loop.add_writer(self._connection.fileno(), self._flush)
                return
            except OSError as error:
                if error.errno != ETOOMANYREFS or descriptor is None:
                    self._lose()
                    return
                # Somebody of our uid has too many descriptors in unread messages. This start fails, when its guest's
                # end is closed below; the spawner and its sandboxes are none the worse.
                self._gone.pop(starts).set_result(None)
                self._ends.pop(starts).cancel()
            self._outbox.popleft()
            if descriptor is not None:
                os.close(descriptor)
        self._loop.remove_writer(self._connection.fileno())

    def _readable(self) -> None:
        while not self._lost:
            try:
                message, _ = receive(self._connection)
            except BlockingIOError:
                return
            except OSError:
                message = None
            if message is None:
                self._lose()
            else:
                self._handle(message)

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
                if (end := self._ends.pop(message["id"], None)) is not None:
                    end.set_result(End(message["code"], message["memory_kills"]))
            case "gone":
                self._ends.pop(message["id"], None)  # one that never began has no end
                if (future := self._gone.pop(message["id"], None)) is not None:
                    future.set_result(None)
            case "reaped":
                self._reaps.popleft().set_result(Reaped(message["removed"], message["killed"], message["alive"]))
            case "memory":
                if not (asked := self._memory.popleft()).done():  # cancelled meanwhile
                    asked.set_result(message["kills"])
            case other:
                raise ValueError(f"the spawner sent {other!r}")

    def _lose(self) -> None:
        """The spawner is gone, or shall be: it ends when it sees its socket close."""
        if self._lost:
            return
        self._lost = True
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
        self._connection.close()
        for _, descriptor, _ in self._outbox:
            if descriptor is not None:
                os.close(descriptor)
        self._outbox.clear()
        for future in self._gone.values():
            future.set_result(None)
        self._gone.clear()
        for end in self._ends.values():
            end.set_result(None)
        self._ends.clear()
        failed = SpawnerLostError()
        for waiting in (self._ready, *self._reaps, *self._memory):
            if not waiting.done():
                waiting.set_exception(failed)
                waiting.exception()  # not everybody who waited is still there
        self._reaps.clear()
        self._memory.clear()


def _raise_descriptor_limit() -> None:
    """Allow this process as many descriptors as the system does.

    A sandbox takes several, and who has a low limit may send none while another process of its uid, such as a payload,
    has many of them in unread messages.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _interpreter(uid: int) -> Generator[tuple[str, dict[str, str]], None, None]:
    """Yield the program that the spawner is run from, and its environment.

    Args:
        uid: of the sandboxes.

    Raises:
        SandboxError: the interpreter is in the payloads' reach, and cannot be taken out of it.
    """
    environment = _spawner_environment()
    if not sealed_python.in_reach(sys.executable, uid):
        yield sys.executable, environment
        return
    places = [place for place in (sealed_python.libraries(), environment.get("LD_LIBRARY_PATH")) if place]
    try:
        with sealed_python.sealed_copy(sys.executable) as program:
            yield program, {**environment, **({"LD_LIBRARY_PATH": os.pathsep.join(places)} if places else {})}
    except PermissionError as error:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"{sys.executable} could be changed by sandboxes, and cannot be run from memory ({error.strerror}).",
            "Set the sysctl vm.memfd_noexec below 2, or use a python that belongs to another user.",
        ) from None


def _spawner_environment() -> dict[str, str]:
    """Return a small environment: what the spawner holds, every init holds, one kernel bug away from a payload."""
    package = Path(prorl_gym.__path__[0]).parent
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(package), *([inherited] if inherited else [])])
    return {"PYTHONPATH": path, **{name: os.environ[name] for name in _INHERITED if name in os.environ}}


def _unavailable(what: str) -> SandboxError:
    return SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "The service's log has its last words.")
