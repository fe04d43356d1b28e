"""Tests on a clock that jumps: no machine is too slow for them, and none waits."""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

from simulation.virtual_clock import run_virtually

ParamsT = ParamSpec("ParamsT")


def virtually(test: Callable[ParamsT, Coroutine[Any, Any, None]]) -> Callable[ParamsT, None]:
    """Run a test on a virtual loop of its own. It may use no threads and no sockets."""

    @wraps(test)
    def run(*arguments: ParamsT.args, **named: ParamsT.kwargs) -> None:
        run_virtually(test(*arguments, **named))

    return run
