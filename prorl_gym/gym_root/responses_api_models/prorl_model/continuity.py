"""The prompt of the next model call, built on the ids of the call before it.

An agent sends the whole conversation each time. Rendering it again would change ids that were sampled, so: the last
item that carries tokens says what the engine has seen and sampled; only what comes after it is encoded, as a delta.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from prorl_gym.errors import ConfigError
from prorl_gym.inference.chat import Codec
from prorl_gym.trainers.gym_items import function_schema, messages_of, text_of

Item = Mapping[str, Any]


def next_prompt(codec: Codec, items: Sequence[Item], tools: Sequence[Item]) -> list[int]:
    """Return the ids to send.

    Raises:
        ConfigError: nothing new was added since the last call, or an assistant message without tokens was.
    """
    functions = [function_schema(tool) for tool in tools]
    last = next((i for i in reversed(range(len(items))) if items[i].get("generation_token_ids")), None)
    if last is None:
        return codec.first_prompt(messages_of(items), functions)
    seen = [*items[last]["prompt_token_ids"], *items[last]["generation_token_ids"]]
    news = messages_of(items[last + 1 :])
    if not news or any(message.role == "assistant" for message in news):
        raise ConfigError(
            "input: after the last item with token ids, only tool results and user messages can follow.",
            "Send the items of this server back unchanged, then the new ones.",
        )
    if seen[-1] != codec.terminator_id:  # cut by its length limit
        seen.append(codec.terminator_id)
    return seen + codec.delta(news, functions)


def chat_items(messages: Sequence[Item]) -> list[dict[str, Any]]:
    """Return chat-completion messages as Responses items, token fields on the last item of each call."""
    items: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool":
            output = text_of(message.get("content"))
            items.append({"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": output})
            continue
        calls = message.get("tool_calls") or []
        if message.get("content") or not calls:
            items.append({"type": "message", "role": message.get("role"), "content": message.get("content") or ""})
        for call in calls:
            items.append({"type": "function_call", "call_id": call["id"], **dict(call["function"])})
        tokens = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
        items[-1] |= {key: message[key] for key in tokens if message.get(key)}
    return items
