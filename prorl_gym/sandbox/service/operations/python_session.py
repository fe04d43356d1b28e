"""The persistent python session of a sandbox: cells in a worker process that may die without harm."""

import asyncio
import base64
import json
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from typing import Any, cast

from prorl_gym.deadlines import Timeout
from prorl_gym.errors import Evidence, FailureKind, SandboxError, UnfitImageError, UnusableSandboxError
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.guest.guest_messages import ChildStartError
from prorl_gym.sandbox.limit_breach import classify_breach
from prorl_gym.sandbox.protocol import CellResult, SandboxSpec
from prorl_gym.sandbox.service.guest_channel import GuestChannel
from prorl_gym.sandbox.service.operations.execute import (
    UNUSABLE_PROGRAM_ERRNOS,
    ChildProcess,
    start_failure_error,
    to_exit_code,
)
from prorl_gym.sandbox.service.operations.fd_streams import FdReader, FdWriter, OutputCapture

_MAX_IMAGES = 8
_MAX_ANSWER = 16 << 20
"""Bytes of one answer of the worker (images included); the sandbox's code can write there, too."""
_MAX_STRUCTURE = 64
"""Commas, colons and opening brackets of one answer: an honest one has twenty, a line of them costs JSON its memory."""
_CELL_RUNNERS = ("ipython", "console", "kernel")
_SESSION_DEFECT = ("has a python3 that does not work", "Install python3 (3.6 or newer) in the image.")
_KERNEL_DEFECT = (
    "has no ipykernel that works",
    "Install ipykernel in the image (`prorl-gym images build prorl-python` has it) or set python_tool: session.",
)
"""Flaw of an image that cannot run the worker, and the fix."""
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class _CellReply:
    """A worker's answer to a cell."""

    ok: bool
    images: tuple[bytes, ...] = ()
    cell_runner: str = ""
    """The first answer of all names what runs the cells."""


class _PythonWorker:
    """A process that runs cells, one at a time; see ``guest/cell_worker.py``. ``capture`` gets what cells print."""

    def __init__(self, child: ChildProcess, capture: OutputCapture) -> None:
        self._loop = asyncio.get_running_loop()
        self.child = child
        self._capture = capture
        stdout, conversation = child.descriptors
        self._stdout = FdReader(stdout, capture.feed)
        self._answers = FdReader(conversation, self._on_answer)
        self._requests = FdWriter(conversation, owns_fd=False)
        self._line = bytearray()
        self._expected_cell: str | None = None
        self.cell_runner = ""
        self._answer: asyncio.Future[_CellReply | None] = self._loop.create_future()
        self._ready = self._answer
        child.exited.add_done_callback(self._on_exit)

    async def wait_ready(self) -> bool:
        """Wait until it accepts cells; ``False`` when it ended instead. A caller that stops waiting kills it."""
        hello = await asyncio.shield(self._ready)
        if hello is None:
            return False
        self.cell_runner = hello.cell_runner
        if self.cell_runner == "kernel":
            self._capture.pop_bytes()  # warnings of its start are no cell's output
        return True

    def run_cell(self, code: str) -> "asyncio.Future[_CellReply | None]":
        """Send a cell; the future is done when it or the worker (``None``) has ended, and its output is captured."""
        self._answer = self._loop.create_future()
        self._expected_cell = secrets.token_hex(8)
        if self.child.exited.done():
            self._resolve(None)
        self._requests.write(json.dumps({"cell": self._expected_cell, "code": code}).encode("ascii") + b"\n")
        return self._answer

    async def kill(self) -> None:
        try:
            await self.child.kill()
        finally:
            self.close_descriptors()

    def close_descriptors(self) -> None:
        for stream in (self._requests, self._answers, self._stdout):
            stream.close()

    def _on_answer(self, data: bytes) -> None:
        if self._answer.done():
            return  # no cell is running: reading further output would only cost time
        before, end, _ = data.partition(b"\n")
        self._line += before
        if end or len(self._line) > _MAX_ANSWER:
            # One line answers a cell, and the worker waits for the next cell then: what follows is dropped.
            line, self._line = bytes(self._line), bytearray()
            self._resolve(parse_reply(line, self._expected_cell) if end else None)

    def _on_exit(self, exited: "asyncio.Future[int]") -> None:
        self._answers.drain()  # it may have answered just before
        if not exited.cancelled():
            self._resolve(None)

    def _resolve(self, answer: _CellReply | None) -> None:
        if not self._answer.done():
            self._stdout.drain()
            self._answer.set_result(answer)


