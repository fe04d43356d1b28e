"""Configuration of a pool of engines, and building one from it."""

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from prorl_gym.config import ConfigModel
from prorl_gym.errors import ConfigError
from prorl_gym.inference.balance import BalancePolicyName, make_balance_policy
from prorl_gym.inference.balance.admission import AdmissionOptions
from prorl_gym.inference.balance.engine_pool import EnginePool, PoolOptions
from prorl_gym.inference.balance.health_monitor import FailoverOptions
from prorl_gym.inference.engines.chat_prefix import ChatPrefixEngine, ChatPrefixOptions
from prorl_gym.inference.engines.dialect import LogprobRule
from prorl_gym.inference.engines.http_engine import HttpEngine
from prorl_gym.inference.engines.http_exchange import tls_context
from prorl_gym.inference.engines.openai import OpenAIEngine, OpenAIOptions
from prorl_gym.inference.engines.sglang import SglangEngine, SglangOptions
from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.inference.protocol import LogprobKind
from prorl_gym.inference.tokens.transcript import ThinkingMode
from prorl_gym.inference.toolcalls.formats import ToolFormat
from prorl_gym.logs import register_secret

Seconds = Annotated[float, Field(gt=0)]

Encode = Callable[[str], Sequence[int]]
"""Text to ids of our tokenizer, no control tokens in it (``Tokenizer.encode_untrusted``)."""


class InferenceConfig(ConfigModel):
    """One pool of engines that serve the same model."""

    engines: Annotated[list[str], Field(min_length=1)]
    """Base URLs of the servers, for example ``http://127.0.0.1:8000/v1``."""
    engine: Literal["vllm", "sglang", "chat_prefix", "openai"] = "vllm"
    """Kind of server: ``vllm``; ``sglang``; ``chat_prefix`` (NeMo-RL's); ``openai`` (text only: not for training)."""
    model: str
    """Name under which the servers serve the model (``--served-model-name``)."""
    tokenizer: str
    """``small`` (ships with prorl-gym: for the demo), directory with ``tokenizer.json``, or hub ``owner/name``."""
    chat_template: Path | None = None
    """A Jinja file that replaces the tokenizer's own template."""
    template_options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Passed to the template by name, for example ``enable_thinking: false``."""
    tool_format: ToolFormat = "auto"
    """Format of the model's tool calls. ``auto``: the template's; ``declared``: the one the tokenizer declares."""
    thinking: ThinkingMode = "keep"
    """Old thoughts at a new user turn: ``keep`` them, or follow the ``template`` (which begins a new segment)."""
    max_model_len: Annotated[int, Field(gt=0)] | None = None
    """Context in tokens; by default the servers report it."""
    vocab_size: Annotated[int, Field(gt=0)] | None = None
    """Ids at or above it are refused; the tokenizer's size by default, which padded models can exceed."""
    logprob_kind: LogprobKind | None = None
    """``raw``: before temperature, top-p and top-k; ``processed``: after. ``raw`` by default for ``vllm`` only."""
    require_processed: bool = False
    """Refuse training calls whose raw log-probs differ from those of the distribution that is sampled from."""
    routed_experts: bool = False
    """Record the experts each token was routed to, where the servers return them (not ``openai``)."""
    api_key_env: str | None = None
    """Environment variable that holds the servers' API key. The key itself is never stored."""
    ca_file: Path | None = None
    """Certificates (PEM) to trust for https, instead of the system's."""
    connect_seconds: Seconds = 10.0
    """Timeout of opening a connection."""
    request_seconds: Seconds = 900.0
    """Longest duration of a call, including its wait in the engine's queue."""
    attempts: Annotated[int, Field(ge=1, le=16)] = 3
    """Most engines on which one call is tried."""
    wait_seconds: Annotated[float, Field(ge=0)] = 30.0
    """Longest wait for an engine to recover when none is healthy."""
    balance: Literal[BalancePolicyName, "pass_through"] = "cost"
    """Which engine serves a call (docs/engines.md). ``pass_through``: the one address is an external router's."""
    admission: Literal["auto", "fixed"] = "auto"
    """Rollouts admitted to engines at a time. ``auto``: as many as fit the caches; ``fixed``: ``live_rollouts``."""
    live_rollouts: Annotated[int, Field(gt=0)] | None = None
    """Most rollouts admitted if ``fixed``, or if no engine reports its cache size; by default all in RUN."""
    scrape_seconds: Seconds = 5.0
    """Seconds between two reads of the engines' metrics."""
    salt_cache: bool = True
    """Separate the prefix caches of policy versions, on engines that support ``cache_salt`` (all but ``openai``)."""
    max_connections: Annotated[int, Field(gt=0)] = 1024
    """Most connections to each engine."""
    priority_scheduling: bool = False
    """Set if the engines run vLLM's ``--scheduling-policy priority`` or SGLang's ``--enable-priority-scheduling``:
    evaluation calls then come first.
    """

    @field_validator("engines")
    @classmethod
    def _urls(cls, urls: list[str]) -> list[str]:
        normal = [normalize_url(url) for url in urls]
        if len(set(normal)) != len(normal):
            raise ValueError("an engine is named twice")
        return normal

    @model_validator(mode="after")
    def _one_router(self) -> Self:
        if self.balance == "pass_through" and len(self.engines) != 1:
            raise ValueError("balance: pass_through is for one address, that of a router")
        return self


