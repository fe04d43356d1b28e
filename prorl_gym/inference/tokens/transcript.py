"""One rollout as segments of tokens, which are sent to the engine, and as messages.

Tokens that were sent to an engine are never rewritten, although a chat template may do so: Qwen's drop the thoughts of
earlier turns at a new user message. The option ``thinking`` chooses what happens then:

``keep``: nothing. History stays as it was sampled and the rollout is one segment: every sampled token can be trained
on, in one sequence. The prompt has old thoughts that it would not have in deployment.

``template``: at a new user turn the whole history is rendered again, as in deployment. Where that gives other tokens,
the segment so far is closed and a new one begins, whose prompt is what was rendered, with mask 0.

A conversation that starts over, from the first prompt and a summary, is a new segment in either case.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prorl_gym.inference.protocol import Conversation, GenerationResult
from prorl_gym.inference.tokens.chat_codec import ChatCodec, Tools
from prorl_gym.inference.tokens.token_stream import TokenStream, common_length
from prorl_gym.records import BranchCause, Message, Segment, ToolCall
from prorl_gym.settings import ResolvedSettings

ThinkingMode = Literal["keep", "template"]


@dataclass(frozen=True, slots=True)
class Extension:
    """New messages, encoded; nothing is appended yet."""

    messages: Sequence[Message]
    ids: list[int]
    prompt_length: int
    """Length of the prompt, once it is appended."""
    starts_segment: bool = False
    """``ids`` are a whole prompt of their own."""


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """The prompt of one call, in every form that an engine may need."""

    ids: Sequence[int]
    ids_json: bytes | None
    """See ``GenerationRequest.prompt_ids_json``."""
    conversation: Conversation


class Transcript:
    def __init__(self, codec: ChatCodec, settings: ResolvedSettings, thinking: ThinkingMode = "keep") -> None:
        self._codec = codec
        self._settings = settings
        self._thinking = thinking
        self._streams = [new_stream(self._codec, self._settings)]
        self._causes: list[BranchCause] = ["first"]
        """Why each stream began."""
        self._rewrites: list[set[str]] = [set()]
        """Names of the rewrites that each stream needed; see ``ChatCodec.rewrite``."""
        self._messages: list[Message] = []
        self._tools: Tools = ()
        self._last_turn: tuple[int, int, int] | None = None
        """Number of the last sampled turn and where its ids lie in the current segment."""

    def __len__(self) -> int:
        return len(self._streams[-1])

    @property
    def total_tokens(self) -> int:
        return sum(map(len, self._streams))

    def begin_conversation(self, prompt: Sequence[int], messages: Sequence[Message], tools: Tools) -> None:
        """Begin a conversation: the first, or one with a summary of what was before, in a segment of its own."""
        if len(self):
            self._begin_segment("summary")
        self._streams[-1].append_unsampled(prompt)
        self._rewrites[-1] |= self._codec.rewrite(messages, is_whole=True)[1]
        self._messages = list(messages)
        self._tools = tools

    def encode_extension(self, messages: Sequence[Message]) -> Extension:
        """Encode new messages. Nothing is appended. Raises ``EngineError`` (``TEMPLATE_UNSAFE``)."""
        stream = self._streams[-1]
        if self._needs_rerender(messages):
            whole = self._codec.encode_prompt([*self._messages, *messages], self._tools)
            if not stream.is_prefix_of(whole):
                return Extension(messages, whole, len(whole), starts_segment=True)
        delta = self._codec.encode_delta(messages, self._tools)
        return Extension(messages, delta, len(stream) + stream.added_length(delta))

    def rendered_for(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return what ``encode_extension`` has to render."""
        return [*self._messages, *messages] if self._needs_rerender(messages) else messages

    def append_extension(self, extension: Extension) -> None:
        if extension.starts_segment:
            self._begin_segment("template")
        self._streams[-1].append_unsampled(extension.ids)
        self._messages.extend(extension.messages)
        rendered = self._messages if extension.starts_segment else extension.messages
        self._rewrites[-1] |= self._codec.rewrite(rendered, is_whole=extension.starts_segment)[1]

    def next_prompt(self) -> TurnPrompt:
        """Return what to send now. The ids are live: see ``TokenStream.record_sent``."""
        stream = self._streams[-1]
        span = None if self._last_turn is None else self._last_turn[1:]
        return TurnPrompt(
            stream.record_sent(), stream.sent_ids_json, Conversation(tuple(self._messages), self._tools, span)
        )

    def digest(self) -> str:
        return self._streams[-1].digest()

    def append_sampled(self, result: GenerationResult, *, turn: int, seed: int | None) -> list[int]:
        """Append what an engine sampled; return the ids that were kept. See ``TokenStream.append_sampled``."""
        stream = self._streams[-1]
        start = len(stream)
        kept = stream.append_sampled(result, turn=turn, seed=seed)
        if self._last_turn is not None and self._last_turn[0] == turn:  # it continues after an abort
            start = self._last_turn[1]
        self._last_turn = (turn, start, len(stream))
        return kept

    def append_assistant(self, text: str, calls: tuple[ToolCall, ...]) -> None:
        self._messages.append(Message(role="assistant", content=text, tool_calls=calls))

    def export_segments(self) -> list[Segment]:
        """Return the segments so far. May be called at any time. Raises as ``TokenStream.export_segments``."""
        segments = [segment for stream in self._streams for segment in stream.export_segments()]
        for index, segment in enumerate(segments):
            segments[index] = segment = segment.model_copy(update={"rewrites": tuple(sorted(self._rewrites[index]))})
            if not index:
                continue
            before = segments[index - 1]
            origin: dict[str, Any] = {"parent": index - 1, "cause": self._causes[index]}
            shared = common_length(before.token_ids, segment.token_ids[: segment.prompt_length])
            segments[index] = segment.model_copy(update=origin | {"shared_tokens": shared})
        return segments

    def _needs_rerender(self, messages: Sequence[Message]) -> bool:
        return self._thinking == "template" and any(message.role == "user" for message in messages)

    def _begin_segment(self, cause: BranchCause) -> None:
        self._streams.append(new_stream(self._codec, self._settings))
        self._causes.append(cause)
        self._rewrites.append(set())
        self._last_turn = None


def new_stream(codec: ChatCodec, settings: ResolvedSettings) -> TokenStream:
    return TokenStream(
        terminator_id=codec.terminator_id,
        closing_ids=codec.closing_ids,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
    )
