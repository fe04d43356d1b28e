# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""Starts our servers in Gym; a start that fails prints two lines and no traceback."""

import gc
import logging
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeVar

from pydantic import ValidationError

from prorl_gym.errors import ProrlError

ServerT = TypeVar("ServerT")
ServiceT = TypeVar("ServiceT")


def run_server(start: Callable[[], ServerT]) -> ServerT:
    """Start and return a server; an error of ours before it listens is printed and ends the process."""
    try:
        return start()
    except ProrlError as error:
        print(error, file=sys.stderr, flush=True)
    except ValidationError as error:
        # pydantic wraps our own errors about the configuration
        causes = [each.get("ctx", {}).get("error") for each in error.errors()]
        ours = [cause for cause in causes if isinstance(cause, ProrlError)]
        if not ours:
            raise
        print(ours[0], file=sys.stderr, flush=True)
    sys.exit(2)


@asynccontextmanager
async def running_service(service: AbstractAsyncContextManager[ServiceT]) -> AsyncGenerator[ServiceT]:
    """Run a service while a server runs; an error of ours while it starts is printed in two lines.

    The error propagates, since uvicorn gives up because of it; the traceback that uvicorn would log is suppressed.
    """
    async with AsyncExitStack() as stack:
        try:
            running = await stack.enter_async_context(service)
        except ProrlError as error:
            print(error, file=sys.stderr, flush=True)
            logging.getLogger("uvicorn.error").addFilter(
                lambda record: not record.exc_info and "Traceback (most recent call last)" not in record.getMessage()
            )
            raise
        yield running


def freeze_imports() -> None:
    """Enable garbage collection, which servers disable while they import, and leave what was imported out of it.

    That is a quarter of a million objects that stay. Collecting while they are made takes a sixth of the imports' time,
    and each full collection over them would delay all rows by 0.2 s.
    """
    gc.freeze()
    gc.enable()