def normalize_url(url: str) -> str:
    """Return a base URL without a final slash and with a path (``/v1`` by default). Raises ``ValueError``."""
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("an engine's address looks like http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("an engine's address has no user, password, query or fragment; use api_key_env")
    _ = parts.port  # raises for a port that is no port
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


def build_pool(
    name: str,
    config: InferenceConfig,
    *,
    vocab_size: int,
    version: int = 0,
    encode: Encode | None = None,
    control_ids: Collection[int] = (),
) -> EnginePool:
    """Make a pool. Nothing is connected yet; ``EnginePool.check_health`` asks the engines.

    ``encode`` is for engines that answer in text; a turn may end with any of ``control_ids``. Raises ``ConfigError``:
    the variable named by ``api_key_env`` is not set, ``ca_file`` holds no certificates, or ``encode`` is missing.
    """
    pool = EnginePool(
        name,
        balance_policy=make_balance_policy("round_robin" if config.balance == "pass_through" else config.balance),
        failover=FailoverOptions(max_attempts=config.attempts, recovery_seconds=config.wait_seconds),
        max_model_len=config.max_model_len,
        version=version,
        options=PoolOptions(
            scrape_interval_seconds=config.scrape_seconds,
            salt_cache=config.salt_cache and config.engine != "openai",
            is_router=config.balance == "pass_through",
            admission=AdmissionOptions(
                max_live_rollouts=config.live_rollouts, follow_capacity=config.admission == "auto"
            ),
        ),
    )
    make = pool_engine_factory(name, config, vocab_size=vocab_size, encode=encode, control_ids=control_ids)
    for index, url in enumerate(config.engines):
        pool.add_engine(make(f"{name}-{index}", url))
    return pool


def pool_engine_factory(
    pool: str,
    config: InferenceConfig,
    *,
    vocab_size: int,
    encode: Encode | None = None,
    control_ids: Collection[int] = (),
) -> Callable[[str, str], HttpEngine]:
    """Return a function that makes an engine of such a pool from a name and a base URL.

    Raises as ``build_pool``. To add a kind of engine, add a case and its name to ``InferenceConfig.engine``.
    """
    common: dict[str, Any] = dict(
        model=config.model,
        vocab_size=config.vocab_size or vocab_size,
        control_ids=frozenset(control_ids),
        connect_seconds=config.connect_seconds,
        request_seconds=config.request_seconds,
        max_connections=config.max_connections,
        api_key=_api_key(config.api_key_env),
        tls=None if config.ca_file is None else tls_context(config.ca_file),
        logprob_rule=LogprobRule(pool, require_processed_logprobs=config.require_processed),
        priority_scheduling=config.priority_scheduling,
        record_routed_experts=config.routed_experts,
    )
    match config.engine:
        case "vllm":
            vllm = VllmOptions(**common, logprob_kind=config.logprob_kind or "raw")
            return lambda name, url: VllmEngine(name, url, vllm)
        case "sglang":
            sglang = SglangOptions(**common, logprob_kind=config.logprob_kind or "processed")
            return lambda name, url: SglangEngine(name, url, sglang)
        case "chat_prefix":
            kind, template = config.logprob_kind or "processed", config.template_options
            chat = ChatPrefixOptions(**common, logprob_kind=kind, template_options=template)
            return lambda name, url: ChatPrefixEngine(name, url, chat)
        case "openai":
            if encode is None:
                raise ConfigError("engine: openai is for pools with a tokenizer.", "Set another 'engine'.")
            text = OpenAIOptions(**common, encode=encode)
            return lambda name, url: OpenAIEngine(name, url, text)


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(f"environment variable {variable} (api_key_env) is not set.", "Export it, or drop the key.")
    if not key.isascii() or not key.isprintable() or " " in key:
        reason = "holds blanks or characters that a header cannot carry, perhaps a newline at its end"
        raise ConfigError(f"environment variable {variable} (api_key_env) {reason}.", "Export the key alone.")
    register_secret(key)  # here, so that every server that calls engines redacts it
    return key
