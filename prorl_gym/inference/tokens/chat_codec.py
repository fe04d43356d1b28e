"""Messages to token ids, in a way that never rewrites what the engine has seen.

The first prompt is rendered whole, once. After that only *deltas* are made: the ids that follow the end of an
assistant turn when new messages are added. A delta is what the template writes after the terminator of a placeholder
assistant turn; it begins at a control token, so encoding it alone equals encoding it in place. History is never
rendered again, because decoding and encoding sampled ids does not give them back.

Nothing is cached: rendering a delta through Jinja takes about 0.05 ms, and a cached skeleton would have to prove that
the template copies contents verbatim.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.protocol import Conversation
from prorl_gym.inference.tokens.history_equality import read_arguments
from prorl_gym.inference.tokens.template_rewrites import TEMPLATE_REWRITES, TemplateRewrite, rewrite
from prorl_gym.inference.tokens.token_stream import common_length
from prorl_gym.inference.tokens.tokenizer import ControlTokenEscaper, Tokenizer
from prorl_gym.inference.toolcalls.formats import ToolFormat, known_parsers
from prorl_gym.inference.toolcalls.turn_parsing import ToolParser, Tools, parse_turn
from prorl_gym.records import Message
from prorl_gym.thoughts import THINK_CLOSE, THINK_OPEN, thinking_end

log = logging.getLogger(__name__)

_TOOL_CALL_END = "<|eom_id|>"
"""Ends a turn of Llama 3 that calls a tool, in place of ``<|eot_id|>``."""

_OTHER_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", _TOOL_CALL_END)
"""Control tokens that a model may end with although its template does not: kept, then closed by the template's."""

_LONG_TEXT = 50_000
"""Characters beyond which text is not encoded on the event loop (tens of milliseconds)."""

_MESSAGE_CHARACTERS = 200
"""Characters that take as long to encode as a message does to render."""

_PLACEHOLDER = "stand-in-for-the-assistant"
"""Text of the assistant turn that deltas are cut from."""

_APPENDING_FIX = "Set 'chat_template' to one whose turns are only ever appended, each closed by one control token."

_QUESTION: Mapping[str, Any] = {"role": "user", "content": "q"}

SAMPLE_NAME = "look_up"

_SAMPLE_ARGUMENTS: Mapping[str, Any] = {
    "words": 'the "first" <b>line</b>\nand é',
    "count": 3,
    "exact": True,
    "kinds": ["a", "b"],
}

SAMPLE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": SAMPLE_NAME,
        "description": "Look words up.",
        "parameters": {
            "type": "object",
            "properties": {
                "words": {"type": "string", "description": "What to look for."},
                "count": {"type": "integer", "description": "How many."},
                "exact": {"type": "boolean", "description": "As they stand."},
                "kinds": {"type": "array", "items": {"type": "string"}, "description": "Of what kind."},
            },
            "required": ["words"],
        },
    },
}
"""The call that a parser has to read back: text with a newline, quotes and tags, and three other types."""

Encoded = TypeVar("Encoded")


async def encode_off_loop(messages: Sequence[Message], encode: Callable[[], Encoded]) -> Encoded:
    """Encode short conversations at once and long ones in a thread: a megabyte takes a second."""
    characters = sum(len(message.content) + _MESSAGE_CHARACTERS for message in messages)
    return encode() if characters < _LONG_TEXT else await asyncio.to_thread(encode)


