"""Items of the Responses API as messages, for conversations of other Gym agents.

Items come from models and tools of other makers: unknown kinds are left out, text is read from any field that holds it,
and nothing here raises on a malformed item.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from prorl_gym.records import Message, ToolCall


def messages_from_items(items: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a conversation as messages.

    A message item and the function calls after it are one assistant turn, as the model wrote it.
    """
    if isinstance(items, str):
        return [Message(role="user", content=items)]
    messages: list[Message] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            call_id, arguments = str(item.get("call_id", "")), str(item.get("arguments", "{}"))
            call = ToolCall(id=call_id, name=str(item.get("name", "")), arguments=arguments)
            if not messages or messages[-1].role != "assistant":
                messages.append(Message(role="assistant", content=""))
            messages[-1] = messages[-1].model_copy(update={"tool_calls": (*messages[-1].tool_calls, call)})
        elif kind == "function_call_output":
            call_id = str(item.get("call_id", ""))
            messages.append(Message(role="tool", content=content_text(item.get("output")), tool_call_id=call_id))
        elif kind == "message":
            role = item.get("role", "user")
            known: Literal["system", "assistant", "user"] = "assistant" if role == "assistant" else "user"
            if role in ("system", "developer"):
                known = "system"
            messages.append(Message(role=known, content=content_text(item.get("content"))))
    return messages


def declared_tools(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the functions that a row offers to its model."""
    given: Any = row.get("responses_create_params")
    tools: Any = cast(Mapping[str, Any], given).get("tools") if isinstance(given, Mapping) else None
    if not isinstance(tools, Sequence):
        return []
    offered = [cast(Mapping[str, Any], tool) for tool in cast(Sequence[object], tools) if isinstance(tool, Mapping)]
    return [str(tool["name"]) for tool in offered if tool.get("type") == "function" and "name" in tool]


def content_text(content: object) -> str:
    """Return the text of a content field: a string, or the texts of its parts joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    parts = cast(Sequence[object], content)
    texts = (cast(Mapping[str, Any], part).get("text") for part in parts if isinstance(part, Mapping))
    return "".join(text for text in texts if isinstance(text, str))


def last_answer(items: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the text of the last assistant message, ``None`` when there is none, or thoughts come last of all."""
    is_open = items and items[-1].get("type") == "reasoning"
    for message in reversed(messages_from_items(() if is_open else items)):
        if message.role == "assistant" and message.content:
            return message.content
    return None
