"""A pool of killable worker processes for graders that may hang, crash or eat memory on what a model wrote.

A worker whose request does not end in time is killed, and the next request gets a fresh one. The pool only reports what
happened; the grader decides who is to blame.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import prorl_gym
from prorl_gym.deadlines import hold_uncharged
from prorl_gym.environments.worker_main import LENGTH, MAX_MESSAGE

STUCK_SECONDS = 10.0
"""A worker that for so long neither ran nor waited for a processor hangs, however busy the machine is."""
START_STUCK_SECONDS = 60.0
"""The same while it starts: its imports may come from a slow disk."""
_TICK_SECONDS = 1.0

# Loads the service's own package, whatever else is installed under its name. The folder next to it is appended to the
# path, not prepended: it must not shadow the standard library.
_START = (
    "import sys; from importlib.util import module_from_spec, spec_from_file_location; root = sys.argv.pop(1); "
    "spec = spec_from_file_location('prorl_gym', root + '/prorl_gym/__init__.py'); "
    "sys.modules['prorl_gym'] = module_from_spec(spec); spec.loader.exec_module(sys.modules['prorl_gym']); "
    "sys.path += [root, *sys.argv[4:]]; from prorl_gym.environments.worker_main import main; "
    "main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))"
)


class WorkerError(Exception):
    """Base of the failures of a request."""


class WorkerUnavailableError(WorkerError):
    """No worker could be started."""


class WorkerTimeoutError(WorkerError):
    """The request used up its CPU time; the worker is gone."""


class WorkerStuckError(WorkerError):
    """The worker hung without using CPU time, and was killed."""


class WorkerDiedError(WorkerError):
    """The request killed the worker: out of memory, a crash in native code."""


class WorkerFailedError(WorkerError):
    """The function raised. The worker is replaced: no verdict may depend on earlier requests."""


class WorkerPool:
    """Worker processes of one function, started when needed, reused while they behave.

    Not bound to an event loop. Idle workers end when the pool or the process does: their socket closes.

    ``target`` is the ``module:function`` that maps a JSON value to a JSON value, imported in the worker only. At most
    ``size`` requests are served at the same time, per event loop. ``memory`` bounds a worker's address space in bytes.
    In ``folders`` the worker finds modules besides this package's own place and the installed ones.
    """

    def __init__(self, target: str, size: int = 2, memory: int = 2 << 30, folders: Sequence[Path] = ()) -> None:
        self._target = target
        self._folders = folders
        self._size = size
        self._memory = memory
        self._idle: list[_Worker] = []
        self._permits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def call(self, body: Any, *, cpu_seconds: float) -> Any:
        """Run the function on a JSON value and return its result. Cancelling kills the worker.

        The wait for a worker is charged to no deadline. Raises a subclass of ``WorkerError``.
        """
        async with self._acquire_worker() as worker:
            answer = await worker.request({"body": body, "cpu_seconds": cpu_seconds})
            if "error" in answer:
                raise WorkerFailedError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Kill the idle workers. Busy ones are killed by cancelling their calls."""
        while self._idle:
            self._idle.pop().kill()

    @asynccontextmanager
    async def _acquire_worker(self) -> AsyncGenerator["_Worker"]:
        permits = self._permits.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._size))
        async with hold_uncharged(permits):
            worker = self._pop_idle_worker() or await _Worker.start(self._target, self._memory, self._folders)
            try:
                yield worker
            except BaseException:
                worker.kill()  # in the middle of a request, or in an unknown state
                raise
            self._idle.append(worker)

    def _pop_idle_worker(self) -> "_Worker | None":
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            worker.kill()
        return None


