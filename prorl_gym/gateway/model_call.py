"""One model call as every wire reads it, and the parameters of it: each is honoured, or refused by name.

A parameter that is dropped silently changes what is sampled. So each one is either honoured, or known to change
nothing, or refused (HTTP 400); operators can name those that are to be dropped all the same.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field

from prorl_gym.config import ConfigModel
from prorl_gym.errors import ConfigError
from prorl_gym.inference.tokens.history_equality import read_arguments
from prorl_gym.inference.tokens.prompt_builder import HistoryEntry, function_schema
from prorl_gym.inference.tokens.segment_cache import MAX_TOKENS

_SUPPORTED = frozenset(
    {"input", "instructions", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice", "stream"}
    | {"parallel_tool_calls", "messages", "max_tokens", "max_completion_tokens", "seed", "logprobs", "model"}
)
_IGNORED = frozenset(
    # bookkeeping of hosted services
    {"metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    # extras that this server never has: encrypted thoughts, files, searches; how streams are cut; built-in tools
    | {"include", "stream_options", "max_tool_calls", "reasoning.summary", "reasoning.generate_summary"}
)
_DEFAULT_VALUES = {
    "n": 1,
    "truncation": "disabled",
    "modalities": ["text"],
    "response_format.type": "text",
    "text.format.type": "text",
    "text.verbosity": "medium",
    "verbosity": "medium",
}
"""Values that select the default behaviour."""

_NESTED = ("text", "text.format", "reasoning", "response_format")


class SamplingOverrides(ConfigModel):
    """Sampling parameters that override every call's: harnesses do not know the trainer's distribution."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None
    seed: int | None = None
    max_output_tokens: int | None = Field(default=None, gt=0)


class GatewayOptions(BaseModel):
    """The options of a gateway, besides its pool of engines."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    model: str
    return_token_id_information: bool = True
    """Put ids and log-probs on the last item of each call. Engines that answer in text have none."""
    uses_reasoning_parser: bool = False
    """Return thoughts (up to ``</think>``) as an item of their own, not in the text."""
    propagate_context_overflow_errors: bool = False
    """Answer a full context with HTTP 400, not with an empty answer of the reason ``length``."""
    max_output_tokens: int = Field(default=4096, gt=0)
    """Limit of calls that name none."""
    sampling_overrides: SamplingOverrides = SamplingOverrides()
    ignore_parameters: list[str] = Field(default_factory=list[str])
    """Parameters to drop that this server cannot honour and would refuse, for example ``reasoning.effort``."""
    call_seconds: float = Field(default=1800.0, gt=0)
    """Longest time of one call, waits for engines included; then HTTP 504."""
    session_idle_seconds: float = Field(default=120.0, gt=0)
    """A session without a call for so long is over: callers do not report the end. Its next call makes it a new one."""
    memory_tokens: int = Field(default=MAX_TOKENS, ge=0)
    """Ids of recent turns to keep, for agents that send no token fields back; 0 keeps none."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float
    top_p: float
    max_tokens: int
    top_k: int = -1
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A caller's tool that the model is shown as a function under another name, or with other arguments."""

    name: str
    """Name that the caller gives it, in its namespace."""
    namespace: str = ""
    takes_text: bool = False
    """It is a custom tool: what it takes is a text, which the model writes as the argument ``input``."""


def text_of_arguments(arguments: str) -> str:
    """Return the text for a custom tool; where it is not the one argument, the arguments as they were sampled."""
    value = read_arguments(arguments)[1]
    match value:
        case {"input": str(text)} if len(value) == 1:
            return text
        case _:
            return arguments


@dataclass(frozen=True, slots=True)
class ModelCall:
    entries: Sequence[HistoryEntry]
    """The whole conversation, never empty."""
    tools: Sequence[dict[str, Any]]
    sampling: SamplingParams
    may_call_tools: bool = True
    """Whether tool calls are parsed at all."""
    single_tool_call: bool = False
    """Only the first tool call of a turn is returned."""
    logprobs: bool = False
    """Chat: return the log-prob of each token too."""
    offered: Mapping[str, OfferedTool] = field(default_factory=dict[str, OfferedTool])
    """By the name that the model knows: tools that are called otherwise than they are shown."""


