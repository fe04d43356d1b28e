"""Rules that every engine adapter obeys, as checks that any test suite can run against its own adapter.

A suite writes one ``EngineCase`` for its adapter, and runs each check of ``CHECKS`` and each ``Fault`` on a fresh one::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_conformance(check):
        async with MyCase() as case:
            await check(case)

    @pytest.mark.parametrize("fault", Fault)
    async def test_faults(fault):
        async with MyCase() as case:
            await check_fault(case, fault)
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol
from uuid import uuid4

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.engine_pool import PoolEngine
from prorl_gym.inference.protocol import (
    ContextExceeded,
    Conversation,
    EngineOverloaded,
    GenerationRequest,
    GenerationResult,
)
from prorl_gym.records import Message

STOP_ID = 2
"""The id that ends a turn in these checks."""


PROMPT = (5, 6, 7)
"""The prompt of these checks; its conversation is ``user: q``, and a server that renders must render it to this."""


class Fault(StrEnum):
    """Fault of a server in every call after it is set."""

    OVERLOADED = "429, Retry-After 7"
    PAUSED = "503, Retry-After 7"
    BROKEN = "500"
    REFUSING = "400"
    REDIRECTING = "302 to elsewhere"
    TOO_LONG = "400: the context is 64 tokens"
    DROPPING = "closes the connection without an answer"
    TRUNCATED = "closes the connection in the middle of the answer"
    ENDLESS = "never stops sending"
    NOT_JSON = "an HTML page"
    NAN = "NaN among the numbers"
    FOREIGN_ID = "the id 100, outside of the vocabulary"
    NO_LOGPROBS = "no log-probs"
    WRONG_LENGTHS = "one log-prob fewer than ids"
    WRONG_PROMPT = "echoes the prompt as 5, 9, 7"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of the server. The adapter must refuse or leave out the others, and is checked for that instead."""

    returns_tokens: bool = True
    """It returns ids and log-probs; otherwise it answers in text, and results have ``text_turn``."""
    salvages_aborted: bool = True
    """A call that is stopped by id returns what was sampled."""
    has_probe: bool = True
    has_cache_reset: bool = True
    has_metrics: bool = True


