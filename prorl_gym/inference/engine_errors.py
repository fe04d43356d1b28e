"""Failures of engines that callers distinguish beyond their kind."""

from prorl_gym.errors import EngineError, FailureKind, Limit, LimitReached


class ContextExceeded(LimitReached):
    """Prompt and answer do not fit into the engine's context.

    Args:
        max_model_len: the engine's context in tokens, when its message names it.
    """

    def __init__(self, max_model_len: int | None) -> None:
        super().__init__(Limit.TOKENS)
        self.max_model_len = max_model_len


class ModelMissing(EngineError):
    """The server has no model of the requested name.

    Args:
        address: of the engine.
        message: the server's own words.
    """

    def __init__(self, address: str, message: str) -> None:
        super().__init__(
            FailureKind.ENGINE_REFUSED,
            f"engine {address}: does not serve the model ({message}).",
            "Load the model there, or set 'inference.model' to the name it has there (its --served-model-name).",
        )


class CallTimedOut(EngineError):
    """The engine did not answer within the time that a call may take.

    Args:
        address: of the engine.
        seconds: that the call had.
    """

    def __init__(self, address: str, seconds: float) -> None:
        super().__init__(
            FailureKind.ENGINE_TIMEOUT,
            f"engine {address}: no answer within {seconds:g} s.",
            "Raise 'request_seconds', or lower 'max_turn_tokens' or the load.",
        )
        self.in_progress = False
        """Set by a pool: the engine samples, but at its pace the call takes longer. Another one would not be faster."""


class EngineOverloaded(EngineError):
    """The engine answered 429 or 503, or holds calls back because it is paused.

    Args:
        address: of the engine.
        status: the HTTP status; ``None``: there is none, the engine reports that it is paused.
        retry_after: seconds of its ``Retry-After`` header.
    """

    def __init__(self, address: str, status: int | None, retry_after: float | None) -> None:
        what = "is paused and answers nothing" if status is None else f"overloaded or paused (HTTP {status})"
        fix = "Add engines, or lower the number of rollouts in RUN."
        super().__init__(
            FailureKind.ENGINE_OVERLOADED,
            f"engine {address}: {what}.",
            "Resume it, or take it out of the pool while it is paused." if status is None else fix,
        )
        self.retry_after = retry_after
