"""Lenient reading, for programs in rollouts: what a text model cannot use is left out or named, and counted.

The model server refuses what it does not honour. Here the rollout decides about sampling and limits, and an unmodified
program cannot be told to send less: unknown fields are ignored, hosted tools are dropped by name, a part that is not
text becomes a note. A program that gets a 4xx for such a thing ends, and its rollout with it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from prorl_gym.gateway.history import Item, as_item, as_list, read_text
from prorl_gym.gateway.model_call import ModelCall, SamplingParams
from prorl_gym.inference.tokens.prompt_builder import HistoryEntry, function_schema

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"})


def lenient_call(
    entries: Sequence[HistoryEntry],
    params: Mapping[str, Any],
    sampling: SamplingParams,
    omitted: Counter[str],
    limit: object,
) -> ModelCall:
    """Return a call with what all wires read alike.

    Args:
        entries: the history.
        params: ``tools``, ``tool_choice`` and ``parallel_tool_calls`` as in OpenAI's APIs; functions flat (``name``,
            ``parameters``) or nested.
        sampling: of the rollout: it holds, whatever the program asks for.
        omitted: counts the tools that are left out, by name.
        limit: most tokens that the program asks for; the rollout's own limit wins.
    """
    functions: list[dict[str, Any]] = []
    for tool in filter(None, map(as_item, as_list(params.get("tools")) or ())):
        if (function := _function(tool)) is not None:
            functions.append(function_schema(function))
        else:
            omitted[f"tool {str(tool.get('name') or tool.get('type'))[:80]}"] += 1
    if type(limit) is int and limit > 0:
        sampling = replace(sampling, max_tokens=min(limit, sampling.max_tokens))
    may_call, is_single = params.get("tool_choice") != "none", params.get("parallel_tool_calls") is False
    return ModelCall(entries, functions, sampling, may_call, is_single)


def readable_text(content: object, omitted: Counter[str], separator: str = "") -> str:
    """Return the text of a content field: a string, or parts; a note stands for each part that is no text."""
    if isinstance(content, str):
        return content
    parts = (as_readable_part(part, omitted) for part in as_list(content) or ())
    return separator.join(read_text([part], "") for part in parts if part is not None)


def as_readable_part(part: object, omitted: Counter[str]) -> Item | str | None:
    """Return a part of text as it is, a note in place of any other one, and ``None`` for what is no part."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    item = as_item(part)
    if item is None:
        return None
    kind = str(item.get("type") or "text")[:80]
    if kind in _TEXT_PARTS:
        return item
    omitted[f"part {kind}"] += 1
    return {"type": "text", "text": f"[{kind} left out: this model reads text only]"}


def _function(tool: Item) -> Item | None:
    """Return what a template shows of a function; ``None`` for any other tool."""
    function = as_item(tool.get("function")) or tool
    name, parameters = function.get("name"), as_item(function.get("parameters"))
    if tool.get("type", "function") != "function" or not isinstance(name, str) or not name:
        return None
    return {"name": name, "description": str(function.get("description") or ""), "parameters": parameters or {}}
