"""What an agent sends, read: a list of messages, and the token ids on those that this server sampled.

Agents are other people's programs. What cannot be understood is refused with a ``ConfigError`` (HTTP 400) that names
it: a message that is silently left out would be a prompt that nobody wrote.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prorl_gym.errors import ConfigError
from prorl_gym.gym_root.responses_api_models.prorl_model.equality import split_thoughts
from prorl_gym.inference.toolcalls.turn import THINK, UNTHINK
from prorl_gym.records import Message, ToolCall

Item = Mapping[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")
_FIX = "This server takes text messages, function calls and their outputs, and reasoning items."
_TOKEN_FIELDS = frozenset({"prompt_token_ids", "generation_token_ids", "generation_log_probs"})
_CHAT_FIELDS = {
    "assistant": frozenset({"role", "content", "refusal", "tool_calls", "reasoning_content"}) | _TOKEN_FIELDS,
    "tool": frozenset({"role", "content", "tool_call_id"}),
}
"""Fields of chat messages that are read; all others are ignored, but for ``_REFUSED``."""
_PLAIN_FIELDS = frozenset({"role", "content"})
_REFUSED = {
    "function_call": "Send calls as 'tool_calls', and their results as messages of the role 'tool'.",
    "audio": _FIX,
    "images": _FIX,
}
"""Fields of chat messages that say more than the text does: without them the conversation would be another one."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token fields of one model call."""

    prompt: list[int]
    generation: list[int]

    @property
    def ids(self) -> list[int]:
        """All that the engine has seen after the call."""
        return self.prompt + self.generation


@dataclass(frozen=True, slots=True)
class Entry:
    """One message, with the tokens of the call that made it, where the agent sent them back."""

    message: Message
    tokens: Tokens | None = None

    @property
    def sampled(self) -> bool:
        """Whether the assistant said it."""
        return self.message.role == "assistant"


def read_items(items: Sequence[Item]) -> list[Entry]:
    """Read items of the Responses API. What lies between two items of others is one turn of the assistant.

    Raises:
        ConfigError: an item or a part of it is not text, not a call and not a call's output.
    """
    entries: list[Entry] = []
    thinking: list[str] = []
    for position, item in enumerate(items):
        where = f"input[{position}]"
        if item.get("type") == "reasoning":
            thinking.append(_text(item.get("content"), where) or _text(item.get("summary"), where))
            if tokens := _tokens(item, where):  # a call that was cut while it thought has nothing else to carry them
                entries.append(_thoughts(thinking, tokens))
            continue
        entry = _entry(item, where)
        if thinking and not entry.sampled:
            entries.append(_thoughts(thinking))
        elif thinking:
            entry = _joined(_thoughts(thinking), entry)
        if item.get("type") == "function_call" and entries and entries[-1].sampled and entries[-1].tokens is None:
            entry = _joined(entries.pop(), entry)
        entries.append(entry)
    return [*entries, _thoughts(thinking)] if thinking else entries


def read_chat(messages: Sequence[Item]) -> list[Entry]:
    """Read messages of the chat API.

    Raises:
        ConfigError: a message has parts that are not text, or a role that there is not.
    """
    return [_chat_entry(message, f"messages[{position}]") for position, message in enumerate(messages)]