class EngineCase(Protocol):
    """An adapter together with a controllable server behind it."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def engine(self) -> PoolEngine:
        """The adapter under test; its vocabulary must hold the ids 0..99."""
        ...

    def set_reply(self, ids: list[int]) -> None:
        """Let the server do right and sample these ids in every call, cut to ``max_tokens``."""
        ...

    def hold_calls(self) -> None:
        """Let the server keep every call unanswered until it is stopped."""
        ...

    def shut_down_server(self) -> None: ...

    def inject_fault(self, fault: Fault) -> None: ...

    def shorten_timeouts(self) -> None:
        """Let calls of the engine take no longer than a fraction of a second."""
        ...

    def block_cache_reset(self) -> None:
        """Let the server hold blocks of its prefix cache, so that it cannot be dropped."""
        ...

    async def wait_for_held_calls(self, count: int) -> None:
        """Return when the server is holding exactly ``count`` calls; raises ``TimeoutError`` when it never does."""
        ...


def request(**changes: object) -> GenerationRequest:
    base = GenerationRequest(
        request_id=uuid4().hex,
        session_id="session",
        prompt_ids=list(PROMPT),
        max_tokens=8,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        stop_token_ids=(STOP_ID,),
        conversation=Conversation((Message(role="user", content="q"),), ()),
    )
    return replace(base, **changes)  # pyright: ignore[reportArgumentType]  # the names are the fields' own


async def returns_what_was_sampled(case: EngineCase) -> None:
    """Ids come back verbatim, the stop id included, with as many finite log-probs and versions."""
    case.set_reply([10, 11, STOP_ID])
    case.engine.version = 7
    result = await case.engine.generate(request())
    _equal(result.token_ids, [10, 11, STOP_ID])
    _equal(result.finish_reason, "stop")
    _equal(result.versions, [7, 7, 7])
    _equal(result.engine, case.engine.name)
    _well_formed(result)


async def respects_max_tokens(case: EngineCase) -> None:
    """A call never gets more than ``max_tokens``, and then ends with ``length``."""
    case.set_reply([10, 11, 12, 13])
    result = await case.engine.generate(request(max_tokens=2))
    _equal((result.token_ids, result.finish_reason), ([10, 11], "length"))
    _well_formed(result)


async def serves_many_at_once(case: EngineCase) -> None:
    case.set_reply([10, STOP_ID])
    results = await asyncio.gather(*(case.engine.generate(request(session_id=f"s{n}")) for n in range(16)))
    for result in results:
        _equal(result.token_ids, [10, STOP_ID])


async def unreachable_is_told(case: EngineCase) -> None:
    """A server that is gone gives ``ENGINE_UNREACHABLE``, and ``health``, ok before, is not ok and does not raise."""
    case.set_reply([STOP_ID])
    _equal((await case.engine.health()).ok, True)
    case.shut_down_server()
    _equal((await expect_engine_error(case.engine.generate(request()))).kind, FailureKind.ENGINE_UNREACHABLE)
    _equal((await case.engine.health()).ok, False)


async def cancelled_await_reaches_the_server(case: EngineCase) -> None:
    """Cancelling ``generate`` makes the server stop working, and the engine stays usable."""
    case.hold_calls()
    call = asyncio.create_task(case.engine.generate(request()))
    await case.wait_for_held_calls(1)
    call.cancel()
    await asyncio.wait({call})
    _equal(call.cancelled(), True)
    await case.wait_for_held_calls(0)
    case.set_reply([STOP_ID])
    _equal((await case.engine.generate(request())).token_ids, [STOP_ID])


async def cancel_by_id_ends_the_call(case: EngineCase) -> None:
    """``cancel`` makes ``generate`` return ``abort`` with whatever could be salvaged; others are untouched."""
    case.hold_calls()
    first, second = request(), request()
    calls = [asyncio.create_task(case.engine.generate(one)) for one in (first, second)]
    await case.wait_for_held_calls(2)
    await case.engine.cancel(first.request_id)
    result = await calls[0]
    _equal(result.finish_reason, "abort")
    _equal(bool(result.token_ids), case.capabilities.salvages_aborted)
    _well_formed(result)
    await case.wait_for_held_calls(1)
    _equal(calls[1].done(), False)
    calls[1].cancel()
    await asyncio.wait(calls)


async def cancel_of_unknown_ids_is_harmless(case: EngineCase) -> None:
    case.set_reply([STOP_ID])
    await case.engine.cancel("0" * 32)
    _equal((await case.engine.generate(request())).token_ids, [STOP_ID])


async def a_slow_call_times_out(case: EngineCase) -> None:
    """A call that takes too long gives ``ENGINE_TIMEOUT``, and the server is made to stop."""
    case.shorten_timeouts()
    case.hold_calls()
    error = await expect_engine_error(case.engine.generate(request()))
    _equal(error.kind, FailureKind.ENGINE_TIMEOUT)
    await case.wait_for_held_calls(0)


async def text_is_told_apart_from_tokens(case: EngineCase) -> None:
    """``text_turn`` is set exactly where the ids are a local encoding of text, and then nothing has a log-prob."""
    case.set_reply([10, STOP_ID])
    result = await case.engine.generate(request())
    _equal(result.text_turn is None, case.capabilities.returns_tokens)
    if not case.capabilities.returns_tokens:
        _equal(result.logprobs, [0.0] * len(result.token_ids))


async def a_probe_is_a_fingerprint(case: EngineCase) -> None:
    """A log-prob for each id but the first, the same when repeated; refused where the server has none."""
    case.set_reply([STOP_ID])
    if not case.capabilities.has_probe:
        _equal((await expect_engine_error(case.engine.probe_logprobs(PROMPT))).kind, FailureKind.ENGINE_REFUSED)
        return
    logprobs = await case.engine.probe_logprobs(PROMPT)
    _equal(len(logprobs), len(PROMPT) - 1)
    _equal(all(math.isfinite(value) and value <= 0 for value in logprobs), True)
    _equal(await case.engine.probe_logprobs(PROMPT), logprobs)


async def a_reset_is_confirmed(case: EngineCase) -> None:
    """True when the cache was dropped, False when the server could not; refused where it has no such route."""
    if not case.capabilities.has_cache_reset:
        _equal((await expect_engine_error(case.engine.reset_prefix_cache())).kind, FailureKind.ENGINE_REFUSED)
        return
    _equal(await case.engine.reset_prefix_cache(), True)
    case.block_cache_reset()
    _equal(await case.engine.reset_prefix_cache(), False)


async def load_is_read_or_absent(case: EngineCase) -> None:
    """Figures where there is a metrics page, ``None`` where there is none or the server is gone."""
    load = await case.engine.read_load()
    _equal(load is not None, case.capabilities.has_metrics)
    if load is not None:
        _equal(0 <= load.kv_usage <= 1 and load.running >= 0 and load.waiting >= 0, True)


async def close_is_idempotent(case: EngineCase) -> None:
    await case.engine.close()
    await case.engine.close()


CHECKS: tuple[Callable[[EngineCase], Awaitable[None]], ...] = (
    returns_what_was_sampled,
    respects_max_tokens,
    serves_many_at_once,
    unreachable_is_told,
    cancelled_await_reaches_the_server,
    cancel_by_id_ends_the_call,
    cancel_of_unknown_ids_is_harmless,
    a_slow_call_times_out,
    text_is_told_apart_from_tokens,
    a_probe_is_a_fingerprint,
    a_reset_is_confirmed,
    load_is_read_or_absent,
    close_is_idempotent,
)


_FAULT_KINDS = {
    Fault.OVERLOADED: FailureKind.ENGINE_OVERLOADED,
    Fault.PAUSED: FailureKind.ENGINE_OVERLOADED,
    Fault.BROKEN: FailureKind.ENGINE_UNREACHABLE,
    Fault.REFUSING: FailureKind.ENGINE_REFUSED,
    Fault.REDIRECTING: FailureKind.ENGINE_REFUSED,
    Fault.DROPPING: FailureKind.ENGINE_UNREACHABLE,
    Fault.TRUNCATED: FailureKind.ENGINE_UNREACHABLE,
}
"""Every other one breaks the engine's contract."""

