"""How our servers start in Gym, and how they say why they cannot: in two lines, without a traceback."""

import logging
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from pydantic import ValidationError

from prorl_gym.errors import ProrlError

Made = TypeVar("Made")


def run(start: Callable[[], Made]) -> Made:
    """Start a server; an error of ours before it listens ends the process with its two lines."""
    try:
        return start()
    except ProrlError as error:
        _say(error)
    except ValidationError as error:
        ours = [found for one in error.errors() if isinstance(found := one.get("ctx", {}).get("error"), ProrlError)]
        if not ours:
            raise
        _say(ours[0])  # pydantic wraps what a server raises while it reads its configuration
    sys.exit(2)


@asynccontextmanager
async def told(service: AbstractAsyncContextManager[Any]) -> AsyncGenerator[None]:
    """Hold what a server stands on; an error of ours while that starts is shown as its two lines.

    The error goes on, since it is what makes uvicorn give up; the traceback that uvicorn would log is held back.
    """
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(service)
        except ProrlError as error:
            _say(error)
            logging.getLogger("uvicorn.error").addFilter(_without_traceback)
            raise
        yield


def _say(error: ProrlError) -> None:
    print(error, file=sys.stderr, flush=True)


def _without_traceback(record: logging.LogRecord) -> bool:
    return not record.exc_info and "Traceback (most recent call last)" not in record.getMessage()
