"""The client for code without an event loop."""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from prorl_gym.client.async_client import Client

Params = ParamSpec("Params")
ResultT = TypeVar("ResultT")
ItemT = TypeVar("ItemT", covariant=True)


class _Stream(Protocol[ItemT]):
    def __anext__(self) -> Coroutine[Any, Any, ItemT]: ...

    async def aclose(self) -> None: ...


class SyncClient:
    """The calls of ``Client`` for code without an event loop (also inside one: it has its own, in a thread)."""

    def __init__(
        self, url: str | None = None, *, token: str | None = None, retry_seconds: float = 60.0, retry_delay: float = 0.2
    ) -> None:
        self._client = Client(url, token=token, retry_seconds=retry_seconds, retry_delay=retry_delay)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="prorl-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C in the waiting thread stops the call too
            future.cancel()
            raise

    def _iterate(self, stream: _Stream[ResultT]) -> Iterator[ResultT]:
        try:
            while True:
                try:
                    yield self._run(stream.__anext__())
                except StopAsyncIteration:
                    return
        finally:
            if not self._loop.is_closed():
                self._run(stream.aclose())

    @staticmethod
    def _blocking(
        method: Callable[Concatenate[Client, Params], Coroutine[Any, Any, ResultT]],
    ) -> "Callable[Concatenate[SyncClient, Params], ResultT]":
        """Return a call of ``Client``, with its parameters and docstring, that waits for the result."""

        @functools.wraps(method)
        def call(self: "SyncClient", *args: Params.args, **kwargs: Params.kwargs) -> ResultT:
            return self._run(method(self._client, *args, **kwargs))

        return call

    @staticmethod
    def _blocking_stream(
        method: Callable[Concatenate[Client, Params], _Stream[ResultT]],
    ) -> "Callable[Concatenate[SyncClient, Params], Iterator[ResultT]]":
        """Return a call of ``Client``, with its parameters and docstring, whose iterator waits for each item."""

        @functools.wraps(method)
        def call(self: "SyncClient", *args: Params.args, **kwargs: Params.kwargs) -> Iterator[ResultT]:
            return self._iterate(method(self._client, *args, **kwargs))

        return call

    @staticmethod
    def _blocking_context(
        method: Callable[Concatenate[Client, Params], AbstractAsyncContextManager[ResultT]],
    ) -> "Callable[Concatenate[SyncClient, Params], AbstractContextManager[ResultT]]":
        """Return a context of ``Client``, with its parameters and docstring, whose ends are waited for."""

        @functools.wraps(method)
        @contextmanager
        def call(self: "SyncClient", *args: Params.args, **kwargs: Params.kwargs) -> Generator[ResultT, None, None]:
            context = method(self._client, *args, **kwargs)
            entered = self._run(context.__aenter__())
            try:
                yield entered
            except BaseException as error:
                self._run(context.__aexit__(type(error), error, error.__traceback__))
                raise
            self._run(context.__aexit__(None, None, None))

        return call

    submit = _blocking(Client.submit)
    result = _blocking(Client.result)
    poll_result = _blocking(Client.poll_result)
    request = _blocking(Client.request)
    page = _blocking(Client.page)
    rollouts = _blocking(Client.rollouts)
    cancel = _blocking(Client.cancel)
    stream = _blocking_stream(Client.stream)
    stream_groups = _blocking_stream(Client.stream_groups)
    acknowledge = _blocking(Client.acknowledge)
    acknowledge_rollouts = _blocking(Client.acknowledge_rollouts)
    unacknowledged = _blocking(Client.unacknowledged)
    first_prompt = _blocking(Client.first_prompt)
    set_demand = _blocking(Client.set_demand)
    demand = _blocking(Client.demand)
    clear_demand = _blocking(Client.clear_demand)
    groups = _blocking(Client.groups)
    report_mismatch = _blocking(Client.report_mismatch)
    mismatch = _blocking(Client.mismatch)
    policy = _blocking(Client.policy)
    update_policy = _blocking(Client.update_policy)
    weight_update = _blocking_context(Client.weight_update)
    pause = _blocking(Client.pause)
    resume = _blocking(Client.resume)
    hold = _blocking(Client.hold)
    release = _blocking(Client.release)
    add_engine = _blocking(Client.add_engine)
    remove_engine = _blocking(Client.remove_engine)
    status = _blocking(Client.status)
