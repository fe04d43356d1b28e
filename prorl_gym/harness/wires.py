"""The wires of agent programs: how each API spells calls and answers, its calls read leniently.

What a text model cannot use is left out or named, and counted. The model server refuses what it does not honour. Here
the rollout decides about sampling and limits, and an unmodified program cannot be made to send less: parameters and
fields without a meaning here are left out, too, and a part that is not text becomes a note (for tools see
``client_tools``). A program that gets a 4xx for such a thing ends, and its rollout with it.

Answers are written as the model server writes them (``prorl_gym.gateway``), which alone reads strictly.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from prorl_gym.errors import ConfigError
from prorl_gym.gateway import chat_completions, responses
from prorl_gym.gateway.answer import AnswerFormat, AnswerHead, CompletedTurn, EventWriter
from prorl_gym.gateway.history import TEXT_FIX, Item, as_item, as_list, as_parts, read_text
from prorl_gym.gateway.model_call import ModelCall, SamplingParams, unhonoured_params
from prorl_gym.harness.body_reader import ReadBody
from prorl_gym.harness.client_tools import HOSTED, offer_tools, open_namespaces, shown_name
from prorl_gym.inference.tokens.harness_call import CallKind, Lineage
from prorl_gym.inference.tokens.prompt_builder import HistoryEntry
from prorl_gym.left_out import unknown_fields

_ITEM_FIELDS = frozenset(
    {"type", "id", "status", "role", "content", "phase", "call_id", "name", "arguments", "input", "namespace"}
    | {"output", "summary", "encrypted_content"}
)
"""Of items of the responses API that are read, or that say nothing to a text model."""

_KEPT_ELSEWHERE = ("previous_response_id", "conversation", "prompt")
"""Parameters that name texts which only the provider has."""

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"})


@dataclass(frozen=True, slots=True)
class Wire:
    """One API, as programs in rollouts speak it."""

    history_key: str
    """Key of the conversation in a body."""
    read: Callable[[ReadBody, SamplingParams, Counter[str]], ModelCall]
    """Reads a call with the rollout's sampling, and counts by name what it leaves out; raises ``ConfigError`` for what
    is no conversation."""
    write_answer: Callable[[CompletedTurn, Mapping[str, Any], AnswerFormat], dict[str, Any]]
    open_events: Callable[[AnswerHead, AnswerFormat, Mapping[str, Any]], EventWriter]


def lenient_call(
    entries: Sequence[HistoryEntry],
    params: Mapping[str, Any],
    sampling: SamplingParams,
    omitted: Counter[str],
    limit: object,
) -> ModelCall:
    """Return a call with what all wires read alike.

    ``params`` has ``tools``, ``tool_choice`` and ``parallel_tool_calls`` as in OpenAI's APIs; functions flat (``name``,
    ``parameters``) or nested. ``limit`` is the program's own limit of tokens, which can only lower the rollout's.
    """
    functions, offered = offer_tools(params, omitted)
    if type(limit) is int and limit > 0:
        sampling = replace(sampling, max_tokens=min(limit, sampling.max_tokens))
    choice, is_single = params.get("tool_choice"), params.get("parallel_tool_calls") is False
    if choice not in (None, "auto", "none"):  # nothing forces a model
        omitted[f"tool_choice {str((as_item(choice) or {}).get('type', choice))[:80]}"] += 1
    return ModelCall(entries, functions, sampling, choice != "none", is_single, offered=offered)


def readable_text(content: object, omitted: Counter[str], separator: str = "") -> str:
    """Return the text of a content field: a string, or parts; a note stands for each part that is no text.

    Any other value is read as its JSON.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in as_parts(content):
        item = as_item(part)
        kind = str((item or {}).get("type") or "text")[:80]
        if item is None or not ("type" in item or "text" in item):  # a value, not a part
            texts.append(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False))
        elif kind in _TEXT_PARTS:
            texts.append(read_text([item], "a part"))
        else:
            omitted[f"part {kind}"] += 1
            texts.append(f"[{kind} left out: this model reads text only]")
    return separator.join(texts)


def _read_chat(body: ReadBody, sampling: SamplingParams, omitted: Counter[str]) -> ModelCall:
    key = chat_completions.HISTORY_KEY

    def read(given: list[Any]) -> list[HistoryEntry]:
        simple = [_simplify_message(each, omitted) for each in given]
        return chat_completions.read_messages(chat_completions.normalize_body({key: simple})[key])

    fields = body.fields
    omitted.update(f"parameter {name}" for name, _ in unhonoured_params(fields))
    limit = fields.get("max_completion_tokens") or fields.get("max_tokens")
    return lenient_call(body.read_history(fields.get(key), read), fields, sampling, omitted, limit)


