"""Messages to token ids, in a way that never rewrites what the engine has seen.

The first prompt is rendered whole, once. After that only *deltas* are made: the ids that follow the end of an
assistant turn when new messages are added. A delta is what the template writes after the terminator of a stand-in
assistant turn; it begins at a control token, so encoding it alone equals encoding it in place. History is never
rendered again, because decoding and encoding sampled ids does not give them back.

Nothing is cached: rendering a delta through Jinja takes about 0.05 ms, and a cached skeleton would have to prove that
the template copies contents verbatim.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.tokenizer import Tokenizer, load_tokenizer
from prorl_gym.inference.untrusted import Veil
from prorl_gym.records import Message

Tools = Sequence[Mapping[str, Any]]
"""Function schemas, as ``ToolSpec.as_function`` gives them. They come from environments and are trusted."""

_STAND_IN = "stand-in-for-the-assistant"


class Codec:
    """Encodes conversations for one tokenizer and chat template.

    Args:
        tokenizer: vocabulary and template.
        template_options: passed to the template by name, for example ``{"enable_thinking": False}``.

    Raises:
        EngineError: ``TEMPLATE_UNSAFE``, when assistant turns do not end in one fixed control token.
    """

    def __init__(self, tokenizer: Tokenizer, template_options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.template_options = dict(template_options or {})
        self.terminator = self._find_terminator()
        self.terminator_id = tokenizer.control_ids[self.terminator]

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self.tokenizer.vocab_size

    def first_prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Render and encode the whole conversation, ending where the assistant is to speak.

        Raises:
            EngineError: ``TEMPLATE_UNSAFE``, when the template refuses these messages.
        """
        veil = Veil(self.tokenizer)
        return veil.encode(self.render(veil, messages, tools, add_generation_prompt=True))

    def delta(self, new_messages: Sequence[Message], tools: Tools) -> list[int]:
        """Encode what new messages add after the terminator of an assistant turn, up to where it speaks next.

        All tool results of one step belong into one call: templates merge them into one turn.

        Args:
            new_messages: tool results or user turns; never the assistant's own.
            tools: the same as in the first prompt.

        Raises:
            EngineError: ``TEMPLATE_UNSAFE``, when the delta cannot be found in what the template renders.
        """
        if not new_messages or any(message.role == "assistant" for message in new_messages):
            raise ValueError("a delta is made of one or more messages that the assistant did not write")
        veil = Veil(self.tokenizer)
        return veil.encode(self.delta_text(veil, new_messages, tools))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids verbatim, control tokens shown."""
        return self.tokenizer.decode(ids)

    def delta_text(self, veil: Veil, new_messages: Sequence[Message], tools: Tools) -> str:
        """Return the text of a delta, with control strings of the messages still hidden."""
        before = [_plain("user", "q"), stand_in(calls_a_tool=new_messages[0].role == "tool")]
        after = [as_template_message(message, veil) for message in new_messages]
        rendered = self._render([*before, *after], tools, add_generation_prompt=True)
        start = rendered.find(_STAND_IN)
        if start < 0:  # some templates drop the text beside a tool call: the turn without the news must be a prefix
            base = self._render(before, tools, add_generation_prompt=False).rstrip()
            if not (base.endswith(self.terminator) and rendered.startswith(base)):
                raise self.unsafe("adding a message changes how earlier turns are rendered")
            return rendered[len(base) :]
        end = rendered.find(self.terminator, start)
        if end < 0:
            raise self.unsafe("an assistant turn that is followed by others has no terminator")
        return rendered[end + len(self.terminator) :]

    def render(self, veil: Veil, messages: Sequence[Message], tools: Tools, *, add_generation_prompt: bool) -> str:
        """Render records with their control strings hidden by ``veil``."""
        hidden = [as_template_message(message, veil) for message in messages]
        return self._render(hidden, tools, add_generation_prompt=add_generation_prompt)

    def unsafe(self, reason: str) -> EngineError:
        """Return the error that refuses this template."""
        return EngineError(
            FailureKind.TEMPLATE_UNSAFE,
            f"chat template of {self.tokenizer.source}: {reason}.",
            "Set 'chat_template' to one whose turns are only ever appended, each closed by one control token.",
        )

    def _find_terminator(self) -> str:
        rendered = self._render([_plain("user", "q"), stand_in(calls_a_tool=False)], (), add_generation_prompt=False)
        found = self.tokenizer.control_pattern.match(rendered, rendered.find(_STAND_IN) + len(_STAND_IN))
        if _STAND_IN not in rendered or found is None:
            raise self.unsafe("an assistant turn does not end in a control token")
        return found.group()

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Tools, *, add_generation_prompt: bool) -> str:
        try:
            return self.tokenizer.render(
                messages, tools, self.template_options, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is somebody else's program and raises what it likes
            roles = ", ".join(str(message["role"]) for message in messages)
            raise self.unsafe(f"it fails on the roles {roles} ({type(error).__name__}: {error})"[:400]) from error


def load_codec(
    source: str, chat_template: Path | None = None, template_options: Mapping[str, Any] | None = None
) -> Codec:
    """Load a tokenizer and check that its template can be extended token by token.

    Args:
        source: see ``load_tokenizer``.
        chat_template: a Jinja file that replaces the tokenizer's own template.
        template_options: see ``Codec``.

    Raises:
        ConfigError: the tokenizer cannot be loaded.
        EngineError: ``TEMPLATE_UNSAFE``.
    """
    from prorl_gym.inference.template_check import check_template

    codec = Codec(load_tokenizer(source, chat_template), template_options)
    check_template(codec)
    return codec


def as_template_message(message: Message, veil: Veil) -> dict[str, Any]:
    """Return a record in the form that templates read, its control strings hidden."""
    shown = _plain(message.role, veil.hide(message.content))
    if message.tool_calls:
        shown["tool_calls"] = [
            _tool_call(call.id, veil.hide(call.name), veil.hide_all(_arguments(call.arguments)))
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = veil.hide(message.tool_call_id)
    if message.name is not None:
        shown["name"] = veil.hide(message.name)
    return shown


def stand_in(*, calls_a_tool: bool) -> dict[str, Any]:
    """Return the assistant turn that deltas are cut from; templates look for a call before a tool result."""
    message = _plain("assistant", _STAND_IN)
    if calls_a_tool:
        message["tool_calls"] = [_tool_call("call00000", "tool", {})]
    return message


def _plain(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(text: str) -> Any:
    """Templates print arguments as JSON themselves: given text they would quote it once more."""
    try:
        return json.loads(text)
    except ValueError:
        return text