def make_call(
    params: Mapping[str, Any], options: GatewayOptions, entries: Sequence[HistoryEntry], limit: int | None
) -> ModelCall:
    """Return a call with what the wires spell alike; ``limit``: the most tokens to sample, if the call names it.

    The parameters are checked with ``reject_unsupported``. Raises ``ConfigError``: the call needs something that is not
    supported.
    """
    if not entries:
        raise ConfigError("the conversation is empty.", "Send at least one message.")
    choice = params.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise unsupported(f"tool_choice: {_short(choice)}", "Only 'auto' and 'none' are: nothing forces a model.")
    return ModelCall(
        entries,
        _function_schemas(params.get("tools") or ()),
        _sampling(params, options, limit),
        may_call_tools=choice == "auto",
        single_tool_call=not params.get("parallel_tool_calls", True),
        logprobs=bool(params.get("logprobs")),
    )


def reject_unsupported(params: Mapping[str, Any], options: GatewayOptions, template_options: Mapping[str, Any]) -> None:
    """Refuse parameters that would change the answer and are not honoured: raise ``ConfigError`` for the first.

    ``template_options`` are what the chat template always gets; a call may repeat them.
    """
    for name, value in unhonoured_params(params):
        harmless = name == "chat_template_kwargs" and value == template_options
        if not harmless and name not in options.ignore_parameters:
            raise unsupported(
                f"{name}: {_short(value)}",
                f"Leave it out, or drop it with 'ignore_parameters: [{name}]' of the server.",
            )
    # Gym's own model server takes these two from the metadata.
    metadata: Mapping[str, Any] = params.get("metadata") or {}
    for name in ("chat_template_kwargs", "extra_body"):
        if metadata.get(name) and f"metadata.{name}" not in options.ignore_parameters:
            raise unsupported(f"metadata.{name}", "Set 'inference.template_options' of the server for all calls.")


def unhonoured_params(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return names and values of parameters that would change the answer, and that nothing here honours."""
    for name, value in _flatten(params):
        if value and name not in _SUPPORTED and name not in _IGNORED and _DEFAULT_VALUES.get(name) != value:
            yield name, value


def unsupported(what: str, fix: str) -> ConfigError:
    return ConfigError(f"{what} is not supported.", fix)


def _function_schemas(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    other = next((tool.get("type") for tool in tools if tool.get("type", "function") != "function"), None)
    if other is not None:
        raise unsupported(f"tools: type '{other}'", "Only functions are: the agent runs them.")
    try:
        json.dumps(tools, ensure_ascii=False).encode()  # the answer repeats them
    except UnicodeEncodeError:
        raise ConfigError("tools: hold half of a character.", "Send whole ones: \\ud83d alone is none.") from None
    return [function_schema(tool) for tool in tools]


def _sampling(params: Mapping[str, Any], options: GatewayOptions, limit: int | None) -> SamplingParams:
    pinned = options.sampling_overrides
    sampling = SamplingParams(
        temperature=_first(pinned.temperature, params.get("temperature"), 1.0),
        top_p=_first(pinned.top_p, params.get("top_p"), 1.0),
        max_tokens=_first(pinned.max_output_tokens, limit, options.max_output_tokens),
        top_k=_first(pinned.top_k, -1),
        seed=_first(pinned.seed, params.get("seed")),
    )
    # Checked here, so that no engine refuses it; NaN is in no range.
    if not (0 <= sampling.temperature < inf and 0 < sampling.top_p <= 1 and sampling.max_tokens > 0):
        given = f"temperature {sampling.temperature}, top_p {sampling.top_p}, {_short(sampling.max_tokens)} tokens"
        raise ConfigError(f"nothing can be sampled with {given}.", "Take 0 <= temperature, 0 < top_p <= 1, 1 or more.")
    return sampling


def _flatten(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in params.items():
        name = f"{prefix}{key}"
        if name in _NESTED and isinstance(value, Mapping):
            yield from _flatten(cast("Mapping[str, Any]", value), f"{name}.")
        else:
            yield name, value


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