def _simplify_message(given: object, omitted: Counter[str]) -> Item:
    """Return a message of text and calls alone."""
    message = as_item(given)
    if message is None:
        raise ConfigError("messages: one is no object.", "Send objects with 'role' and 'content'.")
    if (call := message.get("function_call")) and not message.get("tool_calls"):
        message = {**message, "function_call": None, "tool_calls": [{"function": call}]}
    rejected = chat_completions.REJECTED_FIELDS
    kept = {key: value for key, value in message.items() if key not in rejected}
    if message.get("role") == "function":
        kept["role"] = "tool"
    if (calls := as_list(message.get("tool_calls"))) is not None:
        kept["tool_calls"] = list(map(_simplify_call, calls))
    omitted.update(f"field {field}" for field in rejected if message.get(field))
    return kept | {"content": readable_text(message.get("content"), omitted)}


def _simplify_call(given: object) -> object:
    """Return a call of a custom tool as one of a function; any other one unchanged."""
    call = as_item(given) or {}
    custom = as_item(call.get("custom"))
    if custom is None:
        return given
    return {"id": call.get("id"), "function": {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}}


def _read_responses(body: ReadBody, sampling: SamplingParams, omitted: Counter[str]) -> ModelCall:
    key = responses.HISTORY_KEY

    def read(items: list[Any]) -> list[HistoryEntry]:
        simple = [item for each in items if (item := _simplify_item(each, omitted)) is not None]
        return responses.read_items(responses.normalize_body({key: simple})[key])

    fields = body.fields
    if kept := next((name for name in _KEPT_ELSEWHERE if fields.get(name)), ""):
        raise ConfigError(f"'{kept}' is not supported.", "Send the whole conversation in each call.")
    omitted.update(f"parameter {name}" for name, _ in unhonoured_params(fields))
    given, instructions = fields.get(key), readable_text(fields.get("instructions"), omitted)
    opening = [{"role": "system", "content": instructions}] if instructions else []
    history = [*responses.read_items(opening), *body.read_history([given] if isinstance(given, str) else given, read)]
    params = {**fields, "tools": [*open_namespaces(fields)]}
    return lenient_call(history, params, sampling, omitted, fields.get("max_output_tokens"))


def _simplify_item(given: object, omitted: Counter[str]) -> Item | None:
    """Return an item of text or calls alone; ``None`` for one of another type, such as a hosted tool's.

    Raises ``ConfigError`` for calls and outputs of tools that the program runs and the model cannot be shown.
    """
    item = {"role": "user", "content": given} if isinstance(given, str) else as_item(given)
    kind = "of no type" if item is None else str(item.get("type") or "message")
    if item is not None and kind.startswith("custom_tool_call"):
        kind = kind.replace("custom_tool", "function")
        item = {**item, "type": kind, "arguments": {"input": item.get("input")}}
    if item is None or kind not in responses.TEXT_FIELDS:
        if kind.endswith(("_call", "_output")) and not kind.startswith(HOSTED):
            raise ConfigError(f"input: items of type '{kind[:80]}' are not supported.", TEXT_FIX)
        omitted[f"item {kind[:80]}"] += 1
        return None
    kept = {key: value for key, value in item.items() if key != "namespace"}
    omitted.update(unknown_fields(item, _ITEM_FIELDS, "item."))
    if kind == "function_call":
        kept["name"] = shown_name(item.get("namespace"), item.get("name"))
    texts = responses.TEXT_FIELDS[kind]
    return kept | {key: readable_text(item[key], omitted) for key in texts if item.get(key) is not None}


CHAT = Wire("messages", _read_chat, chat_completions.write_answer, chat_completions.open_events)
RESPONSES = Wire("input", _read_responses, responses.write_answer, responses.open_events)


_LINEAGE_HEADERS = (
    ("x-claude-code-agent-id", "x-claude-code-parent-agent-id", False),
    ("x-session-id", "x-parent-session-id", True),  # OpenCode
)
"""Headers that name the agent of a call and its parent; whether the main agent is named too, but has no parent."""

_MAX_ID = 128


def kind_of(entries: Sequence[HistoryEntry], words: Sequence[str], *, has_tools: bool) -> CallKind:
    """Return whether a call serves the program itself, with a title or a summary: it is not trained by default.

    It has no tools, and one of these words in the system messages that it opens with: only the program writes there.
    """
    opening = takewhile(lambda entry: entry.message.role == "system", entries)
    texts = [entry.message.content.lower() for entry in opening] if words and not has_tools else []
    return "side" if any(one.lower() in text for one in words for text in texts) else "main"


def lineage_of(headers: Mapping[str, str]) -> Lineage:
    """Return which agent makes a call, as far as its headers say."""
    for agent_header, parent_header, only_with_parent in _LINEAGE_HEADERS:
        agent, parent = headers.get(agent_header, ""), headers.get(parent_header, "")
        if agent and (parent or not only_with_parent):
            return Lineage(agent[:_MAX_ID], parent[:_MAX_ID])
    return Lineage()
