"""Running a program on all of its tests, in as many sandboxes as that takes.

Batches go into fresh sandboxes. A test during which the driver was ended, or the sandbox lost, is run again by itself
in another one: if the driver is ended there, too, it was the program's doing, and this test and those after it fail;
if the sandbox is lost again, it is not the program's to answer for, and there is no verdict.

The same holds for a program that SIGKILL ended within its limits: the host may have sent it (out of memory), and the
program itself may have. So the test is run again by itself, and the second such end is the program's own, as is that of
the driver, unless the sandbox heard of no SIGKILL that was sent in it. Then there is no verdict either.
"""

from collections.abc import AsyncGenerator, Sequence

from prorl_gym.environments.code.batch import Batch, Launch, TestEnd, TestInput, run_batch
from prorl_gym.environments.killed import killed_unseen
from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.protocol import SandboxSpec

SANDBOX = SandboxSpec()

BATCH_BYTES = 32 << 20
"""Input and room for output of one batch, together: what one grading may take of the service's memory."""


class TestRunner:
    """Runs programs on tests, within one allowance of wall clock.

    Args:
        leases: gives the clean sandboxes.
        seconds: wall clock that all tests of all programs together may take.
    """

    __test__ = False

    def __init__(self, leases: Leases, seconds: float) -> None:
        self._leases = leases
        self._seconds = seconds

    async def run(
        self, launch: Launch, tests: Sequence[TestInput], *, stop_at_crash: bool
    ) -> AsyncGenerator[list[TestEnd]]:
        """Yield how the tests ended, in order, some at a time. Ends early where ``stop_at_crash`` says so.

        Tests for which no time is left are reported as timed out.

        Raises:
            SandboxError: a sandbox could not be started, or was lost twice during the same test, or the program or its
                driver was killed twice and nothing in the sandbox did that.
            GraderError: no test can be run there.
        """
        position, again, kills_itself = 0, False, False
        while position < len(tests):
            if self._seconds <= 0:
                yield [_no_time_left() for _ in tests[position:]]
                return
            portion = tests[position : position + 1] if again else _portion(tests, position)
            batch = await self._batch(launch, portion, again, stop_at_crash)
            ends = list(batch.ends[: len(portion)])
            struck = batch.driver_killed or any(_was_killed(end, launch) for end in ends)
            if again and struck and batch.sigkill is not None:
                raise killed_unseen("the program, or what runs its tests,", batch.sigkill)
            if batch.interrupted and not ends and again:
                yield [_stopped(batch) for _ in tests[position:]]  # it would cost as much time with every other test
                return
            killed = next((index for index, end in enumerate(ends) if _was_killed(end, launch)), None)
            kills_itself = kills_itself or (again and killed is not None)
            if killed is not None and not kills_itself:
                ends, again = ends[:killed], True
                self._seconds -= sum(end.seconds for end in ends)
            else:
                again = batch.interrupted
                self._seconds -= batch.seconds
            position += len(ends)
            if ends:
                yield ends
            if stop_at_crash and any(crash(end, launch.cpu_seconds) for end in ends):
                return

    async def _batch(self, launch: Launch, portion: Sequence[TestInput], again: bool, stop_at_crash: bool) -> Batch:
        sandbox = await self._leases.clean(SANDBOX)
        try:
            return await run_batch(sandbox, launch, portion, self._seconds, stop_at_crash=stop_at_crash)
        except SandboxError:
            if again:
                raise
            # What the program left running after an earlier test may have choked it: that is no reason to call the
            # machine broken. A fresh one tells.
            return Batch((), interrupted=True, seconds=0.0)
        finally:
            await sandbox.close()


def _portion(tests: Sequence[TestInput], start: int) -> Sequence[TestInput]:
    size, end = 0, start
    while end < len(tests) and (end == start or size + len(tests[end].stdin) + tests[end].room <= BATCH_BYTES):
        size += len(tests[end].stdin) + tests[end].room
        end += 1
    return tests[start:end]


def _no_time_left() -> TestEnd:
    return TestEnd(exit=0, timed_out=True, truncated=False, seconds=0, cpu=0, clean=True, out=0, err=0)


def _stopped(batch: Batch) -> TestEnd:
    return _no_time_left().model_copy(update={"stopped_driver": True, "timed_out": False, "seconds": batch.seconds})


KILLED = "killed"
"""The complaint about a program that SIGKILL ended, and none of its limits."""
_XCPU, _KILLED, _ABORTED = 128 + 24, 128 + 9, 128 + 6


def _was_killed(end: TestEnd, launch: Launch) -> bool:
    return crash(end, launch.cpu_seconds) == KILLED


def crash(end: TestEnd, cpu_seconds: int) -> str | None:
    """Return how a program failed whatever it printed, or ``None``."""
    if end.stopped_driver:
        return "stopped the test runner"
    # Who ignores the first signal gets one that the kernel also uses for everything else: the time tells. It counts the
    # limit in ticks, which may be up to half off. More than the limit is what several processes used together.
    spent = end.exit == _XCPU or (end.exit == _KILLED and end.cpu >= 0.5 * cpu_seconds)
    if end.timed_out or spent or end.cpu > cpu_seconds + 0.5:
        return "time limit"
    if end.truncated:
        return "too much output"
    if end.exit == 0:
        return None
    if b"MemoryError" in end.errors or (end.exit == _ABORTED and b"std::bad_alloc" in end.errors):
        return "memory limit"
    return KILLED if end.exit == _KILLED else "runtime error"
