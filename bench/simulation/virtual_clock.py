"""An event loop on a virtual clock, with processes on it that can be paused and killed.

Real asyncio code runs hours of virtual time in seconds, and in the same order each time: when nothing is ready, the
clock jumps to the next timer. Work for threads (``run_in_executor``, ``asyncio.to_thread``) runs on the loop itself,
after the virtual time that a thread would have taken.

A ``SimulatedProcess`` owns the tasks and timers that are created in its context, and in those of its tasks. A killed
one runs no further line of code, as after SIGKILL; a paused one runs what came due once it resumes, as after SIGSTOP.
"""

import asyncio
import gc
import random
import selectors
import sys
import time
import warnings
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal, TypeVar, cast

ResultT = TypeVar("ResultT")

EPOCH = 1.7e9
"""What ``time.time`` returns when a virtual clock begins."""

_PROCESS: ContextVar["SimulatedProcess | None"] = ContextVar("simulated_process", default=None)


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that lets the clock jump instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; where nothing is, the time has passed."""
        if timeout is not None and timeout <= 0:
            return []
        if ready := super().select(0):
            return ready
        if timeout is None:
            raise RuntimeError(f"everything waits, and nothing will happen any more, at {self.now:.0f} s")
        self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own. Sockets that answer later have no place on it."""

    def __init__(self, thread_seconds: Callable[[], float] = lambda: 0.0) -> None:
        self._selector_clock = _JumpingSelector()
        self._thread_seconds = thread_seconds
        super().__init__(self._selector_clock)

    def time(self) -> float:
        return self._selector_clock.now

    def run_in_executor(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, executor: Executor | None, func: Callable[..., ResultT], *args: Any
    ) -> asyncio.Future[ResultT]:
        """Run the call on this loop, at a later virtual time. A killed process may get no answer to one that ran."""
        done: asyncio.Future[ResultT] = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except Exception as error:
                self.call_later(self._thread_seconds(), _settle, done, None, error)
            else:
                self.call_later(self._thread_seconds(), _settle, done, result, None)

        self.call_later(self._thread_seconds(), run)
        return done

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See ``asyncio.loop.call_at``; the timer belongs to the process of its context."""
        context = copy_context() if context is None else context
        process = context.get(_PROCESS)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        due = _DueCallback(context, callback, args)
        due.handle = handle = super().call_at(when, process.run_callback, due, context=context)
        return handle

    def _call_soon(self, callback: Any, args: Any, context: Context | None) -> asyncio.Handle:
        call_soon = cast("Callable[..., asyncio.Handle]", super()._call_soon)  # type: ignore[misc] # pyright: ignore
        context = copy_context() if context is None else context
        process = context.get(_PROCESS)
        if process is None:
            return call_soon(callback, args, context)
        due = _DueCallback(context, callback, args)
        due.handle = handle = call_soon(process.run_callback, (due,), context)
        return handle

    def drop_everything(self) -> None:
        """Forget all tasks and timers; nothing runs any more."""
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined] # pyright: ignore  # noqa: SLF001
        self.set_exception_handler(None)
        self._ready.clear()  # type: ignore[attr-defined] # pyright: ignore
        self._scheduled.clear()  # type: ignore[attr-defined] # pyright: ignore


@dataclass(slots=True)
class _DueCallback:
    """A callback that a process has to run."""

    context: Context
    callback: Callable[..., object]
    args: tuple[Any, ...]
    handle: asyncio.Handle | None = None
    """By which it may be cancelled, also while it is held."""


class SimulatedProcess:
    """Tasks and timers of one process of a simulated system."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: Literal["running", "paused", "killed"] = "running"
        self.on_killed: dict[object, Callable[[], object]] = {}
        """Called once when it is killed: its connections break. By key, so that each can be removed."""
        self._context = copy_context()
        self._context.run(_PROCESS.set, self)
        self._held: list[_DueCallback] = []
        self._kept_tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    def call(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """Call a function now; the tasks and timers that it starts belong to this process."""
        return self._context.copy().run(function, *args)

    def call_later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        """Call a function in this process, in so many virtual seconds, if it runs then."""
        asyncio.get_running_loop().call_later(seconds, function, *args, context=self._context.copy())

    def pause(self) -> None:
        if self.state == "running":
            self.state = "paused"

    def resume(self) -> None:
        """Run what came due during the pause, in its order."""
        if self.state == "paused":
            self.state = "running"
            held, self._held = self._held, []
            for due in held:
                asyncio.get_running_loop().call_soon(self.run_callback, due, context=due.context)

    def kill(self) -> None:
        """Run nothing of it any more. Idempotent."""
        if self.state == "killed":
            return
        self.state = "killed"
        self._held.clear()
        self._kept_tasks = asyncio.all_tasks()  # one that is collected would run its ``finally`` blocks
        callbacks, self.on_killed = self.on_killed, {}
        for callback in callbacks.values():
            callback()

    def run_callback(self, due: _DueCallback) -> None:
        """Run a callback of this process as its state allows. Called by the loop."""
        if self.state == "paused":
            self._held.append(due)
            return
        handle, due.handle = due.handle, None  # breaks their cycle
        if self.state == "running" and not (handle is not None and handle.cancelled()):
            due.callback(*due.args)


def _settle(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def run_virtually(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def run_deterministically(
    work: Callable[[], Coroutine[Any, Any, ResultT]], seed: int, thread_seconds: Callable[[], float] = lambda: 0.0
) -> ResultT:
    """Run a coroutine on a fresh virtual loop so that another run with the same seed is the same run.

    ``time.time``, ``time.monotonic`` and the global ``random`` follow the loop and the seed wherever the package uses
    them. Tasks that are left at the end are dropped.
    """
    loop = VirtualLoop(thread_seconds)
    state = random.getstate()
    random.seed(seed)
    asyncio.set_event_loop(loop)
    freeze, report = gc.freeze, sys.unraisablehook
    gc.disable()  # a dropped task that is collected runs its ``finally`` blocks: not during the run
    gc.freeze = lambda: None  # a service freezes what it has at its start
    try:
        with _virtual_clocks(loop):
            return loop.run_until_complete(work())
    finally:
        sys.unraisablehook = lambda _: None
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # never awaited: dropped
            loop.drop_everything()
            asyncio.set_event_loop(None)
            loop.close()
            gc.collect()
        sys.unraisablehook, gc.freeze = report, freeze
        gc.enable()
        random.setstate(state)


@contextmanager
def _virtual_clocks(loop: VirtualLoop) -> Generator[None, None, None]:
    """Replace the clocks of the package's modules, also where one was imported by name or is a default argument."""
    clocks: dict[object, object] = {time.time: lambda: EPOCH + loop.time(), time.monotonic: loop.time}
    with ExitStack() as undo:
        for name, module in list(sys.modules.items()):
            if name != "time" and not name.startswith("prorl_gym."):
                continue
            for key, value in list(vars(module).items()):
                if isinstance(value, BuiltinFunctionType) and value in clocks:
                    undo.callback(setattr, module, key, value)
                    setattr(module, key, clocks[value])
                elif isinstance(value, type) and isinstance(init := vars(value).get("__init__"), FunctionType):
                    defaults = init.__defaults__ or ()
                    if any(default in clocks for default in defaults if isinstance(default, BuiltinFunctionType)):
                        undo.callback(setattr, init, "__defaults__", defaults)
                        init.__defaults__ = tuple(
                            clocks[one] if isinstance(one, BuiltinFunctionType) and one in clocks else one
                            for one in defaults
                        )
        yield
