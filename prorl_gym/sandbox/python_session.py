"""The persistent python session of a sandbox: cells in a worker process that may die without harm."""

import asyncio
import signal

from prorl_gym.errors import Evidence, FailureKind, SandboxError, UnfitImageError, UnusableSandboxError
from prorl_gym.sandbox.breach import Breach, name_breach
from prorl_gym.sandbox.channel import Channel, StartFailure
from prorl_gym.sandbox.execute import NO_PROGRAM, exit_code, not_confined
from prorl_gym.sandbox.output import Capture
from prorl_gym.sandbox.protocol import CellResult, SandboxSpec
from prorl_gym.sandbox.python_worker import Answer, LineWorker, PythonWorker, Unfit, WorkerKind
from prorl_gym.sandbox.shielding import finish

_START_SECONDS = 60.0
_INTERRUPT_SECONDS = 1.0
"""How long a cell has to end itself after SIGINT."""
_NO_PYTHON = Unfit("has no python3", LineWorker.unfit.fix)


class IsolatedPython:
    """A ``PythonSession``.

    Args:
        channel: the guest.
        spec: image, output limit, and which kind of worker runs the cells.
        program: the interpreter, searched in the sandbox's PATH.
    """

    def __init__(self, channel: Channel, spec: SandboxSpec, program: str = "python3") -> None:
        self._channel = channel
        self._spec = spec
        self._start_worker = _worker_kind(spec)
        self._program = program
        self._console = ""
        self._capture = Capture(spec.limits.output)
        self._worker: PythonWorker | None = None
        self._kill: Evidence | None = None
        self._struck: bool | None = None
        """What is known of a worker that was killed while it started; see ``Channel``."""
        self._was_started = False
        self._revived = False

    @property
    def console(self) -> str:
        """Who runs the cells: ``ipython``, ``console`` of the standard library, ``kernel``. Empty until it did."""
        return self._console

    async def run(self, code: str, *, timeout: float) -> CellResult:
        """See ``PythonSession.run``. One cell at a time."""
        await self.open()
        worker = self._current()
        answer = worker.run(code)
        timed_out = False
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(answer)
        except TimeoutError:
            timed_out = True
            await finish(self._stop(worker, answer))
        except asyncio.CancelledError:
            await finish(self._stop(worker, answer))
            self._capture.take()  # nobody wants its output, the next cell least of all
            raise
        return await self._result(worker, answer.result() if answer.done() else None, timed_out)

    async def close(self) -> None:
        """Kill the worker. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            try:
                await finish(worker.kill())
            except SandboxError:  # the sandbox is gone, and the worker with it
                return

    async def open(self) -> None:
        """Start a worker unless one lives.

        Raises:
            SandboxError: ``IMAGE_BROKEN`` when there never was a working python3 (or kernel),
                ``SANDBOX_BROKEN_BY_AGENT`` when it stopped working; ``SANDBOX_LOST`` when the sandbox is gone or the
                worker was killed from outside, ``SANDBOX_UNAVAILABLE`` when it is only slow.
        """
        if self._worker is not None and not self._worker.child.exited.done():
            return
        if self._worker is not None:
            await self._must_be_explained(self._worker)
            self._revived = True  # it ended while nobody looked; the next result says so
            self._worker.release()
            self._worker = None
        worker = await self._start()
        if worker is None:  # killed, and no limit explains it: a worker whose own doing that is dies again
            worker = await self._start()
        if worker is None:
            raise self._killed_at_start()
        self._worker, self._was_started, self._console = worker, True, worker.console

    async def _start(self) -> PythonWorker | None:
        """Start a worker; ``None`` when it was killed before it was ready, and no limit of the sandbox explains it."""
        try:
            worker = await self._start_worker(self._channel, self._program, self._capture)
        except StartFailure as failure:
            if self._channel.lost():
                what = f"python3 could not be started: {failure.strerror}."
                raise SandboxError(FailureKind.SANDBOX_LOST, what) from None
            if failure.errno not in NO_PROGRAM:
                raise not_confined(failure, "python3") from None
            raise self._unfit(_NO_PYTHON) from None
        try:
            async with asyncio.timeout(_START_SECONDS):
                if await worker.greet():
                    return worker
        except TimeoutError:
            await finish(worker.kill())
            self._capture.take()
            what = f"python3 was not ready after {_START_SECONDS:.0f} s."
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "Look at the load of the node.") from None
        except BaseException:
            await finish(worker.kill())
            raise
        killed = _was_killed(worker)
        await finish(worker.kill())
        self._must_live("while python3 started")
        detail = self._capture.take_text().strip().rpartition("\n")[2][:200]
        if killed:
            self._kill = await self._channel.evidence_of_kill(worker.child.pid)
            self._struck = self._channel.was_struck(worker.child.pid)
            if not self._channel.take_breaches(worker.child.pid):
                return None
        raise self._unfit(worker.unfit, f" ({detail or 'no output'})")

    async def _stop(self, worker: PythonWorker, answer: "asyncio.Future[Answer | None]") -> None:
        """SIGINT, then SIGKILL of the worker with everything it started."""
        if self._channel.closed or worker.child.exited.done():
            return
        await worker.interrupt()
        await asyncio.wait([answer], timeout=_INTERRUPT_SECONDS)
        if not answer.done() and not self._channel.closed:
            await worker.kill()

    async def _result(self, worker: PythonWorker, answer: Answer | None, timed_out: bool) -> CellResult:
        self._must_live("while it ran python")
        restarted, self._revived = self._revived, False
        truncated = self._capture.left_out > 0
        if answer is not None:
            output, ok = self._capture.take_text(), answer.ok and not timed_out
            breach = self._breach(worker, 0 if ok else 1, output, timed_out, truncated)
            return CellResult(output, ok, answer.images, timed_out, restarted, breach)
        if not timed_out:
            await self._must_be_explained(worker)
        await finish(worker.kill())
        self._worker = None
        output, code = self._capture.take_text(), exit_code(worker.child.exited.result())
        note = f"[python ended (exit code {code}) and was started again: all variables are gone]\n"
        breach = self._breach(worker, code, output, timed_out, truncated)
        return CellResult(output + note, False, (), timed_out, True, breach)

    def _breach(self, worker: PythonWorker, code: int, words: str, timed_out: bool, truncated: bool) -> Breach | None:
        observed = self._channel.take_breaches(worker.child.pid)
        return name_breach(exit_code=code, observed=observed, words=words, timed_out=timed_out, truncated=truncated)

    def _current(self) -> PythonWorker:
        if self._worker is None:
            raise SandboxError(FailureKind.SANDBOX_LOST, "the python session of this sandbox was closed.")
        return self._worker

    def _must_live(self, when: str) -> None:
        """Ask before an end is blamed on the image or on the agent: a dying sandbox takes its processes first."""
        if self._channel.lost():
            raise SandboxError(FailureKind.SANDBOX_LOST, f"the sandbox was lost {when}.")

    def _killed_at_start(self) -> SandboxError:
        what = "python3 was killed twice while it started."
        if self._kill is not None:
            return SandboxError.from_evidence(self._kill, what)
        if self._struck and not self._was_started:  # by the image's own python3, or by what a payload put in its place
            return UnusableSandboxError(what)
        evidence = Evidence.PAYLOAD_BROKE_SANDBOX if self._was_started else Evidence.PROGRAM_KILLED_OUTSIDE
        return SandboxError.from_evidence(evidence, what)

    async def _must_be_explained(self, worker: PythonWorker) -> None:
        """Let a session pass for its payload's doing only if that may be so: what it held is gone with it.

        Raises:
            SandboxError: SIGKILL ended it, and neither a limit nor a program inside explains that.
        """
        if _was_killed(worker) and (evidence := await self._channel.evidence_of_kill(worker.child.pid)) is not None:
            self._worker = None
            worker.release()
            what = "the python session was killed, and nothing in its sandbox explains that."
            raise SandboxError.from_evidence(evidence, what)

    def _unfit(self, unfit: Unfit, detail: str = "") -> SandboxError:
        if self._was_started:
            what = f"the sandbox now {unfit.what}{detail}."
            return SandboxError.from_evidence(Evidence.PAYLOAD_BROKE_SANDBOX, what)
        what = f"image {self._spec.image!r} {unfit.what}{detail}."
        return UnfitImageError("python", what, unfit.fix)


def _was_killed(worker: PythonWorker) -> bool:
    exited = worker.child.exited
    return exited.done() and exited.exception() is None and exited.result() == -signal.SIGKILL


def _worker_kind(spec: SandboxSpec) -> WorkerKind:
    if spec.python_tool != "kernel":
        return LineWorker.start
    from prorl_gym.sandbox.jupyter_worker import KernelWorker  # jupyter_client is heavy, and few ask for it

    return KernelWorker.start
