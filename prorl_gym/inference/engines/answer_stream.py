"""An answer that an engine streams: its events, joined to the answer that a call gets which is not streamed.

So every check of an answer holds for both. What is reported as sampled while the stream runs is checked before: ids of
the vocabulary, each with its log-prob, no more of them than were requested.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.engines.prompt_json import strip_prompt_echo
from prorl_gym.inference.engines.response_validator import ResponseValidator, get_nested, printable
from prorl_gym.inference.protocol import GenerationRequest

END_OF_STREAM = b"[DONE]"


class AnswerStream(ABC):
    """Joins the events of one answer, and reports new ids to ``GenerationRequest.on_tokens``.

    Args:
        validator: of the engine.
        request: the call.
    """

    def __init__(self, validator: ResponseValidator, request: GenerationRequest) -> None:
        self.is_prompt_checked = False
        """An echo of the prompt came, and is what was sent."""
        self._validator = validator
        self._request = request
        self._ids: list[int] = []
        self._is_cut_short = False

    @property
    def has_tokens(self) -> bool:
        """Whether tokens were reported."""
        return bool(self._ids)

    def add_events(self, payloads: Sequence[bytes]) -> None:
        """Add the data of events, and report the ids that are new in them.

        Raises:
            EngineError: ``ENGINE_CONTRACT``, or ``ENGINE_UNREACHABLE`` where the engine reports an error.
        """
        known = len(self._ids)
        try:
            for payload in payloads:
                if payload != END_OF_STREAM:
                    self._add_event(payload)
        finally:
            if len(self._ids) > known and self._request.on_tokens is not None:
                self._request.on_tokens(self._ids[known:])

    def cut_short(self) -> None:
        """End the answer with what came, as an abort."""
        self._is_cut_short = True

    @abstractmethod
    def joined(self) -> Mapping[str, object]:
        """Return the whole answer, as it would have come without streaming; an abort where the stream broke off."""

    @abstractmethod
    def _join(self, event: Mapping[str, object]) -> Sequence[object]:
        """Add an event; return the ids that are new in it, each with a log-prob that was checked."""

    def _add_event(self, payload: bytes) -> None:
        if not self.is_prompt_checked:
            payload, self.is_prompt_checked = strip_prompt_echo(payload, self._request)
        event = self._validator.parse_object(payload)
        if event.get("error") is not None:
            raise self._broken_error(event)
        ids = self._validator.check_ids(self._join(event), "an event's token ids")
        if len(self._ids) + len(ids) > self._request.max_tokens:
            raise self._validator.contract_error(f"sampled more than the {self._request.max_tokens} requested tokens")
        self._ids += ids

    def _broken_error(self, event: Mapping[str, object]) -> EngineError:
        message = get_nested(event, "error", "message")
        told = f" ({printable(message[:200])})" if isinstance(message, str) else ""
        return EngineError(
            FailureKind.ENGINE_UNREACHABLE,
            f"engine {self._validator.address}: broke in the middle of an answer{told}.",
            "Look into the engine's log.",
        )
