"""Forms of a history that some chat templates refuse, and the form that each is brought into: declared as a table.

``ChatCodec.rewrites`` has the rows whose examples its template refuses. A rule changes only how messages are rendered:
histories are compared as they were sent. It looks at nothing behind a message, so a history that grows keeps the
tokens of its beginning. A record names the rules that it needed (docs/tokens.md).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from prorl_gym.inference.tokens.history_equality import read_arguments
from prorl_gym.records import Message, ToolCall


@dataclass(frozen=True, slots=True)
class TemplateRewrite:
    """One form that templates may refuse."""

    name: str
    what: str
    examples: tuple[tuple[Message, ...], ...]
    """Histories of this form. Their texts are words, which have to be in what the template writes."""
    apply: Callable[[Sequence[Message], int], Sequence[Message]]
    """Rewrites a history, given how many messages of its beginning are the system's; or messages that follow a turn of
    the assistant, given -1."""


def rewrite(
    rules: Sequence[TemplateRewrite], messages: Sequence[Message], *, is_whole: bool
) -> tuple[Sequence[Message], frozenset[str]]:
    """Return the messages as the rules bring them into form, and the names of those that changed any.

    ``is_whole``: they are a conversation from its first message on; otherwise they follow a turn of the assistant.
    """
    names: set[str] = set()
    for rule in rules:
        opening = len([*takewhile(lambda message: message.role == "system", messages)]) if is_whole else -1
        written = rule.apply(messages, opening)
        if list(written) != list(messages):
            names.add(rule.name)
            messages = written
    return messages, frozenset(names)


def _join_system(messages: Sequence[Message], opening: int) -> Sequence[Message]:
    if opening < 2:
        return messages
    text = "\n\n".join(message.content for message in messages[:opening])
    return [Message(role="system", content=text), *messages[opening:]]


def _give_late_system_to_user(messages: Sequence[Message], opening: int) -> Sequence[Message]:
    first, later = messages[: max(opening, 0)], messages[max(opening, 0) :]
    as_user = {"role": "user"}
    return [*first, *(each.model_copy(update=as_user) if each.role == "system" else each for each in later)]


def _add_user(before: Sequence[str | None], messages: Sequence[Message], opening: int) -> Sequence[Message]:
    """Put an empty message of the user before the first one of another role; ``None``: behind the last one."""
    if opening < 0 or (messages[opening].role if opening < len(messages) else None) not in before:
        return messages
    return [*messages[:opening], Message(role="user", content=""), *messages[opening:]]


def _wrap_arguments(messages: Sequence[Message], opening: int) -> Sequence[Message]:
    def wrap(call: ToolCall) -> ToolCall:
        if isinstance(read_arguments(call.arguments)[1], dict):
            return call
        return call.model_copy(update={"arguments": json.dumps({"arguments": call.arguments}, ensure_ascii=False)})

    return [
        each.model_copy(update={"tool_calls": tuple(map(wrap, each.tool_calls))}) if each.tool_calls else each
        for each in messages
    ]


def _split_turns(messages: Sequence[Message], opening: int) -> Sequence[Message]:
    split: list[Message] = []
    for message in messages:
        if message.content and message.tool_calls:
            split.append(message.model_copy(update={"tool_calls": ()}))
        parts = [message.model_copy(update={"content": "", "tool_calls": (call,)}) for call in message.tool_calls]
        split += parts or [message]
    return split


def _turn(text: str = "", *arguments: str) -> Message:
    calls = (ToolCall(id=f"call0000{place}", name="look_up", arguments=each) for place, each in enumerate(arguments))
    return Message(role="assistant", content=text, tool_calls=tuple(calls))


def _result(text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id="call00000", name="look_up")


_SYSTEM, _NOTE = Message(role="system", content="calculator"), Message(role="system", content="permissions")
_TASK = Message(role="user", content="question")
_WORDS = '{"words": "two"}'

TEMPLATE_REWRITES = (
    TemplateRewrite(
        "joined_system",
        "several system messages at the beginning are one",
        ((_SYSTEM, _NOTE, _TASK),),
        _join_system,
    ),
    TemplateRewrite(
        "late_system",
        "a later system message is the user's",
        ((_SYSTEM, _TASK, _turn("answer"), _NOTE), (_TASK, _NOTE)),
        _give_late_system_to_user,
    ),
    TemplateRewrite(
        "added_user",
        "an empty message of the user comes before a first turn of the assistant, or where there is no message",
        ((_SYSTEM, _turn("answer")), (_turn("answer"),)),
        partial(_add_user, (None, "assistant")),
    ),
    TemplateRewrite(
        "user_before_result",
        "the same before a result of a tool that comes first",
        ((_SYSTEM, _result("first")), (_result("first"),)),
        partial(_add_user, ("tool",)),
    ),
    TemplateRewrite(
        "wrapped_arguments",
        "arguments of a call that are no object are the text of one argument, `arguments`",
        tuple((_TASK, _turn("", text), _result("first")) for text in ('["two"]', '{"words": "tw', "null")),
        _wrap_arguments,
    ),
    TemplateRewrite(
        "split_turns",
        "a turn with text and a call, or with several calls, is several turns",
        ((_TASK, _turn("answer", _WORDS), _result("first")), (_TASK, _turn("", _WORDS, _WORDS), _result("first"))),
        _split_turns,
    ),
)