class _Worker:
    """One worker process and the socket to it."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.process = process
        self._connection = connection

    @classmethod
    async def start(cls, target: str, memory: int, folders: Sequence[Path]) -> "_Worker":
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            process = _spawn(theirs, target, memory, folders)
        except OSError as error:
            ours.close()
            raise WorkerUnavailableError(f"{sys.executable}: {error.strerror}") from None
        finally:
            theirs.close()
        worker = cls(process, ours)
        try:
            hello = await worker._wait_for(worker._receive(), START_STUCK_SECONDS)
        except (WorkerStuckError, ConnectionError, ValueError) as error:
            worker.kill()
            raise WorkerUnavailableError(f"it did not report ({type(error).__name__})") from None
        except BaseException:
            worker.kill()
            raise
        if "ready" not in hello:
            worker.kill()
            raise WorkerUnavailableError(str(hello.get("failed", hello))[:300])
        return worker

    async def request(self, message: Any) -> dict[str, Any]:
        body = json.dumps(message).encode()
        if len(body) > MAX_MESSAGE:
            raise WorkerFailedError(f"a request of {len(body)} bytes is over {MAX_MESSAGE}")
        try:
            return await self._wait_for(self._exchange(body), STUCK_SECONDS)
        except (ConnectionError, ValueError):
            status = self.kill()
            if status == -signal.SIGPROF:
                raise WorkerTimeoutError("CPU time used up") from None
            raise WorkerDiedError(f"exit status {status}") from None

    def kill(self) -> int:
        """Kill and reap; return the exit status."""
        self._connection.close()
        self.process.kill()  # does nothing to one that has ended
        return self.process.wait()

    async def _wait_for(self, work: Coroutine[Any, Any, dict[str, Any]], stuck_seconds: float) -> dict[str, Any]:
        """Return what comes of an exchange. Raises ``WorkerStuckError`` once the worker hangs for so long."""
        exchange = asyncio.ensure_future(work)
        try:
            idle, worked = 0.0, self._worked_seconds()
            while not (await asyncio.wait({exchange}, timeout=min(_TICK_SECONDS, stuck_seconds)))[0]:
                # A tick counts as one, however late it comes: this process may have stood still.
                before, worked = worked, self._worked_seconds()
                idle = 0.0 if worked > before else idle + min(_TICK_SECONDS, stuck_seconds)
                if idle >= stuck_seconds:
                    raise WorkerStuckError(f"it neither ran nor waited for a processor for {stuck_seconds:g} seconds")
            return exchange.result()
        finally:
            exchange.cancel()
            await asyncio.wait({exchange})  # until then the loop watches a descriptor that ``kill`` closes

    def _worked_seconds(self) -> float:
        """Return for how long the worker has run or waited for a processor (proc_pid_schedstat(5))."""
        try:
            running, waiting, _ = Path(f"/proc/{self.process.pid}/schedstat").read_text(encoding="ascii").split()
        except OSError:  # it has ended
            return 0.0
        return (int(running) + int(waiting)) / 1e9

    async def _exchange(self, body: bytes) -> dict[str, Any]:
        await asyncio.get_running_loop().sock_sendall(self._connection, LENGTH.pack(len(body)) + body)
        return await self._receive()

    async def _receive(self) -> dict[str, Any]:
        length = LENGTH.unpack(await self._receive_exactly(LENGTH.size))[0]
        if length > MAX_MESSAGE:
            raise ValueError(f"a message of {length} bytes")
        return json.loads(await self._receive_exactly(length))

    async def _receive_exactly(self, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = bytearray()
        while len(data) < count:
            chunk = await loop.sock_recv(self._connection, min(count - len(data), 1 << 16))
            if not chunk:
                raise ConnectionResetError
            data += chunk
        return bytes(data)


def _spawn(connection: socket.socket, target: str, memory: int, folders: Sequence[Path]) -> subprocess.Popen[bytes]:
    package_root = str(Path(prorl_gym.__file__).parents[1])
    program = [sys.executable, "-P", "-c", _START, package_root]
    # Only the variables that an interpreter needs: the service's own hold tokens and keys.
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME") if name in os.environ}
    return subprocess.Popen(
        [*program, str(connection.fileno()), target, str(memory), *map(str, folders)],
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**kept, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
    )
