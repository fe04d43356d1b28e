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
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar, copy_context
from heapq import heapify, heappop, heappush
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal, TypeVar, cast

ResultT = TypeVar("ResultT")

EPOCH = 1.7e9
"""What ``time.time`` returns when a virtual clock begins."""

_RESOLUTION = time.get_clock_info("monotonic").resolution
_FEW_TIMERS = 100
"""Up to which cancelled ones stay until they are due, as in asyncio."""

_PROCESS: ContextVar["SimulatedProcess | None"] = ContextVar("simulated_process", default=None)


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that lets the clock jump instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; where nothing is, the time has passed.

        Raises:
            RuntimeError: nothing is ready and no timer is set: everything waits for something that will not happen.
        """
        if timeout is not None and timeout <= 0:
            return []
        if ready := super().select(0):
            return ready
        if timeout is None:
            raise RuntimeError(f"everything waits, and nothing will happen any more, at {self.now:.0f} s")
        self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own. Sockets that answer later have no place on it.

    Args:
        thread_seconds: returns the virtual seconds before a call that is passed to a thread runs, and again before its
            result arrives.
    """

    def __init__(self, thread_seconds: Callable[[], float] = lambda: 0.0) -> None:
        self._selector_clock = _JumpingSelector()
        self._thread_seconds = thread_seconds
        self._timers: list[tuple[float, _Callback]] = []
        """A heap."""
        self._cancelled_timers = 0
        """Of ``_timers``."""
        super().__init__(self._selector_clock)
        self._callbacks = cast("deque[_Callback]", self._ready)  # type: ignore[attr-defined] # pyright: ignore

    def time(self) -> float:
        """Return virtual seconds."""
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
        handle = _Callback(when, callback, args, self, copy_context() if context is None else context)
        handle._scheduled = True  # type: ignore[attr-defined] # pyright: ignore
        heappush(self._timers, (when, handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See ``asyncio.loop.call_later``."""
        return self.call_at(self._selector_clock.now + delay, callback, *args, context=context)

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        """See ``asyncio.loop.call_soon``; the callback belongs to the process of its context."""
        handle = _Callback(0.0, callback, args, self, copy_context() if context is None else context)
        self._callbacks.append(handle)
        return handle

    def run_again(self, held: "list[_Callback]") -> None:
        """Run the callbacks that a process held."""
        self._callbacks.extend(held)

    def _call_soon(self, callback: Any, args: Any, context: Context | None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)  # from another thread

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if handle._scheduled:  # type: ignore[attr-defined] # pyright: ignore
            self._cancelled_timers += 1

    def _run_once(self) -> None:
        """As asyncio does, in the same order, without what sockets, slow callbacks and debugging take."""
        timers, callbacks, clock = self._timers, self._callbacks, self._selector_clock
        if len(timers) > _FEW_TIMERS and self._cancelled_timers / len(timers) > 0.5:
            timers[:] = [timer for timer in timers if not timer[1].cancelled()]
            heapify(timers)
            self._cancelled_timers = 0
        while timers and timers[0][1].cancelled():
            heappop(timers)[1]._scheduled = False  # type: ignore[attr-defined] # pyright: ignore
            self._cancelled_timers -= 1
        if not callbacks and not self._stopping:  # type: ignore[attr-defined] # pyright: ignore
            wait = max(0.0, timers[0][0] - clock.now) if timers else None
            self._process_events(clock.select(wait))  # type: ignore[attr-defined] # pyright: ignore
        due = clock.now + _RESOLUTION
        while timers and timers[0][0] < due:
            _, handle = heappop(timers)
            handle._scheduled = False  # type: ignore[attr-defined] # pyright: ignore
            callbacks.append(handle)
        for _ in range(len(callbacks)):
            handle = callbacks.popleft()
            if not handle.cancelled():
                handle._run()  # type: ignore[attr-defined] # pyright: ignore

    def drop_everything(self) -> None:
        """Forget all tasks and timers; nothing runs any more."""
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined] # pyright: ignore
        self.set_exception_handler(None)
        self._callbacks.clear()
        self._timers.clear()


class _Callback(asyncio.TimerHandle):
    """A callback of the process of its context, if that has one; it runs as the process's state allows."""

    __slots__ = ("_process",)

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualLoop,
        context: Context,
    ) -> None:
        # Every attribute of the base classes, set here: their constructors are half of what a callback costs.
        self._when = when
        self._scheduled = False
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._loop = loop
        self._repr = None
        self._source_traceback = None
        self._context = context
        self._process = context.get(_PROCESS)

    def _run(self) -> None:
        process = self._process
        if process is None or process.state == "running":
            super()._run()  # type: ignore[misc] # pyright: ignore
        elif process.state == "paused":
            process.hold(self)


class SimulatedProcess:
    """Tasks and timers of one process of a simulated system.

    Args:
        name: for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: Literal["running", "paused", "killed"] = "running"
        self.on_killed: dict[object, Callable[[], object]] = {}
        """Called once when it is killed: its connections break. By key, so that each can be removed."""
        self._context = copy_context()
        self._context.run(_PROCESS.set, self)
        self._held: list[_Callback] = []
        self._kept_tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Start a task that belongs to this process."""
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    def call(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """Call a function now; the tasks and timers that it starts belong to this process."""
        return self._context.copy().run(function, *args)

    def call_later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        """Call a function in this process, in so many virtual seconds, if it runs then."""
        asyncio.get_running_loop().call_later(seconds, function, *args, context=self._context.copy())

    def pause(self) -> None:
        """Run nothing of it until ``resume``."""
        if self.state == "running":
            self.state = "paused"

    def resume(self) -> None:
        """Run what came due during the pause, in its order."""
        if self.state == "paused":
            self.state = "running"
            held, self._held = self._held, []
            cast("VirtualLoop", asyncio.get_running_loop()).run_again(held)

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

    def hold(self, callback: _Callback) -> None:
        """Keep a callback that came due during a pause. Called by the loop."""
        self._held.append(callback)


def _settle(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def run_virtually(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine to its end on a fresh virtual loop."""
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
    gc.freeze()
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
        gc.unfreeze()
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
