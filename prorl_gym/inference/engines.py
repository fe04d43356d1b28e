"""The kinds of engines that a configuration can name."""

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from prorl_gym.errors import ConfigError
from prorl_gym.inference.behaviour import BehaviourRule, LogprobKind
from prorl_gym.inference.chat_prefix import ChatPrefixEngine, ChatPrefixOptions
from prorl_gym.inference.http_engine import HttpEngine
from prorl_gym.inference.openai import OpenAIEngine, OpenAIOptions
from prorl_gym.inference.sglang import SglangEngine, SglangOptions
from prorl_gym.inference.vllm import VllmEngine, VllmOptions

EngineKind = Literal["vllm", "sglang", "chat_prefix", "openai"]

Encode = Callable[[str], Sequence[int]]
"""Text to ids of our tokenizer, no control tokens in it (``Tokenizer.encode_plain``)."""


class Common(TypedDict):
    """The options that every kind has (``HttpOptions``)."""

    model: str
    vocab_size: int
    control_ids: frozenset[int]
    connect_seconds: float
    request_seconds: float
    max_connections: int
    api_key: str | None
    tls: ssl.SSLContext | None
    rule: BehaviourRule


@dataclass(frozen=True, slots=True)
class Particular:
    """The options that only some kinds have."""

    logprob_kind: LogprobKind | None = None
    """``None``: as servers of that kind are by default."""
    priority_scheduling: bool = False
    routed_experts: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    encode: Encode | None = None


def engine_maker(kind: EngineKind, common: Common, own: Particular) -> Callable[[str, str], HttpEngine]:
    """Return a function that makes an engine of a name and a base URL.

    Raises:
        ConfigError: the kind needs a tokenizer and whoever builds the pool has none.
    """
    match kind:
        case "vllm":
            vllm = VllmOptions(
                **common,
                logprob_kind=own.logprob_kind or "raw",
                priority_scheduling=own.priority_scheduling,
                routed_experts=own.routed_experts,
            )
            return lambda name, url: VllmEngine(name, url, vllm)
        case "sglang":
            sglang = SglangOptions(
                **common,
                logprob_kind=own.logprob_kind or "processed",
                priority_scheduling=own.priority_scheduling,
                routed_experts=own.routed_experts,
            )
            return lambda name, url: SglangEngine(name, url, sglang)
        case "chat_prefix":
            chat = ChatPrefixOptions(
                **common, logprob_kind=own.logprob_kind or "processed", template_options=own.template_options
            )
            return lambda name, url: ChatPrefixEngine(name, url, chat)
        case "openai":
            if own.encode is None:
                raise ConfigError("engine: openai is for pools with a tokenizer.", "Set another 'engine'.")
            text = OpenAIOptions(**common, encode=own.encode)
            return lambda name, url: OpenAIEngine(name, url, text)