def plain_call(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a call with the fields of its history that are read here, in the form that Gym accepts.

    Gym's models refuse fields that they do not know, their own answers' null fields among them; and where a call is
    streamed they leave out whole items. Agents send back what they were answered, and what their clients add to it.

    Raises:
        ConfigError: a message has a part or a field that must not be ignored.
    """
    plain = dict(body)
    for key, rewrite in (("messages", _plain_message), ("input", _plain_item)):
        if isinstance(given := body.get(key), list):
            plain[key] = [
                rewrite(item, f"{key}[{position}]") if isinstance(item, Mapping) else item
                for position, item in enumerate(given)
            ]
    return plain


def _plain_message(message: Item, where: str) -> dict[str, Any]:
    for field, fix in _REFUSED.items():
        if message.get(field):
            raise ConfigError(f"{where}: '{field}' is not supported.", fix)
    role = message.get("role")
    if isinstance(role, str):
        _role(role, where)
    if message.get("tool_calls") and role != "assistant":
        raise ConfigError(f"{where}: only the assistant calls tools.", "Leave out 'tool_calls', or correct the role.")
    fields = _CHAT_FIELDS.get(str(role), _PLAIN_FIELDS)
    plain = {key: value for key, value in message.items() if key in fields and value is not None}
    if isinstance(plain.get("content"), list):
        plain["content"] = _text(plain["content"], where)
    if role == "assistant":
        if refusal := plain.pop("refusal", None):
            plain["content"] = f"{plain.get('content', '')}{refusal}"
        if isinstance(thoughts := message.get("reasoning"), str):
            plain.setdefault("reasoning_content", thoughts)
        if isinstance(calls := plain.get("tool_calls"), list):
            plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: Any) -> Any:
    """Return a call of a function without the fields that clients add; any other one as it is, to be refused."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    read = {key: function[key] for key in ("name", "arguments") if key in function}
    return {"id": call.get("id"), "type": "function", "function": read}


def _plain_item(item: Item, where: str) -> dict[str, Any]:
    plain = {key: value for key, value in item.items() if value is not None and key != "routed_experts"}
    kind = plain.get("type", "message")
    if kind == "message" and isinstance(plain.get("content"), list):
        plain["content"] = _text(plain["content"], where)
    elif kind == "function_call_output" and isinstance(plain.get("output"), list):
        plain["output"] = _text(plain["output"], where)
    elif kind == "reasoning":
        plain = {"id": "", "summary": [], **plain}
    return plain


def _entry(item: Item, where: str) -> Entry:
    kind = item.get("type") or "message"
    if kind == "message":
        return Entry(_message(item, where), _tokens(item, where))
    if kind == "function_call":
        if item.get("namespace"):
            raise ConfigError(f"{where}: 'namespace' is not supported.", "Give functions names of their own.")
        call = _call(item, "call_id", where)
        return Entry(Message(role="assistant", content="", tool_calls=(call,)), _tokens(item, where))
    if kind == "function_call_output":
        output, call_id = _text(item.get("output"), where), str(item.get("call_id", ""))
        return Entry(Message(role="tool", content=output, tool_call_id=call_id))
    raise ConfigError(f"{where}: items of type '{kind}' are not supported.", _FIX)


def _thoughts(thinking: list[str], tokens: Tokens | None = None) -> Entry:
    """Return what was thought so far as the beginning of a turn, and forget it."""
    content = _thought("".join(thinking))
    thinking.clear()
    return Entry(Message(role="assistant", content=content), tokens)


def _chat_entry(message: Item, where: str) -> Entry:
    read = _message(message, where)
    if read.role == "tool":
        read = read.model_copy(update={"tool_call_id": str(message.get("tool_call_id", ""))})
    if read.role != "assistant":
        return Entry(read)
    thoughts = message.get("reasoning_content")
    if isinstance(thoughts, str) and thoughts.strip() != split_thoughts(read.content)[0]:
        read = read.model_copy(update={"content": _thought(thoughts) + read.content})
    calls = tuple(_call({"id": call.get("id"), **call["function"]}, "id", where) for call in _calls(message, where))
    return Entry(read.model_copy(update={"tool_calls": calls}), _tokens(message, where))


def _calls(message: Item, where: str) -> Sequence[Item]:
    calls = message.get("tool_calls") or []
    if any(not isinstance(call.get("function"), Mapping) for call in calls):
        raise ConfigError(f"{where}: only calls of functions are supported.", _FIX)
    return calls


def _message(item: Item, where: str) -> Message:
    role = _role(str(item.get("role", "user")), where)
    return Message.model_validate({"role": role, "content": _text(item.get("content"), where)})


def _role(role: str, where: str) -> str:
    if role not in _ROLES:
        raise ConfigError(f"{where}: there is no role '{role[:40]}'.", f"Roles are {', '.join(_ROLES)}.")
    return _ROLES[role]


def _text(content: object, where: str) -> str:
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    texts: list[str] = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in _TEXT_PARTS:
            raise ConfigError(f"{where}: parts of type '{kind}' are not supported, only text.", _FIX)
        texts.append(str(part.get("refusal" if kind == "refusal" else "text") or ""))
    return "".join(texts)


def _call(item: Item, id_key: str, where: str) -> ToolCall:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise ConfigError(f"{where}: a call needs a name and arguments, both text.", _FIX)
    return ToolCall(id=str(item.get(id_key) or ""), name=name, arguments=arguments)


def _tokens(item: Item, where: str) -> Tokens | None:
    generation = item.get("generation_token_ids")
    if not generation:
        return None
    prompt = item.get("prompt_token_ids")
    if not prompt or not all(type(token) is int and token >= 0 for token in (*prompt, *generation)):
        raise ConfigError(f"{where}: its token fields are no token ids.", "Send them back as they came.")
    return Tokens(list(prompt), list(generation))


def _joined(first: Entry, second: Entry) -> Entry:
    """One call gave both items; its tokens are on the last."""
    calls = (*first.message.tool_calls, *second.message.tool_calls)
    content = first.message.content + second.message.content
    return Entry(first.message.model_copy(update={"tool_calls": calls, "content": content}), second.tokens)


def _thought(text: str) -> str:
    return f"{THINK}\n{text.strip()}\n{UNTHINK}\n\n"
