"""What every engine adapter must do, as checks that any test suite can run against its own adapter.

A suite writes one ``EngineCase`` for its adapter and runs each check of ``CHECKS`` on a fresh one::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_conformance(check):
        async with MyCase() as case:
            await check(case)
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol
from uuid import uuid4

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.pool import PoolEngine
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult

STOP_ID = 2
"""The id that ends a turn in these checks."""


class EngineCase(Protocol):
    """An adapter together with a server behind it that can be told what to do."""

    @property
    def engine(self) -> PoolEngine:
        """The adapter under test; its vocabulary must hold the ids 0..99."""
        ...

    def answer(self, ids: list[int]) -> None:
        """Let the server sample these ids in every call, cut to ``max_tokens``."""
        ...

    def hold(self) -> None:
        """Let the server keep every call unanswered until it is stopped."""
        ...

    def break_down(self) -> None:
        """Let the server be gone."""
        ...

    async def held(self, count: int) -> None:
        """Return when the server is holding exactly ``count`` calls; raises ``TimeoutError`` when it never does."""
        ...


def request(**changes: object) -> GenerationRequest:
    """Return a call with small defaults."""
    base = GenerationRequest(
        request_id=uuid4().hex,
        session_id="session",
        prompt_ids=[5, 6, 7],
        max_tokens=8,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        stop_token_ids=(STOP_ID,),
    )
    return replace(base, **changes)  # pyright: ignore[reportArgumentType]  # the names are the fields' own


async def returns_what_was_sampled(case: EngineCase) -> None:
    """Ids come back verbatim, the stop id included, with as many finite log-probs and versions."""
    case.answer([10, 11, STOP_ID])
    case.engine.version = 7
    result = await case.engine.generate(request())
    _equal(result.token_ids, [10, 11, STOP_ID])
    _equal(result.finish_reason, "stop")
    _equal(result.versions, [7, 7, 7])
    _equal(result.engine, case.engine.name)
    _well_formed(result)


async def respects_max_tokens(case: EngineCase) -> None:
    """A call never gets more than it asked for, and is told that length ended it."""
    case.answer([10, 11, 12, 13])
    result = await case.engine.generate(request(max_tokens=2))
    _equal(result.token_ids, [10, 11])
    _equal(result.finish_reason, "length")
    _well_formed(result)


async def serves_many_at_once(case: EngineCase) -> None:
    """Concurrent calls do not mix."""
    case.answer([10, STOP_ID])
    results = await asyncio.gather(*(case.engine.generate(request(session_id=f"s{n}")) for n in range(16)))
    for result in results:
        _equal(result.token_ids, [10, STOP_ID])


async def unreachable_is_told(case: EngineCase) -> None:
    """A server that is gone gives ``ENGINE_UNREACHABLE``, and ``health`` says no without raising."""
    case.break_down()
    try:
        await case.engine.generate(request())
    except EngineError as error:
        _equal(error.kind, FailureKind.ENGINE_UNREACHABLE)
    else:
        raise AssertionError("no error from an engine that is down")
    _equal((await case.engine.health()).ok, False)


async def health_of_a_well_engine(case: EngineCase) -> None:
    """A server that runs is well."""
    case.answer([STOP_ID])
    _equal((await case.engine.health()).ok, True)


async def cancelled_await_reaches_the_server(case: EngineCase) -> None:
    """Cancelling ``generate`` makes the server stop working, and the engine stays usable."""
    case.hold()
    call = asyncio.create_task(case.engine.generate(request()))
    await case.held(1)
    call.cancel()
    await asyncio.wait({call})
    _equal(call.cancelled(), True)
    await case.held(0)
    case.answer([STOP_ID])
    _equal((await case.engine.generate(request())).token_ids, [STOP_ID])


async def cancel_by_id_ends_the_call(case: EngineCase) -> None:
    """``cancel`` makes ``generate`` return ``abort`` with whatever could be salvaged; others are untouched."""
    case.hold()
    first, second = request(), request()
    calls = [asyncio.create_task(case.engine.generate(one)) for one in (first, second)]
    await case.held(2)
    await case.engine.cancel(first.request_id)
    result = await calls[0]
    _equal(result.finish_reason, "abort")
    _well_formed(result)
    await case.held(1)
    _equal(calls[1].done(), False)
    calls[1].cancel()
    await asyncio.wait(calls)


async def cancel_of_unknown_ids_is_harmless(case: EngineCase) -> None:
    """Cancelling nothing does nothing."""
    case.answer([STOP_ID])
    await case.engine.cancel("0" * 32)
    _equal((await case.engine.generate(request())).token_ids, [STOP_ID])


async def close_is_idempotent(case: EngineCase) -> None:
    """Closing twice is closing once."""
    await case.engine.close()
    await case.engine.close()


CHECKS: tuple[Callable[[EngineCase], Awaitable[None]], ...] = (
    returns_what_was_sampled,
    respects_max_tokens,
    serves_many_at_once,
    unreachable_is_told,
    health_of_a_well_engine,
    cancelled_await_reaches_the_server,
    cancel_by_id_ends_the_call,
    cancel_of_unknown_ids_is_harmless,
    close_is_idempotent,
)


def _well_formed(result: GenerationResult) -> None:
    _equal(len(result.logprobs), len(result.token_ids))
    _equal(len(result.versions), len(result.token_ids))
    if not all(math.isfinite(value) and value <= 0 for value in result.logprobs):
        raise AssertionError(f"log-probs must be finite and not positive: {result.logprobs}")


def _equal(found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"expected {wanted!r}, found {found!r}")
