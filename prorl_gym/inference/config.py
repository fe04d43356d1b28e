"""Configuration of a pool of engines, and building one from it."""

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from prorl_gym.config import ConfigModel
from prorl_gym.errors import ConfigError
from prorl_gym.inference.admission import AdmissionOptions
from prorl_gym.inference.balance import PolicyName, make_policy
from prorl_gym.inference.behaviour import BehaviourRule, LogprobKind
from prorl_gym.inference.engines import Common, Encode, EngineKind, Particular, engine_maker
from prorl_gym.inference.failover import Failover
from prorl_gym.inference.http import trusting
from prorl_gym.inference.http_engine import HttpEngine
from prorl_gym.inference.pool import EnginePool, PoolOptions
from prorl_gym.inference.toolcalls.formats import ToolFormat
from prorl_gym.inference.transcript import Thinking
from prorl_gym.logs import register_secret

Seconds = Annotated[float, Field(gt=0)]


class InferenceConfig(ConfigModel):
    """One pool of engines that serve the same model."""

    engines: Annotated[list[str], Field(min_length=1)]
    """Base URLs of the servers, for example ``http://127.0.0.1:8000/v1``."""
    engine: EngineKind = "vllm"
    """What they are: ``vllm``; ``sglang``; ``chat_prefix`` (NeMo-RL's server); ``openai`` (text: never to train on)."""
    model: str
    """The name that the servers serve it under (``--served-model-name``)."""
    tokenizer: str
    """``small`` (ships with prorl-gym: for the demo), directory with ``tokenizer.json``, or hub ``owner/name``."""
    chat_template: Path | None = None
    """A Jinja file that replaces the tokenizer's own template."""
    template_options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Passed to the template by name, for example ``enable_thinking: false``."""
    tool_format: ToolFormat = "auto"
    """How the model writes tool calls. ``auto``: as the template does; ``declared``: as the tokenizer declares it."""
    thinking: Thinking = "keep"
    """At a new user turn: ``keep`` old thoughts, or do as the ``template`` does (then in a segment of its own)."""
    max_model_len: Annotated[int, Field(gt=0)] | None = None
    """Context in tokens; asked from the servers when it is left out."""
    vocab_size: Annotated[int, Field(gt=0)] | None = None
    """Ids at or above it are refused; the tokenizer's by default. Padded models can sample beyond the tokenizer's."""
    logprob_kind: LogprobKind | None = None
    """``raw``: before temperature, top-p and top-k; ``processed``: after. By default ``raw`` for ``vllm`` alone."""
    require_processed: bool = False
    """Refuse training calls whose raw log-probs are not those of the distribution that is sampled from."""
    routed_experts: bool = False
    """Keep which experts each token met, where ``vllm`` and ``sglang`` return them."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' key. The key itself is never written down."""
    ca_file: Path | None = None
    """Certificates (PEM) to trust for https, instead of the system's."""
    connect_seconds: Seconds = 10.0
    request_seconds: Seconds = 900.0
    """Longest time one call may take, waiting in the engine's queue included."""
    attempts: Annotated[int, Field(ge=1, le=16)] = 3
    """Engines that one call is tried on."""
    wait_seconds: Annotated[float, Field(ge=0)] = 30.0
    """Longest wait for an engine to recover when none is well."""
    balance: Literal[PolicyName, "pass_through"] = "cost"
    """Which engine serves a call (docs/balancing.md). ``pass_through``: the one address is an external router's."""
    admission: Literal["auto", "fixed"] = "auto"
    """How many rollouts talk to engines at once: what fits their caches, as they tell; or ``live_rollouts``."""
    live_rollouts: Annotated[int, Field(gt=0)] | None = None
    """The most, where it is ``fixed`` or no engine shows how large its cache is; all that are in RUN by default."""
    scrape_seconds: Seconds = 5.0
    """Between two looks at the engines' metrics."""
    salt_cache: bool = True
    """Give each policy version prefix caches of its own, on engines that know ``cache_salt`` (all but ``openai``)."""
    max_connections: Annotated[int, Field(gt=0)] = 1024
    """Of each engine."""
    priority_scheduling: bool = False
    """They run vLLM's ``--scheduling-policy priority``, SGLang's ``--enable-priority-scheduling``: evaluation first."""

    @field_validator("engines")
    @classmethod
    def _urls(cls, urls: list[str]) -> list[str]:
        normal = [normal_url(url) for url in urls]
        if len(set(normal)) != len(normal):
            raise ValueError("an engine is named twice")
        return normal

    @model_validator(mode="after")
    def _one_router(self) -> Self:
        if self.balance == "pass_through" and len(self.engines) != 1:
            raise ValueError("balance: pass_through is for one address, that of a router")
        return self