def parse_reply(line: bytes, expected: str | None) -> _CellReply | None:
    """Read one line of the worker; ``None`` for anything that is not the answer that is waited for."""
    if sum(map(line.count, (b",", b":", b"[", b"{"))) > _MAX_STRUCTURE:
        return None
    try:
        message: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict):
        return None
    fields = cast(dict[str, Any], message)
    if expected is None:
        return _CellReply(True, cell_runner=console) if (console := fields.get("ready")) in _CELL_RUNNERS else None
    if fields.get("cell") != expected or not isinstance(fields.get("images"), list):
        return None
    return _CellReply(fields.get("ok") is True, _decode_images(fields["images"]))


def _decode_images(encoded: Sequence[Any]) -> tuple[bytes, ...]:
    """Return what is base64 of a PNG file, of the first ``_MAX_IMAGES`` things given."""
    images: list[bytes] = []
    for item in encoded[:_MAX_IMAGES]:
        try:
            data = base64.b64decode(item, validate=True)
        except (ValueError, TypeError):
            continue
        if data.startswith(_PNG):
            images.append(data)
    return tuple(images)


class PersistentPython:
    """A ``PythonSession``.

    ``program`` is the interpreter, searched in the sandbox's PATH. ``open_template`` requests a fork of a template that
    holds what ``program`` would load, and returns the socket that the guest is to be given; or ``None`` when there is
    no template.
    """

    def __init__(
        self,
        channel: GuestChannel,
        spec: SandboxSpec,
        program: str = "python3",
        open_template: Callable[[], socket.socket | None] | None = None,
    ) -> None:
        self._channel = channel
        self._spec = spec
        self._program = program
        self._open_template = open_template
        self.cell_runner = ""
        """Runner of cells: ``ipython``, ``console`` (the standard library's) or ``kernel``; "" before the start."""
        self._capture = OutputCapture(spec.limits.output)
        self._worker: _PythonWorker | None = None
        self._kill_evidence: Evidence | None = None
        self._killed_inside: bool | None = None
        """``GuestChannel.was_killed_inside`` of a worker that was killed while it started."""
        self._was_started = False
        self._was_restarted = False

    async def run_cell(self, code: str, *, timeout: float) -> CellResult:
        """One cell at a time."""
        await self.ensure_started()
        worker = self._worker
        if worker is None:
            raise SandboxError(FailureKind.SANDBOX_LOST, "the python session of this sandbox was closed.")
        answer = worker.run_cell(code)
        timed_out = False
        try:
            async with Timeout(timeout):
                await asyncio.shield(answer)
        except TimeoutError:
            timed_out = True
            await run_shielded(self._stop(worker, answer))
        except asyncio.CancelledError:
            await run_shielded(self._stop(worker, answer))
            self._capture.pop_bytes()  # its output must not show up in the next cell's
            raise
        return await self._result(worker, answer.result() if answer.done() else None, timed_out)

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            with suppress(SandboxError):  # the sandbox is gone, and the worker with it
                await run_shielded(worker.kill())

    async def ensure_started(self) -> None:
        """Start a worker unless one lives.

        Raises ``SandboxError``: ``IMAGE_BROKEN`` when there never was a working python3 (or kernel),
        ``SANDBOX_BROKEN_BY_AGENT`` when it stopped working; ``SANDBOX_LOST`` when the sandbox is gone or the worker was
        killed from outside, ``SANDBOX_UNAVAILABLE`` when it is only slow.
        """
        if self._worker is not None and not self._worker.child.exited.done():
            return
        if self._worker is not None:
            await self._raise_if_killed_unexplained(self._worker)
            self._was_restarted = True  # it ended between cells; the next result has that mark
            self._worker.close_descriptors()
            self._worker = None
        worker = await self._start()
        if worker is None:  # killed, and no limit explains it: a worker whose own doing that is dies again
            worker = await self._start()
        if worker is None:
            raise self._killed_at_start()
        self._worker, self._was_started, self.cell_runner = worker, True, worker.cell_runner

    async def _start(self) -> _PythonWorker | None:
        """Start a worker; ``None`` when it was killed before it was ready, and no limit of the sandbox explains it."""
        try:
            worker = await self._spawn_worker()
        except ChildStartError as failure:
            if self._channel.is_lost():
                what = f"python3 could not be started: {failure.strerror}."
                raise SandboxError(FailureKind.SANDBOX_LOST, what) from None
            if failure.errno not in UNUSABLE_PROGRAM_ERRNOS:
                raise start_failure_error(failure, "python3") from None
            raise self._image_error("has no python3", _SESSION_DEFECT[1]) from None
        try:
            async with asyncio.timeout(self._channel.timeouts.python_start):
                if await worker.wait_ready():
                    return worker
        except TimeoutError:
            await run_shielded(worker.kill())
            self._capture.pop_bytes()
            what = f"python3 was not ready after {self._channel.timeouts.python_start:.0f} s."
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "Look at the load of the node.") from None
        except BaseException:
            await run_shielded(worker.kill())
            raise
        killed = worker.child.was_killed
        await run_shielded(worker.kill())
        self._raise_if_lost("while python3 started")
        detail = self._capture.pop_text().strip().rpartition("\n")[2][:200]
        if killed:
            self._kill_evidence = await self._channel.kill_evidence(worker.child.pid)
            self._killed_inside = self._channel.was_killed_inside(worker.child.pid)
            if not self._channel.pop_breaches(worker.child.pid):
                return None
        defect, fix = _KERNEL_DEFECT if self._spec.python_tool == "kernel" else _SESSION_DEFECT
        raise self._image_error(f"{defect} ({detail or 'no output'})", fix)

    async def _spawn_worker(self) -> _PythonWorker:
        if self._open_template is not None and (template := self._open_template()) is not None:
            with template:
                try:
                    return await self._spawn(["python3"], template)
                except ChildStartError as failure:
                    if failure.stage != "template":
                        raise
                    self._open_template = None  # this sandbox's python differs from the template's, or it is gone
        script = resources.files("prorl_gym.sandbox.guest").joinpath("cell_worker.py").read_text("utf-8")
        argv = [self._program, "-c", script, self._spec.python_tool or "session"]
        return await self._spawn(argv)

    async def _spawn(self, argv: list[str], template: socket.socket | None = None) -> _PythonWorker:
        child = await ChildProcess.spawn(
            self._channel, argv, env={}, stdin=False, merge_stderr=True, side_socket=True, template=template
        )
        return _PythonWorker(child, self._capture)

    async def _stop(self, worker: _PythonWorker, answer: "asyncio.Future[_CellReply | None]") -> None:
        """SIGINT, then SIGKILL of the worker with everything it started."""
        if self._channel.is_closed or worker.child.exited.done():
            return
        await worker.child.send_signal(signal.SIGINT)  # as a terminal's C-c
        await asyncio.wait([answer], timeout=self._channel.timeouts.python_interrupt)
        if not answer.done() and not self._channel.is_closed:
            await worker.kill()

    async def _result(self, worker: _PythonWorker, answer: _CellReply | None, timed_out: bool) -> CellResult:
        self._raise_if_lost("while it ran python")
        restarted, self._was_restarted = self._was_restarted, False
        truncated = self._capture.dropped_bytes > 0
        ok, note, images = False, "", ()
        if answer is not None:
            ok, images = answer.ok and not timed_out, answer.images
            code = 0 if ok else 1
        else:
            if not timed_out:
                await self._raise_if_killed_unexplained(worker)
            await run_shielded(worker.kill())
            self._worker, restarted = None, True
            code = to_exit_code(worker.child.exited.result())
            note = f"[python ended (exit code {code}) and was started again: all variables are gone]\n"
        output = self._capture.pop_text()
        observed = self._channel.pop_breaches(worker.child.pid)
        breach = classify_breach(
            exit_code=code, observed=observed, output=output, timed_out=timed_out, truncated=truncated
        )
        return CellResult(output + note, ok, images, timed_out, restarted, breach)

    def _raise_if_lost(self, when: str) -> None:
        """Call before an end is blamed on the image or on the agent: a dying sandbox takes its processes first."""
        if self._channel.is_lost():
            raise SandboxError(FailureKind.SANDBOX_LOST, f"the sandbox was lost {when}.")

    def _killed_at_start(self) -> SandboxError:
        what = "python3 was killed twice while it started."
        if self._kill_evidence is not None:
            return SandboxError.from_evidence(self._kill_evidence, what)
        if self._killed_inside and not self._was_started:  # by the image's python3, or what a payload put there
            return UnusableSandboxError(what)
        evidence = Evidence.PAYLOAD_BROKE_SANDBOX if self._was_started else Evidence.PROGRAM_KILLED_OUTSIDE
        return SandboxError.from_evidence(evidence, what)

    async def _raise_if_killed_unexplained(self, worker: _PythonWorker) -> None:
        """Raise if SIGKILL ended the worker, and neither a limit nor a program inside explains that."""
        child = worker.child
        if child.was_killed and (evidence := await self._channel.kill_evidence(child.pid)) is not None:
            self._worker = None
            worker.close_descriptors()
            what = "the python session was killed, and nothing in its sandbox explains that."
            raise SandboxError.from_evidence(evidence, what)

    def _image_error(self, defect: str, fix: str) -> SandboxError:
        if self._was_started:
            return SandboxError.from_evidence(Evidence.PAYLOAD_BROKE_SANDBOX, f"the sandbox now {defect}.")
        return UnfitImageError("python", f"image {self._spec.image!r} {defect}.", fix)