class ChatCodec:
    """Encodes conversations for one tokenizer and chat template.

    ``template_options`` are passed to the template by name, for example ``{"enable_thinking": False}``. Raises
    ``EngineError`` (``TEMPLATE_UNSAFE``) when assistant turns do not end in one fixed control token.
    """

    def __init__(
        self, tokenizer: Tokenizer, template_options: Mapping[str, Any] | None = None, tool_format: ToolFormat = "auto"
    ) -> None:
        self.tokenizer = tokenizer
        self.template_options = dict(template_options or {})
        self.tool_format: ToolFormat = tool_format
        turns = [_QUESTION, _placeholder_turn(calls_a_tool=False)]
        rendered = self.render_plain(turns, (), add_generation_prompt=False)
        found = tokenizer.control_pattern.match(rendered, rendered.find(_PLACEHOLDER) + len(_PLACEHOLDER))
        if _PLACEHOLDER not in rendered or found is None:
            raise self.template_error("an assistant turn does not end in a control token")
        self.terminator = found.group()
        self.terminator_id = tokenizer.control_ids[self.terminator]
        call_end = tokenizer.control_ids.get(_TOOL_CALL_END)
        self.closing_ids = frozenset({self.terminator_id})
        """Ids after which a turn is closed and a delta can follow."""
        if call_end is not None and _TOOL_CALL_END in tokenizer.chat_template:
            self.closing_ids |= {call_end}
        others = (tokenizer.control_ids[end] for end in _OTHER_END_TOKENS if end in tokenizer.control_ids)
        self.end_ids = self.closing_ids | tokenizer.eos_ids | frozenset(others)
        """Ids that end a turn; sent to engines as stop ids, and no part of the text."""

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def encode_prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Render and encode a conversation, ending where the assistant is to speak. Raises as ``render_plain``."""
        escaper = ControlTokenEscaper(self.tokenizer)
        return escaper.encode(self.render(escaper, messages, tools, add_generation_prompt=True))

    def encode_delta(self, new_messages: Sequence[Message], tools: Tools) -> list[int]:
        """Encode what new messages add after the terminator of an assistant turn, up to where it speaks next.

        The new messages are tool results and user turns, and after them also turns of the assistant that are only
        context; none: the assistant is to speak once more. All tool results of one step belong into one call:
        templates merge them into one turn. Raises ``EngineError`` (``TEMPLATE_UNSAFE``) when the delta cannot be found
        in what the template renders.
        """
        escaper = ControlTokenEscaper(self.tokenizer)
        return escaper.encode(self.render_delta(escaper, new_messages, tools))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids verbatim, control tokens shown."""
        return self.tokenizer.decode(ids)

    def decode_turn(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Decode one sampled turn without what ended it, with the tag of its thoughts if ``prompt`` opened them."""
        count = len(ids)
        while count and ids[count - 1] in self.end_ids:
            count -= 1
        end = self.decode(prompt[-16:])  # tokens enough for the tag spelled out, and the blanks after it
        opened = f"{THINK_OPEN}\n" if end.rstrip().endswith(THINK_OPEN) else ""
        return opened + self.tokenizer.decode(ids[:count])

    @cached_property
    def generation_prompt(self) -> str:
        """Text that the template writes after a user turn, up to where the assistant speaks."""
        turn = self.render_plain([_QUESTION], (), add_generation_prompt=False)
        return _strip_common_prefix(self.render_plain([_QUESTION], (), add_generation_prompt=True), turn)

    @property
    def turn_opening(self) -> str:
        """``generation_prompt`` without a tag of thoughts that it ends in, which is part of the turn."""
        opening, _, blanks = self.generation_prompt.rpartition(THINK_OPEN)
        return opening if opening and not blanks.strip() else self.generation_prompt

    @cached_property
    def rewrites(self) -> tuple[TemplateRewrite, ...]:
        """The rewrites that this template needs: it refuses an example of theirs, or leaves a part of it out."""
        return tuple(rule for rule in TEMPLATE_REWRITES if not all(map(self._takes, rule.examples)))

    def rewrite(self, messages: Sequence[Message], *, is_whole: bool) -> tuple[Sequence[Message], frozenset[str]]:
        """Return the messages in a form that the template takes, and the names of the rewrites that it needed.

        ``is_whole``: they are a conversation from its first message on; otherwise they follow a turn of the assistant.
        """
        return rewrite(self.rewrites, messages, is_whole=is_whole)

    def rewrite_conversation(self, conversation: Conversation) -> Conversation:
        """Return a conversation for engines that render it themselves."""
        return replace(conversation, messages=self.rewrite(conversation.messages, is_whole=True)[0])

    @cached_property
    def parser(self) -> ToolParser:
        """Reads the tool calls of this template's model. Raises as ``choose_parser``."""
        return choose_parser(self, self.tool_format)

    def render_delta(self, escaper: ControlTokenEscaper, new_messages: Sequence[Message], tools: Tools) -> str:
        """Return the text of a delta, with control strings of the messages still escaped."""
        written, _ = self.rewrite(new_messages, is_whole=False)
        return self._render_delta([_as_template_message(message, escaper) for message in written], tools)

    def _render_delta(self, after: Sequence[Mapping[str, Any]], tools: Tools) -> str:
        before = [_QUESTION, _placeholder_turn(calls_a_tool=bool(after) and after[0]["role"] == "tool")]
        rendered = self.render_plain([*before, *after], tools, add_generation_prompt=True)
        start = rendered.find(_PLACEHOLDER)
        if start < 0:  # some templates drop the text of a turn with a tool call: the turn alone must be a prefix
            base = self.render_plain(before, tools, add_generation_prompt=False).rstrip()
            if not (base.endswith(self.terminator) and rendered.startswith(base)):
                raise self.template_error("adding a message changes how earlier turns are rendered")
            return rendered[len(base) :]
        end = rendered.find(self.terminator, start)
        if end < 0:
            raise self.template_error("an assistant turn that is followed by others has no terminator")
        return rendered[end + len(self.terminator) :]

    def render(
        self, escaper: ControlTokenEscaper, messages: Sequence[Message], tools: Tools, *, add_generation_prompt: bool
    ) -> str:
        """Render messages and schemas, their control strings escaped by ``escaper``."""
        written, _ = self.rewrite(messages, is_whole=True)
        escaped = [_as_template_message(message, escaper) for message in written]
        shown = [escaper.escape_all(tool) for tool in tools]
        return self.render_plain(escaped, shown, add_generation_prompt=add_generation_prompt)

    def render_plain(self, messages: Sequence[Mapping[str, Any]], tools: Tools, *, add_generation_prompt: bool) -> str:
        """Render messages in the template's form, all escaped. Raises ``EngineError`` (``TEMPLATE_UNSAFE``)."""
        try:
            return self.tokenizer.render(
                messages, tools, self.template_options, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # templates are programs and raise anything
            roles = ", ".join(str(message["role"]) for message in messages)
            raise self.template_error(
                f"it fails on the roles {roles} ({type(error).__name__}: {error})"[:400]
            ) from error

    def _takes(self, example: Sequence[Message]) -> bool:
        """Whether the template writes all of an example, and its end as after any other turn."""
        escaper = ControlTokenEscaper(self.tokenizer)
        shown = [_as_template_message(message, escaper) for message in example]
        turn = next((at for at in reversed(range(len(shown))) if shown[at]["role"] == "assistant"), len(shown) - 2)
        for tools in ((), (SAMPLE_TOOL,)):
            try:
                whole = self.render_plain(shown, tools, add_generation_prompt=True)
                end = self._render_delta(shown[turn + 1 :], tools)
            except EngineError:
                return False
            if not whole.endswith(end.lstrip()) or any(message.content not in whole for message in example):
                return False
        return True

    def template_error(self, reason: str, fix: str = _APPENDING_FIX) -> EngineError:
        return EngineError(FailureKind.TEMPLATE_UNSAFE, f"chat template of {self.tokenizer.source}: {reason}.", fix)


def choose_parser(codec: ChatCodec, tool_format: ToolFormat) -> ToolParser:
    """Return the parser that a configuration names, or, for ``auto``, the first that reads back a rendered call.

    No template is recognized by its name: a sample call is rendered as an assistant turn, and a parser fits when it
    finds the same tool with the same arguments in that turn. Raises ``EngineError`` (``TEMPLATE_UNSAFE``): none does,
    or ``declared`` is named and the tokenizer declares nothing.
    """
    declared = partial(codec.tokenizer.parse_response, codec.turn_opening)
    known = known_parsers(declared if codec.tokenizer.has_response_template else None)
    turn = _render_sample_call(codec)
    forms = f"({', '.join(known_parsers())})"
    fix = f"Set 'tool_format' to the form that the model was trained on {forms}, or 'chat_template'."
    if tool_format == "auto":
        found = (parser for parser in known.values() if turn is not None and _reads_back(parser, turn))
        parser = next(found, None)
        if parser is None:
            raise codec.template_error("no known form of tool calls reads back the one that it writes", fix)
        return parser
    if tool_format not in known:
        raise codec.template_error("its tokenizer declares no response_template", fix)
    parser = known[tool_format]
    if turn is not None and not _reads_back(parser, turn):
        log.warning(
            "tool_format: %s does not read back the calls that the chat template of %s writes.\n"
            "Leave it out ('auto'), unless the model was trained on that form.",
            *(parser.name, codec.tokenizer.source),
        )
    return parser


def _render_sample_call(codec: ChatCodec) -> str | None:
    """Return what a model would have to sample for the sample call; ``None`` when the template refuses calls."""
    call = _template_tool_call("call00000", SAMPLE_NAME, dict(_SAMPLE_ARGUMENTS))
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        before = codec.render_plain([_QUESTION], [SAMPLE_TOOL], add_generation_prompt=False)
        whole = codec.render_plain([_QUESTION, turn], [SAMPLE_TOOL], add_generation_prompt=False)
    except EngineError:
        return None
    written = _strip_common_prefix(_strip_common_prefix(whole, before), codec.turn_opening).rstrip()
    ends = (end for end, token in codec.tokenizer.control_ids.items() if token in codec.end_ids)
    return next((written.removesuffix(end) for end in ends if written.endswith(end)), written)


def _reads_back(parser: ToolParser, turn: str) -> bool:
    said = parse_turn(parser, turn, [SAMPLE_TOOL])
    if said.parse_errors or len(said.calls) != 1:
        return False
    return said.calls[0].name == SAMPLE_NAME and json.loads(said.calls[0].arguments) == _SAMPLE_ARGUMENTS


def _as_template_message(message: Message, escaper: ControlTokenEscaper) -> dict[str, Any]:
    """Return a message in the form that templates read, its control strings escaped."""
    end = thinking_end(message.content) if message.role == "assistant" else 0
    # Templates look for the tags around its thoughts; others that it wrote are text.
    blanks, opening, thoughts = message.content[:end].partition(THINK_OPEN)
    inner = thoughts.removesuffix(THINK_CLOSE)
    content = f"{blanks}{opening}{escaper.escape(inner)}{thoughts[len(inner) :]}{escaper.escape(message.content[end:])}"
    shown: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        # Arguments as values: templates print them as JSON, and would quote a text once more.
        values = (escaper.escape_all(read_arguments(call.arguments)[1]) for call in message.tool_calls)
        calls = zip(message.tool_calls, values, strict=True)
        shown["tool_calls"] = [_template_tool_call(call.id, escaper.escape(call.name), value) for call, value in calls]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = escaper.escape(message.tool_call_id)
    if message.name is not None:
        shown["name"] = escaper.escape(message.name)
    return shown


def _placeholder_turn(*, calls_a_tool: bool) -> dict[str, Any]:
    """Return the assistant turn that deltas are cut from; templates look for a call before a tool result."""
    message: dict[str, Any] = {"role": "assistant", "content": _PLACEHOLDER}
    if calls_a_tool:
        message["tool_calls"] = [_template_tool_call("call00000", "tool", {})]
    return message


def _template_tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _strip_common_prefix(text: str, start: str) -> str:
    """Return what follows in ``text`` after the longest beginning that it shares with ``start``."""
    return text[common_length(text, start) :]