def normal_url(url: str) -> str:
    """Return a base URL without a final slash and with a path (``/v1`` by default).

    Raises:
        ValueError: it is no http(s) address, or it carries a password, a query or a fragment.
    """
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
    """Make a pool. Nothing is connected yet; ``EnginePool.check`` asks the engines.

    Args:
        name: of the pool (``policy``, ``judge``).
        config: see there.
        vocab_size: of the tokenizer.
        version: policy version to begin with.
        encode: of the tokenizer; engines that answer in text need it.
        control_ids: control tokens of the tokenizer: a turn may end with any of them.

    Raises:
        ConfigError: the variable named by ``api_key_env`` is not set, ``ca_file`` is none, ``encode`` is missing.
    """
    pool = EnginePool(
        name,
        policy=make_policy("round_robin" if config.balance == "pass_through" else config.balance),
        failover=Failover(attempts=config.attempts, wait_seconds=config.wait_seconds),
        max_model_len=config.max_model_len,
        version=version,
        options=PoolOptions(
            scrape_seconds=config.scrape_seconds,
            salted=config.salt_cache and config.engine != "openai",
            router=config.balance == "pass_through",
            admission=AdmissionOptions(live=config.live_rollouts, follow=config.admission == "auto"),
        ),
    )
    make = maker(name, config, vocab_size=vocab_size, encode=encode, control_ids=control_ids)
    for index, url in enumerate(config.engines):
        pool.add(make(f"{name}-{index}", url))
    return pool


def maker(
    pool: str,
    config: InferenceConfig,
    *,
    vocab_size: int,
    encode: Encode | None = None,
    control_ids: Collection[int] = (),
) -> Callable[[str, str], HttpEngine]:
    """Return what makes an engine of such a pool out of a name and a base URL; for arguments and errors see there.

    Args:
        pool: its name.
        config: see ``build_pool``.
        vocab_size: see ``build_pool``.
        encode: see ``build_pool``.
        control_ids: see ``build_pool``.
    """
    return engine_maker(
        config.engine,
        Common(
            model=config.model,
            vocab_size=config.vocab_size or vocab_size,
            control_ids=frozenset(control_ids),
            connect_seconds=config.connect_seconds,
            request_seconds=config.request_seconds,
            max_connections=config.max_connections,
            api_key=_api_key(config.api_key_env),
            tls=None if config.ca_file is None else trusting(config.ca_file),
            rule=BehaviourRule(pool, require_processed=config.require_processed),
        ),
        Particular(
            config.logprob_kind, config.priority_scheduling, config.routed_experts, config.template_options, encode
        ),
    )


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(f"environment variable {variable} (api_key_env) is not set.", "Export it, or drop the key.")
    if not key.isascii() or not key.isprintable() or " " in key:
        reason = "holds blanks or characters that a header cannot carry, perhaps a newline at its end"
        raise ConfigError(f"environment variable {variable} (api_key_env) {reason}.", "Export the key alone.")
    register_secret(key)  # here, so that no server that calls engines can forget it
    return key