_TOKEN_FAULTS = (Fault.FOREIGN_ID, Fault.NO_LOGPROBS, Fault.WRONG_LENGTHS, Fault.WRONG_PROMPT)


async def check_fault(case: EngineCase, fault: Fault) -> None:
    """A fault has its kind, in at most two lines, and the engine is usable once it is over."""
    case.set_reply([10, STOP_ID])
    case.inject_fault(fault)
    if fault is Fault.TOO_LONG:
        try:
            await case.engine.generate(request())
        except ContextExceeded as limit:
            _equal(limit.max_model_len, 64)
        else:
            raise AssertionError("no error for a prompt that does not fit")
    elif fault in _TOKEN_FAULTS and not case.capabilities.returns_tokens:
        _equal((await case.engine.generate(request())).text_turn is None, False)  # there is nothing to be wrong about
    else:
        error = await expect_engine_error(case.engine.generate(request(prompt_ids_json=b"5,6,7")))
        _equal(error.kind, _FAULT_KINDS.get(fault, FailureKind.ENGINE_CONTRACT))
        _equal(len(str(error).splitlines()) <= 2, True)
        if isinstance(error, EngineOverloaded):
            _equal(error.retry_after, 7.0)
    case.set_reply([11, STOP_ID])
    _equal((await case.engine.generate(request())).token_ids, [11, STOP_ID])


async def expect_engine_error(awaitable: Awaitable[object]) -> EngineError:
    try:
        result = await awaitable
    except EngineError as error:
        return error
    raise AssertionError(f"no error, but {result!r}")


def _well_formed(result: GenerationResult) -> None:
    _equal(len(result.logprobs), len(result.token_ids))
    _equal(len(result.versions), len(result.token_ids))
    if not all(math.isfinite(value) and value <= 0 for value in result.logprobs):
        raise AssertionError(f"log-probs must be finite and not positive: {result.logprobs}")


def _equal(found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"expected {wanted!r}, found {found!r}")
